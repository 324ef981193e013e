//! The index: sled, the database of grants, live and past. It follows the journal on a thread of its own, and answers queries.

mod attempts;
mod compact;
mod database;
mod follow;
mod length;
mod opening;
mod reader;
mod refusal;
mod shared;
mod task;
#[cfg(test)]
mod testing;
mod work;
mod worker;

#[cfg(test)]
pub(super) use self::compact::compact_dir;
pub(super) use self::database::{Database, Update};
pub(super) use self::opening::{Attempt, LATE_AFTER, open_copy};
pub(super) use self::reader::DatabaseSnapshot;
#[cfg(test)]
pub(super) use self::refusal::{Refusal, refusal_of};
pub(super) use self::work::{Begin, CheckpointOrder, Start};
pub use self::worker::PendingCheckpoint;
pub(super) use self::worker::{IndexWorker, PendingReader};
