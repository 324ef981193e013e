//! The contract of a resource, and its options: a table with the name of the contract.

use super::error::{hidden, hidden_in};
use super::fragments::Resource;
use super::text;
use crate::domain::{
    Contract, ContractKind, DeviceClass, MPS_CLIENTS_MAX, MpsControl, NvidiaOptions, PciAddress,
    Select, SriovOptions, VdpaType,
};

/// The contract that the resource names, else the usual one of its class, vendors and drivers. It
/// includes its options.
pub(super) fn contract(
    resource: &Resource,
    class: DeviceClass,
    select: &Select,
    or: &[Select],
) -> Result<Contract, String> {
    let kind = resource.contract.unwrap_or_else(|| usual(class, select, or));
    let tables = [
        (ContractKind::Nvidia, resource.nvidia.is_some()),
        (ContractKind::IntelGpu, resource.intel_gpu.is_some()),
        (ContractKind::IntelFpga, resource.intel_fpga.is_some()),
        (ContractKind::Xilinx, resource.xilinx.is_some()),
        (ContractKind::Sriov, resource.sriov.is_some()),
    ];
    if let Some((table, _)) =
        tables.into_iter().find(|(table, is_there)| *is_there && *table != kind)
    {
        return Err(format!(
            "the table `{table}` is for contract = \"{table}\", but the contract is `{kind}`"
        ));
    }
    if kind == ContractKind::Nvidia && !resource.cdi.is_empty() {
        return Err("CDI names of NVIDIA's GPUs come from NVIDIA's toolkit; set nvidia = { \
             device_list_strategy = [\"cdi-cri\"] }"
            .into());
    }
    Ok(match kind {
        ContractKind::Nvidia => {
            let options = resource.nvidia.clone().unwrap_or_default();
            Contract::Nvidia(nvidia(options, select, resource.replicas.unwrap_or(1))?)
        }
        ContractKind::IntelGpu => {
            Contract::IntelGpu(resource.intel_gpu.clone().unwrap_or_default())
        }
        ContractKind::IntelFpga => {
            Contract::IntelFpga(resource.intel_fpga.clone().unwrap_or_default())
        }
        ContractKind::Xilinx => Contract::Xilinx(resource.xilinx.clone().unwrap_or_default()),
        ContractKind::Sriov => Contract::Sriov(sriov(resource.sriov.clone().unwrap_or_default())?),
        plain @ (ContractKind::Generic
        | ContractKind::Amd
        | ContractKind::RdmaShared
        | ContractKind::Kubevirt) => plain.into(),
    })
}

/// The usual contract of all selections, where they have the same one.
fn usual(class: DeviceClass, select: &Select, or: &[Select]) -> ContractKind {
    let of = |select: &Select| ContractKind::usual(class, &select.vendor, &select.driver);
    let kind = of(select);
    if or.iter().all(|select| of(select) == kind) { kind } else { ContractKind::Generic }
}

/// MPS shares whole GPUs, and a server of MPS has a limit of clients.
fn mps(options: &NvidiaOptions, select: &Select, replicas: u32) -> Result<(), String> {
    let is_off = options.mps_root.is_none();
    let keys = [
        ("mps_control", options.mps_control != MpsControl::Run),
        ("mps_memory_mib", options.mps_memory_mib.is_some()),
        ("mps_thread_percentage", options.mps_thread_percentage.is_some()),
    ];
    if let Some((key, _)) = keys.iter().find(|(_, is_set)| is_off && *is_set) {
        return Err(format!("`nvidia.{key}` has an effect only with `nvidia.mps_root`; set both"));
    }
    let is_external = options.mps_control == MpsControl::External;
    if let Some((key, _)) = keys[1..].iter().find(|(_, is_set)| is_external && *is_set) {
        return Err(format!(
            "`nvidia.{key}` is for a control daemon that Holdfast runs, but `nvidia.mps_control` \
             is \"external\"; set only one of them"
        ));
    }
    if let Some(percentage) = options.mps_thread_percentage.filter(|of| !(1..=100).contains(of)) {
        return Err(format!(
            "`nvidia.mps_thread_percentage` is {}, but must be between 1 and 100",
            hidden(percentage)
        ));
    }
    if is_off {
        return Ok(());
    }
    if select.part == Some(true) || !select.mig_profile.is_empty() {
        return Err("MPS shares whole GPUs, and this resource selects MIG instances; remove \
                    `nvidia.mps_root`"
            .into());
    }
    if replicas > MPS_CLIENTS_MAX && !is_external {
        return Err(format!(
            "`replicas` is {}, but a GPU has at most {MPS_CLIENTS_MAX} clients of MPS",
            hidden(replicas)
        ));
    }
    Ok(())
}

fn nvidia(options: NvidiaOptions, select: &Select, replicas: u32) -> Result<NvidiaOptions, String> {
    if options.device_list_strategy.is_empty() {
        return Err(
            "`nvidia.device_list_strategy` is empty, so no container would get its devices; the \
             default is [\"envvar\"]"
                .into(),
        );
    }
    if let Some(root) = options.mps_root.as_ref().filter(|root| !root.starts_with('/')) {
        return Err(format!(
            "`nvidia.mps_root` is `{}`, but must be an absolute path such as /run/nvidia/mps",
            hidden(root)
        ));
    }
    if let Some(root) = &options.mps_root {
        text::path(root, "nvidia.mps_root")?;
    }
    mps(&options, select, replicas)?;
    let vendor = &options.cdi_vendor;
    let is_name = vendor.starts_with(|c: char| c.is_ascii_alphabetic())
        && vendor.ends_with(|c: char| c.is_ascii_alphanumeric())
        && vendor.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
    if !is_name {
        return Err(format!(
            "`nvidia.cdi_vendor` is `{}`, but must be a name such as nvidia.com",
            hidden(vendor)
        ));
    }
    let prefix = &options.cdi_annotation_prefix;
    let is_domain = |domain: &str| {
        !domain.is_empty() && domain.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
    };
    if !prefix.strip_suffix('/').is_some_and(is_domain) {
        return Err(format!(
            "`nvidia.cdi_annotation_prefix` is `{}`, but must be a domain and a slash, as in cdi.k8s.io/",
            hidden(prefix)
        ));
    }
    Ok(options)
}

fn sriov(options: SriovOptions) -> Result<SriovOptions, String> {
    if options.rdma == Some(true) && options.vdpa.is_some() {
        return Err("`sriov.rdma` and `sriov.vdpa` exclude each other; set only one of them".into());
    }
    if options.vhost_net && options.vdpa == Some(VdpaType::Vhost) {
        return Err(
            "`sriov.vhost_net` is for network interfaces, and `sriov.vdpa` = \"vhost\" has its \
             own device node; set only one of them"
                .into(),
        );
    }
    let mut additional_info = std::collections::BTreeMap::new();
    for (of, table) in options.additional_info {
        // An address is looked up in the spelling that `PciAddress` prints.
        let lower = of.to_ascii_lowercase();
        let address =
            lower.parse::<PciAddress>().map_err(|error| hidden_in(&error.to_string(), &lower));
        let key = if of == "*" { Ok(of) } else { address.map(|address| address.to_string()) };
        let key = key.map_err(|error| {
            format!(
                "the keys of `sriov.additional_info` must be PCI addresses, or `*` for all \
                 devices: {error}"
            )
        })?;
        additional_info.insert(key, table);
    }
    Ok(SriovOptions { additional_info, ..options })
}

#[cfg(test)]
mod tests {
    use super::super::{Node, load};
    use crate::domain::{
        ByPath, Contract, ContractKind, DeviceIdStrategy, DeviceListStrategy, FpgaMode,
        IntelFpgaOptions, IntelGpuOptions, MpsControl, NvidiaOptions, SriovOptions, Switch,
        VdpaType, XilinxOptions,
    };
    use std::collections::BTreeMap;

    /// The contract of a resource with these keys, or the error message.
    fn contract(class: &str, rest: &str) -> Result<Contract, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(
            &file,
            format!("[[resource]]\nname = \"a.b/c\"\nclass = \"{class}\"\n{rest}\n"),
        )
        .unwrap();
        load(Some(&file), &Node::default())
            .map(|config| config.resources[0].contract.clone())
            .map_err(|error| error.in_full())
    }

    #[test]
    fn the_default_contract_is_that_of_the_vendors_plugin() {
        for (class, select, expected) in [
            ("gpu", r#"vendor = ["10de"]"#, ContractKind::Nvidia),
            ("gpu", r#"vendor = ["1002"]"#, ContractKind::Amd),
            ("gpu", r#"vendor = ["8086"], driver = ["i915", "xe"]"#, ContractKind::IntelGpu),
            ("fpga", r#"vendor = ["8086"]"#, ContractKind::IntelFpga),
            ("fpga", r#"vendor = ["10ee"]"#, ContractKind::Xilinx),
            ("gpu", "", ContractKind::Generic),
            ("gpu", r#"vendor = ["10de", "1002"]"#, ContractKind::Generic),
            ("gpu", r#"vendor = ["10de"], driver = ["vfio-pci"]"#, ContractKind::Generic),
            ("nic", r#"vendor = ["8086"]"#, ContractKind::Generic),
            ("rdma", r#"vendor = ["15b3"]"#, ContractKind::Generic),
        ] {
            assert_eq!(
                contract(class, &format!("select = {{ {select} }}")),
                Ok(expected.into()),
                "{class} {select}"
            );
        }
    }

    #[test]
    fn every_contract_has_its_name() {
        for kind in
            ["generic", "nvidia", "amd", "intel-gpu", "intel-fpga", "xilinx", "sriov", "kubevirt"]
        {
            let found = contract("nic", &format!("contract = \"{kind}\"")).unwrap();
            assert_eq!(found, serde_json::from_value::<ContractKind>(kind.into()).unwrap().into());
        }
    }

    #[test]
    fn every_option_is_read() {
        let nvidia = r#"
            contract = "nvidia"
            nvidia = { device_list_strategy = ["volume-mounts", "cdi-annotations", "cdi-cri", "envvar"], device_id_strategy = "index", pass_device_specs = true, cdi_vendor = "k8s.device-plugin.nvidia.com", cdi_annotation_prefix = "example.com/", gdrcopy = true, gds = "auto", mofed = false, imex_channels = [0, 5], mps_root = "/run/mps", mps_memory_mib = 2048, mps_thread_percentage = 30 }"#;
        let expected = NvidiaOptions {
            device_list_strategy: vec![
                DeviceListStrategy::VolumeMounts,
                DeviceListStrategy::CdiAnnotations,
                DeviceListStrategy::CdiCri,
                DeviceListStrategy::EnvVar,
            ],
            device_id_strategy: DeviceIdStrategy::Index,
            pass_device_specs: true,
            cdi_vendor: "k8s.device-plugin.nvidia.com".into(),
            cdi_annotation_prefix: "example.com/".into(),
            gdrcopy: Switch::On,
            gds: Switch::Auto,
            mofed: Switch::Off,
            imex_channels: vec![0, 5],
            mps_root: Some("/run/mps".into()),
            mps_control: MpsControl::Run,
            mps_memory_mib: Some(2048),
            mps_thread_percentage: Some(30),
        };
        assert_eq!(contract("gpu", nvidia), Ok(Contract::Nvidia(expected)));
        let by_path = Contract::IntelGpu(IntelGpuOptions { by_path: ByPath::All });
        assert_eq!(
            contract("gpu", "select = { vendor = [\"8086\"] }\nintel-gpu.by_path = \"all\""),
            Ok(by_path)
        );
        let mode = Contract::IntelFpga(IntelFpgaOptions { mode: FpgaMode::RegionDevel });
        assert_eq!(
            contract(
                "fpga",
                "contract = \"intel-fpga\"\n[resource.intel-fpga]\nmode = \"regiondevel\""
            ),
            Ok(mode)
        );
        let xilinx = Contract::Xilinx(XilinxOptions { management_node: false });
        assert_eq!(
            contract("fpga", "contract = \"xilinx\"\nxilinx = { management_node = false }"),
            Ok(xilinx)
        );
        let sriov = r#"
            contract = "sriov"
            sriov = { rdma = false, vhost_net = true, vdpa = "virtio", additional_info = { "*" = { zone = "a" }, "0000:3B:00.2" = { rack = "r1" } } }"#;
        let table = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let expected = SriovOptions {
            rdma: Some(false),
            vhost_net: true,
            vdpa: Some(VdpaType::Virtio),
            additional_info: BTreeMap::from([
                ("*".to_owned(), table("zone", "a")),
                ("0000:3b:00.2".to_owned(), table("rack", "r1")),
            ]),
        };
        assert_eq!(contract("nic", sriov), Ok(Contract::Sriov(expected)));
    }

    /// Each text is refused with one sentence that contains this part.
    fn assert_refused(cases: &[(&str, &str, &str)]) {
        for (class, text, expected) in cases {
            let sentence = contract(class, text).unwrap_err();
            assert!(sentence.contains(expected), "{sentence}\nshould contain: {expected}");
            assert_eq!(sentence.lines().count(), 1, "{sentence}");
        }
    }

    #[test]
    fn every_mistake_in_the_contract_of_a_gpu_is_one_sentence() {
        assert_refused(&[
            ("gpu", "contract = \"nvida\"", "unknown value `nvida`; did you mean `nvidia`?"),
            (
                "gpu",
                "contract = \"amd\"\nnvidia = {}",
                "the table `nvidia` is for contract = \"nvidia\", but the contract is `amd`",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { device_list = [] }",
                "unknown key `device_list`; did you mean `device_list_strategy`?",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { device_list_strategy = [\"cdi\"] }",
                "unknown value `cdi`; the known values are `envvar`, `volume-mounts`, `cdi-annotations`, `cdi-cri`",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { device_list_strategy = [] }",
                "so no container would get its devices",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { gdrcopy = \"on\" }",
                "unknown value `on`; the known values are `auto`",
            ),
            ("gpu", "contract = \"nvidia\"\nnvidia = { gds = 1 }", "true, false or \"auto\""),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { cdi_vendor = \"nvidia.com/gpu\" }",
                "must be a name such as nvidia.com",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { cdi_annotation_prefix = \"cdi\" }",
                "must be a domain and a slash",
            ),
            (
                "gpu",
                "contract = \"intel-gpu\"\nintel-gpu = { bypath = \"all\" }",
                "unknown key `bypath`; did you mean `by_path`?",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\ncdi = [\"cri\"]",
                "device_list_strategy = [\"cdi-cri\"]",
            ),
        ]);
    }

    #[test]
    fn every_mistake_in_the_options_of_mps_is_one_sentence() {
        assert_refused(&[
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { mps_root = \"mps\" }",
                "must be an absolute path",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { mps_control = \"external\" }",
                "has an effect only with `nvidia.mps_root`",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { mps_root = \"/m\", mps_control = \"external\", mps_memory_mib = 1 }",
                "set only one of them",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { mps_root = \"/m\", mps_control = \"none\" }",
                "unknown value `none`",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nnvidia = { mps_root = \"/m\", mps_thread_percentage = 101 }",
                "must be between 1 and 100",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nselect = { part = true }\nnvidia = { mps_root = \"/m\" }",
                "this resource selects MIG instances",
            ),
            (
                "gpu",
                "contract = \"nvidia\"\nreplicas = 49\nnvidia = { mps_root = \"/m\" }",
                "a GPU has at most 48 clients of MPS",
            ),
        ]);
    }

    #[test]
    fn every_mistake_in_another_contract_is_one_sentence() {
        assert_refused(&[
            (
                "nic",
                "sriov = { vhost_net = true }",
                "the table `sriov` is for contract = \"sriov\", but the contract is `generic`",
            ),
            (
                "fpga",
                "contract = \"intel-fpga\"\nintel-fpga = { mode = \"afu\" }",
                "unknown value `afu`; did you mean `af`?",
            ),
            (
                "nic",
                "contract = \"sriov\"\nsriov = { rdma = true, vdpa = \"vhost\" }",
                "exclude each other",
            ),
            (
                "nic",
                "contract = \"sriov\"\nsriov = { vhost_net = true, vdpa = \"vhost\" }",
                "set only one of them",
            ),
            ("nic", "cdi = [\"cr\"]", "unknown value `cr`; did you mean `cri`?"),
            ("nic", "[cdi]\ndirectory = \"cdi\"", "`cdi.directory` must be an absolute path"),
            (
                "nic",
                "[device_info]\ndirectory = \"dp\"",
                "`device_info.directory` must be an absolute path",
            ),
            (
                "nic",
                "contract = \"sriov\"\nsriov = { additional_info = { ens1f0 = {} } }",
                "`ens1f0` is not a PCI address",
            ),
        ]);
    }
}
