//! Tests of each importer with expected results (`golden`), and with random files.
//!
//! Each random file must lead to a reason or to a valid file.

use super::{Imported, Peer, import};
use crate::config::{Config, Examined, Node};
use crate::domain::{Contract, PerContainer, Sharing};
use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, TestRunner};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

thread_local! {
    /// Every key that was looked up, by its path.
    static LOOKUPS: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// Records a key that a reader looked up.
pub(super) fn record_lookup(path: &str) {
    LOOKUPS.with_borrow_mut(|lookups| lookups.insert(path.to_owned()));
}

/// The keys that were looked up since the last call.
pub(super) fn take_lookups() -> BTreeSet<String> {
    LOOKUPS.take()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/config/import/golden").join(name)
}

fn config(toml: &str) -> Config {
    Examined::alone(toml.as_bytes(), Path::new("import"), &Node::default())
        .config()
        .unwrap_or_else(|error| panic!("{error}\n{toml}"))
}

/// The result of importing a golden source.
fn of(peer: Peer, name: &str, key: Option<&str>) -> Imported {
    let source = std::fs::read_to_string(golden(&format!("{name}.source"))).unwrap();
    let imported = import(peer, &source, key, None).unwrap();
    let warnings: String = imported.warnings.iter().map(|warning| format!("{warning}\n")).collect();
    for (ending, text) in [("toml", &imported.toml), ("warnings", &warnings)] {
        let file = golden(&format!("{name}.{ending}"));
        if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
            std::fs::write(&file, text).unwrap();
        }
        assert_eq!(&std::fs::read_to_string(&file).unwrap_or_default(), text, "{}", file.display());
    }
    config(&imported.toml);
    imported
}

#[test]
fn nvidias() {
    let shared = config(&of(Peer::Nvidia, "nvidia-shared", Some("shared")).toml);
    let gpu = &shared.resources[0];
    assert_eq!(
        (gpu.name.as_str(), gpu.sharing, gpu.per_container),
        ("nvidia.com/gpu.shared", Sharing::Replicas(4), PerContainer::One)
    );
    let mps = config(&of(Peer::Nvidia, "nvidia-mps", None).toml);
    let Contract::Nvidia(options) = &mps.resources[0].contract else {
        panic!("{:?}", mps.resources[0].contract)
    };
    assert_eq!(options.mps_root.as_deref(), Some("/run/mps"));
}

#[test]
fn the_sriov_plugins() {
    let pools = config(&of(Peer::Sriov, "sriov-pools", None).toml);
    let names: Vec<&str> = pools.resources.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "example.org/mlx_rdma",
            "intel.com/dpdk-pool",
            "intel.com/mlx_plain",
            "intel.com/qat",
            "intel.com/any",
            "intel.com/partitioned",
            "intel.com/different",
            "intel.com/scalable"
        ]
    );
    assert_eq!(pools.resources[7].select.part, Some(true));
    assert!(!pools.resources[0].topology && pools.resources[1].topology);
}

#[test]
fn a_pool_has_its_functions_with_and_without_rdma() {
    for (selectors, class) in [
        ("'drivers': ['iavf']", "network"),
        ("'vendors': ['14e4']", "network"),
        ("'drivers': ['iavf', 'mlx5_core']", "network"),
        ("'vendors': ['15b3'], 'drivers': ['mlx5_core', 'vfio-pci']", "network"),
        ("'vendors': ['15b3'], 'drivers': ['vfio-pci']", "nic"),
        ("'drivers': ['vfio-pci', 'uio_pci_generic', 'igb_uio']", "nic"),
        ("'drivers': ['mlx5_core'], 'isRdma': true", "rdma"),
    ] {
        let source =
            format!("{{'resourceList': [{{'resourceName': 'a', 'selectors': {{{selectors}}}}}]}}")
                .replace('\'', "\"");
        let imported = import(Peer::Sriov, &source, None, None).unwrap();
        assert!(
            imported.toml.contains(&format!("class = \"{class}\"")),
            "{selectors}: {}",
            imported.toml
        );
        assert_eq!(imported.warnings, Vec::<String>::new(), "{selectors}");
    }
}

#[test]
fn several_selectors_are_one_or_several_selections() {
    let select = |selectors: &str| {
        let source = format!("{{resourceList: [{{resourceName: a, selectors: [{selectors}]}}]}}");
        config(&import(Peer::Sriov, &source, None, None).unwrap().toml).resources.remove(0)
    };
    let one = select("{vendors: ['8086'], drivers: [iavf]}, {vendors: ['15b3'], drivers: [iavf]}");
    assert_eq!((&*one.select.vendor, one.or.len()), (&[0x8086, 0x15b3][..], 0));
    let two = select(
        "{vendors: ['8086'], devices: ['1889']}, {vendors: ['15b3'], devices: ['101e']}, \
         {vendors: ['15b3'], devices: ['1018']}, {acpiIndexes: ['101', '1?']}",
    );
    let vendors: Vec<_> = two.selections().map(|select| select.vendor.clone()).collect();
    assert_eq!(vendors, [vec![0x8086], vec![0x15b3], vec![]]);
    assert_eq!(two.or[0].device, [0x101e, 0x1018]);
    assert_eq!(two.or[1].attribute["acpi_index"], ["101", "1[?]"], "a text, not a glob");
    // One that selects every function.
    let all = select("{drivers: [iavf]}, {}");
    assert_eq!((all.select.driver.len(), all.or.len()), (0, 0));
}

#[test]
fn later_pools_that_get_devices_of_one_that_is_left_out_are_named() {
    let warnings = |pools: &str| {
        import(Peer::Sriov, &format!("{{resourceList: [{pools}]}}"), None, None).unwrap().warnings
    };
    let later = |pools: &str| {
        let of = |warning: String| {
            let (_, names) = warning.split_once("may be in ")?;
            Some(names.split_once(" here, and").unwrap().0.replace("intel.com/", ""))
        };
        warnings(pools).into_iter().find_map(of)
    };
    let gtp =
        "{resourceName: gtp, selectors: {vendors: ['8086'], devices: ['1889'], ddpProfiles: [x]}}";
    let mixed = "{resourceName: mixed, selectors: [{drivers: [vfio-pci], needVhostNet: true}, \
                 {drivers: [iavf], pfNames: ['ens1f0#3']}]}";
    let both =
        "{resourceName: both, selectors: {pfNames: [ens1f0], rootDevices: ['0000:3b:00.0']}}";
    let pool =
        |name: &str, selectors: &str| format!("{{resourceName: {name}, selectors: {selectors}}}");
    let intel = pool("intel", "{vendors: ['8086']}");
    let mellanox = pool("mellanox", "{vendors: ['15b3'], drivers: [mlx5_core]}");
    // `bad` is left out too, by its name.
    let bad = pool("b d", "{vendors: ['8086']}");
    for (pools, expected) in [
        (format!("{gtp}, {intel}, {mellanox}, {bad}"), Some("intel")),
        (format!("{intel}, {gtp}, {mellanox}"), None),
        (
            format!("{gtp}, {intel}, {}", pool("all", "[{vendors: ['15b3']}, {}]")),
            Some("intel or all"),
        ),
        (format!("{mixed}, {intel}, {mellanox}"), Some("intel")),
        (format!("{mixed}, {}", pool("p", "{drivers: [iavf], pfNames: ['ens1f0#4']}")), None),
        (format!("{both}, {}", pool("p", "{pfNames: [ens1f0]}")), Some("p")),
        (
            format!(
                "{gtp}, {{resourceName: q, deviceType: accelerator, selectors: {{}}}}, {mellanox}"
            ),
            None,
        ),
    ] {
        assert_eq!(later(&pools).as_deref(), expected, "{:#?}", warnings(&pools));
    }
}

#[test]
fn a_warning_of_an_overlap_names_only_resources_of_the_result() {
    let pools = "{configList: [{resourceName: a, rdmaHcaMax: 20000, selectors: {vendors: [15b3]}}, \
                 {resourceName: b, rdmaHcaMax: 5, selectors: {vendors: [15b3]}}, \
                 {resourceName: c, rdmaHcaMax: 5, selectors: {vendors: [15b3]}}]}";
    let devices = "{devices: [{name: a, groups: [{paths: [{path: /dev/x, permissions: rwx}]}]}, \
                   {name: b, groups: [{paths: [{path: /dev/x}]}]}, \
                   {name: c, groups: [{paths: [{path: /dev/x}]}]}]}";
    for (peer, text) in [(Peer::RdmaShared, pools), (Peer::Generic, devices)] {
        let Imported { warnings, wrong, .. } = import(peer, text, None, Some("x.org")).unwrap();
        let overlaps: Vec<&String> =
            warnings.iter().filter(|warning| warning.contains("may select the same")).collect();
        assert!(wrong == 1 && overlaps.len() == 1, "{warnings:#?}");
        assert!(overlaps[0].starts_with("x.org/b and x.org/c may"), "{overlaps:?}");
    }
}

#[test]
fn a_setting_without_an_effect_has_no_hint_at_itself() {
    let pool = "{resourceList: [{resourceName: a, deviceType: accelerator, \
                selectors: {vendors: ['8086'], isRdma: true}}]}";
    let warnings = import(Peer::Sriov, pool, None, None).unwrap().warnings;
    assert_eq!(
        warnings,
        [
            "`resourceList[0].selectors.isRdma` (line 1) has no effect here in the plugin, and is left out"
        ]
    );
    let grouped = "kind: Configuration\nmetadata: { name: a }\nspec:\n  capacity: 5\n  \
                   brokerProperties: { a: b }\n  discoveryHandler:\n    name: udev\n    \
                   discoveryDetails: |\n      groupRecursive: true\n      udevRules: []\n";
    let warnings = import(Peer::Akri, grouped, None, None).unwrap_err().warnings;
    assert!(!warnings.iter().any(|warning| warning.contains("capacity")), "{warnings:#?}");
    assert!(!warnings.iter().any(|warning| warning.contains("Properties")), "{warnings:#?}");
}

#[test]
fn the_last_pattern_of_smarters_counts() {
    let source = "- { devicematch: ^video.*$, nummaxdevices: 1 }\n\
                  - { devicematch: ^video0$, nummaxdevices: 20 }\n";
    let nodes = config(&import(Peer::Smarter, source, None, None).unwrap().toml).resources;
    let shares: Vec<Sharing> = nodes.iter().map(|spec| spec.sharing).collect();
    assert_eq!(shares, [Sharing::Replicas(20), Sharing::Exclusive], "the first one counts here");
}

#[test]
fn a_folder_that_smarters_pattern_matches_is_named() {
    let warning = |pattern: &str| {
        let source = format!("[{{devicematch: '{pattern}', nummaxdevices: 1}}]");
        let warnings = import(Peer::Smarter, &source, None, None).unwrap().warnings;
        warnings.into_iter().find(|warning| warning.contains("is a folder"))
    };
    for (pattern, also) in [
        ("^bus/usb/.*", "smarter-devices/bus_usb_001_002"),
        ("^input", "smarter-devices/input_event0"),
        ("^dri", "smarter-devices/dri_renderD128"),
        ("snd", "smarter-devices/snd_controlC0"),
    ] {
        let warning = warning(pattern).unwrap();
        assert!(warning.contains(also) && warning.contains("the plugin also offers"), "{warning}");
    }
    assert!(warning("^snd$").unwrap().ends_with("as with the plugin"));
    assert_eq!((warning("^input/event"), warning("^video.*$")), (None, None));
}

#[test]
fn intels_gpus() {
    let gpus = config(&of(Peer::IntelGpu, "intel-gpu-daemonset", None).toml).resources;
    let names: Vec<&str> = gpus.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["gpu.intel.com/i915", "gpu.intel.com/xe"]);
    assert_eq!(gpus[1].sharing, Sharing::Replicas(10));
    let object =
        "kind: GpuDevicePlugin\nspec: { image: x, sharedDevNum: 3, denyIDs: '0x4680,0X1' }\n";
    let error = import(Peer::IntelGpu, object, None, None).unwrap_err().warnings.join("\n");
    assert!(error.contains("`denyIDs` is the text `0x4680,0X1`, where a list such as"), "{error}");
    // The flag overrides; a flag that is not read is never silent.
    let both = "kind: DaemonSet\nspec: { template: { spec: { containers: [{ image: intel/intel-gpu-plugin:0.36, \
                args: [-shared-dev-num, '4', --shared-dev-num=5, -health-management, -v=2] }] } } }\n---\n\
                kind: GpuDevicePlugin\nspec: { sharedDevNum: 3 }\n";
    let imported = import(Peer::IntelGpu, both, None, None).unwrap();
    assert_eq!(config(&imported.toml).resources[0].sharing, Sharing::Replicas(5));
    let warnings = imported.warnings.join("\n");
    let health = "`--health-management` (line 2) is left out: the import does not read it";
    assert!(warnings.contains(health), "{warnings}");
    assert!(!warnings.contains("`--v`") && !warnings.contains("`--shared"), "{warnings}");
}

#[test]
fn amds_gpus() {
    let gpus = config(&of(Peer::Amd, "amd-daemonset", None).toml).resources;
    let names: Vec<&str> = gpus.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!((names[0], *names.last().unwrap()), ("amd.com/spx_nps1", "amd.com/gpu"));
    assert_eq!(gpus[0].select.attribute["compute_partition"], ["spx"]);
    let object = "kind: DeviceConfig\nspec: { devicePlugin: { devicePluginArguments: \
                  { resource_naming_strategy: single } } }\n";
    let imported = config(&import(Peer::Amd, object, None, None).unwrap().toml).resources;
    assert_eq!((imported.len(), imported[0].select.uniform), (1, true));
    let other = gpus.last().unwrap().exclude.as_ref().unwrap();
    assert_eq!(other.attribute["memory_partition"], ["?*"], "only GPUs without modes");
    // The plugin's arguments are usually absent, and other settings are the operator's.
    let usual = "kind: DeviceConfig\nmetadata: { name: gpu }\nspec: { driver: { enable: true, \
                 driverType: container }, selector: { a: b }, devicePlugin: \
                 { enableNodeLabeller: true } }\n";
    let imported = import(Peer::Amd, usual, None, None).unwrap();
    assert_eq!(imported.warnings, ["device ids change: drain the node first"]);
    let resources = config(&imported.toml).resources;
    assert_eq!((resources.len(), resources[0].select.uniform), (1, true));
    for kind in ["vf-passthrough", "pf-passthrough"] {
        let guests = usual.replace("container", kind);
        let error = import(Peer::Amd, &guests, None, None).unwrap_err().to_string();
        assert!(error.contains(kind) && error.contains("contract `kubevirt`"), "{error}");
    }
    // The operator's chart has the spec of the object.
    let spec = |kind: &str| {
        format!(
            "deviceConfig:\n  spec:\n    driver: {{ driverType: {kind} }}\n    devicePlugin: \
             {{ devicePluginArguments: {{ resource_naming_strategy: mixed, pulse: '30' }} }}\n"
        )
    };
    let release = |kind: &str| {
        let values: String = spec(kind).lines().map(|line| format!("    {line}\n")).collect();
        format!("kind: HelmRelease\nspec:\n  values:\n{values}")
    };
    for values in [&spec as &dyn Fn(&str) -> String, &release] {
        let error =
            import(Peer::Amd, &values("vf-passthrough"), None, None).unwrap_err().to_string();
        assert!(
            error.contains("`deviceConfig.spec.driver") || error.contains("`driver.driverType`"),
            "{error}"
        );
        let imported = import(Peer::Amd, &values("container"), None, None).unwrap();
        assert_eq!((imported.wrong, imported.warnings.len()), (0, 2), "{:?}", imported.warnings);
        assert!(imported.toml.contains("amd.com/cpx_nps4"));
        let no_arguments = values("container").replace("devicePluginArguments", "nothing");
        let imported = import(Peer::Amd, &no_arguments, None, None).unwrap();
        assert_eq!(imported.warnings, ["device ids change: drain the node first"]);
    }
    let misspelt = object.replace("single", "single, plse: 5");
    let warnings = import(Peer::Amd, &misspelt, None, None).unwrap().warnings.join("\n");
    assert!(warnings.contains("did you mean `pulse`?"), "{warnings}");
    let unknown = "kind: DaemonSet\nspec: { template: { spec: { containers: [{ image: \
                   rocm/k8s-device-plugin, env: [{ name: S, valueFrom: {} }], \
                   args: [-resource_naming_strategy=$(S)] }] } } }\n";
    let error = import(Peer::Amd, unknown, None, None).unwrap_err().to_string();
    assert!(error.contains("has no value in the manifest"), "{error}");
}

#[test]
fn akris_rules() {
    let imported = of(Peer::Akri, "akri-configuration", None);
    let cameras = config(&imported.toml).resources.remove(0);
    assert_eq!(cameras.name.as_str(), "akri.sh/akri-udev-video");
    assert_eq!(cameras.sharing, Sharing::Replicas(5));
    let paths: Vec<_> = cameras.paths.iter().map(|path| path.host.beginning()).collect();
    assert_eq!(paths, ["/dev/video", "/dev/snd/", "/dev/tty", "/dev/ttyACM"]);
    assert_eq!(cameras.paths[0].permissions, "rw");
    let key = "ATTRS{serial}".to_owned();
    assert!(cameras.paths[2].udev.contains(&(key, "A5*".into())), "{:?}", cameras.paths[2].udev);
    assert!(!cameras.env.contains_key("PATTERN"), "its braces would be a placeholder");
    for (details, error) in [
        ("udevRules: ['KERNEL==\"a\"'], groupRecursive: true", "makes one device of the nodes"),
        ("udevRules: []", "no rule of it has an equivalent"),
        ("permissions: x, udevRules: ['KERNEL==\"a\"']", "where `r`, `w`, `m`"),
    ] {
        let source = format!(
            "kind: Configuration\nmetadata: {{ name: a }}\nspec:\n  discoveryHandler:\n    \
             name: udev\n    discoveryDetails: |\n      {{ {details} }}\n"
        );
        let warnings = import(Peer::Akri, &source, None, None).unwrap_err().warnings.join("\n");
        assert!(warnings.contains(error), "{warnings}");
    }
    let onvif = "kind: Configuration\nmetadata: { name: a }\nspec: { discoveryHandler: { name: \
                 onvif, discoveryDetails: '' } }\n";
    let error = import(Peer::Akri, onvif, None, None).unwrap_err().to_string();
    assert!(error.contains("only the devices of `udev`"), "{error}");
}

#[test]
fn one_of_several_objects_is_selected_by_its_name() {
    let object = |name: &str| {
        format!(
            "---\nkind: Configuration\nmetadata: {{ namespace: a, name: {name} }}\nspec:\n  \
             discoveryHandler:\n    name: udev\n    discoveryDetails: |\n      \
             {{ udevRules: ['KERNEL==\"{name}\"'] }}\n"
        )
    };
    let two = object("x") + &object("y");
    let error = import(Peer::Akri, &two, None, None).unwrap_err().to_string();
    assert_eq!(error, "the input has `a/x`, `a/y`; select one with `--key`");
    for key in ["y", "a/y"] {
        let imported = import(Peer::Akri, &two, Some(key), None).unwrap();
        assert!(imported.toml.contains("\"akri.sh/y\""), "{}", imported.toml);
    }
    let error = import(Peer::Akri, &two, Some("z"), None).unwrap_err().to_string();
    assert_eq!(error, "the input has no `z`; it has `a/x`, `a/y`");
    let device_config =
        |name: &str| format!("---\nkind: DeviceConfig\nmetadata: {{ name: {name} }}\nspec: {{}}\n");
    let two = device_config("x") + &device_config("y");
    let error = import(Peer::Amd, &two, None, None).unwrap_err().to_string();
    assert_eq!(error, "the input has `x`, `y`; select one with `--key`");
    assert!(import(Peer::Amd, &two, Some("x"), None).is_ok());
}

#[test]
fn kubevirts_host_devices() {
    let devices = config(&of(Peer::Kubevirt, "kubevirt-devices", None).toml);
    let names: Vec<&str> = devices.resources.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "nvidia.com/TU104GL_Tesla_T4",
            "example.org/nvme",
            "nvidia.com/GRID_T4-1Q",
            "example.org/stick"
        ]
    );
    let gpus = &devices.resources[0];
    let selected: Vec<_> =
        gpus.selections().map(|of| (of.vendor[0], of.device[0], of.driver.join(","))).collect();
    let driver = || "vfio-pci".to_owned();
    assert_eq!(selected, [(0x10de, 0x1eb8, driver()), (0x10de, 0x1db6, driver())]);
    assert_eq!(devices.resources[2].select.mdev_type, ["GRID_T4-1Q", "GRID T4-1Q"]);
}

#[test]
fn a_mapping_of_another_type_is_a_wrong_value() {
    let read = |peer, text: &str| import(peer, text, None, None).unwrap();
    for (text, path) in [
        ("flags: none", "flags"),
        ("flags: {plugin: yes}", "flags.plugin"),
        ("sharing: [a]", "sharing"),
        ("sharing: {mps: 4}", "sharing.mps"),
        ("sharing: {timeSlicing: 4}", "sharing.timeSlicing"),
        ("imex: 5", "imex"),
    ] {
        let imported = read(Peer::Nvidia, &format!("version: v1\n{text}\n"));
        let wrong = format!("line 2: `{path}` is ");
        assert!(
            imported.wrong == 1 && imported.warnings.iter().any(|warning| warning.contains(&wrong)),
            "{:?}",
            imported.warnings
        );
    }
    let pools = r#"{"configList": [
        {"resourceName": "a", "rdmaHcaMax": 1, "selectors": "x", "devices": ["ib0"]},
        {"resourceName": "b", "rdmaHcaMax": 1, "selectors": ["x"]},
        {"resourceName": "c", "rdmaHcaMax": 1, "selectors": {"ifNames": ["ib1"]}}]}"#;
    let imported = read(Peer::RdmaShared, pools);
    assert_eq!(imported.wrong, 2, "{:?}", imported.warnings);
    assert!(
        imported.toml.contains("rdma/c") && !imported.toml.contains("rdma/a"),
        "{}",
        imported.toml
    );
}

#[test]
fn mellanox() {
    let pools = config(&of(Peer::RdmaShared, "rdma-shared-hcas", None).toml);
    assert_eq!(pools.resources[0].sharing, Sharing::Pool(100));
    assert_eq!(pools.resources[0].select.interface, ["ib0", "ib1"]);
}

#[test]
fn squats() {
    let devices = config(&of(Peer::Generic, "generic-devices", None).toml);
    let of: Vec<(&str, Sharing)> =
        devices.resources.iter().map(|spec| (spec.name.as_str(), spec.sharing)).collect();
    let expected = [
        ("example.org/serial", Sharing::Replicas(2)),
        ("example.org/calibrated", Sharing::Exclusive),
        ("example.org/fuse", Sharing::Replicas(10)),
        ("example.org/sound", Sharing::Exclusive),
        ("example.org/modem", Sharing::Exclusive),
        ("example.org/each", Sharing::Exclusive),
        ("example.org/dongle", Sharing::Exclusive),
        ("example.org/capture", Sharing::Exclusive),
    ];
    assert_eq!(of, expected);
    assert_eq!(devices.resources[4].per_container, PerContainer::One);
    let usb: Vec<String> = devices.resources[6].usb.iter().map(ToString::to_string).collect();
    let expected = ["USB 0403:6001 with the serial number A1", "USB 1a6e:089a", "USB 18d1:9302"];
    assert_eq!(usb, expected);
    let capture = &devices.resources[7];
    let groups: Vec<Vec<(String, bool)>> = capture
        .groups
        .iter()
        .map(|group| {
            group.iter().map(|member| (member.path.host.to_string(), member.optional)).collect()
        })
        .collect();
    let of = |hosts: &[(&str, bool)]| -> Vec<(String, bool)> {
        hosts.iter().map(|(host, optional)| (format!("/dev/snd/{host}"), *optional)).collect()
    };
    let expected = [
        of(&[("controlC0", false), ("pcmC0D0c", false)]),
        of(&[("controlC1", false), ("timer", true), ("pcmC1D0c", false)]),
    ];
    assert_eq!((groups, capture.per_container), (expected.into(), PerContainer::One));
}

#[test]
fn smarters() {
    let nodes = config(&of(Peer::Smarter, "smarter-conf", None).toml);
    assert_eq!(nodes.resources.len(), 5);
    assert!(nodes.resources.iter().all(|spec| spec.name.is_for_each_node()));
}

#[test]
fn gkes() {
    let shared = config(&of(Peer::Gke, "gke-shared", None).toml);
    let gpu = &shared.resources[0];
    assert_eq!(
        (gpu.sharing, gpu.per_container, &gpu.contract),
        (Sharing::Replicas(4), PerContainer::One, &Contract::Generic)
    );
    assert_eq!(gpu.mounts.len(), 2);
    assert_eq!(shared.health.fatal_xids, [48, 79, 95].into());
    let by_daemon_set = config(&of(Peer::Gke, "gke-daemonset", None).toml);
    let mount = &by_daemon_set.resources[0].mounts[0];
    assert_eq!(
        (mount.host.as_str(), mount.container.as_str()),
        ("/opt/nvidia", "/usr/local/nvidia")
    );
}

#[test]
fn a_failed_import_has_a_reason_with_its_place() {
    const NONE: &str = "no resource can be imported";
    for (peer, source, expected, warning) in [
        (Peer::Nvidia, "version: v2", "line 1: `version` is `v2`, where `v1` is expected", ""),
        (Peer::Nvidia, "[]", "`the file` is a list, where a configuration of NVIDIA's plugin", ""),
        (Peer::Sriov, "{}", "a configuration with `resourceList`", ""),
        (Peer::Sriov, "{\"resourceList\": []}", NONE, ""),
        (
            Peer::Sriov,
            "{\"resourceList\": [{}]}",
            NONE,
            "`resourceList[0]` is a mapping, where a `resourceName` is expected",
        ),
        (
            Peer::Sriov,
            "{\"resourceList\": [{\"resourceName\": \"A B\", \"selectors\": {}}]}",
            NONE,
            "intel.com/A B is left out: `resourceList[0]` (line 1): `intel.com/A B` is not a resource name",
        ),
        (
            Peer::RdmaShared,
            "configList:\n- resourceName: a\n  rdmaHcaMax: lots",
            NONE,
            "line 3: `configList[0].rdmaHcaMax` is `lots`, where a whole number",
        ),
        (Peer::Generic, "devices: 3", "line 1: `devices` is `3`, where a list is expected", ""),
        (
            Peer::Smarter,
            "- devicematch: x",
            NONE,
            "`[0]` (line 1) is left out: line 1: `[0]` is a mapping, where a `devicematch` and",
        ),
        (Peer::Gke, "[]", "`the file` is a list, where a configuration of GKE's plugin", ""),
        (Peer::Smarter, "a: [", "neither YAML nor JSON", ""),
        (Peer::Smarter, "", "the file has 0 documents", ""),
        (
            Peer::Nvidia,
            "kind: ConfigMap\ndata: { a: x, b: y }",
            "the ConfigMap has the entries `a`, `b`; select one with `--key`",
            "",
        ),
        (Peer::Nvidia, "kind: ConfigMap", "the ConfigMap has no `data`", ""),
        (
            Peer::Sriov,
            "kind: Service\nspec: {}",
            "the input has no file of this plugin, only Service",
            "",
        ),
    ] {
        let error = import(peer, source, None, None).unwrap_err();
        let (message, warnings) = (error.to_string(), error.warnings.join("\n"));
        assert!(
            message.contains(expected) && warnings.contains(warning),
            "{message}\n{warnings}\nshould contain: {expected} {warning}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    let source = "kind: ConfigMap\ndata: { a: x, b: y }";
    assert_eq!(
        import(Peer::Nvidia, source, Some("c"), None).unwrap_err().to_string(),
        "the ConfigMap has no entry `c`; it has `a`, `b`"
    );
    assert!(import(Peer::Nvidia, "version: v1", Some("c"), None).is_err());
}

#[test]
fn a_flag_sets_the_domain() {
    let source = "{\"resourceList\": [{\"resourceName\": \"a\", \"selectors\": {\"drivers\": [\"vfio-pci\"]}}]}";
    assert!(
        import(Peer::Sriov, source, None, Some("example.org"))
            .unwrap()
            .toml
            .contains("\"example.org/a\"")
    );
    assert!(
        import(
            Peer::Generic,
            "devices: [{name: a, groups: [{paths: [{path: /dev/a}]}]}]",
            None,
            None
        )
        .unwrap()
        .toml
        .contains("\"squat.ai/a\"")
    );
}

/// Words that a plugin's file might contain.
const WORDS: &[&str] = &[
    "version",
    "v1",
    "flags",
    "plugin",
    "migStrategy",
    "none",
    "single",
    "deviceListStrategy",
    "envvar",
    "cdi-cri",
    "sharing",
    "mps",
    "timeSlicing",
    "resources",
    "name",
    "replicas",
    "nvidia.com/gpu",
    "gpu",
    "imex",
    "channelIDs",
    "mpsRoot",
    "resourceList",
    "resourceName",
    "resourcePrefix",
    "selectors",
    "vendors",
    "devices",
    "drivers",
    "pfNames",
    "rootDevices",
    "ens1f0#0-3",
    "15b3",
    "isRdma",
    "vdpaType",
    "vhost",
    "additionalInfo",
    "*",
    "deviceType",
    "accelerator",
    "configList",
    "rdmaHcaMax",
    "ifNames",
    "linkTypes",
    "ether",
    "domain",
    "example.org",
    "groups",
    "paths",
    "path",
    "/dev/fuse",
    "/dev/tty*",
    "mountPath",
    "/a/",
    "type",
    "Mount",
    "Device",
    "count",
    "limit",
    "permissions",
    "rw",
    "usb",
    "devicematch",
    "^video[0-9]*$",
    "^snd$",
    "nummaxdevices",
    "GPUPartitionSize",
    "GPUSharingConfig",
    "GPUSharingStrategy",
    "MaxSharedClientsPerGPU",
    "MaxTimeSharedClientsPerGPU",
    "HealthCriticalXid",
    "time-sharing",
    "1g.5gb",
    "true",
    "false",
    "1",
    "4",
    "0",
    "99999",
    "data",
    "kind",
    "ConfigMap",
    "",
    "null",
];

/// A word that a plugin's file might contain, or any text.
fn word() -> impl Strategy<Value = String> {
    prop_oneof![9 => prop::sample::select(WORDS).prop_map(str::to_owned), 1 => "\\PC{0,6}"]
}

/// A random document, as JSON.
fn document() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        word().prop_map(Into::into),
        any::<bool>().prop_map(Into::into),
        (0_i64..200).prop_map(Into::into)
    ];
    leaf.prop_recursive(6, 60, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::btree_map(word(), inner, 0..6)
                .prop_map(|map| map.into_iter().collect::<serde_json::Value>()),
        ]
    })
}

const PEERS: [Peer; 10] = [
    Peer::Nvidia,
    Peer::Sriov,
    Peer::RdmaShared,
    Peer::Generic,
    Peer::Smarter,
    Peer::Gke,
    Peer::IntelGpu,
    Peer::Kubevirt,
    Peer::Amd,
    Peer::Akri,
];

/// Checks that the result is a reason in one line or a valid file.
fn is_a_reason_or_a_valid_file(peer: Peer, source: &str) {
    match import(peer, source, None, None) {
        Ok(imported) => drop(config(&imported.toml)),
        Err(error) => {
            let message = error
                .warnings
                .iter()
                .map(String::as_str)
                .chain([&*error.to_string()])
                .all(|message| !message.is_empty() && !message.contains('\n'));
            assert!(message, "{error}: {:?}", error.warnings);
        }
    }
}

#[test]
fn a_random_document_gives_a_reason_or_a_valid_file() {
    let runs = Runs {
        cases: crate::config::tests::variants(1000),
        failure_persistence: None,
        ..Runs::default()
    };
    TestRunner::new(runs)
        .run(&(prop::sample::select(&PEERS[..]), document()), |(peer, document)| {
            is_a_reason_or_a_valid_file(peer, &document.to_string());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_damaged_source_gives_a_reason_or_a_valid_file() {
    let sources = [
        (Peer::Nvidia, "nvidia-shared"),
        (Peer::Nvidia, "nvidia-mps"),
        (Peer::Sriov, "sriov-pools"),
        (Peer::RdmaShared, "rdma-shared-hcas"),
        (Peer::Generic, "generic-devices"),
        (Peer::Smarter, "smarter-conf"),
        (Peer::Gke, "gke-shared"),
        (Peer::IntelGpu, "intel-gpu-daemonset"),
        (Peer::Kubevirt, "kubevirt-devices"),
        (Peer::Amd, "amd-daemonset"),
        (Peer::Akri, "akri-configuration"),
    ];
    let sources = sources.map(|(peer, name)| {
        (peer, std::fs::read_to_string(golden(&format!("{name}.source"))).unwrap())
    });
    let runs = Runs {
        cases: crate::config::tests::variants(1000),
        failure_persistence: None,
        ..Runs::default()
    };
    TestRunner::new(runs)
        .run(&(0..sources.len(), crate::config::tests::damage()), |(which, damage)| {
            let (peer, source) = &sources[which];
            let damaged =
                damage.iter().fold(source.clone().into_bytes(), |bytes, damage| damage.to(bytes));
            is_a_reason_or_a_valid_file(*peer, &String::from_utf8_lossy(&damaged));
            Ok(())
        })
        .unwrap();
}
