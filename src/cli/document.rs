//! Output forms of grants: rows of a JSON document, cells of a table, and descriptions of release
//! proofs.

mod claim;

use self::claim::{Claim, Pod, claim, pod};
use crate::admin::Processors;
use crate::console::screen::Tint;
use crate::console::table::{Table, UNKNOWN};
use crate::console::text::Text;
use crate::domain::{
    ClaimRef, DeviceId, Grant, GrantState, PendingRelease, PendingReleases, Timestamp,
};
use crate::ledger::core::{
    CLAIM_GONE, NEVER_PREPARED, NEVER_STARTED, OPERATOR, POD_GONE, REALLOCATED, SUPERSEDED,
    UNPREPARED,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A document of grants, such as that of `who -o json`. An unknown name is `null`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Document<'a> {
    schema: u32,
    grants: Vec<Row<'a>>,
}

/// One grant of a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row<'a> {
    alloc_id: &'a str,
    resource: &'a str,
    devices: Vec<&'a str>,
    state: &'static str,
    pod: Option<Pod<'a>>,
    container: Option<&'a str>,
    granted_at: Timestamp,
    bound_at: Option<Timestamp>,
    released_at: Option<Timestamp>,
    released_by: Option<&'a str>,
    /// NUMA nodes of the devices; empty if unknown.
    numa_nodes: BTreeSet<u32>,
    /// The exclusive CPUs of the container, such as `2-3,10`, and their NUMA nodes; null if it has
    /// none or if they are unknown.
    cpus: Option<String>,
    cpu_numa_nodes: Option<&'a BTreeSet<u32>>,
    /// Since when the kubelet has not listed the pod; only while the grant is suspect.
    suspect_at: Option<Timestamp>,
    /// The claim that holds the devices, with all its pods; absent for a grant by an Allocate.
    #[serde(skip_serializing_if = "Option::is_none")]
    claim: Option<Claim<'a>>,
    /// What the release waits for, if the pod has ended or is no longer listed; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pending_release: Option<PendingRelease>,
    /// The devices that are unhealthy now, with the reason; absent if there are none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    unhealthy: BTreeMap<&'a str, &'a str>,
}

impl<'a> Row<'a> {
    /// Adds the health of the devices.
    #[must_use]
    pub fn with_health(self, of: &'a Grant, unhealthy_devices: &'a UnhealthyDevices) -> Row<'a> {
        Row {
            unhealthy: unhealthy_of(of, unhealthy_devices)
                .map(|(id, reason)| (id.as_str(), reason))
                .collect(),
            ..self
        }
    }

    /// Adds what the release waits for.
    #[must_use]
    pub fn with_pending(self, of: &Grant, pending: &PendingReleases) -> Row<'a> {
        Row { pending_release: PendingRelease::of(of, pending), ..self }
    }
}

/// Unhealthy devices by their own ids (not those of shares), each with the reason.
pub type UnhealthyDevices = BTreeMap<DeviceId, String>;

/// The unhealthy devices of a live grant. A share has the health of its device.
fn unhealthy_of<'a>(
    grant: &'a Grant,
    unhealthy_devices: &'a UnhealthyDevices,
) -> impl Iterator<Item = (&'a DeviceId, &'a str)> {
    let reason = |id: &DeviceId| {
        unhealthy_devices
            .get(id)
            .or_else(|| unhealthy_devices.get(&id.shared()?))
            .map(String::as_str)
    };
    let devices = grant.devices.iter().filter(|_| grant.is_live());
    devices.filter_map(move |device| Some((&device.id, reason(&device.id)?)))
}

/// The reason alone if the grant has one device; otherwise each unhealthy device with its reason.
fn health(grant: &Grant, unhealthy_devices: &UnhealthyDevices) -> String {
    let alone = grant.devices.len() == 1;
    let cells = unhealthy_of(grant, unhealthy_devices)
        .map(|(id, reason)| if alone { reason.to_owned() } else { format!("{id} {reason}") });
    cells.collect::<Vec<_>>().join(", ")
}

/// Grants as a document, in the given order.
pub fn document<'a>(
    grants: impl IntoIterator<Item = &'a Grant>,
    processors: &'a [Processors],
    unhealthy_devices: &'a UnhealthyDevices,
    pending: &PendingReleases,
) -> Document<'a> {
    let row = |grant| {
        row(grant, processors).with_health(grant, unhealthy_devices).with_pending(grant, pending)
    };
    Document { schema: 1, grants: grants.into_iter().map(row).collect() }
}

/// The exclusive CPUs of the container that holds a grant. The kubelet identifies pods by name, so
/// for two pods with one name only the current holder matches.
fn of_holder<'a>(grant: &Grant, processors: &'a [Processors]) -> Option<&'a Processors> {
    let (GrantState::Bound { pod, container, .. } | GrantState::Suspect { pod, container, .. }) =
        &grant.state
    else {
        return None;
    };
    let (namespace, name) = (pod.namespace.as_ref()?, pod.name.as_ref()?);
    processors
        .iter()
        .find(|its| (&its.namespace, &its.pod, &its.container) == (namespace, name, container))
}

fn numa_nodes(grant: &Grant) -> BTreeSet<u32> {
    grant.devices.iter().flat_map(|device| device.numa_nodes.iter().copied()).collect()
}

/// A grant as a row of a document.
#[must_use]
pub fn row<'a>(grant: &'a Grant, processors: &'a [Processors]) -> Row<'a> {
    let processors = of_holder(grant, processors);
    let (released_at, released_by) = match &grant.state {
        GrantState::Released { released_at, released_by, .. } => {
            (Some(*released_at), Some(released_by.as_str()))
        }
        _ => (None, None),
    };
    Row {
        alloc_id: grant.alloc_id.as_str(),
        resource: grant.resource.as_str(),
        devices: grant.devices.iter().map(|device| device.id.as_str()).collect(),
        state: grant.state_name(),
        pod: grant.pod().map(pod),
        container: grant.container(),
        granted_at: grant.granted_at,
        bound_at: bound_at(grant),
        released_at,
        released_by,
        numa_nodes: numa_nodes(grant),
        cpus: processors.map(Processors::list),
        cpu_numa_nodes: processors.map(|processors| &processors.numa_nodes),
        suspect_at: if let GrantState::Suspect { suspect_at, .. } = grant.state {
            Some(suspect_at)
        } else {
            None
        },
        claim: claim(grant),
        pending_release: None,
        unhealthy: BTreeMap::new(),
    }
}

fn bound_at(grant: &Grant) -> Option<Timestamp> {
    match &grant.state {
        GrantState::Granted => None,
        GrantState::Prepared { prepared_at, .. } => Some(*prepared_at),
        GrantState::Bound { bound_at, .. } | GrantState::Suspect { bound_at, .. } => {
            Some(*bound_at)
        }
        GrantState::Released { bound_at, .. } => *bound_at,
    }
}

/// Grants as a table: holder, devices, and since when. If any container has exclusive CPUs, the
/// table has columns for them and for the NUMA nodes. If any device is unhealthy, it has a column
/// for the reason. If any release waits for proof, it has a column for what is missing.
pub fn table<'a>(
    grants: impl IntoIterator<Item = &'a Grant>,
    processors: &[Processors],
    unhealthy_devices: &UnhealthyDevices,
    pending: &PendingReleases,
) -> Text {
    let grants: Vec<&Grant> = grants.into_iter().collect();
    let numa: &[&str] = if processors.is_empty() { &[] } else { &["NUMA", "CPUS"] };
    let has_unhealthy =
        grants.iter().any(|grant| unhealthy_of(grant, unhealthy_devices).next().is_some());
    let unhealthy: &[&str] = if has_unhealthy { &["UNHEALTHY"] } else { &[] };
    let waits = |grant: &Grant| PendingRelease::of(grant, pending);
    let has_waits = grants.iter().any(|grant| waits(grant).is_some());
    let waiting: &[&str] = if has_waits { &["WAITS FOR"] } else { &[] };
    let table = Table::new(
        &[
            &["NAMESPACE", "POD", "CONTAINER", "RESOURCE", "STATE", "SINCE"],
            waiting,
            numa,
            unhealthy,
            &["DEVICES"],
        ]
        .concat(),
    );
    let table = table
        .shrinking(&["DEVICES", "UNHEALTHY", "RESOURCE", "NAMESPACE", "POD"])
        .omitting(&["SINCE", "CONTAINER", "WAITS FOR"]);
    let mut table = table
        .tinted("STATE", tint)
        .tinted("UNHEALTHY", |cell| if cell == UNKNOWN { Tint::Plain } else { Tint::Red });
    for grant in grants {
        let [namespace, pod, container] = holder(grant);
        let release = waits(grant);
        let mut cells = vec![
            namespace,
            pod,
            container,
            grant.resource.to_string(),
            grant.state_for_people(release.as_ref()).to_owned(),
            grant.granted_at.to_seconds(),
        ];
        cells.extend(has_waits.then(|| release.map(|it| it.short()).unwrap_or_default()));
        if !numa.is_empty() {
            cells.push(numbers(&numa_nodes(grant)));
            let own =
                |own: &Processors| format!("{} (NUMA {})", own.list(), numbers(&own.numa_nodes));
            cells.push(of_holder(grant, processors).map(own).unwrap_or_default());
        }
        cells.extend(has_unhealthy.then(|| health(grant, unhealthy_devices)));
        cells.push(devices(grant));
        table.row(cells);
    }
    table.into()
}

/// The colour of a state: yellow if the grant may have ended or has no known holder.
fn tint(state: &str) -> Tint {
    match state {
        "bound" | "prepared" => Tint::Green,
        "granted" => Tint::Yellow,
        _ if state.starts_with("pod ") || ["suspect", "unprepared"].contains(&state) => {
            Tint::Yellow
        }
        _ => Tint::Plain,
    }
}

fn numbers(numbers: &BTreeSet<u32>) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Grants as a table with start, end, and the proof of the release.
pub fn history_table<'a>(grants: impl IntoIterator<Item = &'a Grant>) -> Table {
    let table = Table::new(&[
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
    let table = table.shrinking(&["DEVICES", "PROOF", "CONTAINER", "RESOURCE", "NAMESPACE", "POD"]);
    let mut table =
        table.omitting(&["STATE", "PROOF", "CONTAINER", "RESOURCE"]).tinted("STATE", tint);
    for grant in grants {
        let (until, proof) = match &grant.state {
            GrantState::Released { released_at, released_by, .. } => {
                (released_at.to_seconds(), released_by.clone())
            }
            _ => Default::default(),
        };
        let [namespace, pod, container] = holder(grant);
        let (from, resource, state) = (
            grant.granted_at.to_seconds(),
            grant.resource.to_string(),
            grant.state_name().to_owned(),
        );
        table.row([from, until, namespace, pod, container, resource, state, proof, devices(grant)]);
    }
    table
}

/// Namespace, pod and container; empty if unknown. A pod without a known name is shown by its UID.
/// The grant of a claim has the names of all its pods, and the claim's name, or else its UID,
/// instead of a container.
fn holder(grant: &Grant) -> [String; 3] {
    if let Some(hold) = &grant.claim {
        let names =
            grant.pods().map(|pod| pod.name.clone().unwrap_or_else(|| format!("uid:{}", pod.uid)));
        let pods = names.collect::<Vec<_>>().join(",");
        let ClaimRef { uid, namespace, name } = &hold.claim;
        let claim = if hold.claim.is_named() { name } else { uid };
        return [namespace.clone(), pods, format!("claim:{claim}")];
    }
    let pod = grant.pod();
    let name = pod.map(|pod| pod.name.clone().unwrap_or_else(|| format!("uid:{}", pod.uid)));
    let namespace = pod.and_then(|pod| pod.namespace.clone());
    [
        namespace.unwrap_or_default(),
        name.unwrap_or_default(),
        grant.container().unwrap_or_default().to_owned(),
    ]
}

/// The device ids of a grant, separated by commas.
#[must_use]
pub fn devices(grant: &Grant) -> String {
    grant.devices.iter().map(|device| device.id.as_str()).collect::<Vec<_>>().join(",")
}

/// The holder of a grant in words: `default/web-0, container main`.
#[must_use]
pub fn holder_in_words(grant: &Grant) -> String {
    if let Some(hold) = &grant.claim {
        let pods: Vec<String> = grant.pods().map(ToString::to_string).collect();
        return match &pods[..] {
            [] => format!("claim {}", hold.claim),
            [pod] => format!("claim {}, pod {pod}", hold.claim),
            pods => format!("claim {}, pods {}", hold.claim, pods.join(", ")),
        };
    }
    match holder(grant) {
        [_, pod, _] if pod.is_empty() => "a container that the kubelet never listed".into(),
        [namespace, pod, container] if namespace.is_empty() => {
            format!("{pod}, container {container}")
        }
        [namespace, pod, container] => format!("{namespace}/{pod}, container {container}"),
    }
}

/// The proof of a release, in words.
#[must_use]
pub fn proof_in_words(released_by: &str) -> String {
    match released_by {
        POD_GONE => format!(
            "{released_by}: the kubelet no longer listed the pod, and its cgroup was removed"
        ),
        SUPERSEDED => {
            format!(
                "{released_by}: the kubelet allocated devices to the container again, after \
                 all processes of the pod had exited"
            )
        }
        NEVER_STARTED => {
            format!("{released_by}: a later checkpoint of the kubelet did not contain it")
        }
        UNPREPARED => format!(
            "{released_by}: the kubelet unprepared the claim, and no process of its pods ran"
        ),
        CLAIM_GONE => format!(
            "{released_by}: neither the API server nor the kubelet had the allocation of the \
             claim any longer, and the cgroups of its pods were removed"
        ),
        REALLOCATED => format!(
            "{released_by}: the claim was allocated again, and no process of its former pods ran"
        ),
        NEVER_PREPARED => {
            format!("{released_by}: the claim was never prepared, and the kubelet did not have it")
        }
        OPERATOR => format!(
            "{released_by}: an operator released the claim, and the cgroups of its pods were \
             removed"
        ),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::screen::Screen;
    use crate::domain::{
        AllocId, Allocated, ClaimHold, ClaimedDevice, ContainerEdits, DraName, GrantedDevice,
        MissingProof, PodRef, PodSight,
    };
    use std::sync::Arc;

    fn grant(state: GrantState) -> Grant {
        let device = |id: &str| GrantedDevice {
            id: DeviceId::new(id),
            key: format!("pci:{id}"),
            numa_nodes: vec![],
            nodes: Vec::new(),
            objects: Vec::new(),
        };
        Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: vec![device("GPU-b"), device("GPU-a")],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1_700_000_000_000),
            version: "0.1.0".into(),
            state,
        }
    }

    fn two() -> [Grant; 2] {
        let pod = |name: Option<&str>| PodRef {
            uid: "u1".into(),
            namespace: name.map(|_| "default".into()),
            name: name.map(Into::into),
        };
        let (container, bound_at) = ("main".to_owned(), Timestamp(1_700_000_001_000));
        let released = GrantState::Released {
            pod: Some(pod(None)),
            container: Some(container.clone()),
            bound_at: Some(bound_at),
            released_at: Timestamp(1_700_000_002_000),
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        };
        [grant(GrantState::Bound { pod: pod(Some("web-0")), container, bound_at }), grant(released)]
    }

    #[test]
    fn the_document_is_what_is_promised() {
        let wanted = concat!(
            r#"{"schema":1,"grants":["#,
            r#"{"alloc_id":"a-1","resource":"nvidia.com/gpu","devices":["GPU-b","GPU-a"],"state":"bound","#,
            r#""pod":{"namespace":"default","name":"web-0","uid":"u1"},"container":"main","granted_at":"2023-11-14T22:13:20.000Z","#,
            r#""bound_at":"2023-11-14T22:13:21.000Z","released_at":null,"released_by":null,"#,
            r#""numa_nodes":[],"cpus":null,"cpu_numa_nodes":null,"suspect_at":null},"#,
            r#"{"alloc_id":"a-1","resource":"nvidia.com/gpu","devices":["GPU-b","GPU-a"],"state":"released","#,
            r#""pod":{"namespace":null,"name":null,"uid":"u1"},"container":"main","granted_at":"2023-11-14T22:13:20.000Z","#,
            r#""bound_at":"2023-11-14T22:13:21.000Z","released_at":"2023-11-14T22:13:22.000Z","released_by":"pod_gone","#,
            r#""numa_nodes":[],"cpus":null,"cpu_numa_nodes":null,"suspect_at":null}]}"#,
        );
        assert_eq!(
            serde_json::to_string(&document(
                &two(),
                &[],
                &UnhealthyDevices::new(),
                &PendingReleases::new()
            ))
            .unwrap(),
            wanted
        );
    }

    #[test]
    fn a_grant_without_a_known_holder_has_no_pod() {
        let json = serde_json::to_value(document(
            [&grant(GrantState::Granted)],
            &[],
            &UnhealthyDevices::new(),
            &PendingReleases::new(),
        ))
        .unwrap();
        assert!(json["grants"][0]["pod"].is_null() && json["grants"][0]["container"].is_null());
    }

    #[test]
    fn the_table_is_aligned_and_has_a_dash_for_unknown() {
        let wanted = "\
NAMESPACE  POD     CONTAINER  RESOURCE        STATE     SINCE                 DEVICES
default    web-0   main       nvidia.com/gpu  bound     2023-11-14T22:13:20Z  GPU-b,GPU-a
-          uid:u1  main       nvidia.com/gpu  released  2023-11-14T22:13:20Z  GPU-b,GPU-a
-          -       -          nvidia.com/gpu  granted   2023-11-14T22:13:20Z  GPU-b,GPU-a
";
        let [bound, released] = two();
        assert_eq!(
            table(
                [&bound, &released, &grant(GrantState::Granted)],
                &[],
                &UnhealthyDevices::new(),
                &PendingReleases::new()
            ),
            wanted
        );
    }

    #[test]
    fn a_pending_release_shows_what_it_waits_for() {
        let [bound, _] = two();
        let GrantState::Bound { pod, container, bound_at } = bound.state.clone() else {
            panic!("it is bound")
        };
        let suspect_at = Timestamp(1_700_000_060_000);
        let suspect = grant(GrantState::Suspect { pod, container, bound_at, suspect_at });
        let seen = PendingRelease {
            pod: PodSight::Gone,
            since: Some(suspect_at),
            lists: 1,
            waits_for: vec![MissingProof::Lists],
        };
        let pending = PendingReleases::from([(suspect.alloc_id.clone(), seen)]);
        let wanted = "\
NAMESPACE  POD    CONTAINER  RESOURCE        STATE     SINCE                 WAITS FOR                                               DEVICES
default    web-0  main       nvidia.com/gpu  pod gone  2023-11-14T22:13:20Z  2 kubelet lists without it, since 2023-11-14T22:14:20Z  GPU-b,GPU-a
";
        assert_eq!(table([&suspect], &[], &UnhealthyDevices::new(), &pending), wanted);
        let unhealthy = UnhealthyDevices::new();
        let json = serde_json::to_value(document([&suspect], &[], &unhealthy, &pending)).unwrap();
        let row = &json["grants"][0];
        assert_eq!(
            (&row["state"], &row["suspect_at"]),
            (&"suspect".into(), &"2023-11-14T22:14:20.000Z".into())
        );
        let release = serde_json::json!({"pod": "gone", "since": "2023-11-14T22:14:20.000Z",
            "lists": 1, "waits_for": ["lists"]});
        assert_eq!(row["pending_release"], release);

        // Without a daemon only the state of the grant is known.
        let wanted = "\
NAMESPACE  POD    CONTAINER  RESOURCE        STATE         SINCE                 WAITS FOR                   DEVICES
default    web-0  main       nvidia.com/gpu  pod unlisted  2023-11-14T22:13:20Z  since 2023-11-14T22:14:20Z  GPU-b,GPU-a
";
        assert_eq!(table([&suspect], &[], &unhealthy, &PendingReleases::new()), wanted);
        assert!(!table([&bound], &[], &unhealthy, &PendingReleases::new()).contains("WAITS FOR"));
    }

    #[test]
    fn exclusive_cpus_are_in_the_table() {
        let own = Processors {
            namespace: "default".into(),
            pod: "web-0".into(),
            container: "main".into(),
            cpus: [2, 3, 10].into(),
            numa_nodes: [0].into(),
        };
        let [mut bound, released] = two();
        bound.devices[0].numa_nodes = vec![1];
        let wanted = "\
NAMESPACE  POD     CONTAINER  RESOURCE        STATE     SINCE                 NUMA  CPUS             DEVICES
default    web-0   main       nvidia.com/gpu  bound     2023-11-14T22:13:20Z  1     2-3,10 (NUMA 0)  GPU-b,GPU-a
-          uid:u1  main       nvidia.com/gpu  released  2023-11-14T22:13:20Z  -     -                GPU-b,GPU-a
";
        let processors = [own];
        assert_eq!(
            table(
                [&bound, &released],
                &processors,
                &UnhealthyDevices::new(),
                &PendingReleases::new()
            ),
            wanted
        );
        let json = serde_json::to_value(document(
            [&bound, &released],
            &processors,
            &UnhealthyDevices::new(),
            &PendingReleases::new(),
        ))
        .unwrap();
        let of = |row: usize| {
            ["numa_nodes", "cpus", "cpu_numa_nodes"].map(|key| json["grants"][row][key].to_string())
        };
        assert_eq!(of(0), ["[1]", "\"2-3,10\"", "[0]"]);
        assert_eq!(of(1), ["[]", "null", "null"]);
    }

    #[test]
    fn an_unhealthy_device_is_in_the_row_of_its_holder() {
        let unhealthy_devices =
            UnhealthyDevices::from([(DeviceId::new("GPU-b"), "xid".to_owned())]);
        let wanted = "\
NAMESPACE  POD     CONTAINER  RESOURCE        STATE     SINCE                 UNHEALTHY  DEVICES
default    web-0   main       nvidia.com/gpu  bound     2023-11-14T22:13:20Z  GPU-b xid  GPU-b,GPU-a
-          uid:u1  main       nvidia.com/gpu  released  2023-11-14T22:13:20Z  -          GPU-b,GPU-a
";
        let [mut bound, released] = two();
        assert_eq!(
            table([&bound, &released], &[], &unhealthy_devices, &PendingReleases::new()),
            wanted
        );
        let json = serde_json::to_value(document(
            [&bound, &released],
            &[],
            &unhealthy_devices,
            &PendingReleases::new(),
        ))
        .unwrap();
        assert_eq!(json["grants"][0]["unhealthy"], serde_json::json!({"GPU-b": "xid"}));
        assert!(json["grants"][1]["unhealthy"].is_null(), "a released grant has no holder");
        bound.devices =
            vec![GrantedDevice { id: DeviceId::new("GPU-b::1"), ..bound.devices[0].clone() }];
        assert!(
            table([&bound], &[], &unhealthy_devices, &PendingReleases::new())
                .contains("  xid        GPU-b::1")
        );
    }

    #[test]
    fn a_claim_is_in_the_row_with_its_pods() {
        let allocated = Allocated {
            request: "gpu/large".into(),
            name: DraName { pool: "n1/gpu".into(), device: "gpu-b".into() },
            share_id: None,
            admin: false,
        };
        let claimed = ClaimedDevice {
            allocated,
            id: DeviceId::new("GPU-b"),
            cdi_devices: Vec::new(),
            edits: ContainerEdits::default(),
            metadata: String::new(),
        };
        let hold = ClaimHold {
            claim: ClaimRef { uid: "c1".into(), namespace: "ml".into(), name: "train".into() },
            allocation: "digest".into(),
            devices: vec![claimed],
        };
        let pod = |uid: &str, name: Option<&str>| PodRef {
            uid: uid.into(),
            namespace: Some("ml".into()),
            name: name.map(Into::into),
        };
        let prepared = |unprepared_at| Grant {
            claim: Some(Arc::new(hold.clone())),
            ..grant(GrantState::Prepared {
                pods: vec![pod("u1", Some("a")), pod("u2", None)],
                prepared_at: Timestamp(1_700_000_001_000),
                unprepared_at,
            })
        };
        let wanted = "\
NAMESPACE  POD       CONTAINER    RESOURCE        STATE       SINCE                 WAITS FOR                                         DEVICES
ml         a,uid:u2  claim:train  nvidia.com/gpu  prepared    2023-11-14T22:13:20Z  -                                                 GPU-b,GPU-a
ml         a,uid:u2  claim:train  nvidia.com/gpu  unprepared  2023-11-14T22:13:20Z  end of its processes, since 2023-11-14T22:13:30Z  GPU-b,GPU-a
";
        let grants = [prepared(None), prepared(Some(Timestamp(1_700_000_010_000)))];
        assert_eq!(table(&grants, &[], &UnhealthyDevices::new(), &PendingReleases::new()), wanted);
        assert_eq!(holder_in_words(&grants[0]), "claim ml/train, pods ml/a, u2");
        // A claim that was restored from its CDI file.
        let mut nameless = hold.clone();
        nameless.claim =
            ClaimRef { uid: "c9".into(), namespace: String::new(), name: String::new() };
        let nameless = Grant { claim: Some(Arc::new(nameless)), ..prepared(None) };
        assert_eq!(holder(&nameless), ["", "a,uid:u2", "claim:c9"].map(str::to_owned));
        let json = serde_json::to_value(document(
            &grants,
            &[],
            &UnhealthyDevices::new(),
            &PendingReleases::new(),
        ))
        .unwrap();
        let row = &json["grants"][1];
        assert_eq!(
            (&row["state"], &row["bound_at"], &row["container"], &row["pod"]["name"]),
            (
                &"prepared".into(),
                &"2023-11-14T22:13:21.000Z".into(),
                &serde_json::Value::Null,
                &"a".into()
            )
        );
        let wanted = serde_json::json!({
            "namespace": "ml", "name": "train", "uid": "c1", "allocation": "digest",
            "pods": [
                {"namespace": "ml", "name": "a", "uid": "u1"},
                {"namespace": "ml", "name": null, "uid": "u2"},
            ],
            "unprepared_at": "2023-11-14T22:13:30.000Z",
            "devices": [{
                "id": "GPU-b", "request": "gpu/large", "pool": "n1/gpu", "device": "gpu-b",
                "share_id": null, "admin": false,
            }],
        });
        assert_eq!(row["claim"], wanted);
    }

    #[test]
    fn the_history_has_both_ends_and_the_proof() {
        let wanted = "\
FROM                  UNTIL                 NAMESPACE  POD     CONTAINER  RESOURCE        STATE     PROOF     DEVICES
2023-11-14T22:13:20Z  -                     default    web-0   main       nvidia.com/gpu  bound     -         GPU-b,GPU-a
2023-11-14T22:13:20Z  2023-11-14T22:13:22Z  -          uid:u1  main       nvidia.com/gpu  released  pod_gone  GPU-b,GPU-a
";
        assert_eq!(history_table(&two()).on(Screen::default()), wanted);
        let narrow = "\
FROM                  UNTIL                 NAMESPACE  POD     DEVICES
2023-11-14T22:13:20Z  -                     default    web-0   GPU-b,GPU-a
2023-11-14T22:13:20Z  2023-11-14T22:13:22Z  -          uid:u1  GPU-b,GPU-a
left out on this width: CONTAINER, RESOURCE, STATE, PROOF
";
        assert_eq!(
            history_table(&two()).on(Screen { width: Some(80), ..Screen::default() }),
            narrow,
            "it fits a terminal of 80 columns"
        );
    }
}
