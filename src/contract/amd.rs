//! `amd`: answers as ROCm's k8s-device-plugin: the compute node that all GPUs share, then the card
//! and the render node of each.

use super::{Request, nodes};
use crate::domain::ContainerEdits;

const SHARED_NODE: &str = "/dev/kfd";

pub(super) fn edits(request: &Request<'_>) -> ContainerEdits {
    let mut devices = nodes::with(request.devices, "rw");
    devices.sort_by_key(|node| node.container != SHARED_NODE);
    ContainerEdits { devices, ..ContainerEdits::default() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, edits_of, golden, spec};
    use crate::domain::ContractKind;

    #[test]
    fn the_shared_node_comes_first_and_once() {
        let first =
            device("0000:0a:00.0", &["/dev/dri/card1", "/dev/kfd", "/dev/dri/renderD129"], &[]);
        let second =
            device("0000:1a:00.0", &["/dev/kfd", "/dev/dri/card2", "/dev/dri/renderD130"], &[]);
        let edits = edits_of(&spec("amd.com/gpu", ContractKind::Amd), &[&second, &first]);
        assert_eq!(golden(&edits), include_str!("golden/amd.json").trim_end());
    }
}
