//! NVIDIA's k8s-device-plugin: the YAML of `version: v1`, its flags and variables, as its code
//! reads them.

use super::super::sharing::SHARES_MAX;
use super::super::tree::{Is, Table, Value};
use super::field::{Decoder, Field};
use super::source::Source;
use super::{Draft, ImportError, plain, resource, set_from, set_table, text, texts};
use crate::domain::{MIG_PROFILE, MigStrategy};

const GPU: &str = "nvidia.com/gpu";
const IGNORED: &str = "NVIDIA's plugin reads it and does not use it either";

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
pub(super) const KEYS: &[&str] = &[
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
];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let root = source.file.as_ref().map(|file| Field::root(file, Decoder::JsonOfYaml));
    if let Some(root) = root.as_ref().filter(|root| !root.is_map()) {
        return Err(
            root.wrong("a configuration of NVIDIA's plugin, which begins with `version: v1`")
        );
    }
    let of_root = |key: &str| root.as_ref().and_then(|root| root.get(key));
    if let Some(version) = of_root("version")
        && !matches!(version.text()?, "v1" | "")
    {
        return Err(version.wrong("`v1`"));
    }
    for path in ["flags", "flags.plugin", "flags.gfd", "sharing", "imex"] {
        let parent = root
            .clone()
            .and_then(|root| path.split('.').try_fold(root, |field, key| field.get(key)));
        let keys = |parent: &Field<'_>| {
            if parent.is_map() { Ok(()) } else { Err(parent.wrong("a mapping")) }
        };
        draft.setting(parent, keys);
    }
    let settings = Settings { source, root: root.clone() };
    settings.elsewhere(draft);
    let strategy = mig(&settings, draft);
    let options = options(&settings, draft);
    let shares = of_root("sharing").map(|sharing| share(&sharing, &settings, strategy, draft));
    for offer in offers(strategy, &shares.unwrap_or_default(), &options, &settings, draft) {
        match &root {
            Some(root) => draft.offer(offer, root),
            None => {
                draft.offers.push(super::Offer { table: offer, place: "the container".to_owned() });
            }
        }
    }
    draft.no_equivalent(
        of_root("resources"),
        &format!("{IGNORED}; `name` and `select` of a [[resource]] do this here"),
    );
    draft.no_equivalent(
        of_root("flags").and_then(|flags| flags.get("gfd")),
        "labels are gpu-feature-discovery's; keep it running next to Holdfast",
    );
    for (key, why) in [
        (
            "flags.failOnInitError",
            "Holdfast waits for a driver, and `holdfast status` shows missing parts",
        ),
        ("flags.useNodeFeatureAPI", "Holdfast sets no labels"),
    ] {
        draft.no_equivalent(settings.get(key), why);
    }
    for (key, usual, why) in [
        (
            "flags.nvidiaDriverRoot",
            "/",
            "the library is found automatically, or set by `[nvidia] nvml`",
        ),
        ("flags.nvidiaDevRoot", "/", "the driver's nodes are searched below /dev only"),
        (
            "flags.deviceDiscoveryStrategy",
            "auto",
            "GPUs are found in the driver's files; Tegra's integrated GPU is not among them",
        ),
    ] {
        if settings.get(key).is_some_and(|setting| setting.text() != Ok(usual)) {
            draft.no_equivalent(settings.get(key), why);
        }
    }
    if let Some(root) = &root {
        draft.unknown(root, KEYS);
    }
    Ok(())
}

/// The settings of the file and of the container.
struct Settings<'a> {
    source: &'a Source,
    root: Option<Field<'a>>,
}

impl<'a> Settings<'a> {
    /// The value in effect: the flag, else the variable, else the file.
    fn get(&self, path: &str) -> Option<Field<'a>> {
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
    fn elsewhere(&self, draft: &mut Draft) {
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

/// The table `nvidia` of the resource.
fn options(settings: &Settings<'_>, draft: &mut Draft) -> Table {
    const STRATEGIES: [&str; 4] = ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"];
    let mut options = Table::default();
    if let Some(field) = settings.get("flags.plugin.deviceListStrategy").filter(Field::has_effect) {
        // A flag's text may contain several strategies.
        let strategies = draft.setting(Some(field.clone()), |field| {
            let texts_given =
                if field.is_list() { field.texts()? } else { vec![field.text()?.to_owned()] };
            let strategies: Vec<String> = texts_given
                .iter()
                .flat_map(|text| text.split(','))
                .map(|text| text.trim().to_owned())
                .collect();
            let is_known = |strategy: &String| STRATEGIES.contains(&strategy.as_str());
            if strategies.iter().all(is_known) {
                Ok(strategies)
            } else {
                Err(field.wrong("`envvar`, `volume-mounts`, `cdi-annotations` or `cdi-cri`"))
            }
        });
        if let Some(strategies) = strategies {
            if strategies.iter().any(|strategy| strategy.starts_with("cdi-")) {
                draft.warn(
                    "CDI names are those of the vendor nvidia.com here; Holdfast writes a CDI file for those that no other file defines",
                );
            }
            set_from(&mut options, "device_list_strategy", texts(&strategies), &field);
        }
    }
    for (theirs, ours, known) in [
        ("flags.plugin.deviceIDStrategy", "device_id_strategy", Some(["uuid", "index"])),
        ("flags.plugin.cdiAnnotationPrefix", "cdi_annotation_prefix", None),
    ] {
        let Some(field) = settings.get(theirs) else { continue };
        let read = |field: &Field<'_>| match (field.text()?, known) {
            (value, Some(known)) if !known.contains(&value) => {
                Err(field.wrong("`uuid` or `index`"))
            }
            (value, _) => Ok(text(value)),
        };
        if let Some(value) = draft.setting(Some(field.clone()), read) {
            set_from(&mut options, ours, value, &field);
        }
    }
    for (theirs, ours) in [
        ("flags.plugin.passDeviceSpecs", "pass_device_specs"),
        ("flags.gdrcopyEnabled", "gdrcopy"),
        ("flags.gdsEnabled", "gds"),
        ("flags.mofedEnabled", "mofed"),
    ] {
        if let Some(enabled) = draft.setting(settings.get(theirs), Field::truth) {
            options.set(ours, plain(enabled));
        }
    }
    let generated = "the driver and the program for hooks are found automatically";
    draft.no_equivalent(settings.get("flags.plugin.nvidiaCTKPath"), generated);
    draft.no_equivalent(settings.get("flags.plugin.containerDriverRoot"), generated);
    let channels = settings.get("imex.channelIDs").filter(Field::has_effect);
    let numbers = |field: &Field<'_>| {
        if field.is_list() {
            field.items()?.iter().map(Field::number).collect()
        } else {
            Ok(vec![field.number()?])
        }
    };
    if let Some(channels) = draft.setting(channels, numbers) {
        let channels =
            channels.into_iter().map(|channel| Value { place: None, is: plain(channel) });
        options.set("imex_channels", Is::List(channels.collect()));
    }
    draft.no_equivalent(
        settings.get("imex.required"),
        "a channel whose node is missing fails the container that requests it",
    );
    options
}

/// The resources: whole GPUs, the MIG instances of each shared profile, and those of each other
/// profile.
fn offers(
    strategy: MigStrategy,
    shares: &[Share],
    options: &Table,
    settings: &Settings<'_>,
    draft: &mut Draft,
) -> Vec<Table> {
    let profiles = shares.iter().filter_map(|share| share.profile.as_deref());
    let is_shared = shares.iter().any(|share| share.profile.is_none());
    let policy = placement(settings, is_shared, strategy, draft);
    let offer = |name: &str, profile: Option<&str>, part: Option<bool>| {
        let mut offer = resource(name, "gpu");
        offer.set("contract", text("nvidia"));
        let mut options = options.clone();
        let share = shares.iter().find(|share| share.profile.as_deref() == profile);
        if let Some(share) = share {
            share.apply(&mut offer, &mut options);
        }
        // MIG instances of one GPU are equally near.
        let is_part = part == Some(true) && policy.is_some();
        if share.is_some() || is_part {
            offer.set("placement", text(policy.unwrap_or("spread")));
        }
        let mut select = Table::default();
        select.set("vendor", texts(&["10de"]));
        select.set("driver", texts(&["nvidia"]));
        if let Some(part) = part {
            select.set("part", plain(part));
        }
        if strategy == MigStrategy::Single {
            select.set("uniform", plain(true));
        }
        if let Some(profile) = profile.filter(|profile| !profile.contains('{')) {
            select.set("mig_profile", texts(&[profile]));
        }
        set_table(&mut offer, "select", select);
        set_table(&mut offer, "nvidia", options);
        offer
    };
    let part = (strategy != MigStrategy::Single).then_some(false);
    let mut offers = vec![offer(GPU, None, part)];
    if strategy == MigStrategy::Mixed {
        offers.extend(
            profiles.chain([MIG_PROFILE]).map(|profile| {
                offer(&format!("nvidia.com/mig-{profile}"), Some(profile), Some(true))
            }),
        );
    }
    offers
}

/// The MIG strategy. A wrong value counts as none, the plugin's default.
fn mig(settings: &Settings<'_>, draft: &mut Draft) -> MigStrategy {
    let drain = "ids of MIG instances change: drain nodes with MIG before the change";
    let known = |field: &Field<'_>| match field.text()? {
        "none" => Ok(MigStrategy::None),
        "single" => Ok(MigStrategy::Single),
        "mixed" => Ok(MigStrategy::Mixed),
        _ => Err(field.wrong("`none`, `single` or `mixed`")),
    };
    let field = settings.get("flags.migStrategy");
    let path = field.as_ref().map(|field| field.path.clone()).unwrap_or_default();
    let strategy = draft.setting(field, known).unwrap_or_default();
    match strategy {
        MigStrategy::None => {}
        MigStrategy::Single => draft.warn(format!("`{path}` is `single`: {drain}")),
        MigStrategy::Mixed => draft.warn(format!("`{path}` is `mixed`: {drain}")),
    }
    strategy
}

/// The plugin's policy for shares and MIG instances, as our `placement`. It places whole GPUs near
/// to each other, as we do by default.
fn placement(
    settings: &Settings<'_>,
    is_shared: bool,
    strategy: MigStrategy,
    draft: &mut Draft,
) -> Option<&'static str> {
    let field = settings.get("flags.plugin.sharedDevicesAllocationPolicy");
    let policy = draft.setting(field.clone(), |field| match field.text()? {
        "distributed" => Ok("spread"),
        "packed" => Ok("packed"),
        _ => Err(field.wrong("`distributed` or `packed`")),
    });
    if let (Some(field), Some(_), false, MigStrategy::Single) =
        (&field, policy, is_shared, strategy)
    {
        draft.warn(format!(
            "{} is left out: a resource has one `placement`, and whole GPUs need the default one",
            field.place()
        ));
    }
    policy
}

/// How a resource is shared.
struct Share {
    /// The profile of MIG instances; `None` for GPUs.
    profile: Option<String>,
    replicas: u32,
    /// Whether the name ends in `.shared`.
    is_renamed: bool,
    per_container: Option<&'static str>,
    /// The folder of the MPS control daemon.
    mps_root: Option<String>,
}

impl Share {
    fn apply(&self, offer: &mut Table, options: &mut Table) {
        offer.set("replicas", plain(self.replicas));
        if self.is_renamed
            && let Some(name) = offer.get("name").and_then(Value::as_text)
        {
            let name = format!("{name}.shared");
            offer.set("name", text(&name));
        }
        if let Some(per_container) = self.per_container {
            offer.set("per_container", text(per_container));
        }
        if let Some(root) = &self.mps_root {
            options.set("mps_root", text(root));
        }
    }
}

fn share(
    sharing: &Field<'_>,
    settings: &Settings<'_>,
    strategy: MigStrategy,
    draft: &mut Draft,
) -> Vec<Share> {
    let mut shares: Vec<Share> = Vec::new();
    let mps = sharing.get("mps");
    let time_slicing = sharing.get("timeSlicing").filter(Field::has_effect);
    if let (Some(mps), Some(time_slicing)) = (&mps, &time_slicing) {
        time_slicing.read_all();
        draft.warn(format!("{} is left out: `{}` overrides it", time_slicing.place(), mps.path));
    }
    let (way, is_mps) = match (mps, time_slicing) {
        (Some(mps), _) => (mps, true),
        (None, Some(time_slicing)) => (time_slicing, false),
        (None, None) => return shares,
    };
    // The plugin itself looks up the keys below here, in their exact spelling.
    let way = way.exact();
    let is_renamed = draft.setting(way.get("renameByDefault"), Field::truth).unwrap_or(false);
    let one = draft.setting(way.get("failRequestsGreaterThanOne"), Field::truth).unwrap_or(is_mps);
    let Some(entries) = way.get("resources").filter(Field::has_effect) else {
        draft.wrong(&format!("`{}`", way.path), &way.wrong("a list of `resources`"));
        return shares;
    };
    // A client of MPS has one share unless the file sets otherwise. Of other shares a container
    // gets as many as it requests.
    let per_container = match (is_mps, one) {
        (false, true) => Some("one"),
        (true, false) => Some("any"),
        _ => None,
    };
    let entries = draft.setting(Some(entries), |list| list.items()).unwrap_or_default();
    for entry in entries {
        match shared(&entry, !is_mps && strategy == MigStrategy::Mixed, draft) {
            Err(error) => {
                entry.read_all();
                draft.wrong(&format!("`{}`", entry.path), &error);
            }
            Ok(None) => {}
            Ok(Some((profile, _))) if shares.iter().any(|share| share.profile == profile) => {
                draft.wrong(
                    &format!("`{}`", entry.path),
                    &entry.wrong("a resource that occurs once"),
                );
            }
            Ok(Some((profile, replicas))) => {
                let mps_root = is_mps.then(|| mps_root(settings, draft));
                shares.push(Share { profile, replicas, is_renamed, per_container, mps_root });
            }
        }
    }
    if is_mps && !shares.is_empty() {
        draft.warn(format!(
            "`{}`: NVIDIA's MPS control daemon is needed as before, and Holdfast does not manage \
             it",
            way.path
        ));
    }
    shares
}

/// The folder of the MPS control daemon.
fn mps_root(settings: &Settings<'_>, draft: &mut Draft) -> String {
    let root = draft.setting(settings.get("flags.mpsRoot"), |root| root.text().map(str::to_owned));
    root.filter(|root| !root.is_empty()).unwrap_or_else(|| "/run/nvidia/mps".to_owned())
}

/// The MIG profile in the name of an entry, if it has one, and the number of shares per device.
/// `None` if the entry is about another resource.
fn shared(
    entry: &Field<'_>,
    has_profiles: bool,
    draft: &mut Draft,
) -> Result<Option<(Option<String>, u32)>, ImportError> {
    let need = || entry.wrong("a `name` and `replicas`");
    let name = entry.get("name").ok_or_else(need)?;
    let name = name.text()?;
    let field = entry.get("replicas").ok_or_else(need)?;
    let replicas = field.number()?;
    draft.no_equivalent(entry.get("rename"), IGNORED);
    draft
        .no_equivalent(entry.get("devices").filter(|devices| devices.text() != Ok("all")), IGNORED);
    let profile = name
        .strip_prefix("nvidia.com/")
        .unwrap_or(name)
        .strip_prefix("mig-")
        .filter(|profile| has_profiles && profile.starts_with(|c: char| c.is_ascii_digit()));
    if !matches!(name, GPU | "gpu") && profile.is_none() {
        draft.warn(format!(
            "{} is left out: only {GPU} is imported with its shares, and time slices of MIG \
             profiles with the strategy `mixed`",
            entry.place()
        ));
        return Ok(None);
    }
    if !(2..=SHARES_MAX).contains(&replicas) {
        return Err(field.wrong(&format!(
            "a number from 2 to {SHARES_MAX}, the most that fit into one message to the kubelet,"
        )));
    }
    Ok(Some((profile.map(str::to_owned), replicas)))
}
