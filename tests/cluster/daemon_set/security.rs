//! Which rules of the Pod Security Standards the DaemonSet's pod does not keep.

use super::{CONFIG, DaemonSet, SET};
use crate::cluster::Cluster;
use crate::{SOON, say, wait_for};
use serde_json::json;
use std::collections::BTreeSet;

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
