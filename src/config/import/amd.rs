//! AMD's GPU plugin (ROCm/k8s-device-plugin: `cmd/k8s-device-plugin/main.go`): the flags of its
//! container, or the same in a DeviceConfig object of AMD's GPU operator.

use super::super::tree::{Is, Table};
use super::doc::Doc;
use super::draft::{Draft, Offer};
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_table, text, texts};

/// Every key that is read; flags have the same names.
pub(super) const KEYS: [&str; 4] =
    [STRATEGY, PULSE, "devicePlugin.devicePluginArguments", "driver.driverType"];
const STRATEGY: &str = "resource_naming_strategy";
const PULSE: &str = "pulse";

/// Keys of a DeviceConfig, with the settings of AMD's GPU operator and of its other parts.
const OF_OPERATOR: [&str; 9] = [
    "driver",
    "devicePlugin",
    "metricsExporter",
    "testRunner",
    "configManager",
    "remediationWorkflow",
    "draDriver",
    "commonConfig",
    "selector",
];

/// The attributes of a GPU with its modes.
const ATTRIBUTES: [&str; 2] = ["compute_partition", "memory_partition"];

/// Modes of partitioned GPUs: the combinations of the MI300 series. Linux `amdgpu_gfx.h` and
/// `amdgpu_gmc.h` have the names.
const MODES: [(&str, &str); 9] = [
    ("spx", "nps1"),
    ("dpx", "nps1"),
    ("dpx", "nps2"),
    ("tpx", "nps1"),
    ("tpx", "nps4"),
    ("qpx", "nps1"),
    ("qpx", "nps4"),
    ("cpx", "nps1"),
    ("cpx", "nps4"),
];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let root = source.file.as_ref().map(|file| Field::root(file, Decoder::Yaml));
    if let Some(root) = root.as_ref().filter(|root| !root.is_map()) {
        return Err(root.wrong("the settings of AMD's GPU plugin, a mapping,"));
    }
    if let Some(root) = &root {
        refuse_passthrough(root)?;
    }
    let plugin = root.as_ref().and_then(|root| root.get("devicePlugin"));
    let arguments = plugin.and_then(|plugin| plugin.get("devicePluginArguments"));
    if let Some(arguments) = arguments.as_ref().filter(|arguments| !arguments.is_map()) {
        return Err(arguments.wrong("the arguments of AMD's GPU plugin, a mapping,"));
    }
    let settings = arguments.as_ref().or(root.as_ref());
    let get = |key: &str| {
        let by_flag = source.flags.last(&[key], "").map(|flag| flag.field(Decoder::JsonOfYaml));
        by_flag.or_else(|| settings?.get(key)).filter(Field::has_effect)
    };
    if let Some(elsewhere) = source.flags.elsewhere.iter().find(|of| of.name == STRATEGY) {
        return Err(ImportError::new(format!(
            "`--{STRATEGY}` at {} has no value in the manifest, and without it the names of the \
             resources are not known",
            elsewhere.place
        )));
    }
    let is_mixed = get(STRATEGY).map_or(Ok(false), |strategy| match strategy.text()? {
        "single" => Ok(false),
        "mixed" => Ok(true),
        _ => Err(strategy.wrong("`single` or `mixed`")),
    });
    let is_mixed = match is_mixed {
        Ok(is_mixed) => is_mixed,
        Err(error) => {
            draft.wrong("each resource", &error);
            return Ok(());
        }
    };
    let place = root.as_ref().map_or_else(|| "the container".to_owned(), Field::place);
    let mut offer = |table: Table| draft.offers.push(Offer { table, place: place.clone() });
    if is_mixed {
        MODES.into_iter().for_each(|modes| offer(gpus(Some(modes))));
    }
    let mut others = gpus(None);
    if is_mixed {
        // A GPU whose modes are not in the list must not get another name than the plugin's.
        let mut exclude = Table::default();
        exclude.set("attribute", Is::Table(attribute(&["?*", "?*"])));
        set_table(&mut others, "exclude", exclude);
    }
    offer(others);
    if is_mixed {
        draft.warn(
            "the resources of modes that the node's GPUs never have stay empty; leave them out. \
             GPUs without modes are `amd.com/gpu`, as with the plugin; those with other modes \
             than these are not offered",
        );
    }
    if let Some(pulse) = get(PULSE) {
        // Health is always watched.
        draft.setting(Some(pulse), |pulse| match pulse.text().map(str::parse::<u32>) {
            // The arguments of a DeviceConfig are texts.
            Ok(Ok(seconds)) => Ok(seconds),
            _ => pulse.number(),
        });
    }
    draft.warn("device ids change: drain the node first");
    if let Some(arguments) = &arguments {
        draft.unknown(arguments, &KEYS);
    }
    if let Some(root) = &root {
        OF_OPERATOR.iter().filter_map(|key| root.doc().value(key)).for_each(Doc::read_all);
        draft.unknown(root, &KEYS);
    }
    Ok(())
}

/// An error for GPUs that the operator gives to guests: they do not have AMD's driver.
fn refuse_passthrough(spec: &Field<'_>) -> Result<(), ImportError> {
    let kind = spec.get("driver").and_then(|driver| driver.get("driverType"));
    match kind {
        Some(kind) if kind.text()?.ends_with("-passthrough") => Err(ImportError::new(format!(
            "{} is `{}`: these GPUs have the driver `vfio-pci`; offer them by a resource of the \
             class `pci` with the contract `kubevirt`",
            kind.place(),
            kind.text()?
        ))),
        _ => Ok(()),
    }
}

/// Globs for the modes of a GPU.
fn attribute(modes: &[&str; 2]) -> Table {
    let mut attribute = Table::default();
    ATTRIBUTES.iter().zip(modes).for_each(|(name, mode)| attribute.set(name, texts(&[mode])));
    attribute
}

/// The GPUs with these modes, or all GPUs of one kind.
fn gpus(modes: Option<(&str, &str)>) -> Table {
    let name = modes.map_or_else(
        || "amd.com/gpu".to_owned(),
        |(compute, memory)| format!("amd.com/{compute}_{memory}"),
    );
    let mut gpus = resource(&name, "gpu");
    gpus.set("contract", text("amd"));
    let mut select = Table::default();
    select.set("vendor", texts(&["1002"]));
    select.set("driver", texts(&["amdgpu"]));
    match modes {
        None => select.set("uniform", plain(true)),
        Some((compute, memory)) => {
            select.set("attribute", Is::Table(attribute(&[compute, memory])));
        }
    }
    set_table(&mut gpus, "select", select);
    gpus
}
