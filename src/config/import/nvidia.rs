//! NVIDIA's k8s-device-plugin: the YAML of `version: v1`, its flags and variables, as its code
//! reads them.

mod settings;
mod sharing;

pub(super) use self::settings::KEYS;

use self::settings::Settings;
use self::sharing::{Share, share};
use super::super::tree::{Is, Table, Value};
use super::draft::{Draft, Offer};
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text, texts};
use crate::domain::{MIG_PROFILE, MigStrategy};

const GPU: &str = "nvidia.com/gpu";
const IGNORED: &str = "NVIDIA's plugin reads it and does not use it either";

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
                draft.offers.push(Offer { table: offer, place: "the container".to_owned() });
            }
        }
    }
    draft.no_equivalent(
        of_root("resources"),
        &format!("{IGNORED}; `name` and `select` of a [[resource]] do this here"),
    );
    draft.no_equivalent(
        of_root("flags").and_then(|flags| flags.get("gfd")),
        "`labels.features_d` writes the labels of gpu-feature-discovery",
    );
    for (key, why) in [
        (
            "flags.failOnInitError",
            "Holdfast waits for a driver, and `holdfast status` shows missing parts",
        ),
        ("flags.useNodeFeatureAPI", "Holdfast writes labels into a file: `labels.features_d`"),
    ] {
        draft.no_equivalent(settings.get(key), why);
    }
    let strategy = settings.get("flags.deviceDiscoveryStrategy");
    if strategy.as_ref().is_some_and(|setting| !matches!(setting.text(), Ok("auto" | "tegra"))) {
        draft.no_equivalent(
            strategy,
            "GPUs are found in the driver's files, and the GPU of a Tegra system by its nodes",
        );
    }
    roots(&settings, draft);
    super::xids::read(source, draft);
    if let Some(root) = &root {
        draft.unknown(root, KEYS);
    }
    Ok(())
}

/// The roots of the driver, as `[nvidia]`. The plugin's default is the host, where a driver is
/// found without a setting.
fn roots(settings: &Settings<'_>, draft: &mut Draft) {
    let mut table = Table::default();
    for (theirs, ours) in
        [("flags.nvidiaDriverRoot", "driver_root"), ("flags.nvidiaDevRoot", "dev_root")]
    {
        let Some(field) = settings.get(theirs).filter(Field::has_effect) else { continue };
        let read = |field: &Field<'_>| match field.text()? {
            root if root.starts_with('/') => Ok(root.to_owned()),
            _ => Err(field.wrong("an absolute path")),
        };
        let root = draft.setting(Some(field.clone()), read);
        // With another root of the driver, the nodes of the host are a choice.
        if let Some(root) = root.filter(|root| root != "/" || table.get("driver_root").is_some()) {
            set_from(&mut table, ours, text(&root), &field);
        }
    }
    if table.get("driver_root").or(table.get("dev_root")).is_some() {
        draft.tables.set("nvidia", Is::Table(table));
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
    imex(settings, &mut options, draft);
    options
}

/// The IMEX channels. The plugin knows only the channel 0.
fn imex(settings: &Settings<'_>, options: &mut Table, draft: &mut Draft) {
    let channels = settings.get("imex.channelIDs").filter(Field::has_effect);
    let is_given = draft.setting(channels.clone(), |field| {
        let numbers: Result<Vec<u32>, ImportError> = match field.is_list() {
            true => field.items()?.iter().map(Field::number).collect(),
            false => field.number().map(|number| vec![number]),
        };
        if numbers? == [0] { Ok(()) } else { Err(field.wrong("`[]` or `[0]`")) }
    });
    let required = settings.get("imex.required");
    let is_required = draft.setting(required.clone(), Field::truth).unwrap_or(false);
    if let (Some(()), Some(channels)) = (is_given, &channels) {
        options.set("imex_channels", Is::List(vec![Value { place: None, is: plain(0) }]));
        if !is_required {
            draft.warn(format!(
                "{}: the plugin ignores a channel whose node is missing, as `imex.required` is \
                 `false`; Holdfast then fails the container",
                channels.place()
            ));
        }
    }
    if let Some(required) = required.filter(|_| is_required) {
        draft.no_equivalent(
            Some(required),
            "a channel whose node is missing fails the container that requests it",
        );
    }
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
