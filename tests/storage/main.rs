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
