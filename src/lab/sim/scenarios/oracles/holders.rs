//! The oracles of running containers: one pod for each exclusive id (O1), a live grant for each
//! container (O2).

use super::super::durable::Disk;
use super::Oracles;
use crate::domain::{AllocId, DeviceId, Entry, GrantState, ResourceName};
use crate::lab::sim::kubelet::{Holder, View};
use crate::ledger::core::NEVER_STARTED;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// By then the passes of a new life of the ledger's actor have seen whether the kubelet has
/// forgotten a pod that it knew.
const PASSES_WITHIN: Duration = Duration::from_secs(20);

impl Oracles {
    pub(super) fn bound(&mut self, disk: &Disk, now: Duration) {
        let bound: Vec<AllocId> = disk.ledger(|ledger| {
            let placed = ledger.grants().filter(|grant| grant.state != GrantState::Granted);
            placed.map(|grant| grant.alloc_id.clone()).collect()
        });
        for id in bound {
            self.bound.entry(id).or_insert(now);
        }
    }

    pub(super) fn remember(&mut self, holders: &[Holder], view: &View<'_>) {
        for holder in holders {
            if holder.alloc_ids.values().all(|id| self.remembered.contains(id)) {
                continue;
            }
            let known = view.devices(&holder.pod_uid, &holder.container);
            let alloc_ids =
                holder.alloc_ids.iter().filter(|(resource, _)| known.contains_key(*resource));
            self.remembered.extend(alloc_ids.map(|(_, id)| id.clone()));
        }
    }

    pub(super) fn held_once(
        &mut self,
        resource: &ResourceName,
        holders: &[Holder],
        disk: &Disk,
        now: Duration,
    ) {
        let mut by_id: BTreeMap<&DeviceId, BTreeMap<&str, &Holder>> = BTreeMap::new();
        for holder in holders {
            for id in holder.devices.get(resource).into_iter().flatten() {
                by_id.entry(id).or_default().insert(&holder.pod_uid, holder);
            }
        }
        for (id, holders) in by_id.into_iter().filter(|(_, holders)| holders.len() > 1) {
            let given = |uid: &str| {
                self.given.get(&(uid.to_owned(), (*id).clone())).copied().unwrap_or_default()
            };
            let (newest, settled) = holders.keys().map(|uid| given(uid)).max().unwrap_or_default();
            // Whether the previous holder could be known when the id was given again.
            let known =
                holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                    let alloc_id = holder.alloc_ids.get(resource);
                    alloc_id.and_then(|id| self.bound.get(id)).is_some_and(|bound| *bound < newest)
                });
            // The foreign plugin's grants were not requested from us.
            let ours = !holders.values().any(|holder| {
                given(&holder.pod_uid).0 == newest && self.is_of_rival(resource, holder)
            });
            // A kubelet that never loaded its predecessor's grant: of two writes of its checkpoint
            // the older one came last. Its listing may prove that, but not at once.
            let lost =
                holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                    let alloc_id = holder.alloc_ids.get(resource);
                    !alloc_id.is_some_and(|id| self.remembered.contains(id))
                });
            // A new life of the ledger's actor does not know what its kubelet remembered.
            let died_at = disk.lock().died_at;
            let is_new_life = died_at.is_some_and(|at| at <= newest && newest < at + PASSES_WITHIN);
            // Before it has settled nothing is proven: a crash between two writes may have cost the
            // kubelet its record.
            if self.has_lost_record || lost || is_new_life || !(settled && known && ours) {
                self.excused += 1;
            } else {
                let pods: Vec<_> = holders.keys().copied().collect();
                let since = self.kubelet_since;
                let states: Vec<String> = disk.ledger(|ledger| {
                    ledger
                        .holders(resource, id)
                        .map(|grant| format!("{} {:?}", grant.alloc_id, grant.state))
                        .collect()
                });
                let what = format!(
                    "{id} is held by the pods {pods:?}, given at {newest:?}; kubelet since {since:?}; {states:?}"
                );
                return self.violated("O1", now, what);
            }
        }
    }

    pub(super) fn in_ledger(
        &mut self,
        resource: &ResourceName,
        holders: &[Holder],
        disk: &Disk,
        now: Duration,
    ) {
        for holder in holders {
            let Some(devices) =
                holder.devices.get(resource).filter(|_| !self.is_of_rival(resource, holder))
            else {
                continue;
            };
            let granted = holder.alloc_ids.get(resource).and_then(|id| {
                disk.ledger(|ledger| {
                    ledger.grant(id).map(|grant| {
                        grant
                            .devices
                            .iter()
                            .map(|device| device.id.clone())
                            .collect::<BTreeSet<_>>()
                    })
                })
            });
            if granted.as_ref() != Some(devices) {
                let Holder { pod_uid, container, alloc_ids, .. } = holder;
                let is_last = |entry: &Entry| matches!(entry, Entry::Moved { alloc_id, .. } if alloc_ids.values().any(|id| id == alloc_id));
                let last = disk.entries().into_iter().rfind(is_last);
                // The kubelet lost its checkpoint before the daemon could read there which pod the
                // grant belongs to.
                let never_seen = |entry: &Entry| matches!(entry, Entry::Moved { state: GrantState::Released { released_by, .. }, .. } if released_by == NEVER_STARTED);
                if self.has_lost_record && last.as_ref().is_some_and(never_seen) {
                    self.excused += 1;
                    continue;
                }
                return self.violated(
                    "O2",
                    now,
                    format!("{pod_uid}/{container} runs with {devices:?} by {alloc_ids:?}; the ledger has {granted:?}, {last:?}"),
                );
            }
        }
    }
}
