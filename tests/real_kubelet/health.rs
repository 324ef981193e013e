//! A device that fails under a pod. The kubelet reports it in the pod's status, the pod continues
//! to run, and the status clears when the device recovers.

use crate::checks::{of, running};
use crate::daemon::Daemon;
use crate::node::Node;
use crate::{EXCLUSIVE, SOON, say, wait_for};
use serde_json::Value;
use std::time::Instant;

/// The health of a pod's devices in its status (`allocatedResourcesStatus`), by id.
fn told(node: &Node, pod: &str) -> Option<Vec<(String, String)>> {
    let list = node.pods.list()?;
    let pod = list["items"]
        .as_array()?
        .iter()
        .find(|item| item["metadata"]["name"] == format!("{pod}-node"))?;
    let resources = pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"].as_array()?;
    let devices =
        resources.iter().filter_map(|resource| resource["resources"].as_array()).flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Some(devices.map(|device| (text(&device["resourceID"]), text(&device["health"]))).collect())
}

pub(crate) fn a_failed_device_is_reported_in_the_status_of_its_running_pod(
    node: &Node,
    daemon: &Daemon,
) {
    let before = running(node, "first");
    let grants = daemon.who();
    let held = of(&grants, EXCLUSIVE)
        .find(|held| held.holder.as_ref().is_some_and(|holder| holder.contains(&before.uid)));
    let device = held.unwrap().devices.first().unwrap().clone();
    let says = |health: &str| {
        let began = Instant::now();
        wait_for(&format!("the pod's status has {health}"), SOON, || {
            let told = told(node, "first")?;
            told.iter().any(|(id, said)| *id == device && said == health).then_some(())
        });
        began.elapsed().as_millis()
    };
    // A kubelet before 1.36 reports the health of devices only behind a feature gate.
    if wait_for("the kubelet's pods", SOON, || node.pods.list()) != Value::Null
        && told(node, "first").is_none()
    {
        return say(format_args!(
            "SKIPPED: this kubelet does not report a pod's devices (feature gate ResourceHealthStatus)"
        ));
    }
    says("Healthy");
    daemon.instruct(&["device", "cordon", &device, "--reason", "a test"]);
    let sick = says("Unhealthy");
    assert_eq!(running(node, "first"), before, "it runs on");
    daemon.instruct(&["device", "uncordon", &device]);
    let well = says("Healthy");
    assert_eq!(running(node, "first"), before, "nothing was restarted");
    say(format_args!(
        "a device is cordoned under its pod: the pod's status is Unhealthy {sick} ms later, and Healthy {well} ms after the uncordon"
    ));
}
