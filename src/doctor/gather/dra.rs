//! What the driver for claims needs: the directories of its sockets, and the API server.
//!
//! Every request is one that the daemon sends too, and changes nothing: the slice is created with
//! `dryRun=All`, which checks rights and admission policies.

use super::super::{Dra, DraApi, Facts, RefusedRequest, WriteAccess};
use super::files::writes;
use super::mounts::{Mount, mount_of, mounts};
use super::{AddFacts, QUERY_DEADLINE, ReaderInput, ask};
use crate::cluster::{Client, ClusterError, Collection, Credentials, RESOURCE_SLICES};
use crate::config::Config;
use crate::domain::{DRA_DRIVER, null_as_empty};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tokio::time::timeout;

/// The versions of the API group.
const GROUP: &str = "/apis/resource.k8s.io";
/// Asks for a right.
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
/// What a service account needs besides the requests that are sent: verb and resource.
const RIGHTS: [(&str, &str); 4] = [
    ("watch", "resourceslices"),
    ("update", "resourceslices"),
    ("delete", "resourceslices"),
    ("get", "resourceclaims"),
];

/// What each user needs for the status of claims.
const STATUS_RIGHT: (&str, &str) = ("patch", "resourceclaims/status");

pub(super) fn dra(input: &ReaderInput) -> AddFacts {
    let Some(config) = input.config.as_ref().filter(|config| config.dra) else {
        return Box::new(|_| ());
    };
    let mounts = mounts(input);
    let kubelet = &config.kubelet_root(&input.target.roots.kubelet);
    let folders = [kubelet.join("plugins").join(DRA_DRIVER), kubelet.join("plugins_registry")];
    let unusable = folders.into_iter().filter_map(|folder| {
        let why = why_unusable(&folder, kubelet, &mounts)?;
        Some((folder, why))
    });
    let dra = Dra { unusable: unusable.collect(), api: api(input, config) };
    Box::new(|facts: &mut Facts| facts.dra = Some(dra))
}

/// Why the driver cannot have a socket in this folder. It makes a folder that is missing.
fn why_unusable(folder: &Path, kubelet: &Path, mounts: &[Mount]) -> Option<String> {
    let below = |dir: &&Path| dir.starts_with(kubelet);
    let exists = |dir: &&Path| dir.symlink_metadata().is_ok();
    // Without the kubelet's directory, that is the problem.
    let present = folder.ancestors().take_while(below).find(exists)?;
    if !present.is_dir() {
        return Some(format!("`{}` is not a directory", present.display()));
    }
    let canonical: PathBuf = present.canonicalize().unwrap_or_else(|_| present.to_owned());
    let root_is_layers =
        mounts.iter().any(|mount| mount.at == Path::new("/") && mount.kind == "overlay");
    let mount = mount_of(mounts, &canonical);
    if root_is_layers && mount.is_some_and(|mount| mount.at == Path::new("/")) {
        return Some("this container does not mount it from the host".to_owned());
    }
    match writes(present, mount) {
        WriteAccess::Allowed => None,
        WriteAccess::MountReadOnly => Some("it is mounted read-only".to_owned()),
        WriteAccess::ReadOnly => Some("its file system is read-only".to_owned()),
        WriteAccess::StoppedByError => Some("the kernel refuses writes since an error".to_owned()),
        WriteAccess::DiskFailed(why) => Some(format!("its disk has failed: {why}")),
    }
}

/// The API server. `None` if this process may not read the credentials.
fn api(input: &ReaderInput, config: &Config) -> Option<Result<DraApi, String>> {
    let node = config.node.api_name().unwrap_or_default();
    let client = client(input, config);
    answer(input, examine(&client, &node, config.claim_status))
}

/// A client with the daemon's credentials.
pub(super) fn client(input: &ReaderInput, config: &Config) -> Client {
    let roots = &input.target.roots;
    Client::new(Credentials::new(&config.credentials, &roots.kubelet, &roots.host))
}

/// The answer of the API server, or why there is none. `None` if this process may not read the
/// credentials.
pub(super) fn answer<T>(
    input: &ReaderInput,
    question: impl Future<Output = Result<T, ClusterError>>,
) -> Option<Result<T, String>> {
    match ask(async { timeout(QUERY_DEADLINE, question).await })? {
        Ok(Err(ClusterError::Credentials(_))) if !input.may_read_all => None,
        Ok(asked) => Some(asked.map_err(|error| error.to_string())),
        Err(_elapsed) => Some(Err(format!(
            "the API server has not answered within {} s",
            QUERY_DEADLINE.as_secs()
        ))),
    }
}

/// `APIGroup` of apimachinery's `meta/v1`.
#[derive(Debug, Deserialize)]
struct Group {
    #[serde(deserialize_with = "null_as_empty")]
    versions: Vec<Version>,
}

#[derive(Debug, Deserialize)]
struct Version {
    version: String,
}

/// Asks the API server. An error is one after which nothing else can be asked.
async fn examine(
    client: &Client,
    node: &str,
    reports_claims: bool,
) -> Result<DraApi, ClusterError> {
    let user = client.who_am_i().await?;
    let versions = match client.get::<Group>(GROUP).await {
        Ok(group) => Some(group.versions.into_iter().map(|it| it.version).collect()),
        Err(error) if error.code() == Some(404) => Some(Vec::new()),
        Err(_) => None,
    };
    let mut api = DraApi {
        node: node.to_owned(),
        has_node: match node.is_empty() {
            true => None,
            false => client.node(node).await.ok().map(|found| found.is_some()),
        },
        node_of_credentials: user.node().map(str::to_owned),
        versions,
        refused: Vec::new(),
    };
    if node.is_empty() {
        return Ok(api);
    }
    let is_served = |versions: &Vec<String>| versions.iter().any(|version| version == "v1");
    if !api.versions.as_ref().is_none_or(is_served) {
        return Ok(api);
    }
    let own = Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", node);
    let listed = client.list::<Value>(&own).await.err();
    let path = format!("{RESOURCE_SLICES}?dryRun=All");
    let created = client.create::<Value>(&path, &trial(node)).await.err();
    for (request, refused) in [("list", listed), ("create", created)] {
        let refused = refused.filter(|error| matches!(error.code(), Some(401 | 403 | 422)));
        api.refused.extend(refused.map(|error| RefusedRequest {
            request: format!("{request} resourceslices"),
            why: error.to_string(),
            is_of_policy: error.is_of_policy(),
        }));
    }
    // The node authorizer knows rights for single objects only.
    let is_kubelet = user.kubelet_of().is_some();
    let rights = RIGHTS.into_iter().filter(|_| !is_kubelet);
    let of_status = Some(STATUS_RIGHT).filter(|_| reports_claims);
    for (verb, resource) in rights.chain(of_status) {
        if may(client, verb, resource).await == Some(false) {
            let request = format!("{verb} {resource}");
            api.refused.push(RefusedRequest { request, ..RefusedRequest::default() });
        }
    }
    Ok(api)
}

/// A slice without devices, which is never stored.
fn trial(node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": { "generateName": "holdfast-doctor-" },
        "spec": {
            "driver": DRA_DRIVER, "nodeName": node,
            "pool": { "name": format!("{node}/doctor"), "generation": 1, "resourceSliceCount": 1 },
        },
    })
}

/// Whether these credentials have a right; `None` if the API server does not answer.
async fn may(client: &Client, verb: &str, resource: &str) -> Option<bool> {
    let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
    let attributes = json!({
        "group": "resource.k8s.io", "verb": verb, "resource": resource, "subresource": part,
    });
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": { "resourceAttributes": attributes },
    });
    let answer: Value = client.review(ACCESS_REVIEWS, &review).await.ok()?;
    answer["status"]["allowed"].as_bool()
}
