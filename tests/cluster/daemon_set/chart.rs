//! The chart, installed, upgraded and uninstalled by Helm's own code.

use super::{CONFIG, NAMESPACE, SET, prepare, until_settled};
use crate::cluster::Cluster;
use crate::pki::kubeconfig;
use crate::racing::{DEVICES, NAME};
use crate::real::sandbox::output;
use crate::{SOON, say, wait_for};
use serde_json::json;
use std::path::Path;
use std::process::Command;

/// A Python with helm-sdkpy; `packaging/tools` makes one.
const PYTHON: &str = "HOLDFAST_HELM_PYTHON";
/// Arguments: kubeconfig, namespace, verb, chart, values.
const HELM: &str = r#"
import asyncio, helm_sdkpy, json, sys
kubeconfig, namespace, verb, chart, values = sys.argv[1:]
helm = getattr(helm_sdkpy, verb)(helm_sdkpy.Configuration(namespace=namespace, kubeconfig=kubeconfig))
more = [] if verb == "Uninstall" else [chart, json.loads(values)]
asyncio.run(helm.run("holdfast", *more, wait=verb != "Uninstall", timeout=120))
"#;

fn helm(cluster: &Cluster, python: &Path, verb: &str, config: &str) {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/helm/holdfast");
    let values = json!({"image": {"repository": "docker.io/library/holdfast"}, "config": config});
    output(
        Command::new(python)
            .args(["-c", HELM])
            .arg(kubeconfig(&cluster.dir, "admin"))
            .args([NAMESPACE, verb])
            .arg(chart)
            .arg(values.to_string())
            // Helm's caches.
            .env("HOME", &cluster.dir),
    );
}

pub(crate) fn by_helm(cluster: &mut Cluster) {
    let Some(python) = std::env::var_os(PYTHON) else {
        return say(format_args!(
            "SKIPPED: the chart was not installed: {PYTHON} is not set; it names a Python with helm-sdkpy"
        ));
    };
    let python = Path::new(&python);
    if prepare(cluster).is_none() {
        return;
    }
    helm(cluster, python, "Install", CONFIG);
    until_settled(cluster);
    cluster.until_allocatable(NAME, DEVICES);
    let stays = cluster.create_stays("charted");
    let two = format!(
        "{CONFIG}[[resource]]\nname = \"example.com/added\"\nclass = \"char\"\npaths = [\"/dev/counted\"]\n"
    );
    helm(cluster, python, "Upgrade", &two);
    until_settled(cluster);
    cluster.until_allocatable("example.com/added", 1);
    assert_eq!(cluster.holdings(stays.len()), stays, "a pod was restarted, or has another device");
    helm(cluster, python, "Uninstall", "");
    wait_for("the chart's objects are gone", SOON, || cluster.api.get(SET).is_none().then_some(()));
    cluster.until_allocatable(NAME, 0);
    say(format_args!(
        "the chart is installed, upgraded with another configuration, and uninstalled by Helm: {} pods kept their \
         devices",
        stays.len()
    ));
}
