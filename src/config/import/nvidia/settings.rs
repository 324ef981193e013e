//! The settings of NVIDIA's plugin: their keys in the file, and the flags and variables that
//! override them.

use super::super::draft::Draft;
use super::super::field::{Decoder, Field};
use super::super::source::Source;

/// Every setting of the file, with the flag and the variable that override it.
const SETTINGS: &[(&str, &[&str], &str)] = &[
    ("flags.migStrategy", &["mig-strategy"], "MIG_STRATEGY"),
    ("flags.failOnInitError", &["fail-on-init-error"], "FAIL_ON_INIT_ERROR"),
    ("flags.mpsRoot", &["mps-root"], "MPS_ROOT"),
    ("flags.nvidiaDriverRoot", &["driver-root", "nvidia-driver-root"], "NVIDIA_DRIVER_ROOT"),
    ("flags.nvidiaDevRoot", &["dev-root", "nvidia-dev-root"], "NVIDIA_DEV_ROOT"),
    ("flags.gdrcopyEnabled", &["gdrcopy-enabled"], "GDRCOPY_ENABLED"),
    ("flags.gdsEnabled", &["gds-enabled"], "GDS_ENABLED"),
    ("flags.mofedEnabled", &["mofed-enabled"], "MOFED_ENABLED"),
    ("flags.useNodeFeatureAPI", &[], ""),
    ("flags.deviceDiscoveryStrategy", &["device-discovery-strategy"], "DEVICE_DISCOVERY_STRATEGY"),
    ("flags.plugin.passDeviceSpecs", &["pass-device-specs"], "PASS_DEVICE_SPECS"),
    ("flags.plugin.deviceListStrategy", &["device-list-strategy"], "DEVICE_LIST_STRATEGY"),
    ("flags.plugin.deviceIDStrategy", &["device-id-strategy"], "DEVICE_ID_STRATEGY"),
    ("flags.plugin.cdiAnnotationPrefix", &["cdi-annotation-prefix"], "CDI_ANNOTATION_PREFIX"),
    (
        "flags.plugin.nvidiaCTKPath",
        &["nvidia-cdi-hook-path", "nvidia-ctk-path"],
        "NVIDIA_CDI_HOOK_PATH",
    ),
    (
        "flags.plugin.containerDriverRoot",
        &["driver-root-ctr-path", "container-driver-root"],
        "DRIVER_ROOT_CTR_PATH",
    ),
    (
        "flags.plugin.sharedDevicesAllocationPolicy",
        &["shared-devices-allocation-policy"],
        "SHARED_DEVICES_ALLOCATION_POLICY",
    ),
    ("imex.channelIDs", &["imex-channel-ids"], "IMEX_CHANNEL_IDS"),
    ("imex.required", &["imex-required"], "IMEX_REQUIRED"),
];

/// Every key that is read.
pub(in crate::config::import) const KEYS: &[&str] = &[
    "version",
    "flags.migStrategy",
    "flags.failOnInitError",
    "flags.mpsRoot",
    "flags.nvidiaDriverRoot",
    "flags.nvidiaDevRoot",
    "flags.gdrcopyEnabled",
    "flags.gdsEnabled",
    "flags.mofedEnabled",
    "flags.useNodeFeatureAPI",
    "flags.deviceDiscoveryStrategy",
    "flags.plugin.passDeviceSpecs",
    "flags.plugin.deviceListStrategy",
    "flags.plugin.deviceIDStrategy",
    "flags.plugin.cdiAnnotationPrefix",
    "flags.plugin.nvidiaCTKPath",
    "flags.plugin.containerDriverRoot",
    "flags.plugin.sharedDevicesAllocationPolicy",
    "flags.gfd",
    "resources",
    "sharing.timeSlicing.renameByDefault",
    "sharing.timeSlicing.failRequestsGreaterThanOne",
    "sharing.timeSlicing.resources[].name",
    "sharing.timeSlicing.resources[].replicas",
    "sharing.timeSlicing.resources[].rename",
    "sharing.timeSlicing.resources[].devices",
    "sharing.mps.renameByDefault",
    "sharing.mps.failRequestsGreaterThanOne",
    "sharing.mps.resources[].name",
    "sharing.mps.resources[].replicas",
    "sharing.mps.resources[].rename",
    "sharing.mps.resources[].devices",
    "imex.channelIDs",
    "imex.required",
    "DP_DISABLE_HEALTHCHECKS",
    "DP_ENABLE_HEALTHCHECKS",
];

/// The settings of the file and of the container.
pub(super) struct Settings<'a> {
    pub(super) source: &'a Source,
    pub(super) root: Option<Field<'a>>,
}

impl<'a> Settings<'a> {
    /// The value in effect: the flag, else the variable, else the file.
    pub(super) fn get(&self, path: &str) -> Option<Field<'a>> {
        let in_file = self
            .root
            .clone()
            .and_then(|root| path.split('.').try_fold(root, |field, key| field.get(key)));
        let (_, flags, variable) = SETTINGS.iter().find(|(setting, ..)| *setting == path)?;
        let value =
            self.source.flags.last(flags, variable).map(|flag| flag.field(Decoder::JsonOfYaml));
        value.or(in_file)
    }

    /// Warns of flags and variables without a value in the manifest.
    pub(super) fn elsewhere(&self, draft: &mut Draft) {
        for elsewhere in &self.source.flags.elsewhere {
            let is_it = |(_, flags, variable): &&(&str, &[&str], &str)| {
                flags.contains(&&*elsewhere.name) || *variable == elsewhere.name
            };
            if let Some((path, ..)) = SETTINGS.iter().find(is_it) {
                draft.warn(format!(
                    "`{}` at {} is left out: its value is not in the manifest; it is `{path}` in a file",
                    elsewhere.name, elsewhere.place
                ));
            }
        }
    }
}
