//! The shipped image, built by the project's own script.

use super::binary::binary;
use super::image::architecture;
use super::sandbox::{find, output};
use super::{network, say};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Programs that must be on the `PATH`, and their Debian packages.
const TOOLS: [(&str, &str); 4] =
    [("python3", "python3"), ("dpkg-deb", "dpkg"), ("readelf", "binutils"), ("strip", "binutils")];

/// The name of the image after its import.
pub(crate) fn image_name() -> String {
    format!("docker.io/library/holdfast:{VERSION}")
}

/// What is missing for the image and the network of pods, and how to install it.
pub(crate) fn missing() -> Option<String> {
    if let Some((program, package)) = TOOLS.into_iter().find(|(program, _)| find(program).is_none())
    {
        return Some(format!(
            "`{program}` is missing, which makes the image: apt-get install {package}"
        ));
    }
    let has_plugins = network::plugins().is_some();
    (!has_plugins).then(|| "there are no CNI plugins: apt-get install containernetworking-plugins, or set CNI_PATH to their folder".into())
}

/// The archive of the image, with the binary under test and the glibc that the script finds.
/// Without a glibc it prints a message and returns `None`.
pub(crate) fn image(dir: &Path) -> Option<PathBuf> {
    let (stage, archive) = (dir.join("stage"), dir.join("holdfast.oci.tar"));
    fs::create_dir_all(&stage).unwrap();
    // The shipped binary has no symbols either. With them a debug build is three times as large.
    output(Command::new("strip").arg("-o").arg(stage.join("holdfast")).arg(binary()));
    // The image needs these files; no test reads them.
    fs::write(stage.join("NOTICES.gz"), "").unwrap();
    let mut build = Command::new("packaging/image/build");
    build.arg(&archive).arg(VERSION).arg(format!("{}={}", architecture(), stage.display()));
    let built = build
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("SOURCE_DATE_EPOCH", "0")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{build:?}: {told}");
    if !archive.exists() {
        say(format_args!("SKIPPED: the image and the DaemonSet were not tested: {}", told.trim()));
        return None;
    }
    Some(archive)
}
