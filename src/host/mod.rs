//! The host: the only place that speaks to the kernel — sysfs under a root, inotify, uevents, locks, clocks.

pub mod pods;
