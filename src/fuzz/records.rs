//! Records of the journal: a payload with a correct checksum and any text. Also the format of the
//! journal in a few lines, written independently of the store.

use super::Seeds;
use crate::domain::{
    AllocId, DeviceId, Entry, Gone, Grant, GrantState, Listed, PendingHooks, Timestamp, Verdicts,
    note_gone, note_hook, note_list, note_verdict,
};
use crate::store::{RECORDS, Recovered, StoreError, peek};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use tempfile::TempDir;

/// The text of a record, as `store/journal/codec.rs` describes it.
#[derive(Serialize, Deserialize)]
struct Payload {
    v: u32,
    record: Entry,
}

/// A record with a correct checksum is applied, reported as unreadable, or of a later version.
pub fn records(data: &[u8]) {
    // The store writes no such payload: zeros at the end are not part of a segment.
    if data.last().is_none_or(|byte| *byte == 0) {
        return;
    }
    let payload: Result<Payload, _> = serde_json::from_slice(data);
    let mut bytes = segment_header(0);
    write_frame(&mut bytes, 1, 0, data);
    let dir = state_dir();
    let journal = dir.path().join("journal");
    fs::create_dir(&journal).expect("a temporary folder");
    fs::write(journal.join(format!("{:020}.log", 1)), bytes).expect("a temporary file");
    match peek(dir.path()) {
        Ok(recovered) => match payload {
            Ok(Payload { v: 1..=RECORDS, record }) => {
                let mut state = State::default();
                state.apply(&record);
                assert_eq!(State::of(&recovered), state, "{record:?}");
                assert!(recovered.report.is_clean(), "{}", recovered.report);
                is_written_as_read(record);
            }
            _ => assert!(
                recovered.report.missing > 0 && !recovered.report.is_clean(),
                "an unreadable record is reported: {}",
                recovered.report
            ),
        },
        Err(StoreError::Newer { version, .. }) => assert!(version > RECORDS, "{version}"),
        Err(error) => panic!("the journal cannot be read: {error}"),
    }
}

fn is_written_as_read(record: Entry) {
    let text = serde_json::to_vec(&Payload { v: RECORDS, record }).expect("an entry is JSON");
    let again: Payload = serde_json::from_slice(&text).expect("what was written is read");
    let written = serde_json::to_vec(&again).expect("an entry is JSON");
    assert_eq!(
        String::from_utf8_lossy(&text),
        String::from_utf8_lossy(&written),
        "an entry that was read is written as it was"
    );
}

/// The live state, folded from entries.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct State {
    /// The released ones too: no entry follows a release.
    pub(super) grants: BTreeMap<AllocId, Grant>,
    names: BTreeMap<String, DeviceId>,
    listed: Listed,
    owed: PendingHooks,
    verdicts: Verdicts,
    gone: Gone,
}

impl State {
    /// The state that a start has read, which has no released grants.
    pub(super) fn of(recovered: &Recovered) -> Self {
        let Recovered { grants, names, listed, owed, verdicts, gone, .. } = recovered.clone();
        let grants = grants.into_iter().map(|grant| (grant.alloc_id.clone(), grant)).collect();
        State { grants, names, listed, owed, verdicts, gone }
    }

    /// Applies an entry, and forgets a grant that it releases.
    pub(super) fn apply(&mut self, entry: &Entry) {
        match entry {
            Entry::Grant(grant) => {
                self.grants.insert(grant.alloc_id.clone(), (**grant).clone());
            }
            Entry::Moved { alloc_id, state } => {
                if let Some(grant) = self.grants.get_mut(alloc_id) {
                    grant.state = state.clone();
                }
            }
            Entry::Named { key, id } => drop(self.names.insert(key.clone(), id.clone())),
            Entry::Listed { resource, devices } => {
                note_list(&mut self.listed, resource, devices.clone());
            }
            Entry::Judged { device, verdict } => {
                note_verdict(&mut self.verdicts, device, verdict.as_deref().cloned());
            }
            Entry::Gone { devices, since } => note_gone(&mut self.gone, devices, *since),
            Entry::Forgotten { devices } => {
                self.names.retain(|_, id| !devices.contains(id));
                for device in devices {
                    self.verdicts.remove(device);
                    self.gone.remove(device);
                }
            }
            Entry::Hook(hook) => note_hook(&mut self.owed, hook),
        }
        self.grants.retain(|_, grant| grant.is_live());
    }

    /// The entries at the head of a segment.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let grants = self.grants.values().map(|grant| Entry::Grant(Arc::new(grant.clone())));
        let names = self.names.iter();
        let names = names.map(|(key, id)| Entry::Named { key: key.clone(), id: id.clone() });
        let listed = self.listed.iter().map(|(resource, devices)| Entry::Listed {
            resource: resource.clone(),
            devices: devices.clone(),
        });
        let hooks = self.owed.values().flat_map(BTreeMap::values);
        let hooks = hooks.map(|hook| Entry::Hook(Box::new(hook.clone())));
        let judged = self.verdicts.iter().map(|(device, verdict)| Entry::Judged {
            device: device.clone(),
            verdict: Some(Box::new(verdict.clone())),
        });
        let gone = self.gone.iter().map(|(device, since)| Entry::Gone {
            devices: vec![device.clone()],
            since: Some(*since),
        });
        grants.chain(names).chain(listed).chain(hooks).chain(judged).chain(gone).collect()
    }
}

/// The grant of this number. Everything but its state depends on the number alone.
pub(super) fn grant_of(number: u8, state: GrantState) -> Grant {
    let id = AllocId::new(format!("01890a5d-ac96-774b-bcce-{number:012}"));
    let text = serde_json::json!({
        "alloc_id": id.as_str(),
        "resource": "example.com/gpu",
        "devices": [{ "id": format!("gpu-{number}"), "key": format!("dev:/dev/gpu{number}") }],
        "edits": { "envs": { "GPU": number.to_string() }, "mounts": [], "devices": [],
            "annotations": { AllocId::ANNOTATION: id.as_str() }, "cdi_devices": [] },
        "boot_id": "boot", "kubelet": null, "granted_at": Timestamp(u64::from(number)),
        "version": "1", "state": "granted",
    });
    let grant: Grant = serde_json::from_value(text).expect("a grant of the format");
    Grant { state, ..grant }
}

/// A folder in memory, if there is one.
pub(super) fn state_dir() -> TempDir {
    let memory = std::path::Path::new("/dev/shm");
    let dir = tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir());
    dir.expect("a temporary folder")
}

/// The header line of a segment whose head has this many records.
pub(super) fn segment_header(head: usize) -> Vec<u8> {
    let text = format!("holdfast-journal 1 head={head}");
    format!("{text} crc={:08x}\n", crc32fast::hash(text.as_bytes())).into_bytes()
}

/// The records of one write, numbered from `first`.
pub(super) fn write_frames(bytes: &mut Vec<u8>, first: u64, entries: &[Entry]) {
    for ((entry, seq), place) in entries.iter().zip(first..).zip(0..) {
        let payload = Payload { v: RECORDS, record: entry.clone() };
        let payload = serde_json::to_vec(&payload).expect("an entry is JSON");
        write_frame(bytes, seq, place, &payload);
    }
}

fn write_frame(bytes: &mut Vec<u8>, seq: u64, place: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a short payload");
    let mut crc = crc32fast::Hasher::new();
    crc.update(&seq.to_le_bytes());
    crc.update(&place.to_le_bytes());
    crc.update(payload);
    bytes.extend((length | place << 21).to_le_bytes());
    bytes.extend(seq.to_le_bytes());
    bytes.extend(crc.finalize().to_le_bytes());
    bytes.extend(payload);
}

/// The line of the lock file.
pub(super) fn lock_line(confirmed: u64) -> String {
    let digits = format!("{confirmed:020}");
    format!("{digits} {:08x} boot", crc32fast::hash(digits.as_bytes()))
}

/// The payloads of the golden files, one seed for each.
pub(super) fn seeds() -> Seeds {
    const FILES: [&[u8]; 2] = [
        include_bytes!("../store/journal/golden/records-v1.bin"),
        include_bytes!("../store/journal/golden/records-v2.bin"),
    ];
    const NAMES: [&str; 18] = [
        "grant",
        "bound",
        "suspect",
        "released",
        "named",
        "listed",
        "hook-due",
        "hook-failed",
        "hook-done",
        "judged",
        "judged-away",
        "gone",
        "back",
        "forgotten",
        "claim",
        "prepared",
        "unprepared",
        "claim-released",
    ];
    let payloads = FILES.iter().flat_map(|file| {
        let mut rest: &[u8] = file;
        std::iter::from_fn(move || {
            let front = u32::from_le_bytes(rest.get(..4)?.try_into().ok()?);
            let (record, next) = rest.split_at(16 + (front & 0x1f_ffff) as usize);
            rest = next;
            Some(record[16..].to_vec())
        })
    });
    let mut seeds: Seeds = NAMES.into_iter().zip(payloads).collect();
    seeds.push(("later", br#"{"v":3,"record":{"entry":"new"}}"#.to_vec()));
    seeds
}
