//! `xilinx`: answers as the device plugin of Xilinx' FPGA as a service. Each node of a card is
//! passed as a device and also as a mount.

use super::{Request, nodes};
use crate::domain::{ContainerEdits, Device, PciAddress, XilinxOptions};

pub(super) fn edits(request: &Request<'_>, options: &XilinxOptions) -> ContainerEdits {
    let mut paths: Vec<String> = Vec::new();
    for device in request.devices {
        let management =
            options.management_node.then(|| management_node(request, device)).flatten();
        let user = device.nodes.iter().map(|node| node.host.clone());
        for path in management.into_iter().chain(user).chain(dma_node(request, device)) {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
    }
    ContainerEdits {
        devices: paths.iter().map(|path| nodes::at(path, "rwm")).collect(),
        mounts: paths.iter().map(|path| nodes::mount(path, false)).collect(),
        ..ContainerEdits::default()
    }
}

/// The management node of a card: it belongs to another function of the same slot. In a virtual
/// machine it is absent.
fn management_node(request: &Request<'_>, device: &Device) -> Option<String> {
    let own = device.pci.as_ref()?.address;
    let others = (0..8)
        .filter(|function| *function != own.function)
        .map(|function| PciAddress { function, ..own });
    others
        .map(|address| format!("/dev/xclmgmt{}", instance(address)))
        .find(|node| (request.node_exists)(node))
}

/// The node of the DMA queues, for shells that have them.
fn dma_node(request: &Request<'_>, device: &Device) -> Option<String> {
    let node = format!("/dev/xfpga/dma.qdma.u{}.0", instance(device.pci.as_ref()?.address));
    (request.node_exists)(&node).then_some(node)
}

/// The number of a function for Xilinx' drivers: its address as one integer.
fn instance(address: PciAddress) -> u64 {
    (u64::from(address.domain) << 16)
        | (u64::from(address.bus) << 8)
        | (u64::from(address.device) << 3)
        | u64::from(address.function)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{edits_where, function, golden, paths, spec};
    use super::*;
    use crate::domain::{Contract, ContractKind};

    /// 0xd8 is 216: `d8:00.0` has the number 55296.
    fn card() -> Device {
        function("0000:d8:00.1", "xocl", &["/dev/dri/renderD128"])
    }

    #[test]
    fn a_card_has_a_management_a_user_and_a_dma_node() {
        let there =
            |path: &str| ["/dev/xclmgmt55296", "/dev/xfpga/dma.qdma.u55297.0"].contains(&path);
        let edits = edits_where(
            &spec("amd.com/xilinx_u250_gen3x16_xdma_shell_4_1-0", ContractKind::Xilinx),
            &[&card()],
            there,
        );
        assert_eq!(golden(&edits), include_str!("golden/xilinx.json").trim_end());
    }

    #[test]
    fn what_is_not_there_or_not_wanted_is_left_out() {
        let spec = spec("amd.com/u250", Contract::Xilinx(XilinxOptions { management_node: false }));
        assert_eq!(
            paths(&edits_where(&spec, &[&card()], |path| path.contains("xclmgmt"))),
            ["/dev/dri/renderD128"]
        );
    }
}
