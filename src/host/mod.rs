//! The host: the only module with system calls. sysfs below a root, inotify, uevents, locks,
//! clocks.

mod clock;
mod command;
pub mod descriptors;
mod dev;
mod failure;
mod filesystem;
mod folder;
mod glob;
mod inotify_room;
mod kmsg;
mod nodes;
mod nvml;
pub mod peer;
pub mod pods;
pub mod private;
mod process;
mod regular;
mod reset;
mod room;
mod root;
mod runtime;
mod signals;
mod spec_folder;
mod uevent;
mod watch;

pub use clock::{LateTimers, boot_id, lower_priority, now, step_back, until_tick};
pub use command::{CommandError, Ran, run as run_command};
pub use dev::DevEntry;
#[cfg(test)]
pub(crate) use failure::injected as faults;
pub use failure::{ReadFailure, is_absence};
pub use filesystem::{
    Medium, disk_error, exchange, files_left, is_read_only, is_tmpfs, lock_holder, medium, room, room_of_root, selinux_label, size_below,
};
pub use folder::Folder;
pub use inotify_room::{InotifyRoom, Refused, inotify_room};
pub use kmsg::{KernelLog, KernelRecord};
pub use nodes::{NodeFolder, TooMany};
pub use nvml::{NvmlAnswer, ask_nvml};
pub use process::{file_size_limit, hang_up, is_shortage, open_files, raise_open_files, room_for_tasks, terminate, waits_for_disk};
pub use regular::{NotRegular, open_regular, open_to_read, read_bounded, read_regular, read_whole};
pub use reset::{ResetError, reset_function};
pub use room::has_room;
pub use root::{HostNode, HostRoot, Listings};
pub use runtime::{limit_in_the_way, runtime, runtime_of};
pub use signals::{EndsAtOnce, outlive_too_large_files};
pub use spec_folder::SpecFolder;
pub use uevent::{PLAYED_EVENTS, Uevent, UeventSocket};
pub use watch::{Change, DirWatch};
