//! The tokio runtimes of this process, and their minimum of system limits.
//!
//! tokio's `spawn_blocking` panics when its pool has no thread and none can be made (`pids.max`,
//! `TasksMax`, RLIMIT_NPROC). So the pool of each runtime here has one thread from the start, which
//! never ends: tasks then wait for it. Only short tasks may be given to the pool. A hook or a probe
//! that may hang has a thread of its own, or none.

use super::process::{check_task_limit, file_size_limit, open_files};
use std::io;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// The maximum number of threads of a pool. Threads stay once they were made.
const BLOCKING_MAX: usize = 16;

/// The threads that a start makes: four runtimes with a thread for each pool, seven of sled and one
/// that works with it, one that probes. The rest is for a hook, a reader of the ledger and the
/// probes after these.
const TASKS_MIN: usize = 18;

/// Descriptors without any resource: the ledger's files, sockets, watches and runtimes take about
/// 25, and a few connections are added.
const FILES_MIN: u64 = 44;
/// For each resource: its socket, and the kubelet's connection, twice.
const FILES_OF_A_RESOURCE: u64 = 4;

/// The history of a node may have hundreds of megabytes, and sled keeps it in one file.
const FILE_BYTES_MIN: u64 = 1 << 30;

/// A runtime on the thread that polls it, with one permanent thread in its pool.
///
/// # Errors
/// If the system has no descriptors or no thread for it.
pub fn runtime() -> io::Result<Runtime> {
    runtime_of(&mut Builder::new_current_thread())
}

/// The same, with settings of its own.
///
/// # Errors
/// As [`runtime`].
pub fn runtime_of(builder: &mut Builder) -> io::Result<Runtime> {
    let runtime = builder
        .enable_all()
        .max_blocking_threads(BLOCKING_MAX)
        .thread_keep_alive(Duration::MAX)
        .build()?;
    // Without this check `spawn_blocking` would panic.
    check_task_limit(1)?;
    drop(runtime.spawn_blocking(|| ()));
    Ok(runtime)
}

/// Which limit of this process is too low for a daemon with this many resources, and the remedy;
/// `None` if all are sufficient.
#[must_use]
pub fn insufficient_limit(resources: usize) -> Option<String> {
    let wanted = FILES_MIN + FILES_OF_A_RESOURCE * resources as u64;
    if let Some(limit) = open_files().filter(|limit| *limit < wanted) {
        return Some(format!(
            "RLIMIT_NOFILE is {limit}, but holdfast needs at least {wanted} descriptors (resources: {resources}); \
             raise it (`LimitNOFILE` of the unit, `ulimit -n`)"
        ));
    }
    if let Some(limit) = file_size_limit().filter(|limit| *limit < FILE_BYTES_MIN) {
        return Some(format!(
            "RLIMIT_FSIZE is {limit}, but the ledger needs files of at least {FILE_BYTES_MIN} bytes; \
             raise it (`LimitFSIZE` of the unit)"
        ));
    }
    if let Err(error) = check_task_limit(TASKS_MIN) {
        return Some(format!(
            "this process cannot create {TASKS_MIN} more threads, which holdfast needs: {error}; raise the limit of tasks \
             (`TasksMax` of the unit, the pod's limit of PIDs, `pids.max` of a cgroup above, RLIMIT_NPROC) or of memory (RLIMIT_AS)"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sufficient_limits_are_not_reported() {
        assert_eq!(insufficient_limit(1), None);
        let why = insufficient_limit(1_000_000_000).unwrap();
        assert!(why.contains("RLIMIT_NOFILE is ") && why.contains("LimitNOFILE"), "{why}");
    }
}
