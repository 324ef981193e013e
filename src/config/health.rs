//! `[health]` and `[nvidia] events`: the policy of device health.

use super::ConfigError;
use super::error::hidden;
use super::fragments;
use crate::domain::HealthPolicy;
use std::time::Duration;

/// The shortest poll interval. Anything that must be known faster arrives as an event.
const POLL_MIN: Duration = Duration::from_secs(1);
/// The longest poll interval. The patience of a soft failure is at most 60 s (`Reason::timings`).
/// Rarer polls could not show that the failure lasted.
const POLL_MAX: Duration = Duration::from_secs(60);

pub(super) fn health(
    health: &fragments::Health,
    nvidia: &fragments::Nvidia,
) -> Result<HealthPolicy, ConfigError> {
    let usual = HealthPolicy::default();
    let poll = |text: &String| {
        let problem = || {
            ConfigError::new(format!(
                "`health.poll` is `{}`, but must be a time from `1s` to `60s`",
                hidden(text)
            ))
        };
        humantime::parse_duration(text)
            .ok()
            .filter(|poll| (POLL_MIN..=POLL_MAX).contains(poll))
            .ok_or_else(problem)
    };
    let ignored = health.ignore.clone().unwrap_or_default();
    if let Some(reason) = ignored.iter().find(|reason| reason.timings().is_presence()) {
        return Err(ConfigError::new(format!(
            "`health.ignore` has `{reason}`, but no container can use a device with that failure; \
             only list failures with which a device is usable"
        )));
    }
    Ok(HealthPolicy {
        poll: health.poll.as_ref().map_or(Ok(usual.poll), poll)?,
        fatal_xids: health.fatal_xids.clone().unwrap_or(usual.fatal_xids),
        ignored,
        at_kubelet_start: health.at_kubelet_start.unwrap_or_default(),
        nvml_events: nvidia.events.unwrap_or(usual.nvml_events),
    })
}
