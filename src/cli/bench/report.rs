//! What was measured, as a JSON document and as a table.

use super::super::exit::{FAILURE, Failed};
use super::super::table::Table;
use crate::domain::Durability;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::Duration;

/// Durations of one kind of call.
#[derive(Debug)]
pub(super) struct Durations(Histogram<u64>);

impl Durations {
    fn new() -> Result<Self, Failed> {
        // To three digits; nothing that is measured here takes a minute.
        let bounds = Histogram::new_with_bounds(1, Duration::from_secs(60).as_nanos().try_into().unwrap_or(u64::MAX), 3);
        bounds.map(Durations).map_err(|error| Failed::new(FAILURE, error))
    }

    pub(super) fn add(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// The quantile in µs, to a tenth.
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a call")]
    fn us(&self, quantile: f64) -> f64 {
        tenth(self.0.value_at_quantile(quantile) as f64 / 1e3)
    }
}

/// Everything that one run measured.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) allocate: Durations,
    pub(super) grpc_empty: Durations,
    pub(super) append_fdatasync: Durations,
    /// The time in which Allocates were made.
    pub(super) allocating: Duration,
    /// The time in which as many empty calls were made, as many of them at a time.
    pub(super) emptying: Duration,
}

impl Measured {
    pub(super) fn new() -> Result<Self, Failed> {
        let (allocate, grpc_empty, append_fdatasync) = (Durations::new()?, Durations::new()?, Durations::new()?);
        let (allocating, emptying) = (Duration::ZERO, Duration::ZERO);
        Ok(Measured { allocate, grpc_empty, append_fdatasync, allocating, emptying })
    }
}

/// The document of `bench allocate -o json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    calls: u64,
    concurrency: u64,
    durability: &'static str,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    per_second: f64,
    floor: Floor,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Floor {
    grpc_empty_p50_us: f64,
    /// Empty calls, as many at a time as Allocates.
    grpc_empty_per_second: f64,
    append_fdatasync_p50_us: f64,
}

impl Report {
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    pub(super) fn new(calls: u64, concurrency: u64, durability: Durability, measured: &Measured) -> Self {
        let allocate = &measured.allocate;
        Report {
            calls,
            concurrency,
            durability: durability.as_str(),
            p50_us: allocate.us(0.5),
            p90_us: allocate.us(0.9),
            p99_us: allocate.us(0.99),
            p999_us: allocate.us(0.999),
            max_us: allocate.us(1.0),
            per_second: tenth(calls as f64 / measured.allocating.as_secs_f64()),
            floor: Floor {
                grpc_empty_p50_us: measured.grpc_empty.us(0.5),
                grpc_empty_per_second: tenth(calls as f64 / measured.emptying.as_secs_f64()),
                append_fdatasync_p50_us: measured.append_fdatasync.us(0.5),
            },
        }
    }

    /// For people, with the one figure that tells how much of it is ours.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&["allocate", "p50", "p90", "p99", "p99.9", "max", "per second"]);
        let us = |us: f64| format!("{us:.1} µs");
        table.row([
            format!("{} calls, {} at a time, {}", self.calls, self.concurrency, self.durability),
            us(self.p50_us),
            us(self.p90_us),
            us(self.p99_us),
            us(self.p999_us),
            us(self.max_us),
            format!("{:.0}", self.per_second),
        ]);
        let Floor { grpc_empty_p50_us: grpc, grpc_empty_per_second: empty, append_fdatasync_p50_us: disk } = self.floor;
        let mut text = format!("{table}\nfloor of the same minute, p50: empty gRPC call {}, append + fdatasync {}\n", us(grpc), us(disk));
        if self.concurrency == 1 {
            let (ratio, target) = (self.p50_us / (grpc + disk), self.p50_us / (1.5 * disk + grpc));
            text.push_str(&format!("p50 is {ratio:.2} × the sum of both, {target:.2} × (1.5 × the disk + the call)\n"));
        } else {
            let share = 100.0 * self.per_second / empty;
            text.push_str(&format!(
                "empty gRPC calls, {} at a time: {empty:.0} per second; Allocates: {share:.0} % of that\n",
                self.concurrency
            ));
        }
        text
    }
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(concurrency: u64) -> Report {
        let mut measured = Measured::new().unwrap();
        (1..=1000).for_each(|us| measured.allocate.add(Duration::from_micros(us)));
        measured.grpc_empty.add(Duration::from_micros(50));
        measured.append_fdatasync.add(Duration::from_micros(200));
        measured.allocating = Duration::from_secs(2);
        measured.emptying = Duration::from_millis(250);
        Report::new(1000, concurrency, Durability::PowerLoss, &measured)
    }

    #[test]
    fn the_document_is_what_is_promised() {
        let wanted = concat!(
            r#"{"calls":1000,"concurrency":1,"durability":"power-loss","#,
            r#""p50_us":500.2,"p90_us":900.1,"p99_us":990.2,"p999_us":999.4,"max_us":1000.4,"per_second":500.0,"#,
            r#""floor":{"grpc_empty_p50_us":50.0,"grpc_empty_per_second":4000.0,"append_fdatasync_p50_us":200.1}}"#,
        );
        assert_eq!(serde_json::to_string(&report(1)).unwrap(), wanted);
    }

    #[test]
    fn the_table_compares_with_the_floor_where_that_means_something() {
        assert!(report(1).table().ends_with("p50 is 2.00 × the sum of both, 1.43 × (1.5 × the disk + the call)\n"));
        assert!(report(8).table().ends_with("empty gRPC calls, 8 at a time: 4000 per second; Allocates: 12 % of that\n"));
    }
}
