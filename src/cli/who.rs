//! `holdfast who`: which container holds which device, as a JSON document and as a table.

use super::exit::{FAILURE, Failed};
use super::table::Table;
use super::{Global, block_on, show};
use crate::app::{ControlError, control_get};
use crate::domain::{Grant, GrantState, PodRef, Timestamp};
use crate::store;
use serde::Serialize;

/// Prints who holds what, as the running daemon knows it, else as the journal tells.
///
/// # Errors
/// When neither can be read.
pub fn run(global: &Global) -> Result<(), Failed> {
    let asked: Result<Vec<Grant>, ControlError> = block_on(control_get(&global.run_dir, "/v1/grants"))?;
    let grants = match asked {
        Ok(grants) => grants,
        Err(error @ ControlError::Absent { .. }) => {
            let grants = store::peek(&global.state_dir)?.grants;
            super::eprintln(format_args!("{error}; this is what the journal in `{}` tells", global.state_dir.display()));
            grants
        }
        Err(error) => return Err(Failed::new(FAILURE, error)),
    };
    show(global.output, &document(&grants), |_| if grants.is_empty() { "nobody holds a device\n".into() } else { table(&grants) })
}

/// The document of `who -o json`. A name that cannot be known is `null`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Document<'a> {
    schema: u32,
    grants: Vec<Row<'a>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Row<'a> {
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
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Pod<'a> {
    namespace: Option<&'a str>,
    name: Option<&'a str>,
    uid: &'a str,
}

/// Grants as a document, in the order in which they come.
pub fn document<'a>(grants: impl IntoIterator<Item = &'a Grant>) -> Document<'a> {
    Document { schema: 1, grants: grants.into_iter().map(row).collect() }
}

fn row(grant: &Grant) -> Row<'_> {
    let (released_at, released_by) = match &grant.state {
        GrantState::Released { released_at, released_by, .. } => (Some(*released_at), Some(released_by.as_str())),
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
    }
}

fn pod(pod: &PodRef) -> Pod<'_> {
    Pod { namespace: pod.namespace.as_deref(), name: pod.name.as_deref(), uid: &pod.uid }
}

fn bound_at(grant: &Grant) -> Option<Timestamp> {
    match &grant.state {
        GrantState::Granted => None,
        GrantState::Bound { bound_at, .. } | GrantState::Suspect { bound_at, .. } => Some(*bound_at),
        GrantState::Released { bound_at, .. } => *bound_at,
    }
}

/// Grants as a table: who, what, since when they have been in that state.
pub fn table<'a>(grants: impl IntoIterator<Item = &'a Grant>) -> String {
    let mut table = Table::new(&["NAMESPACE", "POD", "CONTAINER", "RESOURCE", "STATE", "SINCE", "DEVICES"]);
    for grant in grants {
        let pod = grant.pod();
        // A pod without a name is still told apart by its UID.
        let name = pod.map(|pod| pod.name.clone().unwrap_or_else(|| format!("uid:{}", pod.uid)));
        let devices: Vec<_> = grant.devices.iter().map(|device| device.id.as_str()).collect();
        table.row([
            pod.and_then(|pod| pod.namespace.clone()).unwrap_or_default(),
            name.unwrap_or_default(),
            grant.container().unwrap_or_default().to_owned(),
            grant.resource.to_string(),
            grant.state_name().to_owned(),
            since(grant).to_seconds(),
            devices.join(","),
        ]);
    }
    table.to_string()
}

fn since(grant: &Grant) -> Timestamp {
    match &grant.state {
        GrantState::Granted => grant.granted_at,
        GrantState::Bound { bound_at, .. } => *bound_at,
        GrantState::Suspect { suspect_at, .. } => *suspect_at,
        GrantState::Released { released_at, .. } => *released_at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{AllocId, ContainerEdits, DeviceId, GrantedDevice};

    fn grant(state: GrantState) -> Grant {
        let device = |id: &str| GrantedDevice { id: DeviceId::new(id), key: format!("pci:{id}"), numa_nodes: vec![] };
        Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: vec![device("GPU-b"), device("GPU-a")],
            edits: ContainerEdits::default(),
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1_700_000_000_000),
            version: "0.1.0".into(),
            state,
        }
    }

    fn two() -> [Grant; 2] {
        let pod = |name: Option<&str>| PodRef { uid: "u1".into(), namespace: name.map(|_| "default".into()), name: name.map(Into::into) };
        let (container, bound_at) = ("main".to_owned(), Timestamp(1_700_000_001_000));
        let released = GrantState::Released {
            pod: Some(pod(None)),
            container: Some(container.clone()),
            bound_at: Some(bound_at),
            released_at: Timestamp(1_700_000_002_000),
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
            r#""bound_at":"2023-11-14T22:13:21.000Z","released_at":null,"released_by":null},"#,
            r#"{"alloc_id":"a-1","resource":"nvidia.com/gpu","devices":["GPU-b","GPU-a"],"state":"released","#,
            r#""pod":{"namespace":null,"name":null,"uid":"u1"},"container":"main","granted_at":"2023-11-14T22:13:20.000Z","#,
            r#""bound_at":"2023-11-14T22:13:21.000Z","released_at":"2023-11-14T22:13:22.000Z","released_by":"pod_gone"}]}"#,
        );
        assert_eq!(serde_json::to_string(&document(&two())).unwrap(), wanted);
    }

    #[test]
    fn a_grant_that_nobody_is_known_to_have_has_no_pod() {
        let json = serde_json::to_value(document([&grant(GrantState::Granted)])).unwrap();
        assert!(json["grants"][0]["pod"].is_null() && json["grants"][0]["container"].is_null());
    }

    #[test]
    fn the_table_is_aligned_and_says_dash_for_what_is_not_known() {
        let wanted = "\
NAMESPACE  POD     CONTAINER  RESOURCE        STATE     SINCE                 DEVICES
default    web-0   main       nvidia.com/gpu  bound     2023-11-14T22:13:21Z  GPU-b,GPU-a
-          uid:u1  main       nvidia.com/gpu  released  2023-11-14T22:13:22Z  GPU-b,GPU-a
-          -       -          nvidia.com/gpu  granted   2023-11-14T22:13:20Z  GPU-b,GPU-a
";
        let [bound, released] = two();
        assert_eq!(table([&bound, &released, &grant(GrantState::Granted)]), wanted);
    }
}
