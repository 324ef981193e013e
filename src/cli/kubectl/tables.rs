//! Tables of many nodes, from merged documents. Pure. A field that a node's version does not have
//! is empty.

use super::replies::{Merged, text, texts};
use crate::admin::Status;
use crate::cli::explain::{are_alike, devices_text};
use crate::console::screen::{Screen, Tint};
use crate::console::table::{Table, UNKNOWN};
use crate::console::text::Text;
use crate::domain::{PendingRelease, PodSight};
use serde_json::Value;
use std::time::Duration;

/// Held devices.
pub(super) fn holders(rows: &[Value]) -> Table {
    let has_waits = rows.iter().any(|row| pending(&row["pending_release"]).is_some());
    let waits: &[&str] = if has_waits { &["WAITS FOR"] } else { &[] };
    let table = Table::new(
        &[
            &["NODE", "NAMESPACE", "POD", "CONTAINER", "RESOURCE", "STATE"],
            waits,
            &["SINCE", "UNHEALTHY", "DEVICES"],
        ]
        .concat(),
    );
    let mut table = table
        .shrinking(&["DEVICES", "UNHEALTHY", "RESOURCE", "NAMESPACE", "NODE", "POD"])
        .omitting(&["SINCE", "CONTAINER", "WAITS FOR", "UNHEALTHY"])
        .tinted("UNHEALTHY", |cell| if cell == UNKNOWN { Tint::Plain } else { Tint::Red });
    for row in rows {
        let [namespace, pod, container] = holder(row);
        let release = pending(&row["pending_release"]);
        let unhealthy = row["unhealthy"].as_object().into_iter().flatten();
        let unhealthy =
            unhealthy.map(|(id, why)| format!("{id} {}", why.as_str().unwrap_or_default()));
        let (node, resource) = (text(row, "node"), text(row, "resource"));
        let mut cells =
            vec![node, namespace, pod, container, resource, state(row, release.as_ref())];
        let short = || release.map(|release| release.short()).unwrap_or_default();
        cells.extend(has_waits.then(short));
        let unhealthy = unhealthy.collect::<Vec<_>>().join(", ");
        cells.extend([seconds(row, "granted_at"), unhealthy, texts(row, "devices")]);
        table.row(cells);
    }
    table
}

/// What a release waits for; `None` if it does not wait, or if this version does not know the
/// words.
fn pending(value: &Value) -> Option<PendingRelease> {
    serde_json::from_value(value.clone()).ok()
}

/// The state of a grant for people.
fn state(row: &Value, release: Option<&PendingRelease>) -> String {
    match release {
        _ if !row["claim"]["unprepared_at"].is_null() => "unprepared".to_owned(),
        Some(release) => release.pod.state().to_owned(),
        None => text(row, "state"),
    }
}

/// Past and present grants.
pub(super) fn history(rows: &[Value]) -> Table {
    let table = Table::new(&[
        "NODE",
        "FROM",
        "UNTIL",
        "NAMESPACE",
        "POD",
        "CONTAINER",
        "RESOURCE",
        "STATE",
        "PROOF",
        "DEVICES",
    ]);
    let mut table = table
        .shrinking(&["DEVICES", "PROOF", "CONTAINER", "RESOURCE", "NAMESPACE", "NODE", "POD"])
        .omitting(&["STATE", "PROOF", "CONTAINER", "RESOURCE", "NAMESPACE"]);
    for row in rows {
        let [namespace, pod, container] = holder(row);
        table.row([
            text(row, "node"),
            seconds(row, "granted_at"),
            seconds(row, "released_at"),
            namespace,
            pod,
            container,
            text(row, "resource"),
            text(row, "state"),
            text(row, "released_by"),
            texts(row, "devices"),
        ]);
    }
    table
}

/// Failures of one device.
pub(super) fn failures(rows: &[Value]) -> Table {
    let mut table = Table::new(&["NODE", "FAILED", "HEALTHY AGAIN", "DEVICE", "WHY", "GRANTS"])
        .shrinking(&["WHY", "DEVICE", "NODE"])
        .omitting(&["GRANTS"]);
    for row in rows {
        table.row([
            text(row, "node"),
            seconds(row, "at"),
            seconds(row, "until"),
            text(row, "device"),
            with_detail(text(row, "reason"), &text(row, "detail")),
            texts(row, "held_by"),
        ]);
    }
    table
}

/// One line for each node, then the problems of each.
pub(super) fn status(nodes: &[Value], screen: Screen) -> Text {
    let mut table = Table::new(&[
        "NODE",
        "VERSION",
        "READY",
        "UP",
        "REGISTERED",
        "DEVICES",
        "HEALTHY",
        "HELD",
        "PROBLEMS",
    ])
    .shrinking(&["UP", "NODE"])
    .omitting(&["VERSION", "REGISTERED"])
    .tinted("READY", |cell| if cell == "yes" { Tint::Green } else { Tint::Red })
    .tinted("PROBLEMS", |cell| if cell == "0" { Tint::Green } else { Tint::Red });
    let mut problems = Text::default();
    for node in nodes {
        let resources = node["resources"].as_array().map_or(&[][..], Vec::as_slice);
        let sum = |field: &str| {
            resources
                .iter()
                .filter_map(|resource| resource[field].as_u64())
                .sum::<u64>()
                .to_string()
        };
        let listed = resources.iter().filter(|resource| resource["only_claims"] != true);
        let (registered, all) = listed.fold((0, 0), |(registered, all), resource| {
            (registered + u32::from(resource["registered"] == true), all + 1)
        });
        let up = node["uptime_seconds"].as_u64().map(Duration::from_secs);
        // Another version may have a status that this one cannot judge.
        let judged = serde_json::from_value::<Status>(node.clone()).ok();
        let judged = judged.map(|status| status.problems());
        let name = text(node, "node");
        for problem in judged.iter().flatten() {
            let arrow = if screen.ascii { "->" } else { "→" };
            for sentence in
                [format!("{name}: {}", problem.what), format!("  {arrow} {}", problem.todo)]
            {
                problems.wrap(screen, 4, &sentence);
                problems.end_line();
            }
        }
        for report in node["pending_releases"].as_array().into_iter().flatten() {
            if let Some(release) = pending(&report["release"]) {
                let sentence = format!(
                    "{name}: {} of {}: {}; waits for: {}",
                    texts(report, "devices"),
                    pod_of(&report["holder"]),
                    release.pod.state(),
                    release.short()
                );
                problems.wrap(screen, 4, &sentence);
                problems.end_line();
            }
        }
        table.row([
            name,
            text(node, "version"),
            node["ready"]
                .as_bool()
                .map(|ready| if ready { "yes" } else { "no" }.into())
                .unwrap_or_default(),
            up.map(|up| humantime::format_duration(up).to_string()).unwrap_or_default(),
            format!("{registered}/{all}"),
            sum("devices"),
            sum("healthy"),
            sum("held"),
            judged.map(|problems| problems.len().to_string()).unwrap_or_default(),
        ]);
    }
    let mut text = table.on(screen);
    if !problems.is_empty() {
        text.end_line();
        text += problems;
    }
    text
}

/// Devices with their health.
pub(super) fn devices(rows: &[Value]) -> Table {
    let mut table = Table::new(&["NODE", "RESOURCE", "HEALTH", "REASON", "SINCE", "DEVICE"])
        .shrinking(&["REASON", "RESOURCE", "NODE", "DEVICE"])
        .omitting(&["SINCE"])
        .tinted("HEALTH", health_tint);
    for row in rows {
        let failed = row["incidents"].as_array().and_then(|all| all.last());
        let failed = failed.filter(|incident| incident["until"].is_null());
        let since = match seconds(row, "cordoned_at") {
            cordoned if !cordoned.is_empty() => cordoned,
            _ => failed.map(|incident| seconds(incident, "at")).unwrap_or_default(),
        };
        let detail = match text(row, "detail") {
            none if none.is_empty() => text(row, "cordoned"),
            detail => detail,
        };
        table.row([
            text(row, "node"),
            texts(row, "resources"),
            text(row, "health"),
            with_detail(text(row, "reason"), &detail),
            since,
            text(row, "id"),
        ]);
    }
    table
}

/// The hardware, one device a line.
pub(super) fn topology(rows: &[Value]) -> Table {
    let mut table = Table::new(&[
        "NODE", "NUMA", "ADDRESS", "CLASS", "MODEL", "NAMES", "RESOURCE", "HEALTH", "HELD BY",
        "DEVICE",
    ])
    .shrinking(&["DEVICE", "MODEL", "HEALTH", "RESOURCE", "NODE", "HELD BY"])
    .omitting(&["NAMES", "NUMA", "CLASS", "ADDRESS", "MODEL"])
    .tinted("HEALTH", health_tint);
    for row in rows {
        let held = row["holders"].as_array().into_iter().flatten();
        let held = held.map(|holder| {
            let seen = serde_json::from_value::<PodSight>(holder["pod_seen"].clone()).ok();
            let state = seen.map(|pod| format!(" ({})", pod.state())).unwrap_or_default();
            pod_of(holder) + &state
        });
        table.row([
            text(row, "node"),
            text(row, "numa_node"),
            text(row, "pci_address"),
            text(row, "class"),
            text(row, "model"),
            texts(row, "names"),
            texts(row, "resources"),
            text(row, "health"),
            held.collect::<Vec<_>>().join(", "),
            text(row, "id"),
        ]);
    }
    table
}

/// The pod of a holder: its namespace and name, as far as they are known.
fn pod_of(holder: &Value) -> String {
    match (text(holder, "namespace"), text(holder, "pod")) {
        (namespace, pod) if namespace.is_empty() => pod,
        (namespace, pod) => format!("{namespace}/{pod}"),
    }
}

/// Explanations of devices, each below its node.
pub(super) fn explained(rows: &[Value], screen: Screen) -> Text {
    let mut all = Text::default();
    for (index, alike) in rows.chunk_by(are_alike).enumerate() {
        if index > 0 {
            all.end_line();
        }
        all.line(format_args!("node {}", text(&alike[0], "node")));
        all += devices_text(alike, screen);
    }
    all
}

/// Findings of `doctor`.
pub(super) fn findings(rows: &[Value], all: bool) -> Table {
    let table = Table::new(&["NODE", "LEVEL", "CODE", "ON", "FOUND"]);
    let mut table =
        table.shrinking(&["FOUND", "ON", "NODE", "CODE"]).tinted("LEVEL", |cell| match cell {
            "error" => Tint::Red,
            "warning" => Tint::Yellow,
            _ => Tint::Plain,
        });
    for row in rows.iter().filter(|row| all || row["level"] != "ok") {
        table.row(["node", "level", "code", "on", "found"].map(|field| text(row, field)));
    }
    table
}

/// Whether a finding is to be fixed.
pub(super) fn is_to_be_fixed(finding: &Value) -> bool {
    ["error", "warning"].iter().any(|level| finding["level"] == *level)
}

/// Cordoned or uncordoned devices.
pub(super) fn orders(merged: &Merged, done: &str) -> Text {
    let mut lines = Text::default();
    for node in &merged.nodes {
        lines.line(format_args!("{}: {} {done}", text(node, "node"), text(node, "device")));
    }
    lines
}

/// Namespace, pod and container, as the tables of one node have them.
fn holder(row: &Value) -> [String; 3] {
    let name = |pod: &Value| match text(pod, "name") {
        none if none.is_empty() && !pod["uid"].is_null() => format!("uid:{}", text(pod, "uid")),
        name => name,
    };
    let claim = &row["claim"];
    if claim.is_object() {
        let pods = claim["pods"].as_array().into_iter().flatten().map(name);
        let of = match text(claim, "name") {
            none if none.is_empty() => text(claim, "uid"),
            name => name,
        };
        let pods = pods.collect::<Vec<_>>().join(",");
        return [text(claim, "namespace"), pods, format!("claim:{of}")];
    }
    let pod = &row["pod"];
    [text(pod, "namespace"), name(pod), text(row, "container")]
}

/// A time without its fraction of a second.
fn seconds(row: &Value, field: &str) -> String {
    let at = text(row, field);
    at.split_once('.').map_or_else(|| at.clone(), |(whole, _)| format!("{whole}Z"))
}

fn with_detail(reason: String, detail: &str) -> String {
    if detail.is_empty() { reason } else { format!("{reason} ({detail})") }
}

fn health_tint(cell: &str) -> Tint {
    match cell {
        "Healthy" => Tint::Green,
        "Unhealthy" => Tint::Red,
        _ => Tint::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(table: &Table) -> String {
        table.on(Screen::default()).to_string()
    }

    #[test]
    fn holders_are_pods_or_claims_and_missing_fields_are_empty() {
        let rows = [
            json!({"node": "a", "pod": {"namespace": "ml", "name": "train-0", "uid": "u"}, "container": "main",
                   "resource": "nvidia.com/gpu", "state": "bound", "granted_at": "2026-11-21T03:12:00.123Z",
                   "unhealthy": {"GPU-a": "xid"}, "devices": ["GPU-a", "GPU-b"]}),
            json!({"node": "b", "claim": {"namespace": "ml", "name": "c", "pods": [{"name": null, "uid": "p"}]}}),
            json!({"node": "c"}),
        ];
        assert_eq!(
            shown(&holders(&rows)),
            "\
NODE  NAMESPACE  POD      CONTAINER  RESOURCE        STATE  SINCE                 UNHEALTHY  DEVICES
a     ml         train-0  main       nvidia.com/gpu  bound  2026-11-21T03:12:00Z  GPU-a xid  GPU-a,GPU-b
b     ml         uid:p    claim:c    -               -      -                     -          -
c     -          -        -          -               -      -                     -          -
"
        );
        assert!(shown(&history(&rows)).contains("a     2026-11-21T03:12:00Z  -      ml"));
    }

    #[test]
    fn every_table_fits_80_columns() {
        let pod = json!({"namespace": "machine-learning-platform", "uid": "u", "pod_seen": "gone",
            "name": "llama-3-70b-finetune-7f9c6d5b8-x2k4q", "pod": "llama-3-70b-finetune-x2k4q"});
        let id = "GPU-5a7c1f00-6f1c-4a55-9c3e-2b7d1f0a8e31";
        let release = json!({"pod": "not_started", "since": "2026-11-21T03:12:00Z",
            "waits_for": ["kubelet_settled", "lists", "cgroup"]});
        let mut row = json!({"node": "gpu-worker-h100-eu-west-1a-0017.example.com", "pod": pod,
            "container": "trainer", "resource": "nvidia.com/mlnx_sriov_rdma", "state": "released",
            "granted_at": "2026-11-21T03:12:00Z", "released_at": "2026-11-21T04:12:00Z",
            "released_by": "pod_gone", "devices": [id, id, id], "unhealthy": {id: "node_missing"},
            "at": "2026-11-21T03:12:00Z", "until": "2026-11-21T04:12:00Z", "device": id,
            "reason": "node_missing", "detail": "/dev/nvidia7", "held_by": [id], "id": id,
            "resources": ["nvidia.com/gpu"], "health": "Unhealthy", "numa_node": 1,
            "pci_address": "0000:18:00.0", "class": "gpu", "model": "NVIDIA H100 80GB HBM3",
            "names": ["/dev/nvidia7"], "holders": [pod], "level": "warning", "on": id,
            "code": "kernel-log-unreadable", "found": "the kernel log cannot be read"});
        let mut waiting = row.clone();
        waiting["pending_release"] = release.clone();
        (row["version"], row["ready"], row["uptime_seconds"]) =
            ("0.1.0".into(), true.into(), 9_000_000.into());
        row["pending_releases"] = json!([{"devices": [id], "holder": pod, "release": release}]);
        let narrow = Screen { width: Some(80), ..Screen::default() };
        let rows = [row, waiting];
        let tables = [
            holders(&rows),
            history(&rows),
            failures(&rows),
            devices(&rows),
            topology(&rows),
            findings(&rows, true),
        ];
        let texts = tables.iter().map(|table| table.on(narrow));
        for text in texts.chain([status(&rows, narrow), explained(&rows, narrow)]) {
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
    }

    #[test]
    fn a_pod_that_is_gone_is_shown_with_the_missing_proof() {
        let release = json!({"pod": "gone", "since": null, "waits_for": ["lists"]});
        let holder = json!({"namespace": "ml", "pod": "web", "pod_seen": "gone"});
        let row = json!({"node": "a", "pod": {"namespace": "ml", "name": "web", "uid": "u"},
            "state": "bound", "devices": ["GPU-a"], "pending_release": release});
        let shown = shown(&holders(&[row]));
        assert!(shown.contains("  pod gone  2 kubelet lists without it  "), "{shown}");
        let node = json!({"node": "a", "pending_releases": [
            {"devices": ["GPU-a"], "holder": holder, "release": release}]});
        let status = status(&[node], Screen::default());
        let wanted = "\na: GPU-a of ml/web: pod gone; waits for: 2 kubelet lists without it\n";
        assert!(status.ends_with(wanted), "{status}");
        let tree = topology(&[json!({"node": "a", "holders": [holder]})]);
        assert!(self::shown(&tree).contains("  ml/web (pod gone)"), "{}", self::shown(&tree));
        // Words of another version are not guessed.
        let unknown = json!({"node": "a", "state": "bound", "pending_release": {"pod": "x"}});
        assert!(self::shown(&holders(&[unknown])).contains("  bound  "));
    }

    #[test]
    fn an_explanation_names_its_node() {
        let row = json!({"node": "a", "is": "GPU-a: gpu", "offered": "yes, as r",
            "held_by": [{"holder": "ml/web", "waits": ["x"]}]});
        let mut other = row.clone();
        (other["node"], other["id"]) = ("b".into(), "GPU-b".into());
        let mut alike = other.clone();
        alike["id"] = "GPU-c".into();
        assert_eq!(
            explained(&[row, other, alike], Screen::default()),
            "node a\nGPU-a: gpu\n  offered    yes, as r\n  held by    ml/web\n  waits for  x\n\n\
             node b\n2 devices: GPU-b, GPU-c\n  offered    yes, as r\n  held by    ml/web\n  waits for  x\n"
        );
    }

    #[test]
    fn the_status_of_another_version_has_no_number_of_problems() {
        let node = json!({"node": "a", "version": "9.0.0", "ready": false, "uptime_seconds": 3720,
            "resources": [{"registered": true, "devices": 8, "healthy": 7, "held": 3},
                          {"only_claims": true, "devices": 2, "healthy": 2, "held": 0}]});
        assert_eq!(
            status(&[node], Screen::default()),
            "\
NODE  VERSION  READY  UP     REGISTERED  DEVICES  HEALTHY  HELD  PROBLEMS
a     9.0.0    no     1h 2m  1/1         10       9        3     -
"
        );
    }

    #[test]
    fn a_device_shows_its_reason_and_since_when() {
        let rows = [
            json!({"node": "a", "id": "GPU-a", "resources": ["nvidia.com/gpu"], "health": "Unhealthy", "reason": "xid",
                   "detail": "Xid 79", "incidents": [{"at": "2026-11-21T03:12:00.000Z", "until": null}]}),
            json!({"node": "a", "id": "GPU-b", "reason": "cordoned", "cordoned": "fan",
                   "cordoned_at": "2026-11-21T04:00:00.000Z"}),
        ];
        assert_eq!(
            shown(&devices(&rows)),
            "\
NODE  RESOURCE        HEALTH     REASON          SINCE                 DEVICE
a     nvidia.com/gpu  Unhealthy  xid (Xid 79)    2026-11-21T03:12:00Z  GPU-a
a     -               -          cordoned (fan)  2026-11-21T04:00:00Z  GPU-b
"
        );
    }

    #[test]
    fn doctor_lists_problems_and_with_all_every_check() {
        let rows = [
            json!({"node": "a", "level": "error", "code": "x", "on": "/dev", "found": "broken"}),
            json!({"node": "a", "level": "ok", "code": "y", "on": "", "found": ""}),
        ];
        assert_eq!(
            shown(&findings(&rows, false)),
            "NODE  LEVEL  CODE  ON    FOUND\na     error  x     /dev  broken\n"
        );
        assert_eq!(shown(&findings(&rows, true)).lines().count(), 3);
        assert_eq!([is_to_be_fixed(&rows[0]), is_to_be_fixed(&rows[1])], [true, false]);
    }
}
