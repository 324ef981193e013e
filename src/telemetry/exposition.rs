//! The text of `/metrics`: Prometheus' exposition format, version 0.0.4.

use super::table::{Metric, Row};
use crate::domain::printable;

/// A page while it is written. The format requires that all samples of one metric are consecutive.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
    last: Option<Metric>,
}

impl Page {
    /// One sample, with the values of the labels in the order of the table.
    pub fn sample(&mut self, metric: Metric, labels: &[&str], value: u64) {
        self.begin(metric);
        self.line(metric.row(), "", labels, None, value);
    }

    /// The header of a metric, once before its first sample.
    pub(super) fn begin(&mut self, metric: Metric) {
        if self.last != Some(metric) {
            self.last = Some(metric);
            let Row { name, kind, help, .. } = metric.row();
            self.text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.as_str()));
        }
    }

    /// One line. `bound` is the upper end of a histogram's bucket.
    pub(super) fn line(
        &mut self,
        row: &Row,
        suffix: &str,
        labels: &[&str],
        bound: Option<&str>,
        value: impl std::fmt::Display,
    ) {
        debug_assert_eq!(row.labels.len(), labels.len(), "the labels of {}", row.name);
        self.text.push_str(row.name);
        self.text.push_str(suffix);
        let pairs = row
            .labels
            .iter()
            .zip(labels)
            .map(|(name, value)| (*name, *value))
            .chain(bound.map(|bound| ("le", bound)));
        let mut before = '{';
        for (name, value) in pairs {
            self.text.push(before);
            self.text.push_str(name);
            self.text.push_str("=\"");
            self.push_escaped(value);
            self.text.push('"');
            before = ',';
        }
        if before == ',' {
            self.text.push('}');
        }
        self.text.push_str(&format!(" {value}\n"));
    }

    fn push_escaped(&mut self, value: &str) {
        // The format allows any character, but dashboards and alerts are shown in a browser or a
        // terminal.
        for c in printable(value).chars() {
            match c {
                '\\' => self.text.push_str("\\\\"),
                '"' => self.text.push_str("\\\""),
                c => self.text.push(c),
            }
        }
    }

    /// The whole text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_has_one_header_and_labels_are_escaped() {
        let mut page = Page::default();
        page.sample(Metric::Ready, &[], 1);
        page.sample(Metric::Devices, &["a.b/\"c\\\nd\u{1b}", "healthy"], 8);
        page.sample(Metric::Devices, &["a.b/c", "unhealthy"], 0);
        let text = page.into_text();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("# HELP")).collect();
        let wanted = [
            "# TYPE holdfast_ready gauge",
            "holdfast_ready 1",
            "# TYPE holdfast_devices gauge",
            r#"holdfast_devices{resource="a.b/\"c\\\\nd\\u{1b}",health="healthy"} 8"#,
            r#"holdfast_devices{resource="a.b/c",health="unhealthy"} 0"#,
        ];
        assert_eq!(lines, wanted);
    }
}
