//! The ledger's files: damage, full and slow disks, kill -9, power cuts.

mod claims;
mod damage;
mod full_disk;
mod kill9;
mod policies;
mod power_cut;
mod slow_database;

use holdfast::domain::Durability;
use holdfast::store::{Recovered, Store, StoreError};
use std::path::Path;

/// Opens a ledger, perhaps once more in this process. The former store may have the lock for a
/// while longer on a busy machine: the thread that closes its database has a low priority, and a
/// program that was just started has a copy of each open file until it runs.
fn open(state: &Path, boot: Option<&str>) -> (Store, Recovered) {
    let opened = crate::common::until_blocking(
        "the ledger is free",
        || Store::open(state, Durability::PowerLoss, boot),
        |opened| !matches!(opened, Err(StoreError::InUse { .. })),
    );
    opened.unwrap()
}
