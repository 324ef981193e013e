//! `intel-fpga`: answers as Intel's FPGA plugin, in its three modes. In the mode `region` the
//! runtime calls Intel's hook. The hook programs the card with the function that the pod's
//! annotations request.

use super::{Request, attribute, nodes};
use crate::domain::{ContainerEdits, Device, FpgaMode, IntelFpgaOptions};
use std::collections::BTreeSet;

/// The kind of the CDI names.
pub(super) const CDI_KIND: &str = "intel.cdi.k8s.io/fpga";

pub(super) fn edits(request: &Request<'_>, options: &IntelFpgaOptions) -> ContainerEdits {
    let mut edits =
        ContainerEdits { devices: nodes::with(request.devices, "rw"), ..ContainerEdits::default() };
    match options.mode {
        FpgaMode::Af => {}
        FpgaMode::Region => {
            edits.annotations.insert("com.intel.fpga.mode".into(), "fpga.intel.com/region".into());
            let regions: BTreeSet<&str> =
                request.devices.iter().map(|device| region(device)).collect();
            edits.cdi_devices =
                regions.iter().map(|region| format!("{CDI_KIND}={region}")).collect();
        }
        FpgaMode::RegionDevel => {
            let management: BTreeSet<&str> =
                request.devices.iter().filter_map(|device| attribute(device, "fme_node")).collect();
            edits.devices.extend(management.into_iter().map(|node| nodes::at(node, "rw")));
        }
    }
    edits
}

/// The name of a region: that of its management engine, `dfl-fme.0`.
pub(super) fn region(device: &Device) -> &str {
    attribute(device, "fme_node")
        .and_then(|node| node.rsplit('/').next())
        .unwrap_or(device.id.as_str())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, edits_of, golden, spec};
    use super::*;
    use crate::domain::Contract;

    #[test]
    fn each_mode_gives_its_nodes() {
        // Each port is a device of its own; the ports of one region share its management engine.
        let port = |number: u32| {
            device(
                &format!("0000:b1:00.0-port{number}"),
                &[&format!("/dev/dfl-port.{number}")],
                &[("fme_node", "/dev/dfl-fme.0")],
            )
        };
        for (mode, expected) in [
            (FpgaMode::Af, include_str!("golden/intel-fpga-af.json")),
            (FpgaMode::Region, include_str!("golden/intel-fpga-region.json")),
            (FpgaMode::RegionDevel, include_str!("golden/intel-fpga-regiondevel.json")),
        ] {
            let name = "fpga.intel.com/region-ce48969398f05f33946d560708be108a";
            let edits = edits_of(
                &spec(name, Contract::IntelFpga(IntelFpgaOptions { mode })),
                &[&port(0), &port(1)],
            );
            assert_eq!(golden(&edits), expected.trim_end());
        }
    }
}
