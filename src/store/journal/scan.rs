//! Finds records in a segment's bytes: its header, and readable records behind damage.

use super::{HEADER_BYTES_MAX, MAGIC, codec};

/// The header of a segment.
pub(super) enum Header {
    Head { records: u64, bytes: usize },
    Newer(u32),
    Torn,
    Damaged,
}

/// Reads the header at the start of a segment.
pub(super) fn header(bytes: &[u8]) -> Header {
    let front = &bytes[..bytes.len().min(HEADER_BYTES_MAX)];
    let Some(end) = front.iter().position(|byte| *byte == b'\n') else {
        return if bytes.len() < HEADER_BYTES_MAX { Header::Torn } else { Header::Damaged };
    };
    let sound = |line: &str| {
        let (text, crc) = line.rsplit_once(" crc=")?;
        (u32::from_str_radix(crc, 16).ok()? == crc32fast::hash(text.as_bytes()))
            .then(|| text.to_owned())
    };
    let Some(text) = std::str::from_utf8(&front[..end]).ok().and_then(sound) else {
        return Header::Damaged;
    };
    let Some((version, rest)) = text.strip_prefix(MAGIC).and_then(|rest| rest.split_once(' '))
    else {
        return Header::Damaged;
    };
    match (version.parse::<u32>(), rest.strip_prefix("head=").and_then(|count| count.parse().ok()))
    {
        (Ok(version), _) if version > codec::FRAMING => Header::Newer(version),
        (Ok(codec::FRAMING), Some(records)) => Header::Head { records, bytes: end + 1 },
        _ => Header::Damaged,
    }
}

/// Whether `bytes`, which begin with a readable record, contain a later write than that of the
/// record `lost`.
pub(super) fn is_followed(bytes: &[u8], lost: u64) -> bool {
    let (mut at, mut expected) = (0, lost);
    loop {
        match codec::unframe(&bytes[at..]) {
            Ok(record) if record.write() > lost => return true,
            Ok(record) => (at, expected) = (at + record.len(), record.seq + 1),
            Err(_) => match resynchronise(bytes, at, expected) {
                Some((next, _)) => at = next,
                None => return false,
            },
        }
    }
}

/// Returns the next readable record at or after `at`, and its sequence number. `None`: nothing
/// follows, so the write was torn.
///
/// A random position passes as a record only with a correct crc. The crc is computed only where the
/// sequence number could be reached with the bytes in between (a record has at least 17), which is
/// almost never.
pub(super) fn resynchronise(bytes: &[u8], at: usize, expected: u64) -> Option<(usize, u64)> {
    let highest = expected + (bytes.len() - at) as u64 / 17 + 1;
    (at..bytes.len().saturating_sub(codec::PREFIX_BYTES)).find_map(|place| {
        let seq = bytes.get(place + 4..place + 12)?.try_into().ok().map(u64::from_le_bytes)?;
        if !(expected..=highest).contains(&seq) {
            return None;
        }
        codec::unframe(&bytes[place..]).ok().map(|record| (place, record.seq))
    })
}
