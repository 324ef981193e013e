//! The host: the only place that speaks to the kernel — sysfs under a root, inotify, uevents, locks, clocks.

mod clock;
mod filesystem;
mod kmsg;
pub mod pods;
mod root;
mod spec_folder;
mod uevent;
mod watch;

pub use clock::{LateTimers, boot_id, now, step_back, until_tick};
pub use filesystem::{is_tmpfs, room};
pub use kmsg::{KernelLog, KernelRecord};
pub use root::HostRoot;
pub use spec_folder::SpecFolder;
pub use uevent::{Uevent, UeventSocket};
pub use watch::{Change, DirWatch};
