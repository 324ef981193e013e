//! Opening the database, on a thread of its own and for as long as it takes, and what is said of one that does not open.
//!
//! | what is seen | what it says |
//! | --- | --- |
//! | it takes long | the disk is slow: it goes on opening |
//! | the system refuses: EMFILE, ENOMEM, EIO, EACCES, ENOSPC | nothing: it is tried again later |
//! | another process has it | nothing: that one is ending |
//! | a checksum, a sequence number or a format is wrong, a file is missing, sled panics over what it has read | it is damaged |
//!
//! Only what is damaged is moved away.

use super::StoreError;
use super::database::{Image, Refusal, Shelf, guard};
use super::layout::{quarantine, require_room};
use crate::host;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Opening 1000 records takes 3 to 11 ms, and 100,000 some 100. What takes longer than this has a slow disk: a start goes on without it,
/// and who asks for the history is told so.
pub(super) const LATE_AFTER: Duration = Duration::from_secs(4);
/// How long somebody at a terminal waits for a copy to open.
const COPY_PATIENCE: Duration = Duration::from_secs(60);

/// A database with what it holds, or why there is none.
type Outcome = Result<(Shelf, Image), Refusal>;

/// A database that is being opened or created.
#[derive(Debug)]
pub(super) struct Opening {
    #[cfg(test)]
    dir: PathBuf,
    begun: Instant,
    opened: Receiver<Outcome>,
}

impl Opening {
    /// Begins to open the database in `dir`.
    pub(super) fn begin(dir: &Path) -> Self {
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
            let opened = guard(|| Ok(Shelf::open_here(&path))).unwrap_or_else(|error| Err(error.into()));
            // Nobody listens any more when the store was closed meanwhile; then the handle is dropped here.
            drop(sender.send(opened));
        };
        if let Err(error) = thread::Builder::new().name("sled-open".into()).spawn(open) {
            // That says nothing of the database.
            drop(unused.send(Err(Refusal::NoRoom(error))));
        }
        Opening {
            #[cfg(test)]
            dir: dir.to_owned(),
            begun: Instant::now(),
            opened,
        }
    }

    /// Waits for so long; `None`: it goes on.
    pub(super) fn wait_for(&self, patience: Duration) -> Option<Outcome> {
        #[cfg(test)]
        let patience = if slow::is_held(&self.dir) { Duration::ZERO } else { patience };
        match self.opened.recv_timeout(patience) {
            Ok(outcome) => Some(outcome),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(Refusal::Unable("the thread that opened it has ended".into()))),
        }
    }

    /// Waits for it as long as it takes.
    #[cfg(test)]
    pub(super) fn wait(self) -> Outcome {
        self.opened.recv().unwrap()
    }

    /// Whether it takes longer than anybody waits for it.
    pub(super) fn is_late(&self) -> bool {
        #[cfg(test)]
        if slow::is_held(&self.dir) {
            return true;
        }
        self.begun.elapsed() >= LATE_AFTER
    }
}

/// What could be read of a database that is damaged, and what is wrong with it. It vouches for nothing but its single records.
pub(super) type Salvaged = (Image, String);

/// A database that is ready.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) shelf: Shelf,
    /// What it holds.
    pub(super) holds: Image,
    /// Of the one whose place it has taken.
    pub(super) salvaged: Option<Salvaged>,
}

/// An attempt to have a database: the one that is there or, if that is damaged, an empty one.
#[derive(Debug)]
pub(super) struct Attempt {
    dir: PathBuf,
    opening: Opening,
    salvaged: Option<Salvaged>,
}

impl Attempt {
    /// Begins one for the database in `dir`.
    pub(super) fn begin(dir: &Path) -> Self {
        Attempt { dir: dir.to_owned(), opening: Opening::begin(dir), salvaged: None }
    }

    /// The same beside what is left of one that was moved away.
    pub(super) fn beside(dir: &Path, salvaged: Salvaged) -> Self {
        Attempt { salvaged: Some(salvaged), ..Attempt::begin(dir) }
    }

    /// Whether it takes longer than anybody waits for it.
    pub(super) fn is_late(&self) -> bool {
        self.opening.is_late()
    }

    /// Waits for its end for so long. What is damaged is moved away if `may_move` allows it, and the attempt goes on with an empty one.
    pub(super) fn wait_for(
        &mut self,
        patience: Duration,
        may_move: impl Fn() -> Result<(), StoreError>,
        quarantined: &mut Vec<PathBuf>,
    ) -> Option<Result<Opened, StoreError>> {
        let until = Instant::now() + patience;
        loop {
            let refusal = match self.opening.wait_for(until.saturating_duration_since(Instant::now()))? {
                Ok((shelf, holds)) => return Some(Ok(Opened { shelf, holds, salvaged: self.salvaged.take() })),
                Err(refusal) => refusal,
            };
            match refusal {
                Refusal::Damaged { why, readable } if self.salvaged.is_none() => {
                    let moved = may_move().and_then(|()| if self.dir.exists() { quarantine(&self.dir).map(Some) } else { Ok(None) });
                    match moved.and_then(|moved| require_room(&self.dir).map(|()| moved)) {
                        Ok(moved) => quarantined.extend(moved),
                        Err(error) => return Some(Err(error)),
                    }
                    *self = Attempt::beside(&self.dir, (Image { applied: 0, ..*readable }, why));
                }
                refusal => return Some(Err(refused(&self.dir, refusal))),
            }
        }
    }
}

/// Waits for the copy of a database.
///
/// # Errors
/// When it does not open.
pub(super) fn open_copy(copy: &Path, original: &Path) -> Result<(Shelf, Image), StoreError> {
    let late =
        || StoreError::Unopened { path: original.to_owned(), why: format!("its copy takes more than {} s", COPY_PATIENCE.as_secs()) };
    let outcome = Opening::begin(copy).wait_for(COPY_PATIENCE).ok_or_else(late)?;
    outcome.map_err(|refusal| refused(original, refusal))
}

fn refused(dir: &Path, refusal: Refusal) -> StoreError {
    match refusal {
        Refusal::InUse => StoreError::InUse { path: dir.parent().unwrap_or(dir).to_owned() },
        Refusal::NoRoom(error) => StoreError::io("open", dir)(error),
        Refusal::Newer(version) => StoreError::Newer { path: dir.to_owned(), version },
        Refusal::Unable(why) => StoreError::Unopened { path: dir.to_owned(), why },
        Refusal::Damaged { why, .. } => StoreError::Database { path: dir.to_owned(), why },
    }
}

/// Databases that open when a test lets them, or that the system refuses to open.
#[cfg(test)]
pub(super) mod slow {
    use super::Refusal;
    use crate::store::database::refusal_of;
    use std::collections::BTreeMap;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::sync::{Condvar, Mutex};

    /// What becomes of the next one to open a database.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Plan {
        Waits,
        Fails { errno: i32, times: u32 },
    }

    static PLANS: Mutex<BTreeMap<PathBuf, Plan>> = Mutex::new(BTreeMap::new());
    static CHANGED: Condvar = Condvar::new();

    /// Lets the database go on as soon as it is dropped.
    #[derive(Debug)]
    pub(in crate::store) struct Held(PathBuf);

    impl Drop for Held {
        fn drop(&mut self) {
            PLANS.lock().unwrap().remove(&self.0);
            CHANGED.notify_all();
        }
    }

    /// From now on the database of this directory does not get on with opening.
    pub(in crate::store) fn hold(dir: &Path) -> Held {
        plan(dir, Plan::Waits)
    }

    /// The next attempts to open the database of this directory get this error from the system.
    pub(in crate::store) fn refuse(dir: &Path, errno: i32, times: u32) -> Held {
        plan(dir, Plan::Fails { errno, times })
    }

    fn plan(dir: &Path, plan: Plan) -> Held {
        PLANS.lock().unwrap().insert(dir.to_owned(), plan);
        Held(dir.to_owned())
    }

    pub(super) fn is_held(dir: &Path) -> bool {
        PLANS.lock().unwrap().get(dir) == Some(&Plan::Waits)
    }

    pub(super) fn pass(dir: &Path) -> Result<(), Refusal> {
        let mut plans = CHANGED.wait_while(PLANS.lock().unwrap(), |plans| plans.get(dir) == Some(&Plan::Waits)).unwrap();
        match plans.get_mut(dir) {
            Some(Plan::Fails { errno, times }) if *times > 0 => {
                *times -= 1;
                Err(refusal_of(io::Error::from_raw_os_error(*errno)))
            }
            _ => Ok(()),
        }
    }
}
