//! `holdfast ledger export`: the ledger as one document, which [`super::import`] reads.
//!
//! A document of schema 2 has every key of `who -o json` with the same meaning, plus the data
//! needed to hold a grant. A reader of schema 1 can read it too. Each grant is one line.

use crate::cli::source;
use crate::console::exit::Failed;
use crate::console::progress::Progress;
use crate::console::text::Text;
use crate::console::{Global, eprintln, not_printed};
use crate::domain::{
    AllocId, ClaimHold, ContainerEdits, DeviceId, Grant, GrantState, GrantedDevice,
    KubeletGeneration, PodRef, ResourceName, Timestamp,
};
use crate::store::ExportLine;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{self, BufWriter, Write};
use std::sync::Arc;

/// The schema version that is written.
pub(super) const SCHEMA: u32 = 2;

/// One grant of the document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exported {
    pub(super) alloc_id: AllocId,
    resource: ResourceName,
    devices: Vec<DeviceId>,
    state: String,
    pod: Option<PodRef>,
    container: Option<String>,
    granted_at: Timestamp,
    bound_at: Option<Timestamp>,
    released_at: Option<Timestamp>,
    released_by: Option<String>,
    // Since schema 2:
    suspect_at: Option<Timestamp>,
    granted_devices: Vec<GrantedDevice>,
    edits: ContainerEdits,
    boot_id: String,
    kubelet: Option<KubeletGeneration>,
    version: String,
    // Only of a claim, so that versions without these keys can read the document:
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<ClaimHold>,
    /// The pods of a live claim, and the other pods of a released one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pods: Vec<PodRef>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unprepared_at: Option<Timestamp>,
}

impl From<Grant> for Exported {
    fn from(grant: Grant) -> Self {
        let state = grant.state_name().to_owned();
        let (pod, container) = (grant.pod().cloned(), grant.container().map(str::to_owned));
        let (mut pods, mut unprepared) = Default::default();
        let (bound_at, suspect_at, released_at, released_by) = match grant.state {
            GrantState::Granted => (None, None, None, None),
            GrantState::Bound { bound_at, .. } => (Some(bound_at), None, None, None),
            GrantState::Suspect { bound_at, suspect_at, .. } => {
                (Some(bound_at), Some(suspect_at), None, None)
            }
            GrantState::Prepared { pods: all, prepared_at, unprepared_at } => {
                (pods, unprepared) = (all, unprepared_at);
                (Some(prepared_at), None, None, None)
            }
            GrantState::Released { bound_at, released_at, released_by, other_pods, .. } => {
                pods = other_pods;
                (bound_at, None, Some(released_at), Some(released_by))
            }
        };
        Exported {
            alloc_id: grant.alloc_id,
            resource: grant.resource,
            devices: grant.devices.iter().map(|device| device.id.clone()).collect(),
            state,
            pod,
            container,
            granted_at: grant.granted_at,
            bound_at,
            released_at,
            released_by,
            suspect_at,
            granted_devices: grant.devices,
            edits: grant.edits,
            boot_id: grant.boot_id,
            kubelet: grant.kubelet,
            version: grant.version,
            claim: grant.claim.map(Arc::unwrap_or_clone),
            pods,
            unprepared_at: unprepared,
        }
    }
}

impl Exported {
    /// Checks what names the grant, its devices and its pods.
    fn check_ids(&self) -> Result<(), String> {
        if self.alloc_id.as_str().is_empty() {
            return Err("its `alloc_id` is empty".into());
        }
        let mut seen = BTreeSet::new();
        for id in &self.devices {
            if id.as_str().is_empty() {
                return Err("a device has no id".into());
            }
            if !seen.insert(id) {
                return Err(format!("it has device `{id}` twice"));
            }
        }
        if self.pod.iter().chain(&self.pods).any(|pod| pod.uid.is_empty()) {
            return Err("a pod has no `uid`".into());
        }
        Ok(())
    }
}

impl TryFrom<Exported> for Grant {
    type Error = String;

    /// The grant, or an error that names the contradiction in it.
    fn try_from(exported: Exported) -> Result<Self, Self::Error> {
        exported.check_ids()?;
        let Exported {
            pod,
            container,
            bound_at,
            suspect_at,
            released_at,
            released_by,
            granted_devices,
            claim,
            pods,
            unprepared_at,
            ..
        } = exported;
        let is_claim = claim.is_some();
        let is_of_claim = exported.state == "prepared" || !pods.is_empty();
        if is_of_claim != is_claim && (is_of_claim || exported.state != "released") {
            return Err("its `claim` and its `state` contradict each other".into());
        }
        if granted_devices.is_empty() {
            return Err("it has no device".into());
        }
        if !granted_devices.iter().map(|device| &device.id).eq(&exported.devices) {
            return Err("its `devices` and `granted_devices` differ".into());
        }
        let state = match (
            exported.state.as_str(),
            pod,
            container,
            bound_at,
            suspect_at,
            released_at,
            released_by,
        ) {
            ("granted", None, None, None, None, None, None) => GrantState::Granted,
            ("bound", Some(pod), Some(container), Some(bound_at), None, None, None) => {
                GrantState::Bound { pod, container, bound_at }
            }
            (
                "suspect",
                Some(pod),
                Some(container),
                Some(bound_at),
                Some(suspect_at),
                None,
                None,
            ) => GrantState::Suspect { pod, container, bound_at, suspect_at },
            ("prepared", _, None, Some(prepared_at), None, None, None) => {
                GrantState::Prepared { pods, prepared_at, unprepared_at }
            }
            ("released", pod, container, bound_at, None, Some(released_at), Some(released_by)) => {
                GrantState::Released {
                    pod,
                    container,
                    bound_at,
                    released_at,
                    other_pods: pods,
                    released_by,
                }
            }
            _ => return Err("its `state` contradicts its other fields".into()),
        };
        Ok(Grant {
            alloc_id: exported.alloc_id,
            resource: exported.resource,
            devices: granted_devices,
            edits: exported.edits,
            claim: claim.map(Arc::new),
            boot_id: exported.boot_id,
            kubelet: exported.kubelet,
            granted_at: exported.granted_at,
            version: exported.version,
            state,
        })
    }
}

/// Prints the document while the ledger is read, so that its size does not matter.
///
/// # Errors
/// When the ledger cannot be read.
pub(super) fn run(global: &Global) -> Result<(), Failed> {
    let mut page = Page { out: BufWriter::new(io::stdout().lock()), grants: 0, written: Ok(()) };
    let mut progress = Progress::new("grants exported");
    let end = source::read(global, |part| {
        progress.at(page.grants, None);
        page.add(part)
    })?;
    drop(progress);
    page.end().map_err(|error| not_printed(&error))?;
    if let Some(problem) = end.problem {
        eprintln(format_args!("holdfast: released grants are missing from this export: {problem}"));
    }
    Ok(())
}

/// One part of the document, with unprintable characters escaped for a terminal.
fn json(part: &impl Serialize) -> io::Result<Text> {
    Ok(Text::json(&serde_json::to_string(part)?))
}

struct Page<W> {
    out: W,
    grants: usize,
    written: io::Result<()>,
}

impl<W: Write> Page<W> {
    fn add(&mut self, part: ExportLine) -> bool {
        self.written = self.write(part);
        self.written.is_ok()
    }

    fn write(&mut self, part: ExportLine) -> io::Result<()> {
        match part {
            ExportLine::Notes { names, listed, owed, verdicts } => {
                let (names, listed) = (json(&names)?, json(&listed)?);
                write!(
                    self.out,
                    "{{\"schema\":{SCHEMA},\n\"names\":{names},\n\"listed\":{listed},\n"
                )?;
                // Omit empty maps, so that versions without these keys can read the document.
                if !owed.is_empty() {
                    writeln!(self.out, "\"owed\":{},", json(&owed)?)?;
                }
                if !verdicts.is_empty() {
                    writeln!(self.out, "\"verdicts\":{},", json(&verdicts)?)?;
                }
                write!(self.out, "\"grants\":[")
            }
            ExportLine::Grant(grant) => {
                self.grants += 1;
                self.out.write_all(if self.grants == 1 { b"\n" } else { b",\n" })?;
                self.out.write_all(json(&Exported::from(*grant))?.as_bytes())
            }
        }
    }

    fn end(mut self) -> io::Result<()> {
        self.written.and_then(|()| self.out.write_all(b"\n]}\n")).and_then(|()| self.out.flush())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ClaimRef;

    fn hold() -> ClaimHold {
        ClaimHold {
            claim: ClaimRef { uid: "c1".into(), namespace: "ml".into(), name: "train".into() },
            allocation: "digest".into(),
            devices: Vec::new(),
        }
    }

    fn grants() -> Vec<Grant> {
        let pod = PodRef { uid: "u1".into(), namespace: Some("ml".into()), name: None };
        let (container, bound_at, at) =
            ("main".to_owned(), Timestamp(1_700_000_001_000), Timestamp(1_700_000_002_000));
        let states = [
            GrantState::Granted,
            GrantState::Bound { pod: pod.clone(), container: container.clone(), bound_at },
            GrantState::Suspect {
                pod: pod.clone(),
                container: container.clone(),
                bound_at,
                suspect_at: at,
            },
            GrantState::Released {
                pod: Some(pod.clone()),
                container: Some(container),
                bound_at: Some(bound_at),
                released_at: at,
                other_pods: Vec::new(),
                released_by: "pod_gone".into(),
            },
            GrantState::Released {
                pod: None,
                container: None,
                bound_at: None,
                released_at: at,
                other_pods: Vec::new(),
                released_by: "never_started".into(),
            },
        ];
        let of_claim = [
            GrantState::Prepared {
                pods: vec![pod.clone(), PodRef { uid: "u2".into(), ..pod.clone() }],
                prepared_at: bound_at,
                unprepared_at: Some(at),
            },
            GrantState::Released {
                pod: Some(pod.clone()),
                container: None,
                bound_at: Some(bound_at),
                released_at: at,
                released_by: "unprepared".into(),
                other_pods: vec![PodRef { uid: "u2".into(), ..pod.clone() }],
            },
            GrantState::Released {
                pod: Some(pod.clone()),
                container: None,
                bound_at: Some(bound_at),
                released_at: at,
                released_by: "claim_gone".into(),
                other_pods: Vec::new(),
            },
        ];
        let grant = |state| Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: DeviceId::new("GPU-1"),
                key: "pci:0000:18:00.0/10de:2330".into(),
                numa_nodes: vec![1],
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: ContainerEdits {
                cdi_devices: vec!["a/b=c".into()],
                ..ContainerEdits::default()
            },
            claim: None,
            boot_id: "boot".into(),
            kubelet: Some(KubeletGeneration { inode: 7, made_ns: 8 }),
            granted_at: Timestamp(1_700_000_000_000),
            version: "0.1.0".into(),
            state,
        };
        let with_claim = |state| Grant { claim: Some(Arc::new(hold())), ..grant(state) };
        let of_claim = of_claim.map(with_claim);
        states.into_iter().map(grant).chain(of_claim).collect()
    }

    #[test]
    fn a_grant_in_any_state_comes_back_as_it_was() {
        for grant in grants() {
            let json = serde_json::to_string(&Exported::from(grant.clone())).unwrap();
            assert_eq!(
                serde_json::from_str::<Exported>(&json).unwrap().try_into(),
                Ok(grant),
                "{json}"
            );
        }
    }

    #[test]
    fn a_state_of_a_claim_needs_the_claim_and_the_other_way_round() {
        let of = |n: usize| serde_json::to_value(Exported::from(grants().swap_remove(n))).unwrap();
        let parse = |value| Grant::try_from(serde_json::from_value::<Exported>(value).unwrap());
        let claim = of(5)["claim"].clone();
        for n in 0..3 {
            let mut bad = of(n);
            bad["claim"] = claim.clone();
            assert!(parse(bad).unwrap_err().contains("contradict"), "{n}");
        }
        for n in [5, 6] {
            let mut bad = of(n);
            bad.as_object_mut().unwrap().remove("claim");
            assert!(parse(bad).unwrap_err().contains("contradict"), "{n}");
        }
        assert!(of(0).get("claim").is_none() && of(0).get("pods").is_none());
    }

    #[test]
    fn the_document_is_what_is_promised() {
        let mut page = Page { out: Vec::new(), grants: 0, written: Ok(()) };
        assert!(page.add(ExportLine::Notes {
            names: Default::default(),
            listed: Default::default(),
            owed: Default::default(),
            verdicts: Default::default()
        }));
        assert!(page.add(ExportLine::Grant(Box::new(grants().swap_remove(2)))));
        page.out.extend_from_slice(b"\n]}\n");
        let wanted = concat!(
            "{\"schema\":2,\n\"names\":{},\n\"listed\":{},\n\"grants\":[\n",
            r#"{"alloc_id":"a-1","resource":"nvidia.com/gpu","devices":["GPU-1"],"state":"suspect","#,
            r#""pod":{"uid":"u1","namespace":"ml","name":null},"container":"main","granted_at":"2023-11-14T22:13:20.000Z","#,
            r#""bound_at":"2023-11-14T22:13:21.000Z","released_at":null,"released_by":null,"suspect_at":"2023-11-14T22:13:22.000Z","#,
            r#""granted_devices":[{"id":"GPU-1","key":"pci:0000:18:00.0/10de:2330","numa_nodes":[1]}],"#,
            r#""edits":{"envs":{},"mounts":[],"devices":[],"annotations":{},"cdi_devices":["a/b=c"]},"#,
            r#""boot_id":"boot","kubelet":{"inode":7,"ctime_ns":8},"version":"0.1.0"}"#,
            "\n]}\n",
        );
        assert_eq!(String::from_utf8(page.out).unwrap(), wanted);
    }
}
