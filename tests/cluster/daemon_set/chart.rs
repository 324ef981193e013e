//! The chart, installed, upgraded and uninstalled by Helm's own code.

use super::workload::{holder, holders};
use super::{CONFIG, NAMESPACE, SET, prepare, until_settled};
use crate::api::PODS;
use crate::cluster::Cluster;
use crate::pki::kubeconfig;
use crate::racing::{DEVICES, NAME};
use crate::real::sandbox::output;
use crate::{SOON, say, wait_for};
use holdfast::domain::Timestamp;
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

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

/// Who had a device at a time in the past, by `kubectl holdfast` as docs/kubectl.md has it.
fn check_who_had_it(cluster: &mut Cluster) {
    cluster.create_operator();
    cluster.api.create(PODS, &holder("had-it"));
    cluster.running("had-it");
    let ask = |cluster: &Cluster, words: &[&str]| {
        let (code, document, stderr, took) = cluster.plugin(&[words, &["-o", "json"]].concat());
        (code, holders(&document), stderr, took)
    };
    let device = wait_for("`kubectl holdfast who` names the pod", SOON, || {
        let (code, holders, stderr, _) = ask(cluster, &["who"]);
        assert_eq!(code, 0, "{stderr}");
        holders.get("had-it").cloned()
    });
    let then = Timestamp::from_system(SystemTime::now()).to_string();
    cluster.end("had-it");
    wait_for("no pod has the device", SOON, || {
        let (code, ..) = ask(cluster, &["who", &device]);
        (code == 8).then_some(())
    });
    let (code, held, stderr, took) = ask(cluster, &["who", &device, "--at", &then]);
    assert_eq!((code, held.get("had-it")), (0, Some(&device)), "{held:?} {stderr}");
    say(format_args!(
        "`kubectl holdfast who {device} --at {then}` names the pod that had it, through the kubelet after {took:.1?}"
    ));
    cluster.delete_operator();
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
    check_who_had_it(cluster);
    helm(cluster, python, "Uninstall", "");
    wait_for("the chart's objects are gone", SOON, || cluster.api.get(SET).is_none().then_some(()));
    cluster.until_allocatable(NAME, 0);
    say(format_args!(
        "the chart is installed, upgraded with another configuration, and uninstalled by Helm: {} pods kept their \
         devices",
        stays.len()
    ));
}
