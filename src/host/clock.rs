//! Clocks and the boot id.

use crate::domain::{Moment, Timestamp};
use nix::time::{ClockId, clock_gettime};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Reads both clocks.
#[must_use]
pub fn now() -> Moment {
    let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    Moment { boot, wall: Timestamp::from_system(SystemTime::now()) }
}

/// The processor time of this thread. It does not contain the time of waiting, neither for a driver
/// nor for a processor.
#[must_use]
pub fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_time_grows_and_the_boot_has_a_name() {
        let first = now();
        assert!(now().boot >= first.boot && first.boot > Duration::ZERO);
        assert!(boot_id(Path::new("/")).is_some_and(|text| text.len() == 36));
        assert_eq!(boot_id(Path::new("/nonexistent")), None);
    }
}
