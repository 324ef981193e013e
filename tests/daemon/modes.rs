//! The permissions of Holdfast's files. The ledger, with the environments of grants, is readable by
//! root alone under any past or present umask. The container runtime and Multus can read their
//! files.

use crate::common::inside::say;
use crate::common::{Daemon, Node, allocate, dial, is_root, name, offered, resource, run};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A verb under another umask.
fn under(umask: &str, command: &Command) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    shell
}

/// Everything at and below a path, with its mode.
fn modes(path: &Path) -> BTreeMap<PathBuf, u32> {
    let about = fs::symlink_metadata(path).unwrap();
    let mut modes = BTreeMap::from([(path.to_owned(), about.mode() & 0o7777)]);
    if about.is_dir() {
        modes.extend(
            fs::read_dir(path).unwrap().flat_map(|entry| self::modes(&entry.unwrap().path())),
        );
    }
    modes
}

fn is_private(path: &Path) {
    for (path, mode) in modes(path) {
        let allowed = if path.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode & !allowed, 0, "{} has the mode {mode:o}", path.display());
    }
}

fn node() -> Node {
    let node = Node::with(&[("sensor", 2)]);
    let (cdi, info) = (node.path("out/cdi"), node.path("out/dp"));
    let folders = format!(
        "[cdi]\ndirectory = {cdi:?}\n[device_info]\ndirectory = {info:?}\n[labels]\nfeatures_d = {:?}\n",
        node.path("out/nfd")
    );
    node.write_config(&format!(
        "[telemetry]\nlisten = \"off\"\n{folders}{}env = {{ TOKEN = \"s3cret\" }}\ncdi = [\"cri\"]\n",
        resource("sensor")
    ));
    node
}

/// Grants one device, and waits for the log line.
async fn granted(node: &Node, daemon: &mut Daemon) {
    let (kubelet, sensor) = (node.start_kubelet().await, name("example.com/sensor"));
    offered(&kubelet, &sensor, 2).await;
    let mut api = dial(&kubelet, node, &sensor).await;
    allocate(&mut api, &["dev:sensor0"]).await.unwrap();
    daemon.logged("grant recorded").await;
}

#[test]
fn under_any_umask_the_ledger_is_private_and_public_files_are_readable() {
    for umask in ["0", "022", "0777"] {
        run(async {
            let node = node();
            fs::create_dir_all(node.path("kubelet/device-plugins")).unwrap();
            let mut daemon = Daemon::spawn(&mut under(umask, &node.command(&["run"])));
            granted(&node, &mut daemon).await;
            [node.state(), node.path("run"), node.sockets()]
                .iter()
                .for_each(|path| is_private(path));
            assert!(
                modes(&node.state()).len() > 4
                    && modes(&node.path("run")).len() == 3
                    && modes(&node.sockets()).len() > 1
            );
            let open = modes(&node.path("out"));
            assert!(open.keys().filter(|path| path.is_file()).count() >= 2, "{open:?}");
            for (path, mode) in open {
                assert_eq!(
                    mode,
                    if path.is_dir() { 0o755 } else { 0o644 },
                    "{} has the mode {mode:o}",
                    path.display()
                );
            }
            daemon.signal(nix::sys::signal::Signal::SIGTERM);
            assert!(daemon.ended().await.success());
            // By now sled has written too.
            is_private(&node.state());
            let bundle = node.path("bundle.tar");
            let made =
                under(umask, &node.command(&["doctor", "--bundle", bundle.to_str().unwrap()]))
                    .output()
                    .unwrap();
            assert!(bundle.is_file(), "{}", String::from_utf8_lossy(&made.stderr));
            is_private(&bundle);
            let export = node.output(&["ledger", "export"]).stdout;
            fs::write(node.path("export"), export).unwrap();
            fs::remove_dir_all(node.state()).unwrap();
            let imported = under(
                umask,
                &node.command(&["ledger", "import", node.path("export").to_str().unwrap()]),
            )
            .output()
            .unwrap();
            assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
            is_private(&node.state());
        });
    }
}

#[test]
fn an_open_state_directory_of_an_earlier_version_is_made_private_and_logged() {
    run(async {
        let node = node();
        let mut daemon = node.start_daemon();
        granted(&node, &mut daemon).await;
        daemon.signal(nix::sys::signal::Signal::SIGTERM);
        daemon.ended().await;
        fs::create_dir_all(node.state().join("db.quarantine-1/blobs")).unwrap();
        let open = |path: &Path| {
            for (path, _) in modes(path) {
                fs::set_permissions(
                    &path,
                    Permissions::from_mode(if path.is_dir() { 0o777 } else { 0o666 }),
                )
                .unwrap();
            }
        };
        [node.path("run"), node.sockets()]
            .iter()
            .for_each(|path| fs::create_dir_all(path).unwrap());
        [node.state(), node.path("run"), node.sockets()].iter().for_each(|path| open(path));
        let daemon = node.start_daemon();
        daemon.logged("the state directory was accessible to other users; its access is now restricted to root").await;
        daemon
            .logged(
                "the run directory was writable by other users; their write access is now removed",
            )
            .await;
        daemon.logged("ready").await;
        [node.state(), node.sockets()].iter().for_each(|path| is_private(path));
        assert_eq!(
            fs::metadata(node.path("run")).unwrap().mode() & 0o7777,
            0o755,
            "no other user replaces the sockets in it"
        );
        drop(daemon);
        let daemon = node.start_daemon();
        daemon.logged("ready").await;
        assert!(
            !daemon.log().iter().any(|line| line.contains("accessible to other users")),
            "it is logged once"
        );
    });
}

/// Readers of the files without root get an error about that, not the message that there is no
/// ledger.
#[test]
fn other_users_cannot_read_the_files() {
    if !is_root() {
        say("SKIPPED: only root can become another user");
        return;
    }
    run(async {
        let node = node();
        let mut daemon = node.start_daemon();
        granted(&node, &mut daemon).await;
        drop(daemon);
        // The test's folder and the binary's folder must allow access by other users, as far as
        // this test can set that.
        fs::set_permissions(node.path(""), Permissions::from_mode(0o755)).unwrap();
        let program = node.path("holdfast");
        fs::copy(node.command(&[]).get_program(), &program).unwrap();
        for verb in [
            &["who"][..],
            &["who", "dev:sensor0"],
            &["history"],
            &["ledger", "export"],
            &["ledger", "verify"],
        ] {
            let refused = Command::new(&program)
                .args(node.command(verb).get_args())
                .uid(65534)
                .gid(65534)
                .output()
                .unwrap();
            let said = String::from_utf8(refused.stderr).unwrap();
            assert!(!refused.status.success() && refused.stdout.is_empty(), "{verb:?}: {said}");
            assert!(
                said.contains("root") && !said.contains("no Holdfast has run"),
                "{verb:?}: {said}"
            );
        }
        let shown = Command::new(&program)
            .args(node.command(&["discover"]).get_args())
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap();
        assert!(
            String::from_utf8(shown.stderr)
                .unwrap()
                .contains("the ids and holders of the ledger are not shown")
        );
    });
}

/// The copy of the database is removed with its reader, also when the reader fails. Without space
/// for it, the rest is printed.
#[test]
fn no_copy_of_the_history_is_left() {
    run(async {
        let node = node();
        let mut daemon = node.start_daemon();
        granted(&node, &mut daemon).await;
        daemon.signal(nix::sys::signal::Signal::SIGTERM);
        daemon.ended().await;
        let scratch = node.path("scratch");
        fs::create_dir(&scratch).unwrap();
        let history = |tmp: &Path| node.command(&["history"]).env("TMPDIR", tmp).output().unwrap();
        let left = || fs::read_dir(&scratch).unwrap().count();
        assert!(history(&scratch).status.success());
        assert_eq!(left(), 0);
        // A database that cannot be copied completely.
        let log = node.state().join("db/db");
        fs::remove_file(&log).unwrap();
        fs::create_dir_all(log.join("not a file")).unwrap();
        drop(history(&scratch));
        assert_eq!(left(), 0);
        let nowhere = history(&node.path("nowhere"));
        assert!(
            String::from_utf8(nowhere.stderr)
                .unwrap()
                .contains("some released grants are missing here")
        );
    });
}
