//! Intel's GPU plugin: the flags of its container, or the settings of a GpuDevicePlugin object or
//! of its chart (intel/intel-device-plugins-for-kubernetes: `cmd/gpu_plugin/gpu_plugin.go`,
//! `pkg/apis/deviceplugin/v1`).

use super::super::tree::{Is, Table};
use super::draft::{Draft, Offer};
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text, texts};

/// Each setting, with its flag.
const SETTINGS: [(&str, &str); 8] = [
    ("sharedDevNum", "shared-dev-num"),
    ("preferredAllocationPolicy", "allocation-policy"),
    ("allocationPolicy", "allocation-policy"),
    ("allowIDs", "allow-ids"),
    ("denyIDs", "deny-ids"),
    ("bypathMode", "bypath"),
    ("enableMonitoring", "enable-monitoring"),
    ("monitoringMode", "monitoring-mode"),
];

/// Every key that is read.
pub(super) const KEYS: [&str; 8] = {
    let mut keys = [""; 8];
    let mut at = 0;
    while at < keys.len() {
        keys[at] = SETTINGS[at].0;
        at += 1;
    }
    keys
};

/// Keys about the plugin's own pods.
pub(super) const DEPLOYMENT: [&str; 7] =
    ["name", "image", "initImage", "logLevel", "nodeFeatureRule", "nodeSelector", "tolerations"];

/// The resources of the plugin, one for each driver.
const RESOURCES: [(&str, &str); 2] = [("gpu.intel.com/i915", "i915"), ("gpu.intel.com/xe", "xe")];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let root = source.file.as_ref().map(|file| Field::root(file, Decoder::Yaml));
    if let Some(root) = root.as_ref().filter(|root| !root.is_map()) {
        return Err(root.wrong("the settings of Intel's GPU plugin, a mapping,"));
    }
    let get = |key: &str| {
        let (_, flag) = SETTINGS.iter().find(|(setting, _)| *setting == key)?;
        let by_flag = source.flags.last(&[flag], "").map(|flag| flag.field(Decoder::JsonOfYaml));
        by_flag.or_else(|| root.as_ref()?.get(key)).filter(Field::has_effect)
    };
    for elsewhere in &source.flags.elsewhere {
        if SETTINGS.iter().any(|(_, flag)| *flag == elsewhere.name) {
            draft.warn(format!(
                "`--{}` at {} is left out: its value is not in the manifest",
                elsewhere.name, elsewhere.place
            ));
        }
    }
    let shares = draft.setting(get("sharedDevNum"), |of| match of.number()? {
        0 => Err(of.wrong("a number from 1")),
        number => Ok(number),
    });
    let is_shared = shares.is_some_and(|shares| shares > 1);
    let policy = get("preferredAllocationPolicy").or_else(|| get("allocationPolicy"));
    let placement = draft.setting(policy.clone(), |policy| match policy.text()? {
        "none" => Ok(None),
        "balanced" => Ok(Some("spread")),
        "packed" => Ok(Some("packed")),
        _ => Err(policy.wrong("`balanced`, `packed` or `none`")),
    });
    let placement = placement.flatten();
    if let Some(policy) = policy.filter(|_| placement.is_some() && !is_shared) {
        draft.warn(format!("{} has no effect without shared GPUs", policy.place()));
    }
    let by_path = draft.setting(get("bypathMode"), |mode| match mode.text()? {
        known @ ("single" | "all" | "none") => Ok(known),
        _ => Err(mode.wrong("`single`, `all` or `none`")),
    });
    let lists = ids(get("allowIDs")).and_then(|allowed| Ok((allowed, ids(get("denyIDs"))?)));
    let (allowed, denied) = match lists {
        Ok(lists) => lists,
        // Without the list more GPUs would be offered than intended.
        Err(error) => {
            draft.wrong("each resource", &error);
            return Ok(());
        }
    };
    let gpus = Gpus {
        allowed,
        denied,
        shares: shares.zip(get("sharedDevNum")).filter(|_| is_shared),
        placement: placement.filter(|_| is_shared),
        by_path,
    };
    let place = root.as_ref().map_or_else(|| "the container".to_owned(), Field::place);
    for (name, driver) in RESOURCES {
        draft.offers.push(Offer { table: gpus.of(name, driver), place: place.clone() });
    }
    for key in ["enableMonitoring", "monitoringMode"] {
        draft.no_equivalent(
            get(key),
            "a GPU has one holder, and `monitoring` gives all GPUs to a container while others hold \
             them",
        );
    }
    draft.warn("device ids change: drain the node first");
    if let Some(root) = &root {
        DEPLOYMENT.iter().filter_map(|key| root.get(key)).for_each(|of| of.read_all());
        draft.unknown(root, &KEYS);
    }
    Ok(())
}

/// What the resources of all drivers have in common.
struct Gpus<'a> {
    allowed: Option<(Vec<String>, Field<'a>)>,
    denied: Option<(Vec<String>, Field<'a>)>,
    shares: Option<(u32, Field<'a>)>,
    placement: Option<&'static str>,
    by_path: Option<&'a str>,
}

impl Gpus<'_> {
    /// The resource of one driver.
    fn of(&self, name: &str, driver: &str) -> Table {
        let mut gpus = resource(name, "gpu");
        gpus.set("contract", text("intel-gpu"));
        let mut select = Table::default();
        select.set("vendor", texts(&["8086"]));
        select.set("driver", texts(&[driver]));
        if let Some((ids, from)) = &self.allowed {
            set_from(&mut select, "device", texts(ids), from);
        }
        set_table(&mut gpus, "select", select);
        if let Some((ids, from)) = &self.denied {
            let mut exclude = Table::default();
            set_from(&mut exclude, "device", texts(ids), from);
            gpus.set("exclude", Is::Table(exclude));
        }
        if let Some((shares, from)) = &self.shares {
            set_from(&mut gpus, "replicas", plain(shares), from);
        }
        if let Some(placement) = self.placement {
            gpus.set("placement", text(placement));
        }
        if let Some(by_path) = self.by_path {
            let mut options = Table::default();
            options.set("by_path", text(by_path));
            gpus.set("intel-gpu", Is::Table(options));
        }
        gpus
    }
}

/// PCI device ids, such as `0x56a0,0x56c0`.
fn ids(list: Option<Field<'_>>) -> Result<Option<(Vec<String>, Field<'_>)>, ImportError> {
    let Some(list) = list else { return Ok(None) };
    let id = |id: &str| {
        let digits = id.trim().strip_prefix("0x")?;
        let is_id = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_id.then(|| digits.to_ascii_lowercase())
    };
    let ids = list.scalar_text()?.text.split(',').map(id).collect::<Option<Vec<String>>>();
    let ids = ids.ok_or_else(|| list.wrong("a list such as 0x56a0,0x56c0"))?;
    Ok(Some((ids, list)))
}
