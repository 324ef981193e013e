//! `nvidia`: answers as NVIDIA's k8s-device-plugin. The answer names the GPUs, and NVIDIA's
//! container toolkit adds nodes and libraries. The names are in a variable, in mounts that
//! represent names, or CDI names. `nvidia_cdi` defines those names that no other program's file
//! defines.

use super::{Request, attribute, nodes};
use crate::domain::{
    ContainerEdits, Device, DeviceIdStrategy, DeviceListStrategy, EditDevice, EditMount,
    NvidiaFeature, NvidiaOptions, Switch,
};

const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// The toolkit reads the names of the files in this folder of the container as ids.
const DEVICES_FOLDER: &str = "/var/run/nvidia-container-devices";
/// Nodes of the driver as a whole, in the order of the answer; existing ones are passed with every
/// GPU.
pub(super) const SHARED_NODES: [&str; 4] =
    ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

pub(super) fn edits(request: &Request<'_>, options: &NvidiaOptions) -> ContainerEdits {
    let ids: Vec<&str> =
        request.devices.iter().map(|device| name(device, options.device_id_strategy)).collect();
    let channels: Vec<String> = options.imex_channels.iter().map(u32::to_string).collect();
    let tells_by = |strategy| options.device_list_strategy.contains(&strategy);
    let features =
        || NvidiaFeature::ALL.into_iter().filter(|feature| is_on(request, options, *feature));

    let mut edits = ContainerEdits::default();
    let cdi = cdi_names(&options.cdi_vendor, &ids, &channels, features());
    if tells_by(DeviceListStrategy::CdiAnnotations) {
        let key =
            format!("{}nvidia-device-plugin_{}", options.cdi_annotation_prefix, request.alloc_id);
        edits.annotations.insert(key, cdi.join(","));
    }
    if tells_by(DeviceListStrategy::CdiCri) {
        edits.cdi_devices = cdi;
    }
    if let Some(root) = &options.mps_root {
        let pipe = format!("/mps/{}/pipe", request.spec.name);
        let host = format!("{}/{}/pipe", root.trim_end_matches('/'), request.spec.name);
        edits.mounts.push(EditMount { host, container: pipe.clone(), read_only: false });
        let host = format!("{}/shm", root.trim_end_matches('/'));
        edits.mounts.push(EditMount { host, container: "/dev/shm".into(), read_only: false });
        edits.envs.insert("CUDA_MPS_PIPE_DIRECTORY".into(), pipe);
    }
    edits.envs.extend(features().map(|on| (on.variable().to_owned(), "enabled".to_owned())));
    if options.device_list_strategy.iter().all(|strategy| strategy.is_cdi()) {
        return edits;
    }

    if tells_by(DeviceListStrategy::EnvVar) {
        edits.envs.insert(VISIBLE_DEVICES.into(), ids.join(","));
        if !channels.is_empty() {
            edits.envs.insert("NVIDIA_IMEX_CHANNELS".into(), channels.join(","));
        }
    }
    if tells_by(DeviceListStrategy::VolumeMounts) {
        edits.envs.insert(VISIBLE_DEVICES.into(), DEVICES_FOLDER.into());
        let name = |name: String| EditMount {
            host: "/dev/null".into(),
            container: format!("{DEVICES_FOLDER}/{name}"),
            read_only: false,
        };
        edits.mounts.extend(ids.iter().map(|id| name((*id).to_owned())));
        edits.mounts.extend(channels.iter().map(|channel| name(format!("imex/{channel}"))));
    }
    if options.pass_device_specs {
        edits.devices = whole_nodes(request);
    }
    edits
}

/// What the containers of a claim get of one GPU: its CDI name, if a file defines one, else its
/// nodes. NVIDIA's runtime adds no other GPU in any case. Variables with lists are missing, because
/// a container may have several claims.
pub(super) fn claimed(
    request: &Request<'_>,
    options: &NvidiaOptions,
    name: Option<&str>,
) -> ContainerEdits {
    let mut edits = ContainerEdits::default();
    edits.envs.insert(VISIBLE_DEVICES.into(), "void".into());
    let Some(name) = name else {
        edits.devices = whole_nodes(request);
        return edits;
    };
    let channels: Vec<String> = options.imex_channels.iter().map(u32::to_string).collect();
    let features =
        NvidiaFeature::ALL.into_iter().filter(|feature| is_on(request, options, *feature));
    edits.cdi_devices = cdi_names(&options.cdi_vendor, &[name], &channels, features);
    edits
}

fn is_on(request: &Request<'_>, options: &NvidiaOptions, feature: NvidiaFeature) -> bool {
    match options.switch(feature) {
        Switch::Off => false,
        Switch::On => true,
        Switch::Auto => request.nvidia.features.contains(&feature),
    }
}

/// The nodes of the GPUs and of the IMEX channels: those of the driver as a whole first.
fn whole_nodes(request: &Request<'_>) -> Vec<EditDevice> {
    // The plugin knows no node of a Tegra system's GPU (`internal/rm/tegra_devices.go`,
    // `GetPaths`): the toolkit adds them.
    let is_whole = |device: &&&Device| attribute(device, "integrated").is_none();
    let devices: Vec<&Device> = request.devices.iter().filter(is_whole).copied().collect();
    let (mut shared, own): (Vec<_>, Vec<_>) = nodes::with(&devices, "rw")
        .into_iter()
        .partition(|node| SHARED_NODES.contains(&node.container.as_str()));
    shared.sort_by_key(|node| SHARED_NODES.iter().position(|path| *path == node.container));
    let channels = request.nvidia.channels.iter().map(|node| EditDevice {
        host: node.host.clone(),
        container: node.container.clone(),
        permissions: "rw".into(),
    });
    shared.into_iter().chain(own).chain(channels).collect()
}

/// Why a device cannot be named to a container; `None` if it can. NVIDIA's toolkit accepts a MIG
/// instance by NVML's UUID or number only (libnvidia-container, `select_mig_device`;
/// `nvidia-ctk cdi generate` uses these names too). With any other name the container does not
/// start.
pub(super) fn unanswerable(device: &Device, options: &NvidiaOptions) -> Option<String> {
    if attribute(device, "part") != Some("mig") {
        return None;
    }
    // NVIDIA's plugin refuses the resource (internal/plugin/mps.go).
    if options.mps_root.is_some() {
        return Some(
            "MPS shares whole GPUs and no MIG instances; remove `mps_root` from this resource, or \
             select the GPUs with `part = false`"
                .into(),
        );
    }
    let Some(uuid) = attribute(device, "uuid") else {
        return Some(
            "the name of this MIG instance, which NVIDIA's toolkit needs, comes from NVML only, which has not \
             reported it (`holdfast status` shows why); `contract = \"generic\"` provides its nodes"
                .into(),
        );
    };
    (options.has_cdi_names() && uuid.contains('/')).then(|| {
        format!("`{uuid}` is not allowed in a CDI name; use `device_list_strategy = [\"envvar\"]`")
    })
}

/// The GPU's name for the NVIDIA runtime. The GPU of a Tegra system is `tegra` in place of a UUID
/// (NVIDIA's device plugin, `internal/rm/tegra_devices.go`, `GetUUID`).
///
/// The driver shows no UUID before a GPU's first use, and a GPU that is never offered would never
/// be used. Until then the number is the name.
pub(super) fn name(device: &Device, strategy: DeviceIdStrategy) -> &str {
    let order = match strategy {
        DeviceIdStrategy::Uuid => ["integrated", "uuid", "index", "minor"],
        DeviceIdStrategy::Index => ["index", "integrated", "uuid", "minor"],
    };
    order.iter().find_map(|name| attribute(device, name)).unwrap_or(device.id.as_str())
}

fn cdi_names(
    vendor: &str,
    ids: &[&str],
    channels: &[String],
    features: impl Iterator<Item = NvidiaFeature>,
) -> Vec<String> {
    let gpus = ids.iter().map(|id| format!("{vendor}/gpu={id}"));
    let channels = channels.iter().map(|channel| format!("{vendor}/imex-channel={channel}"));
    let features = features.map(|feature| format!("{vendor}/{}=all", feature.as_str()));
    gpus.chain(channels).chain(features).collect()
}

#[cfg(test)]
mod tests {
    use super::super::NvidiaExtras;
    use super::super::testing::{
        ALLOC_ID, device, edits_of, edits_with, golden, paths, spec, with_extras,
    };
    use super::*;
    use crate::domain::{Contract, ContractKind, DeviceNode, ResourceSpec};

    fn gpus() -> [Device; 2] {
        let gpu = |uuid: &str, minor: &str, index: &str| {
            let nodes = [&format!("/dev/nvidia{minor}"), "/dev/nvidiactl", "/dev/nvidia-uvm"];
            device(uuid, &nodes, &[("uuid", uuid), ("minor", minor), ("index", index)])
        };
        // The driver numbers its nodes in the order of detection, the tools in the order of PCI
        // addresses.
        [gpu("GPU-1", "1", "0"), gpu("GPU-2", "0", "1")]
    }

    fn nvidia(options: NvidiaOptions) -> ResourceSpec {
        spec("nvidia.com/gpu", Contract::Nvidia(options))
    }

    #[test]
    fn the_gpus_are_named_in_the_order_of_the_request() {
        let [first, second] = gpus();
        let edits = edits_of(
            &with_extras(spec("nvidia.com/gpu", ContractKind::Nvidia)),
            &[&second, &first, &second],
        );
        assert_eq!(golden(&edits), include_str!("golden/nvidia.json").trim_end());
    }

    #[test]
    fn mounts_of_nothing_stand_for_names() {
        let [first, second] = gpus();
        let options = NvidiaOptions {
            device_list_strategy: vec![DeviceListStrategy::VolumeMounts],
            pass_device_specs: true,
            imex_channels: vec![0],
            ..NvidiaOptions::default()
        };
        let extras = NvidiaExtras {
            channels: vec![DeviceNode::at("/dev/nvidia-caps-imex-channels/channel0")],
            ..NvidiaExtras::default()
        };
        let edits = edits_with(&nvidia(options), &[&second, &first], &extras);
        assert_eq!(golden(&edits), include_str!("golden/nvidia-volume-mounts.json").trim_end());
    }

    #[test]
    fn cdi_alone_leaves_the_rest_to_the_runtime() {
        let [first, second] = gpus();
        let options = NvidiaOptions {
            device_list_strategy: vec![
                DeviceListStrategy::CdiAnnotations,
                DeviceListStrategy::CdiCri,
            ],
            device_id_strategy: DeviceIdStrategy::Index,
            pass_device_specs: true,
            gdrcopy: Switch::On,
            mofed: Switch::On,
            imex_channels: vec![0, 3],
            ..NvidiaOptions::default()
        };
        let edits = edits_of(&nvidia(options), &[&second, &first]);
        assert_eq!(golden(&edits), include_str!("golden/nvidia-cdi.json").trim_end());
        assert!(edits.annotations.keys().all(|key| key.ends_with(ALLOC_ID)));
    }

    #[test]
    fn mps_brings_its_pipes() {
        let [first, _] = gpus();
        let options = NvidiaOptions {
            mps_root: Some("/run/nvidia/mps".into()),
            gds: Switch::On,
            ..NvidiaOptions::default()
        };
        assert_eq!(
            golden(&edits_of(&nvidia(options), &[&first])),
            include_str!("golden/nvidia-mps.json").trim_end()
        );
    }

    #[test]
    fn a_feature_is_there_by_the_configuration_or_by_the_node() {
        use NvidiaFeature::{GdrCopy, Gds, Mofed};
        let [gpu, _] = gpus();
        let given = |gdrcopy, gds, mofed, has: &[NvidiaFeature]| {
            let by = vec![DeviceListStrategy::EnvVar, DeviceListStrategy::CdiCri];
            let options = NvidiaOptions {
                device_list_strategy: by,
                gdrcopy,
                gds,
                mofed,
                ..NvidiaOptions::default()
            };
            let features = has.iter().copied().collect();
            let extras = NvidiaExtras { features, ..NvidiaExtras::default() };
            let edits = edits_with(&nvidia(options), &[&gpu], &extras);
            let is_on = |feature: &NvidiaFeature| edits.envs.contains_key(feature.variable());
            let on: Vec<NvidiaFeature> = NvidiaFeature::ALL.into_iter().filter(is_on).collect();
            let names = on.iter().map(|on| format!("nvidia.com/{}=all", on.as_str()));
            assert_eq!(edits.cdi_devices[1..], names.collect::<Vec<_>>());
            on
        };
        let usual = Switch::default();
        assert_eq!(given(usual, usual, usual, &[]), []);
        assert_eq!(given(usual, usual, usual, &[GdrCopy, Mofed]), [GdrCopy, Mofed]);
        let all = [GdrCopy, Gds, Mofed];
        assert_eq!(given(Switch::Off, usual, Switch::Off, &all), [Gds]);
        assert_eq!(given(Switch::On, Switch::Off, usual, &[]), [GdrCopy]);
    }

    #[test]
    fn two_ways_at_once_are_both_there() {
        let [first, _] = gpus();
        let options = NvidiaOptions {
            device_list_strategy: vec![DeviceListStrategy::EnvVar, DeviceListStrategy::CdiCri],
            pass_device_specs: true,
            ..NvidiaOptions::default()
        };
        let edits = edits_of(&nvidia(options), &[&first]);
        assert_eq!(
            (edits.envs[VISIBLE_DEVICES].as_str(), &*edits.cdi_devices[0]),
            ("GPU-1", "nvidia.com/gpu=GPU-1")
        );
        assert_eq!(paths(&edits), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]);
    }

    #[test]
    fn instances_of_one_gpu_share_its_node() {
        let instance = |n: u32| {
            let caps = [
                format!("/dev/nvidia-caps/nvidia-cap{n}"),
                format!("/dev/nvidia-caps/nvidia-cap{}", n + 1),
            ];
            device(
                &format!("MIG-{n}"),
                &["/dev/nvidia0", &caps[0], &caps[1], "/dev/nvidiactl"],
                &[("uuid", &format!("MIG-{n}"))],
            )
        };
        let edits = edits_of(
            &nvidia(NvidiaOptions { pass_device_specs: true, ..NvidiaOptions::default() }),
            &[&instance(12), &instance(21)],
        );
        let caps = [12, 13, 21, 22].map(|n| format!("/dev/nvidia-caps/nvidia-cap{n}"));
        assert_eq!(
            paths(&edits),
            ["/dev/nvidiactl", "/dev/nvidia0", &caps[0], &caps[1], &caps[2], &caps[3]]
        );
        assert_eq!(edits.envs[VISIBLE_DEVICES], "MIG-12,MIG-21");
    }

    #[test]
    fn an_instance_is_answered_by_its_own_uuid_or_not_at_all() {
        let options = |by: &[DeviceListStrategy]| NvidiaOptions {
            device_list_strategy: by.to_vec(),
            ..NvidiaOptions::default()
        };
        let instance = |uuid: Option<&str>| {
            let known = uuid.map(|uuid| ("uuid", uuid));
            let attributes: Vec<(&str, &str)> =
                [("part", "mig"), ("gi", "1"), ("ci", "0")].into_iter().chain(known).collect();
            device(
                "GPU-1-gi1-ci0",
                &["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"],
                &attributes,
            )
        };
        let why = |device: &Device, by: &[DeviceListStrategy]| {
            super::super::unanswerable(&nvidia(options(by)), device).unwrap_or_default()
        };
        let [cdi, both] = [
            &[DeviceListStrategy::CdiCri][..],
            &[DeviceListStrategy::EnvVar, DeviceListStrategy::CdiAnnotations],
        ];

        let unnamed = instance(None);
        for by in [cdi, both, &[DeviceListStrategy::EnvVar], &[DeviceListStrategy::VolumeMounts]] {
            assert!(
                why(&unnamed, by).contains("NVML only") && why(&unnamed, by).contains("generic"),
                "{by:?}"
            );
        }
        let by_place = instance(Some("MIG-GPU-1/1/0"));
        assert_eq!(why(&by_place, &[DeviceListStrategy::EnvVar]), "");
        assert_eq!(
            edits_of(&nvidia(NvidiaOptions::default()), &[&by_place]).envs[VISIBLE_DEVICES],
            "MIG-GPU-1/1/0"
        );
        for by in [cdi, both] {
            assert!(
                why(&by_place, by).contains("`MIG-GPU-1/1/0` is not allowed in a CDI name"),
                "{by:?}"
            );
        }
        let named = instance(Some("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"));
        assert_eq!(why(&named, both), "");
        let edits = edits_of(
            &nvidia(options(&[DeviceListStrategy::CdiAnnotations, DeviceListStrategy::CdiCri])),
            &[&named],
        );
        assert_eq!(golden(&edits), include_str!("golden/nvidia-mig-cdi.json").trim_end());
        let [gpu, _] = gpus();
        assert_eq!(why(&gpu, cdi), "");
        let by_mps =
            NvidiaOptions { mps_root: Some("/run/mps".into()), ..NvidiaOptions::default() };
        let why = |device: &Device| super::super::unanswerable(&nvidia(by_mps.clone()), device);
        assert!(why(&named).unwrap().contains("MPS shares whole GPUs"));
        assert_eq!(why(&gpu), None);
        assert_eq!(
            super::super::unanswerable(&spec("nvidia.com/gpu", ContractKind::Generic), &unnamed),
            None
        );
    }

    #[test]
    fn a_gpu_without_a_known_uuid_is_named_by_its_number() {
        let visible = |attributes: &[(&'static str, &str)]| {
            let gpu = device("0000:18:00.0", &["/dev/nvidia3"], attributes);
            edits_of(&spec("nvidia.com/gpu", ContractKind::Nvidia), &[&gpu]).envs[VISIBLE_DEVICES]
                .clone()
        };
        assert_eq!(visible(&[("minor", "3"), ("index", "1")]), "1");
        assert_eq!(visible(&[("minor", "3")]), "3");
        assert_eq!(visible(&[]), "0000:18:00.0");
    }
}
