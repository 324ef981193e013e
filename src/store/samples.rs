//! Grants for the tests of the store.

use crate::domain::{
    AllocId, Allocated, ClaimHold, ClaimRef, ClaimedDevice, ContainerEdits, Cordon, Counter,
    DeviceId, DraName, EditDevice, EditMount, Entry, Grant, GrantState, GrantedDevice, HookState,
    Incident, KubeletGeneration, Object, PciAddress, PendingHook, PodRef, Reason, Timestamp,
    Verdict, VerdictState,
};
use crate::store::journal::segments;
use crate::store::layout::journal_dir;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The `n`-th grant, just made.
pub(super) fn grant(n: u64) -> Grant {
    Grant {
        alloc_id: AllocId::new(format!("01890a5d-ac96-774b-bcce-{n:012}")),
        resource: "nvidia.com/gpu".parse().unwrap(),
        devices: vec![GrantedDevice {
            id: DeviceId::new(format!("GPU-{n}")),
            key: format!("pci:0000:{n:02x}:00.0/10de:2330"),
            numa_nodes: vec![0],
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits {
            envs: BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".into(), format!("GPU-{n}"))]),
            mounts: vec![EditMount {
                host: "/etc/a".into(),
                container: "/etc/b".into(),
                read_only: true,
            }],
            devices: vec![EditDevice {
                host: "/dev/nvidia0".into(),
                container: "/dev/nvidia0".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([(
                AllocId::ANNOTATION.into(),
                format!("01890a5d-ac96-774b-bcce-{n:012}"),
            )]),
            cdi_devices: vec![],
        },
        claim: None,
        boot_id: "6f1d7d0c-8a54-4b2a-8a3f-0d1f6a4f2b11".into(),
        kubelet: Some(KubeletGeneration { inode: 4_242, made_ns: 1_700_000_000_000_000_000 }),
        granted_at: Timestamp(1_700_000_000_000 + n),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }
}

pub(super) fn pod(n: u64) -> PodRef {
    PodRef {
        uid: format!("uid-{n}"),
        namespace: Some("default".into()),
        name: Some(format!("pod-{n}")),
    }
}

pub(super) fn made(n: u64) -> Entry {
    Entry::Grant(Arc::new(grant(n)))
}

pub(super) fn bound(n: u64) -> Entry {
    let bound_at = Timestamp(1_700_000_001_000 + n);
    Entry::Moved {
        alloc_id: grant(n).alloc_id,
        state: GrantState::Bound { pod: pod(n), container: "main".into(), bound_at },
    }
}

pub(super) fn suspect(n: u64) -> Entry {
    let (bound_at, suspect_at) =
        (Timestamp(1_700_000_001_000 + n), Timestamp(1_700_000_002_000 + n));
    Entry::Moved {
        alloc_id: grant(n).alloc_id,
        state: GrantState::Suspect { pod: pod(n), container: "main".into(), bound_at, suspect_at },
    }
}

pub(super) fn released(n: u64) -> Entry {
    released_at(n, 1_700_000_003_000 + n)
}

pub(super) fn released_at(n: u64, millis: u64) -> Entry {
    let state = GrantState::Released {
        pod: Some(pod(n)),
        container: Some("main".into()),
        bound_at: Some(Timestamp(1_700_000_001_000 + n)),
        released_at: Timestamp(millis),
        other_pods: Vec::new(),
        released_by: "pod_gone".into(),
    };
    Entry::Moved { alloc_id: grant(n).alloc_id, state }
}

/// The devices of the `n`-th claim: one of each of two resources, in one allocation.
pub(super) fn claim_grant(n: u64) -> Grant {
    claim_grant_of(n, "nvidia.com/gpu", "gpu")
}

/// The same claim's devices of another resource.
pub(super) fn claim_nic(n: u64) -> Entry {
    Entry::Grant(Arc::new(claim_grant_of(n, "example.com/nic", "net")))
}

fn claim_grant_of(n: u64, resource: &str, family: &str) -> Grant {
    let id = DeviceId::new(format!("{family}-{n}"));
    let name = DraName { pool: format!("node/{family}"), device: format!("{family}-{n}") };
    let plain = grant(n);
    let device = ClaimedDevice {
        allocated: Allocated {
            request: format!("{family}/large"),
            name,
            share_id: None,
            admin: n.is_multiple_of(2),
        },
        id: id.clone(),
        cdi_devices: vec![format!("k8s.holdfast.dev/claim=claim-{n}-{family}")],
        edits: plain.edits.clone(),
        metadata: String::new(),
    };
    let claim = ClaimRef {
        uid: format!("claim-{n}"),
        namespace: "default".into(),
        name: format!("train-{n}"),
    };
    Grant {
        alloc_id: AllocId::new(format!("01890a5d-ac97-774b-bcce-{family:0>8}{n:04}")),
        resource: resource.parse().unwrap(),
        devices: vec![GrantedDevice {
            id,
            objects: vec![Object::node(&format!("/dev/{family}{n}"))],
            ..plain.devices[0].clone()
        }],
        edits: ContainerEdits::default(),
        claim: Some(Arc::new(ClaimHold {
            claim,
            allocation: format!("digest-{n}"),
            devices: vec![device],
        })),
        state: prepared_state(n, None),
        ..plain
    }
}

fn prepared_state(n: u64, unprepared_at: Option<Timestamp>) -> GrantState {
    let prepared_at = Timestamp(1_700_000_001_000 + n);
    GrantState::Prepared { pods: vec![pod(n), pod(n + 100)], prepared_at, unprepared_at }
}

pub(super) fn claimed(n: u64) -> Entry {
    Entry::Grant(Arc::new(claim_grant(n)))
}

pub(super) fn prepared(n: u64, unprepared_at: Option<Timestamp>) -> Entry {
    Entry::Moved { alloc_id: claim_grant(n).alloc_id, state: prepared_state(n, unprepared_at) }
}

pub(super) fn unprepared(n: u64) -> Entry {
    let state = GrantState::Released {
        pod: Some(pod(n)),
        container: None,
        bound_at: Some(Timestamp(1_700_000_001_000 + n)),
        released_at: Timestamp(1_700_000_003_000 + n),
        released_by: "unprepared".into(),
        other_pods: vec![pod(n + 100)],
    };
    Entry::Moved { alloc_id: claim_grant(n).alloc_id, state }
}

pub(super) fn named(n: u64) -> Entry {
    Entry::Named {
        key: format!("pci:0000:{n:02x}:00.0/10de:2330"),
        id: DeviceId::new(format!("GPU-{n}")),
    }
}

/// The list of one resource: the devices of these grants.
pub(super) fn listed(of: &[u64]) -> Entry {
    Entry::Listed {
        resource: grant(0).resource,
        devices: of.iter().flat_map(|n| grant(*n).devices).collect(),
    }
}

/// The verdict of a failed and held device, with every optional part.
pub(super) fn judged(n: u64) -> Entry {
    let incident = Incident {
        reason: Reason::Xid,
        detail: "Xid 79".into(),
        at: Timestamp(1_700_000_001_000 + n),
        until: None,
        held_by: vec![grant(n).alloc_id],
    };
    let at: PciAddress = "0000:01:00.0".parse().unwrap();
    let verdict = Verdict {
        boot_id: "boot".into(),
        state: VerdictState::Unhealthy { reason: Reason::Xid, seen: Duration::from_millis(7_500) },
        faults: BTreeMap::from([(Reason::Xid, "Xid 79".into())]),
        reset_at: Duration::from_secs(3),
        is_away: true,
        flaps: 2,
        healthy_since: Duration::from_secs(4),
        is_latched: true,
        cordon: Some(Cordon {
            reason: "to be replaced".into(),
            at: Timestamp(1_700_000_002_000),
            evicts: false,
        }),
        baselines: BTreeMap::from([(Counter { reason: Reason::AerFatal, at }, 3)]),
        incidents: vec![incident],
    };
    Entry::Judged { device: DeviceId::new(format!("GPU-{n}")), verdict: Some(Box::new(verdict)) }
}

pub(super) fn forgotten(n: u64) -> Entry {
    Entry::Judged { device: DeviceId::new(format!("GPU-{n}")), verdict: None }
}

/// These devices are absent.
pub(super) fn gone(of: &[u64]) -> Entry {
    Entry::Gone { devices: ids(of), since: Some(Timestamp(1_700_000_005_000)) }
}

/// This device is present again.
pub(super) fn back(n: u64) -> Entry {
    Entry::Gone { devices: ids(&[n]), since: None }
}

pub(super) fn forgotten_for_good(of: &[u64]) -> Entry {
    Entry::Forgotten { devices: ids(of) }
}

fn ids(of: &[u64]) -> Vec<DeviceId> {
    of.iter().map(|n| DeviceId::new(format!("GPU-{n}"))).collect()
}

/// The state of the after-release hook of the `n`-th grant's device.
pub(super) fn hook(n: u64, state: HookState) -> Entry {
    let device = &grant(n).devices[0];
    Entry::Hook(Box::new(PendingHook {
        resource: grant(n).resource,
        device: device.id.clone(),
        key: device.key.clone(),
        objects: Vec::new(),
        alloc_id: grant(n).alloc_id,
        pod: Some(pod(n)),
        container: Some("main".into()),
        released_at: Timestamp(1_700_000_003_000 + n),
        state,
    }))
}

/// The states of a hook in order.
pub(super) fn hook_in_each_state(n: u64) -> Vec<Entry> {
    let failed = HookState::Failed {
        tries: 2,
        failed_at: Timestamp(1_700_000_004_000),
        why: "exit status: 1: no key".into(),
    };
    [HookState::Due, failed, HookState::Done].map(|state| hook(n, state)).into()
}

/// Flips a bit in the record of a grant, in the newest segment.
pub(super) fn damage_grant(n: u64, dir: &Path) {
    let segment = segments(&journal_dir(dir)).unwrap().pop().unwrap().1;
    let mut bytes = fs::read(&segment).unwrap();
    let id = format!("GPU-{n}\"").into_bytes();
    let at = bytes.windows(id.len()).position(|window| window == id).unwrap();
    bytes[at] ^= 1;
    fs::write(&segment, bytes).unwrap();
}
