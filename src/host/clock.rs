//! Clocks and the boot's identity.

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

/// The identity of this boot, `/proc/sys/kernel/random/boot_id` below `host_root`; a grant of another boot has no
/// living container. A tree without that file (a captured one) has the boot id `unknown`.
#[must_use]
pub fn boot_id(host_root: &Path) -> String {
    let path = host_root.join("proc/sys/kernel/random/boot_id");
    std::fs::read_to_string(path).map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
}

/// Lets the kernel fire the timers of this thread, and of those that it starts from now on, up to `slack` late, so that
/// it need not wake up the machine for them; zero is what the thread began with. Without the permission nothing changes.
pub fn allow_late_timers(slack: Duration) {
    let _refused = nix::sys::prctl::set_timerslack(u64::try_from(slack.as_nanos()).unwrap_or(u64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_time_grows_and_the_boot_has_a_name() {
        let first = now();
        assert!(now().boot >= first.boot && first.boot > Duration::ZERO);
        assert_eq!(boot_id(Path::new("/")), boot_id(Path::new("/")));
        assert_eq!(boot_id(Path::new("/nonexistent")), "unknown");
    }
}
