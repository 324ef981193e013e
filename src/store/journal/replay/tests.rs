//! Reading a segment while another thread, or another process, writes to it.

use super::JournalReplay;
use crate::store::journal::segment::header_and_head;
use crate::store::journal::{codec, file_name};
use crate::store::samples::{made, released};
use std::fs;
use std::path::Path;

/// A segment with three writes of 50 entries, and where the second and the third begin.
fn segment() -> (Vec<u8>, [usize; 2]) {
    let entry = |seq: u64| if seq % 2 == 1 { made(seq) } else { released(seq - 1) };
    let mut bytes = header_and_head(1, &[]);
    let begins = [1, 51, 101].map(|first| {
        let begins = bytes.len();
        let payloads: Vec<_> =
            (first..first + 50).map(|seq| codec::encode(&entry(seq)).unwrap()).collect();
        codec::frame(&mut bytes, first, payloads.iter().map(Vec::as_slice));
        begins
    });
    (bytes, [begins[1], begins[2]])
}

/// Replays what a read returned, from a file whose content is `on_disk` now.
fn replay(read: &[u8], on_disk: &[u8]) -> JournalReplay {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file_name(1));
    fs::write(&path, on_disk).unwrap();
    let mut replay = JournalReplay::of(Path::new("/nonexistent"));
    replay.segment(1, &path, read.to_vec()).unwrap();
    replay
}

/// The kernel copies a file page by page. A reader that is interrupted between two pages misses
/// what is written behind it, and sees what is written ahead of it.
#[test]
fn a_read_that_missed_a_write_behind_it_shows_no_damage() {
    let (whole, [second, third]) = segment();
    let page = 700;
    for hole in (second..third).step_by(page) {
        let mut read = whole[..third + 2000].to_vec();
        read[hole..(hole + page).min(third)].fill(0);
        let found = replay(&read, &whole);
        assert!(found.missing() == 0 && found.damaged.is_empty(), "{hole}");
        assert!((101..150).contains(&found.last), "{hole}: {}", found.last);
        let mut read = whole.clone();
        read[hole..(hole + page).min(third)].fill(0);
        let found = replay(&read, &whole);
        assert_eq!((found.missing(), found.damaged.len(), found.last), (0, 0, 150), "{hole}");
        // If the file itself has the hole, entries are missing.
        let found = replay(&read, &read);
        assert!(found.missing() > 0 && found.damaged.len() == 1 && found.last == 150, "{hole}");
    }
}
