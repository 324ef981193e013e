//! Clocks, thread priorities and the boot id.

use crate::domain::{Moment, Timestamp};
use nix::sys::prctl::set_timerslack;
use nix::time::{ClockId, clock_gettime};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Reads both clocks.
#[must_use]
pub fn now() -> Moment {
    let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    Moment { boot, wall: Timestamp::from_system(SystemTime::now()) }
}

/// The time until the next multiple of `period` on the boot clock. All pollers run at these times,
/// so that the machine wakes up only once for all.
#[must_use]
pub fn until_tick(period: Duration) -> Duration {
    let period = period.as_nanos().max(1);
    let since = now().boot.as_nanos() % period;
    Duration::from_nanos(u64::try_from(period - since).unwrap_or(u64::MAX))
}

/// The id of this boot, `/proc/sys/kernel/random/boot_id` below `host_root`. A grant of another
/// boot has no running container. `None` for a tree without that file (a captured one).
#[must_use]
pub fn boot_id(host_root: &Path) -> Option<String> {
    let text = std::fs::read_to_string(host_root.join("proc/sys/kernel/random/boot_id")).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Lowers the priority of this thread, and of threads that it starts from now on: for background
/// work. Raising it again needs privileges.
pub fn step_back() {
    lower_priority(10);
}

/// Lowers the priority by `by` (nice(2)): for work with a waiting caller that is less important
/// than other work.
pub fn lower_priority(by: i32) {
    // Linux counts niceness by thread. If the call is refused, the priority stays as it is.
    let _refused = rustix::process::nice(by);
}

/// While this value exists, the kernel may fire the timers of this thread late, so that the machine
/// need not wake up for them. Threads started meanwhile keep the slack for ever. This thread itself
/// should not sleep meanwhile.
#[derive(Debug)]
pub struct LateTimers(());

impl LateTimers {
    /// Allows a delay of up to `slack`. If the call is refused, nothing changes.
    #[must_use]
    pub fn allow(slack: Duration) -> Self {
        let _refused = set_timerslack(u64::try_from(slack.as_nanos()).unwrap_or(u64::MAX));
        LateTimers(())
    }
}

impl Drop for LateTimers {
    fn drop(&mut self) {
        // 0 means the thread's default slack.
        let _refused = set_timerslack(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::prctl::get_timerslack;

    #[test]
    fn the_threads_of_a_thread_inherit_its_late_timers() {
        let usual = get_timerslack().unwrap();
        let late = LateTimers::allow(Duration::from_secs(1));
        let inherited = std::thread::spawn(|| get_timerslack().unwrap()).join().unwrap();
        drop(late);
        assert_eq!((inherited, get_timerslack().unwrap()), (1_000_000_000, usual));
    }

    #[test]
    fn only_the_thread_that_steps_back_does_so() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let (after, inherited) = std::thread::spawn(move || {
            step_back();
            (nice(), std::thread::spawn(nice).join().unwrap())
        })
        .join()
        .unwrap();
        assert_eq!((after, inherited, nice()), ((before + 10).min(19), (before + 10).min(19), before));
    }

    #[test]
    fn boot_time_grows_and_the_boot_has_a_name() {
        let first = now();
        assert!(now().boot >= first.boot && first.boot > Duration::ZERO);
        assert!(boot_id(Path::new("/")).is_some_and(|text| text.len() == 36));
        assert_eq!(boot_id(Path::new("/nonexistent")), None);
    }
}
