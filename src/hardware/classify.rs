//! The class of a PCI function.
//!
//! The class code alone misleads: management chips are displays, and NVIDIA's switches carry its
//! vendor id. Adapters in RoCE mode are Ethernet, and an FPGA's image can present itself as a
//! virtio function.

use super::fpga;
use crate::domain::{DeviceClass, PciFunction};
use crate::host::HostRoot;

/// Vendors whose display controllers are consoles of a management chip or a hypervisor: ASPEED,
/// Matrox, Cirrus, virtio, Bochs/QXL, QEMU, VMware.
const CONSOLE_VENDORS: [u16; 7] = [0x1a03, 0x102b, 0x1013, 0x1af4, 0x1b36, 0x1234, 0x15ad];
/// Such consoles of vendors that also make other devices: Huawei's management chip, Hyper-V's
/// video, and the console of EC2.
const CONSOLES: [(u16, u16); 3] = [(0x19e5, 0x1711), (0x1414, 0x5353), (0x1d0f, 0x1111)];

/// Drivers of the kernel's accel subsystem whose functions have the class of a signal processor
/// (Linux `drivers/accel/amdxdna`).
const ACCEL_DRIVERS: [&str; 1] = ["amdxdna"];

/// The class of a function, from its record and, where that does not decide, from its folder.
pub(super) fn classify(root: &HostRoot, function: &PciFunction) -> DeviceClass {
    let console = function.vendor.is_some_and(|vendor| CONSOLE_VENDORS.contains(&vendor));
    let display = !console
        && !function.vendor.zip(function.device).is_some_and(|ids| CONSOLES.contains(&ids));
    // An RDMA device below a function makes it an RDMA adapter. The exception is a compute device:
    // an accelerator with ports of its own (Gaudi's `hbl_0`) stays one.
    let computes = matches!(function.class16(), Some(0x0300..=0x03ff | 0x1200..=0x12ff | 0x0b40));
    if !function.rdma.is_empty() && !computes {
        return DeviceClass::Rdma;
    }
    if fpga::is_fpga(root, function) {
        return DeviceClass::Fpga;
    }
    if function.driver.as_deref().is_some_and(|driver| ACCEL_DRIVERS.contains(&driver)) {
        return DeviceClass::Accelerator;
    }
    match function.class16() {
        Some(0x0300..=0x03ff) if display => DeviceClass::Gpu,
        // AMD's Instinct MI300 series: a processing accelerator by its class, a GPU by its driver.
        Some(0x1200) if function.vendor == Some(0x1002) => DeviceClass::Gpu,
        Some(0x1200..=0x12ff | 0x0b40) if !console => DeviceClass::Accelerator,
        Some(0x0200..=0x02ff) => DeviceClass::Nic,
        // Programming interface 2 is the NVMe I/O controller; others (3 is administration only)
        // have no disks.
        Some(0x0108) if function.class.is_some_and(|class| class & 0xff == 2) => DeviceClass::Nvme,
        _ => DeviceClass::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::function;
    use super::*;

    fn class_of(vendor: u16, class: u32) -> DeviceClass {
        let dir = tempfile::tempdir().unwrap();
        classify(
            &HostRoot::new(dir.path()),
            &PciFunction { vendor: Some(vendor), class: Some(class), ..function("0000:18:00.0") },
        )
    }

    #[test]
    fn the_vendor_alone_makes_no_gpu() {
        assert_eq!(class_of(0x10de, 0x03_0200), DeviceClass::Gpu);
        assert_eq!(class_of(0x10de, 0x06_8000), DeviceClass::Other, "NVSwitch");
        assert_eq!(class_of(0x10de, 0x04_0300), DeviceClass::Other, "HDMI audio");
        assert_eq!(class_of(0x1002, 0x12_0000), DeviceClass::Gpu, "MI300");
        assert_eq!(class_of(0x1a03, 0x03_0000), DeviceClass::Other, "management chip");
    }

    #[test]
    fn console_displays_are_no_gpus() {
        let dir = tempfile::tempdir().unwrap();
        let class_of = |vendor, device, class| {
            let function = PciFunction {
                vendor: Some(vendor),
                device: Some(device),
                class: Some(class),
                ..function("0000:18:00.0")
            };
            classify(&HostRoot::new(dir.path()), &function)
        };
        assert_eq!(class_of(0x19e5, 0x1711, 0x03_0000), DeviceClass::Other, "HiBMC");
        assert_eq!(class_of(0x19e5, 0xd802, 0x12_0000), DeviceClass::Accelerator, "an NPU");
        assert_eq!(class_of(0x1414, 0x5353, 0x03_0000), DeviceClass::Other, "Hyper-V's video");
        assert_eq!(class_of(0x1414, 0x008e, 0x03_0200), DeviceClass::Gpu, "a partition of a GPU");
    }

    #[test]
    fn accelerators_networks_and_disks() {
        assert_eq!(class_of(0x1bcf, 0x0b_4000), DeviceClass::Accelerator, "vector engine");
        assert_eq!(class_of(0x1af4, 0x12_0000), DeviceClass::Other, "virtio made by an FPGA image");
        assert_eq!(
            class_of(0x15b3, 0x02_0700),
            DeviceClass::Nic,
            "InfiniBand without its RDMA driver"
        );
        assert_eq!(class_of(0x144d, 0x01_0802), DeviceClass::Nvme);
        assert_eq!(class_of(0x144d, 0x01_0803), DeviceClass::Other, "administrative controller");
    }

    #[test]
    fn an_rdma_device_overrides_the_pci_class() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        for class in [0x02_0000, 0x02_0700, 0x02_8000] {
            let adapter = PciFunction {
                class: Some(class),
                rdma: vec!["mlx5_0".into()],
                ..function("0000:18:00.0")
            };
            assert_eq!(classify(&root, &adapter), DeviceClass::Rdma);
        }
    }
}
