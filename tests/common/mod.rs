//! Helpers for tests of the whole daemon: a node in a folder, the daemon as a child process, waits
//! for values.
//!
//! Nothing here sleeps: a wait ends with its value, or fails with a message when the daemon hangs.

#![allow(dead_code, reason = "each test file uses its part of this")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a helper of a test fails the test, and may print the reason"
)]

pub(crate) mod inside;
pub(crate) mod ledger;

use holdfast::app::{App, Settings};
use holdfast::config::{self, Roots};
use holdfast::domain::{AllocId, DeviceId, Grant, ResourceName};
use holdfast::host;
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::kubelet::uds;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, KubeletConfig};
use holdfast::store;
use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};
use tempfile::TempDir;
use tokio::net::UnixDatagram;
use tokio::sync::watch;
use tonic::transport::Channel;

/// A daemon that takes longer than this hangs. This is not a performance limit.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// Runs a test inside an actix system, as the daemon runs.
pub(crate) fn run<F: Future>(test: F) -> F::Output {
    actix::System::new().block_on(test)
}

/// Suppresses the report of panics that a test requests: a backtrace takes longer than the rebuild
/// that it hides.
pub(crate) fn hide_expected_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let asked_for = panic.payload_as_str().is_some_and(|text| text.contains("asked to crash"));
        if !asked_for {
            report(panic);
        }
    }));
}

/// Waits for a future, at most `HANG`.
pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(HANG, future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

/// More bytes than the state of all daemons that run at one time.
const STATES_MAX: u64 = 1 << 30;

/// The time between two queries of a test that waits. Without it the test would use a processor
/// that other tests need.
const POLL: Duration = Duration::from_millis(2);

/// Lets the other tasks of this thread run: the kubelet's are among them.
pub(crate) async fn pause() {
    tokio::time::sleep(POLL).await;
}

/// Repeats the query until the answer fits: for views that follow their source by milliseconds.
pub(crate) async fn until<T>(what: &str, ask: impl Fn() -> T, fits: impl Fn(&T) -> bool) -> T {
    let seen = async {
        loop {
            let answer = ask();
            if fits(&answer) {
                return answer;
            }
            pause().await;
        }
    };
    soon(what, seen).await
}

/// [`until`] where nothing runs on this thread.
pub(crate) fn until_blocking<T>(what: &str, ask: impl Fn() -> T, fits: impl Fn(&T) -> bool) -> T {
    let began = Instant::now();
    loop {
        let answer = ask();
        if fits(&answer) {
            return answer;
        }
        assert!(began.elapsed() < HANG, "never seen: {what}");
        std::thread::sleep(POLL);
    }
}

/// Where the state of the daemons is: in memory, where there is room for it. An Allocate is refused
/// if the disk needs seconds for a sync, and the disk of a shared machine sometimes does.
fn states() -> &'static Path {
    let memory = Path::new("/dev/shm");
    let has_room = host::is_tmpfs(memory) && host::free_bytes(memory) >= STATES_MAX;
    if has_room { memory } else { Path::new("/tmp") }
}

pub(crate) fn name(text: &str) -> ResourceName {
    text.parse().unwrap()
}

/// A node: a host root with plain files in place of device nodes, and folders for all other
/// directories.
#[derive(Debug)]
pub(crate) struct Node {
    dir: Arc<TempDir>,
    /// The directory for the daemon's state.
    states: Arc<TempDir>,
    /// Distinguishes the state of one instance of the daemon from that of another.
    instance: &'static str,
}

impl Node {
    /// An empty node. Its path is short, because a socket's path may have at most 107 bytes.
    pub(crate) fn new() -> Node {
        let dir = tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap();
        let states = tempfile::Builder::new().prefix("hf").tempdir_in(states()).unwrap();
        let node = Node { dir: Arc::new(dir), states: Arc::new(states), instance: "" };
        std::fs::create_dir_all(node.path("host/dev")).unwrap();
        std::fs::create_dir(node.path("etc")).unwrap();
        node
    }

    /// A node with `count` nodes `/dev/<stem>0`, `/dev/<stem>1`, … for each stem, each a resource
    /// `example.com/<stem>`.
    pub(crate) fn with(resources: &[(&str, usize)]) -> Node {
        let node = Node::new();
        let mut text = String::from("[telemetry]\nlisten = \"off\"\n");
        for (stem, count) in resources {
            (0..*count).for_each(|index| node.create_device(stem, index));
            text += &resource(stem);
        }
        node.write_config(&text);
        node
    }

    /// The same node for another instance of the daemon, with a separate ledger.
    pub(crate) fn another_instance(&self, instance: &'static str) -> Node {
        Node { dir: Arc::clone(&self.dir), states: Arc::clone(&self.states), instance }
    }

    pub(crate) fn path(&self, rel: &str) -> PathBuf {
        self.dir.path().join(rel)
    }

    pub(crate) fn config_file(&self) -> PathBuf {
        self.path("etc/config.toml")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.states.path().join(format!("{}state", self.instance))
    }

    pub(crate) fn write_config(&self, text: &str) {
        std::fs::write(self.config_file(), text).unwrap();
    }

    pub(crate) fn create_device(&self, stem: &str, index: usize) {
        std::fs::write(self.path(&format!("host/dev/{stem}{index}")), "").unwrap();
    }

    pub(crate) fn remove_device(&self, stem: &str, index: usize) {
        std::fs::remove_file(self.path(&format!("host/dev/{stem}{index}"))).unwrap();
    }

    pub(crate) fn sockets(&self) -> PathBuf {
        self.path("kubelet/device-plugins/.holdfast")
    }

    fn roots(&self) -> Roots {
        Roots {
            host: self.path("host"),
            kubelet: self.path("kubelet"),
            state: self.state(),
            run: self.path(&format!("{}run", self.instance)),
        }
    }

    /// Starts the daemon in this process.
    pub(crate) async fn start_app(&self) -> App {
        self.start_app_with(|_| {}).await
    }

    pub(crate) async fn start_app_with(&self, change: impl FnOnce(&mut Settings)) -> App {
        let config = config::load(Some(&self.config_file()), &config::Node::default()).unwrap();
        let mut settings = Settings::new(self.roots(), config);
        change(&mut settings);
        self.unlocked().await;
        soon("the start", App::start(settings)).await.unwrap()
    }

    /// Waits until no daemon of this process has the ledger. Where a disk is slow, `shut_down` does
    /// not wait for the end of the store.
    pub(crate) async fn unlocked(&self) {
        let Ok(lock) = File::open(self.state().join("lock")) else {
            return;
        };
        let locked = tokio::task::spawn_blocking(move || lock.lock().and_then(|()| lock.unlock()));
        soon("the lock of the ledger", locked).await.unwrap().unwrap();
    }

    pub(crate) fn kubelet_config(&self) -> KubeletConfig {
        KubeletConfig::new(self.path("kubelet"), self.path("host"))
    }

    pub(crate) async fn start_kubelet(&self) -> Kubelet {
        Kubelet::start(self.kubelet_config()).await.unwrap()
    }

    /// A kubelet that, by its socket, has run for an hour: its listings count as proof at once.
    pub(crate) async fn start_old_kubelet(&self, config: KubeletConfig) -> Kubelet {
        let kubelet = Kubelet::start(config).await.unwrap();
        let made =
            TimeSpec::from_duration(UNIX_EPOCH.elapsed().unwrap() - Duration::from_secs(3600));
        let socket = self.path("kubelet/device-plugins/kubelet.sock");
        utimensat(AT_FDCWD, &socket, &made, &made, UtimensatFlags::NoFollowSymlink).unwrap();
        kubelet
    }

    /// A verb with this node's roots. `HOLDFAST_BIN` replaces the binary that was just built.
    pub(crate) fn command(&self, verb: &[&str]) -> Command {
        let binary = std::env::var_os("HOLDFAST_BIN")
            .unwrap_or_else(|| env!("CARGO_BIN_EXE_holdfast").into());
        let mut command = Command::new(binary);
        command
            .args(verb)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("HOLDFAST_LOG")
            .stdin(Stdio::null());
        let Roots { host, kubelet, state, run } = self.roots();
        for (option, path) in [
            ("host-root", &host),
            ("kubelet-dir", &kubelet),
            ("state-dir", &state),
            ("run-dir", &run),
        ] {
            command.arg(format!("--{option}")).arg(path);
        }
        command.arg("--config").arg(self.config_file());
        command
    }

    /// Runs a verb to its end. Not for verbs that need the kubelet of this thread.
    pub(crate) fn output(&self, verb: &[&str]) -> Output {
        self.command(verb).output().unwrap()
    }

    /// Runs a verb that prints a JSON document.
    pub(crate) fn json(&self, verb: &[&str]) -> serde_json::Value {
        let output = self.output(&[verb, &["-o", "json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub(crate) fn start_daemon(&self) -> Daemon {
        Daemon::spawn(&mut self.command(&["run"]))
    }

    /// The live grants in the journal.
    pub(crate) fn grants(&self) -> Vec<Grant> {
        store::peek(&self.state()).unwrap().grants
    }
}

/// The configuration of a resource that offers the nodes `/dev/<stem>*`.
pub(crate) fn resource(stem: &str) -> String {
    format!(
        "[[resource]]\nname = \"example.com/{stem}\"\nclass = \"char\"\npaths = [\"/dev/{stem}*\"]\n"
    )
}

/// A time in which the daemons of this machine do not poll, so that what happens follows from an
/// event. They poll at each half minute of the boot clock.
pub(crate) struct Unpolled(Instant);

impl Unpolled {
    const FOR: Duration = Duration::from_secs(20);

    /// Waits until no poll comes for that time.
    pub(crate) async fn begin() -> Self {
        let left = host::until_tick(Duration::from_secs(30));
        if left <= Self::FOR {
            // The daemon reacts to the poll for some time.
            tokio::time::sleep(left + Duration::from_secs(2)).await;
        }
        Unpolled(Instant::now())
    }

    /// Asserts that the time has not ended.
    pub(crate) fn end(self, what: &str) {
        assert!(self.0.elapsed() < Self::FOR, "{what} came with a poll, and not with an event");
    }
}

/// The daemon as a child process; it dies with this value.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    lines: watch::Receiver<Vec<String>>,
}

impl Daemon {
    pub(crate) fn spawn(command: &mut Command) -> Daemon {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = watch::channel(Vec::new());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                sender.send_modify(|lines| lines.push(line));
            }
        });
        Daemon { child, lines }
    }

    pub(crate) fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(self.pid(), signal).unwrap();
    }

    /// The lines of its log so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.lines.borrow().clone()
    }

    /// Waits for a line of the log that contains `text`.
    pub(crate) async fn logged(&self, text: &str) -> String {
        let mut lines = self.lines.clone();
        let find = |lines: &Vec<String>| lines.iter().find(|line| line.contains(text)).cloned();
        let found = soon(text, lines.wait_for(|lines| find(lines).is_some())).await;
        let found = found.unwrap_or_else(|_| {
            panic!("the daemon ended without saying `{text}`:\n{}", self.log().join("\n"))
        });
        find(&found).unwrap()
    }

    /// Waits until `text` has been logged `times` times.
    pub(crate) async fn logged_often(&self, text: &str, times: usize) {
        let mut lines = self.lines.clone();
        let often =
            |lines: &Vec<String>| lines.iter().filter(|line| line.contains(text)).count() >= times;
        let _ = soon(text, lines.wait_for(often)).await.unwrap();
    }

    /// Waits for its end.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let mut lines = self.lines.clone();
        soon("the end of the daemon", async { while lines.changed().await.is_ok() {} }).await;
        self.child.wait().unwrap()
    }

    /// Waits for the end of this process alone: another one may continue to write its log.
    pub(crate) async fn exited(&mut self) -> ExitStatus {
        let exited = async {
            loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    return status;
                }
                pause().await;
            }
        };
        soon("the end of the daemon", exited).await
    }

    /// Kills it with SIGKILL, and waits until it has exited.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = self.log();
            eprintln!(
                "the daemon's last words:\n{}",
                log[log.len().saturating_sub(40)..].join("\n")
            );
        }
    }
}

/// Waits until the kubelet counts `healthy` devices of the resource as healthy.
pub(crate) async fn offered(kubelet: &Kubelet, resource: &ResourceName, healthy: usize) {
    kubelet.wait_for(|view| view.capacity(resource).allocatable == healthy, HANG).await.unwrap();
}

/// The number of events that fit.
pub(crate) fn count(kubelet: &Kubelet, fits: impl Fn(&EventKind) -> bool) -> usize {
    kubelet.view(|view| view.events().iter().filter(|event| fits(&event.kind)).count())
}

/// The device-plugin API on the socket that the resource registered last.
pub(crate) async fn dial(
    kubelet: &Kubelet,
    node: &Node,
    resource: &ResourceName,
) -> DevicePluginClient<Channel> {
    let registered = || {
        kubelet.view(|view| {
            let last = view.last(|kind| {
                matches!(kind, EventKind::Registered { .. }) && kind.resource() == Some(resource)
            });
            match &last?.kind {
                EventKind::Registered { endpoint, .. } => Some(endpoint.clone()),
                _ => None,
            }
        })
    };
    let endpoint = until("a registration", registered, Option::is_some).await.unwrap();
    let channel = uds::connect(&node.path("kubelet/device-plugins").join(endpoint)).await.unwrap();
    DevicePluginClient::new(channel)
}

/// Allocates for one container and returns its alloc-id.
pub(crate) async fn allocate(
    api: &mut DevicePluginClient<Channel>,
    ids: &[&str],
) -> Result<AllocId, tonic::Status> {
    let request = api::ContainerAllocateRequest {
        devices_ids: ids.iter().map(ToString::to_string).collect(),
    };
    let response = api.allocate(api::AllocateRequest { container_requests: vec![request] }).await?;
    Ok(AllocId::new(
        response.into_inner().container_responses[0].annotations[AllocId::ANNOTATION].clone(),
    ))
}

/// Reads the daemon's notifications to systemd until the line `wanted`, or any value of a variable
/// such as `MAINPID=`. Returns the line.
pub(crate) async fn notified(socket: &UnixDatagram, wanted: &str) -> String {
    let is_wanted =
        |line: &&str| *line == wanted || (wanted.ends_with('=') && line.starts_with(wanted));
    let mut buffer = [0; 256];
    let told = async {
        loop {
            let length = socket.recv(&mut buffer).await.unwrap();
            if let Some(line) = String::from_utf8_lossy(&buffer[..length]).lines().find(is_wanted) {
                return line.to_owned();
            }
        }
    };
    soon(wanted, told).await
}

/// The ids of a grant.
pub(crate) fn ids(grant: &Grant) -> BTreeSet<DeviceId> {
    grant.devices.iter().map(|device| device.id.clone()).collect()
}

/// The address of `/metrics` and the other pages, from the log.
pub(crate) async fn telemetry(daemon: &Daemon) -> SocketAddr {
    let line = daemon.logged("serving /metrics").await;
    let (_, address) = line.split_once("address=").unwrap();
    address.split_whitespace().next().unwrap().parse().unwrap()
}

/// A minimal GET: status code and body.
pub(crate) fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Whether this process is root, so that no permission applies to it.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The median, the 99th percentile and the maximum.
pub(crate) fn percentiles(mut values: Vec<Duration>) -> String {
    if values.is_empty() {
        return "none".into();
    }
    values.sort();
    let at = |share: usize| {
        values.get((values.len() * share / 100).min(values.len() - 1)).copied().unwrap_or_default()
    };
    format!("p50 {:?}, p99 {:?}, max {:?}", at(50), at(99), at(100))
}

/// Small random numbers from a printed seed; `HOLDFAST_SEED` repeats a run.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Random {
        let fresh = || {
            u64::try_from(UNIX_EPOCH.elapsed().unwrap().as_nanos() & u128::from(u64::MAX)).unwrap()
        };
        let seed =
            std::env::var("HOLDFAST_SEED").ok().map_or_else(fresh, |text| text.parse().unwrap());
        println!("seed {seed}; HOLDFAST_SEED={seed} repeats this run");
        Random(seed)
    }

    /// The numbers of a seed.
    pub(crate) fn of(seed: u64) -> Random {
        Random(seed)
    }

    /// Below `bound` (splitmix64).
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound.max(1)
    }

    /// An index into `count` elements.
    pub(crate) fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(count as u64)).unwrap()
    }
}

/// Every file below a directory with its bytes, for a later comparison.
pub(crate) fn files_below(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    read_below(dir).unwrap()
}

/// The same for a directory in use: waits for two equal passes, so that the files are from one time
/// without a change.
pub(crate) fn files_at_rest(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let deadline = Instant::now() + HANG;
    let mut before = None;
    loop {
        let now = read_below(dir).ok();
        if let Some(files) = now.clone().filter(|_| now == before) {
            return files;
        }
        assert!(Instant::now() < deadline, "`{}` never comes to rest", dir.display());
        before = now;
        std::thread::sleep(POLL);
    }
}

/// An error when a file disappears meanwhile.
fn read_below(dir: &Path) -> std::io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type()? {
                kind if kind.is_dir() => dirs.push(entry.path()),
                kind if kind.is_file() => found.push((entry.path(), std::fs::read(entry.path())?)),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}
