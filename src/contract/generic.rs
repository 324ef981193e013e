//! `generic`: only the device's nodes; environment and mounts come from the configuration.

use super::{Request, nodes};
use crate::domain::ContainerEdits;

pub(super) fn edits(request: &Request<'_>) -> ContainerEdits {
    ContainerEdits { devices: nodes::of(request.devices), ..ContainerEdits::default() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, edits_of, golden, spec, with_extras};
    use crate::domain::ContractKind;

    #[test]
    fn each_node_comes_once_with_the_configured_environment_and_mounts() {
        let (a, b) = (
            device("a", &["/dev/a", "/dev/shared"], &[]),
            device("b", &["/dev/b", "/dev/shared"], &[]),
        );
        let spec = with_extras(spec("example.com/device", ContractKind::Generic));
        assert_eq!(
            golden(&edits_of(&spec, &[&b, &a, &b])),
            include_str!("golden/generic.json").trim_end()
        );
    }

    #[test]
    fn a_disk_is_named_by_its_link_and_keeps_its_path_in_the_container() {
        let mut disk = device("nvme-eui.1", &["/dev/nvme0n1"], &[]);
        disk.nodes[0].link = Some("/dev/disk/by-id/nvme-eui.1".into());
        let spec = spec("example.com/nvme", ContractKind::Generic);
        let [node] = &edits_of(&spec, &[&disk]).devices[..] else { panic!("one node") };
        assert_eq!(
            (node.host.as_str(), node.container.as_str()),
            ("/dev/disk/by-id/nvme-eui.1", "/dev/nvme0n1")
        );
    }
}
