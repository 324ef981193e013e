//! Reads the files and lays them over each other.

use super::fragments::Fragment;
use super::{Config, ConfigError, DEFAULT_PATH, validate};
use std::io;
use std::path::{Path, PathBuf};

/// Loads the configuration from `file` (else the default path) and the `*.toml` drop-ins of `config.d` beside it.
///
/// A missing default file is an empty one; a file that was asked for must be there.
///
/// # Errors
/// One sentence: which file, which line, what is wrong, what would be right.
pub fn load(file: Option<&Path>) -> Result<Config, ConfigError> {
    let main = file.unwrap_or(Path::new(DEFAULT_PATH));
    let mut files = Vec::new();
    let mut merged = Fragment::default();
    let mut hash = crc32fast::Hasher::new();
    for path in std::iter::once(main.to_owned()).chain(drop_ins(main)?) {
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let fragment = toml::from_str(&text).map_err(|error| ConfigError::of_toml(&error, &text, &path))?;
                // Checked alone first, so that an error of a value names its file.
                let checked = validate::validate(&fragment, Vec::new()).map_err(|error| error.in_file(&path));
                checked?;
                lay_over(&mut merged, fragment);
                hash.update(text.as_bytes());
                files.push(path);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && file.is_none() => {}
            Err(error) => return Err(ConfigError::new(format!("cannot be read: {error}; `--config` names the file")).in_file(&path)),
        }
    }
    Ok(Config { asked: file.map(Path::to_owned), hash: hash.finalize(), ..validate::validate(&merged, files)? })
}

fn lay_over(merged: &mut Fragment, fragment: Fragment) {
    let Fragment { ledger, telemetry, kubelet, cdi, device_info, health, nvidia, upgrade, resource } = fragment;
    merged.ledger.durability = ledger.durability.or(merged.ledger.durability);
    merged.ledger.history_age = ledger.history_age.or(merged.ledger.history_age.take());
    merged.ledger.history_size = ledger.history_size.or(merged.ledger.history_size);
    merged.ledger.refuse = ledger.refuse.or(merged.ledger.refuse);
    merged.ledger.when_not_durable = ledger.when_not_durable.or(merged.ledger.when_not_durable);
    merged.telemetry.listen = telemetry.listen.or(merged.telemetry.listen.take());
    merged.kubelet.pod_resources_socket = kubelet.pod_resources_socket.or(merged.kubelet.pod_resources_socket.take());
    merged.cdi.directory = cdi.directory.or(merged.cdi.directory.take());
    merged.device_info.directory = device_info.directory.or(merged.device_info.directory.take());
    merged.upgrade.detach = upgrade.detach.or(merged.upgrade.detach);
    merged.health.poll = health.poll.or(merged.health.poll.take());
    merged.health.fatal_xids = health.fatal_xids.or(merged.health.fatal_xids.take());
    merged.health.ignore = health.ignore.or(merged.health.ignore.take());
    merged.health.at_kubelet_start = health.at_kubelet_start.or(merged.health.at_kubelet_start);
    merged.nvidia.nvml = nvidia.nvml.or(merged.nvidia.nvml.take());
    merged.resource.extend(resource);
}

fn drop_ins(main: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let dir = main.with_file_name("config.d");
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(ConfigError::new(format!("cannot be read: {error}")).in_file(&dir)),
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|extension| extension == "toml")).collect();
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Policy, Refuse, Retention, WhenNotDurable};
    use std::time::Duration;

    fn sentence(text: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        load(Some(&file)).unwrap_err().to_string()
    }

    #[test]
    fn the_example_of_the_documentation_is_valid() {
        let config = load(Some(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/config.toml")))).unwrap();
        assert!(config.resources.is_empty(), "everything in the shipped file is a comment");
    }

    #[test]
    fn drop_ins_add_resources_and_later_keys_win() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "[telemetry]\nlisten = \"127.0.0.1:1\"\n[ledger]\nhistory_age = \"1d\"\nhistory_size = 5000\n[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n").unwrap();
        let drop_in = |name: &str, text: &str| std::fs::write(dir.path().join("config.d").join(name), text).unwrap();
        drop_in("20.toml", "[telemetry]\nlisten = \"off\"\n[ledger]\nhistory_age = \"365d\"");
        drop_in("10.toml", "[telemetry]\nlisten = \"127.0.0.1:2\"\n[[resource]]\nname = \"a.b/d\"\nclass = \"nvme\"\n");
        drop_in("30.toml.rpmsave", "nonsense");
        let config = load(Some(&file)).unwrap();
        assert_eq!(config.listen, None);
        assert_eq!(config.retention, Retention { age: Duration::from_secs(365 * 24 * 3600), grants: 5000 });
        assert_eq!(config.resources.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>(), ["a.b/c", "a.b/d"]);
        assert_eq!(config.files.len(), 3);
    }

    #[test]
    fn the_ledgers_choices_are_the_safe_ones_until_a_file_says_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "").unwrap();
        assert_eq!(load(Some(&file)).unwrap().policy, Policy { refuse: Refuse::Proven, when_not_durable: WhenNotDurable::Refuse });
        std::fs::write(&file, "[ledger]\nrefuse = \"never\"\nwhen_not_durable = \"refuse\"\n").unwrap();
        std::fs::write(dir.path().join("config.d/1.toml"), "[ledger]\nwhen_not_durable = \"serve\"\n").unwrap();
        assert_eq!(load(Some(&file)).unwrap().policy, Policy { refuse: Refuse::Never, when_not_durable: WhenNotDurable::Serve });
    }

    #[test]
    fn every_mistake_is_one_sentence_with_its_place() {
        let resource = |rest: &str| format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\n{rest}");
        let select = |rest: &str| format!("[[resource]]\nname = \"a.b/c\"\nclass = \"nic\"\nselect = {{ {rest} }}");
        for (text, expected) in [
            ("[nvidia]\nnvml = \"on\"".to_owned(), "`nvidia.nvml` is `on`, but must be `auto`, `off`, or the absolute path"),
            ("[ledgr]\n".to_owned(), "line 1: unknown key `ledgr`; did you mean `ledger`?"),
            (resource("replica = 3"), "line 4: unknown key `replica`; did you mean `replicas`?"),
            (resource("paths = [{ hots = \"/dev/fuse\" }]"), "unknown key `hots`; did you mean `host`?"),
            (resource("replicas = 0\npaths = [\"/dev/fuse\"]"), "resource `a.b/c`: `replicas` is 0"),
            (resource(""), "resource `a.b/c`: the class `char` needs `paths`"),
            (resource("paths = [\"fuse\"]"), "must begin with `/dev/`"),
            (resource("paths = [\"/dev/[\"]"), "not a valid glob"),
            (resource("paths = [{ host = \"/dev/fuse\", permissions = \"rx\" }]"), "permissions `rx`"),
            (
                resource("paths = [{ host = \"/dev/video*\", container = \"/dev/cam\" }]"),
                "all that `/dev/video*` matches would be `/dev/cam` in the container; a folder ends in `/`, as in `/dev/cam/`",
            ),
            (
                resource("paths = [{ host = \"/dev/a\", container = \"/dev/x\" }, { host = \"/dev/b\", container = \"/dev/x\" }]"),
                "`/dev/a` and `/dev/b` would both be `/dev/x` in the container",
            ),
            (
                resource("paths = [\"/dev/a\", { host = \"/dev/b\", container = \"/dev/a\" }]"),
                "`/dev/a` and `/dev/b` would both be `/dev/a` in the container",
            ),
            (
                resource("paths = [{ host = \"/dev/a/0\", container = \"/dev/x/\" }, { host = \"/dev/b/0\", container = \"/dev/x/\" }]"),
                "`/dev/a/0` and `/dev/b/0` would both be `/dev/x/0` in the container",
            ),
            ("[ledger]\ndurability = \"power-los\"".to_owned(), "unknown value `power-los`; did you mean `power-loss`?"),
            ("[ledger]\nhistory_age = \"90\"".to_owned(), "`ledger.history_age` is `90`, but must be a time such as `90d`"),
            ("[ledger]\nhistory_age = \"1h\"".to_owned(), "`ledger.history_age` is `1h`, but must be at least a day"),
            ("[ledger]\nhistory_size = 10".to_owned(), "`ledger.history_size` is 10, but must be at least 1000"),
            ("[ledger]\nrefuse = \"nevr\"".to_owned(), "unknown value `nevr`; did you mean `never`?"),
            ("[ledger]\nwhen_not_durabel = \"serve\"".to_owned(), "unknown key `when_not_durabel`; did you mean `when_not_durable`?"),
            ("[ledger]\nwhen_not_durable = \"server\"".to_owned(), "unknown value `server`; did you mean `serve`?"),
            ("[telemetry]\nlisten = \"9477\"".to_owned(), "`telemetry.listen` is `9477`"),
            ("[health]\npoll = \"0s\"".to_owned(), "`health.poll` is `0s`, but must be a time from `1s` to `60s`"),
            ("[health]\nignore = [\"no_carier\"]".to_owned(), "unknown value `no_carier`; did you mean `no_carrier`?"),
            ("[health]\nignore = [\"device_gone\"]".to_owned(), "`health.ignore` has `device_gone`, but without it no container"),
            ("[health]\nat_kubelet_start = \"tells\"".to_owned(), "unknown value `tells`; did you mean `tell`?"),
            ("[[resource]]\nname = \"gpu\"\nclass = \"gpu\"".to_owned(), "`gpu` is not a resource name"),
            ("[[resource]]\nname = \"a.b/c\"\nclass = \"gppu\"".to_owned(), "did you mean `gpu`?"),
            ("[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\nselect = { vendor = [\"xyz\"] }".to_owned(), "`xyz`"),
            (select("pf = [\"ens1f0#3-1\"]"), "resource `a.b/c`: `ens1f0#3-1` must be the interface or the PCI address"),
            (select("link_type = [\"ethernet\"]"), "unknown value `ethernet`; did you mean `ether`?"),
            (select("model = [\"H100[\"]"), "the model `H100[` is not a valid glob"),
            (select("numa_nodes = [0]"), "unknown key `numa_nodes`; did you mean `numa_node`?"),
            (select("iommu_group = [-1]"), "line 4"),
            (
                "[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"".to_owned(),
                "two resources are named `a.b/c`",
            ),
            ("a = ".to_owned(), "line 1"),
        ] {
            let sentence = sentence(&text);
            assert!(sentence.contains(expected), "{sentence}\nshould contain: {expected}");
            assert_eq!(sentence.lines().count(), 1, "{sentence}");
        }
    }

    #[test]
    fn paths_that_stay_apart_in_the_container_are_valid() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        for paths in [
            "{ host = \"/dev/video*\", container = \"/dev/cam/\" }",
            "\"/dev/video*\", \"/dev/video*\"",
            "{ host = \"/dev/a\", container = \"/dev/x\" }, { host = \"/dev/b\", container = \"/dev/y\" }",
            "{ host = \"/dev/a\", container = \"/dev/x\" }, { host = \"/dev/a\", container = \"/dev/x\" }",
            "{ host = \"/dev/a\", container = \"/dev/b\" }, { host = \"/dev/b\", container = \"/dev/a\" }",
        ] {
            std::fs::write(&file, format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\npaths = [{paths}]")).unwrap();
            load(Some(&file)).unwrap();
        }
    }

    #[test]
    fn a_file_that_was_asked_for_must_be_there() {
        assert!(load(Some(Path::new("/nonexistent/config.toml"))).unwrap_err().to_string().contains("/nonexistent/config.toml"));
    }
}
