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
    let todo = "mend what the sentence names; docs/configure.md has every key, and this command says every mistake";
    Some(vec![Finding::new(&CONFIG_INVALID, "the configuration", problem.clone(), todo).by("holdfast config check")])
}

pub(super) fn in_force(facts: &Facts) -> Option<Vec<Finding>> {
    let status = facts.status()?;
    let wants = facts.config.as_ref()?.as_ref().ok()?;
    let on = wants.files.first().map_or_else(|| "the configuration".to_owned(), |file| file.display().to_string());
    let restart = ("restart the daemon, which costs no pod its device", "systemctl restart holdfast");
    let reload = ("have the daemon read its files (SIGHUP)", "systemctl reload holdfast");
    let differs = |found: String, (todo, by): (&str, &str)| Some(vec![Finding::new(&CONFIG_CHANGED, &on, found, todo).by(by)]);
    // A daemon that can reload reports the configuration that it has loaded.
    if let Some(loaded) = status.get("config").filter(|config| config.is_object()) {
        let waiting: Vec<&str> = list(loaded, "needs_restart").iter().filter_map(Value::as_str).collect();
        return match (text(loaded, "error"), waiting.as_slice()) {
            ("", []) if text(loaded, "hash") == wants.hash => Some(Vec::new()),
            ("", []) => {
                differs(format!("the files are others than those that the daemon has loaded at {}", text(loaded, "loaded_at")), reload)
            }
            ("", keys) => {
                differs(format!("the daemon has loaded it, and these keys count from its next start on: {}", keys.join(", ")), restart)
            }
            (why, _) => differs(format!("the daemon could not take what the files say, and goes on with what it had: {why}"), reload),
        };
    }
    let started = Timestamp(facts.now.wall.0.saturating_sub(number(status, "uptime_seconds").saturating_mul(1000)));
    let changed_at = wants.changed_at.filter(|changed_at| changed_at.0 > started.0.saturating_add(START_MILLIS));
    changed_at.map_or_else(
        || Some(Vec::new()),
        |changed_at| {
            let found = format!("it was changed at {}, and the daemon was started at {}", changed_at.to_seconds(), started.to_seconds());
            differs(found, restart)
        },
    )
}
