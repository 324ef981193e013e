//! Mediated devices: parts of a function for guests, made by its driver (Linux
//! `Documentation/driver-api/vfio-mediated-device.rst`). NVIDIA's vGPUs were mediated devices
//! before driver 550; Intel's GVT-g devices are.

use super::facts::{Facts, Part, required};
use super::pci::folder;
use crate::domain::PciFunction;
use crate::host::HostRoot;

/// The mediated devices below a function. Each has its own IOMMU group, through which a guest gets
/// it.
pub(super) fn parts(root: &HostRoot, function: &PciFunction) -> Vec<Part> {
    let part = |uuid: &String| {
        let dir = format!("{}/{uuid}", folder(function.address));
        let group = root
            .link_name(&format!("{dir}/iommu_group"))
            .filter(|group| group.parse::<u32>().is_ok());
        let kind = root.link_name(&format!("{dir}/mdev_type"));
        let named = kind.as_ref().and_then(|kind| {
            root.read(&format!("{}/mdev_supported_types/{kind}/name", folder(function.address)))
        });
        let mut facts = Facts { identity: Some(uuid.clone()), ..Facts::default() };
        facts.nodes.push(required("/dev/vfio/vfio"));
        facts.nodes.extend(group.iter().map(|group| required(format!("/dev/vfio/{group}"))));
        facts.note("mdev_uuid", Some(uuid));
        facts.note("mdev_type", kind);
        facts.note("mdev_type_name", named);
        facts.note("mdev_driver", root.link_name(&format!("{dir}/driver")));
        facts.note("iommu_group", group);
        Part { name: uuid.clone(), facts }
    };
    function.mdevs.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_mediated_device_is_named_by_its_uuid_and_given_by_its_own_group() {
        const UUID: &str = "f715f63c-0d00-4007-9c5a-b07b0c6c05de";
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join("sys/bus/pci/devices/0000:08:00.4");
        write(&parent, "mdev_supported_types/nvidia-754/name", "NVIDIA A2-4Q\n");
        write(&parent, &format!("{UUID}/uevent"), "DRIVER=nvidia-vgpu-vfio\n");
        let links = [
            ("mdev_type", "../mdev_supported_types/nvidia-754"),
            ("iommu_group", "../../../../../kernel/iommu_groups/106"),
            ("driver", "../../../../../bus/mdev/drivers/nvidia-vgpu-vfio"),
        ];
        for (name, target) in links {
            symlink(target, parent.join(UUID).join(name)).unwrap();
        }
        let vf = PciFunction {
            mdevs: vec![UUID.into()],
            iommu_group: Some(90),
            ..function("0000:08:00.4")
        };
        let parts = parts(&HostRoot::new(dir.path()), &vf);
        let Part { name, facts } = &parts[0];
        assert_eq!((name.as_str(), facts.identity.as_deref()), (UUID, Some(UUID)));
        assert_eq!(facts.nodes, [required("/dev/vfio/vfio"), required("/dev/vfio/106")]);
        let of = |name: &str| &facts.attributes[name];
        assert_eq!(
            (of("mdev_type"), of("mdev_type_name"), of("iommu_group")),
            ("nvidia-754", "NVIDIA A2-4Q", "106")
        );
        assert_eq!(of("mdev_driver"), "nvidia-vgpu-vfio");
    }
}
