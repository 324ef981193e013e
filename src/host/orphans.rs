//! Ended children that no part of this process waits for. The first process of a process namespace,
//! such as that of a container, becomes the parent of orphans (pid_namespaces(7)). Each of them
//! counts against the limit of processes until it is waited for.

use super::process::after_name;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A process: its id and its start, in clock ticks since the boot.
type Process = (i32, u64);

/// Ends the entries of orphans in the table of processes.
#[derive(Debug, Default)]
pub struct Orphans {
    /// The children that had ended at the last call.
    ended: BTreeSet<Process>,
}

impl Orphans {
    /// Waits for each child that had ended at the last call too. The parts of this process that
    /// start a child wait for it at once, so such a child is an orphan.
    pub fn reap(&mut self) {
        let now = ended_children(Path::new("/proc"), std::process::id());
        for (pid, _) in now.intersection(&self.ended) {
            // Another part may have waited for it after all.
            let _status = waitpid(Pid::from_raw(*pid), Some(WaitPidFlag::WNOHANG));
        }
        self.ended = now;
    }
}

/// The children of a process that have ended and were not waited for: state `Z` in
/// proc_pid_stat(5).
fn ended_children(proc: &Path, parent: u32) -> BTreeSet<Process> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let ended = entries.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let fields: Vec<&str> = after_name(&stat)?.split_whitespace().collect();
        let (state, of, start) = (fields.first()?, fields.get(1)?, fields.get(19)?);
        (*state == "Z" && of.parse() == Ok(parent)).then_some((pid, start.parse().ok()?))
    });
    ended.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_children_that_have_ended_are_orphans() {
        let proc = tempfile::tempdir().unwrap();
        let add = |pid: &str, stat: &str| {
            fs::create_dir(proc.path().join(pid)).unwrap();
            fs::write(proc.path().join(pid).join("stat"), stat).unwrap();
        };
        let rest = "7 7 0 -1 4228108 0 0 0 0 0 0 0 0 20 0 1 0";
        add("7", &format!("7 (sh) Z 1 {rest} 4711 0 0"));
        add("8", &format!("8 (a) b) Z 1 {rest} 4712 0 0"));
        add("9", &format!("9 (sh) S 1 {rest} 4713 0 0"));
        add("10", &format!("10 (sh) Z 2 {rest} 4714 0 0"));
        add("self", &format!("11 (sh) Z 1 {rest} 4715 0 0"));
        add("12", "");
        assert_eq!(ended_children(proc.path(), 1), BTreeSet::from([(7, 4711), (8, 4712)]));
    }
}
