//! Opening the database, on a thread of its own and for as long as it takes.
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
use super::reader::DatabaseSnapshot;
use super::refusal::{Refusal, guard};
use crate::host;
use crate::store::StoreError;
use crate::store::layout::{quarantine, require_free_space};
#[cfg(test)]
use crate::store::testing::slow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Opening 1000 records takes 3 to 11 ms, and 100,000 some 100. What takes longer than this has a slow disk: a start goes on without
/// it, and a query gets an error.
pub(crate) const LATE_AFTER: Duration = Duration::from_secs(4);
/// How long a person at a terminal waits for a copy to open.
const COPY_PATIENCE: Duration = Duration::from_secs(60);

/// The next attempt to open the database.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    pub(super) at: Instant,
    /// Whether a query or a checkpoint brings it forward.
    pub(super) may_come_before: bool,
}

/// A database that is ready.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) database: Database,
    /// What it holds.
    pub(crate) snapshot: DatabaseSnapshot,
    /// Why the former one was moved away, if it was.
    pub(crate) replaced: Option<String>,
}

/// An attempt to have a database: the one that is there or, if that is damaged, an empty one.
#[derive(Debug)]
pub(crate) struct Attempt {
    dir: PathBuf,
    begun: Instant,
    opened: Receiver<Result<(Database, DatabaseSnapshot), Refusal>>,
    replaced: Option<String>,
}

impl Attempt {
    /// Begins to open the database in `dir`. `replaced` says why the former one was moved away, if it was.
    pub(crate) fn begin(dir: &Path, replaced: Option<String>) -> Self {
        let (sender, opened) = sync_channel(1);
        let (path, unused) = (dir.to_owned(), sender.clone());
        let open = move || {
            // sled's own threads are started by this one.
            host::lower_thread_priority();
            #[cfg(test)]
            if let Err(refusal) = slow::pass(&path) {
                drop(sender.send(Err(refusal)));
                return;
            }
            let opened = guard(|| Ok(Database::open_here(&path))).unwrap_or_else(|error| Err(error.into()));
            // Where the store was closed meanwhile the database is closed here.
            drop(sender.send(opened));
        };
        if let Err(error) = thread::Builder::new().name("sled-open".into()).spawn(open) {
            // That says nothing about the database.
            drop(unused.send(Err(Refusal::NoSpace(error))));
        }
        Attempt { dir: dir.to_owned(), begun: Instant::now(), opened, replaced }
    }

    /// Whether it takes longer than a start waits for it.
    pub(crate) fn is_late(&self) -> bool {
        #[cfg(test)]
        if slow::is_held(&self.dir) {
            return true;
        }
        self.begun.elapsed() >= LATE_AFTER
    }

    /// Waits for its end for so long; `None`: it goes on. A damaged database is moved away, to where the last argument says, and the
    /// attempt goes on with an empty one.
    pub(crate) fn wait_for(&mut self, patience: Duration, quarantined: &mut Vec<PathBuf>) -> Option<Result<Opened, StoreError>> {
        #[cfg(test)]
        let patience = if slow::is_held(&self.dir) { Duration::ZERO } else { patience };
        let until = Instant::now() + patience;
        loop {
            let refusal = match self.opened.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Ok((database, snapshot))) => return Some(Ok(Opened { database, snapshot, replaced: self.replaced.take() })),
                Ok(Err(refusal)) => refusal,
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => Refusal::Unable("the thread that opened it has ended".into()),
            };
            match refusal {
                Refusal::Damaged(why) if self.replaced.is_none() => {
                    let moved = if self.dir.exists() { quarantine(&self.dir).map(Some) } else { Ok(None) };
                    match moved.and_then(|moved| require_free_space(&self.dir).map(|()| moved)) {
                        Ok(moved) => quarantined.extend(moved),
                        Err(error) => return Some(Err(error)),
                    }
                    *self = Attempt::begin(&self.dir, Some(why));
                }
                refusal => return Some(Err(refused(&self.dir, refusal))),
            }
        }
    }
}

/// Opens the copy of a database. Nothing of it is moved.
///
/// # Errors
/// When the copy does not open in time, or at all.
pub(crate) fn open_copy(copy: &Path, original: &Path) -> Result<(Database, DatabaseSnapshot), StoreError> {
    let late =
        |_| StoreError::Unopened { path: original.to_owned(), why: format!("its copy takes more than {} s", COPY_PATIENCE.as_secs()) };
    let opened = Attempt::begin(copy, None).opened.recv_timeout(COPY_PATIENCE).map_err(late)?;
    opened.map_err(|refusal| refused(original, refusal))
}

fn refused(dir: &Path, refusal: Refusal) -> StoreError {
    match refusal {
        Refusal::InUse => StoreError::InUse { path: dir.parent().unwrap_or(dir).to_owned() },
        Refusal::NoSpace(error) => StoreError::io("open", dir)(error),
        Refusal::Newer(version) => StoreError::Newer { path: dir.to_owned(), version },
        Refusal::Unable(why) => StoreError::Unopened { path: dir.to_owned(), why },
        Refusal::Damaged(why) => StoreError::Database { path: dir.to_owned(), why },
    }
}
