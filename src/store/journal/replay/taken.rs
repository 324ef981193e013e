//! What the store takes from a replay.

use super::JournalReplay;
use crate::domain::{AllocId, Entry, Grant, GrantState};
use crate::store::journal::codec;
use crate::store::{LivePayloads, StoreError};
use std::collections::BTreeMap;
use std::sync::Arc;

impl JournalReplay {
    /// The payload of every live grant.
    pub(crate) fn live_payloads(&self) -> Result<LivePayloads, StoreError> {
        let encode = |grant: &Grant| codec::encode(&Entry::Grant(Arc::new(grant.clone())));
        let payload = |id: &AllocId, grant: &Grant| {
            self.payloads.get(id).cloned().map_or_else(|| encode(grant), Ok)
        };
        self.live()
            .map(|(id, (seq, grant))| Ok((id.clone(), (*seq, payload(id, grant)?))))
            .collect()
    }

    /// Removes and returns the released grants, each with the number of its release. No entry
    /// follows a release.
    pub(crate) fn take_released(&mut self) -> Vec<(u64, Grant)> {
        let is_released = |_: &AllocId, (_, grant): &mut (u64, Grant)| !grant.is_live();
        let released: BTreeMap<_, _> = self.grants.extract_if(.., is_released).collect();
        released.keys().for_each(|id| drop(self.payloads.remove(id)));
        released.into_values().collect()
    }

    /// Removes and returns the releases of grants whose own entry is unreadable.
    pub(crate) fn take_released_orphans(&mut self) -> BTreeMap<AllocId, (u64, GrantState)> {
        let is_released = |_: &AllocId, (_, state): &mut (u64, GrantState)| {
            matches!(state, GrantState::Released { .. })
        };
        self.orphans.extract_if(.., is_released).collect()
    }
}
