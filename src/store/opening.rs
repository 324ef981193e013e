//! Opening the database with a time limit, and what is done with one that is damaged.

use super::StoreError;
use super::database::{Image, Refusal, Shelf, guard};
use super::layout::{exchange, has_room, quarantine, remove};
use crate::host;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Opening 1000 records takes 3 to 11 ms, and 100,000 some 100; what takes this long does not end.
const OPEN_LIMIT: Duration = Duration::from_secs(4);

/// A database that is being opened or created, on a thread of its own so that it can be given up on.
#[derive(Debug)]
pub(super) struct Opening {
    dir: PathBuf,
    begun: Instant,
    opened: mpsc::Receiver<Result<(Shelf, Image), Refusal>>,
}

impl Opening {
    /// Begins to open the database in `dir`.
    pub(super) fn begin(dir: &Path) -> Self {
        let (sender, opened) = mpsc::sync_channel(1);
        let (path, unused) = (dir.to_owned(), sender.clone());
        let open = move || {
            // sled's own threads are started by this one.
            host::step_back();
            let opened = guard(|| Ok(Shelf::open_here(&path))).unwrap_or_else(|error| Err(error.into()));
            // Nobody listens after the limit; then the handle is dropped here.
            drop(sender.send(opened));
        };
        if let Err(error) = thread::Builder::new().name("sled-open".into()).spawn(open) {
            // That says nothing of the database.
            drop(unused.send(Err(Refusal::NoRoom(error))));
        }
        Opening { dir: dir.to_owned(), begun: Instant::now(), opened }
    }

    /// Waits for it.
    pub(super) fn wait(self) -> Result<(Shelf, Image), Refusal> {
        let left = OPEN_LIMIT.saturating_sub(self.begun.elapsed());
        self.opened.recv_timeout(left).unwrap_or_else(|_| {
            // Without room it may hang, and is sound all the same.
            if !has_room(&self.dir) {
                return Err(Refusal::NoRoom(io::ErrorKind::StorageFull.into()));
            }
            Err(damaged(format!("it does not open within {} s", OPEN_LIMIT.as_secs())))
        })
    }
}

fn damaged(why: String) -> Refusal {
    Refusal::Damaged { why, readable: Box::default() }
}

/// A database that is ready, and what came of the one that was there.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) shelf: Shelf,
    /// What the ready one holds.
    pub(super) holds: Image,
    /// What could be read of a damaged one, and what was wrong with it. It vouches for nothing but its single records.
    pub(super) salvaged: Option<(Image, String)>,
}

/// Waits for the database in `dir`; one that is damaged is renamed away and replaced by an empty one.
pub(super) fn open_or_replace(opening: Opening, dir: &Path, quarantined: &mut Vec<PathBuf>) -> Result<Opened, StoreError> {
    let refused = |refusal| match refusal {
        Refusal::InUse => StoreError::InUse { path: dir.parent().unwrap_or(dir).to_owned() },
        Refusal::NoRoom(error) => StoreError::io("open", dir)(error),
        Refusal::Newer(version) => StoreError::Newer { path: dir.to_owned(), version },
        Refusal::Damaged { why, .. } => StoreError::Database { path: dir.to_owned(), why },
    };
    match opening.wait() {
        Ok((shelf, holds)) => Ok(Opened { shelf, holds, salvaged: None }),
        Err(Refusal::Damaged { why, readable }) => {
            if dir.exists() {
                quarantined.push(quarantine(dir)?);
            }
            let (shelf, holds) = Opening::begin(dir).wait().map_err(refused)?;
            Ok(Opened { shelf, holds, salvaged: Some((Image { applied: 0, ..*readable }, why)) })
        }
        Err(refusal) => Err(refused(refusal)),
    }
}

/// Where there is none, sled is not begun.
pub(super) fn require_room(dir: &Path) -> Result<(), StoreError> {
    if has_room(dir) { Ok(()) } else { Err(StoreError::io("write", dir)(io::ErrorKind::StorageFull.into())) }
}

/// The database; where a handle of this process has it and will not let go, a copy of its files takes its place. Nobody
/// else has it: the state directory is ours.
pub(super) fn open_or_exchange(dir: &Path, quarantined: &mut Vec<PathBuf>) -> Result<Opened, StoreError> {
    match open_or_replace(Opening::begin(dir), dir, quarantined) {
        Err(StoreError::InUse { .. }) => {
            let stuck = exchange(dir)?;
            let opened = open_or_replace(Opening::begin(dir), dir, quarantined)?;
            match &opened.salvaged {
                // The copy has everything that it has.
                None => remove(&stuck)?,
                Some(_) => quarantined.push(stuck),
            }
            Ok(opened)
        }
        done => done,
    }
}
