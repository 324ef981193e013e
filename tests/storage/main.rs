//! The ledger's files: damage, full and slow disks, kill -9, power cuts.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod claims;
#[path = "../common/mod.rs"]
mod common;
mod damage;
mod full_disk;
mod kill9;
mod policies;
mod power_cut;
mod slow_database;

use holdfast::domain::Durability;
use holdfast::store::{Recovered, Store, StoreError};
use std::path::Path;

/// Opens a ledger, perhaps once more in this process. The thread that closes the former database
/// has a low priority. On a busy machine the end of its store does not wait for it, and it still
/// has the lock.
fn open(state: &Path, boot: Option<&str>) -> (Store, Recovered) {
    let opened = common::until_blocking(
        "the ledger is free",
        || Store::open(state, Durability::PowerLoss, boot),
        |opened| !matches!(opened, Err(StoreError::InUse { .. })),
    );
    opened.unwrap()
}
