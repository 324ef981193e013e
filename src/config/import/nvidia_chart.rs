//! The values of NVIDIA's two charts: that of the plugin, and that of the GPU operator. The
//! operator's ClusterPolicy has the same keys as its chart.
//!
//! Both become variables of the plugin's container, which override its file.

use super::doc::{Doc, Is, Lines, Scalar};
use super::field::Field;
use super::flags::{Flag, Flags};
use super::named::Selection;

/// The keys of the plugin's chart, and the variables that the chart makes of them.
const OF_CHART: [(&str, &str); 10] = [
    ("migStrategy", "MIG_STRATEGY"),
    ("failOnInitError", "FAIL_ON_INIT_ERROR"),
    ("compatWithCPUManager", "PASS_DEVICE_SPECS"),
    ("deviceListStrategy", "DEVICE_LIST_STRATEGY"),
    ("deviceIDStrategy", "DEVICE_ID_STRATEGY"),
    ("nvidiaDriverRoot", "NVIDIA_DRIVER_ROOT"),
    ("gdrcopyEnabled", "GDRCOPY_ENABLED"),
    ("gdsEnabled", "GDS_ENABLED"),
    ("mofedEnabled", "MOFED_ENABLED"),
    ("deviceDiscoveryStrategy", "DEVICE_DISCOVERY_STRATEGY"),
];
/// What the operator sets for each plugin, and with its `cdi.enabled` (NVIDIA/gpu-operator
/// `assets/state-device-plugin`, `controllers/object_controls.go`). Its `gds` and `gdrcopy` need no
/// setting here: by default the modules of the kernel decide.
const OF_OPERATOR: (&str, &str) = ("PASS_DEVICE_SPECS", "true");
const OF_CDI: (&str, &str) = ("DEVICE_LIST_STRATEGY", "cdi-annotations,cdi-cri");

/// Whether these are values of the plugin's chart. The plugin's file has the same keys below
/// `flags`.
pub(super) fn is_chart(path: &str, values: &Doc) -> bool {
    let path = path.to_ascii_lowercase();
    let Is::Map(map) = &values.is else { return false };
    let has_any = |keys: &[&str]| {
        map.iter().any(|(key, _)| keys.iter().any(|known| known.eq_ignore_ascii_case(key)))
    };
    let files = values.value("config").and_then(|config| config.value("map"));
    files.is_some_and(|files| matches!(files.is, Is::Map(_)))
        || OF_CHART.iter().any(|(key, _)| values.value(key).is_some())
            && !(path.ends_with("flags") || path.ends_with("flags.plugin"))
            && !has_any(&["version", "flags", "sharing"])
}

/// Whether these are values of the GPU operator's chart, or the settings of a ClusterPolicy.
pub(super) fn is_operator(values: &Doc) -> bool {
    let plugin = values.value("devicePlugin").filter(|plugin| matches!(plugin.is, Is::Map(_)));
    let strategy = values.value("mig").and_then(|mig| mig.value("strategy"));
    strategy.is_some() || plugin.is_some_and(|plugin| !is_chart("", plugin))
}

/// Reads values of the plugin's chart: the choice among its files, and variables.
pub(super) fn read_chart(values: &Field<'_>, selection: &mut Selection, flags: &mut Flags) {
    if let Some(config) = values.get("config") {
        let strategies = config.get("fallbackStrategies").and_then(|list| list.texts().ok());
        selection.take(None, text(&config, "default"), strategies);
    }
    for (key, variable) in OF_CHART {
        add(values.get(key), variable, flags);
    }
    add(values.get("mps").and_then(|mps| mps.get("root")), "MPS_ROOT", flags);
    add_file(values.get("config"), flags);
}

/// Reads values of the operator's chart. Those of `devicePlugin.env` override the others.
pub(super) fn read_operator(values: &Field<'_>, selection: &mut Selection, flags: &mut Flags) {
    let plugin = values.get("devicePlugin");
    let config = plugin.as_ref().and_then(|plugin| plugin.get("config"));
    add_file(config.clone(), flags);
    let default = config.and_then(|config| text(&config, "default"));
    // Its `config-manager` has no fallback strategies.
    selection.take(None, default.or(Some(String::new())), Some(Vec::new()));
    set(values, OF_OPERATOR, flags);
    let cdi = values.get("cdi").and_then(|cdi| cdi.get("enabled"));
    if let Some(enabled) = cdi.filter(|enabled| enabled.truth() == Ok(true)) {
        set(&enabled, OF_CDI, flags);
    }
    add(values.get("mig").and_then(|mig| mig.get("strategy")), "MIG_STRATEGY", flags);
    let root = plugin.and_then(|plugin| plugin.get("mps")?.get("root"));
    add(root, "MPS_ROOT", flags);
}

/// Adds the variable that names the plugin's file, if a ConfigMap has the file.
fn add_file(config: Option<Field<'_>>, flags: &mut Flags) {
    let name = config.and_then(|config| config.get("name")).filter(Field::has_effect);
    add(name, "CONFIG_FILE", flags);
}

fn text(config: &Field<'_>, key: &str) -> Option<String> {
    config.get(key)?.text().ok().map(str::to_owned)
}

/// Adds a variable of the container with the place of the setting that it comes from.
fn set(at: &Field<'_>, (name, value): (&str, &str), flags: &mut Flags) {
    let lines = Lines::In(at.line());
    let value = Scalar { text: value.to_owned(), is_plain: true, lines };
    let value = Doc::new(at.line(), Is::Scalar(value));
    flags.variables.push(Flag { name: name.to_owned(), value, path: at.path.clone() });
}

/// Adds a value as a variable of the container. A chart writes it without its quotes.
fn add(value: Option<Field<'_>>, variable: &str, flags: &mut Flags) {
    let Some(value) = value else { return };
    let is = match &value.doc().is {
        Is::Scalar(scalar) => Is::Scalar(Scalar { is_plain: true, ..scalar.clone() }),
        is => is.clone(),
    };
    let of = Doc::new(value.line(), is);
    flags.variables.push(Flag { name: variable.to_owned(), value: of, path: value.path });
}

#[cfg(test)]
mod tests {
    use super::super::{Imported, Peer, import};

    fn imported(text: &str) -> Imported {
        import(Peer::Nvidia, text, None, None)
            .unwrap_or_else(|error| panic!("{error}: {:?}\n{text}", error.warnings))
    }

    fn has(text: &str, toml: &[&str], warnings: &[&str]) {
        let found = imported(text);
        let joined = found.warnings.join("\n");
        for wanted in toml {
            assert!(
                found.toml.contains(wanted),
                "{}\nshould contain {wanted}\n{joined}",
                found.toml
            );
        }
        for wanted in warnings {
            assert!(joined.contains(wanted), "{joined}\nshould contain {wanted}");
        }
        for never in ["is not a setting", "does not start", "does not name"] {
            assert!(!joined.contains(never), "{joined}");
        }
        assert_eq!(found.wrong, 0, "{joined}");
    }

    const FILES: &str = "any: |-\n  version: v1\n  flags: { migStrategy: none }\n  sharing: { timeSlicing: { resources: [{ name: gpu, replicas: 4 }] } }\nbig: |-\n  version: v1\n";

    fn indented(by: usize, text: &str) -> String {
        text.lines().map(|line| format!("{:by$}{line}\n", "")).collect()
    }

    #[test]
    fn the_settings_of_the_gpu_operator_are_read() {
        let settings = "mig: { strategy: mixed }\ngds: { enabled: true }\nmigManager: { config: { data: { a: 'version: v1', b: 'version: v1' } } }\ndcgmExporter: { image: x, args: [-f] }\ndevicePlugin:\n  env: [{ name: DEVICE_ID_STRATEGY, value: index }, { name: MOFED_ENABLED, value: 'false' }]\n";
        let config = "  config:\n    name: plugin-config\n    default: any\n";
        let map = format!("kind: ConfigMap\ndata:\n{}", indented(2, FILES));
        let spec = format!("{settings}{config}");
        let inline = format!("{spec}    create: true\n    data:\n{}", indented(6, FILES));
        let in_object =
            |kind: &str, by: usize, spec: &str| format!("{kind}\n{}", indented(by, spec));
        let wanted = [
            "= [\"any\", \"\"]",
            "= [\"big\"]",
            "mig-{mig_profile}",
            "device_id_strategy = \"index\"",
            "pass_device_specs = true",
            "mofed = false",
            "replicas = 4",
        ];
        for text in [
            inline,
            format!("{}---\n{map}", in_object("kind: ClusterPolicy\nspec:", 2, &spec)),
            format!("{}---\n{map}", in_object("kind: HelmRelease\nspec:\n  values:", 4, &spec)),
        ] {
            has(&text, &wanted, &["each configuration is a section"]);
        }
        // Another part of the operator has a ConfigMap like it.
        let other = "kind: ConfigMap\nmetadata: { name: mig-parted }\ndata: { a: 'version: v1', b: 'version: v1' }\n";
        let map =
            map.replace("data:\n", "metadata: { namespace: n, name: plugin-config }\ndata:\n");
        let policy = in_object("kind: ClusterPolicy\nspec:", 2, &spec);
        has(&format!("{other}---\n{policy}---\n{map}"), &wanted, &["each configuration is"]);
        // Without its ConfigMap.
        let missing = "the plugin's file `plugin-config` is not in this manifest";
        has(&policy, &["mig-{mig_profile}", "= \"index\""], &[missing]);
        // Its CDI and its whole GPUs, without settings of the plugin.
        let plain =
            "kind: ClusterPolicy\nspec: { mig: { strategy: none }, cdi: { enabled: true } }\n";
        has(plain, &["part = false", "[\"cdi-annotations\", \"cdi-cri\"]"], &[]);
    }

    #[test]
    fn the_values_of_the_plugins_chart_need_neither_an_image_nor_files() {
        let values = "nfd: { enabled: true }\nconfig: { name: plugin-config }\nmigStrategy: mixed\nfailOnInitError: \"false\"\ndeviceListStrategy: [envvar, cdi-cri]\nnvidiaDriverRoot: /run/nvidia/driver\n";
        let wanted = [
            "mig-{mig_profile}",
            "device_list_strategy = [\"envvar\", \"cdi-cri\"]",
            "driver_root = \"/run/nvidia/driver\"",
        ];
        let release = format!("kind: HelmRelease\nspec:\n  values:\n{}", indented(4, values));
        let umbrella = format!("devicePlugin:\n{}", indented(2, values));
        for text in [values, &release, &umbrella] {
            has(text, &wanted, &["the plugin's file `plugin-config` is not in this manifest"]);
        }
        // In the plugin's file the same key has another place.
        let file = imported("version: v1\nmigStrategy: mixed\n").warnings.join("\n");
        assert!(file.contains("it is read at `flags.migStrategy`"), "{file}");
    }
}
