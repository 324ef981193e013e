//! The priority and the timer slack of threads.

use nix::sys::prctl::set_timerslack;
use std::time::Duration;

/// Lowers the priority of this thread, and of threads that it starts from now on: for background
/// work. Raising it again needs privileges.
pub fn lower_thread_priority() {
    lower_thread_priority_by(10);
}

/// Lowers the priority by `by` (nice(2)): for work with a waiting caller that is less important
/// than other work.
pub fn lower_thread_priority_by(by: i32) {
    // Linux counts niceness by thread. If the call is refused, the priority stays as it is.
    let _refused = rustix::process::nice(by);
}

/// While this value exists, the kernel may fire the timers of this thread late, so that the machine
/// need not wake up for them. Threads started meanwhile keep the slack for ever. This thread itself
/// should not sleep meanwhile.
#[derive(Debug)]
pub struct TimerSlack(());

impl TimerSlack {
    /// Allows a delay of up to `slack`. If the call is refused, nothing changes.
    #[must_use]
    pub fn set(slack: Duration) -> Self {
        let _refused = set_timerslack(u64::try_from(slack.as_nanos()).unwrap_or(u64::MAX));
        TimerSlack(())
    }
}

impl Drop for TimerSlack {
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
    fn threads_inherit_the_timer_slack_of_their_parent() {
        let usual = get_timerslack().unwrap();
        let slack = TimerSlack::set(Duration::from_secs(1));
        let inherited = std::thread::spawn(|| get_timerslack().unwrap()).join().unwrap();
        drop(slack);
        assert_eq!((inherited, get_timerslack().unwrap()), (1_000_000_000, usual));
    }

    #[test]
    fn only_the_calling_thread_gets_a_lower_priority() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let (after, inherited) = std::thread::spawn(move || {
            lower_thread_priority();
            (nice(), std::thread::spawn(nice).join().unwrap())
        })
        .join()
        .unwrap();
        assert_eq!(
            (after, inherited, nice()),
            ((before + 10).min(19), (before + 10).min(19), before)
        );
    }
}
