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
mod inotify_limits;
mod installed;
mod kmsg;
mod mps;
mod nodes;
mod nvml;
mod orphans;
pub mod peer;
pub mod pods;
pub mod private;
mod process;
mod regular;
mod reset;
mod root;
mod runtime;
mod scheduling;
mod signals;
mod spec_folder;
mod text;
mod uevent;
mod watch;
mod writable;

pub use clock::{boot_id, now, thread_time, until_tick};
pub use command::{CommandError, Conduct, Ran, run as run_command, run_as};
pub use dev::DevEntry;
#[cfg(test)]
pub(crate) use failure::injected as faults;
pub use failure::{ReadFailure, is_absence};
pub use filesystem::{
    Medium, disk_error, exchange, files_left, free_bytes, free_bytes_of_root, is_read_only,
    is_tmpfs, lock_holder, medium, selinux_label, size_below,
};
pub use folder::Folder;
pub use inotify_limits::{InotifyLimits, InotifyRefusal, inotify_limits};
pub use installed::Installed;
pub use kmsg::{KernelLog, KernelRecord};
pub use mps::{MpsPlace, enter_mps_place, make_mps_folders};
pub use nodes::{NodeFolder, TooMany};
pub use nvml::{
    EVENT_WAIT_MAX, NVML_PROCESS, NvmlAnswer, NvmlReport, query_nvml, query_nvml_here, serve_nvml,
    watch_nvml_events,
};
pub use orphans::Orphans;
pub use process::{
    awaited_file, check_task_limit, file_size_limit, hang_up, is_shortage, open_files,
    raise_open_files, terminate, waits_for_disk,
};
pub use regular::{
    NotRegular, is_missing, may_pass, open_regular, open_to_read, read_bounded, read_regular,
    read_whole,
};
pub use reset::{ResetError, reset_function};
pub use root::{HostNode, HostRoot, Listings};
pub use runtime::{insufficient_limit, runtime, runtime_of};
pub use scheduling::{TimerSlack, lower_thread_priority, lower_thread_priority_by};
pub use signals::{ExitOnSignal, ignore_sigxfsz};
pub use spec_folder::{OtherSpec, SpecFolder, Stamp};
pub use uevent::{SIMULATED_EVENTS, Uevent, UeventSocket};
pub use watch::{Change, DirWatch};
pub use writable::is_writable_within;
