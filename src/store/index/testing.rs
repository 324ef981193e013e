//! Actions of tests on an open database.

use super::database::{Database, SCHEMA};
use crate::domain::AllocId;
use crate::store::journal::codec;

impl Database {
    /// Writes the trees' version, or one record, of a later Holdfast.
    pub(crate) fn write_newer_for_test(&self, what: &str) {
        if what == "trees" {
            self.set_number(SCHEMA, u64::from(codec::TREES) + 1).unwrap();
        } else {
            self.trees
                .live
                .insert(
                    "later",
                    codec::stamp(b"later", 1_000, br#"{"v":9,"record":{"entry":"unheard-of"}}"#),
                )
                .unwrap();
        }
        self.persist().unwrap();
    }

    /// Copies a value to another key, as sled does after some power cuts.
    pub(crate) fn misplace_for_test(&self, alloc_id: &AllocId, key: &str) {
        let value = self.trees.live.get(alloc_id.as_str()).unwrap().unwrap();
        self.trees.live.insert(key, value).unwrap();
    }

    /// Removes a released grant, as sled does after some power cuts.
    pub(crate) fn lose_for_test(&self) {
        self.trees.history.pop_min().unwrap();
        self.persist().unwrap();
    }

    /// Changes a byte of a live grant, as a failing disk does.
    pub(crate) fn damage_for_test(&self, alloc_id: &AllocId) {
        let mut value = self.trees.live.get(alloc_id.as_str()).unwrap().unwrap().to_vec();
        value[20] ^= 1;
        self.trees.live.insert(alloc_id.as_str(), value).unwrap();
    }
}
