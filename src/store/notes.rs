//! Notes: the durable facts other than grants; and segment heads, which contain all of them.

use super::journal::{Journal, codec};
use super::{LivePayloads, StoreError};
use crate::domain::{
    DeviceId, Entry, Gone, HookState, Listed, PendingHook, PendingHooks, ResourceName, Timestamp,
    Verdict, Verdicts, note_gone, note_hook, note_list, note_verdict,
};
use std::collections::BTreeMap;
use std::mem::take;
use std::path::Path;

/// Hooks that have not run, each with the sequence number of its latest entry.
pub(super) type HooksAt = BTreeMap<(ResourceName, DeviceId), (u64, PendingHook)>;

/// Durable facts about devices. Names and hooks are also in sled, so they have the sequence number
/// of their latest entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Notes {
    pub(super) names: BTreeMap<String, (u64, DeviceId)>,
    pub(super) listed: Listed,
    pub(super) hooks: HooksAt,
    pub(super) verdicts: Verdicts,
    pub(super) gone: Gone,
}

impl Notes {
    /// Applies the entry `seq`, unless it is a grant's. Returns the keys of names that it removed.
    pub(super) fn apply(&mut self, seq: u64, entry: &Entry) -> Vec<String> {
        match entry {
            Entry::Named { key, id } => drop(self.names.insert(key.clone(), (seq, id.clone()))),
            Entry::Listed { resource, devices } => {
                note_list(&mut self.listed, resource, devices.clone());
            }
            Entry::Judged { device, verdict } => {
                note_verdict(&mut self.verdicts, device, verdict.as_deref().cloned());
            }
            Entry::Hook(hook) => {
                let key = (hook.resource.clone(), hook.device.clone());
                match hook.state {
                    HookState::Done => drop(self.hooks.remove(&key)),
                    HookState::Due | HookState::Failed { .. } => {
                        drop(self.hooks.insert(key, (seq, (**hook).clone())));
                    }
                }
            }
            Entry::Gone { devices, since } => note_gone(&mut self.gone, devices, *since),
            Entry::Forgotten { devices } => {
                self.forget_health(devices);
                let is_forgotten = |(_, id): &(u64, DeviceId)| devices.contains(id);
                let keys = self.names.iter().filter(|(_, name)| is_forgotten(name));
                let keys: Vec<String> = keys.map(|(key, _)| key.clone()).collect();
                self.names.retain(|_, name| !is_forgotten(name));
                return keys;
            }
            Entry::Grant(_) | Entry::Moved { .. } => {}
        }
        Vec::new()
    }

    /// Whether there is a note about the same name or hook.
    pub(super) fn knows(&self, entry: &Entry) -> bool {
        match entry {
            Entry::Named { key, .. } => self.names.contains_key(key),
            Entry::Hook(hook) => {
                self.hooks.contains_key(&(hook.resource.clone(), hook.device.clone()))
            }
            _ => true,
        }
    }

    /// Removes the verdicts of devices, and the times since when they are absent.
    pub(super) fn forget_health(&mut self, devices: &[DeviceId]) {
        for device in devices {
            self.verdicts.remove(device);
            self.gone.remove(device);
        }
    }

    /// Removes and returns the notes that only the journal has.
    pub(super) fn take_of_journal(&mut self) -> Notes {
        let Notes { listed, verdicts, gone, .. } = self;
        let (listed, verdicts, gone) = (take(listed), take(verdicts), take(gone));
        Notes { listed, verdicts, gone, ..Notes::default() }
    }

    /// Puts them back, except where there is a newer note by now.
    pub(super) fn put_back(&mut self, older: Notes) {
        let newer = std::mem::replace(&mut self.listed, older.listed);
        self.listed.extend(newer);
        let newer = std::mem::replace(&mut self.verdicts, older.verdicts);
        self.verdicts.extend(newer);
        let newer = std::mem::replace(&mut self.gone, older.gone);
        self.gone.extend(newer);
    }

    /// Drops names and hooks whose latest entry is older than `seq`.
    pub(super) fn drop_before(&mut self, seq: u64) {
        self.names.retain(|_, (at, _)| *at >= seq);
        self.hooks.retain(|_, (at, _)| *at >= seq);
    }

    /// The id of each device, by physical key.
    pub(super) fn device_names(&self) -> BTreeMap<String, DeviceId> {
        self.names.iter().map(|(key, (_, id))| (key.clone(), id.clone())).collect()
    }

    /// Hooks that have not run.
    pub(super) fn pending_hooks(&self) -> PendingHooks {
        let mut pending = PendingHooks::new();
        self.hooks.values().for_each(|(_, hook)| note_hook(&mut pending, hook));
        pending
    }

    /// The number of entries in a head.
    pub(super) fn len(&self) -> usize {
        self.entries().count()
    }

    /// The entries that restore these notes.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        // Devices that disappeared in the same scan share an entry.
        let mut gone: BTreeMap<Timestamp, Vec<DeviceId>> = BTreeMap::new();
        for (device, since) in &self.gone {
            gone.entry(*since).or_default().push(device.clone());
        }
        let names = |(key, (_, id)): (&String, &(u64, DeviceId))| Entry::Named {
            key: key.clone(),
            id: id.clone(),
        };
        let listed = self.listed.iter().map(|(resource, devices)| Entry::Listed {
            resource: resource.clone(),
            devices: devices.clone(),
        });
        let judged = |(device, verdict): (&DeviceId, &Verdict)| Entry::Judged {
            device: device.clone(),
            verdict: Some(Box::new(verdict.clone())),
        };
        let hooks = self.hooks.values().map(|(_, hook)| Entry::Hook(Box::new(hook.clone())));
        let gone =
            gone.into_iter().map(|(since, devices)| Entry::Gone { devices, since: Some(since) });
        let named = self.names.iter().map(names);
        named.chain(listed).chain(hooks).chain(self.verdicts.iter().map(judged)).chain(gone)
    }
}

/// Whether the database does not store this kind of entry.
pub(super) fn is_only_in_journal(entry: &Entry) -> bool {
    matches!(
        entry,
        Entry::Listed { .. } | Entry::Judged { .. } | Entry::Gone { .. } | Entry::Forgotten { .. }
    )
}

/// The head of a segment: the payloads of all live grants and notes.
pub(super) fn head<'a>(live: &'a LivePayloads, notes: &'a [Vec<u8>]) -> Vec<&'a [u8]> {
    live.values().map(|(_, payload)| payload).chain(notes).map(Vec::as_slice).collect()
}

/// The payloads of entries.
pub(super) fn encode_all<'a>(
    entries: impl IntoIterator<Item = &'a Entry>,
) -> Result<Vec<Vec<u8>>, StoreError> {
    entries.into_iter().map(codec::encode).collect()
}

/// Creates the segment `first`. Returns it with the sequence number after its head.
pub(super) fn open_segment(
    dir: &Path,
    first: u64,
    live: &LivePayloads,
    notes: &Notes,
) -> Result<(Journal, u64), StoreError> {
    let notes = encode_all(&notes.entries().collect::<Vec<_>>())?;
    let head = head(live, &notes);
    Ok((Journal::create(dir, first, &head)?, first + head.len() as u64))
}
