//! The host: the only place that speaks to the kernel — sysfs under a root, inotify, uevents, locks, clocks.

mod awake;
mod clock;
mod command;
pub mod descriptors;
mod direct;
mod filesystem;
mod folder;
mod inotify_room;
mod kmsg;
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

pub use awake::Awake;
pub use clock::{LateTimers, boot_id, now, step_back, until_tick};
pub use command::{CommandError, Ran, run as run_command};
pub use direct::open_direct;
pub use filesystem::{
    Medium, disk_error, files_left, is_read_only, is_tmpfs, lock_holder, medium, room, room_of_root, selinux_label, size_below,
};
pub use folder::Folder;
pub use inotify_room::{InotifyRoom, Refused, inotify_room};
pub use kmsg::{KernelLog, KernelRecord};
pub use nvml::{NvmlAnswer, ask_nvml};
pub use process::{hang_up, is_shortage, raise_open_files, room_for_tasks, terminate};
pub use regular::{open_regular, read_regular, read_whole};
pub use reset::{ResetError, reset_function};
pub use room::has_room;
pub use root::{HostNode, HostRoot, Listings};
pub use runtime::{limit_in_the_way, runtime};
pub use signals::{EndsAtOnce, outlive_too_large_files};
pub use spec_folder::SpecFolder;
pub use uevent::{PLAYED_EVENTS, Uevent, UeventSocket};
pub use watch::{Change, DirWatch};
