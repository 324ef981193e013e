//! Which pods are asked: the daemon's pod of each selected node. Pure.

use crate::domain::null_as_empty;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The name of the daemon's container in the manifests and the chart.
const CONTAINER: &str = "holdfast";

/// Options of the daemon that its other verbs need too: where it finds the node.
const PATHS: &[&str] = &["--host-root", "--kubelet-dir", "--state-dir", "--run-dir", "--config"];

/// A pod of the daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) container: String,
    /// The daemon's paths, as options.
    pub(super) paths: Vec<String>,
    /// Why no command can run in it; `None` while its container runs.
    problem: Option<String>,
    is_ready: bool,
    is_leaving: bool,
}

#[cfg(test)]
impl Pod {
    /// A pod that runs.
    pub(super) fn of(namespace: &str, name: &str, container: &str) -> Pod {
        let [namespace, name, container] = [namespace, name, container].map(str::to_owned);
        Pod { namespace, name, container, ..Pod::default() }
    }
}

/// The nodes by what can be done with each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Targets {
    /// To be asked: node and pod, sorted by node.
    pub(super) pods: Vec<(String, Pod)>,
    /// Nodes that cannot answer, with the reason.
    pub(super) away: BTreeMap<String, String>,
    /// Nodes without a pod of the daemon, which no option names.
    pub(super) without_daemon: BTreeSet<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct List {
    #[serde(deserialize_with = "null_as_empty")]
    items: Vec<Object>,
}

/// The parts of a `Pod` or a `Node` (API `core/v1`) that are used here.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Object {
    metadata: Metadata,
    spec: Spec,
    status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    name: String,
    namespace: String,
    deletion_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    node_name: String,
    #[serde(deserialize_with = "null_as_empty")]
    containers: Vec<Container>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Container {
    name: String,
    #[serde(deserialize_with = "null_as_empty")]
    args: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodStatus {
    phase: String,
    #[serde(deserialize_with = "null_as_empty")]
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    ready: bool,
    state: State,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct State {
    running: Option<Value>,
    waiting: Option<Why>,
    terminated: Option<Why>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Why {
    reason: String,
}

/// The names of a list of nodes.
pub(super) fn node_names(list: Value) -> Result<BTreeSet<String>, String> {
    let List { items } = parsed(list)?;
    Ok(items.into_iter().map(|node| node.metadata.name).collect())
}

fn parsed(list: Value) -> Result<List, String> {
    serde_json::from_value(list).map_err(|error| format!("the list cannot be read: {error}"))
}

/// The pods of the daemon by node, the best one of each: during an update a node has two.
pub(super) fn daemon_pods(list: Value) -> Result<BTreeMap<String, Pod>, String> {
    let List { items } = parsed(list)?;
    let mut pods: BTreeMap<String, Pod> = BTreeMap::new();
    for object in items.into_iter().filter(|object| !object.spec.node_name.is_empty()) {
        let (node, pod) = (object.spec.node_name.clone(), pod(object));
        let rank = |pod: &Pod| (pod.problem.is_none(), pod.is_ready, !pod.is_leaving);
        if pods.get(&node).is_none_or(|known| rank(known) < rank(&pod)) {
            pods.insert(node, pod);
        }
    }
    Ok(pods)
}

fn pod(object: Object) -> Pod {
    let Object { metadata, spec, status } = object;
    let mut containers = spec.containers;
    let own = containers.iter().position(|container| container.name == CONTAINER).unwrap_or(0);
    let Container { name: container, args } =
        if containers.is_empty() { Container::default() } else { containers.swap_remove(own) };
    let state = status.container_statuses.into_iter().find(|state| state.name == container);
    let is_ready = state.as_ref().is_some_and(|state| state.ready);
    let state = state.map(|state| state.state).unwrap_or_default();
    let name = metadata.name;
    let problem = state.running.is_none().then(|| {
        let why = state.waiting.or(state.terminated).map(|why| why.reason);
        match why.filter(|why| !why.is_empty()) {
            Some(why) => format!("its pod {name} does not run: {why}"),
            None => format!("its pod {name} does not run: {}", status.phase),
        }
    });
    Pod {
        namespace: metadata.namespace,
        paths: paths(&args),
        problem,
        is_ready,
        is_leaving: metadata.deletion_timestamp.is_some(),
        name,
        container,
    }
}

/// The daemon's options of paths, each as one word.
fn paths(args: &[String]) -> Vec<String> {
    let mut paths = Vec::new();
    for (index, word) in args.iter().enumerate() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word.as_str(), args.get(index + 1).map(String::as_str)),
        };
        if let Some(value) = value.filter(|_| PATHS.contains(&name)) {
            paths.push(format!("{name}={value}"));
        }
    }
    paths
}

/// Combines the pods with the nodes and the names of `--nodes`.
///
/// `nodes` is the list of nodes, limited by `--selector`; `None` if it cannot be read. Then only
/// nodes with a pod are known.
pub(super) fn select(
    mut pods: BTreeMap<String, Pod>,
    nodes: Option<&BTreeSet<String>>,
    named: &[String],
    namespace: &str,
) -> Targets {
    let named: BTreeSet<&String> = named.iter().collect();
    let known = nodes.cloned().unwrap_or_else(|| pods.keys().cloned().collect());
    let mut targets = Targets::default();
    for node in known.iter().filter(|node| named.is_empty() || named.contains(node)) {
        match pods.remove(node) {
            Some(Pod { problem: Some(problem), .. }) => {
                targets.away.insert(node.clone(), problem);
            }
            Some(pod) => targets.pods.push((node.clone(), pod)),
            None if named.is_empty() => {
                targets.without_daemon.insert(node.clone());
            }
            None => {
                targets.away.insert(node.clone(), no_pod(namespace));
            }
        }
    }
    for node in named.into_iter().filter(|node| !known.contains(*node)) {
        let why = match nodes {
            Some(_) => "no selected node has this name".to_owned(),
            None => no_pod(namespace),
        };
        targets.away.insert(node.clone(), why);
    }
    targets
}

fn no_pod(namespace: &str) -> String {
    format!(
        "no daemon pod in namespace {namespace} is on it; a daemon that runs as a service is not \
         reachable through the API server"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(node: &str, name: &str, state: &Value, ready: bool, leaving: bool) -> Value {
        json!({
            "metadata": {
                "name": name, "namespace": "kube-system",
                "deletionTimestamp": leaving.then_some("2026-11-21T00:00:00Z"),
            },
            "spec": {
                "nodeName": node,
                "containers": [
                    {"name": "other"},
                    {"name": "holdfast", "args": ["run", "--host-root=/host", "--state-dir", "/s", "--log-format=json"]},
                ],
            },
            "status": {
                "phase": "Pending",
                "containerStatuses": [{"name": "holdfast", "ready": ready, "state": state}],
            },
        })
    }

    fn names(targets: &Targets) -> Vec<(&str, &str)> {
        targets.pods.iter().map(|(node, pod)| (node.as_str(), pod.name.as_str())).collect()
    }

    #[test]
    fn each_node_has_its_best_pod() {
        let (running, waiting) =
            (json!({"running": {}}), json!({"waiting": {"reason": "ImagePullBackOff"}}));
        let list = json!({"items": [
            object("b", "b-old", &running, true, true),
            object("b", "b-new", &running, true, false),
            object("a", "a-old", &running, true, false),
            object("a", "a-new", &waiting, false, false),
            object("c", "c", &waiting, false, false),
            object("d", "d", &json!({}), false, false),
            object("e", "e", &running, false, false),
            object("", "unscheduled", &json!({}), false, false),
        ]});
        let pods = daemon_pods(list).unwrap();
        assert_eq!(pods["a"].paths, ["--host-root=/host", "--state-dir=/s"]);
        assert_eq!(pods["a"].container, "holdfast");
        let nodes: BTreeSet<String> = ["a", "b", "c", "d", "e", "f"].map(str::to_owned).into();
        let targets = select(pods, Some(&nodes), &[], "kube-system");
        assert_eq!(
            names(&targets),
            [("a", "a-old"), ("b", "b-new"), ("e", "e")],
            "one that is not ready may answer"
        );
        assert_eq!(targets.away["c"], "its pod c does not run: ImagePullBackOff");
        assert_eq!(targets.away["d"], "its pod d does not run: Pending");
        assert_eq!(targets.without_daemon, ["f".to_owned()].into());
    }

    #[test]
    fn a_named_node_is_never_left_out_silently() {
        let running = json!({"running": {}});
        let list = json!({"items": [object("a", "a", &running, true, false), object("b", "b", &running, true, false)]});
        let pods = daemon_pods(list).unwrap();
        let nodes: BTreeSet<String> = ["a", "b", "c"].map(str::to_owned).into();
        let named = ["b", "c", "x"].map(str::to_owned);
        let targets = select(pods.clone(), Some(&nodes), &named, "kube-system");
        assert_eq!(names(&targets), [("b", "b")]);
        assert!(targets.away["c"].starts_with("no daemon pod in namespace kube-system"));
        assert_eq!(targets.away["x"], "no selected node has this name");
        assert_eq!(targets.without_daemon, BTreeSet::new());

        // Without the right to list nodes.
        let targets = select(pods, None, &named, "kube-system");
        assert_eq!(names(&targets), [("b", "b")]);
        assert!(targets.away["x"].starts_with("no daemon pod"));
    }

    #[test]
    fn unknown_forms_of_objects_are_no_panic() {
        for list in [json!(null), json!({"items": 3}), json!({"items": [{"spec": 3}]})] {
            assert!(daemon_pods(list).is_err());
        }
        let bare = json!({"items": [{
            "spec": {"nodeName": "a", "containers": null},
            "status": {"containerStatuses": null},
        }]});
        assert_eq!(daemon_pods(json!({"items": null})), Ok(BTreeMap::new()));
        assert_eq!(
            daemon_pods(bare).unwrap()["a"].problem.as_deref(),
            Some("its pod  does not run: ")
        );
        assert_eq!(paths(&["--config".to_owned()]), Vec::<String>::new());
    }
}
