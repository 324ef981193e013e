//! A pod with a GPU and an adapter gets both under one switch, in any order of the kubelet's calls.

use crate::common::{Node, name, offered, run, soon};
use holdfast::domain::DeviceId;
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::kubelet::PodSpec;
use std::collections::BTreeSet;

const CONFIG: &str = r#"
[telemetry]
listen = "off"

[[resource]]
name = "example.com/gpu"
class = "gpu"

[[resource]]
name = "example.com/hca"
class = "rdma"
select = { vf = true }
"#;

/// The sockets of a container's devices; each of the two sockets has one switch.
fn switches(node: &SimNode, ids: impl IntoIterator<Item = DeviceId>) -> BTreeSet<u8> {
    let address = |id: &DeviceId| {
        let gpu = (0..holdfast::lab::sim::hardware::GPUS)
            .find(|index| node.gpu_uuid(*index) == id.as_str());
        gpu.map_or_else(|| id.as_str().parse().unwrap(), |index| node.gpu_address(index))
    };
    ids.into_iter().map(|id| address(&id).bus / 0x80).collect()
}

#[test]
fn a_gpu_and_an_adapter_of_one_container_are_under_one_switch() {
    run(async {
        let node = Node::new();
        let hardware = SimNode::create(node.path("host")).unwrap();
        node.write_config(CONFIG);
        let kubelet = node.start_kubelet().await;
        let _app = node.start_app().await;
        let (gpu, hca) = (name("example.com/gpu"), name("example.com/hca"));
        offered(&kubelet, &gpu, 8).await;
        offered(&kubelet, &hca, 8).await;
        // One adapter of the second socket stays taken: the next one would be taken next to it, and
        // the next GPU on the first.
        let alone: Vec<PodSpec> = (0..5)
            .map(|n| PodSpec::new("default", format!("alone-{n}")).app("main", &hca, 1))
            .collect();
        for pod in &alone {
            soon("a pod", kubelet.add_pod(pod.clone())).await;
        }
        for pod in &alone[..4] {
            kubelet.delete_pod(&pod.uid).unwrap();
        }
        let left = kubelet.devices(&alone[4].uid, "main");
        assert_eq!(switches(&hardware, left.into_values().flatten()), [1].into());
        // On a busy machine one of the kubelet's calls may come too late; without affinity all
        // three pods are split.
        let mut together = 0;
        for number in 0..3 {
            let mut pod = PodSpec::new("default", format!("pod-{number}")).app("main", &gpu, 1);
            pod.containers[0].resources.insert(hca.clone(), 1);
            let uid = pod.uid.clone();
            soon("a pod", kubelet.add_pod(pod)).await;
            let devices = kubelet.devices(&uid, "main");
            assert_eq!(devices.len(), 2);
            together +=
                usize::from(switches(&hardware, devices.values().flatten().cloned()).len() == 1);
        }
        assert!(together > 0, "no GPU is under the switch of its adapter");
    });
}
