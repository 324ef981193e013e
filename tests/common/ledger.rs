//! A ledger under random load from a seed, and the model of its expected content.

use super::Random;
use actix::Addr;
use holdfast::domain::{
    AllocId, Allocated, ClaimHold, ClaimRef, ClaimedDevice, ContainerEdits, DeviceId, DraName,
    Entry, Grant, GrantState, GrantedDevice, KubeletGeneration, PodRef, Timestamp,
};
use holdfast::ledger::LedgerActor;
use holdfast::messages::{Record, RecordError, WithReply};
use holdfast::store::Recovered;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::oneshot;

/// Sends a request as a mailbox does, with its reply sender.
pub(crate) fn ask(
    ledger: &Addr<LedgerActor>,
    message: Record,
) -> oneshot::Receiver<Result<(), RecordError>> {
    let (reply, answer) = oneshot::channel();
    ledger.try_send(WithReply { message, reply }).unwrap();
    answer
}

/// The expected content of a ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Model {
    pub(crate) live: BTreeMap<AllocId, Grant>,
    pub(crate) names: BTreeMap<String, DeviceId>,
    pub(crate) released: BTreeSet<AllocId>,
}

impl Model {
    /// The content of a ledger that was just opened, without its history.
    pub(crate) fn of(recovered: Recovered) -> Model {
        let live =
            recovered.grants.into_iter().map(|grant| (grant.alloc_id.clone(), grant)).collect();
        Model { live, names: recovered.names, ..Model::default() }
    }

    pub(crate) fn apply(&mut self, entry: &Entry) {
        match entry {
            Entry::Grant(grant) => {
                drop(self.live.insert(grant.alloc_id.clone(), (**grant).clone()));
            }
            Entry::Moved { alloc_id, state } => {
                let Some(grant) = self.live.get_mut(alloc_id) else { return };
                grant.state = state.clone();
                if !grant.is_live() {
                    self.live.remove(alloc_id);
                    self.released.insert(alloc_id.clone());
                }
            }
            Entry::Named { key, id } => drop(self.names.insert(key.clone(), id.clone())),
            Entry::Forgotten { devices } => self.names.retain(|_, id| !devices.contains(id)),
            Entry::Listed { .. } | Entry::Hook(_) | Entry::Judged { .. } | Entry::Gone { .. } => {}
        }
    }
}

/// Generates the entries.
#[derive(Debug)]
pub(crate) struct Load {
    made: u64,
    random: Random,
    now: u64,
}

impl Load {
    /// `made` grants and names exist already.
    pub(crate) fn new(random: Random, made: u64) -> Load {
        Load { made, random, now: Timestamp::from_system(SystemTime::now()).0 }
    }

    /// The next entries for a ledger with the content of `model`.
    pub(crate) fn entries(&mut self, model: &Model) -> Vec<Entry> {
        let mut after = model.clone();
        let entries = (0..=self.random.below(4)).map(|_| {
            let entry = self.entry(&after);
            after.apply(&entry);
            entry
        });
        entries.collect()
    }

    fn entry(&mut self, model: &Model) -> Entry {
        let nth = self.random.index(model.live.len());
        self.now += 1;
        // About thirty live grants at a time, as on a busy node.
        let (kind, some) = (self.random.below(8), model.live.values().nth(nth));
        match some {
            Some(grant) if kind < 2 || model.live.len() > 30 => self.release(grant),
            Some(grant) if kind < 4 => self.advance(grant),
            _ if kind == 4 => {
                self.made += 1;
                Entry::Named {
                    key: format!("pci:{}", self.made),
                    id: DeviceId::new(format!("GPU-{}", self.made)),
                }
            }
            _ if kind == 5 && model.names.len() > 20 => {
                let nth = self.random.index(model.names.len());
                Entry::Forgotten {
                    devices: model.names.values().nth(nth).into_iter().cloned().collect(),
                }
            }
            _ => self.grant(),
        }
    }

    fn grant(&mut self) -> Entry {
        self.made += 1;
        let n = self.made;
        // Grants of many sizes; the largest soon fill a segment of the journal.
        let filler = "x".repeat(self.random.index(2) * self.random.index(24_000));
        let alloc_id = AllocId::new(format!("01890a5d-ac96-774b-bcce-{n:012}"));
        // Every second one is of a claim, some of them of one with two resources.
        let claim = n.is_multiple_of(2).then(|| Arc::new(hold(&alloc_id, n / 4)));
        let state = match claim {
            None => GrantState::Granted,
            Some(_) => self.prepared(vec![pod_of(&alloc_id)], None),
        };
        Entry::Grant(Arc::new(Grant {
            alloc_id,
            resource: "example.com/gpu".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: DeviceId::new(format!("GPU-{n}")),
                key: format!("pci:{n}"),
                numa_nodes: vec![0],
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: ContainerEdits {
                envs: BTreeMap::from([("FILLER".into(), filler)]),
                ..ContainerEdits::default()
            },
            claim,
            boot_id: "the boot before".into(),
            kubelet: Some(KubeletGeneration { inode: n, made_ns: 1 }),
            granted_at: Timestamp(self.now),
            version: "1".into(),
            state,
        }))
    }

    /// The pod of an Allocate is known; a claim has another pod, or was unprepared.
    fn advance(&self, grant: &Grant) -> Entry {
        let pod = pod_of(&grant.alloc_id);
        let state = match &grant.state {
            GrantState::Prepared { pods, .. } if pods.len() > 2 => {
                self.prepared(pods.clone(), Some(Timestamp(self.now)))
            }
            GrantState::Prepared { pods, .. } => {
                let next = PodRef { uid: format!("{}-{}", pod.uid, pods.len()), ..pod };
                self.prepared(pods.iter().cloned().chain([next]).collect(), None)
            }
            _ => GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(self.now) },
        };
        Entry::Moved { alloc_id: grant.alloc_id.clone(), state }
    }

    fn prepared(&self, pods: Vec<PodRef>, unprepared_at: Option<Timestamp>) -> GrantState {
        GrantState::Prepared { pods, prepared_at: Timestamp(self.now), unprepared_at }
    }

    fn release(&self, grant: &Grant) -> Entry {
        let state = GrantState::Released {
            pod: Some(pod_of(&grant.alloc_id)),
            container: Some("main".into()),
            bound_at: None,
            released_at: Timestamp(self.now),
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        };
        Entry::Moved { alloc_id: grant.alloc_id.clone(), state }
    }
}

fn pod_of(alloc_id: &AllocId) -> PodRef {
    PodRef { uid: alloc_id.to_string(), namespace: Some("default".into()), name: None }
}

/// What the `n`th claim holds by this grant.
fn hold(alloc_id: &AllocId, n: u64) -> ClaimHold {
    let claim =
        ClaimRef { uid: format!("claim-{n}"), namespace: "default".into(), name: n.to_string() };
    let allocated = Allocated {
        request: "device".into(),
        name: DraName { pool: "n1/gpu".into(), device: format!("gpu-{n}") },
        share_id: None,
        admin: false,
    };
    let device = ClaimedDevice {
        allocated,
        id: DeviceId::new(format!("GPU-{n}")),
        cdi_devices: vec![format!("k8s.holdfast.dev/claim={alloc_id}")],
        edits: ContainerEdits::default(),
        metadata: String::new(),
    };
    ClaimHold { claim, allocation: "digest".into(), devices: vec![device] }
}
