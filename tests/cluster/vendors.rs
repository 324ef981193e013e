//! Claims in the form of those that vendors show for their drivers, on a made node: they get the
//! devices of Holdfast by the vendor's class and attributes.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::objects::{claim_of, pod, text_of};
use crate::{SOON, hardware, say, wait_for};
use serde_json::{Value, json};

const TEMPLATES: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates";
const SCRIPT: &str = "ls /dev/nvidia* /dev/infiniband/*; echo done; exec sleep 1000000";
/// The model of the made GPUs is NVIDIA H100 80GB HBM3. Their driver has no NVML here.
const H100: &str = "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*h100.*$') \
     && device.attributes['gpu.nvidia.com'].driverVersion.isGreaterThan(semver('500.0.0'))";
/// A resource `example.com/verbs` selects the functions.
const VERBS: &str = "device.attributes['k8s.cni.cncf.io'].resourceName == 'verbs' && \
     device.attributes['sriovnetwork.k8snetworkplumbingwg.io'].rdmaCapable";

/// A claim with one request.
fn devices(class: &str, count: usize, expression: Option<&str>) -> Value {
    let selectors: Vec<Value> =
        expression.iter().map(|text| json!({"cel": {"expression": text}})).collect();
    json!({"requests": [{
        "name": "device",
        "exactly": {"deviceClassName": class, "count": count, "selectors": selectors},
    }]})
}

/// A pod whose claim is made from a template.
fn pod_of_template(name: &str, template: &str) -> Value {
    let mut pod = pod(name, &["device"], SCRIPT);
    pod["spec"]["resourceClaims"] =
        json!([{"name": "device", "resourceClaimTemplateName": template}]);
    pod
}

/// How many of the nodes `<prefix><number>` a container sees.
fn seen(log: &str, prefix: &str) -> usize {
    let is_number = |line: &str| {
        let number = line.split_once(prefix).map(|(_, number)| number);
        number.is_some_and(|it| !it.is_empty() && it.bytes().all(|b| b.is_ascii_digit()))
    };
    log.lines().filter(|line| is_number(line)).count()
}

pub(crate) fn claims_for_their_drivers(cluster: &mut Cluster) {
    let daemon = hardware::daemon(cluster);
    a_template_is_used_by_two_pods(cluster);
    for (name, wanted, prefix, count) in [
        ("h100", devices("gpu.nvidia.com", 2, Some(H100)), "/dev/nvidia", 2),
        ("verbs", devices(SRIOV, 1, Some(VERBS)), "/dev/infiniband/uverbs", 1),
    ] {
        cluster.api.create(CLAIMS, &claim_of(name, wanted));
        cluster.api.create(PODS, &pod(name, &[name], SCRIPT));
        let pod = cluster.running(name);
        let log = cluster.printed(&pod, 0, "done");
        assert_eq!(seen(&log, prefix), count, "{log}");
        cluster.end(name);
        daemon.wait_until_released(name);
    }
    // The node has no MIG instance. Devices without the attribute are no error.
    cluster.api.create(CLAIMS, &claim_of("mig", devices("mig.nvidia.com", 1, None)));
    cluster.api.create(PODS, &pod("mig", &["mig"], SCRIPT));
    cluster.unschedulable("mig");
    parameters_are_refused(cluster, &daemon);
    say(format_args!("claims for the drivers of vendors get devices"));
}

const SRIOV: &str = "sriovnetwork.k8snetworkplumbingwg.io";

fn a_template_is_used_by_two_pods(cluster: &mut Cluster) {
    let template = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "single-gpu"},
        "spec": {"spec": {"devices": devices("gpu.nvidia.com", 1, None)}},
    });
    cluster.api.create(TEMPLATES, &template);
    let names = ["single-1", "single-2"];
    for name in names {
        cluster.api.create(PODS, &pod_of_template(name, "single-gpu"));
    }
    let logs = names.map(|name| {
        let pod = cluster.running(name);
        cluster.printed(&pod, 0, "done")
    });
    assert!(logs.iter().all(|log| seen(log, "/dev/nvidia") == 1), "{logs:?}");
    assert_ne!(logs[0], logs[1], "both have the same GPU");
    names.into_iter().for_each(|name| cluster.end(name));
    cluster.api.delete(&format!("{TEMPLATES}/single-gpu"), None);
}

fn parameters_are_refused(cluster: &mut Cluster, daemon: &Daemon) {
    let mut wanted = devices("gpu.nvidia.com", 1, None);
    wanted["config"] = json!([{
        "requests": ["device"],
        "opaque": {
            "driver": "gpu.nvidia.com",
            "parameters": {
                "apiVersion": "resource.nvidia.com/v1beta1",
                "kind": "GpuConfig",
                "sharing": {"strategy": "TimeSlicing"},
            },
        },
    }]);
    cluster.api.create(CLAIMS, &claim_of("sliced", wanted));
    cluster.api.create(PODS, &pod("sliced", &["sliced"], SCRIPT));
    wait_for("the parameters are refused", SOON, || {
        let log = daemon.log();
        log.contains("`GpuConfig of resource.nvidia.com/v1beta1` for the driver gpu.nvidia.com")
            .then_some(())
    });
    let claim = cluster.api.get(&format!("{CLAIMS}/sliced")).unwrap();
    assert!(daemon.holders(&text_of(&claim, "name")).is_empty(), "{claim}");
}
