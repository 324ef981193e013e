//! The configuration: whether it is valid, and whether it is what the daemon runs on.

use super::super::codes::{CONFIG_CHANGED, CONFIG_INVALID};
use super::super::{Facts, Finding};
use super::{number, text};
use crate::domain::Timestamp;
use serde_json::Value;

/// A file that was written while the daemon started may be the one that it read.
const START_MILLIS: u64 = 2000;

pub(super) fn valid(facts: &Facts) -> Option<Vec<Finding>> {
    let Err(problem) = facts.config.as_ref()? else { return Some(Vec::new()) };
    let todo = "mend what the sentence names; packaging/config.toml has every key";
    Some(vec![Finding::new(&CONFIG_INVALID, "the configuration", problem.clone(), todo).by("holdfast discover")])
}

pub(super) fn in_force(facts: &Facts) -> Option<Vec<Finding>> {
    let status = facts.status()?;
    let wants = facts.config.as_ref()?.as_ref().ok()?;
    let on = wants.files.first().map_or_else(|| "the configuration".to_owned(), |file| file.display().to_string());
    let todo = "restart the daemon, which costs no pod its device, or have it read its files where it can do that (SIGHUP)";
    let differs = |found: String| Some(vec![Finding::new(&CONFIG_CHANGED, &on, found, todo).by("systemctl restart holdfast")]);
    // What a daemon has loaded later than at its start it says itself.
    let loaded = status.get("config").filter(|config| config.is_object());
    if let Some(why) = loaded.map(|config| text(config, "error")).filter(|why| !why.is_empty()) {
        return differs(format!("the daemon could not take what the files say, and goes on with what it had: {why}"));
    }
    let started = Timestamp(facts.now.wall.0.saturating_sub(number(status, "uptime_seconds").saturating_mul(1000)));
    let loaded_at = loaded.and_then(|config| config.get("loaded_at")).and_then(timestamp).unwrap_or(started);
    let changed_at = wants.changed_at.filter(|changed_at| changed_at.0 > loaded_at.0.saturating_add(START_MILLIS));
    match changed_at {
        None => Some(Vec::new()),
        Some(changed_at) => {
            differs(format!("it was changed at {}, and the daemon has loaded it at {}", changed_at.to_seconds(), loaded_at.to_seconds()))
        }
    }
}

fn timestamp(value: &Value) -> Option<Timestamp> {
    humantime::parse_rfc3339(value.as_str()?).ok().map(Timestamp::from_system)
}
