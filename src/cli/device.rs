//! `holdfast device`: shows the health of devices, and cordons or uncordons one.

use super::document::holder_in_words;
use super::query::DeviceQuery;
use super::source;
use crate::admin::{ControlError, DeviceReport, ListedHealth, Order, control_get, control_order};
use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::Tint;
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, Output, START_IT, block_on, show};
use crate::domain::{AllocId, DeviceId, OperatorRequest};
use crate::hook::HookOutput;
use crate::store::ExportLine;
use clap::Subcommand;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Verbs on devices.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show the health of every device, or one device with its last failures
    Show {
        /// The device: its id or a prefix of it, a PCI address, a node such as /dev/nvidia0, or its
        /// name on the host such as mlx5_2
        device: Option<String>,
    },
    /// Cordon a device: give it to no new container until `uncordon`; its holder keeps it, unless
    /// `--evict` is set. Persists across restarts and reboots
    Cordon {
        /// The device: its id or a prefix of it, a PCI address, a node such as /dev/nvidia0, or its
        /// name on the host such as mlx5_2
        device: String,
        /// The reason, shown to other operators
        #[arg(long, value_name = "TEXT", value_parser = crate::console::non_empty)]
        reason: String,
        /// Also delete the pods that use the device by a claim (Dynamic Resource Allocation): the
        /// control plane evicts them
        #[arg(long)]
        evict: bool,
    },
    /// Uncordon a device; also ends the wait for an operator after a fault or repeated failures
    Uncordon {
        /// The device: its id or a prefix of it, a PCI address, a node such as /dev/nvidia0, or its
        /// name on the host such as mlx5_2
        device: String,
    },
}

/// Sends the request to the running daemon.
///
/// # Errors
/// When no daemon runs, when the name matches no device or several, or when the daemon cannot
/// record the order.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Show { device } => show_devices(global, device.as_deref()),
        Verb::Cordon { device, reason, evict: false } => order(
            global,
            device,
            OperatorRequest::Cordon { reason: reason.clone() },
            "is cordoned: no new container gets it until `holdfast device uncordon`",
        ),
        Verb::Cordon { device, reason, evict: true } => order(
            global,
            device,
            OperatorRequest::CordonAndEvict { reason: reason.clone() },
            "is cordoned, and the control plane deletes the pods that use it by a claim; `holdfast \
             who` shows when they have ended",
        ),
        Verb::Uncordon { device } => order(
            global,
            device,
            OperatorRequest::Uncordon,
            "is uncordoned: containers can get it as soon as it is healthy",
        ),
    }
}

/// The document of `device show -o json`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    devices: Vec<&'a DeviceReport>,
}

fn show_devices(global: &Global, wanted: Option<&str>) -> Result<(), Failed> {
    let devices = fetch_devices(global)?;
    let matched = match wanted {
        Some(text) => vec![find_device(&devices, text)?],
        None => devices.iter().collect(),
    };
    let holders = match (wanted, matched.as_slice()) {
        (Some(_), [device]) if global.output != Output::Json => holders(global, device),
        _ => BTreeMap::new(),
    };
    show(global.output, &Document { schema: 1, devices: matched.clone() }, |_| {
        match (wanted, matched.as_slice()) {
            (Some(_), [device]) => details(device, &holders),
            _ => table(&matched),
        }
    })
}

/// The holders of the device at its failures, by grant. The ledger may have forgotten some of them.
fn holders(global: &Global, device: &DeviceReport) -> BTreeMap<AllocId, String> {
    let mut wanted: BTreeSet<&AllocId> =
        device.incidents.iter().flat_map(|incident| &incident.held_by).collect();
    let mut holders = BTreeMap::new();
    if wanted.is_empty() {
        return holders;
    }
    let read = source::read(global, |part| {
        if let ExportLine::Grant(grant) = part
            && wanted.remove(&grant.alloc_id)
        {
            holders.insert(grant.alloc_id.clone(), holder_in_words(&grant));
        }
        !wanted.is_empty()
    });
    // If the ledger cannot be read, the output shows grant ids instead of holders.
    drop(read);
    holders
}

fn order(
    global: &Global,
    device: &str,
    instruction: OperatorRequest,
    done: &str,
) -> Result<(), Failed> {
    let devices = fetch_devices(global)?;
    let id = find_device(&devices, device)?.id.clone();
    let order = Order { device: DeviceId::new(&id), instruction };
    block_on(control_order(&global.run_dir, &order))?.map_err(control_failure)?;
    show(global.output, &Done { schema: 1, order }, |_| Text::of_line(format_args!("{id} {done}")))
}

/// Result of an order (`device cordon -o json`).
#[derive(Debug, Serialize)]
struct Done {
    schema: u32,
    #[serde(flatten)]
    order: Order,
}

pub(super) fn fetch_devices(global: &Global) -> Result<Vec<DeviceReport>, Failed> {
    block_on(control_get(&global.run_dir, "/v1/devices"))?.map_err(control_failure)
}

fn control_failure(error: ControlError) -> Failed {
    match error {
        ControlError::Absent { .. } => Failed::new(
            FAILURE,
            format_args!(
                "{error}; only a daemon knows the health of devices: {START_IT}; `holdfast who` needs \
                 no daemon"
            ),
        ),
        ControlError::Failed { .. } => Failed::new(FAILURE, error),
    }
}

/// The device that `text` names.
fn find_device<'a>(devices: &'a [DeviceReport], text: &str) -> Result<&'a DeviceReport, Failed> {
    let mut wanted = DeviceQuery::new(text);
    // A share means its whole device: a cordon applies to the device, not to a share.
    let shared = DeviceId::new(text).shared().map(|device| DeviceQuery::new(device.as_str()));
    if let Some(shared) = shared.filter(|_| devices.iter().all(|device| device.id != text)) {
        wanted = shared;
    }
    devices.iter().for_each(|device| {
        wanted.add_named(&device.key, &DeviceId::new(&device.id), &device.names);
    });
    let ids = wanted.matches().map_err(|sentence| Failed::new(FAILURE, sentence))?;
    let mut matched = devices.iter().filter(|device| ids.contains(&DeviceId::new(&device.id)));
    match (matched.next(), matched.next()) {
        (Some(device), None) => Ok(device),
        _ => Err(Failed::new(
            FAILURE,
            format_args!("`{text}` matches more than one device; use the id"),
        )),
    }
}

/// Devices with their health, as a table.
#[must_use]
pub fn table(devices: &[&DeviceReport]) -> Text {
    if devices.is_empty() {
        return Text::of_line(format_args!("no resource has a device"));
    }
    let table = Table::new(&["RESOURCE", "HEALTH", "REASON", "SINCE", "DEVICE"]);
    let mut table = table
        .shrinking(&["REASON", "RESOURCE", "DEVICE"])
        .omitting(&["SINCE"])
        .tinted("HEALTH", tint);
    for device in devices {
        let since = || device.since().map(|at| at.to_seconds()).unwrap_or_default();
        if device.by_resource.is_empty() {
            let resources = device.resources.iter().map(String::as_str).collect::<Vec<_>>();
            let resources = resources.join(",");
            table.row([resources, health(device), why(device), since(), device.id.clone()]);
        }
        for (resource, listed) in &device.by_resource {
            let of = in_list(device, listed);
            table.row([resource.clone(), health(&of), why(&of), since(), device.id.clone()]);
        }
    }
    table.into()
}

/// A device as one of its resources lists it.
fn in_list(device: &DeviceReport, listed: &ListedHealth) -> DeviceReport {
    let ListedHealth { health, reason } = listed.clone();
    let detail = device.detail.clone().filter(|_| reason == device.reason);
    DeviceReport { health: Some(health), reason, detail, ..device.clone() }
}

/// The colour of a HEALTH cell.
fn tint(cell: &str) -> Tint {
    match cell {
        "Healthy" => Tint::Green,
        "Unhealthy" => Tint::Red,
        _ if cell.contains(", ") => Tint::Yellow,
        _ => Tint::Plain,
    }
}

/// The health with a pending change: `Unhealthy, recovering`.
pub(super) fn health(device: &DeviceReport) -> String {
    let health = device.health.as_deref().unwrap_or("not offered");
    match (device.state.as_str(), health) {
        ("recovering", "Unhealthy") => "Unhealthy, recovering".into(),
        ("suspect", "Healthy") => "Healthy, suspect".into(),
        _ => health.to_owned(),
    }
}

/// The reason with its evidence: `xid (Xid 79)`; empty for a healthy device.
pub(super) fn why(device: &DeviceReport) -> String {
    let order = if device.evicts { " --evict" } else { "" };
    match (&device.reason, device.explanation()) {
        (Some(reason), Some(detail)) if reason == "cordoned" => {
            format!("{reason}{order} ({detail})")
        }
        (Some(reason), Some(detail)) => format!("{reason} ({detail})"),
        (Some(reason), None) => reason.clone(),
        _ => String::new(),
    }
}

fn details(device: &DeviceReport, holders: &BTreeMap<AllocId, String>) -> Text {
    let mut text = Text::of_line(format_args!("{}", device.id));
    let mut line = |name: &str, value: &str| {
        if !value.is_empty() {
            text.line(format_args!("  {name:<11} {value}"));
        }
    };
    line("resource", &device.resources.iter().map(String::as_str).collect::<Vec<_>>().join(", "));
    line("health", &health(device));
    line("reason", &why(device));
    for (resource, listed) in &device.by_resource {
        let of = in_list(device, listed);
        line("by resource", format!("{resource}: {} {}", health(&of), why(&of)).trim_end());
    }
    if let Some(seconds) = device.healthy_in_seconds {
        line("healthy in", &format!("{seconds} s, if no symptom appears until then"));
    }
    if let Some(why) = &device.cordoned {
        // Daemons of earlier versions do not report the time.
        line(
            "cordoned",
            &device
                .cordoned_at
                .map_or_else(|| why.clone(), |at| format!("{} ({why})", at.to_seconds())),
        );
        line("evicts", if device.evicts { "the pods that use it by a claim" } else { "" });
    }
    if device.flaps > 1 {
        line("failed", &format!("{} times in short succession", device.flaps));
    }
    for HookOutput { at, resource, phase, ended, output } in &device.outputs {
        line(phase, &format!("of {resource} at {}: {ended}", at.to_seconds()));
        line("", &format!("last output: {output}"));
    }
    if device.incidents.is_empty() {
        return text;
    }
    let mut table =
        Table::new(&["FAILED", "HEALTHY AGAIN", "WHY", "HELD BY"]).shrinking(&["HELD BY", "WHY"]);
    let holder =
        |alloc_id: &AllocId| holders.get(alloc_id).cloned().unwrap_or_else(|| alloc_id.to_string());
    for incident in &device.incidents {
        let until = incident.until.map(|until| until.to_seconds()).unwrap_or_default();
        let held_by = incident.held_by.iter().map(holder).collect::<Vec<_>>().join("; ");
        table.row([incident.at.to_seconds(), until, incident.to_string(), held_by]);
    }
    text.end_line();
    text += table.into();
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Incident, Reason, Timestamp};

    fn report(id: &str, key: &str) -> DeviceReport {
        DeviceReport {
            id: id.into(),
            key: key.into(),
            resources: ["nvidia.com/gpu".to_owned()].into(),
            health: Some("Unhealthy".into()),
            reason: Some("xid".into()),
            by_resource: BTreeMap::new(),
            detail: Some("Xid 79".into()),
            state: "recovering".into(),
            healthy_in_seconds: Some(12),
            cordoned: None,
            cordoned_at: None,
            evicts: false,
            outputs: Vec::new(),
            flaps: 2,
            incidents: Vec::new(),
            class: None,
            numa_nodes: Vec::new(),
            bridges: Vec::new(),
            names: Vec::new(),
        }
    }

    #[test]
    fn a_device_is_found_by_its_id_its_address_or_a_share() {
        let devices = [
            report("GPU-aa", "pci:0000:18:00.0/10de:2330"),
            report("GPU-ab", "pci:0000:19:00.0/10de:2330"),
        ];
        let names = ["mlx5_2", "/dev/nvidia0"].map(str::to_owned).to_vec();
        let devices = [DeviceReport { names, ..devices[0].clone() }, devices[1].clone()];
        for text in ["GPU-aa", "aa", "18:00.0", "GPU-aa::3", "mlx5_2", "/dev/nvidia0"] {
            assert_eq!(find_device(&devices, text).unwrap().id, "GPU-aa", "{text}");
        }
        for text in ["GPU-a", "nothing", ""] {
            assert!(find_device(&devices, text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_device_is_shown_with_its_reason_and_recovery_time() {
        let device = report("GPU-aa", "");
        assert_eq!(
            details(&device, &BTreeMap::new()),
            "GPU-aa\n  resource    nvidia.com/gpu\n  health      Unhealthy, recovering\n  \
             reason      xid (Xid 79)\n  healthy in  12 s, if no symptom appears until then\n  \
             failed      2 times in short succession\n"
        );
        assert!(table(&[&device]).contains("nvidia.com/gpu  Unhealthy, recovering  xid (Xid 79)"));

        // A cordon shows its own time, even if the device has failed as well.
        let cordoned = DeviceReport {
            cordoned: Some("fan".into()),
            cordoned_at: Some(Timestamp(1_700_000_000_000)),
            ..device
        };
        let shown = details(&cordoned, &BTreeMap::new());
        assert!(shown.contains("  cordoned    2023-11-14T22:13:20Z (fan)\n"), "{shown}");
        assert!(
            table(&[&cordoned]).contains("  2023-11-14T22:13:20Z  GPU-aa"),
            "{}",
            table(&[&cordoned])
        );
    }

    #[test]
    fn a_device_whose_resources_list_it_differently_is_shown_by_resource() {
        let listed = |health: &str, reason: Option<&str>| ListedHealth {
            health: health.into(),
            reason: reason.map(str::to_owned),
        };
        let device = DeviceReport {
            resources: ["a.com/gpu", "b.com/gpu"].map(str::to_owned).into(),
            reason: Some("check_failed".into()),
            by_resource: [
                ("a.com/gpu".to_owned(), listed("Unhealthy", Some("check_failed"))),
                ("b.com/gpu".to_owned(), listed("Healthy", None)),
            ]
            .into(),
            detail: Some("exit status: 1".into()),
            state: "healthy".into(),
            ..report("GPU-aa", "")
        };
        let shown = details(&device, &BTreeMap::new());
        let wanted = "  reason      check_failed (exit status: 1)\n  \
                      by resource a.com/gpu: Unhealthy check_failed (exit status: 1)\n  \
                      by resource b.com/gpu: Healthy\n";
        assert!(shown.contains(wanted), "{shown}");
        let shown = table(&[&device]);
        assert!(shown.contains("a.com/gpu  Unhealthy  check_failed (exit status: 1)"), "{shown}");
        assert!(shown.contains("b.com/gpu  Healthy    "), "{shown}");
    }

    #[test]
    fn the_output_of_a_hook_is_shown_with_its_end() {
        let output = |phase: &str, output: &str| HookOutput {
            at: Timestamp(1_700_000_000_000),
            resource: "nvidia.com/gpu".into(),
            phase: phase.into(),
            ended: "exit status: 3".into(),
            output: output.into(),
        };
        let device = DeviceReport {
            outputs: vec![output("check", "no key\u{1b}[2J")],
            ..report("GPU-aa", "")
        };
        let wanted = "  check       of nvidia.com/gpu at 2023-11-14T22:13:20Z: exit status: \
                      3\n              last output: no key\\u{1b}[2J\n";
        let shown = details(&device, &BTreeMap::new());
        assert!(shown.contains(wanted), "{shown}");
        let device = DeviceReport { outputs: vec![output("after_release", "x")], ..device };
        assert!(
            details(&device, &BTreeMap::new()).contains("  after_release of nvidia"),
            "{}",
            details(&device, &BTreeMap::new())
        );
    }

    #[test]
    fn a_failure_names_the_pod_or_else_the_grant() {
        let incident = Incident {
            reason: Reason::NodeMissing,
            detail: "/dev/nvidia0".into(),
            at: Timestamp(10_000),
            until: None,
            held_by: vec![AllocId::new("a-1"), AllocId::new("a-2")],
        };
        let device = DeviceReport { incidents: vec![incident], ..report("GPU-aa", "") };
        let holders =
            BTreeMap::from([(AllocId::new("a-1"), "ml/train-0, container main".to_owned())]);
        let wanted = "
FAILED                HEALTHY AGAIN  WHY                          HELD BY
1970-01-01T00:00:10Z  -              node_missing (/dev/nvidia0)  ml/train-0, container main; a-2
";
        assert!(details(&device, &holders).ends_with(wanted), "{}", details(&device, &holders));
    }
}
