//! What the tests with a real kubelet share: namespaces, processes, containerd, an image, and the
//! binary under test.

#![allow(dead_code, reason = "each test binary uses its part of this")]
#![allow(clippy::unwrap_used, reason = "a helper of a test fails the test")]

pub(crate) mod binary;
pub(crate) mod containerd;
pub(crate) mod gpus;
pub(crate) mod image;
pub(crate) mod network;
pub(crate) mod process;
pub(crate) mod sandbox;
pub(crate) mod shipped;
pub(crate) mod timeline;

use std::io::Write;
use std::time::{Duration, Instant};

/// Prints at once: the test harness would capture it.
pub(crate) fn say(text: impl std::fmt::Display) {
    // If standard error is closed, no reader is left.
    drop(writeln!(std::io::stderr(), "{text}"));
}

/// Repeats `read` until it returns a value.
pub(crate) fn wait_for<T>(what: &str, limit: Duration, mut read: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = read() {
            return answer;
        }
        assert!(began.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
