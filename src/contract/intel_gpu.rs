//! `intel-gpu`: answers as Intel's GPU plugin: card and render node, and the links in
//! `/dev/dri/by-path`. Intel's media libraries find a card by these links.

use super::{Request, nodes};
use crate::domain::{ByPath, ContainerEdits, IntelGpuOptions};

const BY_PATH: &str = "/dev/dri/by-path";

pub(super) fn edits(request: &Request<'_>, options: &IntelGpuOptions) -> ContainerEdits {
    let functions = request.devices.iter().filter_map(|device| device.pci.as_ref());
    let links = functions.flat_map(|function| {
        ["card", "render"].map(|kind| format!("{BY_PATH}/pci-{}-{kind}", function.address))
    });
    let mut links = links.filter(|link| (request.node_exists)(link)).peekable();
    let mounts = match options.by_path {
        ByPath::Single => links.map(|link| nodes::mount(link, true)).collect(),
        // A host without udev has no such folder, and a container with a missing mount does not
        // start.
        ByPath::All => links.peek().map(|_| nodes::mount(BY_PATH, true)).into_iter().collect(),
        ByPath::None => Vec::new(),
    };
    ContainerEdits {
        mounts,
        devices: nodes::with(request.devices, "rw"),
        ..ContainerEdits::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{edits_of, edits_where, function, golden, spec};
    use super::*;
    use crate::domain::{Contract, ContractKind};

    #[test]
    fn a_card_comes_with_the_links_to_it() {
        let first = function("0000:03:00.0", "i915", &["/dev/dri/card0", "/dev/dri/renderD128"]);
        let second = function("0000:4d:00.0", "i915", &["/dev/dri/card1", "/dev/dri/renderD129"]);
        // A card without displays has only a render link.
        let there = |path: &str| path != "/dev/dri/by-path/pci-0000:4d:00.0-card";
        let edits = edits_where(
            &spec("gpu.intel.com/i915", ContractKind::IntelGpu),
            &[&second, &first],
            there,
        );
        assert_eq!(golden(&edits), include_str!("golden/intel-gpu.json").trim_end());
    }

    #[test]
    fn the_links_can_be_all_or_none() {
        let gpu = function("0000:03:00.0", "xe", &["/dev/dri/card0", "/dev/dri/renderD128"]);
        let spec =
            |by_path| spec("gpu.intel.com/xe", Contract::IntelGpu(IntelGpuOptions { by_path }));
        assert_eq!(
            edits_of(&spec(ByPath::All), &[&gpu]).mounts,
            [nodes::mount("/dev/dri/by-path", true)]
        );
        assert_eq!(edits_of(&spec(ByPath::None), &[&gpu]).mounts, []);
        for by_path in [ByPath::All, ByPath::Single] {
            assert_eq!(
                edits_where(&spec(by_path), &[&gpu], |_| false).mounts,
                [],
                "no udev, no links"
            );
        }
    }
}
