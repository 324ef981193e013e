//! The shipped files: the image, built by the project's own script, and the pod of the DaemonSet.

use crate::image::architecture;
use crate::network;
use crate::real::binary::binary;
use crate::sandbox::{find, output};
use crate::{CONFIG, say};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const DAEMON_SET: &str = include_str!("../../packaging/kustomize/base/daemonset.yaml");
/// A file of the base's ConfigMap.
const TELEMETRY: &str = include_str!("../../packaging/kustomize/base/telemetry.toml");
/// The image's name in the template. A kustomization replaces it.
const IMAGE: &str = "holdfast";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Programs that must be on the `PATH`, and their Debian packages.
const TOOLS: [(&str, &str); 4] =
    [("python3", "python3"), ("dpkg-deb", "dpkg"), ("readelf", "binutils"), ("strip", "binutils")];

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

/// The base's ConfigMap with the tests' resources, as a folder with the layout of the template.
pub(crate) fn config(dir: &Path) -> PathBuf {
    let folder = dir.join("config");
    let (_, volumes) = template();
    let map = volumes.iter().find_map(|volume| volume["configMap"].as_object()).unwrap();
    for item in map["items"].as_array().unwrap() {
        let text = match item["key"].as_str().unwrap() {
            "config.toml" => CONFIG,
            "telemetry.toml" => TELEMETRY,
            other => panic!("the base's config map has no `{other}`"),
        };
        let file = folder.join(item["path"].as_str().unwrap());
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    folder
}

/// The DaemonSet's template, and its volumes.
fn template() -> (Value, Vec<Value>) {
    let set: Value = serde_saphyr::from_str(DAEMON_SET).unwrap();
    let template = set["spec"]["template"].clone();
    let volumes = template["spec"]["volumes"].as_array().unwrap().clone();
    (template, volumes)
}

/// A pod of the DaemonSet. A static pod cannot refer to other objects: it has no service account,
/// and its configuration comes from a folder. The image has the name that a kustomization sets.
/// Everything else is as in the template.
pub(crate) fn pod(name: &str, config: &Path) -> Value {
    let (mut template, mut volumes) = template();
    let spec = template["spec"].as_object_mut().unwrap();
    spec.remove("serviceAccountName").unwrap();
    let map = volumes.iter_mut().find(|volume| volume.get("configMap").is_some()).unwrap();
    *map = json!({"name": map["name"], "hostPath": {"path": config, "type": "Directory"}});
    spec["volumes"] = volumes.into();
    assert_eq!(spec["containers"][0]["image"], IMAGE);
    spec["containers"][0]["image"] = format!("docker.io/library/{IMAGE}:{VERSION}").into();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "kube-system", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    })
}
