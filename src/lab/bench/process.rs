//! A private daemon as a process of its own, and its readings from `/proc`.

use crate::config::Roots;
use crate::console::exit::{FAILURE, Failed};
use crate::host;
use crate::lab::daemon;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The kernel's `USER_HZ`, the unit of times in `/proc`, on every architecture that has a release.
const TICKS_PER_SECOND: f64 = 100.0;
/// Maximum time of a clean shutdown; then the process is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_EVERY: Duration = Duration::from_millis(10);
/// The settings of glibc's allocator in the unit and in the image.
const ALLOCATOR: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "65536"),
    ("MALLOC_TRIM_THRESHOLD_", "65536"),
];

/// The daemon. Dropping it kills the process and reaps it.
#[derive(Debug)]
pub(super) struct Daemon {
    child: Child,
}

/// Readings of a process from `/proc` at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Readings {
    pub(super) rss_kib: f64,
    /// Memory that belongs to no file.
    pub(super) anon_kib: f64,
    /// Memory that is not shared.
    pub(super) private_kib: f64,
    pub(super) descriptors: f64,
    pub(super) threads: f64,
    /// Number of voluntary context switches of its threads.
    pub(super) switches: f64,
    pub(super) cpu_seconds: f64,
}

/// Command of a binary (by default that of [`daemon`]), with the directories of a private instance.
pub(super) fn command(
    binary: Option<&Path>,
    roots: &Roots,
    config: &Path,
) -> Result<Command, Failed> {
    let mut command = Command::new(binary.map_or_else(daemon, |binary| Ok(binary.to_path_buf()))?);
    let Roots { host, kubelet, state, run } = roots;
    for (option, path) in [
        ("--host-root", host.as_path()),
        ("--kubelet-dir", kubelet),
        ("--state-dir", state),
        ("--run-dir", run),
        ("--config", config),
    ] {
        command.arg(option).arg(path);
    }
    // A private instance must not notify systemd. Its log is read only after it has exited.
    command.env_remove("NOTIFY_SOCKET").env("HOLDFAST_LOG", "warn").stdin(Stdio::null());
    command.envs(ALLOCATOR);
    Ok(command)
}

impl Daemon {
    /// Starts it, with its log in `log`.
    pub(super) fn start(
        binary: Option<&Path>,
        roots: &Roots,
        config: &Path,
        log: &Path,
    ) -> Result<Daemon, Failed> {
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = command(binary, roots, config)?;
        let child = command.arg("run").stdout(Stdio::null()).stderr(log).spawn();
        let program = command.get_program().to_string_lossy();
        let child = child.map_err(|error| {
            Failed::new(FAILURE, format_args!("cannot run `{program}`: {error}"))
        })?;
        Ok(Daemon { child })
    }

    /// Checks that it is running.
    ///
    /// # Errors
    /// When it has exited: with its last log line.
    pub(super) fn check_running(&mut self, log: &Path) -> Result<(), Failed> {
        if let Some(status) = self.child.try_wait()? {
            let text = fs::read_to_string(log).unwrap_or_default();
            let last = text.lines().last().unwrap_or("its log is empty");
            return Err(Failed::new(
                FAILURE,
                format_args!("the private daemon exited ({status}): {last}"),
            ));
        }
        Ok(())
    }

    /// Its readings from `/proc`.
    ///
    /// # Errors
    /// When it has exited, as for [`Daemon::check_running`].
    pub(super) fn readings(&mut self, log: &Path) -> Result<Readings, Failed> {
        self.check_running(log)?;
        Ok(readings(&format!("/proc/{}", self.child.id()))?)
    }

    /// Makes it reload its configuration (SIGHUP).
    pub(super) fn reload(&self) -> io::Result<()> {
        host::hang_up(self.child.id())
    }

    /// Kills it (SIGKILL).
    pub(super) fn kill(&mut self) {
        // It may have exited already; the wait reaps it.
        drop(self.child.kill());
        drop(self.child.wait());
    }

    /// Stops it by SIGTERM; after the time limit it is killed.
    pub(super) async fn stop(mut self) -> Result<(), Failed> {
        host::terminate(self.child.id())?;
        let polls = EXIT_TIMEOUT.as_millis() / POLL_EVERY.as_millis();
        for _ in 0..polls {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        Err(Failed::new(
            FAILURE,
            format_args!(
                "the private daemon did not exit within {EXIT_TIMEOUT:?} of SIGTERM and was killed"
            ),
        ))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads the `/proc` directory of a process.
fn readings(dir: &str) -> io::Result<Readings> {
    let read = |file: &str| fs::read_to_string(format!("{dir}/{file}"));
    let (status, stat) = (read("status")?, read("stat")?);
    // The file exists only with CONFIG_PROC_PAGE_MONITOR.
    let shared = read("smaps_rollup").unwrap_or_default();
    let tasks: Vec<_> = fs::read_dir(format!("{dir}/task"))?.flatten().collect();
    let switches =
        tasks.iter().filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    // After the name, which may contain spaces: utime and stime are the 12th and 13th
    // (proc_pid_stat(5) counts them as 14 and 15).
    let times = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').skip(11).take(2);
    Ok(Readings {
        rss_kib: figure(&status, "VmRSS:"),
        anon_kib: figure(&status, "RssAnon:"),
        private_kib: figure(&shared, "Private_Clean:") + figure(&shared, "Private_Dirty:"),
        descriptors: super::measurements::number(fs::read_dir(format!("{dir}/fd"))?.count()),
        threads: super::measurements::number(tasks.len()),
        switches: switches.map(|status| figure(&status, "voluntary_ctxt_switches:")).sum(),
        cpu_seconds: times.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>()
            / TICKS_PER_SECOND,
    })
}

/// The number after a key of a file such as `status`; NaN if absent.
fn figure(text: &str, key: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    value.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allocators_settings_are_those_of_the_unit_and_the_image() {
        let read = |file: &str| {
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
        };
        let (unit, image) = (read("systemd/holdfast.service"), read("packaging/image/build"));
        for (name, value) in ALLOCATOR {
            let set = format!("{name}={value}");
            assert!(unit.contains(&set) && image.contains(&set), "{set}");
        }
    }

    #[test]
    fn this_process_has_memory_threads_and_descriptors() {
        let own = readings("/proc/self").unwrap();
        assert!(own.rss_kib > own.anon_kib && own.anon_kib > 100.0, "{own:?}");
        assert!(
            own.descriptors >= 3.0
                && own.threads >= 1.0
                && own.switches >= 1.0
                && own.cpu_seconds >= 0.0,
            "{own:?}"
        );
        assert!(readings("/proc/0").is_err());
    }

    #[test]
    fn times_follow_a_name_that_may_contain_spaces_and_parentheses() {
        let dir = tempfile::tempdir().unwrap();
        let stat = format!("7 (a) b (c) S {} 250 50 0 0 20", ["1"; 10].join(" "));
        let write = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        write("stat", &stat);
        write("status", "VmRSS:\t  2048 kB\nRssAnon:\t 1024 kB\n");
        fs::create_dir(dir.path().join("fd")).unwrap();
        fs::create_dir_all(dir.path().join("task/7")).unwrap();
        let read = readings(dir.path().to_str().unwrap()).unwrap();
        assert_eq!((read.cpu_seconds, read.rss_kib, read.threads), (3.0, 2048.0, 1.0));
        assert!(read.private_kib.is_nan());
    }
}
