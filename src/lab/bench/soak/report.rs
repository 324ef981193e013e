//! The report of a soak: trends, the comparison of the holders, the plot and the table.

use super::super::holder_check::check_holders;
use super::super::measurements::Measurements;
use super::super::plot::{Axis, Scale};
use super::super::trend::Trend;
use super::Soak;
use crate::console::exit::{FAILURE, Failed};
use crate::console::text::Text;
use crate::console::{Global, show};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Maximum number of rows in the table.
const ROWS_MAX: usize = 24;

impl Soak<'_> {
    /// Compares, prints, and stops everything.
    pub(super) async fn finish(self, global: &Global) -> Result<(), Failed> {
        let (held, different) = check_holders(&self.node).await?;
        let panicked = self.node.kubelet.panicked();
        let trends = [
            ("anon_kib", "RssAnon", "KiB/h"),
            ("descriptors", "descriptors", "1/h"),
            ("threads", "threads", "1/h"),
        ]
        .map(|(key, name, unit)| (key, name, unit, trend(&self.measurements, key)));
        let faults: BTreeMap<&str, u64> =
            self.faults.iter().map(|(fault, count)| (fault.as_str(), *count)).collect();
        let document = json!({
            "schema": 1,
            "minutes": (self.began.elapsed().as_secs_f64() / 6.0).round() / 10.0,
            "seed": self.options.seed,
            "pods": self.made,
            "grants": self.grants,
            "rejected": self.rejected,
            "faults": faults,
            "lives": self.daemon_run,
            "trends_per_hour": trends.iter().map(|(key, _, _, trend)| ((*key).to_owned(), trend.map_or(Value::Null, Trend::json))).collect::<serde_json::Map<_, _>>(),
            "mappings": held,
            "differences": different,
            "kubelet_would_have_crashed": panicked,
            "samples": self.measurements.json(),
        });
        if let Some(file) = &self.options.plot {
            let axis = |label| Axis { label, scale: Scale::Linear };
            let lines = [("rss_kib", "resident"), ("anon_kib", "anonymous")];
            self.measurements.draw(
                file,
                "Memory of a daemon under load and faults",
                ("minute", axis("minutes")),
                axis("KiB"),
                &lines,
            )?;
        }
        show(global.output, &document, |_: &Value| {
            let mut text = self.measurements.thinned(ROWS_MAX).table();
            let of_faults: Vec<String> =
                faults.iter().map(|(name, count)| format!("{count} × {name}")).collect();
            let happened =
                if of_faults.is_empty() { "no faults".to_owned() } else { of_faults.join(", ") };
            text.push_str(&format!(
                "{} grants to {} pods, {} pods rejected; {happened}\n",
                self.grants, self.made, self.rejected
            ));
            for (_, name, unit, trend) in &trends {
                text.push_str(&trend.map_or_else(
                    || format!("{name}: too few samples for a trend\n"),
                    |trend| trend.in_words(name, unit),
                ));
            }
            text.push_str(&format!(
                "{held} holders compared with the ledger: {} differ\n",
                different.len()
            ));
            Text::document(&text)
        })?;
        self.node.stop().await?;
        if let Some(site) = panicked {
            return Err(Failed::new(
                FAILURE,
                format_args!("a real kubelet would have crashed {site}"),
            ));
        }
        match different.first() {
            None => Ok(()),
            Some(first) => Err(Failed::new(
                FAILURE,
                format_args!("{} holders differ from the kubelet: {first}", different.len()),
            )),
        }
    }
}

/// The trend of a column per hour, of the longest run without its first third.
pub(super) fn trend(measurements: &Measurements, key: &str) -> Option<Trend> {
    let (runs, minutes, figures) =
        (measurements.all("life"), measurements.all("minute"), measurements.all(key));
    let rows: Vec<_> = runs
        .iter()
        .zip(minutes.iter().zip(figures))
        .map(|(daemon_run, (minute, figure))| (*daemon_run, (minute / 60.0, figure)))
        .collect();
    let longest =
        rows.chunk_by(|one, next| one.0 == next.0).max_by_key(|daemon_run| daemon_run.len())?;
    let points: Vec<_> = longest.iter().skip(longest.len() / 3).map(|(_, point)| *point).collect();
    Trend::of(&points)
}
