//! The kubelet's directory as a file, the kernel's log, inotify, and root of a user namespace.

use super::scene::{MOUNT, Mounted, Said, asked, behind, doctor, start};
use crate::common::inside::{command, inside, say};
use crate::common::{Daemon, Node, name, offered, run, until};
use holdfast::console::exit;
use holdfast::lab::sim::hardware::SimNode;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[test]
fn a_kubelet_directory_that_is_mounted_as_a_file_is_found() {
    let Some(dir) = inside(
        "hardware::doctor_real::host::a_kubelet_directory_that_is_mounted_as_a_file_is_found",
        &MOUNT,
    ) else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let state = Mounted::of_type("tmpfs", "size=512m", &node.state());
        let file = dir.join("file");
        fs::write(&file, "").unwrap();
        for place in ["kubelet", "kubelet/device-plugins"] {
            let place = node.path(place);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(&place, "").unwrap();
            let plain = doctor(&node).await;
            plain.tells(
                "kubelet-dir-unusable",
                &place,
                &["it is not a directory", "move aside", "--kubelet-dir"],
            );
            let mounted = Mounted::new(&["--bind"], &file, &place);
            let said = doctor(&node).await;
            said.is(
                &["kubelet-dir-unusable", "state-in-memory", "daemon-absent"],
                &place,
                &["a file is mounted", "hostPath", "Directory"],
            );
            // The daemon's exit confirms doctor's statement about it.
            let mut daemon = node.start_daemon();
            assert_eq!(
                daemon.ended().await.code(),
                Some(exit::KUBELET_DIR.into()),
                "{:#?}",
                daemon.log()
            );
            drop(mounted);
            fs::remove_file(&place).unwrap();
        }

        let socket = node.path("kubelet/device-plugins/kubelet.sock");
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        fs::write(&socket, "").unwrap();
        doctor(&node).await.tells(
            "kubelet-absent",
            &socket,
            &["not a socket", "start the kubelet"],
        );
        let mounted = Mounted::new(&["--bind"], &file, &socket);
        let words = ["the socket itself is a mount", "mount the directory `device-plugins`"];
        doctor(&node).await.is(
            &["kubelet-socket-mounted", "state-in-memory", "daemon-absent"],
            &socket,
            &words,
        );
        drop(mounted);
        fs::remove_file(&socket).unwrap();

        // The effect of the mount after the kubelet has created another socket.
        let (kubelet, daemon) = start(&node).await;
        let mounted = Mounted::new(&["--bind"], &socket, &socket);
        doctor(&node).await.is(&["kubelet-socket-mounted", "state-in-memory"], &socket, &words);
        drop((mounted, daemon, kubelet, state));
    });
}

/// The host of a node as a running machine with this machine's log, as far as `kmsg` provides it.
fn log_of(node: &Node, kmsg: Option<&str>) {
    let device = node.path("host/dev/kmsg");
    drop(fs::remove_file(&device));
    if let Some(number) = kmsg {
        command(
            Command::new("mknod").arg("--mode=644").arg(&device).arg("c").args(number.split(' ')),
        );
    }
}

#[test]
fn a_kernel_log_that_cannot_be_read_is_found() {
    let test = "hardware::doctor_real::host::a_kernel_log_that_cannot_be_read_is_found";
    let Some(_dir) = inside(test, &["mount", "umount", "mknod", "setpriv", "/dev/kmsg"]) else {
        return;
    };
    run(async {
        let node = Node::new();
        let state = Mounted::of_type("tmpfs", "size=512m", &node.state());
        let host = Mounted::of_type("tmpfs", "size=64m,dev", &node.path("host"));
        SimNode::create(node.path("host")).unwrap();
        node.write_config("[telemetry]\nlisten = \"off\"\n[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\n");
        // Its `null` device marks it as a running machine, so its nodes must be devices.
        for index in 0..8 {
            node.remove_device("nvidia", index);
            command(
                Command::new("mknod").arg(node.path(&format!("host/dev/nvidia{index}"))).args([
                    "c",
                    "195",
                    &index.to_string(),
                ]),
            );
        }
        for (name, number) in [
            ("null", "1 3"),
            ("nvidiactl", "195 255"),
            ("nvidia-uvm", "510 0"),
            ("nvidia-uvm-tools", "510 1"),
        ] {
            let path = node.path("host/dev").join(name);
            drop(fs::remove_file(&path));
            command(Command::new("mknod").arg(path).arg("c").args(number.split(' ')));
        }
        let kmsg = Path::new("/dev/kmsg");
        let is_found = |said: &Said, words: &[&str]| {
            said.tells("kernel-log-unreadable", kmsg, words);
            said.tells("kernel-log-unreadable", kmsg, &["CAP_SYSLOG", "kernel-log"]);
            assert_eq!(said.code, Some(exit::FINDINGS.into()));
        };
        let restricted = fs::read_to_string("/proc/sys/kernel/dmesg_restrict")
            .is_ok_and(|flag| flag.trim() == "1");
        let without_syslog = ["setpriv", "--bounding-set=-syslog", "--inh-caps=-syslog"];
        // The daemon's access counts if there is a daemon, otherwise doctor's own.
        for has_daemon in [false, true] {
            for (log, prefix, words) in [
                (Some("1 11"), &["setpriv"][..], None),
                (None, &["setpriv"], Some("No such file")),
                (Some("1 3"), &["setpriv"], Some("not the kernel's log device")),
                (Some("1 11"), &without_syslog, Some("not permitted")),
            ] {
                if prefix.len() > 1 && !restricted {
                    say(format_args!(
                        "SKIPPED: {test}: without CAP_SYSLOG: kernel.dmesg_restrict is 0 here"
                    ));
                    continue;
                }
                log_of(&node, log);
                let daemon =
                    has_daemon.then(|| Daemon::spawn(&mut behind(prefix, &node.command(&["run"]))));
                if let Some(daemon) = &daemon {
                    daemon.logged("ready").await;
                    if words.is_some() {
                        daemon.logged("cannot read the kernel log").await;
                    }
                }
                let said = asked(behind(
                    if has_daemon { &["setpriv"] } else { prefix },
                    &node.command(&["doctor", "-o", "json"]),
                ))
                .await;
                match words {
                    Some(words) => is_found(&said, &[words]),
                    None => assert!(!said.codes().contains("kernel-log-unreadable"), "{said:#?}"),
                }
            }
        }
        drop((host, state));
    });
}

/// A user namespace with a daemon, where root is root and inotify has separate limits.
struct Namespace(Daemon);

impl Namespace {
    /// The commands that set the limits of instances and of watches.
    fn limits([instances, watches]: [usize; 2]) -> String {
        format!(
            "cd /proc/sys/user; echo {instances} > max_inotify_instances; echo {watches} > max_inotify_watches; exec \"$@\""
        )
    }

    fn of(limits: [usize; 2], daemon: &Command) -> Namespace {
        let mut command = behind(
            &[
                "unshare",
                "--user",
                "--map-root-user",
                "sh",
                "-ec",
                &Namespace::limits(limits),
                "sh",
            ],
            daemon,
        );
        Namespace(Daemon::spawn(command.env_remove("NOTIFY_SOCKET")))
    }

    /// Runs doctor in it, under other limits.
    async fn asked(&self, limits: [usize; 2], inner: &Command) -> Said {
        let pid = self.0.pid().to_string();
        let enter = [
            "nsenter",
            "--user",
            "--preserve-credentials",
            "--target",
            &pid,
            "sh",
            "-ec",
            &Namespace::limits(limits),
            "sh",
        ];
        asked(behind(&enter, inner)).await
    }

    /// The number of the daemon's watches.
    fn watches(&self) -> usize {
        let files = fs::read_dir(format!("/proc/{}/fdinfo", self.0.pid())).unwrap().flatten();
        files
            .filter_map(|file| fs::read_to_string(file.path()).ok())
            .map(|text| text.matches("inotify wd:").count())
            .sum()
    }
}

#[test]
fn exhausted_limits_of_inotify_are_found() {
    let test = "hardware::doctor_real::host::exhausted_limits_of_inotify_are_found";
    let Some(_dir) = inside(test, &["mount", "umount", "nsenter", "sh"]) else { return };
    let tried = Command::new("unshare")
        .args(["--user", "--map-root-user", "test", "-w", "/proc/sys/user/max_inotify_watches"])
        .status();
    if !tried.is_ok_and(|status| status.success()) {
        say(format_args!(
            "SKIPPED: {test}: no user namespace can be had here, or none with limits of its own"
        ));
        return;
    }
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let state = Mounted::of_type("tmpfs", "size=512m", &node.state());
        let (kubelet, gpu) = (node.start_kubelet().await, name("example.com/gpu"));
        let on = Path::new("inotify");
        let doctor = node.command(&["doctor", "-o", "json"]);
        let (instances, watches) = ("fs.inotify.max_user_instances", "fs.inotify.max_user_watches");
        let setting = |name: &str| -> u64 {
            fs::read_to_string(Path::new("/proc/sys").join(name.replace('.', "/")))
                .unwrap()
                .trim()
                .parse()
                .unwrap()
        };
        let inside = Namespace::of([99, 99], &node.command(&["run"]));
        offered(&kubelet, &gpu, 2).await;
        inside.0.logged("registered").await;
        let watches_held = inside.watches();
        assert!(watches_held > 0);
        // The daemon has one instance, and doctor tries three, with a watch each.
        for (more, codes, limit) in [
            ([3, 3], &["state-in-memory"][..], None),
            ([0, 3], &["inotify-exhausted", "state-in-memory"], Some(instances)),
            ([2, 3], &["inotify-low", "state-in-memory"], Some(instances)),
            ([3, 0], &["inotify-exhausted", "state-in-memory"], Some(watches)),
            ([3, 2], &["inotify-low", "state-in-memory"], Some(watches)),
        ] {
            let said = inside.asked([1 + more[0], watches_held + more[1]], &doctor).await;
            let Some(limit) = limit else {
                said.is(codes, &node.state(), &[]);
                continue;
            };
            said.is(codes, on, &["raise the limit", &format!("sysctl {limit}=")]);
            // The suggested command lowers no user's limit.
            let command = said.findings.iter().find(|finding| finding["code"] == codes[0]).unwrap()
                ["command"]
                .clone();
            let value =
                command.as_str().and_then(|command| command.split('=').nth(1)?.parse::<u64>().ok());
            assert!(value >= Some(2 * setting(limit)), "{command}");
        }
        drop(inside);

        // The daemon also serves without an instance, or without a watch.
        for limits in [[0, 99], [99, 0]] {
            let inside = Namespace::of(limits, &node.command(&["run"]));
            offered(&kubelet, &gpu, 2).await;
            inside.0.logged("registered").await;
            inside.asked(limits, &doctor).await.is(
                &["inotify-exhausted", "state-in-memory"],
                on,
                &["no further file can be watched"],
            );
            assert_eq!(inside.watches(), 0);
            // When the limit is raised, it gets its watches without an operator.
            inside.asked([99, 99], &doctor).await.is(&["state-in-memory"], &node.state(), &[]);
            until("the daemon's watches", || inside.watches(), |watches| *watches > 0).await;
        }
        drop(state);
    });
}

/// A pod with `hostUsers: false`: its root is another user, and the node's files belong to others.
#[test]
fn root_of_a_user_namespace_is_found() {
    let test = "hardware::doctor_real::host::root_of_a_user_namespace_is_found";
    let Some(_dir) = inside(test, &["mount", "umount", "nsenter"]) else { return };
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let state = Mounted::of_type("tmpfs", "size=512m", &node.state());
        let (_kubelet, daemon) = start(&node).await;
        doctor(&node).await.is(&["state-in-memory"], &node.state(), &[]);
        let open = |path: PathBuf, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        open(node.path(""), 0o755);
        open(node.state().join("journal"), 0o700);
        let mut pod = Command::new("unshare")
            .args(["--user", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let own = PathBuf::from(format!("/proc/{}", pod.id()));
        let namespace = |dir: &Path| fs::read_link(dir.join("ns/user")).unwrap();
        until(
            "a user namespace",
            || namespace(&own),
            |theirs| *theirs != namespace(Path::new("/proc/self")),
        )
        .await;
        for map in ["gid_map", "uid_map"] {
            fs::write(own.join(map), "0 100000 65536").unwrap();
        }
        let target = pod.id().to_string();
        let look = || {
            asked(behind(
                &["nsenter", "--user", "--target", &target],
                &node.command(&["doctor", "-o", "json"]),
            ))
        };
        let said = look().await;
        said.tells("user-namespace", Path::new("holdfast"), &["0 100000 65536", "hostUsers"]);
        // Access that the node's files deny to such a root is no fault of the node.
        assert_eq!(said.codes(), ["user-namespace", "state-in-memory"].into(), "{said:#?}");

        // With the folder and the socket open to all users, the daemon reads the peer's user from
        // the kernel.
        open(node.path("run"), 0o755);
        open(node.path("run/control.sock"), 0o666);
        let said = look().await;
        daemon.logged("only root may connect").await;
        assert_eq!(said.codes(), ["user-namespace", "state-in-memory"].into(), "{said:#?}");
        assert_eq!(said.code, Some(exit::FINDINGS.into()));
        pod.kill().unwrap();
        pod.wait().unwrap();
        drop((daemon, state));
    });
}
