//! Processes: signals to other processes, and the limits of this one.

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::thread;

/// The limit of open files, which is enough: a kubelet's connection takes two. Without a limit a
/// hook that closes every possible descriptor would need minutes.
const OPEN_FILES: u64 = 16_384;

/// Raises the limit of open files. The default is 1,024, so that select(2) works (getrlimit(2)).
///
/// # Errors
/// If the kernel refuses, which is not expected.
pub fn raise_open_files() -> io::Result<()> {
    Ok(setrlimit(Resource::Nofile, raised(getrlimit(Resource::Nofile)))?)
}

/// The limit of open files of this process; `None` means unlimited.
#[must_use]
pub fn open_files() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// `None` means unlimited.
fn raised(limit: Rlimit) -> Rlimit {
    let enough = limit.maximum.map_or(OPEN_FILES, |maximum| maximum.min(OPEN_FILES));
    Rlimit { current: limit.current.map(|current| current.max(enough)), ..limit }
}

/// Whether a thread of this process is in an uninterruptible wait for a disk (state `D` in
/// `/proc/<pid>/task/<tid>/stat`, proc(5)). False if that cannot be read.
#[must_use]
pub fn waits_for_disk() -> bool {
    let is_waiting = |stat: &str| after_name(stat).is_some_and(|rest| rest.starts_with('D'));
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok())
        .any(|stat| is_waiting(&stat))
}

/// What follows the name in a line of proc_pid_stat(5), from the state on. The name is in brackets
/// and may contain any character.
pub(super) fn after_name(stat: &str) -> Option<&str> {
    Some(stat.rsplit_once(')')?.1.trim_start())
}

/// The maximum length of a file of this process (`RLIMIT_FSIZE`, getrlimit(2)); `None` means
/// unlimited.
#[must_use]
pub fn file_size_limit() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// Whether a call failed because the system lacks resources now: processes, threads, memory,
/// descriptors. The error is no evidence about the requested object, and the next call may succeed.
#[must_use]
pub fn is_shortage(error: &io::Error) -> bool {
    let short = [
        Errno::EAGAIN,
        Errno::ENOMEM,
        Errno::EMFILE,
        Errno::ENFILE,
        Errno::ENOBUFS,
        Errno::ETXTBSY,
        Errno::EINTR,
    ];
    error.raw_os_error().is_some_and(|code| short.contains(&Errno::from_raw(code)))
}

/// Whether this process could have `count` more threads or processes at the same time.
///
/// # Errors
/// The system's error at the first thread that could not be started.
pub fn check_task_limit(count: usize) -> io::Result<()> {
    let gate = Arc::new(RwLock::new(()));
    let closed = gate.write();
    let wait = || {
        let gate = Arc::clone(&gate);
        move || drop(gate.read())
    };
    let (mut tasks, mut result) = (Vec::with_capacity(count), Ok(()));
    for _ in 0..count {
        match thread::Builder::new().name("limit-check".into()).spawn(wait()) {
            Ok(task) => tasks.push(task),
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    drop(closed);
    tasks.into_iter().for_each(|task| drop(task.join()));
    result
}

/// A file below `folder` that a thread of this process waits for in a read
/// (`/proc/self/task/*/syscall`, proc(5)). `None` if there is none, or if the kernel does not
/// report it.
#[must_use]
pub fn awaited_file(folder: &Path) -> Option<PathBuf> {
    let reads = [nix::libc::SYS_read, nix::libc::SYS_pread64].map(|number| number.to_string());
    let of_thread = |thread: std::fs::DirEntry| {
        let call = std::fs::read_to_string(thread.path().join("syscall")).ok()?;
        let (number, rest) = call.split_once(' ')?;
        reads.iter().any(|read| read == number).then_some(())?;
        let file = rest.split(' ').next()?.strip_prefix("0x")?;
        let file = u32::from_str_radix(file, 16).ok()?;
        std::fs::read_link(format!("/proc/self/fd/{file}")).ok()
    };
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    threads.filter_map(|thread| of_thread(thread.ok()?)).find(|file| file.starts_with(folder))
}

/// Makes a process reload its configuration (SIGHUP).
///
/// # Errors
/// If there is no such process, or if it belongs to another user.
pub fn hang_up(pid: u32) -> io::Result<()> {
    send(pid, Signal::SIGHUP)
}

/// Makes a process shut down cleanly (SIGTERM).
///
/// # Errors
/// As [`hang_up`].
pub fn terminate(pid: u32) -> io::Result<()> {
    send(pid, Signal::SIGTERM)
}

fn send(pid: u32, signal: Signal) -> io::Result<()> {
    // 0 and less would be process groups.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill(Pid::from_raw(pid), signal)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn the_file_that_a_thread_waits_for_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let pipe = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(awaited_file(dir.path()), None);
        thread::scope(|scope| {
            scope.spawn(|| (&pipe).read_exact(&mut [0]).unwrap());
            // A kernel without this file of proc(5) reports nothing.
            while std::fs::exists("/proc/self/syscall").unwrap()
                && awaited_file(dir.path()).as_deref() != Some(&path)
            {
                thread::yield_now();
            }
            (&pipe).write_all(&[1]).unwrap();
        });
    }

    #[test]
    fn the_limit_of_open_files_is_raised_and_never_lowered() {
        let raised = |current, maximum| raised(Rlimit { current, maximum }).current;
        assert_eq!(raised(Some(1024), Some(524_288)), Some(OPEN_FILES));
        assert_eq!(raised(Some(1024), Some(4096)), Some(4096));
        assert_eq!(raised(Some(1024), None), Some(OPEN_FILES));
        assert_eq!(raised(Some(100_000), None), Some(100_000));
        assert_eq!(raised(None, None), None);
        raise_open_files().unwrap();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(super::raised(limit), limit);
    }

    #[test]
    fn a_signal_reaches_its_process_and_no_group() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        terminate(child.id()).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
        assert_eq!(terminate(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(hang_up(u32::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
