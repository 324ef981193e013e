//! `holdfast status`: the running daemon at a glance.

use super::exit::{FAILURE, Failed};
use super::table::Table;
use super::{Global, block_on, device, show};
use crate::app::{ConfigReport, ControlError, DeviceReport, ResourceReport, Status, control_get};
use crate::domain::{HookState, Kept, OwedHook};
use std::time::Duration;

/// Asks the daemon and prints its answer.
///
/// # Errors
/// When no daemon runs.
pub fn run(global: &Global) -> Result<(), Failed> {
    let asked = block_on(control_get(&global.run_dir, "/v1/status"))?;
    let status: Status = asked.map_err(|error: ControlError| match error {
        ControlError::Absent { .. } => Failed::new(FAILURE, format_args!("{error}; start it with `holdfast run`, or name its `--run-dir`")),
        ControlError::Failed { .. } => Failed::new(FAILURE, error),
    })?;
    show(global.output, &status, text)
}

fn text(status: &Status) -> String {
    let uptime = humantime::format_duration(Duration::from_secs(status.uptime_seconds));
    let ready = if status.ready { "ready" } else { "not ready yet" };
    let kubelet = if status.kubelet.is_some() { "present" } else { "absent" };
    let mut table = Table::new(&["RESOURCE", "REGISTERED", "DEVICES", "HEALTHY", "HELD", "API", "LAST REGISTRATION"]);
    let mut problems = String::new();
    for ResourceReport { name, registered, devices, healthy, held, problem, disagreement, last_registration_ms, api_version } in
        &status.resources
    {
        table.row([
            name.clone(),
            if *registered { "yes" } else { "no" }.into(),
            devices.to_string(),
            healthy.to_string(),
            held.to_string(),
            api_version.clone().unwrap_or_else(|| "-".into()),
            last_registration_ms.map_or_else(|| "-".into(), |ms| format!("{ms:.1} ms")),
        ]);
        for problem in problem.iter().chain(disagreement) {
            problems += &format!("\n{name}: {problem}\n");
        }
    }
    let ailing: Vec<&DeviceReport> = status.ailing.iter().collect();
    if !ailing.is_empty() {
        problems += &format!("\n{}", device::table(&ailing));
    }
    for (source, why) in &status.signals_off {
        problems += &format!("\nthe signal {source} is off: {why}\n");
    }
    for OwedHook { resource, device, state, .. } in &status.hooks {
        problems += &match state {
            HookState::Failed { tries, why, .. } => {
                format!("\n{resource}: device {device} is unhealthy, since the hook after its release has failed {tries} times: {why}\n")
            }
            HookState::Due | HookState::Done => format!("\n{resource}: device {device} waits for the hook after its release\n"),
        };
    }
    if let Some(error) = &status.config.error {
        problems += &format!("\nthe last good configuration runs, since the files are not valid: {error}\n");
    }
    if !status.config.needs_restart.is_empty() {
        problems += &format!("\nneeds a restart to count: {}\n", status.config.needs_restart.join(", "));
    }
    if let Some(recovery) = &status.recovery {
        problems += &format!("\nthe ledger was damaged when the daemon started: {recovery}\n");
    }
    let Kept { journal, database, not_durable } = status.ledger;
    if !journal {
        problems += &format!("\nthe ledger cannot be written; {not_durable} answers of meanwhile are in memory only\n");
    } else if !database {
        problems += "\nthe ledger's second copy is not kept at present\n";
    }
    let ConfigReport { source, generation, loaded_at, .. } = &status.config;
    let config = format!("configuration {} of {}, generation {generation}", source.display(), loaded_at.to_seconds());
    format!("holdfast {}, {ready}, up {uptime}; kubelet {kubelet}\n{config}\n\n{table}{problems}", status.version)
}
