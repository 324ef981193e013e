//! A machine for the tests of pictures.

use super::holder::Holder;
use super::leaf::Leaf;
use crate::domain::{
    Attributes, Device, DeviceClass, DeviceId, DeviceNode, PciFunction, Timestamp,
};

/// A device at an address, below these bridges, near a node.
pub(crate) fn leaf(address: &str, class: DeviceClass, bridges: &[&str], numa: Option<u32>) -> Leaf {
    let function = PciFunction {
        bridges: bridges.iter().map(|bridge| bridge.parse().unwrap()).collect(),
        ..PciFunction::at(address.parse().unwrap())
    };
    Leaf::of(&Device {
        id: DeviceId::new(address),
        key: format!("pci:{address}"),
        class,
        pci: Some(Box::new(function)),
        numa_nodes: numa.into_iter().collect(),
        nodes: Vec::new(),
        attributes: Attributes::default(),
    })
}

/// A virtual function of a device.
pub(crate) fn vf(of: &Leaf, address: &str) -> Leaf {
    let bridges: Vec<String> = of.bridges.iter().map(ToString::to_string).collect();
    let bridges: Vec<&str> = bridges.iter().map(String::as_str).collect();
    let whole = leaf(address, of.class, &bridges, of.numa_node);
    Leaf { is_vf: true, above: of.pci_address.map(|pf| pf.to_string()), ..whole }
}

/// A node of `/dev`.
pub(crate) fn node(path: &str) -> Leaf {
    Leaf::of(&Device {
        id: DeviceId::new(path),
        key: format!("dev:{path}"),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: vec![DeviceNode::at(path)],
        attributes: Attributes::default(),
    })
}

/// A pod that holds a device.
pub(crate) fn holder(name: &str) -> Holder {
    Holder {
        namespace: Some("ml".into()),
        pod: Some(name.into()),
        pod_uid: Some("u-1".into()),
        container: Some("main".into()),
        since: Timestamp(1_700_000_000_000),
        pod_seen: None,
    }
}

/// Two sockets: a switch with two GPUs and an adapter with virtual functions, a GPU of its own,
/// and a node of `/dev`.
pub(crate) fn machine() -> Vec<Leaf> {
    let offered = |leaf: Leaf| Leaf {
        resources: vec!["nvidia.com/gpu".into()],
        health: Some("Healthy"),
        ..leaf
    };
    let switch = ["0000:15:01.0", "0000:16:00.0"];
    let below = |port| [switch[0], switch[1], port];
    let adapter = Leaf {
        names: vec!["mlx5_0".into()],
        ..leaf("0000:1a:00.0", DeviceClass::Rdma, &below("0000:17:02.0"), Some(0))
    };
    let first = offered(leaf("0000:18:00.0", DeviceClass::Gpu, &below("0000:17:00.0"), Some(0)));
    let first = Leaf {
        holders: vec![holder("train-0")],
        model: Some("NVIDIA H100 80GB HBM3".into()),
        ..first
    };
    let second = offered(leaf("0000:19:00.0", DeviceClass::Gpu, &below("0000:17:01.0"), Some(0)));
    let second = Leaf {
        health: Some("Unhealthy"),
        reason: Some("xid".into()),
        detail: Some("Xid 79".into()),
        ..second
    };
    let vfs = (1..=64).map(|n| vf(&adapter, &format!("0000:1a:{:02x}.{:x}", n / 8, n % 8)));
    let mut leaves: Vec<Leaf> = vfs.collect();
    let held = leaves.get_mut(40).unwrap();
    held.holders = vec![holder("net-0")];
    leaves.extend([first, second, adapter]);
    leaves.push(offered(leaf("0000:9a:00.0", DeviceClass::Gpu, &["0000:97:01.0"], Some(1))));
    leaves.push(Leaf {
        resources: vec!["example.com/fuse".into()],
        health: Some("Healthy"),
        ..node("/dev/fuse")
    });
    leaves
}
