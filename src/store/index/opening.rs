//! Opening the database, and what an error means.
//!
//! | observation | meaning |
//! | --- | --- |
//! | it takes long | the disk is slow; opening continues |
//! | the system refuses: EMFILE, ENOMEM, EIO, EACCES, ENOSPC | no finding; retried later |
//! | another process has it open | no finding; that process is ending |
//! | a wrong checksum, number or format, a missing file, or a panic of sled | it is damaged |
//!
//! Only a damaged database is quarantined, and an empty one replaces it.

use super::database::Database;
use super::failure::{failure, guard, history_finding};
use super::reader::DatabaseSnapshot;
use super::shared::Shared;
use crate::store::StoreError;
use crate::store::layout::{quarantine, require_free_space};
#[cfg(test)]
use crate::store::testing;
use std::path::Path;

/// Opens the database in `dir`. A panic of sled becomes an error.
pub(crate) fn open(dir: &Path) -> Result<(Database, DatabaseSnapshot), StoreError> {
    #[cfg(test)]
    let _steps = testing::without_steps();
    #[cfg(test)]
    testing::slow::pass(dir)?;
    guard(|| Ok(Database::open_here(dir))).unwrap_or_else(|error| Err(failure(dir, &error)))
}

/// Opens the database, or replaces a damaged one by an empty one and reports that.
pub(super) fn open_or_replace(
    dir: &Path,
    shared: &Shared,
) -> Result<(Database, DatabaseSnapshot), StoreError> {
    require_free_space(dir)?;
    match open(dir) {
        // While the store closes, this is left to the next start.
        Err(StoreError::Database { why, .. }) if !shared.is_ending() => {
            if dir.exists() {
                shared.late().quarantined(quarantine(dir)?);
            }
            require_free_space(dir)?;
            let opened = open(dir)?;
            shared.late().finding(history_finding(&why));
            Ok(opened)
        }
        opened => opened,
    }
}
