//! What the manifests take: which rules of the Pod Security Standards the pod does not keep, and
//! whether each right of the components is used.

use super::{CONFIG, DaemonSet, SET};
use crate::api::SLICES;
use crate::cluster::Cluster;
use crate::daemon::{CLAIMED, Daemon};
use crate::node::{DEVICES, NODE, device};
use crate::objects::LISTS;
use crate::plane::AUDIT;
use crate::readers::AUTHORIZE;
use crate::rights::OF_POD;
use crate::upgrades::EVENTS;
use crate::{SOON, pki, readers, reporting, rights, say, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const NODE_LABELS: &str =
    include_str!("../../../packaging/kustomize/components/node-labels/rbac.yaml");
const DOCUMENT: &str = include_str!("../../../docs/install.md");

/// What each level forbids, in the words of the API server. docs/install.md has the reasons.
const FORBIDDEN: [(&str, &[&str]); 2] = [
    ("baseline", &["hostPath volumes"]),
    ("restricted", &["restricted volume types", "runAsNonRoot != true", "runAsUser=0"]),
];

/// The rules that a level names, without the fields in parentheses.
fn rules(error: &str) -> BTreeSet<String> {
    let list = error.split_once(":latest\": ").expect("a list of rules").1;
    let (mut depth, mut text) = (0, String::new());
    for each in list.chars() {
        depth += i32::from(each == '(');
        if depth == 0 {
            text.push(each);
        }
        depth -= i32::from(each == ')');
    }
    text.split(',').map(|rule| rule.trim().to_owned()).collect()
}

pub(crate) fn pod_security(cluster: &mut Cluster) {
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    let template = cluster.api.get(SET).unwrap()["spec"]["template"].take();
    let mut spec = template["spec"].clone();
    // Neither is there in another namespace, and neither is a rule of the standards.
    for of_namespace in ["serviceAccount", "serviceAccountName", "priorityClassName"] {
        spec.as_object_mut().unwrap().remove(of_namespace);
    }
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "secured"}, "spec": spec,
    });
    let mut all: BTreeSet<String> = BTreeSet::new();
    for (level, rules_of_level) in FORBIDDEN {
        let labels = json!({"pod-security.kubernetes.io/enforce": level});
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": level, "labels": labels},
        });
        cluster.api.create("/api/v1/namespaces", &namespace);
        let error = wait_for("the namespace refuses the pod", SOON, || {
            let arguments = ["create", "-n", level, "-f", "-"];
            let output = cluster.api.kubectl("admin", &arguments, &pod.to_string());
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            error.contains("violates PodSecurity").then_some(error)
        });
        // The kinds of volumes have a rule of their own at the second level.
        all.extend(rules_of_level.iter().map(|rule| (*rule).to_owned()));
        let found = rules(&error);
        assert!(found.is_subset(&all) && found.len() >= rules_of_level.len(), "{level}: {error}");
        say(format_args!("Pod Security, {level}: {found:?}"));
        cluster.api.delete(&format!("/api/v1/namespaces/{level}"), None);
    }
    for rule in &all {
        assert!(DOCUMENT.contains(&format!("`{rule}`")), "docs/install.md has no `{rule}`");
    }
    set.delete(cluster);
}

/// Rights as `group/resource verb`.
type Rights = BTreeSet<String>;

/// The rights that these manifests grant to the service account. The role of clients, which has
/// paths and no resources, is not one of them.
fn granted(manifests: &[&str]) -> Rights {
    let words = |value: &Value| -> Vec<String> {
        let words = value.as_array().into_iter().flatten();
        words.map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut rights = Rights::new();
    for text in manifests.iter().flat_map(|text| text.split("\n---\n")) {
        let object: Value = serde_saphyr::from_str(text).unwrap();
        for rule in object["rules"].as_array().into_iter().flatten() {
            for group in words(&rule["apiGroups"]) {
                for resource in words(&rule["resources"]) {
                    let verbs = words(&rule["verbs"]);
                    rights.extend(verbs.iter().map(|verb| format!("{group}/{resource} {verb}")));
                }
            }
        }
    }
    rights
}

/// The present length of the API server's audit log.
fn audited(cluster: &Cluster) -> usize {
    fs::read_to_string(cluster.dir.join(AUDIT)).unwrap_or_default().len()
}

/// What the service account asked for in this part of the audit log is what the manifests grant,
/// and all of it was permitted.
fn check_rights(what: &str, cluster: &Cluster, start: usize, manifests: &[&str]) {
    let log = fs::read_to_string(cluster.dir.join(AUDIT)).unwrap();
    let (mut used, mut refused) = (Rights::new(), Rights::new());
    for line in log[start..].lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        let (of, code) = (&event["objectRef"], &event["responseStatus"]["code"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let verb = text(&event["verb"]);
        // A watch is there at its start too, and may end much later.
        let is_end = verb == "watch" && event["stage"] == "ResponseComplete" && code == 200;
        // Every client may read the version, which is no object.
        if of.is_null() || is_end {
            continue;
        }
        let slash = if of["subresource"].is_null() { "" } else { "/" };
        let (group, resource) = (text(&of["apiGroup"]), text(&of["resource"]));
        let right = format!("{group}/{resource}{slash}{} {verb}", text(&of["subresource"]));
        if code == 403 { &mut refused } else { &mut used }.insert(right);
    }
    let granted = granted(manifests);
    let unused: Vec<&String> = granted.difference(&used).collect();
    say(format_args!(
        "{what}: used {used:?}, granted and not used {unused:?}, refused {refused:?}"
    ));
    assert_eq!(refused, Rights::new(), "{what}: a right is missing");
    assert_eq!(used, granted, "{what}: the manifests do not grant what is used");
}

/// Each component that uses the API server uses all that its manifest grants, and nothing else.
pub(crate) fn rights_are_used(cluster: &mut Cluster) {
    const REPORTS: &str = "events = true\nnode_condition = true\n";
    const LABELLED: &str = r#"
[[node]]
match = { label = { "example.com/pool" = ["made"] } }
[[node.resource]]
name = "example.com/labelled"
class = "char"
paths = ["/dev/labelled"]
"#;

    let first = [rights::RBAC, reporting::EVENTS, reporting::RBAC, NODE_LABELS];
    let policies = [rights::POLICY, reporting::POLICY];
    first.iter().chain(&policies).for_each(|text| cluster.api.apply(text));
    cluster.api.apply(AUTHORIZE);
    let account = cluster.create_account();
    let start = audited(cluster);
    let credentials = pki::kubeconfig(&cluster.dir, OF_POD);
    let keys = format!("{REPORTS}node_labels = \"api\"\n");
    let resources = format!("{CLAIMED}{LABELLED}");
    let mut daemon = Daemon::launch_with(cluster, Path::new("/"), &credentials, &keys, &resources);
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    cluster.shown("admin", &["label", "node", NODE, "example.com/pool=made", "--overwrite"]);
    daemon.wait_until_logged("+ example.com/labelled");
    cluster.create_holder("audited", &[0], LISTS);
    cluster.running("audited");
    // The second failure counts up the Event of the first one.
    let hidden = "/dev/hidden-by-the-test".to_owned();
    let wait_for_event = |cluster: &Cluster, reason: &str, count: u64| {
        wait_for(&format!("{count} {reason}"), SOON, || {
            let events = cluster.api.list(EVENTS);
            let is_it = |event: &&Value| {
                event["involvedObject"]["name"] == "audited" && event["reason"] == reason
            };
            let event = events.iter().find(is_it)?;
            (event["count"].as_u64().unwrap_or(1) == count).then_some(())
        });
    };
    fs::rename(device(0), &hidden).unwrap();
    wait_for_event(cluster, "DeviceUnhealthy", 1);
    fs::rename(&hidden, device(0)).unwrap();
    wait_for_event(cluster, "DeviceRecovered", 1);
    fs::rename(device(0), &hidden).unwrap();
    wait_for_event(cluster, "DeviceUnhealthy", 2);
    fs::rename(&hidden, device(0)).unwrap();
    cluster.end("audited");
    daemon.wait_until_released("audited");
    cluster.api.create(SLICES, &rights::slice("surplus", NODE, "holdfast.dev"));
    let surplus = format!("{SLICES}/surplus");
    wait_for("the slice is deleted", SOON, || cluster.api.get(&surplus).is_none().then_some(()));
    check_rights("claims, reports and labels", cluster, start, &first);

    // The labels without claims, and clients of /metrics.
    let metrics = format!("listen = \"{}\"\nauthorize = \"kubernetes\"", readers::ADDRESS);
    daemon.configure("listen = \"off\"", &metrics);
    daemon.configure(REPORTS, "");
    daemon.configure("api = \"dra\"", "api = \"plugin\"");
    daemon.configure("enabled = true\nvendor_attributes = true", "enabled = false");
    let mut start = 0;
    daemon.kill_and_start(|| start = audited(cluster));
    daemon.wait_until_logged("resource=example.com/labelled");
    let kubeconfig: Value = serde_json::from_slice(&fs::read(&credentials).unwrap()).unwrap();
    let token = kubeconfig["users"][0]["user"]["token"].as_str().unwrap();
    wait_for("the client may not read /metrics", SOON, || {
        readers::code("/metrics", Some(token)).filter(|code| *code == 403)
    });
    cluster.shown("admin", &["label", "node", NODE, "example.com/pool-"]);
    daemon.wait_until_logged("- example.com/labelled");
    check_rights("labels and clients", cluster, start, &[NODE_LABELS, AUTHORIZE]);
    drop(daemon);
    cluster.api.delete(&account, Some(0));
}
