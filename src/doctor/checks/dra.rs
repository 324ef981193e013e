//! The driver for claims (Dynamic Resource Allocation).

use super::super::codes::{
    DRA_API_NOT_SERVED, DRA_API_UNREACHABLE, DRA_DIRECTORY_UNUSABLE, DRA_NODE_UNKNOWN,
    DRA_POLICY_DENIES, DRA_PROBLEM, DRA_RIGHT_MISSING, DRA_STATUS_RIGHT_MISSING,
};
use super::super::{DraApi, Facts, Finding, RefusedRequest};
use super::list;
use serde_json::Value;

/// The API group.
const GROUP: &str = "resource.k8s.io/v1";

/// Whether the driver is on.
fn is_on(facts: &Facts) -> Option<bool> {
    Some(facts.config.as_ref()?.as_ref().ok()?.dra)
}

pub(super) fn directories(facts: &Facts) -> Option<Vec<Finding>> {
    if !is_on(facts)? {
        return Some(Vec::new());
    }
    let todo = "mount the directory into the container, writable (components/dra, or \
                `features.dra.enabled` of the chart); for the service, the drop-in dra.conf";
    let unusable = facts.dra.as_ref()?.unusable.iter();
    let found = unusable
        .map(|(path, why)| Finding::new(&DRA_DIRECTORY_UNUSABLE, path.display(), why, todo));
    Some(found.collect())
}

pub(super) fn api_server(facts: &Facts) -> Option<Vec<Finding>> {
    if !is_on(facts)? {
        return Some(Vec::new());
    }
    let api = match facts.dra.as_ref()?.api.as_ref()? {
        Ok(api) => api,
        Err(why) => {
            let todo = "check `cluster.credentials`, and whether this node reaches the API server; \
                        in a pod, components/dra or `features.dra.enabled` adds the token";
            return Some(vec![Finding::new(&DRA_API_UNREACHABLE, GROUP, why, todo)]);
        }
    };
    let mut found: Vec<Finding> = api.refused.iter().map(refused).collect();
    found.extend(not_served(api));
    found.extend(wrong_node(api));
    Some(found)
}

fn not_served(api: &DraApi) -> Option<Finding> {
    let versions = api.versions.as_ref().filter(|all| all.iter().all(|one| one != "v1"))?;
    let served = match versions.is_empty() {
        true => "the API server does not serve resource.k8s.io".to_owned(),
        false => format!("the API server serves only {} of resource.k8s.io", versions.join(", ")),
    };
    let todo = "Kubernetes 1.34 and newer serve v1; before, set `[dra] enabled = false`";
    Some(Finding::new(&DRA_API_NOT_SERVED, GROUP, served, todo))
}

fn wrong_node(api: &DraApi) -> Option<Finding> {
    let todo = "set NODE_NAME to the name of the node in the cluster (`kubectl get nodes`)";
    let other = api.node_of_credentials.as_ref().filter(|other| **other != api.node);
    let found = match other {
        _ if api.node.is_empty() => "the name of this node is not known".to_owned(),
        Some(other) => format!("the credentials are for the node `{other}`"),
        None if api.has_node == Some(false) => "the API server has no node of this name".to_owned(),
        None => return None,
    };
    let on = if api.node.is_empty() { "NODE_NAME" } else { &api.node };
    Some(Finding::new(&DRA_NODE_UNKNOWN, on, found, todo))
}

fn refused(refused: &RefusedRequest) -> Finding {
    let RefusedRequest { request, why, is_of_policy } = refused;
    if *is_of_policy {
        let todo = "the text names the policy and its reason. That of Holdfast permits slices of \
                    its driver on the node of the pod's token: compare NODE_NAME with the node; \
                    Kubernetes before 1.32 adds no node to tokens";
        return Finding::new(&DRA_POLICY_DENIES, request, why, todo);
    }
    let why = if why.is_empty() { "the credentials lack this right" } else { why };
    if request.ends_with("/status") {
        let todo = "components/claim-status or `features.claimStatus` has the ClusterRole; the \
                    kubelet's own credentials lack this right; or set `[dra] claim_status = false` \
                    (docs/dra.md)";
        return Finding::new(&DRA_STATUS_RIGHT_MISSING, request, why, todo);
    }
    let todo = "components/dra or `features.dra.enabled` has the ClusterRole; the kubelet's own \
                credentials need none (docs/dra.md)";
    Finding::new(&DRA_RIGHT_MISSING, request, why, todo)
}

/// What the daemon reports.
pub(super) fn reported(facts: &Facts) -> Option<Vec<Finding>> {
    let problems = list(facts.status()?, "dra_problems").iter().filter_map(Value::as_str);
    let todo = "docs/dra.md has the problems of the driver and what to do";
    let found = problems.map(|why| Finding::new(&DRA_PROBLEM, "the driver for claims", why, todo));
    Some(found.collect())
}
