//! Metrics: the documentation's list and a daemon's page match the table, and the dashboard and the
//! alerts use nothing else.

use crate::common::{
    Node, allocate, dial, http_get, name, offered, resource, run, soon, telemetry, until,
};
use holdfast::lab::sim::kubelet::{PodPhase, PodSpec};
use holdfast::telemetry::exposition::Page;
use holdfast::telemetry::table::{Kind, Metric, Row, TABLE};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn text(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn row(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.name == name)
}

/// The row in the documentation's format.
fn documented(row: &Row) -> String {
    let Row { name, kind, labels, help } = row;
    let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
    let by = if labels.is_empty() { String::new() } else { format!(" by {}", labels.join(", ")) };
    format!("| `{name}` {}{by} | {help} |", kind.as_str())
}

#[test]
fn the_documentation_lists_the_table_and_nothing_else() {
    let wanted: Vec<String> = TABLE.iter().map(documented).collect();
    let page = text("docs/metrics.md");
    let found: Vec<&str> = page.lines().filter(|line| line.starts_with("| `holdfast_")).collect();
    assert!(
        found == wanted,
        "docs/metrics.md must have these rows; each change breaks somebody's alert:\n{}",
        wanted.join("\n")
    );
}

/// Metrics that other tests provoke, each with the file that names it.
const ELSEWHERE: [(&str, &str); 20] = [
    ("holdfast_actor_restarts_total", "tests/daemon/actors.rs"),
    ("holdfast_allocations_of_held_devices_total", "tests/storage/policies.rs"),
    ("holdfast_connections_evicted_total", "tests/daemon/limits/attack.rs"),
    ("holdfast_connections_refused_total", "tests/daemon/handover/mod.rs"),
    ("holdfast_dra_claim_calls_total", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_claim_duration_seconds", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_claims", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_other_driver_devices", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_problems", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_published_devices", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_published_slices", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_slice_writes_total", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_taints", "tests/daemon/dra_operator.rs"),
    ("holdfast_dra_watch_failures_total", "tests/daemon/dra_operator.rs"),
    ("holdfast_journal_sync_failures_total", "tests/storage/full_disk.rs"),
    ("holdfast_kubelet_disagreements_total", "tests/daemon/edges/taken.rs"),
    ("holdfast_log_lines_lost_total", "src/telemetry/log_writer.rs"),
    ("holdfast_report_writes_total", "tests/daemon/reporting.rs"),
    ("holdfast_requests_refused_total", "tests/daemon/limits/attack.rs"),
    ("holdfast_ledger_unreadable_since_time_seconds", "tests/storage/slow_database.rs"),
];

/// A sample: its metric, the names of its labels, and whether it is above 0.
fn samples(page: &str) -> Vec<(&str, Vec<&str>, bool)> {
    page.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels
                .trim_end_matches('}')
                .split("\",")
                .filter(|pair| !pair.is_empty())
                .map(|pair| pair.split_once('=').unwrap().0);
            (name, labels.collect(), value.parse::<f64>().unwrap() > 0.0)
        })
        .collect()
}

/// Checks that every series of the page is in the table, with its type and its labels.
fn check_page(page: &str) {
    let mut seen = BTreeSet::new();
    let mut current: Option<&Row> = None;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            current = Some(row(name).unwrap_or_else(|| panic!("`{name}` is not in the table")));
            assert_eq!(current.unwrap().kind.as_str(), kind, "{name}");
            assert!(seen.insert(name), "`{name}` is described in two places");
        }
    }
    assert!(current.is_some());
    for (name, labels, _) in samples(page) {
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| row(name.strip_suffix(end)?))
            .or(row(name))
            .unwrap();
        let labels: Vec<&str> = labels.into_iter().filter(|label| *label != "le").collect();
        assert_eq!(labels, family.labels, "{name}");
    }
}

/// Every metric of the table has a value on the page, or another test provokes it.
fn every_metric_is_provoked(page: &str) {
    let all = samples(page);
    for Row { name, kind, .. } in TABLE {
        if let Some((_, file)) = ELSEWHERE.iter().find(|(elsewhere, _)| elsewhere == name) {
            let of_table = format!(
                "Metric::{:?}",
                Metric::all().find(|metric| metric.row().name == *name).unwrap()
            );
            let source = text(file);
            assert!(
                source.contains(name) || source.contains(&of_table),
                "{file} does not provoke {name}"
            );
            continue;
        }
        let shown =
            if *kind == Kind::Histogram { format!("{name}_count") } else { (*name).to_owned() };
        let is_told =
            all.iter().any(|(told, _, above)| *told == shown && (*above || *kind == Kind::Gauge));
        assert!(is_told || *name == "holdfast_devices_held", "`{name}` was not provoked:\n{page}");
    }
}

#[test]
fn a_daemon_exposes_exactly_the_metrics_of_the_table() {
    run(async {
        let node = Node::with(&[("gpu", 4), ("nic", 2)]);
        // A hook that ends well, and one that fails.
        let hooks = "before_start = { command = [\"/bin/true\"] }\nafter_release = { command = [\"/bin/false\"] }\n";
        node.write_config(&format!(
            "[telemetry]\nlisten = \"127.0.0.1:0\"\n{}{hooks}{}",
            resource("gpu"),
            resource("nic")
        ));
        let (gpu, nic) = (name("example.com/gpu"), name("example.com/nic"));
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu, 4).await;
        offered(&kubelet, &nic, 2).await;
        let address = telemetry(&daemon).await;

        // An event that has not happened yet has the value 0, so that its first time is a visible
        // change.
        let page = http_get(address, "/metrics").1;
        for counted in [
            "holdfast_allocations_total{resource=\"example.com/gpu\",result=\"error\"} 0",
            "holdfast_stream_ends_total{resource=\"example.com/nic\",reason=\"lost\"} 0",
            "holdfast_actor_restarts_total{actor=\"serving\"} 0",
            "holdfast_config_reloads_total{result=\"error\"} 0",
        ] {
            assert!(page.lines().any(|line| line == counted), "`{counted}` is not in:\n{page}");
        }

        let pod = PodSpec::new("team", "train").init("prepare", &gpu, 1).app("main", &gpu, 2);
        let pod = soon("an admission", kubelet.add_pod(pod)).await;
        assert_eq!(pod.phase, PodPhase::Running);
        daemon.logged_often(" pod=\"", 2).await;
        let mut api = dial(&kubelet, &node, &nic).await;
        allocate(&mut api, &["dev:nic0"]).await.unwrap();
        allocate(&mut api, &["dev:ghost"]).await.unwrap_err();
        node.remove_device("nic", 1);
        offered(&kubelet, &nic, 1).await;
        let held = "holdfast_devices_held{namespace=\"team\",pod=\"train\",container=\"main\",resource=\"example.com/gpu\"} 2";
        let page =
            until("the holder", || http_get(address, "/metrics").1, |page| page.contains(held))
                .await;
        for told in [
            "holdfast_allocations_total{resource=\"example.com/nic\",result=\"ok\"} 1",
            "holdfast_allocations_total{resource=\"example.com/nic\",result=\"error\"} 1",
            "holdfast_devices{resource=\"example.com/gpu\",health=\"healthy\"} 4",
            "holdfast_devices{resource=\"example.com/nic\",health=\"unhealthy\"} 1",
            "holdfast_devices_in_use{resource=\"example.com/gpu\"} 2",
            "holdfast_devices_unhealthy{resource=\"example.com/nic\",reason=\"device_gone\"} 1",
            "holdfast_unhealthy_device_info{resource=\"example.com/nic\",device=\"dev:nic1\",reason=\"device_gone\"} 1",
            "holdfast_incidents_total{resource=\"example.com/nic\",reason=\"device_gone\"} 1",
            "holdfast_grants{resource=\"example.com/nic\",state=\"granted\"} 1",
            "holdfast_resource_registered{resource=\"example.com/gpu\"} 1",
        ] {
            assert!(page.lines().any(|line| line == told), "`{told}` is not in:\n{page}");
        }

        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        daemon.logged("the hook after release has failed").await;
        // The file of its socket stays.
        kubelet.stop();
        daemon.logged("stream ended").await;
        until(
            "a kubelet that has ended",
            || http_get(address, "/metrics").1,
            |page| page.contains("\nholdfast_kubelet_present 0\n"),
        )
        .await;
        kubelet.start_again().await.unwrap();
        offered(&kubelet, &nic, 1).await;
        check_page(&page);
        let page = http_get(address, "/metrics").1;
        check_page(&page);
        assert!(
            !page.contains("pod=\"train\""),
            "the page has no series of a pod that was removed:\n{page}"
        );
        every_metric_is_provoked(&page);
        assert!(!page.contains("holdfast_dra_"), "the driver for claims is off:\n{page}");
        assert_eq!(http_get(address, "/nothing").0, 404);
    });
}

/// The metrics that a query names.
fn metrics_of(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("holdfast_"));
    let family = |word: &str| {
        ["_bucket", "_sum", "_count"].iter().find_map(|end| {
            word.strip_suffix(end).filter(|name| row(name).is_some()).map(str::to_owned)
        })
    };
    names.map(|word| family(word).unwrap_or_else(|| word.to_owned())).collect()
}

fn check_query(place: &str, query: &str) {
    let named = metrics_of(query);
    let of_prometheus = ["up{job=~\".*holdfast.*\"", "ALERTS{alertname=~\"Holdfast.*\""]
        .iter()
        .any(|series| query.contains(series));
    assert!(!named.is_empty() || of_prometheus, "{place} asks for nothing of ours: {query}");
    for name in named {
        let row = row(&name).unwrap_or_else(|| {
            panic!("{place} asks for `{name}`, which is not in the table of src/telemetry/table.rs")
        });
        let is_bare = !query.contains(&format!("{name}_bucket"))
            && !query.contains(&format!("{name}_count"))
            && !query.contains(&format!("{name}_sum"));
        assert!(row.kind != Kind::Histogram || !is_bare, "{place}: {name} is a histogram: {query}");
    }
}

fn strings<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(key).and_then(Value::as_str));
            map.values().for_each(|value| strings(value, key, found));
        }
        Value::Array(list) => list.iter().for_each(|value| strings(value, key, found)),
        _ => {}
    }
}

/// Collects the parts that Grafana 7.5 does not read, each with its place and the version that
/// introduced it.
fn newer_than_7_5(value: &Value, place: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let place = format!("{place}.{key}");
                let since = match (key.as_str(), value.as_str().unwrap_or_default()) {
                    ("datasource", "") => "8.3: a data source by reference",
                    ("tooltip", _) => "8.0: before, tooltipOptions",
                    ("type", "value" | "range" | "regex" | "special") => {
                        "8.0: before, a mapping's type was a number"
                    }
                    ("cellOptions", _) | ("id", "custom.cellOptions") => "9.4: before, displayMode",
                    ("mode", "shades") => {
                        "10.0: a mode of colour that is not known makes an error of the panel"
                    }
                    _ => "",
                };
                found.extend((!since.is_empty()).then(|| format!("{place} ({since})")));
                newer_than_7_5(value, &place, found);
            }
        }
        Value::Array(list) => list
            .iter()
            .enumerate()
            .for_each(|(at, value)| newer_than_7_5(value, &format!("{place}[{at}]"), found)),
        _ => {}
    }
}

/// Grafana upgrades an older dashboard when it loads it, but never downgrades one. So this is the
/// format of the oldest supported version.
#[test]
fn the_dashboard_has_the_form_of_grafana_7_5() {
    let dashboard: Value = serde_json::from_str(&text("packaging/grafana/holdfast.json")).unwrap();
    assert_eq!(dashboard["schemaVersion"], 27);
    assert!(
        text("docs/metrics.md").contains("Grafana 7.5 and newer (schema 27)"),
        "docs/metrics.md names other versions"
    );
    let mut found = Vec::new();
    newer_than_7_5(&dashboard, "", &mut found);
    assert!(found.is_empty(), "Grafana 7.5 does not read {found:#?}");
}

#[test]
fn the_dashboard_queries_metrics_of_the_table() {
    let dashboard: Value = serde_json::from_str(&text("packaging/grafana/holdfast.json")).unwrap();
    let mut queries = Vec::new();
    strings(&dashboard, "expr", &mut queries);
    assert!(queries.len() > 20, "{}", queries.len());
    for query in &queries {
        check_query("the dashboard", query);
    }
    let variables: Vec<&str> = dashboard["templating"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(variables, ["datasource", "instance", "resource"]);
    for one in &dashboard["templating"]["list"].as_array().unwrap()[1..] {
        check_query("a variable of the dashboard", one["query"]["query"].as_str().unwrap());
    }

    // Checks errors that Grafana would fix silently or show as a gap: ids, places on the grid of
    // 24, a source for every panel.
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    let mut taken = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another one's");
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{title}: wider than the grid");
        for cell in (at("y")..at("y") + at("h"))
            .flat_map(|y| (at("x")..at("x") + at("w")).map(move |x| (x, y)))
        {
            assert!(taken.insert(cell), "{title}: lies over another one at {cell:?}");
        }
        if panel["type"] != "row" {
            assert_eq!(panel["datasource"], "${datasource}", "{title}");
            assert!(
                panel["description"].as_str().is_some_and(|text| text.len() > 10),
                "{title}: the description is missing"
            );
            let refs: Vec<&str> = panel["targets"]
                .as_array()
                .unwrap()
                .iter()
                .map(|target| target["refId"].as_str().unwrap())
                .collect();
            assert_eq!(refs.iter().collect::<BTreeSet<_>>().len(), refs.len(), "{title}");
        }
    }
}

/// The anchor of a heading, as GitHub and others generate it.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
        .collect::<String>();
    kept.replace(' ', "-")
}

fn anchors(page: &str) -> BTreeSet<String> {
    page.lines()
        .filter_map(|line| line.strip_prefix('#'))
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect()
}

const RUNBOOK: &str = "https://holdfast.dev/docs/operate.md#";

/// Whether an alert's text expands to the expected text, with any value in place of `{{ … }}`.
fn becomes(words: &str, said: &str) -> bool {
    let literals: Vec<&str> = words
        .split("{{")
        .map(|part| part.split_once("}}").map_or(part, |(_, literal)| literal))
        .collect();
    let [first, between @ .., last] = literals.as_slice() else { return words == said };
    let rest = said.strip_prefix(first).and_then(|rest| rest.strip_suffix(last));
    rest.is_some_and(|rest| {
        between.iter().try_fold(rest, |rest, literal| Some(rest.split_once(literal)?.1)).is_some()
    })
}

/// promtool would report this, but is not installed everywhere.
#[test]
fn the_alert_tests_expect_the_texts_of_the_alerts() {
    let read = |file: &str| -> Value { serde_saphyr::from_str(&text(file)).unwrap() };
    let (alerts, cases) =
        (read("packaging/prometheus/alerts.yaml"), read("packaging/prometheus/tests.yaml"));
    for key in ["summary", "description"] {
        let (mut words, mut expected) = (vec![], vec![]);
        strings(&alerts, key, &mut words);
        strings(&cases, key, &mut expected);
        assert!(expected.len() > 20, "{key}: {}", expected.len());
        for said in expected {
            assert!(
                words.iter().any(|words| becomes(words, said)),
                "no alert has the text: {said}"
            );
        }
    }
}

#[test]
fn every_alert_queries_metrics_of_the_table_and_has_a_section() {
    let rules: Value = serde_saphyr::from_str(&text("packaging/prometheus/alerts.yaml")).unwrap();
    let anchors = anchors(&text("docs/operate.md"));
    let tests = text("packaging/prometheus/tests.yaml");
    let mut names = BTreeSet::new();
    for group in rules["groups"].as_array().unwrap() {
        for rule in group["rules"].as_array().unwrap() {
            let alert = rule["alert"].as_str().unwrap();
            assert!(alert.starts_with("Holdfast") && names.insert(alert), "{alert}");
            check_query(alert, rule["expr"].as_str().unwrap());
            assert!(
                ["critical", "warning", "info"]
                    .contains(&rule["labels"]["severity"].as_str().unwrap()),
                "{alert}"
            );
            for annotation in ["summary", "description"] {
                assert!(
                    rule["annotations"][annotation].as_str().is_some_and(|text| text.len() > 20),
                    "{alert}: {annotation}"
                );
            }
            let runbook = rule["annotations"]["runbook_url"].as_str().unwrap();
            let section =
                runbook.strip_prefix(RUNBOOK).unwrap_or_else(|| panic!("{alert}: {runbook}"));
            assert!(
                section == alert.to_lowercase() && anchors.contains(section),
                "{alert}: docs/operate.md has no section `{section}`"
            );
            assert!(
                tests.contains(&format!("alertname: {alert}\n")),
                "{alert} has no test in packaging/prometheus/tests.yaml"
            );
        }
    }
    assert!(names.len() > 20, "{}", names.len());
}

#[test]
fn every_exit_code_has_a_section() {
    let anchors = anchors(&text("docs/operate.md"));
    let code = |line: &str| {
        line.strip_prefix("pub const ")?
            .split_once(": u8 = ")?
            .1
            .strip_suffix(';')?
            .parse::<u8>()
            .ok()
    };
    let source = text("src/console/exit.rs");
    let codes: Vec<u8> = source.lines().filter_map(code).collect();
    assert!(codes.len() >= 9 && codes.contains(&8), "{codes:?}");
    for code in codes {
        let begin = format!("exit-code-{code}");
        let has = |anchor: &String| *anchor == begin || anchor.starts_with(&format!("{begin}-"));
        assert!(anchors.iter().any(has), "docs/operate.md has no section for exit code {code}");
    }
}

/// Runs the check of node-problem-detector; returns its exit code and its line.
fn check(address: &str, what: &str) -> (Option<i32>, String) {
    let output = Command::new(path("packaging/node-problem-detector/check-holdfast"))
        .arg(what)
        .env("HOLDFAST_TELEMETRY", address)
        .output()
        .unwrap();
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(
        line.ends_with('\n') && line.lines().count() == 1 && output.stderr.is_empty(),
        "{line}{:?}",
        String::from_utf8(output.stderr)
    );
    (output.status.code(), line.trim_end().to_owned())
}

#[test]
fn node_problem_detector_gets_the_state_of_the_daemon_and_its_devices() {
    run(async {
        let node = Node::with(&[("gpu", 2), ("nic", 1)]);
        let gpu = name("example.com/gpu");
        node.write_config(&format!(
            "[telemetry]\nlisten = \"127.0.0.1:0\"\n{}{}",
            resource("gpu"),
            resource("nic")
        ));
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu, 2).await;
        offered(&kubelet, &name("example.com/nic"), 1).await;
        daemon.logged("ready").await;
        let address = telemetry(&daemon).await.to_string();
        let healthy = async |what| {
            until("a healthy state", || check(&address, what), |(code, _)| *code == Some(0)).await.1
        };
        assert_eq!(
            (healthy("daemon").await.as_str(), healthy("devices").await.as_str()),
            ("Holdfast is healthy", "all devices are healthy")
        );

        node.remove_device("gpu", 1);
        node.remove_device("nic", 0);
        let (_, line) = until(
            "both devices",
            || check(&address, "devices"),
            |(code, line)| *code == Some(1) && line.contains("; "),
        )
        .await;
        assert_eq!(line, "1 of example.com/gpu: device_gone; 1 of example.com/nic: device_gone");
        assert_eq!(check(&address, "daemon").0, Some(0));
        // A cordoned device is no problem of the node.
        node.create_device("gpu", 1);
        node.create_device("nic", 0);
        offered(&kubelet, &gpu, 2).await;
        assert!(
            node.output(&["device", "cordon", "dev:gpu0", "--reason", "test"]).status.success()
        );
        healthy("devices").await;

        daemon.kill();
        assert_eq!(
            check(&address, "daemon"),
            (Some(1), format!("Holdfast does not answer at {address}"))
        );
        assert_eq!(check(&address, "devices").0, Some(2), "nothing is known of them");
        assert_eq!(check(&address, "nothing").0, Some(2));
    });
}

#[test]
fn the_check_reports_a_daemons_problems() {
    // The page of a daemon whose disk is full and whose kubelet refuses a resource, without the
    // daemon.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut page = Page::default();
    page.sample(Metric::BuildInfo, &["0.1.0"], 1);
    page.sample(Metric::Ready, &[], 1);
    page.sample(Metric::KubeletPresent, &[], 1);
    page.sample(Metric::LedgerKept, &["journal"], 0);
    page.sample(Metric::LedgerKept, &["database"], 1);
    page.sample(Metric::Registered, &["example.com/gpu"], 0);
    page.sample(Metric::Registered, &["example.com/nic"], 1);
    let page = page.into_text();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Reads the whole request: it comes in several pieces, and closing a connection with unread
        // ones resets it.
        let asked = BufReader::new(stream.try_clone().unwrap());
        assert!(
            asked.lines().map_while(Result::ok).any(|line| line.is_empty()),
            "the request has no end"
        );
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{page}", page.len()).unwrap();
    });
    let wrong = "the ledger's journal cannot be written; example.com/gpu is not registered with the kubelet";
    assert_eq!(check(&address, "daemon"), (Some(1), wrong.to_owned()));
    answering.join().unwrap();
}

#[test]
fn the_configuration_for_node_problem_detector_calls_the_check_that_is_shipped() {
    let config: Value =
        serde_json::from_str(&text("packaging/node-problem-detector/holdfast.json")).unwrap();
    let conditions: BTreeSet<&str> = config["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["type"].as_str().unwrap())
        .collect();
    let shipped = text("packaging/nfpm/holdfast.yaml");
    for rule in config["rules"].as_array().unwrap() {
        assert!(conditions.contains(rule["condition"].as_str().unwrap()), "{rule}");
        let path = rule["path"].as_str().unwrap();
        assert!(
            shipped.contains(&format!("dst: {path},")),
            "packaging/nfpm/holdfast.yaml does not ship {path}"
        );
    }
}
