//! `rdma-shared`: answers as Mellanox' shared RDMA device plugin: the nodes of all adapters of the
//! pool, for any requested id.

use super::{Request, nodes};
use crate::domain::ContainerEdits;

pub(super) fn edits(request: &Request<'_>) -> ContainerEdits {
    let mut devices = nodes::with(request.devices, "rwm");
    devices.sort_by_key(|node| nodes::rdma_kind(&node.container));
    ContainerEdits { devices, ..ContainerEdits::default() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, edits_of, golden, spec};
    use crate::domain::ContractKind;

    #[test]
    fn the_nodes_of_an_adapter_may_be_made_too() {
        let nodes =
            ["uverbs7", "issm3", "umad3", "rdma_cm"].map(|name| format!("/dev/infiniband/{name}"));
        let adapter = device("506b:4b03:003c:eee8", &nodes.each_ref().map(String::as_str), &[]);
        let edits = edits_of(&spec("rdma/hca_shared", ContractKind::RdmaShared), &[&adapter]);
        assert_eq!(golden(&edits), include_str!("golden/rdma-shared.json").trim_end());
    }
}
