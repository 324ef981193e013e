//! `holdfast bench restart`: restarts a kubelet with Holdfast and one with a minimal plugin, in
//! turns.
//!
//! Both plugins have the same lists, and both kubelets run the same code. All four are threads of
//! one process. A measurement starts just before `kubelet.sock` is created and ends when the list
//! of the last resource arrives.

use super::instance::{Common, Instance, Offer};
use super::kubelet_run::{KubeletRun, Recovery};
use super::minimal_plugin::MinimalPlugin;
use super::report::{Durations, Report, ratio, span};
use crate::console::Global;
use crate::console::exit::Failed;
use crate::console::progress::Progress;
use crate::domain::Durability;
use clap::Args;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// Maximum time until a plugin has registered again.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Time between two kubelets: long enough for a plugin to notice.
const DOWNTIME: Duration = Duration::from_millis(100);
/// Pause after each restart. Holdfast's settling Register happens within it, and must not disturb
/// the measurement of the other plugin.
const PAUSE: Duration = Duration::from_secs(1);

/// Size of the measurement.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Number of measured restarts
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    rounds: u64,
    /// Number of resources
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    resources: u64,
    /// Number of devices of each resource
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=512))]
    devices: u64,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let offer = Offer { resources: options.resources, files: options.devices, replicas: 1 };
    let instance =
        Instance::create(options.common.place(&global.state_dir)?, Durability::PowerLoss, offer)?;
    let (ours, theirs) =
        (instance.kubelet_dir().join("device-plugins"), instance.kubelet_dir().join("bare"));
    std::fs::create_dir(&theirs)?;
    let measured = options.clone();
    let report =
        instance.measure_with_daemon(Box::new(move || measure(&ours, &theirs, &measured)))?;
    report.show(global, options.common.plot.as_deref())
}

/// Results of one of the two plugins.
struct Side {
    registered: Durations,
    listed: Durations,
}

impl Side {
    fn new() -> Result<Self, Failed> {
        Ok(Side { registered: Durations::new()?, listed: Durations::new()? })
    }
}

fn measure(ours: &Path, theirs: &Path, options: &Options) -> Result<Report, Failed> {
    let mut own = KubeletRun::begin(ours)?;
    let (lists, _) = own.lists(options.resources, BACK_WITHIN)?;
    let lists =
        lists.into_iter().map(|(resource, first_list)| (resource, first_list.devices)).collect();
    let plugin = MinimalPlugin::start(theirs, lists)?;
    let mut other = KubeletRun::begin(theirs)?;
    other.lists(options.resources, BACK_WITHIN)?;
    std::thread::sleep(PAUSE);

    let (mut holdfast, mut floor) = (Side::new()?, Side::new()?);
    let mut progress = Progress::new("restarts measured");
    let number = |count| usize::try_from(count).unwrap_or(usize::MAX);
    for round in 0..options.rounds {
        progress.at(number(round), Some(number(options.rounds)));
        for (side, kubelet_run, dir) in
            [(&mut holdfast, &mut own, ours), (&mut floor, &mut other, theirs)]
        {
            let Recovery { registered, listed } = restart(kubelet_run, dir, options.resources)?;
            side.registered.add(registered);
            side.listed.add(listed);
        }
    }
    drop((own, other, plugin));
    Ok(report(options, holdfast, floor))
}

/// Kills a kubelet and starts the next one in its place.
fn restart(kubelet_run: &mut KubeletRun, dir: &Path, resources: u64) -> Result<Recovery, Failed> {
    kubelet_run.end();
    std::thread::sleep(DOWNTIME);
    *kubelet_run = KubeletRun::begin(dir)?;
    let (_, recovery) = kubelet_run.lists(resources, BACK_WITHIN)?;
    std::thread::sleep(PAUSE);
    Ok(recovery)
}

fn report(options: &Options, holdfast: Side, floor: Side) -> Report {
    let Options { rounds, resources, devices, .. } = options;
    let of = |quantile| (holdfast.listed.us(quantile), floor.listed.us(quantile));
    let ((p50, floor50), (p99, floor99)) = (of(0.5), of(0.99));
    let document = json!({
        "rounds": rounds,
        "resources": resources,
        "devices": devices,
        "registered": holdfast.registered.document(),
        "listed": holdfast.listed.document(),
        "floor": { "registered": floor.registered.document(), "listed": floor.listed.document() },
        "ratio": { "listed_p50": ratio(p50, floor50), "listed_p99": ratio(p99, floor99) },
    });
    let title = format!(
        "Restart of a kubelet: {rounds} rounds, {resources} × {devices} devices, until the last resource is back"
    );
    let remarks = vec![
        title.clone(),
        format!(
            "lists: p50 {} for Holdfast, {} for the minimal plugin, {:.2} ×; p99 {} and {}, {:.2} ×",
            span(p50),
            span(floor50),
            p50 / floor50,
            span(p99),
            span(floor99),
            p99 / floor99
        ),
    ];
    let rows = vec![
        ("Holdfast: Register", holdfast.registered),
        ("Holdfast: first list", holdfast.listed),
        ("minimal plugin: Register", floor.registered),
        ("minimal plugin: first list", floor.listed),
    ];
    Report { heading: "since the socket", title, document, rows, remarks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn the_document_has_the_floor_and_the_measurement() {
        let side = |us: u64| {
            let mut side = Side::new().unwrap();
            side.registered.add(Duration::from_micros(us));
            side.listed.add(Duration::from_micros(2 * us));
            side
        };
        let report = report(&Line::parse_from(["restart"]).options, side(1500), side(1000));
        let document = &report.document;
        assert_eq!(
            [&document["rounds"], &document["resources"], &document["devices"]],
            [&json!(50), &json!(1), &json!(8)]
        );
        assert_eq!(document["ratio"], json!({ "listed_p50": 1.5, "listed_p99": 1.5 }));
        for distribution in [
            &document["registered"],
            &document["listed"],
            &document["floor"]["registered"],
            &document["floor"]["listed"],
        ] {
            assert_eq!(distribution["count"], 1);
        }
        assert_eq!(
            report.remarks[1],
            "lists: p50 3.00 ms for Holdfast, 2.00 ms for the minimal plugin, 1.50 ×; p99 3.00 ms \
             and 2.00 ms, 1.50 ×"
        );
    }
}
