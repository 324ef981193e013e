//! A small image in the format of `docker save`: a static busybox, and a link for each applet that
//! the pods call.

use super::sandbox::{find, output};
use serde_json::json;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The command of the sandboxes.
pub(crate) const PAUSE: &str = "holdfast.test/pause:1";
/// The command of the containers.
pub(crate) const BUSYBOX: &str = "holdfast.test/busybox:1";

const APPLETS: [&str; 5] = ["sh", "env", "ls", "nc", "sleep"];

/// Writes the archive below `dir`. Returns its path.
pub(crate) fn write(dir: &Path) -> PathBuf {
    let busybox = fs::read(find("busybox").unwrap()).unwrap();
    assert!(
        !is_dynamic(&busybox),
        "the busybox on the PATH is not static: apt-get install busybox-static"
    );

    let (root, archive) = (dir.join("image-root"), dir.join("image"));
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::create_dir_all(&archive).unwrap();
    fs::copy(find("busybox").unwrap(), root.join("bin/busybox")).unwrap();
    for applet in APPLETS {
        symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    tar(&root, &archive.join("layer.tar"));

    let config = json!({
        "architecture": architecture(),
        "os": "linux",
        "config": {"Cmd": ["/bin/sleep", "1000000"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sha256(&archive.join("layer.tar")))]},
    });
    let config_file = archive.join("config.json");
    fs::write(&config_file, config.to_string()).unwrap();
    let manifest =
        json!([{"Config": "config.json", "RepoTags": [PAUSE, BUSYBOX], "Layers": ["layer.tar"]}]);
    fs::write(archive.join("manifest.json"), manifest.to_string()).unwrap();
    let image = dir.join("image.tar");
    tar(&archive, &image);
    image
}

/// The name of this machine's architecture in image manifests.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// An archive of everything in `folder`, with plain names.
fn tar(folder: &Path, archive: &Path) {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    output(
        Command::new("tar")
            .args(["--owner=0", "--group=0", "-cf"])
            .arg(archive)
            .arg("-C")
            .arg(folder)
            .args(names),
    );
}

fn sha256(path: &Path) -> String {
    output(Command::new("sha256sum").arg(path)).split_whitespace().next().unwrap().to_owned()
}

/// Whether a 64-bit ELF file needs an interpreter (`PT_INTERP`), which the image does not have.
fn is_dynamic(elf: &[u8]) -> bool {
    let half = |at: usize| usize::from(u16::from_le_bytes([elf[at], elf[at + 1]]));
    let (headers, size, count) = (half(32), half(54), half(56));
    (0..count)
        .map(|index| headers + index * size)
        .any(|header| elf[header..header + 4] == [3, 0, 0, 0])
}
