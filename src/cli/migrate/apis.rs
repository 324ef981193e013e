//! `migrate status` and `migrate plan`: what the running daemon knows, and the output.

use super::steps::{Holding, Plan, Resource, State, steps};
use crate::admin::{ApiReport, ApisReport, Status, control_get};
use crate::cli::document::holder_in_words;
use crate::cli::explain::{line, narrow};
use crate::cli::source;
use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::Screen;
use crate::console::text::Text;
use crate::console::{Global, block_on, show};
use crate::domain::{Api, DeviceId, Grant, MissingProof, PendingRelease};
use clap::Args;
use std::collections::BTreeMap;

/// What to plan.
#[derive(Debug, Clone, Args)]
pub struct PlanOptions {
    /// The API that gives the devices to pods at the end
    #[arg(long, value_name = "API", value_parser = ["plugin", "dra", "both"])]
    to: String,
    /// The resources; all if none is named
    #[arg(value_name = "RESOURCE")]
    resources: Vec<String>,
}

/// Prints which API gives the devices of each resource, and what the next step waits for.
///
/// # Errors
/// When no daemon runs.
pub(super) fn status(global: &Global) -> Result<(), Failed> {
    show(global.output, &ask(global)?, |state| status_text(state, Screen::get()))
}

/// Prints the steps to another API.
///
/// # Errors
/// When no daemon runs, or when it does not have a named resource.
pub(super) fn plan(global: &Global, options: &PlanOptions) -> Result<(), Failed> {
    let state = ask(global)?;
    let to = match options.to.as_str() {
        "dra" => Api::Dra,
        "both" => Api::Both,
        _ => Api::Plugin,
    };
    if let Some(unknown) =
        options.resources.iter().find(|name| state.resources.iter().all(|it| it.name != **name))
    {
        let known: Vec<&str> = state.resources.iter().map(|it| it.name.as_str()).collect();
        return Err(Failed::new(
            FAILURE,
            format_args!(
                "the configuration has no resource `{unknown}`; it has {}",
                known.join(", ")
            ),
        ));
    }
    let is_chosen =
        |it: &&Resource| options.resources.is_empty() || options.resources.contains(&it.name);
    let chosen: Vec<&Resource> = state.resources.iter().filter(is_chosen).collect();
    show(global.output, &steps(&state, to, &chosen), |plan| plan_text(plan, Screen::get()))
}

fn ask(global: &Global) -> Result<State, Failed> {
    let failed = |error| Failed::new(FAILURE, error);
    let status: Status = block_on(control_get(&global.run_dir, "/v1/status"))?.map_err(failed)?;
    let apis: ApisReport = block_on(control_get(&global.run_dir, "/v1/apis"))?.map_err(failed)?;
    let grants: Vec<Grant> =
        block_on(control_get(&global.run_dir, "/v1/grants"))?.map_err(failed)?;
    let pending = source::pending_releases(global);
    let unhealthy: BTreeMap<DeviceId, &str> = status
        .ailing
        .iter()
        .filter(|device| device.health.as_deref() == Some("Unhealthy"))
        .filter_map(|device| Some((DeviceId::new(&device.id), device.reason.as_deref()?)))
        .collect();
    let holding = |grant: &Grant| {
        let release = PendingRelease::of(grant, &pending);
        let waits = |proof: &MissingProof| proof.in_words();
        let waits = release.map(|it| it.waits_for.iter().map(waits).collect::<Vec<_>>().join(", "));
        let reason = |id: &DeviceId| {
            let reason = unhealthy.get(id).or_else(|| unhealthy.get(&id.shared()?))?;
            Some(format!("{id} ({reason})"))
        };
        let ids = || grant.held_devices().map(|device| &device.id);
        Holding {
            claim: grant.claim.is_some(),
            holder: holder_in_words(grant),
            devices: ids().map(ToString::to_string).collect(),
            unhealthy: ids().filter_map(reason).collect(),
            release_waits_for: waits.filter(|waits| !waits.is_empty()),
        }
    };
    let resource = |report: ApiReport| {
        let its = |grant: &&Grant| grant.is_live() && grant.resource.as_str() == report.name;
        Resource {
            held: grants.iter().filter(its).map(holding).collect(),
            name: report.name,
            api: report.api,
            returning: report.returning,
            listed: report.listed,
            registered: report.registered,
            by_number: report.by_number,
            by_claim: report.by_claim,
            published: report.published,
            pre_start: report.pre_start,
            waits_for: Vec::new(),
        }
    };
    let mut state = State {
        schema: 1,
        dra: apis.dra,
        needs_restart: status.config.needs_restart.iter().any(|key| key == "dra.enabled"),
        kubelet: status.kubelet.is_some() && !status.socket_left_behind,
        problems: status.config.error.into_iter().chain(status.dra_problems).collect(),
        resources: apis.resources.into_iter().map(resource).collect(),
    };
    let waits: Vec<_> = state.resources.iter().map(|it| it.waits(&state)).collect();
    state.resources.iter_mut().zip(waits).for_each(|(it, waits)| it.waits_for = waits);
    Ok(state)
}

fn status_text(state: &State, screen: Screen) -> Text {
    let screen = narrow(screen);
    let mut text = Text::default();
    let dra = match (state.dra, state.needs_restart) {
        (true, false) => "on",
        (true, true) => "on, and off after the next start",
        (false, false) => "off",
        (false, true) => "off, and on after the next start",
    };
    text.line(format_args!("Dynamic Resource Allocation: {dra}"));
    for problem in &state.problems {
        line(&mut text, screen, "problem", problem);
    }
    for it in &state.resources {
        text.end_line();
        text.line(format_args!("{}: api = \"{}\"", it.name, it.api));
        let list = match (it.listed, it.registered) {
            (false, _) => "not registered with the kubelet",
            (true, true) => "registered with the kubelet",
            (true, false) => "not yet registered with the kubelet",
        };
        line(&mut text, screen, "by number", &format!("{} free; {list}", it.by_number));
        let claims = format!("{} free; {} in the slices", it.by_claim, it.published);
        line(&mut text, screen, "by claim", &claims);
        for held in &it.held {
            let by = if held.claim { "by claim" } else { "by number" };
            let held = format!("{} {by}: {}", held.devices.join(", "), held.holder);
            line(&mut text, screen, "held", &held);
        }
        for waits in &it.waits_for {
            line(&mut text, screen, "waits for", waits);
        }
    }
    text
}

fn plan_text(plan: &Plan, screen: Screen) -> Text {
    let screen = narrow(screen);
    let mut text = Text::default();
    let names = plan.resources.join(", ");
    if plan.steps.is_empty() {
        text.wrap(screen, 2, &format!("nothing to do: api = \"{}\" for {names}", plan.to));
        text.end_line();
    }
    for warning in &plan.warnings {
        text.wrap(screen, 2, &format!("warning: {warning}"));
        text.end_line();
    }
    let mut before = None;
    for (number, step) in plan.steps.iter().enumerate() {
        if number > 0 || !plan.warnings.is_empty() {
            text.end_line();
        }
        text.wrap(screen, 3, &format!("{}. {}", number + 1, step.action));
        text.end_line();
        step.pods.iter().for_each(|it| line(&mut text, screen, "pods", it));
        let after = (&step.kubelet_restart, &step.reboot);
        if before.replace(after) == Some(after) {
            line(&mut text, screen, "restart", "as after the step before, also at a reboot");
            continue;
        }
        step.kubelet_restart.iter().for_each(|it| line(&mut text, screen, "restart", it));
        step.reboot.iter().for_each(|it| line(&mut text, screen, "reboot", it));
    }
    text
}
