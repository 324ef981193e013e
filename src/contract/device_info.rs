//! Device-info files (NPWG's Device Information Specification 1.1.0): Multus and CNI plugins read
//! there the details of a granted function. The SR-IOV network device plugin writes such files, and
//! so does its contract.

use super::cdi::SpecFile;
use super::{address, attribute, sriov};
use crate::domain::{
    Contract, Device, DeviceClass, DeviceId, ResourceName, ResourceSpec, SriovOptions, VdpaType,
};
use serde::Serialize;

/// Whether the devices of a resource have such files.
#[must_use]
pub fn is_used(spec: &ResourceSpec) -> bool {
    options(spec).is_some()
}

/// The file of a device with this id for the kubelet. Its readers know the name of the resource and
/// the id.
#[must_use]
pub fn file(spec: &ResourceSpec, id: &DeviceId, device: &Device) -> Option<SpecFile> {
    // The SR-IOV plugin writes none for scalable functions: the specification has no such type.
    let options = options(spec).filter(|_| attribute(device, "auxiliary").is_none())?;
    let pci_address = address(device);
    let vdpa = options.vdpa.and_then(|kind| {
        let path = sriov::vhost_vdpa(device).filter(|_| kind == VdpaType::Vhost);
        let driver = if kind == VdpaType::Vhost { "vhost" } else { "virtio" };
        Some(Vdpa {
            parent_device: attribute(device, "vdpa")?,
            driver,
            path,
            pci_address: pci_address.clone(),
        })
    });
    let info = match vdpa {
        Some(vdpa) => DeviceInfo { kind: "vdpa", version: "1.1.0", pci: None, vdpa: Some(vdpa) },
        None => {
            let names =
                device.pci.as_ref().map(|pci| pci.rdma.join(",")).filter(|names| !names.is_empty());
            let rdma_device = names.filter(|_| sriov::gives_rdma(spec, options));
            DeviceInfo {
                kind: "pci",
                version: "1.1.0",
                pci: Some(Pci { pci_address, rdma_device }),
                vdpa: None,
            }
        }
    };
    Some(SpecFile { name: file_name(&spec.name, id), text: serde_json::to_string(&info).ok()? })
}

/// The name of a file, which need not exist.
#[must_use]
pub fn file_name(resource: &ResourceName, id: &DeviceId) -> String {
    format!("{resource}-{id}-device.json").replace('/', "-")
}

fn options(spec: &ResourceSpec) -> Option<&SriovOptions> {
    match &spec.contract {
        // CNI plugins do not use accelerators.
        Contract::Sriov(options) if spec.class != DeviceClass::Accelerator => Some(options),
        _ => None,
    }
}

#[derive(Serialize)]
struct DeviceInfo<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pci: Option<Pci>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vdpa: Option<Vdpa<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Pci {
    pci_address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_device: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Vdpa<'a> {
    parent_device: &'a str,
    driver: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    pci_address: String,
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, spec};
    use super::*;
    use crate::domain::{ContractKind, PciFunction};

    fn text(options: SriovOptions, device: &Device) -> String {
        file(&spec("intel.com/my-pool", Contract::Sriov(options)), &device.id, device).unwrap().text
    }

    #[test]
    fn a_function_is_described_as_the_specification_requires() {
        let vf = function("0000:3b:00.2", "mlx5_core", &["/dev/vhost-vdpa-0"]);
        let plain = r#"{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2"}}"#;
        assert_eq!(text(SriovOptions::default(), &vf), plain);

        let pci = vf.pci.clone().map(|pci| {
            Box::new(PciFunction { rdma: vec!["mlx5_4".into(), "mlx5_5".into()], ..*pci })
        });
        let rdma = Device { pci, ..vf.clone() };
        let expected = r#"{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","rdma-device":"mlx5_4,mlx5_5"}}"#;
        assert_eq!(
            text(SriovOptions { rdma: Some(true), ..SriovOptions::default() }, &rdma),
            expected
        );
        assert_eq!(text(SriovOptions::default(), &rdma), plain, "it is not given to the container");

        let mut vdpa = vf;
        let of = |kind| SriovOptions { vdpa: Some(kind), ..SriovOptions::default() };
        assert_eq!(text(of(VdpaType::Vhost), &vdpa), plain, "it has none");
        vdpa.attributes.insert("vdpa", "vdpa0");
        let vhost = r#"{"type":"vdpa","version":"1.1.0","vdpa":{"parent-device":"vdpa0","driver":"vhost","path":"/dev/vhost-vdpa-0","pci-address":"0000:3b:00.2"}}"#;
        assert_eq!(text(of(VdpaType::Vhost), &vdpa), vhost);
        let virtio = r#"{"type":"vdpa","version":"1.1.0","vdpa":{"parent-device":"vdpa0","driver":"virtio","pci-address":"0000:3b:00.2"}}"#;
        assert_eq!(text(of(VdpaType::Virtio), &vdpa), virtio);
    }

    #[test]
    fn the_file_is_found_by_resource_and_id() {
        let vf = function("0000:3b:00.2", "iavf", &[]);
        let name = |class| {
            let spec = ResourceSpec { class, ..spec("intel.com/my-pool", ContractKind::Sriov) };
            file(&spec, &vf.id, &vf).map(|file| file.name)
        };
        assert_eq!(
            name(DeviceClass::Nic).as_deref(),
            Some("intel.com-my-pool-0000:3b:00.2-device.json")
        );
        assert_eq!(name(DeviceClass::Accelerator), None);
        assert_eq!(file(&spec("a.b/c", ContractKind::Generic), &vf.id, &vf), None);
    }
}
