//! Rows of figures: a table for people, objects for programs, lines of a chart.

use super::plot::{Axis, Line, svg};
use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::Screen;
use crate::console::table::Table;
use serde_json::{Map, Value, json};
use std::path::Path;

/// One kind of figure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    /// Its key in the document, with the unit.
    pub(super) key: &'static str,
    /// Its heading in the table.
    pub(super) heading: &'static str,
    /// Number of decimal digits; 0 for counts.
    pub(super) digits: usize,
}

/// A column; see [`Column`].
pub(super) const fn column(key: &'static str, heading: &'static str, digits: usize) -> Column {
    Column { key, heading, digits }
}

/// The figures. An unknown one is NaN: `null` in JSON, `-` in the table.
#[derive(Debug, Clone)]
pub(super) struct Measurements {
    columns: &'static [Column],
    rows: Vec<Vec<f64>>,
}

impl Measurements {
    pub(super) fn new(columns: &'static [Column]) -> Self {
        Measurements { columns, rows: Vec::new() }
    }

    /// Adds a row, with its figures in the order of the columns.
    pub(super) fn add(&mut self, row: &[f64]) {
        self.rows.push(row.to_vec());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All figures of a column.
    pub(super) fn all(&self, key: &str) -> Vec<f64> {
        let place = self.columns.iter().position(|column| column.key == key);
        self.rows.iter().filter_map(|row| row.get(place?).copied()).collect()
    }

    pub(super) fn json(&self) -> Value {
        let value = |column: &Column, figure: f64| match column.digits {
            _ if !figure.is_finite() => Value::Null,
            0 => json!(whole(figure)),
            digits => json!(rounded(figure, digits)),
        };
        let object = |row: &Vec<f64>| {
            self.columns
                .iter()
                .zip(row)
                .map(|(column, figure)| (column.key.to_owned(), value(column, *figure)))
                .collect::<Map<_, _>>()
        };
        self.rows.iter().map(|row| Value::Object(object(row))).collect()
    }

    pub(super) fn table(&self) -> String {
        let headings: Vec<&str> = self.columns.iter().map(|column| column.heading).collect();
        let mut table = Table::new(&headings);
        for row in &self.rows {
            let cell = |(column, figure): (&Column, &f64)| match figure.is_finite() {
                true => format!("{figure:.*}", column.digits),
                false => String::new(),
            };
            table.row(self.columns.iter().zip(row).map(cell));
        }
        table.on(Screen::get()).to_string()
    }

    /// At most `most` of the rows, evenly spaced, with the last one among them.
    pub(super) fn thinned(&self, most: usize) -> Measurements {
        let every = self.rows.len().div_ceil(most).max(1);
        let rows = self.rows.iter().rev().step_by(every).rev().cloned().collect();
        Measurements { columns: self.columns, rows }
    }

    /// Draws columns over another one; `of` contains the key and the name of each line.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn draw(
        &self,
        file: &Path,
        title: &str,
        x: (&str, Axis<'_>),
        y: Axis<'_>,
        of: &[(&str, &str)],
    ) -> Result<(), Failed> {
        let across = self.all(x.0);
        let line = |(key, name): &(&str, &str)| Line {
            name: (*name).to_owned(),
            points: across
                .iter()
                .copied()
                .zip(self.all(key))
                .filter(|(_, value)| value.is_finite())
                .collect(),
        };
        let lines: Vec<Line> = of.iter().map(line).collect();
        let written = std::fs::write(file, svg(title, x.1, y, &lines));
        written.map_err(|error| {
            Failed::new(FAILURE, format_args!("cannot write `{}`: {error}", file.display()))
        })
    }
}

/// The quantile of figures: the smallest figure that at least this fraction of them does not
/// exceed. NaN if there are none.
pub(super) fn quantile(figures: &[f64], quantile: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = whole((quantile * number(sorted.len())).ceil()).max(1);
    usize::try_from(rank - 1).ok().and_then(|rank| sorted.get(rank)).copied().unwrap_or(f64::NAN)
}

/// A count as a figure.
#[expect(clippy::cast_precision_loss, reason = "nothing that is counted here reaches 2^53")]
pub(super) fn number(count: usize) -> f64 {
    count as f64
}

#[expect(clippy::cast_possible_truncation, reason = "figures are far from the end of an i64")]
fn whole(figure: f64) -> i64 {
    figure.round() as i64
}

fn rounded(figure: f64, digits: usize) -> f64 {
    let power = 10f64.powi(i32::try_from(digits).unwrap_or(0));
    (figure * power).round() / power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_an_object_and_a_line_of_the_table() {
        const COLUMNS: [Column; 3] = [
            column("functions", "functions", 0),
            column("p50_ms", "p50 ms", 2),
            column("us", "µs", 1),
        ];
        let mut measurements = Measurements::new(&COLUMNS);
        measurements.add(&[560.0, 1.234_5, f64::NAN]);
        assert_eq!(
            measurements.json().to_string(),
            r#"[{"functions":560,"p50_ms":1.23,"us":null}]"#
        );
        let cells: Vec<String> = measurements
            .table()
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            cells,
            ["FUNCTIONS P50 MS µS".replace("µS", &"µs".to_uppercase()), "560 1.23 -".to_owned()]
        );
        assert_eq!(measurements.all("p50_ms"), [1.234_5]);
    }

    #[test]
    fn a_quantile_is_one_of_the_figures() {
        let figures: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|of| quantile(&figures, of)),
            [1.0, 50.0, 99.0, 100.0]
        );
        assert_eq!(quantile(&[3.0], 0.99), 3.0);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
