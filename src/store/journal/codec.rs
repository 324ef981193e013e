//! The format of an entry on disk. A golden file pins it.
//!
//! ```text
//! length 21 bits, place 11 bits LE │ seq u64 LE │ crc32 u32 LE over seq, place and payload │
//! payload: {"v":1,"record":{…}}
//! ```
//!
//! An entry of a claim has version 2, and every other entry version 1. So an earlier Holdfast reads
//! a ledger without claims, and refuses one with claims.
//!
//! The crc covers the sequence number, so a record that was copied to another position fails its
//! check. The place is the position in its write, from 0: a power cut may tear a write, and then
//! none of it was confirmed. A record of a later version is an error and not damage: the start
//! stops, and no grant is lost.

use crate::domain::{AllocId, Entry, Grant};
use crate::store::StoreError;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The version of the frames and of a segment's header.
pub(crate) const FRAMING: u32 = 1;
/// The version of sled's trees.
pub(crate) const TREES: u32 = 1;
/// The highest known version of a record.
pub const VERSION: u32 = 2;
/// The start of every payload, by its version.
const FRONTS: [&[u8]; 2] = [br#"{"v":1,"record":"#, br#"{"v":2,"record":"#];
/// The bytes before the payload.
pub(crate) const PREFIX_BYTES: usize = 16;
/// A larger payload is refused by the writer, and counts as damage for the reader. A grant of 64
/// devices has some 20 KiB. A list of 40,000 shares fits.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 2_000_000;
/// The bits of the length, below the place.
const LENGTH_BITS: u32 = 21;
/// The maximum place. All later records of a write have it too.
const PLACE_MAX: u32 = (1 << (u32::BITS - LENGTH_BITS)) - 1;

/// The reason why an entry could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Defect {
    /// The bytes end inside the record: a torn write.
    Torn,
    /// The bytes are wrong.
    Damaged,
    /// A later version of Holdfast wrote it.
    Newer(u32),
}

/// A record with a correct crc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) seq: u64,
    place: u32,
    pub(crate) payload: &'a [u8],
}

impl Record<'_> {
    /// The first sequence number of its write, or a later one of the same write if it has more than
    /// 2047 records.
    pub(crate) fn write(&self) -> u64 {
        self.seq.saturating_sub(self.place.into())
    }

    /// Bytes of the whole record.
    pub(crate) fn len(&self) -> usize {
        PREFIX_BYTES + self.payload.len()
    }
}

#[derive(Serialize)]
struct Written<'a> {
    v: u32,
    record: &'a Entry,
}

#[derive(Deserialize)]
struct Versioned {
    v: u32,
}

#[derive(Deserialize)]
struct Read {
    record: Entry,
}

/// The lowest version that can express an entry.
fn version(entry: &Entry) -> u32 {
    let is_of_claim = match entry {
        Entry::Grant(grant) => grant.claim.is_some() || grant.state.is_of_claim(),
        Entry::Moved { state, .. } => state.is_of_claim(),
        _ => false,
    };
    if is_of_claim { 2 } else { 1 }
}

/// The rest of a payload behind its version, if that is a known one.
fn behind_front(payload: &[u8]) -> Option<&[u8]> {
    FRONTS.iter().find_map(|front| payload.strip_prefix(*front))
}

/// The payload of an entry, the same in the journal and in sled.
pub(crate) fn encode(entry: &Entry) -> Result<Vec<u8>, StoreError> {
    // A grant of one device fits. Payloads that are kept in memory have no spare capacity.
    let mut payload = Vec::with_capacity(960);
    // Every map of an entry has string keys, so serde_json cannot fail.
    let written =
        serde_json::to_writer(&mut payload, &Written { v: version(entry), record: entry });
    payload.shrink_to_fit();
    match payload.len() {
        1..=PAYLOAD_BYTES_MAX if written.is_ok() => Ok(payload),
        bytes => Err(StoreError::TooLarge { entry: in_words(entry), bytes }),
    }
}

fn in_words(entry: &Entry) -> String {
    match entry {
        Entry::Grant(grant) => format!("grant {}", grant.alloc_id),
        Entry::Moved { alloc_id, .. } => format!("the state of grant {alloc_id}"),
        Entry::Named { id, .. } => format!("the name of device {id}"),
        Entry::Listed { resource, .. } => format!("the list of {resource}"),
        Entry::Judged { device, .. } => format!("the verdict on device {device}"),
        Entry::Gone { devices, .. } | Entry::Forgotten { devices } => {
            format!("the absence of {} devices", devices.len())
        }
        Entry::Hook(hook) => format!("the pending hook of device {}", hook.device),
    }
}

/// The entry of a payload with a correct crc.
pub(crate) fn decode(payload: &[u8]) -> Result<Entry, Defect> {
    // The usual case: one pass, which halves the time of a start.
    if let Some(record) = behind_front(payload).and_then(|rest| rest.strip_suffix(b"}"))
        && let Ok(entry) = serde_json::from_slice(record)
    {
        return Ok(entry);
    }
    // The version first: an entry of a later version may have another format.
    match serde_json::from_slice::<Versioned>(payload) {
        Ok(Versioned { v: 1..=VERSION }) => {}
        Ok(Versioned { v }) if v > VERSION => return Err(Defect::Newer(v)),
        _ => return Err(Defect::Damaged),
    }
    serde_json::from_slice::<Read>(payload).map(|read| read.record).map_err(|_| Defect::Damaged)
}

/// The version of a payload, if only a later Holdfast can read it.
pub(crate) fn newer(payload: &[u8]) -> Option<u32> {
    if behind_front(payload).is_some() {
        return None;
    }
    if let Err(Defect::Newer(version)) = decode(payload) { Some(version) } else { None }
}

/// The grant of a payload, if it is one.
pub(crate) fn decode_grant(payload: &[u8]) -> Option<Grant> {
    if let Ok(Entry::Grant(grant)) = decode(payload) {
        Some(Arc::unwrap_or_clone(grant))
    } else {
        None
    }
}

/// The alloc-id of a grant's payload, without decoding it. `None` for other entries, and for other
/// encoders.
pub(crate) fn alloc_id_of(payload: &[u8]) -> Option<AllocId> {
    let text = behind_front(payload)?.strip_prefix(br#"{"entry":"grant","alloc_id":""#)?;
    let end = text.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    let plain = text[end] == b'"';
    plain.then(|| std::str::from_utf8(&text[..end]).ok().map(AllocId::new)).flatten()
}

/// The crc of a record.
fn checksum(seq: u64, place: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&seq.to_le_bytes());
    hasher.update(&place.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

/// Appends the records of one write to `out`, numbered from `first`. The payloads' sizes are
/// checked.
pub(crate) fn frame<'a>(out: &mut Vec<u8>, first: u64, payloads: impl Iterator<Item = &'a [u8]>) {
    for (index, (payload, seq)) in payloads.zip(first..).enumerate() {
        debug_assert!(
            payload.len() <= PAYLOAD_BYTES_MAX,
            "the writer refuses what the reader would"
        );
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let place = u32::try_from(index).unwrap_or(PLACE_MAX).min(PLACE_MAX);
        out.extend_from_slice(&(length | place << LENGTH_BITS).to_le_bytes());
        out.extend_from_slice(&seq.to_le_bytes());
        out.extend_from_slice(&checksum(seq, place, payload).to_le_bytes());
        out.extend_from_slice(payload);
    }
}

/// The record at the start of `bytes`, which are not empty.
pub(crate) fn unframe(bytes: &[u8]) -> Result<Record<'_>, Defect> {
    let (Some(front), Some(seq), Some(crc)) =
        (u32_at(bytes, 0), u64_at(bytes, 4), u32_at(bytes, 12))
    else {
        return Err(Defect::Torn);
    };
    let (length, place) = (front & ((1 << LENGTH_BITS) - 1), front >> LENGTH_BITS);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > PAYLOAD_BYTES_MAX {
        return Err(Defect::Damaged);
    }
    let Some(payload) = bytes.get(PREFIX_BYTES..PREFIX_BYTES + length) else {
        return Err(Defect::Torn);
    };
    if checksum(seq, place, payload) == crc {
        Ok(Record { seq, place, payload })
    } else {
        Err(Defect::Damaged)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

/// A value of sled: `seq u64 LE │ crc32 u32 LE over key, seq and payload │ payload`. sled has its
/// own checksums. But it rolls back without an error if the end of its log is damaged, which the
/// sequence number shows. And after a power cut it may return a correct value under a wrong key,
/// which the crc shows.
pub(crate) fn stamp(key: &[u8], seq: u64, payload: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(12 + payload.len());
    value.extend_from_slice(&seq.to_le_bytes());
    value.extend_from_slice(&keyed_checksum(key, seq, payload).to_le_bytes());
    value.extend_from_slice(payload);
    value
}

fn keyed_checksum(key: &[u8], seq: u64, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(key);
    hasher.update(&seq.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

/// Reads a value that [`stamp`] wrote under the same key.
pub(crate) fn unstamp<'a>(key: &[u8], value: &'a [u8]) -> Result<Record<'a>, Defect> {
    let (Some(seq), Some(crc), Some(payload)) =
        (u64_at(value, 0), u32_at(value, 8), value.get(12..))
    else {
        return Err(Defect::Damaged);
    };
    if keyed_checksum(key, seq, payload) == crc {
        Ok(Record { seq, place: 0, payload })
    } else {
        Err(Defect::Damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Timestamp;
    use crate::store::samples;

    fn frame_one(bytes: &mut Vec<u8>, seq: u64, payload: &[u8]) {
        frame(bytes, seq, std::iter::once(payload));
    }

    /// A released format is read forever. Each change is a new version with its own golden file.
    fn is_golden(name: &str, golden: &[u8], entries: &[Entry]) {
        let mut bytes = Vec::new();
        for (entry, seq) in entries.iter().zip(1..) {
            frame_one(&mut bytes, seq, &encode(entry).unwrap());
        }
        if bytes != golden {
            std::fs::write(std::env::temp_dir().join(name), &bytes).unwrap();
        }
        assert!(
            bytes == golden,
            "{name} has changed; what is written now is in the temporary directory"
        );

        let mut rest = golden;
        let mut read = Vec::new();
        while !rest.is_empty() {
            let record = unframe(rest).unwrap();
            read.push(decode(record.payload).unwrap());
            rest = &rest[record.len()..];
        }
        assert_eq!(read, entries);
    }

    #[test]
    fn every_entry_on_disk_equals_its_golden_file() {
        let mut entries = vec![
            samples::made(1),
            samples::bound(1),
            samples::suspect(1),
            samples::released(1),
            samples::named(1),
        ];
        entries.push(samples::listed(&[1, 2]));
        entries.extend(samples::hook_in_each_state(1));
        entries.extend([samples::judged(1), samples::forgotten(1)]);
        entries.extend([
            samples::gone(&[1, 2]),
            samples::back(2),
            samples::forgotten_for_good(&[1]),
        ]);
        is_golden("records-v1.bin", include_bytes!("golden/records-v1.bin"), &entries);
        let entries = [
            samples::claimed(1),
            samples::prepared(1, None),
            samples::prepared(1, Some(Timestamp(1_700_000_002_000))),
            samples::unprepared(1),
        ];
        is_golden("records-v2.bin", include_bytes!("golden/records-v2.bin"), &entries);
    }

    #[test]
    fn only_what_an_earlier_version_cannot_read_has_the_later_version() {
        let versions = |entries: &[Entry]| {
            let payloads = entries.iter().map(|entry| encode(entry).unwrap());
            payloads.map(|payload| payload[5] - b'0').collect::<Vec<_>>()
        };
        let released_with_one_pod = {
            let Entry::Moved { alloc_id, state } = samples::released(1) else { panic!() };
            Entry::Moved { alloc_id, state }
        };
        assert_eq!(
            versions(&[samples::made(1), samples::bound(1), released_with_one_pod]),
            [1, 1, 1]
        );
        assert_eq!(
            versions(&[samples::claimed(1), samples::prepared(1, None), samples::unprepared(1)]),
            [2, 2, 2]
        );
        assert_eq!(newer(&encode(&samples::claimed(1)).unwrap()), None);
    }

    #[test]
    fn every_cut_is_torn_and_every_flipped_bit_is_detected() {
        let mut bytes = Vec::new();
        frame_one(&mut bytes, 7, &encode(&samples::made(1)).unwrap());
        for cut in 0..bytes.len() {
            assert_eq!(unframe(&bytes[..cut]), Err(Defect::Torn), "cut at {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(unframe(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_record_has_the_first_number_of_its_write() {
        let payloads: Vec<Vec<u8>> = (0..3000_u32).map(|n| n.to_le_bytes().to_vec()).collect();
        let mut bytes = Vec::new();
        frame(&mut bytes, 7, payloads.iter().map(Vec::as_slice));
        let mut rest = &bytes[..];
        for seq in 7..3007_u64 {
            let record = unframe(rest).unwrap();
            assert_eq!(
                (record.seq, record.write()),
                (seq, 7.max(seq.saturating_sub(2047))),
                "beyond 2047 it is unknown"
            );
            rest = &rest[record.len()..];
        }
        assert!(rest.is_empty());
        // The crc covers the place too.
        let second = unframe(&bytes).unwrap().len();
        for bit in 0..32 {
            let mut flipped = bytes[second..].to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(unframe(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_later_version_is_not_damage() {
        assert_eq!(decode(br#"{"v":3,"record":{"entry":"unheard-of"}}"#), Err(Defect::Newer(3)));
        assert_eq!(decode(br#"{"v":2,"record":{"entry":"unheard-of"}}"#), Err(Defect::Damaged));
        assert_eq!(newer(br#"{"v":3,"record":{"entry":"grant"}}"#), Some(3));
        assert_eq!(decode(br#"{"v":1,"record":{"entry":"unheard-of"}}"#), Err(Defect::Damaged));
        assert_eq!(decode(b"{}"), Err(Defect::Damaged));
    }

    #[test]
    fn the_alloc_id_of_a_grant_is_read_without_decoding() {
        assert_eq!(
            alloc_id_of(&encode(&samples::made(7)).unwrap()),
            Some(samples::grant(7).alloc_id)
        );
        let Entry::Grant(of_claim) = samples::claimed(7) else { panic!("it is a grant") };
        assert_eq!(
            alloc_id_of(&encode(&samples::claimed(7)).unwrap()).as_ref(),
            Some(&of_claim.alloc_id)
        );
        assert_eq!(alloc_id_of(&encode(&samples::bound(7)).unwrap()), None);
        assert_eq!(alloc_id_of(br#"{"v":1,"record":{"entry":"grant","alloc_id":"a\u0062"#), None);
    }

    #[test]
    fn a_field_that_a_later_version_adds_is_skipped() {
        let payload =
            br#"{"v":1,"record":{"entry":"named","key":"dev:/dev/fuse","id":"fuse","why":"new"}}"#;
        assert!(decode(payload).is_ok());
    }

    #[test]
    fn a_stamped_value_detects_every_flipped_bit_and_a_wrong_key() {
        let value = stamp(b"key", 3, b"payload");
        assert_eq!(unstamp(b"key", &value), Ok(Record { seq: 3, place: 0, payload: b"payload" }));
        assert_eq!(unstamp(b"kez", &value), Err(Defect::Damaged));
        for bit in 0..value.len() * 8 {
            let mut flipped = value.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(unstamp(b"key", &flipped), Err(Defect::Damaged), "bit {bit}");
        }
    }
}
