//! Finds a plugin's file and container in the user's input.
//!
//! The input may be the file itself, a ConfigMap with one or several files, or a manifest. It may
//! also be the output of `kubectl get -o yaml`, or the values of a chart.

use super::candidates::{Candidate, candidates_of, choose, several};
use super::chart;
use super::containers::{containers, image, is_plugin_container, program};
use super::doc::{Doc, Is};
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::flags::{Flag, Flags};
use super::named::{Named, Selection};
use super::nvidia_chart;
use super::peers::{Facts, Peer, facts};

/// The inputs of a plugin.
#[derive(Debug)]
pub(super) struct Source {
    /// Its file.
    pub(super) file: Option<Doc>,
    /// Instead of a file: several ones, among which a label of the node chooses.
    pub(super) named: Option<Named>,
    /// The flags and variables of its container; empty without a container.
    pub(super) flags: Flags,
    /// The image of this container.
    pub(super) image: Option<String>,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
}

impl Source {
    /// The whole file, for a plugin that does nothing without one.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn root(&self, decoder: Decoder) -> Result<Field<'_>, ImportError> {
        let file = self.file.as_ref().ok_or_else(|| {
            ImportError::new(
                "the manifest has the plugin's container but not its file; add the ConfigMap after \
                 a line `---`",
            )
        })?;
        Ok(Field::root(file, decoder))
    }
}

/// Finds the plugin's file and container. `key` names an entry of a ConfigMap.
///
/// # Errors
/// When the input has no part of this plugin, or more than one file of it.
pub(super) fn find(
    peer: Peer,
    documents: &[Doc],
    key: Option<&str>,
) -> Result<Source, ImportError> {
    let facts = facts(peer);
    let objects = objects(documents);
    let mut source =
        Source { file: None, named: None, flags: Flags::default(), image: None, notes: Vec::new() };
    let texts = chart::texts(&objects)?;
    let mut values = chart::values(&objects, &texts);
    if objects.is_empty() {
        values.extend(documents.first().map(|values| Field::root(values, Decoder::Yaml)));
    }
    let mut found = chart::Found::default();
    values.iter().for_each(|values| chart::search(peer, &facts, values, &mut found));
    let has_settings = found.nvidia.is_some() || found.operator.is_some();
    if objects.is_empty()
        && found.candidates.is_empty()
        && !has_settings
        && !found.containers.iter().any(|container| is_plugin_container(&facts, container))
    {
        return plain(documents, key);
    }
    let mut selection = Selection::default();
    if let Some(values) = &found.nvidia {
        nvidia_chart::read_chart(values, &mut selection, &mut source.flags);
    }
    let plugin = found.operator.as_ref().and_then(|values| {
        nvidia_chart::read_operator(values, &mut selection, &mut source.flags);
        values.get("devicePlugin")
    });
    read_policies(peer, &objects, &mut source.flags);
    let mut candidates = found.candidates;
    for object in &objects {
        candidates.extend(candidates_of(&facts, object));
    }
    keep_named(&mut candidates, &source.flags);
    let mut containers: Vec<Field<'_>> = objects.iter().flat_map(containers).collect();
    containers.extend(found.containers);
    let container = containers.iter().find(|container| is_plugin_container(&facts, container));
    // A user's own image may have any name.
    let only =
        || containers.first().filter(|only| containers.len() == 1 && program(only).is_none());
    // The operator's settings have the arguments and variables of the container that it makes.
    let container = container.or(plugin.as_ref()).or_else(only);
    let has_settings = has_settings || container.is_some();
    let files =
        if peer == Peer::Nvidia && key.is_none() { several(&candidates) } else { Vec::new() };
    if !files.is_empty() {
        containers.iter().for_each(|container| selection.read(container));
        let parsed = files.iter().map(|file| Ok((file.key.clone(), file.part.parse()?)));
        source.named =
            Some(Named { files: parsed.collect::<Result<_, ImportError>>()?, selection });
    } else if let Some(chosen) = choose(peer, &candidates, key, selection.usual(), has_settings)? {
        let mut parsed = chosen.part.parse()?;
        note_more(&parsed, &mut source.notes);
        source.file = (!parsed.is_empty()).then(|| parsed.swap_remove(0));
        if source.file.is_none() {
            return Err(ImportError::new(format!(
                "the entry `{}` of `{}` is empty",
                chosen.key, chosen.of
            )));
        }
    }
    if let Some(container) = container {
        read_container(&facts, container, &mut source);
    } else if !has_settings && source.file.is_none() && source.named.is_none() {
        return Err(nothing(&facts, &objects, &containers));
    }
    note_missing(&facts, &mut source);
    Ok(source)
}

/// The input as the plugin's file itself.
fn plain(documents: &[Doc], key: Option<&str>) -> Result<Source, ImportError> {
    if let Some(key) = key {
        return Err(ImportError::new(format!(
            "the file is not a ConfigMap, and has no entry `{key}`; leave out `--key`"
        )));
    }
    let first = documents
        .first()
        .ok_or_else(|| ImportError::new("the file has 0 documents, where one is expected"))?;
    let mut notes = Vec::new();
    note_more(documents, &mut notes);
    Ok(Source {
        file: Some(first.clone()),
        named: None,
        flags: Flags::default(),
        image: None,
        notes,
    })
}

/// Each of these plugins reads only the first document of a file.
fn note_more(documents: &[Doc], notes: &mut Vec<String>) {
    if let Some(second) = documents.get(1) {
        let (more, line) = (documents.len() - 1, second.line);
        notes.push(format!(
            "the plugin reads only the first document of its file; {more} from line {line} on are \
             left out"
        ));
    }
}

/// The Kubernetes objects in the documents, and in lists of them.
fn objects(documents: &[Doc]) -> Vec<Field<'_>> {
    fn add<'a>(object: Field<'a>, objects: &mut Vec<Field<'a>>) {
        match object.get("kind").and_then(|kind| kind.text().ok()) {
            Some(kind) if kind.ends_with("List") => {
                let items =
                    object.get("items").and_then(|items| items.items().ok()).unwrap_or_default();
                // `kubectl` leaves out the kind of the items in a list of one kind.
                let of_kind = kind.strip_suffix("List").filter(|kind| !kind.is_empty());
                for item in items {
                    match of_kind {
                        Some(_) if item.get("kind").is_none() => objects.push(item),
                        _ => add(item, objects),
                    }
                }
            }
            Some(_) => objects.push(object),
            None => {}
        }
    }
    let mut objects = Vec::new();
    documents.iter().for_each(|doc| add(Field::root(doc, Decoder::Yaml), &mut objects));
    objects
}

/// Keeps the files of the ConfigMap that the values of NVIDIA's chart name. Those of other parts of
/// the GPU operator have a `version` too.
fn keep_named(candidates: &mut Vec<Candidate<'_>>, flags: &Flags) {
    let Some(Is::Scalar(name)) = flags.last(&[], "CONFIG_FILE").map(|flag| &flag.value.is) else {
        return;
    };
    let is_named =
        |file: &Candidate<'_>| file.of.rsplit('/').next().unwrap_or(&file.of) == name.text;
    if candidates.iter().any(is_named) {
        candidates.retain(is_named);
    }
}

/// The flag that NVIDIA's network operator makes of a key next to the plugin's file.
fn read_policies(peer: Peer, objects: &[Field<'_>], flags: &mut Flags) {
    let part = match peer {
        Peer::Sriov => "sriovDevicePlugin",
        Peer::RdmaShared => "rdmaSharedDevicePlugin",
        _ => return,
    };
    for object in objects {
        let kind = object.get("kind").and_then(|kind| kind.text().ok());
        let spec = object.get("spec").filter(|_| kind == Some("NicClusterPolicy"));
        if let Some(cdi) = spec.and_then(|spec| spec.get(part)?.get("useCdi")) {
            let value = cdi.doc().clone();
            flags.flags.push(Flag { name: "use-cdi".to_owned(), value, path: cdi.path });
        }
    }
}

fn read_container(facts: &Facts, container: &Field<'_>, source: &mut Source) {
    source.flags.read(container, facts.booleans);
    source.image = Some(image(container));
    if container.get("envFrom").is_some_and(|from| from.has_effect()) {
        source.notes.push(
            "the container's `envFrom` is not followed, and its variables are missing in the \
             result"
                .to_owned(),
        );
    }
}

/// Notes that the plugin has a file that the input does not contain.
fn note_missing(facts: &Facts, source: &mut Source) {
    let (flags, variable) = facts.file;
    let is_known = source.file.is_some() || source.named.is_some();
    let file = source.flags.last(flags, variable).and_then(|flag| {
        if let Is::Scalar(path) = &flag.value.is { Some(path.text.clone()) } else { None }
    });
    if let Some(path) = file.filter(|_| !is_known) {
        source.notes.push(format!(
            "the plugin's file `{path}` is not in this manifest, and its settings are missing in \
             the result; add its ConfigMap to the same file after a line `---`, and import both"
        ));
    }
}

/// The error when nothing was found.
fn nothing(facts: &Facts, objects: &[Field<'_>], containers: &[Field<'_>]) -> ImportError {
    let images: Vec<String> =
        containers.iter().map(|container| format!("`{}`", image(container))).collect();
    let shell = containers.iter().any(|container| {
        program(container).is_some_and(|program| matches!(&*program, "sh" | "bash" | "ash"))
    });
    let kinds: Vec<&str> =
        objects.iter().filter_map(|object| object.get("kind")?.text().ok()).collect();
    ImportError::new(match (images.as_slice(), kinds.as_slice()) {
        ([], ["ConfigMap"]) => "the ConfigMap has no `data`".to_owned(),
        ([], kinds) => format!("the input has no file of this plugin, only {}", kinds.join(", ")),
        (images, _) => {
            let more = if shell {
                "; a shell's command line is not read: import the file, or the value of one flag"
            } else {
                ""
            };
            format!(
                "no container of the input runs `{}` or has `{}` as its image; the images are \
                 {}{more}",
                facts.program,
                facts.image,
                images.join(", ")
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Imported, Peer, import};

    fn imported(peer: Peer, text: &str, key: Option<&str>) -> Imported {
        import(peer, text, key, None)
            .unwrap_or_else(|error| panic!("{error}: {:?}\n{text}", error.warnings))
    }

    fn has(peer: Peer, text: &str, key: Option<&str>, toml: &[&str], warnings: &[&str]) {
        let found = imported(peer, text, key);
        for wanted in toml {
            assert!(found.toml.contains(wanted), "{}\nshould contain {wanted}", found.toml);
        }
        let joined = found.warnings.join("\n");
        for wanted in warnings {
            assert!(joined.contains(wanted), "{joined}\nshould contain {wanted}");
        }
        if warnings.is_empty() {
            let usual = |warning: &String| {
                warning.starts_with("device ids change")
                    || warning.starts_with("no domain is given")
            };
            assert!(found.warnings.iter().all(usual), "{joined}");
        }
    }

    const POOL: &str =
        r#"{"resourceList":[{"resourceName":"a","selectors":{"drivers":["vfio-pci"]}}]}"#;

    #[test]
    fn a_file_is_found_in_the_output_of_kubectl() {
        let quoted = POOL.replace('"', "\\\"");
        let map = format!(
            "{{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\", \"metadata\": {{\"name\": \"m\"}}, \"data\": {{\"config.json\": \"{quoted}\"}}}}"
        );
        let service = "{\"apiVersion\": \"v1\", \"kind\": \"Service\", \"spec\": {}}";
        for text in [
            map.clone(),
            format!(
                "{{\"apiVersion\": \"v1\", \"kind\": \"List\", \"items\": [{service}, {map}]}}"
            ),
            format!(
                "{{\"kind\": \"ConfigMapList\", \"items\": [{}]}}",
                map.replace("\"kind\": \"ConfigMap\", ", "")
            ),
            format!("---\n{service}\n---\n{map}\n"),
            format!("---\n# nothing\n---\n{map}\n---\n"),
            format!(
                "apiVersion: v1\nkind: ConfigMap\ndata:\n  other.txt: some text\n  config.json: |\n    {POOL}\n  empty: \"\"\n"
            ),
            format!(
                "kind: NicClusterPolicy\nspec:\n  sriovDevicePlugin:\n    config: |\n      {POOL}\n"
            ),
            format!(
                "kind: ConfigMap\nbinaryData: {{ x: AA== }}\ndata:\n  config.json: >-\n    {POOL}\n"
            ),
        ] {
            has(Peer::Sriov, &text, None, &["\"intel.com/a\""], &[]);
        }
        let hca = r#"{"configList":[{"resourceName":"a","rdmaHcaMax":3,"selectors":{"ifNames":["ib0"]}}]}"#;
        let text = format!(
            "kind: NicClusterPolicy\nspec:\n  sriovDevicePlugin:\n    config: |\n      {POOL}\n  rdmaSharedDevicePlugin:\n    config: |\n      {hca}\n"
        );
        has(Peer::RdmaShared, &text, None, &["\"rdma/a\"", "pool = 3"], &[]);
        // A key of the policy is the flag of the plugin next to it.
        assert!(!imported(Peer::Sriov, &text, None).toml.contains("cdi ="));
        let both = text.replace("    config: |", "    useCdi: true\n    config: |");
        for peer in [Peer::Sriov, Peer::RdmaShared] {
            has(peer, &both, None, &["cdi = [\"annotations\"]"], &[]);
        }
    }

    #[test]
    fn a_key_selects_one_of_several_files() {
        let two = format!(
            "kind: ConfigMap\nmetadata: {{ name: m }}\ndata:\n  node-1: |\n    {POOL}\n  node-2: |\n    {}\n",
            POOL.replace("\"a\"", "\"b\"")
        );
        let problem = import(Peer::Sriov, &two, None, None).unwrap_err().to_string();
        assert_eq!(
            problem,
            "the ConfigMap has the entries `node-1`, `node-2`; select one with `--key`"
        );
        has(Peer::Sriov, &two, Some("node-2"), &["\"intel.com/b\""], &[]);
        let maps = format!("{two}---\n{}", two.replace("name: m", "name: n, namespace: s"));
        let problem = import(Peer::Sriov, &maps, Some("node-1"), None).unwrap_err().to_string();
        assert_eq!(
            problem,
            "the ConfigMap has the entries `node-1` of m, `node-1` of s/n; select one with `--key`"
        );
        let many: String = (0..1000).map(|n| format!("  node-{n}: |\n    {POOL}\n")).collect();
        let problem = import(Peer::Sriov, &format!("kind: ConfigMap\ndata:\n{many}"), None, None)
            .unwrap_err()
            .to_string();
        assert!(
            problem.contains("`node-29` and 970 more; select one with `--key`")
                && problem.len() < 1000,
            "{problem}"
        );
    }

    #[test]
    fn nvidias_named_configurations_are_sections_and_a_key_selects_one() {
        let map = "kind: ConfigMap\ndata:\n  default: |-\n    version: v1\n  shared: |-\n    version: v1\n    sharing: { timeSlicing: { resources: [{ name: nvidia.com/gpu, replicas: 4 }] } }\n";
        has(
            Peer::Nvidia,
            map,
            None,
            &["= [\"default\", \"\"]", "= [\"shared\"]", "[[node.resource]]"],
            &["each configuration is a section"],
        );
        has(Peer::Nvidia, map, Some("shared"), &["replicas = 4"], &[]);
        // The values of the chart.
        let values = "config:\n  default: shared\n  map:\n    shared: |-\n      sharing: { timeSlicing: { resources: [{ name: gpu, replicas: 4 }] } }\n    whole: |-\n      version: v1\nmigStrategy: null\ncompatWithCPUManager: true\nmps: { root: /run/x }\n";
        has(
            Peer::Nvidia,
            values,
            None,
            &["replicas = 4", "pass_device_specs = true", "= [\"shared\", \"\"]", "= [\"whole\"]"],
            &["each configuration is a section"],
        );
        has(Peer::Nvidia, values, Some("whole"), &["pass_device_specs = true"], &[]);
    }

    /// A DaemonSet of squat's plugin with these lines in its container.
    fn daemon_set(container: &str) -> String {
        let indented: String =
            container.lines().map(|line| format!("          {line}\n")).collect();
        format!(
            "kind: DaemonSet\nspec:\n  template:\n    spec:\n      initContainers:\n        - image: x/generic-device-plugin\n          args: [--domain, no.org]\n      containers:\n        - name: side\n          image: busybox\n        - name: plugin\n          image: reg.example.org:5000/squat/generic-device-plugin@sha256:0123\n{indented}"
        )
    }

    #[test]
    fn the_flags_of_a_container_are_its_configuration() {
        let fuse = "name: fuse\ngroups:\n  - paths:\n      - path: /dev/fuse\n";
        let block = format!(
            "args:\n- --domain=lab.org\n- --device\n- |\n{}",
            fuse.lines().map(|line| format!("  {line}\n")).collect::<String>()
        );
        let inline =
            "'{\"name\": \"fuse\", \"groups\": [{\"paths\": [{\"path\": \"/dev/fuse\"}]}]}'";
        for container in [
            block,
            format!("args: [--domain, lab.org, --device, {inline}]"),
            format!("args: ['-domain=lab.org', {}]", inline.replacen("'{", "'--device={", 1)),
            format!(
                "command: [/bin/generic-device-plugin, --domain, lab.org]\nargs: [--device, {inline}]"
            ),
            format!("env: [{{ name: DOMAIN, value: lab.org }}]\nargs: [--device, {inline}]"),
            format!(
                "env: [{{ name: D, value: lab }}]\nargs: [--domain, $(D).org, --device, {inline}]"
            ),
            format!(
                "env: [{{ name: NODE_NAME, valueFrom: {{ fieldRef: {{ fieldPath: spec.nodeName }} }} }}]\nargs: [--domain, no.org, --domain, lab.org, --device, {inline}]"
            ),
        ] {
            has(
                Peer::Generic,
                &daemon_set(&container),
                None,
                &["\"lab.org/fuse\"", "\"/dev/fuse\""],
                &[],
            );
        }
        let elsewhere = format!(
            "env: [{{ name: DOMAIN, valueFrom: {{ configMapKeyRef: {{ name: m, key: k }} }} }}]\nargs: [--device, {inline}, --device, $(DOMAIN)]"
        );
        has(
            Peer::Generic,
            &daemon_set(&elsewhere),
            None,
            &["\"squat.ai/fuse\""],
            &[
                "`DOMAIN` at `spec.template.spec.containers[1].env[0]` (line 13) has no value in the manifest",
                "`--device` at",
            ],
        );
        let wrong = format!(
            "args:\n- --device\n- {inline}\n- --device\n- |\n  name: b\n  groups:\n    - count: many\n      paths: [{{ path: /dev/b }}]\n- --device\n- 'name: ['\n"
        );
        let found = imported(Peer::Generic, &daemon_set(&wrong), None);
        assert_eq!(found.wrong, 2);
        let warnings = found.warnings.join("\n");
        assert!(
            warnings.contains("line 20: `--device[1].groups[0].count` is `many`"),
            "{warnings}"
        );
        assert!(
            warnings.contains("`--device[2]` is left out: line 23: neither YAML nor JSON"),
            "{warnings}"
        );
    }

    #[test]
    fn a_manifest_without_the_plugins_file_names_its_path() {
        let of = |container: &str| {
            import(Peer::Generic, &daemon_set(container), None, None).unwrap_err()
        };
        let error = of("args: [--config, /etc/gdp/config.yaml]");
        assert!(error.to_string().contains("the container has no `--device` flag"), "{error}");
        assert!(
            error.warnings[0]
                .contains("the plugin's file `/etc/gdp/config.yaml` is not in this manifest"),
            "{:?}",
            error.warnings
        );
        let shell = "kind: Pod\nspec: { containers: [{ image: x/y, command: [sh, -c, 'generic-device-plugin --device a'] }] }";
        let error = import(Peer::Generic, shell, None, None).unwrap_err().to_string();
        assert!(
            error.contains("a shell's command line is not read") && error.contains("`x/y`"),
            "{error}"
        );
        let map = "kind: ConfigMap\ndata:\n  config.yaml: |\n    devices: [{ name: a, groups: [{ paths: [{ path: /dev/a }] }] }]\n";
        has(
            Peer::Generic,
            &format!("{}---\n{map}", daemon_set("args: [--config, /x, --domain, lab.org]")),
            None,
            &["\"lab.org/a\""],
            &[],
        );
        let both = format!(
            "{}---\n{map}",
            daemon_set("args: [--device, '{name: b, groups: [{paths: [{path: /dev/b}]}]}']")
        );
        has(
            Peer::Generic,
            &both,
            None,
            &["\"squat.ai/b\""],
            &["the file's `devices` are left out"],
        );
        let inline = "'{name: fuse, groups: [{paths: [{path: /dev/fuse}]}]}'";
        let tagged = |tag: &str| {
            daemon_set(&format!("args: [--device, {inline}]")).replace("@sha256:0123", tag)
        };
        let known = [
            (":0.1.3", "squat.ai", false),
            (":v0.2.0@sha256:01", "devic.es", false),
            (":latest", "squat.ai", true),
        ];
        for (tag, domain, is_unsure) in known {
            let found = imported(Peer::Generic, &tagged(tag), None);
            assert!(found.toml.contains(&format!("\"{domain}/fuse\"")), "{tag}: {}", found.toml);
            assert_eq!(
                found.warnings.iter().any(|warning| warning.starts_with("no domain is given")),
                is_unsure,
                "{tag}"
            );
        }
        // An image may have any name.
        let mine = "kind: Pod\nspec: { containers: [{ image: mine, args: [--device, '{name: b, groups: [{paths: [{path: /dev/b}]}]}'] }] }";
        has(Peer::Generic, mine, None, &["\"squat.ai/b\""], &[]);
        for peer in [Peer::Sriov, Peer::RdmaShared, Peer::Smarter] {
            let error =
                import(peer, "kind: Pod\nspec: { containers: [{ image: mine }] }", None, None)
                    .unwrap_err()
                    .to_string();
            assert!(error.contains("add the ConfigMap after a line `---`"), "{error}");
        }
    }

    #[test]
    fn flags_override_variables_and_these_override_the_file() {
        let set = "kind: DaemonSet\nspec:\n  template:\n    spec:\n      containers:\n      - name: sidecar\n        image: nvcr.io/nvidia/k8s-device-plugin:v0.17.0\n        command: [config-manager]\n        env: [{ name: MIG_STRATEGY, value: mixed }]\n      - image: nvcr.io/nvidia/k8s-device-plugin:v0.17.0\n        command: [nvidia-device-plugin]\n        args: [--pass-device-specs, '--device-id-strategy=index']\n        env:\n        - { name: DEVICE_ID_STRATEGY, value: uuid }\n        - { name: DEVICE_LIST_STRATEGY, value: 'envvar,volume-mounts' }\n        - { name: MIG_STRATEGY, value: single }\n        - { name: FAIL_ON_INIT_ERROR, value: 'false' }\n        - { name: GDS_ENABLED, valueFrom: { configMapKeyRef: { name: m, key: k } } }\n        - { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }\n        - { name: CONFIG_FILE, value: /config/config.yaml }\n";
        let toml = [
            "pass_device_specs = true",
            "device_id_strategy = \"index\"",
            "device_list_strategy = [\"envvar\", \"volume-mounts\"]",
        ];
        let warnings =
            ["`GDS_ENABLED` at", "the plugin's file `/config/config.yaml`", "is `single`"];
        has(Peer::Nvidia, set, None, &toml, &warnings);
        let map = "kind: ConfigMap\ndata:\n  any: |\n    flags: { migStrategy: mixed, gdsEnabled: true, plugin: { passDeviceSpecs: false } }\n    sharing: { mps: { resources: [{ name: gpu, replicas: 3 }] } }\n";
        let found = imported(Peer::Nvidia, &format!("{set}---\n{map}"), None);
        assert!(
            toml.iter().all(|wanted| found.toml.contains(wanted))
                && found.toml.contains("gds = true"),
            "{}",
            found.toml
        );
        assert!(!found.warnings.join("\n").contains("mixed"), "{:?}", found.warnings);
        let sriov = format!(
            "kind: DaemonSet\nspec:\n  template:\n    spec:\n      containers:\n      - image: ghcr.io/k8snetworkplumbingwg/sriov-network-device-plugin:v3\n        args: ['--log-level=10', '--resource-prefix=openshift.io', -use-cdi]\n---\nkind: ConfigMap\ndata: {{ config.json: '{POOL}' }}\n"
        );
        has(Peer::Sriov, &sriov, None, &["\"openshift.io/a\"", "cdi = [\"annotations\"]"], &[]);
        assert!(
            import(Peer::Sriov, &sriov, None, Some("mine.org"))
                .unwrap()
                .toml
                .contains("\"mine.org/a\"")
        );
    }
}
