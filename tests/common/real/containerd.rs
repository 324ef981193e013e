//! containerd, with its directories below the one of the run.

use super::image::{self, PAUSE};
use super::process::Process;
use super::sandbox::output;
use super::wait_for;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use uuid::Uuid;

/// containerd 2 reads this version of the file, too.
const CONFIG: &str = r#"
version = 2
root = "DIR/containerd-root"
state = "DIR/containerd-state"
[grpc]
  address = "DIR/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "DIR/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "PAUSE"
  # Without CAP_SYS_RESOURCE, as in some machines of a CI, a container's score cannot be lowered.
  restrict_oom_score_adj = true
  # The default only since containerd 2.0.
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "DIR/cni"
    bin_dir = "PLUGINS"
"#;

/// The socket of the runtime, for the kubelet.
pub(crate) fn socket(dir: &Path) -> PathBuf {
    dir.join("containerd.sock")
}

/// Starts containerd and waits until it answers. `plugins` is the folder of the CNI plugins.
pub(crate) fn start(dir: &Path, plugins: &Path) -> Process {
    let config = CONFIG
        .replace("DIR", dir.to_str().unwrap())
        .replace("PAUSE", PAUSE)
        .replace("PLUGINS", plugins.to_str().unwrap());
    fs::create_dir_all(dir.join("cni")).unwrap();
    fs::write(dir.join("containerd.toml"), config).unwrap();
    let mut containerd = Process::start(
        Command::new("containerd").arg("--config").arg(dir.join("containerd.toml")),
        dir.join("containerd.log"),
    );
    wait_for("containerd answers", Duration::from_secs(30), || {
        containerd.check();
        // It answers before it serves the kubelet.
        let has_booted = containerd.log_text().contains("containerd successfully booted");
        let answers = || ctr(dir).arg("version").output().unwrap().status.success();
        (has_booted && answers()).then_some(())
    });
    containerd
}

/// Writes the image of the tests and imports it.
pub(crate) fn import_image(dir: &Path) {
    import(dir, &image::write(dir));
}

/// Imports the images of an archive.
pub(crate) fn import(dir: &Path, archive: &Path) {
    output(ctr(dir).args(["images", "import"]).arg(archive));
}

/// containerd's client `ctr`.
fn ctr(dir: &Path) -> Command {
    let mut ctr = Command::new("ctr");
    ctr.arg("--address").arg(socket(dir)).args(["--namespace", "k8s.io"]);
    ctr
}

/// Whether a process of a container runs.
pub(crate) fn runs(dir: &Path, container: &str) -> bool {
    let tasks = output(ctr(dir).args(["tasks", "list"]));
    tasks.lines().any(|line| line.starts_with(container) && line.ends_with("RUNNING"))
}

/// Runs `command` in a container, as `kubectl exec` does. Returns its output.
pub(crate) fn exec(dir: &Path, container: &str, command: &[&str]) -> String {
    output(
        ctr(dir)
            .args(["tasks", "exec", "--exec-id", &Uuid::now_v7().to_string(), container])
            .args(command),
    )
}
