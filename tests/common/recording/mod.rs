//! Recordings of a kubelet as timelines, for the tests that compare the real kubelet with the
//! simulated one.

#![allow(dead_code, reason = "each test binary uses its part of this")]
#![allow(clippy::unwrap_used, reason = "a helper of a test fails the test")]

pub(crate) mod directory;
pub(crate) mod steps;
pub(crate) mod tasks;
pub(crate) mod timeline;
