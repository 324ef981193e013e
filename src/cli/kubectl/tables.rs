//! Tables of many nodes, from merged documents. Pure. A field that a node's version does not have
//! is empty.

use super::replies::{Merged, text, texts};
use crate::admin::Status;
use crate::cli::explain::device_text;
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
        .shrinking(&[
            "DEVICES",
            "UNHEALTHY",
            "WAITS FOR",
            "CONTAINER",
            "RESOURCE",
            "NAMESPACE",
            "POD",
        ])
        .omitting(&["UNHEALTHY", "SINCE"])
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
        .shrinking(&["DEVICES", "PROOF", "CONTAINER", "RESOURCE", "NAMESPACE", "POD"])
        .omitting(&["STATE", "PROOF", "CONTAINER", "RESOURCE"]);
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
    let mut table = Table::new(&["NODE", "FAILED", "HEALTHY AGAIN", "DEVICE", "WHY", "GRANTS"]);
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
pub(super) fn status(nodes: &[Value]) -> Text {
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
            problems.line(format_args!("{name}: {}\n  {}", problem.what, problem.todo));
        }
        for report in node["pending_releases"].as_array().into_iter().flatten() {
            if let Some(release) = pending(&report["release"]) {
                problems.line(format_args!(
                    "{name}: {} of {}: {}; waits for: {}",
                    texts(report, "devices"),
                    pod_of(&report["holder"]),
                    release.pod.state(),
                    release.short()
                ));
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
    let mut text: Text = table.into();
    if !problems.is_empty() {
        text.end_line();
        text += problems;
    }
    text
}

/// Devices with their health.
pub(super) fn devices(rows: &[Value]) -> Table {
    let mut table = Table::new(&["NODE", "RESOURCE", "HEALTH", "REASON", "SINCE", "DEVICE"])
        .shrinking(&["REASON", "DEVICE", "RESOURCE"])
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
    .shrinking(&["DEVICE", "MODEL", "NAMES", "HELD BY", "RESOURCE"])
    .omitting(&["NAMES", "ADDRESS"])
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
    for (index, row) in rows.iter().enumerate() {
        if index > 0 {
            all.end_line();
        }
        all.line(format_args!("node {}", text(row, "node")));
        all += device_text(row, screen);
    }
    all
}

/// Findings of `doctor`.
pub(super) fn findings(rows: &[Value], all: bool) -> Table {
    let mut table =
        Table::new(&["NODE", "LEVEL", "CODE", "ON", "FOUND"]).tinted("LEVEL", |cell| match cell {
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
    fn a_pod_that_is_gone_is_shown_with_the_missing_proof() {
        let release = json!({"pod": "gone", "since": null, "waits_for": ["lists"]});
        let holder = json!({"namespace": "ml", "pod": "web", "pod_seen": "gone"});
        let row = json!({"node": "a", "pod": {"namespace": "ml", "name": "web", "uid": "u"},
            "state": "bound", "devices": ["GPU-a"], "pending_release": release});
        let shown = shown(&holders(&[row]));
        assert!(shown.contains("  pod gone  2 kubelet lists without it  "), "{shown}");
        let node = json!({"node": "a", "pending_releases": [
            {"devices": ["GPU-a"], "holder": holder, "release": release}]});
        let status = status(&[node]);
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
        assert_eq!(
            explained(&[row.clone(), row], Screen::default()),
            "node a\nGPU-a: gpu\n  offered    yes, as r\n  held by    ml/web\n  waits for  x\n\n\
             node a\nGPU-a: gpu\n  offered    yes, as r\n  held by    ml/web\n  waits for  x\n"
        );
    }

    #[test]
    fn the_status_of_another_version_has_no_number_of_problems() {
        let node = json!({"node": "a", "version": "9.0.0", "ready": false, "uptime_seconds": 3720,
            "resources": [{"registered": true, "devices": 8, "healthy": 7, "held": 3},
                          {"only_claims": true, "devices": 2, "healthy": 2, "held": 0}]});
        assert_eq!(
            status(&[node]),
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
