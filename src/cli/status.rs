//! `holdfast status`: the state of the running daemon, its problems, and how to fix them.

use super::device;
use super::watch::{self, QueryResult, Watch};
use crate::admin::{
    ControlError, DeviceReport, PendingReport, Problem, ResourceReport, Status, control_get,
    problem_summary,
};
use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::{Screen, Tint};
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, START_IT, block_on};
use clap::Args;
use std::time::Duration;

/// Options of the output.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    #[command(flatten)]
    watch: Watch,
}

/// Queries the daemon and prints its answer.
///
/// # Errors
/// When no daemon runs.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    watch::repeat(options.watch, global.output, || {
        let asked = block_on(control_get(&global.run_dir, "/v1/status"))?;
        let status: Status = asked.map_err(|error: ControlError| match error {
            ControlError::Absent { .. } => {
                Failed::new(FAILURE, format_args!("{error}; {START_IT}"))
            }
            ControlError::Failed { .. } => Failed::new(FAILURE, error),
        })?;
        options
            .watch
            .format_document(global.output, &status, |status| text(status, Screen::get()))
            .map(QueryResult::from)
    })
}

fn text(status: &Status, screen: Screen) -> Text {
    let uptime = humantime::format_duration(Duration::from_secs(status.uptime_seconds));
    let ready = if status.ready { "ready" } else { "not ready yet" };
    let (registered, listed) = status.registered();
    let kubelet = match (&status.kubelet, listed) {
        (None, _) => "kubelet absent".to_owned(),
        (Some(_), _) if status.socket_left_behind => {
            "kubelet absent (socket left behind)".to_owned()
        }
        (Some(_), 0) => "kubelet present".to_owned(),
        (Some(_), all) => format!("kubelet present, {registered} of {all} resources registered"),
    };
    let problems = status.problems();
    let mut text = Text::default();
    text.wrap(screen, 2, &format!("holdfast {}, {ready}, up {uptime}; {kubelet}", status.version));
    text.end_line();
    text.wrap(screen, 2, &format!("configuration: {}", status.config));
    text.end_line();
    text.paint(
        screen,
        if problems.is_empty() { Tint::Green } else { Tint::Red },
        &problem_summary(&problems),
    );
    text.end_line();
    if !status.resources.is_empty() {
        text.end_line();
        text += resources(&status.resources).on(screen);
    }
    let ailing: Vec<&DeviceReport> = status.ailing.iter().collect();
    if !ailing.is_empty() {
        text.end_line();
        text += device::table(&ailing);
    }
    if !status.pending_releases.is_empty() {
        text.end_line();
        text += pending(&status.pending_releases).on(screen);
    }
    let (sign, arrow) = if screen.ascii { ("!", "->") } else { ("✗", "→") };
    for Problem { what, todo } in problems {
        text.end_line();
        text.paint(screen, Tint::Red, sign);
        text.put(format_args!(" "));
        text.wrap(screen, sign.chars().count() + 1, &what);
        text.end_line();
        text.put(format_args!("  "));
        text.paint(screen, Tint::Dim, arrow);
        text.put(format_args!(" "));
        text.wrap(screen, arrow.chars().count() + 3, todo);
        text.end_line();
    }
    for remark in status.remarks() {
        text.end_line();
        text.wrap(screen, 0, &remark);
        text.end_line();
    }
    text
}

/// The grants that are held although their pods have ended.
fn pending(reports: &[PendingReport]) -> Table {
    let mut table = Table::new(&["POD", "STATE", "WAITS FOR", "RESOURCE", "DEVICES"])
        .shrinking(&["DEVICES", "RESOURCE", "POD", "WAITS FOR"])
        .tinted("STATE", |_| Tint::Yellow);
    for PendingReport { resource, devices, holder, release, .. } in reports {
        table.row([
            holder.in_words(),
            release.pod.state().to_owned(),
            release.short(),
            resource.clone(),
            devices.join(","),
        ]);
    }
    table
}

fn resources(reports: &[ResourceReport]) -> Table {
    let table = Table::new(&[
        "RESOURCE",
        "REGISTERED",
        "DEVICES",
        "HEALTHY",
        "HELD",
        "API",
        "LAST REGISTRATION",
    ]);
    let tint = |cell: &str| if cell == "no" { Tint::Red } else { Tint::Green };
    let mut table = table
        .shrinking(&["API", "RESOURCE"])
        .omitting(&["API", "LAST REGISTRATION"])
        .tinted("REGISTERED", tint);
    for report in reports {
        let ResourceReport {
            name, devices, healthy, held, last_registration_ms, api_version, ..
        } = report;
        table.row([
            name.clone(),
            report.registered().into(),
            devices.to_string(),
            healthy.to_string(),
            held.to_string(),
            api_version.clone().unwrap_or_default(),
            last_registration_ms.map(|ms| format!("{ms:.1} ms")).unwrap_or_default(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::ConfigReport;
    use crate::domain::{KubeletGeneration, LedgerHealth};
    use std::collections::BTreeMap;

    fn resource(name: &str, registered: bool) -> ResourceReport {
        ResourceReport {
            name: name.into(),
            registered,
            only_claims: false,
            api: None,
            devices: 8,
            healthy: 8,
            allocatable: 8,
            held: 3,
            problem: None,
            too_long: false,
            disagreement: None,
            last_registration_ms: Some(2.25),
            api_version: Some("v1beta1".into()),
        }
    }

    fn status() -> Status {
        Status {
            checkpoint_unread: None,
            schema: 1,
            version: "0.1.0".into(),
            uptime_seconds: 3720,
            ready: true,
            kubelet: Some(KubeletGeneration { inode: 1, made_ns: 2 }),
            socket_left_behind: false,
            config: ConfigReport::default(),
            ledger: LedgerHealth {
                journal: true,
                database: true,
                not_durable: 0,
                unreadable: None,
            },
            ledger_hangs: false,
            ledger_refuses: true,
            not_recorded: None,
            recovery: None,
            not_served: None,
            not_readable: Vec::new(),
            labels_not_followed: None,
            labels_not_written: None,
            not_reported: Vec::new(),
            dra_problems: Vec::new(),
            hooks: Vec::new(),
            pending_releases: Vec::new(),
            not_run: Vec::new(),
            mps: BTreeMap::new(),
            resources: vec![resource("nvidia.com/gpu", true)],
            ailing: Vec::new(),
            signals_off: BTreeMap::new(),
            nvidia_driver: None,
            unread: Default::default(),
        }
    }

    #[test]
    fn a_healthy_daemon_has_a_short_report() {
        let wanted = "\
holdfast 0.1.0, ready, up 1h 2m; kubelet present, 1 of 1 resources registered
configuration: none: known hardware is offered under its usual names
no problems

RESOURCE        REGISTERED  DEVICES  HEALTHY  HELD  API      LAST REGISTRATION
nvidia.com/gpu  yes         8        8        3     v1beta1  2.2 ms
";
        assert_eq!(text(&status(), Screen::default()), wanted);
    }

    #[test]
    fn on_an_80_column_terminal_lines_break_between_words() {
        let files = ["/etc/holdfast/config.toml", "/etc/holdfast/config.d/sriov.toml"]
            .map(Into::into)
            .into();
        let status =
            Status { config: ConfigReport { files, ..ConfigReport::default() }, ..status() };
        let shown = text(&status, Screen { width: Some(80), ..Screen::default() });
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        assert!(
            shown.contains(
                "\nconfiguration: /etc/holdfast/config.toml, \
                 /etc/holdfast/config.d/sriov.toml,\n  read at "
            ),
            "{shown}"
        );
    }

    #[test]
    fn a_grant_whose_pod_is_gone_is_listed_with_the_missing_proof() {
        use crate::domain::{AllocId, MissingProof, PendingRelease, PodSight, Timestamp};
        let release = PendingRelease {
            pod: PodSight::Gone,
            since: None,
            lists: 0,
            waits_for: vec![MissingProof::Lists],
        };
        let report = PendingReport {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".into(),
            devices: vec!["GPU-a".into()],
            holder: crate::picture::Holder {
                namespace: Some("ml".into()),
                pod: Some("web".into()),
                pod_uid: None,
                container: None,
                since: Timestamp(0),
                pod_seen: Some(PodSight::Gone),
            },
            release,
        };
        let status = Status { pending_releases: vec![report], ..status() };
        let wanted = "
POD     STATE     WAITS FOR                   RESOURCE        DEVICES
ml/web  pod gone  2 kubelet lists without it  nvidia.com/gpu  GPU-a
";
        let shown = text(&status, Screen::default());
        assert!(shown.ends_with(wanted), "{shown}");
        let json = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&json).unwrap(), status, "{json}");
    }

    #[test]
    fn a_missing_part_of_nvidias_driver_is_a_problem() {
        let why = "nvidia-cdi-hook is not installed".to_owned();
        let shown = text(&Status { nvidia_driver: Some(why), ..status() }, Screen::default());
        assert!(shown.contains("one problem"), "{shown}");
        assert!(shown.contains("✗ nvidia-cdi-hook is not installed\n"), "{shown}");
    }

    #[test]
    fn a_kubelet_with_only_a_socket_left_is_absent() {
        let status = Status {
            socket_left_behind: true,
            resources: vec![resource("nvidia.com/gpu", false)],
            ..status()
        };
        let shown = text(&status, Screen::default());
        assert!(
            shown.contains("; kubelet absent (socket left behind)\n")
                && shown.contains("one problem"),
            "{shown}"
        );
    }

    #[test]
    fn an_unwritable_ledger_is_reported_for_both_policies() {
        use crate::serving::Unrecorded;
        let shown = |refuses, not_recorded| {
            let ledger = LedgerHealth {
                journal: false,
                database: true,
                not_durable: if refuses { 0 } else { 2 },
                unreadable: None,
            };
            text(
                &Status { ledger, ledger_refuses: refuses, not_recorded, ..status() },
                Screen::default(),
            )
        };
        let refused = Some(Unrecorded {
            refused: 3,
            why: "no space left: make room on its file system".into(),
        });
        for (text, wanted) in [
            (
                shown(true, None),
                "✗ the ledger cannot be written, so new pods that request a device are refused\n",
            ),
            (
                shown(true, refused),
                "are refused, 3 so far: no space left: make room on its file system\n",
            ),
            (
                shown(false, None),
                "✗ the ledger cannot be written; 2 grants made since then exist only in memory\n",
            ),
        ] {
            assert!(text.contains(wanted), "{text}");
        }
    }

    #[test]
    fn a_ledger_that_hangs_is_reported_with_what_it_costs() {
        use crate::serving::Unrecorded;
        let not_recorded = Some(Unrecorded { refused: 2, why: "no answer".into() });
        let shown =
            text(&Status { ledger_hangs: true, not_recorded, ..status() }, Screen::default());
        let problem = "✗ the ledger does not answer, so new pods that request a device may be refused, 2 so far\n";
        assert!(shown.contains(problem) && shown.contains("a write to the disk"), "{shown}");
    }

    #[test]
    fn an_unreadable_history_is_reported_with_time_and_reason() {
        use crate::domain::{Timestamp, Unreadable, UnreadableReason};
        for (because, wanted) in [
            (
                UnreadableReason::Slow,
                "✗ the history cannot be read yet: its database has been opening since 1970-01-01T00:00:07Z\n",
            ),
            (
                UnreadableReason::Refused,
                "✗ the history cannot be read: its database could not be opened since 1970-01-01T00:00:07Z\n",
            ),
            (
                UnreadableReason::Failed,
                "✗ the history cannot be read: its database was closed after an error at 1970-01-01T00:00:07Z\n",
            ),
        ] {
            let unreadable = Some(Unreadable { since: Timestamp(7_000), because });
            let ledger =
                LedgerHealth { journal: true, database: false, not_durable: 0, unreadable };
            let shown = text(&Status { ledger, ..status() }, Screen::default());
            assert!(shown.contains(wanted), "{shown}");
            let json = serde_json::to_string(&ledger).unwrap();
            assert_eq!(serde_json::from_str::<LedgerHealth>(&json).unwrap(), ledger);
        }
    }

    #[test]
    fn a_failed_hook_is_reported_for_a_device_or_a_pod() {
        use crate::admin::HookReport;
        use crate::domain::{AllocId, DeviceId, HookState, PendingHook, Timestamp};
        use crate::picture::Holder;
        let owed = PendingHook {
            resource: "example.com/sensor".parse().unwrap(),
            device: DeviceId::new("dev:sensor1"),
            key: String::new(),
            objects: Vec::new(),
            alloc_id: AllocId::new("a-1"),
            pod: None,
            container: None,
            released_at: Timestamp(0),
            state: HookState::Failed {
                tries: 1,
                failed_at: Timestamp(0),
                why: "exit status: 1".into(),
            },
        };
        let waits = Holder {
            namespace: Some("ml".into()),
            pod: Some("web".into()),
            pod_uid: None,
            container: None,
            since: Timestamp(0),
            pod_seen: None,
        };
        let shown = |owed: &PendingHook, awaited_by: &[Holder]| {
            let hooks = vec![HookReport { owed: owed.clone(), awaited_by: awaited_by.to_vec() }];
            let json = serde_json::to_string(&hooks).unwrap();
            assert_eq!(serde_json::from_str::<Vec<HookReport>>(&json).unwrap(), hooks, "{json}");
            text(&Status { hooks, ..status() }, Screen::default())
        };
        let free = "✗ example.com/sensor: device dev:sensor1 is unhealthy, since the hook after its release has failed once: exit status: 1\n";
        assert!(shown(&owed, &[]).contains(free), "{}", shown(&owed, &[]));
        let gated = "✗ example.com/sensor: pod ml/web cannot start yet with device dev:sensor1, since the hook after its release has failed once:";
        let text = shown(&owed, std::slice::from_ref(&waits));
        assert!(text.contains(gated) && !text.contains("unhealthy"), "{text}");
        let due = PendingHook { state: HookState::Due, ..owed };
        let text = shown(&due, &[waits]);
        assert!(text.contains("pod ml/web starts with device dev:sensor1 when the hook after its release has ended"), "{text}");
    }

    #[test]
    fn a_resource_for_claims_is_not_missing_at_the_kubelet() {
        let claims = ResourceReport { only_claims: true, ..resource("amd.com/gpu", false) };
        let status =
            Status { resources: vec![claims, resource("nvidia.com/gpu", true)], ..status() };
        let text = text(&status, Screen::default());
        assert!(text.contains("1 of 1 resources registered"), "{text}");
        let row = text.lines().find(|line| line.starts_with("amd.com/gpu")).unwrap();
        assert_eq!(row.split_whitespace().nth(1), Some("claims"), "{text}");
        assert!(!text.contains("has not opened its stream"), "{text}");
    }

    #[test]
    fn the_api_of_a_resource_is_shown_where_claims_get_its_devices() {
        let with = |api: &str| ResourceReport {
            api: Some(api.to_owned()),
            ..resource("nvidia.com/gpu", true)
        };
        assert_eq!(with("both").registered(), "yes, claims");
        assert_eq!(with("dra").registered(), "ending");
        assert_eq!(ResourceReport { registered: false, ..with("both") }.registered(), "no");
        assert_eq!(ResourceReport { only_claims: true, ..with("dra") }.registered(), "claims");
        assert!(!serde_json::to_string(&resource("a.b/c", true)).unwrap().contains("\"api\""));
    }

    #[test]
    fn each_problem_is_printed_with_its_fix() {
        let refused = ResourceReport {
            problem: Some("the kubelet refuses it".into()),
            ..resource("amd.com/gpu", false)
        };
        let sick = DeviceReport {
            id: "GPU-aa".into(),
            key: String::new(),
            resources: ["nvidia.com/gpu".to_owned()].into(),
            health: Some("Unhealthy".into()),
            reason: Some("xid".into()),
            by_resource: BTreeMap::new(),
            detail: Some("Xid 79".into()),
            state: "unhealthy".into(),
            healthy_in_seconds: None,
            cordoned: None,
            cordoned_at: None,
            evicts: false,
            outputs: Vec::new(),
            flaps: 1,
            incidents: Vec::new(),
            class: None,
            numa_nodes: Vec::new(),
            bridges: Vec::new(),
            names: Vec::new(),
        };
        let mut status = Status {
            ready: false,
            resources: vec![refused],
            ailing: vec![sick.clone()],
            recovery: Some("1 missing".into()),
            ..status()
        };
        let wanted = "\
holdfast 0.1.0, not ready yet, up 1h 2m; kubelet present, 0 of 1 resources registered
configuration: none: known hardware is offered under its usual names
2 problems

RESOURCE     REGISTERED  DEVICES  HEALTHY  HELD  API      LAST REGISTRATION
amd.com/gpu  no          8        8        3     v1beta1  2.2 ms

RESOURCE        HEALTH     REASON        SINCE  DEVICE
nvidia.com/gpu  Unhealthy  xid (Xid 79)  -      GPU-aa

✗ amd.com/gpu: the kubelet refuses it
  → Holdfast retries automatically; the kubelet's log has details: `journalctl -u kubelet`

✗ one device is unhealthy
  → `holdfast device show` with an id shows its last failures, and docs/health.md has the remedy for each reason

the ledger was damaged when the daemon started: 1 missing
";
        assert_eq!(text(&status, Screen::default()), wanted);
        // A cordon is not a problem, nor is a state that the configuration requests.
        let moved = DeviceReport { reason: Some("held_as_other".into()), ..sick.clone() };
        status.ailing = vec![DeviceReport { cordoned: Some("fan".into()), ..sick }, moved];
        status.kubelet = None;
        let ascii = text(&status, Screen { ascii: true, ..Screen::default() });
        assert!(
            ascii.is_ascii()
                && ascii.contains("\n2 problems\n")
                && ascii.contains("\n! the kubelet's socket is missing\n  -> start the kubelet"),
            "{ascii}"
        );
    }
}
