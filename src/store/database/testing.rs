//! What tests do to a database behind the store's back.

use super::{HISTORY_BYTES, HISTORY_BYTES_OF, SCHEMA, Shelf};
use crate::domain::AllocId;
use crate::store::codec;

impl Shelf {
    /// Writes as a later version of Holdfast would: its trees, or one record.
    pub(in crate::store) fn write_newer_for_test(&self, what: &str) {
        if what == "trees" {
            self.set_number(SCHEMA, u64::from(codec::TREES) + 1).unwrap();
        } else {
            self.live.insert("later", codec::stamp(b"later", 1_000, br#"{"v":9,"record":{"entry":"unheard-of"}}"#)).unwrap();
        }
        self.persist().unwrap();
    }

    /// Gives a value to another key too, as sled does after some power cuts.
    pub(in crate::store) fn misplace_for_test(&self, alloc_id: &AllocId, key: &str) {
        let value = self.live.get(alloc_id.as_str()).unwrap().unwrap();
        self.live.insert(key, value).unwrap();
    }

    /// Loses a released grant, as sled does after some power cuts.
    pub(in crate::store) fn lose_for_test(&self) {
        self.past.pop_min().unwrap();
        self.persist().unwrap();
    }

    /// Changes a byte of a live grant, as a disk may.
    pub(in crate::store) fn damage_for_test(&self, alloc_id: &AllocId) {
        let mut value = self.live.get(alloc_id.as_str()).unwrap().unwrap().to_vec();
        value[20] ^= 1;
        self.live.insert(alloc_id.as_str(), value).unwrap();
    }

    /// Forgets the bytes of the history, which an earlier version does not count.
    pub(in crate::store) fn forget_measure_for_test(&self) {
        for key in [HISTORY_BYTES, HISTORY_BYTES_OF] {
            self.meta.remove(key).unwrap();
        }
        self.persist().unwrap();
    }
}
