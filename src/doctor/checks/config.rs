//! The configuration: whether it is valid, and whether the daemon uses it.

use super::super::codes::{CONFIG_CHANGED, CONFIG_INVALID};
use super::super::{Facts, Finding};
use super::{list, number, text};
use crate::domain::Timestamp;
use serde_json::Value;

/// Tolerance: a file modified within this time after the start may be the version that the daemon
/// read.
const START_MILLIS: u64 = 2000;

pub(super) fn valid(facts: &Facts) -> Option<Vec<Finding>> {
    let Err(problem) = facts.config.as_ref()? else { return Some(Vec::new()) };
    let todo =
        "fix the error; docs/configure.md lists every key, and this command reports every error";
    Some(vec![
        Finding::new(&CONFIG_INVALID, "the configuration", problem.clone(), todo)
            .by("holdfast config check"),
    ])
}

pub(super) fn in_force(facts: &Facts) -> Option<Vec<Finding>> {
    let status = facts.status()?;
    let wants = facts.config.as_ref()?.as_ref().ok()?;
    let on = wants
        .files
        .first()
        .map_or_else(|| "the configuration".to_owned(), |file| file.display().to_string());
    let restart = ("restart the daemon; no pod loses its device", "systemctl restart holdfast");
    let reload = ("reload the daemon's configuration (SIGHUP)", "systemctl reload holdfast");
    let differs = |found: String, (todo, by): (&str, &str)| {
        Some(vec![Finding::new(&CONFIG_CHANGED, &on, found, todo).by(by)])
    };
    // A daemon that can reload reports the configuration that it has loaded.
    if let Some(loaded) = status.get("config").filter(|config| config.is_object()) {
        let waiting: Vec<&str> =
            list(loaded, "needs_restart").iter().filter_map(Value::as_str).collect();
        return match (text(loaded, "error"), waiting.as_slice()) {
            ("", []) if text(loaded, "hash") == wants.hash => Some(Vec::new()),
            ("", []) => differs(
                format!(
                    "the files differ from those that the daemon loaded at {}",
                    text(loaded, "loaded_at")
                ),
                reload,
            ),
            ("", keys) => differs(
                format!(
                    "the daemon has loaded it, but these keys take effect after a restart: {}",
                    keys.join(", ")
                ),
                restart,
            ),
            (why, _) => differs(
                format!(
                    "the daemon rejected the files and keeps the previous configuration: {why}"
                ),
                reload,
            ),
        };
    }
    let started = Timestamp(
        facts.now.wall.0.saturating_sub(number(status, "uptime_seconds").saturating_mul(1000)),
    );
    let changed_at =
        wants.changed_at.filter(|changed_at| changed_at.0 > started.0.saturating_add(START_MILLIS));
    changed_at.map_or_else(
        || Some(Vec::new()),
        |changed_at| {
            let found = format!(
                "it was changed at {}, after the daemon was started at {}",
                changed_at.to_seconds(),
                started.to_seconds()
            );
            differs(found, restart)
        },
    )
}
