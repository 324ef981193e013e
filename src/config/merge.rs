//! Reads the files, looks at every part of them, and lays them over each other.

use super::error::unknown;
use super::fragments::Fragment;
use super::keys;
use super::node::{Node, Section};
use super::tree::{Entry, Is, Table, Value};
use super::{Config, ConfigError, DEFAULT_PATH, typed, validate};
use crate::domain::Arrange;
use crate::host::read_regular;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

/// A configuration has some kilobytes.
const BYTES_MAX: u64 = 16 << 20;

/// Loads the configuration from `file` (else the default path), the `*.toml` drop-ins of `config.d` beside it, and their
/// sections for this node.
///
/// A missing default file is an empty one; a file that was asked for must be there.
///
/// # Errors
/// One sentence: which file, which line, what is wrong, what would be right.
pub fn load(file: Option<&Path>, node: &Node) -> Result<Config, ConfigError> {
    let examined = Examined::of(file, node);
    Ok(Config { asked: file.map(Path::to_owned), node: node.clone(), hash: examined.hash, ..examined.config()? })
}

/// What the files say, and everything that is wrong with them.
#[derive(Debug, Default)]
pub struct Examined {
    /// The files that were read, in this order.
    pub files: Vec<PathBuf>,
    /// The sections for some nodes, in the order in which they are laid over the rest.
    pub sections: Vec<Section>,
    /// The mistakes, at most one of each table and resource.
    pub problems: Vec<ConfigError>,
    pub(super) merged: Table,
    /// CRC-32 of the texts of the files.
    hash: u32,
}

impl Examined {
    /// Reads the same files as [`load`] does.
    #[must_use]
    pub fn of(file: Option<&Path>, node: &Node) -> Self {
        Self::with_main(file, None, node)
    }

    /// The same, were `instead` the main file.
    #[must_use]
    pub fn with_main(file: Option<&Path>, instead: Option<&Path>, node: &Node) -> Self {
        let main = file.unwrap_or(Path::new(DEFAULT_PATH));
        Self::read(instead.unwrap_or(main), main, file.or(instead).is_none(), node)
    }

    /// Reads `main` and the drop-ins that lie beside `place`.
    fn read(main: &Path, place: &Path, may_be_missing: bool, node: &Node) -> Self {
        let mut examined = Examined::default();
        let drop_ins = drop_ins(place).unwrap_or_else(|problem| {
            examined.problems.push(problem);
            Vec::new()
        });
        // A drop-in was there when they were listed: one that is gone was taken away since.
        let drop_ins = drop_ins.into_iter().map(|path| (path, true));
        for (path, may_be_missing) in std::iter::once((main.to_owned(), may_be_missing)).chain(drop_ins) {
            // A file that somebody names to be compared may be a pipe of their shell.
            let read = if path == main && main != place { std::fs::read(&path) } else { read_regular(&path, BYTES_MAX) };
            match read {
                Ok(bytes) => examined.take(&bytes, &path, node),
                Err(error) if may_be_missing && is_absent(&path, &error) => {}
                Err(error) => examined.problems.push(unreadable(&path, &error, "; `--config` names the file")),
            }
        }
        examined.merge()
    }

    /// One file alone, that has this content.
    #[must_use]
    pub fn alone(bytes: &[u8], path: &Path, node: &Node) -> Self {
        let mut examined = Examined::default();
        examined.take(bytes, path, node);
        examined.merge()
    }

    /// The configuration that follows.
    ///
    /// # Errors
    /// The first mistake.
    pub fn config(&self) -> Result<Config, ConfigError> {
        if let Some(problem) = self.problems.first() {
            return Err(problem.clone());
        }
        validate::validate(&typed::read(&self.merged)?, self.files.clone())
    }

    fn take(&mut self, bytes: &[u8], path: &Path, node: &Node) {
        self.files.push(path.to_owned());
        let mut hash = crc32fast::Hasher::new_with_initial(self.hash);
        hash.update(bytes);
        self.hash = hash.finalize();
        let read = std::str::from_utf8(bytes).map_err(|error| not_utf8(bytes, error.valid_up_to(), path));
        let mut table = match read.and_then(|text| Table::parse(text, path)) {
            Ok(table) => table,
            Err(problem) => return self.problems.push(problem),
        };
        let sections = table.take("node");
        self.examine(&table);
        lay_over(&mut self.merged, table);
        let Some(Entry { value, place, .. }) = sections else { return };
        let Some(list) = value.as_list() else {
            let problem = ConfigError::new("`node` is a list of sections; one begins with [[node]]");
            return self.problems.push(problem.at(place.as_ref()));
        };
        for value in list {
            match Section::read(value, node) {
                Ok(section) => {
                    self.examine(&section.table);
                    self.no_twins(&section.table);
                    self.sections.push(section);
                }
                Err(problem) => self.problems.push(problem),
            }
        }
    }

    /// Looks at each part of a file by itself, so that one mistake hides no other.
    fn examine(&mut self, Table(entries): &Table) {
        for entry in entries {
            let whole = Value { place: entry.place.clone(), is: entry.value.is.clone() };
            match (&*entry.key, &entry.value.is) {
                ("resource", Is::List(list)) => {
                    for resource in list {
                        self.examine_part(&entry.key, Is::List(vec![resource.clone()]), resource);
                    }
                }
                (key, _) if keys::TABLES.contains(&key) => self.examine_part(key, entry.value.is.clone(), &whole),
                (key, _) => {
                    let known: Vec<&str> = keys::TABLES.iter().copied().chain(["node"]).collect();
                    self.problems.push(ConfigError::new(unknown("key", key, &known)).at(entry.place.as_ref()));
                }
            }
        }
    }

    fn examine_part(&mut self, key: &str, is: Is, part: &Value) {
        let mut alone = Table::default();
        alone.set(key, is);
        let problem = match typed::read::<Fragment>(&alone) {
            Ok(fragment) => validate::validate(&fragment, Vec::new()).err().map(|problem| {
                let place = part.place_of(beside_name(problem.problem()));
                problem.at(place.as_ref())
            }),
            Err(problem) => Some(problem),
        };
        self.problems.extend(problem.map(|problem| if problem.line().is_some() { problem } else { problem.at(part.place.as_ref()) }));
    }

    /// Every resource needs a name of its own; but one of a section takes the place of the one with its name.
    fn no_twins(&mut self, table: &Table) {
        let mut names = BTreeSet::new();
        for name in resources(table).iter().filter_map(name_of) {
            let Some(text) = name.as_text().filter(|text| !names.insert(*text)) else { continue };
            let problem = format!("two resources are named `{}`; every resource needs a name of its own", validate::name_of(text));
            self.problems.push(ConfigError::new(problem).at(name.place.as_ref()));
        }
    }

    fn merge(mut self) -> Self {
        let merged = std::mem::take(&mut self.merged);
        self.no_twins(&merged);
        self.merged = merged;
        let place = |problem: &ConfigError| {
            let file = self.files.iter().position(|file| Some(file.as_path()) == problem.file());
            (file, problem.line(), problem.column())
        };
        self.problems.arrange_by_key(place);
        for section in self.sections.iter().filter(|section| section.matches) {
            let mut table = section.table.clone();
            let resources = table.take("resource");
            lay_over(&mut self.merged, table);
            let Some(Is::List(resources)) = resources.map(|entry| entry.value.is) else { continue };
            let Some(there) = self.merged.list_mut("resource") else { continue };
            for resource in resources {
                let name = name_of(&resource).and_then(Value::as_text);
                match there.iter_mut().find(|there| name.is_some() && name_of(there).and_then(Value::as_text) == name) {
                    Some(there) => *there = resource,
                    None => there.push(resource),
                }
            }
        }
        self
    }
}

/// Later keys win, resources add up.
fn lay_over(merged: &mut Table, over: Table) {
    for entry in over.0 {
        let there = merged.0.iter_mut().find(|there| there.key == entry.key);
        match (there.map(|there| &mut there.value.is), entry.value.is) {
            (Some(Is::Table(there)), Is::Table(over)) => over.0.into_iter().for_each(|entry| there.put(entry)),
            (Some(Is::List(there)), Is::List(over)) => there.extend(over),
            (_, is) => merged.put(Entry { value: Value { is, ..entry.value }, ..entry }),
        }
    }
}

fn resources(table: &Table) -> &[Value] {
    table.get("resource").and_then(Value::as_list).unwrap_or_default()
}

fn name_of(resource: &Value) -> Option<&Value> {
    resource.as_table()?.get("name")
}

/// What a sentence says behind the name of the resource.
fn beside_name(sentence: &str) -> &str {
    sentence.strip_prefix("resource `").and_then(|rest| rest.split_once("`: ")).map_or(sentence, |(_, rest)| rest)
}

fn not_utf8(bytes: &[u8], valid: usize, path: &Path) -> ConfigError {
    let before = String::from_utf8_lossy(&bytes[..valid]);
    let (line, column) = (before.matches('\n').count() + 1, before.chars().rev().take_while(|c| *c != '\n').count() + 1);
    let place = super::tree::Place { file: path.into(), line, column };
    ConfigError::new("a byte that is not UTF-8, as all of TOML is").at(Some(&place))
}

/// Whether nothing has this name: a link that leads nowhere is there, and what it leads to was meant to be.
fn is_absent(path: &Path, error: &io::Error) -> bool {
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    is_missing(error) && path.symlink_metadata().is_err_and(|error| is_missing(&error))
}

fn unreadable(path: &Path, error: &io::Error, advice: &str) -> ConfigError {
    let target = path.read_link().ok().filter(|_| error.kind() == io::ErrorKind::NotFound);
    let problem = match target {
        Some(target) => format!("is a link to `{}`, where nothing is; mount or write that, or remove the link", target.display()),
        None => format!("cannot be read: {error}{advice}"),
    };
    ConfigError::new(problem).in_file(path)
}

fn drop_ins(main: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let dir = main.with_file_name("config.d");
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if is_absent(&dir, &error) => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(&dir, &error, "")),
    };
    // As a shell's `*.toml`: what begins with a dot is an editor's. Emacs' `.#site.toml` is a link that leads nowhere.
    let is_drop_in = |path: &PathBuf| {
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        !is_hidden && path.extension().is_some_and(|extension| extension == "toml")
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_drop_in).collect();
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
        load(Some(&file), &Node::default()).unwrap_err().in_full()
    }

    #[test]
    fn the_example_of_the_documentation_is_valid() {
        let config = load(Some(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/config.toml"))), &Node::default()).unwrap();
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
        let config = load(Some(&file), &Node::default()).unwrap();
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
        assert_eq!(
            load(Some(&file), &Node::default()).unwrap().policy,
            Policy { refuse: Refuse::Proven, when_not_durable: WhenNotDurable::Refuse }
        );
        std::fs::write(&file, "[ledger]\nrefuse = \"never\"\nwhen_not_durable = \"refuse\"\n").unwrap();
        std::fs::write(dir.path().join("config.d/1.toml"), "[ledger]\nwhen_not_durable = \"serve\"\n").unwrap();
        assert_eq!(
            load(Some(&file), &Node::default()).unwrap().policy,
            Policy { refuse: Refuse::Never, when_not_durable: WhenNotDurable::Serve }
        );
    }

    #[test]
    fn every_mistake_is_one_sentence_with_its_place() {
        let resource = |rest: &str| format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\n{rest}");
        let select = |rest: &str| format!("[[resource]]\nname = \"a.b/c\"\nclass = \"nic\"\nselect = {{ {rest} }}");
        for (text, expected) in [
            ("[nvidia]\nnvml = \"on\"".to_owned(), "`nvidia.nvml` is `on`, but must be `auto`, `off`, or the absolute path"),
            ("[ledgr]\n".to_owned(), "line 1, column 2: unknown key `ledgr`; did you mean `ledger`?"),
            (resource("replica = 3"), "line 4, column 1: unknown key `replica`; did you mean `replicas`?"),
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
            (
                "[labels]\nfeatures_d = \"features.d\"".to_owned(),
                "`labels.features_d` must be an absolute path, the usual one is /etc/kubernetes/node",
            ),
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
            assert!(sentence.contains("`, line ") && sentence.contains(", column "), "{sentence}");
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
            load(Some(&file), &Node::default()).unwrap();
        }
    }

    #[test]
    fn a_file_that_was_asked_for_must_be_there() {
        assert!(
            load(Some(Path::new("/nonexistent/config.toml")), &Node::default())
                .unwrap_err()
                .to_string()
                .contains("/nonexistent/config.toml")
        );
    }

    #[test]
    fn a_link_that_leads_nowhere_is_no_missing_file() {
        let dir = tempfile::tempdir().unwrap();
        let (main, drop_ins) = (dir.path().join("config.toml"), dir.path().join("config.d"));
        let read = || {
            let examined = Examined::read(&main, &main, true, &Node::default());
            examined.problems.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let link = |link: &Path| std::os::unix::fs::symlink("/nonexistent/site.toml", link).unwrap();
        assert_eq!(read(), Vec::<String>::new(), "neither is there");
        std::fs::create_dir(&drop_ins).unwrap();
        link(&drop_ins.join(".#10-site.toml"));
        assert_eq!(read(), Vec::<String>::new(), "an editor's lock");
        link(&main);
        link(&drop_ins.join("50-site.toml"));
        let sentence = |link: &Path| {
            let problem = "is a link to `/nonexistent/site.toml`, where nothing is; mount or write that, or remove the link";
            format!("configuration `{}`: {problem}", link.display())
        };
        assert_eq!(read(), [sentence(&main), sentence(&drop_ins.join("50-site.toml"))]);
        std::fs::remove_file(&main).unwrap();
        std::fs::remove_dir_all(&drop_ins).unwrap();
        link(&drop_ins);
        assert_eq!(read(), [sentence(&drop_ins)]);
    }
}
