//! What is remembered beside grants, and the heads of segments, which have all of it.

use super::journal::{Journal, JournalReplay, codec};
use super::{LivePayloads, StoreError};
use crate::domain::{
    DeviceId, Entry, Gone, Listed, PendingHooks, Timestamp, Verdict, Verdicts, note_gone,
    note_hook, note_list, note_verdict,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Notes on devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Notes {
    pub(super) names: BTreeMap<String, DeviceId>,
    pub(super) listed: Listed,
    pub(super) owed: PendingHooks,
    pub(super) verdicts: Verdicts,
    pub(super) gone: Gone,
}

impl Notes {
    /// The notes of a replay, without the sequence numbers.
    pub(super) fn of(replay: &JournalReplay) -> Self {
        let JournalReplay { listed, verdicts, gone, .. } = replay;
        let mut owed = PendingHooks::new();
        replay.owed.values().for_each(|(_, hook)| note_hook(&mut owed, hook));
        let names = replay.names.iter().map(|(key, (_, id))| (key.clone(), id.clone())).collect();
        Notes {
            names,
            listed: listed.clone(),
            owed,
            verdicts: verdicts.clone(),
            gone: gone.clone(),
        }
    }

    /// Applies an entry that is no grant's. Returns the keys of names that are forgotten.
    pub(super) fn apply(&mut self, entry: &Entry) -> Vec<String> {
        match entry {
            Entry::Named { key, id } => drop(self.names.insert(key.clone(), id.clone())),
            Entry::Listed { resource, devices } => {
                note_list(&mut self.listed, resource, devices.clone())
            }
            Entry::Judged { device, verdict } => {
                note_verdict(&mut self.verdicts, device, verdict.as_deref().cloned())
            }
            Entry::Hook(hook) => note_hook(&mut self.owed, hook),
            Entry::Gone { devices, since } => note_gone(&mut self.gone, devices, *since),
            Entry::Forgotten { devices } => return self.forget(devices),
            Entry::Grant(_) | Entry::Moved { .. } => {}
        }
        Vec::new()
    }

    fn forget(&mut self, devices: &[DeviceId]) -> Vec<String> {
        let devices: BTreeSet<&DeviceId> = devices.iter().collect();
        let keys: Vec<String> = self
            .names
            .iter()
            .filter(|(_, id)| devices.contains(id))
            .map(|(key, _)| key.clone())
            .collect();
        keys.iter().for_each(|key| drop(self.names.remove(key)));
        for device in devices {
            self.verdicts.remove(device);
            self.gone.remove(device);
        }
        keys
    }

    /// How many entries they take.
    pub(super) fn len(&self) -> usize {
        self.entries().count()
    }

    /// The entries that say all of it.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        // Devices that have been gone since the same moment share an entry.
        let mut gone: BTreeMap<Timestamp, Vec<DeviceId>> = BTreeMap::new();
        for (device, since) in &self.gone {
            gone.entry(*since).or_default().push(device.clone());
        }
        let names =
            self.names.iter().map(|(key, id)| Entry::Named { key: key.clone(), id: id.clone() });
        let listed = self.listed.iter().map(|(resource, devices)| Entry::Listed {
            resource: resource.clone(),
            devices: devices.clone(),
        });
        let judged = |(device, verdict): (&DeviceId, &Verdict)| Entry::Judged {
            device: device.clone(),
            verdict: Some(Box::new(verdict.clone())),
        };
        let owed = self
            .owed
            .values()
            .flat_map(BTreeMap::values)
            .map(|hook| Entry::Hook(Box::new(hook.clone())));
        let gone =
            gone.into_iter().map(|(since, devices)| Entry::Gone { devices, since: Some(since) });
        names.chain(listed).chain(owed).chain(self.verdicts.iter().map(judged)).chain(gone)
    }
}

/// The head of a segment: the payloads of everything that is live.
pub(super) fn head<'a>(live: &'a LivePayloads, notes: &'a [Vec<u8>]) -> Vec<&'a [u8]> {
    live.values()
        .map(|(_, payload)| payload.as_slice())
        .chain(notes.iter().map(Vec::as_slice))
        .collect()
}

/// The payloads of entries.
pub(super) fn encode_all<'a>(
    entries: impl IntoIterator<Item = &'a Entry>,
) -> Result<Vec<Vec<u8>>, StoreError> {
    entries.into_iter().map(codec::encode).collect()
}

/// Opens the segment `first`. Returns the sequence number after its head.
pub(super) fn open_segment(
    dir: &Path,
    first: u64,
    live: &LivePayloads,
    notes: &Notes,
) -> Result<(Journal, u64), StoreError> {
    let notes = encode_all(&notes.entries().collect::<Vec<_>>())?;
    let head = head(live, &notes);
    // An entry has a number only if the head before it is complete, so an empty head takes none.
    Ok((Journal::create(dir, first, &head)?, first + head.len() as u64))
}
