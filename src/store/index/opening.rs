//! Opening the database, and what is made of an error.
//!
//! | what is seen | what it says |
//! | --- | --- |
//! | it takes long | the disk is slow: it goes on opening |
//! | the system refuses: EMFILE, ENOMEM, EIO, EACCES, ENOSPC | nothing: it is tried again later |
//! | another process has it | nothing: that one is ending |
//! | a checksum, a sequence number or a format is wrong, a file is missing, sled panics over what it has read | it is damaged |
//!
//! Only a damaged database is moved away; an empty one takes its place.

use super::database::Database;
use super::failure::{failure, guard};
use super::reader::DatabaseSnapshot;
use super::shared::Shared;
use crate::store::StoreError;
use crate::store::layout::{quarantine, require_free_space};
#[cfg(test)]
use crate::store::testing;
use std::path::Path;

/// Opens the database in `dir`, however long that takes and whether or not sled panics.
pub(crate) fn open(dir: &Path) -> Result<(Database, DatabaseSnapshot), StoreError> {
    #[cfg(test)]
    let _steps = testing::without_steps();
    #[cfg(test)]
    testing::slow::pass(dir)?;
    guard(|| Ok(Database::open_here(dir))).unwrap_or_else(|error| Err(failure(dir, &error)))
}

/// The same, or an empty one in the place of a damaged one. Says why that was moved away.
pub(super) fn open_or_replace(
    dir: &Path,
    shared: &Shared,
) -> Result<(Database, DatabaseSnapshot, Option<String>), StoreError> {
    require_free_space(dir)?;
    match open(dir) {
        // A store that was closed meanwhile leaves that to the next start.
        Err(StoreError::Database { why, .. }) if !shared.is_ending() => {
            if dir.exists() {
                shared.late().quarantined(quarantine(dir)?);
            }
            require_free_space(dir)?;
            open(dir).map(|(database, snapshot)| (database, snapshot, Some(why)))
        }
        opened => opened.map(|(database, snapshot)| (database, snapshot, None)),
    }
}
