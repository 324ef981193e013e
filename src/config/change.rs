//! The difference between two configurations, key by key; pure.
//!
//! A reload applies it, and `status` shows the keys that need a restart.

use super::Config;
use crate::domain::{Api, ResourceName, ResourceSpec, TlsFiles};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The change of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResourceChange {
    /// Added.
    Added,
    /// Removed.
    Removed,
    /// These of its keys have other values.
    Changed(Vec<&'static str>),
}

/// The difference.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// The resources that were added, removed or changed.
    pub resources: BTreeMap<ResourceName, ResourceChange>,
    /// Whether the remaining resources have another order: the first that selects a device gets it.
    pub reordered: bool,
    /// Keys outside of resources that a running daemon applies at once.
    pub live: Vec<&'static str>,
    /// Keys that the daemon applies at its next start.
    pub needs_restart: Vec<&'static str>,
}

impl Change {
    /// The change from one configuration to the other.
    #[must_use]
    pub fn between(before: &Config, after: &Config) -> Self {
        let (were, are) = (by_name(before), by_name(after));
        let mut resources = BTreeMap::new();
        for (name, specs) in &are {
            let change = match were.get(name) {
                None => ResourceChange::Added,
                Some(was) if was == specs => continue,
                Some(was) => ResourceChange::Changed(changed(was, specs)),
            };
            resources.insert((*name).clone(), change);
        }
        let removed = were.keys().filter(|name| !are.contains_key(*name));
        resources.extend(removed.map(|name| ((*name).clone(), ResourceChange::Removed)));
        let order = |config: &'_ Config| -> Vec<ResourceName> {
            let stay = config
                .resources
                .iter()
                .filter(|spec| were.contains_key(&spec.name) && are.contains_key(&spec.name));
            stay.map(|spec| spec.name.clone()).collect()
        };
        let reordered = order(before) != order(after);
        let live = differing([
            ("ledger.refuse", before.policy.refuse != after.policy.refuse),
            (
                "ledger.when_not_durable",
                before.policy.when_not_durable != after.policy.when_not_durable,
            ),
            ("health.poll", before.health.poll != after.health.poll),
            ("health.fatal_xids", before.health.fatal_xids != after.health.fatal_xids),
            ("health.ignore", before.health.ignored != after.health.ignored),
            (
                "health.at_kubelet_start",
                before.health.at_kubelet_start != after.health.at_kubelet_start,
            ),
            ("nvidia.events", before.health.nvml_events != after.health.nvml_events),
        ]);
        let needs_restart = differing([
            ("ledger.durability", before.durability != after.durability),
            ("ledger.history_age", before.retention.age != after.retention.age),
            (
                "ledger.history_size",
                (before.retention.grants, before.retention.bytes)
                    != (after.retention.grants, after.retention.bytes),
            ),
            ("telemetry.listen", before.listen != after.listen),
            ("telemetry.token_file", before.token_file != after.token_file),
            ("telemetry.tls_cert", tls(before, |it| &it.cert) != tls(after, |it| &it.cert)),
            ("telemetry.tls_key", tls(before, |it| &it.key) != tls(after, |it| &it.key)),
            ("telemetry.tls_client_ca", client_ca(before) != client_ca(after)),
            ("telemetry.authorize", before.authorize != after.authorize),
            (
                "kubelet.pod_resources_socket",
                before.pod_resources_socket != after.pod_resources_socket,
            ),
            ("cdi.directory", before.cdi_directory != after.cdi_directory),
            ("device_info.directory", before.device_info_directory != after.device_info_directory),
            ("nvidia.nvml", before.nvml != after.nvml),
            ("nvidia.driver_root", before.nvidia_roots.driver != after.nvidia_roots.driver),
            ("nvidia.dev_root", before.nvidia_roots.dev != after.nvidia_roots.dev),
            ("nvidia.mig_strategy", before.mig_strategy != after.mig_strategy),
            ("labels.features_d", before.features_directory != after.features_directory),
            ("cluster.node_labels", before.node_labels != after.node_labels),
            ("cluster.credentials", before.credentials != after.credentials),
            ("cluster.events", before.reported.events != after.reported.events),
            ("cluster.node_condition", before.reported.condition != after.reported.condition),
            ("dra.enabled", before.dra != after.dra),
            ("dra.vendor_attributes", before.vendor_attributes != after.vendor_attributes),
            ("dra.device_metadata", before.device_metadata != after.device_metadata),
            ("dra.claim_status", before.claim_status != after.claim_status),
        ]);
        Change { resources, reordered, live, needs_restart }
    }

    /// Whether the configurations are equal.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Change::default()
    }
}

impl Config {
    /// The configuration of a running daemon after a reload of `other`: keys that need a restart
    /// keep their values.
    #[must_use]
    pub fn taking(&self, other: &Config) -> Config {
        Config {
            durability: self.durability,
            retention: self.retention,
            listen: self.listen,
            token_file: self.token_file.clone(),
            tls: self.tls.clone(),
            authorize: self.authorize,
            pod_resources_socket: self.pod_resources_socket.clone(),
            cdi_directory: self.cdi_directory.clone(),
            device_info_directory: self.device_info_directory.clone(),
            nvml: self.nvml.clone(),
            nvidia_roots: self.nvidia_roots.clone(),
            mig_strategy: self.mig_strategy,
            features_directory: self.features_directory.clone(),
            node_labels: self.node_labels.clone(),
            credentials: self.credentials.clone(),
            reported: self.reported,
            dra: self.dra,
            vendor_attributes: self.vendor_attributes,
            device_metadata: self.device_metadata,
            claim_status: self.claim_status,
            resources: other.offered(self.dra),
            ..other.clone()
        }
    }

    /// The resources of this configuration for a process that was started with or without
    /// `dra.enabled`. A process without it offers every resource through the device plugin until
    /// its next start.
    #[must_use]
    pub fn offered(&self, dra: bool) -> Vec<Arc<ResourceSpec>> {
        let offered = |spec: &Arc<ResourceSpec>| {
            if dra || spec.api == Api::Plugin {
                return Arc::clone(spec);
            }
            Arc::new(ResourceSpec { api: Api::Plugin, ..ResourceSpec::clone(spec) })
        };
        self.resources.iter().map(offered).collect()
    }
}

/// A file of TLS.
fn tls(config: &Config, file: impl Fn(&TlsFiles) -> &PathBuf) -> Option<&PathBuf> {
    config.tls.as_ref().map(file)
}

fn client_ca(config: &Config) -> Option<&PathBuf> {
    config.tls.as_ref()?.client_ca.as_ref()
}

/// Several resources may have the same name if it is a name for each node.
fn by_name(config: &Config) -> BTreeMap<&ResourceName, Vec<&Arc<ResourceSpec>>> {
    let mut by_name: BTreeMap<_, Vec<_>> = BTreeMap::new();
    config.resources.iter().for_each(|spec| by_name.entry(&spec.name).or_default().push(spec));
    by_name
}

/// The keys that differ in any resource of this name. A different number of resources counts as
/// other `paths`.
fn changed(were: &[&Arc<ResourceSpec>], are: &[&Arc<ResourceSpec>]) -> Vec<&'static str> {
    let mut all: Vec<&'static str> =
        if were.len() == are.len() { Vec::new() } else { vec!["paths"] };
    for key in were.iter().zip(are).flat_map(|(was, is)| keys(was, is)) {
        if !all.contains(&key) {
            all.push(key);
        }
    }
    all
}

fn differing<const N: usize>(keys: [(&'static str, bool); N]) -> Vec<&'static str> {
    keys.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect()
}

/// The keys of a resource that differ, by their names in the file.
fn keys(was: &ResourceSpec, is: &ResourceSpec) -> Vec<&'static str> {
    differing([
        ("api", was.api != is.api),
        ("class", was.class != is.class || was.scope != is.scope),
        ("contract", was.contract != is.contract),
        ("cdi", was.cdi != is.cdi),
        ("select", was.select != is.select),
        ("or", was.or != is.or),
        ("exclude", was.exclude != is.exclude),
        ("paths", was.paths != is.paths || was.groups != is.groups || was.usb != is.usb),
        ("nodes", was.nodes != is.nodes),
        ("sharing", was.sharing != is.sharing),
        ("capacity", was.capacity != is.capacity),
        ("per_container", was.per_container != is.per_container),
        ("placement", was.placement != is.placement),
        ("topology", was.topology != is.topology),
        ("env", was.env != is.env),
        ("mounts", was.mounts != is.mounts),
        ("before_start", was.hooks.before_start != is.hooks.before_start),
        ("after_release", was.hooks.after_release != is.hooks.after_release),
        ("check", was.hooks.check != is.hooks.check),
    ])
}

/// One change per line: `+ example.com/a`, `- example.com/b`, `~ example.com/c: env, mounts`,
/// `~ telemetry.listen (at the next start)`.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resource = |(name, change): (&ResourceName, &ResourceChange)| match change {
            ResourceChange::Added => format!("+ {name}"),
            ResourceChange::Removed => format!("- {name}"),
            ResourceChange::Changed(keys) => format!("~ {name}: {}", keys.join(", ")),
        };
        let mut lines: Vec<String> = self.resources.iter().map(resource).collect();
        lines.extend(self.reordered.then(|| "~ the order of the resources".to_owned()));
        lines.extend(self.live.iter().map(|key| format!("~ {key}")));
        lines.extend(self.needs_restart.iter().map(|key| format!("~ {key} (at the next start)")));
        f.write_str(&lines.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Node, load};
    use super::*;
    use crate::domain::Reported;
    use proptest::prelude::*;

    fn config(text: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        load(Some(&file), &Node::default()).unwrap()
    }

    fn resource(name: &str, rest: &str) -> String {
        format!(
            "[[resource]]\nname = \"a.b/{name}\"\nclass = \"char\"\npaths = [\"/dev/{name}\"]\n{rest}\n"
        )
    }

    /// A resource that has every key.
    const WHOLE: &str = "[[resource]]\nname = \"a.b/c\"\nclass = \"nic\"\ncontract = \"generic\"\ncdi = [\"cri\"]\nselect = { vf = true }\n\
        exclude = { vf = false }\nreplicas = 2\nper_container = \"one\"\nplacement = \"spread\"\nenv = { A = \"1\" }\n\
        mounts = [{ host = \"/a\", container = \"/a\" }]\nbefore_start = { command = [\"/a\"] }\nafter_release = { command = [\"/a\"] }\n\
        check = { command = [\"/a\"] }\n";

    #[test]
    fn every_changed_key_is_listed_once_with_when_it_takes_effect() {
        let other = "[ledger]\ndurability = \"process-crash\"\nhistory_age = \"2d\"\nhistory_size = 2000\nrefuse = \"never\"\nwhen_not_durable = \"serve\"\n\
            [telemetry]\nlisten = \"off\"\ntoken_file = \"/a\"\n[kubelet]\npod_resources_socket = \"/a\"\n[cdi]\ndirectory = \"/a\"\n[device_info]\ndirectory = \"/a\"\n\
            [health]\npoll = \"2s\"\nfatal_xids = [1]\nignore = [\"no_carrier\"]\nat_kubelet_start = \"tell\"\n[nvidia]\nnvml = \"off\"\nevents = false\ndriver_root = \"/a\"\ndev_root = \"/\"\nmig_strategy = \"mixed\"\n\
            [labels]\nfeatures_d = \"/a\"\n[cluster]\nnode_labels = \"/a\"\ncredentials = \"/a\"\n";
        // Without the cargo feature `cluster` no file may switch these on.
        let reported = Reported { events: true, condition: true };
        let file = PathBuf::from("/a");
        let tls =
            Some(TlsFiles { cert: file.clone(), key: file.clone(), client_ca: Some(file.clone()) });
        let after = Config { dra: true, reported, tls, authorize: true, ..config(other) };
        let before = config("");
        let change = Change::between(&before, &after);
        let keys = |section: &str, keys: &[&str]| {
            keys.iter().map(|key| format!("{section}.{key}")).collect::<Vec<_>>()
        };
        let live = [
            keys("ledger", &["refuse", "when_not_durable"]),
            keys("health", &["poll", "fatal_xids", "ignore", "at_kubelet_start"]),
            keys("nvidia", &["events"]),
        ];
        assert_eq!(change.live, live.concat());
        let restart = [
            keys("ledger", &["durability", "history_age", "history_size"]),
            keys(
                "telemetry",
                &["listen", "token_file", "tls_cert", "tls_key", "tls_client_ca", "authorize"],
            ),
            keys("kubelet", &["pod_resources_socket"]),
            keys("cdi", &["directory"]),
            keys("device_info", &["directory"]),
            keys("nvidia", &["nvml", "driver_root", "dev_root", "mig_strategy"]),
            keys("labels", &["features_d"]),
            keys("cluster", &["node_labels", "credentials", "events", "node_condition"]),
            keys("dra", &["enabled"]),
        ];
        assert_eq!(change.needs_restart, restart.concat());
        // The running configuration has the new values of live keys and the old values of the
        // others.
        let running = before.taking(&after);
        assert_eq!(
            Change::between(&before, &running),
            Change { live: change.live.clone(), ..Change::default() }
        );
        let waits = Change { needs_restart: change.needs_restart.clone(), ..Change::default() };
        assert_eq!(Change::between(&running, &after), waits);
        assert!(waits.to_string().contains("~ telemetry.listen (at the next start)"), "{waits}");
    }

    #[test]
    fn a_resource_is_added_removed_or_changed_in_its_keys() {
        let before = config(&[resource("x", ""), resource("y", ""), WHOLE.to_owned()].concat());
        let whole = "[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n";
        let after = config(
            &[resource("x", "env = { A = \"2\" }"), resource("z", ""), whole.to_owned()].concat(),
        );
        let text = Change::between(&before, &after).to_string();
        let keys = "class, cdi, select, exclude, sharing, per_container, placement, env, mounts, before_start, after_release, check";
        assert_eq!(text, format!("~ a.b/c: {keys}\n~ a.b/x: env\n- a.b/y\n+ a.b/z"));
        let swapped = config(&[resource("y", ""), resource("x", ""), WHOLE.to_owned()].concat());
        assert_eq!(Change::between(&before, &swapped).to_string(), "~ the order of the resources");
    }

    #[test]
    fn a_process_without_dra_keeps_the_device_plugin_until_its_next_start() {
        for api in [Api::Dra, Api::Both] {
            stays_with_the_device_plugin(api);
        }
    }

    fn stays_with_the_device_plugin(api: Api) {
        let plugin = config(&resource("x", ""));
        let specs = plugin.resources.iter();
        let claimed =
            specs.map(|spec| Arc::new(ResourceSpec { api, ..ResourceSpec::clone(spec) })).collect();
        let after = Config { dra: true, resources: claimed, ..plugin.clone() };
        let change = Change::between(&plugin, &after);
        assert_eq!(change.to_string(), "~ a.b/x: api\n~ dra.enabled (at the next start)");
        let running = plugin.taking(&after);
        assert_eq!(running.resources, plugin.resources);
        assert_eq!(running.offered(true), plugin.resources, "as configured");
        // A process with it applies the change at once, in both directions.
        let started = Config { dra: true, ..plugin.clone() };
        assert_eq!(started.taking(&after).resources, after.resources);
        assert_eq!(after.taking(&plugin).resources, plugin.resources);
    }

    proptest! {
        #[test]
        fn applying_a_change_gives_the_other_configuration(before in resources(), after in resources()) {
            let (before, after) = (config(&before), config(&after));
            let change = Change::between(&before, &after);
            prop_assert_eq!(change.is_empty(), before.resources == after.resources);
            prop_assert!(Change::between(&after, &after).is_empty());
            let names = |config: &Config| config.resources.iter().map(|spec| spec.name.clone()).collect::<std::collections::BTreeSet<_>>();
            let mut follows = names(&before);
            for (name, change) in &change.resources {
                match change {
                    ResourceChange::Added => prop_assert!(follows.insert(name.clone())),
                    ResourceChange::Removed => prop_assert!(follows.remove(name)),
                    ResourceChange::Changed(keys) => prop_assert!(!keys.is_empty() && follows.contains(name)),
                }
            }
            prop_assert_eq!(follows, names(&after));
            // The same in the reverse direction.
            let back = Change::between(&after, &before);
            prop_assert_eq!(back.resources.keys().collect::<Vec<_>>(), change.resources.keys().collect::<Vec<_>>());
        }
    }

    fn resources() -> impl Strategy<Value = String> {
        let names = proptest::sample::subsequence(vec!["a", "b", "c", "d"], 0..=4).prop_shuffle();
        (names, proptest::collection::vec(0..3u8, 4)).prop_map(|(names, values)| {
            let one = |(name, value): (&str, &u8)| {
                resource(name, &format!("env = {{ V = \"{value}\" }}"))
            };
            names.into_iter().zip(&values).map(one).collect()
        })
    }
}
