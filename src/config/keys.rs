//! Every key with its default: the table that tests compare `config show` and docs/configure.md
//! with.

/// The tables of a file, in the order of `config show`.
pub(super) const TABLES: [&str; 11] = [
    "ledger",
    "telemetry",
    "kubelet",
    "cdi",
    "device_info",
    "health",
    "nvidia",
    "labels",
    "cluster",
    "dra",
    "resource",
];

/// A key: its table, its name, and its default as TOML. Empty means no default, or one that follows
/// from other keys.
pub(super) type Key = (&'static str, &'static str, &'static str);

pub(super) const KEYS: &[Key] = &[
    ("ledger", "durability", "\"power-loss\""),
    ("ledger", "history_age", "\"90d\""),
    ("ledger", "history_size", "\"256MiB\""),
    ("ledger", "refuse", "\"proven\""),
    ("ledger", "when_not_durable", "\"refuse\""),
    ("telemetry", "listen", "\"127.0.0.1:9477\""),
    ("telemetry", "token_file", ""),
    ("telemetry", "tls_cert", ""),
    ("telemetry", "tls_key", ""),
    ("telemetry", "tls_client_ca", ""),
    ("telemetry", "authorize", "\"off\""),
    ("kubelet", "pod_resources_socket", ""),
    ("cdi", "directory", "\"/var/run/cdi\""),
    ("device_info", "directory", "\"/var/run/k8s.cni.cncf.io/devinfo/dp\""),
    ("health", "poll", "\"10s\""),
    ("health", "fatal_xids", "[48, 64, 74, 79, 95, 119, 120, 140, 143]"),
    ("health", "ignore", "[]"),
    ("health", "at_kubelet_start", "\"withhold\""),
    ("nvidia", "nvml", "\"auto\""),
    ("nvidia", "mig_strategy", "\"none\""),
    ("nvidia", "events", "true"),
    ("nvidia", "driver_root", "\"auto\""),
    ("nvidia", "dev_root", "\"auto\""),
    ("labels", "features_d", "\"off\""),
    ("cluster", "node_labels", "\"/etc/holdfast-node/labels\""),
    ("cluster", "credentials", "\"auto\""),
    ("cluster", "events", "false"),
    ("cluster", "node_condition", "false"),
    ("dra", "enabled", "false"),
    ("dra", "vendor_attributes", "false"),
    ("dra", "device_metadata", "false"),
    ("dra", "claim_status", "false"),
    ("resource", "preset", ""),
    ("resource", "name", ""),
    ("resource", "api", "\"plugin\""),
    ("resource", "class", ""),
    ("resource", "contract", ""),
    ("resource", "replicas", "1"),
    ("resource", "pool", ""),
    ("resource", "capacity", "false"),
    ("resource", "per_container", ""),
    ("resource", "placement", "\"closest\""),
    ("resource", "topology", "true"),
    ("resource", "cdi", "[]"),
    ("resource", "paths", ""),
    ("resource", "nodes", ""),
    ("resource", "env", ""),
    ("resource", "mounts", "[]"),
    ("resource", "before_start", "\"none\""),
    ("resource", "after_release", "\"none\""),
    ("resource", "check", ""),
    ("resource", "select", ""),
    ("resource", "or", ""),
    ("resource", "exclude", ""),
    ("resource", "nvidia", ""),
    ("resource", "intel-gpu", ""),
    ("resource", "intel-fpga", ""),
    ("resource", "xilinx", ""),
    ("resource", "sriov", ""),
    ("resource.select", "vendor", ""),
    ("resource.select", "device", ""),
    ("resource.select", "driver", ""),
    ("resource.select", "address", ""),
    ("resource.select", "vf", ""),
    ("resource.select", "pf", ""),
    ("resource.select", "interface", ""),
    ("resource.select", "link_type", ""),
    ("resource.select", "model", ""),
    ("resource.select", "uuid", ""),
    ("resource.select", "numa_node", ""),
    ("resource.select", "iommu_group", ""),
    ("resource.select", "mdev_type", ""),
    ("resource.select", "mig_profile", ""),
    ("resource.select", "uniform", ""),
    ("resource.select", "part", ""),
    ("resource.select", "attribute", ""),
    ("resource.select", "id", ""),
    ("resource.nvidia", "device_list_strategy", "[\"envvar\"]"),
    ("resource.nvidia", "device_id_strategy", "\"uuid\""),
    ("resource.nvidia", "pass_device_specs", "false"),
    ("resource.nvidia", "cdi_vendor", "\"nvidia.com\""),
    ("resource.nvidia", "cdi_annotation_prefix", "\"cdi.k8s.io/\""),
    ("resource.nvidia", "gdrcopy", "\"auto\""),
    ("resource.nvidia", "gds", "\"auto\""),
    ("resource.nvidia", "mofed", "\"auto\""),
    ("resource.nvidia", "imex_channels", "[]"),
    ("resource.nvidia", "mps_root", ""),
    ("resource.nvidia", "mps_control", "\"run\""),
    ("resource.nvidia", "mps_memory_mib", ""),
    ("resource.nvidia", "mps_thread_percentage", ""),
    ("resource.intel-gpu", "by_path", "\"single\""),
    ("resource.intel-fpga", "mode", "\"af\""),
    ("resource.xilinx", "management_node", "true"),
    ("resource.sriov", "rdma", ""),
    ("resource.sriov", "vhost_net", "false"),
    ("resource.sriov", "vdpa", ""),
    ("resource.sriov", "additional_info", ""),
];

/// The keys of a table, in the order of `config show`.
pub(super) fn of(table: &str) -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(move |(of, ..)| *of == table)
}

#[cfg(test)]
mod tests {
    use super::super::{Change, Config, Examined, Node};
    use super::*;
    use crate::domain::{Reported, TlsFiles};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn examined(text: &str) -> Examined {
        Examined::alone(text.as_bytes(), Path::new("f"), &Node::default())
    }

    fn config(text: &str) -> Config {
        examined(text).config().unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    /// The keys that the parser lists as known when it finds an unknown one.
    fn known(table: &str) -> Vec<String> {
        let unlikely = "zzzzzzzzzzzzzzzz";
        let text = match table.strip_prefix("resource") {
            None => format!("[{table}]\n{unlikely} = 1\n"),
            Some("") => {
                format!("[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n{unlikely} = 1\n")
            }
            Some(below) => format!(
                "[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n[resource{below}]\n{unlikely} = 1\n"
            ),
        };
        let problems = examined(&text).problems;
        let quoted: Vec<String> =
            problems[0].problem().split('`').skip(1).step_by(2).map(str::to_owned).collect();
        assert_eq!(quoted[0], unlikely, "{problems:?}");
        quoted[1..].to_vec()
    }

    fn sorted(mut list: Vec<String>) -> Vec<String> {
        list.sort();
        list
    }

    #[test]
    fn the_table_has_exactly_the_keys_of_the_parser() {
        let mut tables: Vec<&str> = KEYS.iter().map(|(table, ..)| *table).collect();
        tables.dedup();
        assert_eq!(
            tables.iter().filter(|table| !table.contains('.')).copied().collect::<Vec<_>>(),
            TABLES
        );
        for table in tables {
            assert_eq!(
                sorted(of(table).map(|(_, key, _)| (*key).to_owned()).collect()),
                sorted(known(table)),
                "{table}"
            );
        }
        let problem = examined("zzzzzzzzzzzzzzzz = 1").problems[0].problem().to_owned();
        assert!(TABLES.iter().all(|table| problem.contains(&format!("`{table}`"))), "{problem}");
    }

    #[test]
    fn the_defaults_equal_an_empty_configuration() {
        let defaults = |tables: &dyn Fn(&str) -> bool, header: &str| -> String {
            let keys = KEYS.iter().filter(|(table, _, usual)| tables(table) && !usual.is_empty());
            keys.map(|(table, key, usual)| {
                format!("{}.{key} = {usual}\n", table.strip_prefix(header).unwrap_or(table))
            })
            .collect()
        };
        assert_eq!(config(&defaults(&|table| !table.starts_with("resource"), "")), config(""));
        for (class, contract) in [
            ("gpu", "nvidia"),
            ("gpu", "intel-gpu"),
            ("fpga", "intel-fpga"),
            ("fpga", "xilinx"),
            ("nic", "sriov"),
        ] {
            let plain = format!(
                "[[resource]]\nname = \"a.b/c\"\nclass = \"{class}\"\ncontract = \"{contract}\"\n"
            );
            let own: String = of("resource")
                .filter(|key| !key.2.is_empty())
                .map(|(_, key, usual)| format!("{key} = {usual}\n"))
                .collect();
            let options = defaults(&|table| table == format!("resource.{contract}"), "resource.");
            assert_eq!(config(&format!("{plain}{own}{options}")), config(&plain), "{contract}");
        }
    }

    #[test]
    fn the_documentation_has_every_key_with_its_default() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configure.md"))
                .unwrap();
        // The rows of the tables: | `table.key` | default | …
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
        let documented = rows.filter_map(|(key, rest)| {
            let (table, key) = key
                .trim_start_matches('[')
                .replace("]]", "")
                .rsplit_once('.')
                .map(|(a, b)| (a.to_owned(), b.to_owned()))?;
            let usual = rest.split(" | ").next()?.trim_matches('`').to_owned();
            Some((table, key, if usual == "–" { String::new() } else { usual }))
        });
        let mut documented: Vec<(String, String, String)> =
            documented.filter(|(table, ..)| table != "match").collect();
        let mut keys: Vec<_> = KEYS
            .iter()
            .map(|(table, key, usual)| {
                ((*table).to_owned(), (*key).to_owned(), (*usual).to_owned())
            })
            .collect();
        documented.sort();
        keys.sort();
        assert_eq!(documented, keys);
    }

    #[test]
    fn the_documentation_has_for_every_key_when_it_takes_effect() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configure.md"))
                .unwrap();
        let documented = |when: &str| -> BTreeSet<String> {
            let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
            let rows = rows.filter(|(_, rest)| rest.split(" | ").nth(1) == Some(when));
            rows.map(|(key, _)| key.to_owned()).collect()
        };
        let other = "[ledger]\ndurability = \"process-crash\"\nhistory_age = \"2d\"\nhistory_size = 2000\nrefuse = \"never\"\nwhen_not_durable = \"serve\"\n\
            [telemetry]\nlisten = \"off\"\ntoken_file = \"/a\"\n[kubelet]\npod_resources_socket = \"/a\"\n[cdi]\ndirectory = \"/a\"\n[device_info]\ndirectory = \"/a\"\n\
            [health]\npoll = \"2s\"\nfatal_xids = [1]\nignore = [\"no_carrier\"]\nat_kubelet_start = \"tell\"\n[nvidia]\nnvml = \"off\"\nevents = false\ndriver_root = \"/a\"\ndev_root = \"/\"\nmig_strategy = \"single\"\n[labels]\nfeatures_d = \"/a\"\n[cluster]\nnode_labels = \"/a\"\ncredentials = \"/a\"\n";
        // Without the cargo feature `cluster` no file may switch these on.
        let reported = Reported { events: true, condition: true };
        let file = std::path::PathBuf::from("/a");
        let tls =
            Some(TlsFiles { cert: file.clone(), key: file.clone(), client_ca: Some(file.clone()) });
        let (dra, vendor_attributes, authorize, device_metadata) = (true, true, true, true);
        let other = Config { dra, vendor_attributes, reported, tls, authorize, ..config(other) };
        let other = Config { device_metadata, claim_status: true, ..other };
        let change = Change::between(&config(""), &other);
        let keys = |keys: &[&str]| keys.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
        assert_eq!(
            (documented("at once"), documented("next start")),
            (keys(&change.live), keys(&change.needs_restart))
        );
    }
}
