//! The pod of the shipped DaemonSet, and its configuration.

use crate::CONFIG;
use crate::real::shipped::image_name;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const DAEMON_SET: &str = include_str!("../../packaging/kustomize/base/daemonset.yaml");
/// A file of the base's ConfigMap.
const TELEMETRY: &str = include_str!("../../packaging/kustomize/base/telemetry.toml");
/// The image's name in the template. A kustomization replaces it.
const IMAGE: &str = "holdfast";

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
    spec["containers"][0]["image"] = image_name().into();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "kube-system", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    })
}
