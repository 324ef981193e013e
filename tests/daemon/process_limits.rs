//! Small limits, and pipes in place of files: the daemon works, or prints one sentence about the
//! missing resource and exits with a specific code. A shortage at run time is no evidence about any
//! device or pod.

use crate::common::inside::{inside, say};
use crate::common::{
    Daemon, Node, allocate, dial, http_get, is_root, name, offered, pause, resource, run, soon,
    telemetry, until, until_blocking,
};
use holdfast::console::exit;
use holdfast::kubelet::proto::v1beta1 as api;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A verb after a shell command.
fn behind(words: &str, command: &Command) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &format!("{words} && exec \"$@\""), "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    shell
}

/// The single sentence of a start that fails with this code.
fn refused(command: &mut Command, code: u8) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code.into()), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "not one line:\n{said}");
    assert!(said.starts_with("holdfast: ") && !said.contains("panic"), "{said}");
    said
}

fn fifo(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mkfifo(path, Mode::from_bits_truncate(0o600)).unwrap();
}

#[test]
fn a_limit_that_is_too_low_is_named_with_what_raises_it() {
    let node = Node::with(&[("sensor", 1)]);
    for files in [8, 20, 32, 47] {
        let said = refused(
            &mut behind(&format!("ulimit -n {files}"), &node.command(&["run"])),
            exit::LIMITS,
        );
        assert!(
            said.contains(&format!("RLIMIT_NOFILE is {files}")) && said.contains("LimitNOFILE"),
            "{said}"
        );
    }
    let said = refused(&mut behind("ulimit -f 100", &node.command(&["run"])), exit::LIMITS);
    assert!(said.contains("RLIMIT_FSIZE is ") && said.contains("LimitFSIZE"), "{said}");
    assert!(!node.state().exists(), "nothing is begun");
    let help = String::from_utf8(node.output(&["--help"]).stdout).unwrap();
    assert!(
        help.split_whitespace().collect::<Vec<_>>().join(" ").contains("11 limits of the process"),
        "{help}"
    );
}

#[test]
fn with_slightly_more_descriptors_it_works() {
    run(async {
        let node = Node::with(&[("sensor", 1)]);
        let kubelet = node.start_kubelet().await;
        let daemon = Daemon::spawn(&mut behind("ulimit -n 48", &node.command(&["run"])));
        daemon.logged("ready").await;
        offered(&kubelet, &name("example.com/sensor"), 1).await;
        let mut api = dial(&kubelet, &node, &name("example.com/sensor")).await;
        allocate(&mut api, &["dev:sensor0"]).await.unwrap();
    });
}

#[test]
fn a_pipe_in_place_of_a_file_blocks_no_reader() {
    let node = Node::with(&[("sensor", 1)]);
    let config = node.config_file();
    let text = fs::read_to_string(&config).unwrap();
    let drop_in = node.path("etc/config.d/a.toml");
    fifo(&drop_in);
    assert!(
        refused(&mut node.command(&["run"]), exit::CONFIG)
            .contains("it is a FIFO, not a regular file")
    );
    fs::remove_file(&drop_in).unwrap();
    fs::create_dir(&drop_in).unwrap();
    assert!(refused(&mut node.command(&["run"]), exit::CONFIG).contains("irectory"));
    fs::remove_dir(&drop_in).unwrap();
    fs::remove_file(&config).unwrap();
    fifo(&config);
    assert!(
        refused(&mut node.command(&["run"]), exit::CONFIG)
            .contains("it is a FIFO, not a regular file")
    );
    fs::remove_file(&config).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &config).unwrap();
    assert!(
        refused(&mut node.command(&["run"]), exit::CONFIG)
            .contains("it is a device, not a regular file")
    );
    fs::remove_file(&config).unwrap();

    // Files of others: the kubelet's checkpoint, files for the container runtime, descriptors kept
    // for the next process.
    let cdi = node.path("cdi");
    node.write_config(&format!("[cdi]\ndirectory = {cdi:?}\n{text}cdi = [\"cri\"]\n"));
    fifo(&node.path("run/kept"));
    fifo(&node.path("run/control.sock"));
    run(async {
        let kubelet = node.start_kubelet().await;
        fifo(&node.path("kubelet/device-plugins/kubelet_internal_checkpoint"));
        let mut daemon = node.start_daemon();
        daemon.logged("ready").await;
        offered(&kubelet, &name("example.com/sensor"), 1).await;
        let mut api = dial(&kubelet, &node, &name("example.com/sensor")).await;
        let files: Vec<PathBuf> =
            fs::read_dir(&cdi).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!files.is_empty());
        for file in files {
            fs::remove_file(&file).unwrap();
            fifo(&file);
        }
        soon("an Allocate", allocate(&mut api, &["dev:sensor0"])).await.unwrap();
        daemon.signal(Signal::SIGTERM);
        assert!(daemon.ended().await.success());
    });
}

/// The path of a pipe without a writer. A child of the test below blocks on it, as a start may
/// block on a disk.
const HANGS_AT: &str = "HOLDFAST_TEST_HANGS_AT";

/// SIGTERM also ends a start when the thread that would handle the signal hangs.
#[test]
fn a_start_that_hangs_is_ended_by_sigterm() {
    if let Some(pipe) = std::env::var_os(HANGS_AT) {
        let _ends_at_once = holdfast::host::ExitOnSignal::install().unwrap();
        fs::read(pipe).unwrap();
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    fifo(&pipe);
    let this = std::env::current_exe().unwrap();
    let mut child = Command::new(this)
        .args(["--exact", "process_limits::a_start_that_hangs_is_ended_by_sigterm"])
        .env(HANGS_AT, &pipe)
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    let catches = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() & (1 << (Signal::SIGTERM as u64 - 1)) != 0
    };
    until_blocking("a child that catches SIGTERM", catches, |catches| *catches);
    nix::sys::signal::kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A private cgroup with a limit of tasks, if this process may create one.
struct Tasks(PathBuf);

impl Tasks {
    fn new() -> Option<Tasks> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("holdfast-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let of = |controller: &str| {
            let own = fs::read_to_string("/proc/self/cgroup").ok()?;
            let line = own.lines().find(|line| line.split(':').nth(1) == Some(controller))?;
            Some(line.rsplit(':').next()?.trim_start_matches('/').to_owned())
        };
        let places = [
            of("pids").map(|own| Path::new("/sys/fs/cgroup/pids").join(own)),
            of("").map(|own| Path::new("/sys/fs/cgroup").join(own)),
        ];
        places.into_iter().flatten().find_map(|place| {
            place.join("cgroup.procs").exists().then_some(())?;
            let tasks = Tasks(place.join(&name));
            fs::create_dir(&tasks.0).ok()?;
            tasks.0.join("pids.max").exists().then_some(tasks)
        })
    }

    fn limit(&self, limit: &str) {
        fs::write(self.0.join("pids.max"), limit).unwrap();
    }

    fn count(&self) -> usize {
        fs::read_to_string(self.0.join("pids.current")).unwrap().trim().parse().unwrap()
    }

    fn run(&self, command: &Command) -> Command {
        behind(&format!("echo $$ >{}/cgroup.procs", self.0.display()), command)
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        // A process leaves the cgroup slightly later than its parent sees its exit.
        until_blocking(
            "the end of the cgroup",
            || fs::remove_dir(&self.0).is_ok() || !self.0.exists(),
            |gone| *gone,
        );
    }
}

fn tasks() -> Option<Tasks> {
    let tasks = is_root().then(Tasks::new).flatten();
    if tasks.is_none() {
        say("SKIPPED: this process can make no cgroup with a limit of tasks");
    }
    tasks
}

#[test]
fn a_start_with_too_few_threads_is_reported() {
    let Some(tasks) = tasks() else { return };
    let node = Node::with(&[("sensor", 1)]);
    for limit in ["2", "8", "12"] {
        tasks.limit(limit);
        let said = refused(&mut tasks.run(&node.command(&["run"])), exit::LIMITS);
        assert!(said.contains("18 more threads") && said.contains("TasksMax"), "{limit}: {said}");
    }
    // No verb panics either.
    tasks.limit("2");
    for verb in [&["status"][..], &["discover"], &["doctor"], &["who"], &["topology"]] {
        let output = tasks.run(&node.command(verb)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code().is_some_and(|code| code != 101) && !said.contains("panic"),
            "{verb:?}: {said}"
        );
    }
}

/// The number of the daemon's threads whose name begins with `name`.
fn threads(daemon: &Daemon, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    tasks
        .filter(|task| {
            fs::read_to_string(task.as_ref().unwrap().path().join("comm"))
                .is_ok_and(|comm| comm.starts_with(name))
        })
        .count()
}

/// The number of checks that could not be run.
fn not_run(address: std::net::SocketAddr) -> u64 {
    let (_, metrics) = http_get(address, "/metrics");
    let wanted =
        "holdfast_hooks_total{resource=\"example.com/lamp\",phase=\"check\",result=\"not_run\"} ";
    metrics.lines().find_map(|line| line.strip_prefix(wanted)?.parse().ok()).unwrap_or(0)
}

/// While the daemon runs, no thread and no process can be created. Devices keep their state, hooks
/// wait, every request is answered, and work continues when threads are available again.
#[test]
fn a_shortage_of_threads_is_no_evidence_and_ends_nothing() {
    let Some(tasks) = tasks() else { return };
    tasks.limit("max");
    run(async {
        let node = Node::with(&[("sensor", 3), ("lamp", 1)]);
        // A thread that runs it, one that waits for its end, the shell; and the shell's own child.
        let check = "check = { command = [\"/bin/sh\", \"-c\", \"/bin/true; /bin/true\"], timeout = \"5s\", every = \"5s\" }\n";
        let hook = "before_start = { command = [\"/bin/true\"], timeout = \"5s\" }\n";
        node.write_config(&format!(
            "[telemetry]\nlisten = \"127.0.0.1:0\"\n{}{hook}{}{check}",
            resource("sensor"),
            resource("lamp")
        ));
        let (kubelet, sensor) = (node.start_kubelet().await, name("example.com/sensor"));
        let mut daemon = Daemon::spawn(&mut tasks.run(&node.command(&["run"])));
        let address = telemetry(&daemon).await;
        offered(&kubelet, &sensor, 3).await;
        let mut api = dial(&kubelet, &node, &sensor).await;
        allocate(&mut api, &["dev:sensor0"]).await.unwrap();
        // sled's threads start after the daemon's start.
        until("sled", || threads(&daemon, "sled-io"), |threads| *threads == 7).await;
        let status = || {
            serde_json::from_slice::<serde_json::Value>(
                &node.output(&["status", "-o", "json"]).stdout,
            )
            .unwrap()
        };
        tasks.limit("1");
        daemon.logged("hook cannot be run; it is retried").await;
        let short = status();
        assert_eq!(short["not_run"][0]["phase"], "check", "{short}");
        assert!(short["ailing"].as_array().unwrap().is_empty(), "{short}");
        // The same with threads for the check itself, but none for the shell's child.
        let count =
            || async move { tokio::task::spawn_blocking(move || not_run(address)).await.unwrap() };
        let before = count().await;
        tasks.limit(&(tasks.count() + 3).to_string());
        soon("a round of checks", async {
            while count().await < before + 2 {
                pause().await;
            }
        })
        .await;
        tasks.limit("1");
        for path in ["/metrics", "/", "/healthz"] {
            let (code, _) =
                tokio::task::spawn_blocking(move || http_get(address, path)).await.unwrap();
            assert_eq!(code, 200, "{path}");
        }
        allocate(&mut api, &["dev:sensor1"]).await.unwrap();
        let request = api::PreStartContainerRequest { devices_ids: vec!["dev:sensor0".into()] };
        let waits = soon("an answer", api.pre_start_container(request.clone())).await.unwrap_err();
        assert!(
            waits.message().contains("it cannot be run: ")
                && waits.message().contains("the kubelet will retry"),
            "{waits}"
        );
        daemon.signal(Signal::SIGHUP);
        daemon.logged("configuration reloaded").await;
        node.remove_device("sensor", 2);
        offered(&kubelet, &sensor, 2).await;
        offered(&kubelet, &name("example.com/lamp"), 1).await;
        allocate(&mut api, &["dev:sensor1"]).await.unwrap();
        tasks.limit("max");
        daemon.logged("hooks can run again").await;
        soon("an answer", api.pre_start_container(request)).await.unwrap();
        until(
            "all of it",
            || status()["not_run"].as_array().unwrap().len(),
            |waiting| *waiting == 0,
        )
        .await;
        assert!(
            !daemon
                .log()
                .iter()
                .any(|line| line.contains("panic") || line.contains("check_failed")),
            "{}",
            daemon.log().join("\n")
        );
        daemon.signal(Signal::SIGTERM);
        assert!(daemon.ended().await.success());
    });
}

/// As in a container, where the daemon is the first process: orphans become its children.
#[test]
fn the_first_process_of_a_container_waits_for_orphans() {
    let name = "process_limits::the_first_process_of_a_container_waits_for_orphans";
    if inside(name, &["unshare"]).is_none() {
        return;
    }
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let check = "check = { command = [\"/bin/sh\", \"-c\", \"sleep 1000 & exit 0\"], timeout = \"5s\", every = \"1h\" }\n";
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}{check}", resource("gpu")));
        let run = node.command(&["run"]);
        let mut first = Command::new("unshare");
        first.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        let mut daemon = Daemon::spawn(first.arg(run.get_program()).args(run.get_args()));
        daemon.logged("ready").await;
        // The state of each child of a process.
        let children = |parent: Pid| -> Vec<(Pid, String)> {
            let entries = fs::read_dir("/proc").unwrap().flatten();
            let stats =
                entries.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
            let child = |stat: String| {
                let (begin, rest) = stat.rsplit_once(") ")?;
                let mut fields = rest.split(' ');
                let (state, of) = (fields.next()?, fields.next()?.parse().ok()?);
                let pid = begin.split(' ').next()?.parse().ok()?;
                (Pid::from_raw(of) == parent).then(|| (Pid::from_raw(pid), state.to_owned()))
            };
            stats.filter_map(child).collect()
        };
        let first = children(daemon.pid())[0].0;
        let orphans = || children(first).iter().filter(|(_, state)| state == "Z").count();
        until("an orphan", orphans, |orphans| *orphans == 1).await;
        until("no orphan", orphans, |orphans| *orphans == 0).await;
        daemon.kill();
    });
}
