//! Runs a program with a time limit, without a shell, in a process group of its own that is killed
//! as a whole.
//!
//! The group is killed in every case, even if the program has exited: its remaining processes would
//! still use a device that may already belong to another container. This is safe because the
//! program is reaped after the kill: until then no other process can have its process number. A
//! process that moves to another session (`setsid`) escapes, as it would from a terminal.

use super::process::is_shortage;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The bytes of output that are kept, from the end. The rest is read and dropped.
const OUTPUT_BYTES_MAX: usize = 4096;
/// The characters of the last line that are kept.
const LINE_CHARS_MAX: usize = 300;
/// The number of reads after the program's end: a pipe holds 64 KiB.
const LAST_READS_MAX: usize = 16;

/// Why a program failed. It contains no argument and no output: both may hold secrets, and this
/// text is shown in logs, pod events and pages.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It could not be started.
    #[error("it cannot be run: {0}")]
    NotStarted(io::Error),
    /// It exited with an error.
    #[error("{0}")]
    Failed(ExitStatus),
    /// It exceeded its time limit.
    #[error("it was killed: it did not end within {}", humantime::format_duration(*.0))]
    TooLong(Duration),
    /// The same, and its process waits in the kernel, where no signal ends it.
    #[error(
        "it did not end within {}, and it cannot be killed: the kernel waits, as for a device that \
         does not answer",
        humantime::format_duration(*.0)
    )]
    Unkillable(Duration),
    /// Its result is no longer needed.
    #[error("it was killed: its result is no longer needed")]
    Cancelled,
}

impl CommandError {
    /// Whether the error is no evidence about the program's task: the program did not run, or
    /// another process or the kernel (out of memory) killed it.
    #[must_use]
    pub fn is_no_result(&self) -> bool {
        match self {
            CommandError::NotStarted(_) | CommandError::Cancelled => true,
            CommandError::Failed(status) => status.signal() == Some(Signal::SIGKILL as i32),
            CommandError::TooLong(_) | CommandError::Unkillable(_) => false,
        }
    }

    /// Whether it could not be started because the system lacks resources now.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        matches!(self, CommandError::NotStarted(error) if is_shortage(error))
    }
}

/// The result of a program.
#[derive(Debug)]
pub struct Ran {
    /// How it ended.
    pub ended: Result<(), CommandError>,
    /// The last line of its output, for its operator alone.
    pub output: String,
}

/// Runs `argv` with this environment and no other, in `/`, and waits for its end. It is killed when
/// the other end of `cancelled` is closed, or after `limit`.
#[must_use]
pub fn run(
    argv: &[String],
    env: &BTreeMap<String, String>,
    limit: Duration,
    cancelled: &PipeReader,
) -> Ran {
    run_as(argv, env, Conduct::default(), limit, cancelled)
}

/// How a program runs that is not a hook.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conduct<'a> {
    /// What it reads from its standard input, which then ends. A pipe holds 64 KiB.
    pub input: &'a str,
    /// Whether it leaves a process that keeps running after its own successful end. That process
    /// has no output here, and the group is killed only if the program does not succeed.
    pub leaves_daemon: bool,
}

/// Runs a program as [`run`] does, with this conduct.
#[must_use]
pub fn run_as(
    argv: &[String],
    env: &BTreeMap<String, String>,
    conduct: Conduct<'_>,
    limit: Duration,
    cancelled: &PipeReader,
) -> Ran {
    let not_started =
        |error| Ran { ended: Err(CommandError::NotStarted(error)), output: String::new() };
    let mut running = match Running::start(argv, env, conduct) {
        Ok(running) => running,
        Err(error) => return not_started(error),
    };
    let (end, mut output) = running.watch(limit, cancelled);
    let status = running.end(&mut output, conduct.leaves_daemon && matches!(end, End::Exited));
    let ended = match (end, status) {
        (End::TooLong, _) => Err(CommandError::TooLong(limit)),
        (End::Cancelled, _) => Err(CommandError::Cancelled),
        (End::Exited, Ok(status)) if status.success() => Ok(()),
        (End::Exited, Ok(status)) => Err(CommandError::Failed(status)),
        (End::Exited, Err(error)) => return not_started(error),
    };
    Ran { ended, output: output.last_line() }
}

/// Why watching it ended.
enum End {
    Exited,
    TooLong,
    Cancelled,
}

struct Running {
    child: Child,
    group: Pid,
    output: PipeReader,
    /// Closed at the other end when the program has exited.
    ended: PipeReader,
    waiter: Option<thread::JoinHandle<()>>,
}

impl Running {
    fn start(
        argv: &[String],
        env: &BTreeMap<String, String>,
        conduct: Conduct<'_>,
    ) -> io::Result<Self> {
        let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let (output, writer) = io::pipe()?;
        let (ended, ending) = io::pipe()?;
        let input = if conduct.input.is_empty() {
            Stdio::null()
        } else {
            let (reader, mut writer) = io::pipe()?;
            writer.write_all(conduct.input.as_bytes())?;
            reader.into()
        };
        // A daemon that wrote into the pipe after its reader has ended would be killed.
        let (stdout, stderr) = if conduct.leaves_daemon {
            (Stdio::null(), Stdio::null())
        } else {
            (writer.try_clone()?.into(), writer.into())
        };
        let child = Command::new(program)
            .args(arguments)
            .env_clear()
            .envs(env)
            .current_dir("/")
            .stdin(input)
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .spawn()?;
        let group = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
        let mut running = Running { child, group, output, ended, waiter: None };
        // This thread only waits; the program is reaped after its group was killed.
        let wait = move || {
            while waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
                == Err(Errno::EINTR)
            {}
            drop(ending);
        };
        match thread::Builder::new().name("hook".into()).spawn(wait) {
            Ok(waiter) => running.waiter = Some(waiter),
            Err(error) => {
                drop(running.end(&mut Tail::default(), false));
                return Err(error);
            }
        }
        Ok(running)
    }

    /// Reads its output until it exits, times out or is cancelled.
    fn watch(&mut self, limit: Duration, cancelled: &PipeReader) -> (End, Tail) {
        let deadline = Instant::now() + limit;
        let (mut tail, mut is_open) = (Tail::default(), true);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (End::TooLong, tail);
            }
            // Rounded up, so that the last wait is not a busy loop of zero timeouts.
            let wait =
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let readable = |pipe| PollFd::new(pipe, PollFlags::POLLIN);
            let mut pipes = vec![readable(self.ended.as_fd()), readable(cancelled.as_fd())];
            pipes.extend(is_open.then(|| readable(self.output.as_fd())));
            // An interrupted wait has no result.
            if poll(&mut pipes, wait).unwrap_or(0) <= 0 {
                continue;
            }
            let seen: Vec<bool> = pipes.iter().map(|pipe| pipe.any().unwrap_or(false)).collect();
            drop(pipes);
            if seen.get(2) == Some(&true) {
                is_open = tail.read(&mut self.output);
            }
            match seen[..] {
                [true, ..] => return (End::Exited, tail),
                [_, true, ..] => return (End::Cancelled, tail),
                _ => {}
            }
        }
    }

    /// Kills the rest of the group, reads the rest of the output, and reaps the program. What a
    /// program left that succeeded is not killed with `keeps_group`.
    fn end(&mut self, tail: &mut Tail, keeps_group: bool) -> io::Result<ExitStatus> {
        if !keeps_group || !self.has_succeeded() {
            // The group may already be empty.
            let _ = killpg(self.group, Signal::SIGKILL);
        }
        if let Some(waiter) = self.waiter.take() {
            drop(waiter.join());
        }
        for _ in 0..LAST_READS_MAX {
            let mut pipe = [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)];
            let is_there = poll(&mut pipe, PollTimeout::ZERO).unwrap_or(0) > 0;
            if !is_there || !tail.read(&mut self.output) {
                break;
            }
        }
        self.child.wait()
    }

    /// Whether the program has ended with status 0. It is not reaped.
    fn has_succeeded(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        matches!(waitid(Id::Pid(self.group), flags), Ok(WaitStatus::Exited(_, 0)))
    }
}

/// The end of the output.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    /// Returns whether there may be more output.
    fn read(&mut self, pipe: &mut PipeReader) -> bool {
        let mut page = [0; OUTPUT_BYTES_MAX];
        let Ok(count @ 1..) = pipe.read(&mut page) else { return false };
        self.0.extend_from_slice(&page[..count]);
        let excess = self.0.len().saturating_sub(OUTPUT_BYTES_MAX);
        self.0.drain(..excess);
        true
    }

    /// The last line that is not blank.
    fn last_line(&self) -> String {
        let text = String::from_utf8_lossy(&self.0);
        let line =
            text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        line.chars().take(LINE_CHARS_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::PipeWriter;
    use std::path::Path;

    const LONG: Duration = Duration::from_secs(60);

    fn sh(script: &str) -> Vec<String> {
        ["/bin/sh", "-c", script].map(str::to_owned).into()
    }

    fn never() -> (PipeReader, PipeWriter) {
        io::pipe().unwrap()
    }

    fn run_for(script: &str, limit: Duration) -> Result<String, String> {
        let env = BTreeMap::from([
            ("PATH".to_owned(), "/usr/bin:/bin".to_owned()),
            ("WHAT".to_owned(), "gpu".to_owned()),
        ]);
        let (cancelled, _keep) = never();
        let Ran { ended, output } = run(&sh(script), &env, limit, &cancelled);
        match ended {
            Ok(()) => Ok(output),
            Err(error) => Err(format!("{error}; it wrote: {output}")),
        }
    }

    /// Waits until no process has this number, or its process is a zombie.
    fn is_gone(pid: &str) {
        let began = Instant::now();
        let state = || {
            std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .ok()
                .and_then(|stat| stat.rsplit_once(") ").map(|(_, rest)| rest.to_owned()))
        };
        while state().is_some_and(|state| !state.starts_with('Z')) {
            assert!(began.elapsed() < LONG, "process {pid} still runs");
            thread::yield_now();
        }
    }

    #[test]
    fn a_program_gets_only_its_environment_and_its_last_line_is_returned() {
        assert_eq!(
            run_for("echo first; echo \"$WHAT in $PWD with ${HOME:-nothing}\"; echo", LONG)
                .unwrap(),
            "gpu in / with nothing"
        );
        let many =
            run_for("i=0; while [ $i -lt 20000 ]; do echo line $i >&2; i=$((i+1)); done", LONG);
        assert_eq!(many.unwrap(), "line 19999");
    }

    #[test]
    fn an_error_has_the_status_and_the_last_line() {
        assert_eq!(
            run_for("echo no key >&2; exit 3", LONG).unwrap_err(),
            "exit status: 3; it wrote: no key"
        );
        let (cancelled, _keep) = never();
        let error = run(&["/nonexistent/wipe".into()], &BTreeMap::new(), LONG, &cancelled)
            .ended
            .unwrap_err();
        assert_eq!(error.to_string(), "it cannot be run: No such file or directory (os error 2)");
        assert!(error.is_no_result() && !error.is_shortage());
    }

    #[test]
    fn an_end_without_a_result_differs_from_a_failure() {
        let ended = |script: &str| {
            let (cancelled, _keep) = never();
            run(&sh(script), &BTreeMap::new(), LONG, &cancelled).ended.unwrap_err()
        };
        assert!(ended("kill -KILL $$").is_no_result(), "the kernel kills so when memory is short");
        assert!(!ended("kill -SEGV $$").is_no_result() && !ended("exit 1").is_no_result());
        let short = |errno: Errno| CommandError::NotStarted(errno.into()).is_shortage();
        assert_eq!(
            [Errno::EAGAIN, Errno::ENOMEM, Errno::EMFILE, Errno::ENOENT, Errno::EACCES].map(short),
            [true, true, true, false, false]
        );
    }

    #[test]
    fn at_its_limit_it_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!(
            "trap '' TERM; sleep 1000 & echo $! >{0}.new; mv {0}.new {0}; echo waiting; wait",
            pid.display()
        );
        let error = run_for(&script, Duration::from_secs(1)).unwrap_err();
        assert_eq!(error, "it was killed: it did not end within 1s; it wrote: waiting");
        is_gone(std::fs::read_to_string(pid).unwrap().trim());
    }

    #[test]
    fn remaining_child_processes_are_killed() {
        // The child keeps the pipe of the output open; the run must not wait for that.
        let child = run_for("sleep 1000 & echo $!", LONG).unwrap();
        is_gone(&child);
    }

    #[test]
    fn a_daemon_that_a_program_leaves_keeps_running_only_if_the_program_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let leave = |status: i32| {
            let (cancelled, _keep) = never();
            let conduct = Conduct { input: "a line\n", leaves_daemon: true };
            let script = format!(
                "read line; [ \"$line\" = 'a line' ] || exit 9; sleep 1000 & echo $! >{}; exit {status}",
                file.display()
            );
            let env = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
            let ended = run_as(&sh(&script), &env, conduct, LONG, &cancelled).ended;
            (ended.is_ok(), std::fs::read_to_string(&file).unwrap().trim().to_owned())
        };
        let (is_ok, failed) = leave(3);
        assert!(!is_ok);
        is_gone(&failed);

        let (is_ok, left) = leave(0);
        assert!(is_ok);
        let stat = std::fs::read_to_string(format!("/proc/{left}/stat")).unwrap();
        assert!(!stat.contains(") Z"), "{stat}");
        nix::sys::signal::kill(Pid::from_raw(left.parse().unwrap()), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn it_is_killed_when_it_is_cancelled() {
        let dir = tempfile::tempdir().unwrap();
        let started = dir.path().join("started");
        let (cancelled, cancel) = never();
        let script =
            sh(&format!("echo $$ >{0}.new; mv {0}.new {0}; sleep 1000", started.display()));
        let env = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
        let running = thread::spawn(move || run(&script, &env, LONG, &cancelled));
        let wait_for = |path: &Path| {
            while !path.exists() {
                thread::yield_now();
            }
        };
        wait_for(&started);
        drop(cancel);
        assert!(matches!(running.join().unwrap().ended, Err(CommandError::Cancelled)));
        is_gone(std::fs::read_to_string(started).unwrap().trim());
    }
}
