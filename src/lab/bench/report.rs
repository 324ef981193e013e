//! Results: durations by name, as a table, as a JSON document and as a chart. All verbs have the
//! same form.

use super::plot::{self, Axis, Line, Scale};
use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::Screen;
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, show};
use hdrhistogram::Histogram;

use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// The longest duration; longer ones are recorded as this one.
const LONGEST: Duration = Duration::from_secs(60);
/// Points of a curve per nine.
const POINTS: f64 = 40.0;

/// Durations of one kind.
#[derive(Debug)]
pub(super) struct Durations(Histogram<u64>);

impl Durations {
    /// No durations yet.
    pub(super) fn new() -> Result<Self, Failed> {
        // Three significant digits.
        let bounds = Histogram::new_with_bounds(1, nanoseconds(LONGEST), 3);
        bounds.map(Durations).map_err(|error| Failed::new(FAILURE, error))
    }

    /// Adds one duration.
    pub(super) fn add(&mut self, took: Duration) {
        self.0.saturating_record(nanoseconds(took));
    }

    /// Number of durations.
    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The quantile in µs, to a tenth.
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a call")]
    pub(super) fn us(&self, quantile: f64) -> f64 {
        tenth(self.0.value_at_quantile(quantile) as f64 / 1e3)
    }

    /// The JSON form of a distribution; without any duration the quantiles are null.
    pub(super) fn document(&self) -> Value {
        let us = |quantile| (self.count() > 0).then(|| self.us(quantile));
        json!({
            "count": self.count(),
            "p50_us": us(0.5),
            "p90_us": us(0.9),
            "p99_us": us(0.99),
            "p999_us": us(0.999),
            "max_us": us(1.0),
        })
    }

    /// Percentiles in µs, from the smallest to the largest.
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    fn curve(&self) -> Vec<(f64, f64)> {
        let nines = (self.count().max(1) as f64).log10();
        let mut points = Vec::new();
        let mut point = 0.0;
        while point < nines * POINTS {
            let quantile = 1.0 - 10_f64.powf(-point / POINTS);
            points.push((quantile * 100.0, self.us(quantile)));
            point += 1.0;
        }
        // The largest of n is at the percentile where one of n remains.
        points.push(((1.0 - 10_f64.powf(-nines)) * 100.0, self.us(1.0)));
        points
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The result of a verb.
#[derive(Debug)]
pub(super) struct Report {
    /// Heading of the column of names.
    pub(super) heading: &'static str,
    /// Title of the chart, as a sentence.
    pub(super) title: String,
    /// The document of `-o json`.
    pub(super) document: Value,
    /// Durations and their names, the measured one before its floors.
    pub(super) rows: Vec<(&'static str, Durations)>,
    /// Sentences that compare the figures.
    pub(super) remarks: Vec<String>,
}

impl Report {
    /// Prints the result, and draws the chart if requested.
    pub(super) fn show(&self, global: &Global, plot: Option<&Path>) -> Result<(), Failed> {
        if let Some(path) = plot {
            std::fs::write(path, self.figure()).map_err(|error| cannot_draw(path, &error))?;
        }
        show(global.output, &self.document, |_| Text::document(&self.table()))
    }

    fn table(&self) -> String {
        let mut table = Table::new(&[self.heading, "count", "p50", "p90", "p99", "p99.9", "max"]);
        for (name, durations) in self.rows.iter().filter(|(_, durations)| durations.count() > 0) {
            let quantiles =
                [0.5, 0.9, 0.99, 0.999, 1.0].map(|quantile| span(durations.us(quantile)));
            table.row(
                [(*name).to_owned(), durations.count().to_string()].into_iter().chain(quantiles),
            );
        }
        let remarks: String = self.remarks.iter().map(|remark| format!("{remark}\n")).collect();
        let text = format!("{}\n{remarks}", table.on(Screen::get()));
        if Screen::get().ascii { in_ascii(&text) } else { text }
    }

    /// The percentiles of all durations, as a chart.
    fn figure(&self) -> String {
        let rows = self.rows.iter().filter(|(_, durations)| durations.count() > 0);
        let longest = rows.clone().map(|(_, durations)| durations.us(1.0)).fold(0.0, f64::max);
        let (unit, of) = if longest >= 1e5 { ("ms", 1e3) } else { ("µs", 1.0) };
        let scaled = |durations: &Durations| {
            durations.curve().into_iter().map(|(x, us)| (x, us / of)).collect()
        };
        let lines: Vec<Line> = rows
            .map(|(name, durations)| Line { name: (*name).to_owned(), points: scaled(durations) })
            .collect();
        let (x, y) = (
            Axis { label: "percentile", scale: Scale::Percentiles },
            Axis { label: unit, scale: Scale::Logarithmic },
        );
        plot::svg(&self.title, x, y, &lines)
    }
}

/// Replaces the two characters that ASCII lacks; the columns stay aligned.
fn in_ascii(text: &str) -> String {
    text.replace('µ', "u").replace('×', "x")
}

/// Checks before the measurement that the chart can be written.
pub(super) fn prepare(plot: Option<&Path>) -> Result<(), Failed> {
    plot.map_or(Ok(()), |path| std::fs::write(path, "").map_err(|error| cannot_draw(path, &error)))
}

fn cannot_draw(path: &Path, error: &std::io::Error) -> Failed {
    Failed::new(FAILURE, format_args!("cannot write the figure to `{}`: {error}", path.display()))
}

/// Microseconds in a suitable unit.
pub(super) fn span(us: f64) -> String {
    match us {
        ..1e3 => format!("{us:.1} µs"),
        ..1e6 => format!("{:.2} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}

/// Rounds to one decimal digit.
pub(super) fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// The quotient to two decimal digits; null if the floor is 0.
pub(super) fn ratio(value: f64, floor: f64) -> Value {
    if floor > 0.0 { json!((value / floor * 100.0).round() / 100.0) } else { Value::Null }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::markup::elements;

    fn thousand() -> Durations {
        let mut durations = Durations::new().unwrap();
        (1..=1000).for_each(|us| durations.add(Duration::from_micros(us)));
        durations
    }

    #[test]
    fn a_distribution_has_the_same_fields_everywhere() {
        let wanted = r#"{"count":1000,"max_us":1000.4,"p50_us":500.2,"p90_us":900.1,"p999_us":999.4,"p99_us":990.2}"#;
        assert_eq!(thousand().document().to_string(), wanted);
        let none = Durations::new().unwrap().document();
        assert_eq!((&none["count"], &none["max_us"]), (&json!(0), &Value::Null));
    }

    #[test]
    fn the_table_and_the_figure_omit_empty_rows() {
        let rows = vec![("Allocate", thousand()), ("empty call", Durations::new().unwrap())];
        let (title, remarks) = ("Allocate, 1000 calls".to_owned(), vec!["a remark".to_owned()]);
        let report = Report { heading: "call", title, document: Value::Null, rows, remarks };
        let wanted = "CALL      COUNT  P50       P90       P99       P99.9     MAX\n\
                      Allocate  1000   500.2 µs  900.1 µs  990.2 µs  999.4 µs  1.00 ms\n\na remark\n";
        assert_eq!(report.table(), wanted);
        let figure = report.figure();
        elements(&figure);
        assert!(
            figure.contains("Allocate, 1000 calls")
                && figure.contains(">99.9</text>")
                && !figure.contains("empty call")
        );
    }

    #[test]
    fn a_curve_rises_to_the_largest() {
        let curve = thousand().curve();
        assert!(curve.is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1), "{curve:?}");
        let (last, largest) = curve.last().unwrap();
        assert!((last - 99.9).abs() < 1e-6 && (largest - 1000.4).abs() < 1e-6, "{last} {largest}");
    }
}
