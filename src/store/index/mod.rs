//! The index: sled, the database of grants, live and past. It follows the journal on a thread of
//! its own, and answers queries.

mod compact;
mod database;
mod failure;
mod follow;
mod history_size;
mod opening;
mod reader;
mod shared;
mod task;
#[cfg(test)]
mod testing;
mod work;
mod worker;

#[cfg(test)]
pub(super) use self::compact::compact_dir;
pub(super) use self::database::Database;
pub(super) use self::failure::database_finding;
pub(super) use self::opening::open;
pub(super) use self::reader::DatabaseSnapshot;
pub(super) use self::work::{CheckpointOrder, Start, Update};
pub(super) use self::worker::{IndexWorker, PendingReader};
pub use self::worker::{Pending, PendingCheckpoint};
