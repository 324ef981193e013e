//! The values of a Helm chart: a file of their own, or a part of the object that installs the
//! chart.

use super::candidates::{Candidate, Part, may_be_file};
use super::doc::{Doc, Is};
use super::error::ImportError;
use super::field::{Decoder, Field, join};
use super::nvidia_chart;
use super::peers::{Facts, Peer};

/// The kinds of objects that contain values, and the path of the values. Flux has them as a tree,
/// k3s as a text, Argo as either. The settings of a ClusterPolicy have the keys of the values that
/// make it. `[]` is every element of a list.
const PLACES: &[(&str, &[&str])] = &[
    ("HelmRelease", &["spec", "values"]),
    ("ClusterPolicy", &["spec"]),
    ("HelmChart", &["spec", "valuesContent"]),
    ("HelmChartConfig", &["spec", "valuesContent"]),
    ("Application", &["spec", "source", "helm", "valuesObject"]),
    ("Application", &["spec", "source", "helm", "values"]),
    ("Application", &["spec", "sources", "[]", "helm", "valuesObject"]),
    ("Application", &["spec", "sources", "[]", "helm", "values"]),
];
/// Below these keys are the words of a container's command line, and no file.
const WORDS: [&str; 3] = ["args", "command", "initContainers"];

/// The parts of chart values that concern the plugin.
#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) candidates: Vec<Candidate<'a>>,
    pub(super) containers: Vec<Field<'a>>,
    /// The values of the chart of NVIDIA's plugin.
    pub(super) nvidia: Option<Field<'a>>,
    /// Those of NVIDIA's GPU operator.
    pub(super) operator: Option<Field<'a>>,
}

/// The values that Kubernetes objects contain. `texts` are those that the objects contain as text.
pub(super) fn values<'a>(objects: &[Field<'a>], texts: &'a [(String, Doc)]) -> Vec<Field<'a>> {
    let trees = places(objects).into_iter().filter(Field::is_map);
    trees.chain(texts.iter().map(|(path, doc)| Field::at(doc, Decoder::Yaml, path))).collect()
}

/// The values that the objects contain as text, parsed.
///
/// # Errors
/// When one of them is not YAML.
pub(super) fn texts(objects: &[Field<'_>]) -> Result<Vec<(String, Doc)>, ImportError> {
    let mut texts = Vec::new();
    for place in places(objects) {
        if let Ok(text) = place.scalar_text() {
            let first = Doc::parse(&text.text, text.lines)?.into_iter().next();
            texts.extend(first.map(|doc| (place.path, doc)));
        }
    }
    Ok(texts)
}

fn places<'a>(objects: &[Field<'a>]) -> Vec<Field<'a>> {
    let mut found = Vec::new();
    for object in objects {
        let kind = object.get("kind").and_then(|kind| kind.text().ok()).unwrap_or_default();
        for (_, path) in PLACES.iter().filter(|(of, _)| *of == kind) {
            let step = |fields: Vec<Field<'a>>, key: &&str| match *key {
                "[]" => fields.iter().flat_map(|field| field.items().unwrap_or_default()).collect(),
                key => fields.iter().filter_map(|field| field.get(key)).collect(),
            };
            found.extend(path.iter().fold(vec![object.clone()], step));
        }
    }
    found
}

/// Searches values for the plugin's file and its container, wherever the chart has them.
pub(super) fn search<'a>(peer: Peer, facts: &Facts, values: &Field<'a>, found: &mut Found<'a>) {
    search_in(peer, facts, &values.path, values.doc(), found);
}

fn search_in<'a>(peer: Peer, facts: &Facts, path: &str, doc: &'a Doc, found: &mut Found<'a>) {
    let mut candidate = |part| {
        let (of, key) = path.rsplit_once('.').unwrap_or(("the values", path));
        found.candidates.push(Candidate {
            key: key.to_owned(),
            of: of.to_owned(),
            is_entry: true,
            part,
        });
    };
    match &doc.is {
        Is::Null => {}
        Is::Scalar(text) if text.text.contains(':') && may_be_file(peer, &Part::Text(text)) => {
            candidate(Part::Text(text));
        }
        Is::Scalar(_) => {}
        // The whole input is read as a file if it contains no other.
        _ if is_file(peer, doc) => {
            if !path.is_empty() {
                candidate(Part::Tree(doc));
            }
        }
        Is::List(list) => list.iter().enumerate().for_each(|(index, doc)| {
            search_in(peer, facts, &format!("{path}[{index}]"), doc, found);
        }),
        Is::Map(_) if peer == Peer::Nvidia && nvidia_chart::is_operator(doc) => {
            found.operator.get_or_insert_with(|| Field::at(doc, Decoder::Yaml, path));
            // Its other parts have files and containers too.
            let config = doc.value("devicePlugin").and_then(|plugin| plugin.value("config"));
            if let Some(files) = config.and_then(|config| config.value("data")) {
                search_in(peer, facts, &join(path, "devicePlugin.config.data"), files, found);
            }
        }
        Is::Map(map) => {
            // This may still be a plugin's file, so nothing of it is marked as read here.
            let image = doc.value("image");
            let image = image.and_then(|image| image.value("repository")).or(image);
            let is_mine = matches!(image.map(|image| &image.is), Some(Is::Scalar(image)) if image.text.contains(facts.image));
            let is_container =
                image.is_some() && (doc.value("args").is_some() || doc.value("command").is_some());
            if is_mine || is_container {
                found.containers.push(Field::at(doc, Decoder::Yaml, path));
            }
            if peer == Peer::Nvidia && (is_mine || nvidia_chart::is_chart(path, doc)) {
                found.nvidia.get_or_insert_with(|| Field::at(doc, Decoder::Yaml, path));
            }
            for (key, doc) in map.iter().filter(|(key, _)| !WORDS.contains(&&**key)) {
                search_in(peer, facts, &join(path, key), doc, found);
            }
        }
    }
}

/// Whether this is the plugin's file, in values that contain it as a tree.
fn is_file(peer: Peer, doc: &Doc) -> bool {
    let first_has = |list: &Doc, key: &str| match &list.is {
        Is::List(list) => list.first().is_some_and(|first| first.value(key).is_some()),
        _ => false,
    };
    let list_has = |list: &str, key: &str| doc.value(list).is_some_and(|list| first_has(list, key));
    match peer {
        Peer::Nvidia => {
            doc.value("version").is_some()
                && (doc.value("sharing").is_some() || doc.value("flags").is_some())
        }
        Peer::Sriov => list_has("resourceList", "resourceName"),
        Peer::RdmaShared => list_has("configList", "resourceName"),
        Peer::Generic => list_has("devices", "groups"),
        Peer::Smarter => first_has(doc, "devicematch"),
        // GKE deploys its plugin itself: no chart has its file.
        Peer::Gke => false,
        Peer::IntelGpu => doc.value("sharedDevNum").is_some(),
        Peer::Kubevirt => doc.value("permittedHostDevices").is_some(),
        Peer::Amd => {
            let plugin = doc.value("devicePlugin");
            let has_arguments =
                plugin.is_some_and(|plugin| plugin.value("devicePluginArguments").is_some());
            doc.value("resource_naming_strategy").is_some()
                || has_arguments
                || plugin.is_some() && doc.value("driver").is_some()
        }
        // Akri's chart makes the object from other values.
        Peer::Akri => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Imported, import};
    use super::*;

    /// The text with `by` spaces before each of its lines.
    fn indented(by: usize, text: &str) -> String {
        text.lines().map(|line| format!("{:by$}{line}\n", "")).collect()
    }

    fn imported(peer: Peer, text: &str) -> Imported {
        import(peer, text, None, None)
            .unwrap_or_else(|error| panic!("{error}: {:?}\n{text}", error.warnings))
    }

    /// Values as a file, and in each object that installs a chart.
    fn forms(values: &str) -> [String; 6] {
        let text = |before: &str, by| format!("{before}{}", indented(by, values));
        [
            values.to_owned(),
            text(
                "kind: HelmRelease\nmetadata: { name: r }\nspec:\n  interval: 30m\n  values:\n",
                4,
            ),
            text(
                "kind: ConfigMap\ndata: { unrelated: text }\n---\nkind: HelmChart\nspec:\n  chart: c\n  valuesContent: |-\n",
                4,
            ),
            text("kind: HelmChartConfig\nspec:\n  valuesContent: |\n", 4),
            text("kind: Application\nspec:\n  source:\n    helm:\n      valuesObject:\n", 8),
            text(
                "kind: Application\nspec:\n  sources:\n  - ref: values\n  - helm:\n      values: |\n",
                8,
            ),
        ]
    }

    #[test]
    fn a_file_is_found_in_chart_values() {
        const NVIDIA: &str = "config:\n  default: two\n  map:\n    one: |-\n      version: v1\n    two: |-\n      version: v1\n      flags:\n        migStrategy: none\n      sharing:\n        timeSlicing:\n          resources:\n          - name: nvidia.com/gpu\n            replicas: 5\ncompatWithCPUManager: true\nruntimeClassName: nvidia\n";
        const LIST: &str = "image: { repository: x/smarter-device-manager }\nconfig:\n- devicematch: ^ttyACM[0-9]*$\n  nummaxdevices: 1\nresources: {}\n";
        const TEXT: &str = "config: |\n  - devicematch: ^ttyACM[0-9]*$\n    nummaxdevices: 1\n";
        const TREE: &str = "plugin:\n  config:\n    devices:\n    - name: a\n      groups:\n      - paths:\n        - path: /dev/a\n";
        const FLAGS: &str = "controllers:\n  main:\n    type: daemonset\n    initContainers:\n      wait: { image: { repository: busybox }, command: [sh] }\n    containers:\n      main:\n        image: { repository: ghcr.io/squat/generic-device-plugin, tag: latest }\n        args:\n        - --device\n        - |\n          name: a\n          groups:\n            - paths:\n                - path: /dev/a\n        env:\n          DOMAIN: lab.org\n";
        const MAP: &str = "controllers:\n  main:\n    containers:\n      main:\n        image: { repository: squat/generic-device-plugin }\n        args: [--config, /c/config.yaml, --domain, lab.org]\nconfigMaps:\n  config:\n    data:\n      config.yaml: |\n        devices:\n          - name: a\n            groups: [{ paths: [{ path: /dev/a }] }]\n";
        for (peer, values, expected) in [
            (
                Peer::Nvidia,
                NVIDIA,
                &["replicas = 5", "pass_device_specs = true", "part = false"][..],
            ),
            (Peer::Smarter, LIST, &["^ttyACM[0-9]*$"]),
            (Peer::Smarter, TEXT, &["^ttyACM[0-9]*$"]),
            (Peer::Generic, TREE, &["\"squat.ai/a\""]),
            (Peer::Generic, FLAGS, &["\"lab.org/a\""]),
            (Peer::Generic, MAP, &["\"lab.org/a\""]),
        ] {
            for text in forms(values) {
                let Imported { toml, warnings, wrong } = imported(peer, &text);
                assert!(
                    expected.iter().all(|wanted| toml.contains(wanted)) && wrong == 0,
                    "{text}\n{toml}"
                );
                assert!(!warnings.join("\n").contains("is not a setting"), "{text}\n{warnings:?}");
            }
        }
        let warnings_text = imported(Peer::Nvidia, &forms(NVIDIA)[1]).warnings.join("\n");
        assert!(
            warnings_text.contains("each configuration is a section for nodes whose label"),
            "{warnings_text}"
        );
    }

    #[test]
    fn a_wrong_value_is_reported_with_its_line_in_the_values() {
        const WRONG: &str = "config:\n- devicematch: ^a$\n  nummaxdevices: lots\n- devicematch: ^b$\n  nummaxdevices: 1\n  surplus: 1\n";
        for (text, line) in forms(WRONG).iter().zip([3, 8, 10, 6, 8, 9]) {
            let Imported { warnings, wrong, .. } = imported(Peer::Smarter, text);
            let warnings_text = warnings.join("\n");
            assert_eq!(wrong, 1);
            assert!(
                warnings_text.contains(&format!("line {line}: `[0].nummaxdevices` is `lots`")),
                "{text}\n{warnings_text}"
            );
            assert!(
                warnings_text
                    .contains(&format!("`[1].surplus` (line {}) is not a setting", line + 3)),
                "{text}\n{warnings_text}"
            );
        }
        let broken = "kind: HelmChart\nspec:\n  valuesContent: |\n    a: b\n    c: [\n";
        let error = import(Peer::Smarter, broken, None, None).unwrap_err().to_string();
        assert!(error.contains("neither YAML nor JSON"), "{error}");
        let nothing =
            import(Peer::Generic, &forms("replicas: 3\n")[1], None, None).unwrap_err().to_string();
        assert_eq!(nothing, "the input has no file of this plugin, only HelmRelease");
    }
}
