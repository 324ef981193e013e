//! What labels describe of a node with GPUs of NVIDIA's driver, from the devices of a scan and
//! NVML's answers.

use super::nvidia::driver_version;
use super::profiles::MIG;
use crate::domain::{
    Device, DeviceClass, GpuDescription, NvidiaGpu, NvidiaInstance, NvidiaNode, NvmlSnapshot,
    PciAddress,
};
use crate::host::{HostRoot, ReadFailure};
use std::sync::Arc;

/// The product name of the machine. On EC2 it is the instance type.
const MACHINE: &str = "sys/class/dmi/id/product_name";

/// The node, as labels describe it.
///
/// # Errors
/// If a file cannot be read.
pub fn nvidia_node(
    root: &HostRoot,
    devices: &[Arc<Device>],
    nvml: &NvmlSnapshot,
) -> Result<NvidiaNode, ReadFailure> {
    let gpus: Vec<NvidiaGpu> =
        devices.iter().filter_map(|device| gpu(device, devices, nvml)).collect();
    if gpus.is_empty() {
        return Ok(NvidiaNode::default());
    }
    let root = root.recording();
    let node = NvidiaNode { driver: driver_version(&root), machine: root.read(MACHINE), gpus };
    match root.take_failures().into_iter().next() {
        Some(failure) => Err(failure),
        None => Ok(node),
    }
}

/// A GPU that the driver lists and uses. The driver numbers only these.
fn gpu(device: &Device, all: &[Arc<Device>], nvml: &NvmlSnapshot) -> Option<NvidiaGpu> {
    let function = device.pci.as_deref().filter(|_| {
        device.class == DeviceClass::Gpu
            && device.attribute("part").is_none()
            && device.attribute("index").is_some()
    })?;
    let address = function.address;
    let description = nvml.gpus.get(&address).and_then(|gpu| gpu.description.clone());
    let mut instances: Vec<NvidiaInstance> =
        all.iter().filter_map(|part| instance(part, address, description.as_ref())).collect();
    instances.sort_by_key(|instance| instance.place);
    Some(NvidiaGpu {
        address,
        model: device.attribute("model").map(str::to_owned),
        class: function.class,
        in_mig_mode: device.attribute("parts") == Some(MIG),
        instances,
        description,
    })
}

fn instance(
    part: &Device,
    gpu: PciAddress,
    description: Option<&GpuDescription>,
) -> Option<NvidiaInstance> {
    let is_its = part.attribute("part") == Some(MIG)
        && part.pci.as_deref().is_some_and(|function| function.address == gpu);
    let number = |name| part.attribute(name)?.parse().ok();
    let place = is_its.then_some((number("gi")?, number("ci")?))?;
    Some(NvidiaInstance {
        place,
        profile: part.attribute("mig_profile").map(str::to_owned),
        attributes: description.and_then(|of| of.instances.get(&place).copied()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{DiscoverInput, discover_with, scan, testing::write};
    use super::*;
    use crate::domain::{MigAttributes, MigInstance, NvmlGpu};
    use std::collections::BTreeMap;

    #[test]
    fn a_node_is_described_by_the_drivers_files_and_by_nvml() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        for (address, minor, excluded) in
            [("0000:18:00.0", 0, "No"), ("0000:2a:00.0", 1, "No"), ("0000:3a:00.0", 2, "Yes")]
        {
            let text = "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n";
            write(dir.path(), &format!("sys/bus/pci/devices/{address}/uevent"), text);
            let text = format!(
                "Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\nGPU Excluded:\t {excluded}\n"
            );
            write(dir.path(), &format!("proc/driver/nvidia/gpus/{address}/information"), &text);
        }
        let capabilities = "proc/driver/nvidia/capabilities/gpu1/mig/gi9";
        write(dir.path(), &format!("{capabilities}/access"), "DeviceFileMinor: 12\n");
        write(dir.path(), &format!("{capabilities}/ci0/access"), "DeviceFileMinor: 13\n");
        let version =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n";
        write(dir.path(), "proc/driver/nvidia/version", version);
        write(dir.path(), "sys/class/dmi/id/product_name", "p5.48xlarge\n");
        let size = MigAttributes { memory_mb: 9984, ..MigAttributes::default() };
        let description = GpuDescription {
            memory_mib: Some(81_559),
            instances: [((9, 0), size)].into(),
            ..GpuDescription::default()
        };
        let instance =
            MigInstance { uuid: "MIG-1".into(), profile: Some("1g.10gb".into()), index: Some(0) };
        let cut = NvmlGpu {
            uuid: Some("GPU-1".into()),
            instances: [((9, 0), instance)].into(),
            description: Some(description.clone()),
            ..NvmlGpu::default()
        };
        let nvml = NvmlSnapshot { gpus: [("0000:2a:00.0".parse().unwrap(), cut)].into() };
        let names = BTreeMap::new();
        let known = DiscoverInput { nvml: &nvml, ..DiscoverInput::first(&names) };
        let devices = discover_with(&root, scan(&root), &[], &known).devices;
        let node = nvidia_node(&root, &devices, &nvml).unwrap();
        let gpu = |address: &str| NvidiaGpu {
            address: address.parse().unwrap(),
            model: Some("NVIDIA H100 80GB HBM3".into()),
            class: Some(0x03_0200),
            in_mig_mode: false,
            instances: Vec::new(),
            description: None,
        };
        let cut = NvidiaGpu {
            in_mig_mode: true,
            instances: vec![NvidiaInstance {
                place: (9, 0),
                profile: Some("1g.10gb".into()),
                attributes: Some(size),
            }],
            description: Some(description),
            ..gpu("0000:2a:00.0")
        };
        let wanted = NvidiaNode {
            driver: Some("580.82.07".into()),
            machine: Some("p5.48xlarge".into()),
            gpus: vec![gpu("0000:18:00.0"), cut],
        };
        assert_eq!(node, wanted, "without the excluded GPU");
        assert!(!node.is_described());
        assert_eq!(
            node.hardware(),
            "580.82.07;p5.48xlarge;0000:18:00.0 NVIDIA H100 80GB HBM3 030200;\
             0000:2a:00.0 NVIDIA H100 80GB HBM3 030200 9/0"
        );
        assert_eq!(nvidia_node(&root, &[], &nvml).unwrap(), NvidiaNode::default());
    }
}
