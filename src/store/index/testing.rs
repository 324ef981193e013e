//! What tests do to a database behind the store's back.

use super::database::{Database, SCHEMA};
use crate::domain::AllocId;
use crate::store::journal::codec;

impl Database {
    /// Writes as a later version of Holdfast would: its trees, or one record.
    pub(crate) fn write_newer_for_test(&self, what: &str) {
        if what == "trees" {
            self.set_number(SCHEMA, u64::from(codec::TREES) + 1).unwrap();
        } else {
            self.live
                .insert(
                    "later",
                    codec::stamp(b"later", 1_000, br#"{"v":9,"record":{"entry":"unheard-of"}}"#),
                )
                .unwrap();
        }
        self.persist().unwrap();
    }

    /// Gives a value to another key too, as sled does after some power cuts.
    pub(crate) fn misplace_for_test(&self, alloc_id: &AllocId, key: &str) {
        let value = self.live.get(alloc_id.as_str()).unwrap().unwrap();
        self.live.insert(key, value).unwrap();
    }

    /// Loses a released grant, as sled does after some power cuts.
    pub(crate) fn lose_for_test(&self) {
        self.past.pop_min().unwrap();
        self.persist().unwrap();
    }

    /// Changes a byte of a live grant, as a disk may.
    pub(crate) fn damage_for_test(&self, alloc_id: &AllocId) {
        let mut value = self.live.get(alloc_id.as_str()).unwrap().unwrap().to_vec();
        value[20] ^= 1;
        self.live.insert(alloc_id.as_str(), value).unwrap();
    }
}
