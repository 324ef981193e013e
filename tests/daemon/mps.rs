//! The control daemon of NVIDIA's MPS, with scripts in the place of the driver's programs: its
//! start with its limits, refusals, a crash, a hang, a restart of the daemon, and its end.

use crate::common::{
    Daemon, Node, allocate, count, dial, name, offered, resource, run, soon, until,
};
use holdfast::domain::ResourceName;
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// In the place of `nvidia-cuda-mps-control`. `-d` leaves a process; while `refuse` exists it
/// fails. Without `-d` it reads a command and records it, if that process runs; while `hang` exists
/// it hangs.
const CONTROL: &str = r#"#!/bin/sh
pid=$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid" 2>/dev/null)
is_running() { [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; }
if [ "$1" = -d ]; then
    [ -e "@/refuse" ] && exit 1
    is_running && exit 1
    sleep 100000 &
    echo $! >"$CUDA_MPS_PIPE_DIRECTORY/pid"
    echo "start $CUDA_MPS_LOG_DIRECTORY" >>"@/commands"
    exit 0
fi
read command
while [ -e "@/hang" ]; do sleep 0.05; done
is_running || { echo Cannot find MPS control daemon process; exit 1; }
case $command in
    get_*) echo 100.0 ;;
    quit) kill "$pid"; echo quit >>"@/commands" ;;
    *) echo "$command" >>"@/commands" ;;
esac
"#;

/// In the place of `nvidia-smi -i GPU`: with a query it prints number, memory and mode, and with
/// `-c MODE` it records the mode. While `degraded-GPU` exists it fails.
const SMI: &str = r#"#!/bin/sh
[ -e "@/degraded-$2" ] && exit 14
case $3 in
    -c) echo "mode $2 $4" >>"@/commands"; echo Exclusive_Process >"@/mode-$2"
        [ "$4" = DEFAULT ] && rm "@/mode-$2"; exit 0 ;;
    *) echo "${2##*0}, 81559, $(cat "@/mode-$2" 2>/dev/null || echo Default)" ;;
esac
"#;

/// The GPUs of the resource.
const SHARED: [usize; 2] = [1, 3];

struct Setup {
    node: Node,
    gpus: Vec<String>,
}

impl Drop for Setup {
    /// The process that the script left.
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

impl Setup {
    /// A node with GPUs that are shared by MPS, and with another resource.
    fn new() -> Setup {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        node.create_device("other", 0);
        let gpus: Vec<String> = SHARED.iter().map(|index| hardware.gpu_uuid(*index)).collect();
        let setup = Setup { node, gpus };
        let folder = setup.node.path("script");
        fs::create_dir(&folder).unwrap();
        let programs = setup.node.path("host/usr/bin");
        fs::create_dir_all(&programs).unwrap();
        for (name, text) in [("nvidia-cuda-mps-control", CONTROL), ("nvidia-smi", SMI)] {
            let path = programs.join(name);
            fs::write(&path, text.replace('@', &folder.display().to_string())).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        setup.configure(&format!("nvidia = {{ mps_root = \"{}\" }}", setup.root().display()));
        setup
    }

    /// The configuration, with the options of the GPUs.
    fn configure(&self, options: &str) {
        let uuids = self.gpus.join("\", \"");
        self.node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n{}[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \
             \"gpu\"\ncontract = \"nvidia\"\nreplicas = 4\nselect = {{ uuid = [\"{uuids}\"] }}\n\
             {options}\n",
            resource("other")
        ));
    }

    fn root(&self) -> PathBuf {
        self.node.path("mps")
    }

    fn pipe(&self) -> PathBuf {
        self.root().join("nvidia.com/gpu/pipe")
    }

    fn pid(&self) -> Option<Pid> {
        let pid = fs::read_to_string(self.pipe().join("pid")).ok()?;
        Some(Pid::from_raw(pid.trim().parse().unwrap()))
    }

    fn runs(&self) -> bool {
        let stat = self.pid().map(|pid| fs::read_to_string(format!("/proc/{pid}/stat")));
        stat.is_some_and(|stat| stat.is_ok_and(|stat| !stat.contains(") Z")))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.node.path("script").join(name)
    }

    fn set(&self, name: &str, exists: bool) {
        if exists {
            fs::write(self.file(name), "").unwrap();
        } else {
            fs::remove_file(self.file(name)).unwrap();
        }
    }

    /// The commands so far.
    fn commands(&self) -> Vec<String> {
        let text = fs::read_to_string(self.file("commands")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The commands that set up the control daemon, after its start if it starts here.
    fn set_up(&self, start: bool, modes: bool) -> Vec<String> {
        let mode = |gpu: &String| format!("mode {gpu} EXCLUSIVE_PROCESS");
        let start =
            start.then(|| format!("start {}", self.root().join("nvidia.com/gpu/log").display()));
        let limit = |index| format!("set_default_device_pinned_mem_limit {index} 20389M");
        let threads = "set_default_active_thread_percentage 25".to_owned();
        let modes = self.gpus.iter().filter(|_| modes).map(mode);
        modes.chain(start).chain(SHARED.map(limit)).chain([threads]).collect()
    }

    /// Why the shares are unhealthy, by `status`.
    fn why(&self) -> Option<String> {
        let status = self.node.json(&["status"]);
        status["mps"]["nvidia.com/gpu"]["why"].as_str().map(str::to_owned)
    }
}

fn gpu() -> ResourceName {
    name("nvidia.com/gpu")
}

/// The other resource is served in any state of the control daemon.
async fn other_is_served(kubelet: &Kubelet, node: &Node) {
    let mut api = dial(kubelet, node, &name("example.com/other")).await;
    soon("an Allocate of the other resource", allocate(&mut api, &["dev:other0"])).await.unwrap();
}

/// Whether the kubelet got a list with an unhealthy share.
fn is_unhealthy_list(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Listed { resource, unhealthy, .. } if *resource == gpu() && *unhealthy > 0)
}

/// Waits until the commands are these.
async fn commanded(setup: &Setup, wanted: &[String]) {
    until("the commands", || setup.commands(), |commands| commands == wanted).await;
}

#[test]
fn shares_are_offered_once_their_control_daemon_answers_and_it_outlives_the_daemon() {
    run(async {
        let setup = Setup::new();
        setup.set("refuse", true);
        let kubelet = setup.node.start_kubelet().await;
        let daemon = setup.node.start_daemon();
        offered(&kubelet, &name("example.com/other"), 1).await;
        daemon.logged("the MPS control daemon does not answer").await;
        offered(&kubelet, &gpu(), 0).await;
        other_is_served(&kubelet, &setup.node).await;
        let why = setup.why().unwrap();
        assert!(why.contains("`nvidia-cuda-mps-control -d` failed"), "{why}");
        let text = String::from_utf8(setup.node.output(&["status"]).stdout).unwrap();
        assert!(text.contains("its shares by MPS are unhealthy"), "{text}");

        let tried = setup.commands().len();
        setup.set("refuse", false);
        offered(&kubelet, &gpu(), 8).await;
        assert_eq!(setup.commands()[tried..], setup.set_up(true, false));
        assert_eq!(setup.commands()[..2], setup.set_up(true, true)[..2], "the modes come first");
        assert_eq!(setup.why(), None);
        let mut api = dial(&kubelet, &setup.node, &gpu()).await;
        let share = format!("{}::0", setup.gpus[0]);
        allocate(&mut api, &[&share]).await.unwrap();
        let grants = setup.node.grants();
        let grant = grants.iter().find(|grant| grant.resource == gpu()).unwrap();
        let host: Vec<&Path> =
            grant.edits.mounts.iter().map(|mount| Path::new(&mount.host)).collect();
        assert_eq!(host, [setup.pipe(), setup.root().join("shm")]);
        assert!(host.iter().all(|folder| folder.is_dir()), "{host:?}");

        // The next process finds it: no second start, and no list without its shares.
        let pid = setup.pid();
        let before = setup.commands();
        drop(daemon);
        assert!(setup.runs());
        let lists = count(&kubelet, is_unhealthy_list);
        let registered = |kind: &EventKind| matches!(kind, EventKind::Registered { resource, .. } if *resource == gpu());
        let registrations = count(&kubelet, registered);
        let _daemon = setup.node.start_daemon();
        until("a registration", || count(&kubelet, registered), |now| *now > registrations).await;
        offered(&kubelet, &gpu(), 8).await;
        commanded(&setup, &[before, setup.set_up(false, false)].concat()).await;
        assert_eq!((setup.pid(), count(&kubelet, is_unhealthy_list)), (pid, lists));
    });
}

/// `nvidia-smi` also fails for a GPU that works.
#[test]
fn shares_stay_while_their_control_daemon_answers_and_nvidia_smi_fails() {
    run(async {
        let setup = Setup::new();
        let kubelet = setup.node.start_kubelet().await;
        let daemon = setup.node.start_daemon();
        offered(&kubelet, &gpu(), 8).await;
        let before = setup.commands();
        assert_eq!(before, setup.set_up(true, true));
        drop(daemon);
        let degraded = format!("degraded-{}", setup.gpus[0]);
        setup.set(&degraded, true);
        let lists = count(&kubelet, is_unhealthy_list);
        let _daemon = setup.node.start_daemon();
        let commands = || setup.commands()[before.len()..].to_vec();
        let all = setup.set_up(false, false);
        until("the commands of a second try", commands, |found| found.len() > 2).await;
        assert_eq!(commands()[..2], all[1..], "the limit of the other GPU");
        assert_eq!((setup.why(), count(&kubelet, is_unhealthy_list)), (None, lists));
        setup.set(&degraded, false);
        until("the limit of each GPU", commands, |found| found.ends_with(&all)).await;
        offered(&kubelet, &gpu(), 8).await;
    });
}

#[test]
fn one_that_dies_is_started_again_and_one_that_hangs_is_not_replaced() {
    run(async {
        let setup = Setup::new();
        let kubelet = setup.node.start_kubelet().await;
        let daemon = setup.node.start_daemon();
        offered(&kubelet, &gpu(), 8).await;
        let first = setup.pid().unwrap();
        setup.set("refuse", true);
        kill(first, Signal::SIGKILL).unwrap();
        offered(&kubelet, &gpu(), 0).await;
        let status = setup.node.json(&["status"]);
        let reasons: Vec<_> = status["ailing"].as_array().unwrap().iter().collect();
        assert!(reasons.iter().all(|device| device["reason"] == "mps_down"), "{reasons:?}");
        assert!(!reasons.is_empty());
        other_is_served(&kubelet, &setup.node).await;
        setup.set("refuse", false);
        offered(&kubelet, &gpu(), 8).await;
        let second = setup.pid().unwrap();
        assert_ne!(first, second);

        setup.set("hang", true);
        offered(&kubelet, &gpu(), 0).await;
        let why = setup.why().unwrap();
        assert!(why.contains("has not answered"), "{why}");
        other_is_served(&kubelet, &setup.node).await;
        setup.set("hang", false);
        offered(&kubelet, &gpu(), 8).await;
        assert_eq!(setup.pid(), Some(second));
        drop(daemon);
    });
}

async fn reload(daemon: &Daemon, times: usize) {
    daemon.signal(Signal::SIGHUP);
    daemon.logged_often("configuration reloaded", times).await;
}

#[test]
fn a_resource_that_is_no_longer_shared_by_mps_gets_its_gpus_back() {
    run(async {
        let setup = Setup::new();
        let kubelet = setup.node.start_kubelet().await;
        let daemon = setup.node.start_daemon();
        offered(&kubelet, &gpu(), 8).await;
        commanded(&setup, &setup.set_up(true, true)).await;

        // Another program runs it from now on: nothing is ended.
        let root = setup.root();
        setup.configure(&format!(
            "nvidia = {{ mps_root = \"{}\", mps_control = \"external\" }}",
            root.display()
        ));
        reload(&daemon, 1).await;
        until(
            "the end of its state",
            || setup.node.json(&["status"]),
            |status| status["mps"].as_object().unwrap().is_empty(),
        )
        .await;
        assert!(setup.runs());
        drop(daemon);

        // Time slices: the next process ends it, although it has not started it.
        setup.configure("");
        let _daemon = setup.node.start_daemon();
        let back = setup.gpus.iter().map(|gpu| format!("mode {gpu} DEFAULT"));
        let wanted: Vec<String> =
            setup.set_up(true, true).into_iter().chain(["quit".into()]).chain(back).collect();
        commanded(&setup, &wanted).await;
        until("its end", || setup.runs(), |runs| !runs).await;
        offered(&kubelet, &gpu(), 8).await;
        let record = setup.node.path("run/mps.json");
        until("the record", || fs::read_to_string(&record).unwrap(), |text| text == "{}").await;
    });
}
