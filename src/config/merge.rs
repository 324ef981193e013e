//! Reads the files, checks each part of them, and merges them.

use super::condition::NodeFacts;
use super::error::unknown;
use super::files::{FILE_BYTES_MAX, drop_ins, is_absent, read_file, unreadable};
use super::fragments::Fragment;
use super::keys;
use super::labels::ComparedLabels;
use super::node::Node;
use super::section::Section;
use super::tree::{Entry, Is, Table, Value};
use super::{Config, ConfigError, DEFAULT_PATH, api, preset, telemetry, typed, validate};
use crate::domain::NODE;
use crate::host::read_bounded;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The limit of reported errors; further ones are only counted. A file with more is probably the
/// wrong file, or repeats one error.
pub const PROBLEMS_MAX: usize = 100;

impl Config {
    /// Reads the same files again, for the same node.
    ///
    /// # Errors
    /// As [`load`].
    pub fn load_again(&self) -> Result<Config, ConfigError> {
        load(self.requested_file.as_deref(), &self.node)
    }
}

/// Loads the configuration from `file` (else the default path), the `*.toml` drop-ins of `config.d`
/// in the same folder, and their sections for this node.
///
/// A missing default file counts as empty. A file that was named must exist.
///
/// # Errors
/// One sentence: the file, the line, the error and the remedy.
pub fn load(file: Option<&Path>, node: &Node) -> Result<Config, ConfigError> {
    let examined = Examined::of(file, node);
    let config = examined.config()?;
    let node = node.pinned(&config.node_labels, examined.compared.values().is_some());
    Ok(Config {
        requested_file: file.map(Path::to_owned),
        node,
        hash: examined.hash,
        compared_labels: examined.compared,
        ..config
    })
}

/// The contents of the files, with all errors in them.
#[derive(Debug, Default)]
pub struct Examined {
    /// The files that were read, in this order.
    pub files: Vec<PathBuf>,
    /// The sections for some nodes, in the order in which they are merged.
    pub sections: Vec<Section>,
    /// The errors: at most one of each table and resource, and at most [`PROBLEMS_MAX`].
    pub problems: Vec<ConfigError>,
    /// The number of further errors.
    pub more_problems: usize,
    /// The labels of the node that sections have compared.
    pub compared: ComparedLabels,
    pub(super) merged: Table,
    /// The sections of the files that were read, before their conditions are evaluated.
    unevaluated: Vec<Value>,
    /// CRC-32 of the texts of the files.
    hash: u32,
}

impl Examined {
    /// Reads the same files as [`load`] does.
    #[must_use]
    pub fn of(file: Option<&Path>, node: &Node) -> Self {
        Self::with_main(file, None, node)
    }

    /// The same, with `instead` in place of the main file.
    #[must_use]
    pub fn with_main(file: Option<&Path>, instead: Option<&Path>, node: &Node) -> Self {
        let main = file.unwrap_or(Path::new(DEFAULT_PATH));
        Self::read(instead.unwrap_or(main), main, file.or(instead).is_none(), node)
    }

    /// Reads `main` and the drop-ins in the folder of `place`.
    fn read(main: &Path, place: &Path, may_be_missing: bool, node: &Node) -> Self {
        let mut examined = Examined::default();
        let drop_ins = drop_ins(place).unwrap_or_else(|problem| {
            examined.problem(|| problem);
            Vec::new()
        });
        // Each drop-in existed when the folder was listed. If it is missing now, it was deleted
        // since.
        let drop_ins = drop_ins.into_iter().map(|path| (path, true));
        for (path, may_be_missing) in
            std::iter::once((main.to_owned(), may_be_missing)).chain(drop_ins)
        {
            // A file that a user names for a comparison may be a pipe of the shell.
            let read = if path == main && main != place {
                read_file(&path)
            } else {
                read_bounded(&path, FILE_BYTES_MAX)
            };
            match read {
                Ok(bytes) => examined.take(&bytes, &path),
                Err(error) if may_be_missing && is_absent(&path, &error) => {}
                Err(error) => {
                    examined
                        .problem(|| unreadable(&path, &error, "; set the file with `--config`"));
                }
            }
        }
        examined.merge(node)
    }

    /// A single file with this content.
    #[must_use]
    pub fn alone(bytes: &[u8], path: &Path, node: &Node) -> Self {
        let mut examined = Examined::default();
        examined.take(bytes, path);
        examined.merge(node)
    }

    /// The resulting configuration.
    ///
    /// # Errors
    /// The first error.
    pub fn config(&self) -> Result<Config, ConfigError> {
        if let Some(problem) = self.problems.first() {
            return Err(problem.clone());
        }
        validate::validate(&typed::read(&self.merged)?, self.files.clone())
    }

    fn take(&mut self, bytes: &[u8], path: &Path) {
        self.files.push(path.to_owned());
        let mut hash = crc32fast::Hasher::new_with_initial(self.hash);
        hash.update(bytes);
        self.hash = hash.finalize();
        let read =
            std::str::from_utf8(bytes).map_err(|error| not_utf8(bytes, error.valid_up_to(), path));
        let mut table = match read.and_then(|text| Table::parse(text, path)) {
            Ok(table) => table,
            Err(problem) => return self.problem(|| problem),
        };
        let sections = table.take("node");
        self.examine(&mut table);
        merge_table(&mut self.merged, table);
        let Some(Entry { value, place, .. }) = sections else { return };
        let Is::List(list) = value.is else {
            let problem =
                ConfigError::new("`node` must be a list of sections; begin each one with [[node]]");
            return self.problem(|| problem.at(place.as_ref()));
        };
        self.unevaluated.extend(list);
    }

    /// Evaluates the conditions of the sections. All files are read by then: any of them may name
    /// the source of the labels.
    fn evaluate(&mut self, node: &Node) {
        let facts = NodeFacts::of(node, &validate::label_source(&self.merged));
        for value in std::mem::take(&mut self.unevaluated) {
            match Section::read(&value, &facts) {
                Ok(mut section) => {
                    self.examine(&mut section.table);
                    self.check_unique_names(&section.table);
                    self.sections.push(section);
                }
                Err(problem) => self.problem(|| problem),
            }
        }
        self.compared = facts.compared();
    }

    /// Keeps an error, or counts it.
    fn problem(&mut self, problem: impl FnOnce() -> ConfigError) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem());
        } else {
            self.more_problems += 1;
        }
    }

    /// Expands presets, and checks each part of a file separately, so that one error hides no
    /// other.
    fn examine(&mut self, Table(entries): &mut Table) {
        for entry in entries {
            let whole = Value { place: entry.place.clone(), is: entry.value.is.clone() };
            match (&*entry.key, &mut entry.value.is) {
                ("resource", Is::List(list)) => {
                    for resource in list {
                        if let Err(problem) = preset::expand(resource) {
                            self.problem(|| problem);
                            continue;
                        }
                        self.examine_part(&entry.key, Is::List(vec![resource.clone()]), resource);
                    }
                }
                (key, _) if keys::TABLES.contains(&key) => {
                    self.examine_part(key, entry.value.is.clone(), &whole);
                }
                (key, _) => self.problem(|| {
                    let known: Vec<&str> = keys::TABLES.iter().copied().chain(["node"]).collect();
                    ConfigError::new(unknown("key", key, &known)).at(entry.place.as_ref())
                }),
            }
        }
    }

    fn examine_part(&mut self, key: &str, is: Is, part: &Value) {
        if let Some(problem) = problem_of(key, is, part) {
            self.problem(|| problem);
        }
    }

    /// Every resource needs a name of its own, except that a resource of a section replaces the one
    /// with its name. Several resources may have the same name for each node, because each has
    /// other nodes.
    fn check_unique_names(&mut self, table: &Table) {
        let mut names = BTreeSet::new();
        for name in resources(table).iter().filter_map(name_of) {
            let Some(text) =
                name.as_text().filter(|text| !text.contains(NODE) && !names.insert(*text))
            else {
                continue;
            };
            let problem = || {
                format!(
                    "two resources are named `{}`; give each resource its own name",
                    validate::name_of(text)
                )
            };
            self.problem(|| ConfigError::new(problem()).at(name.place.as_ref()));
        }
    }

    fn merge(mut self, node: &Node) -> Self {
        self.evaluate(node);
        let merged = std::mem::take(&mut self.merged);
        self.check_unique_names(&merged);
        self.merged = merged;
        for section in self.sections.iter().filter(|section| section.matches) {
            let mut table = section.table.clone();
            let resources = table.take("resource");
            merge_table(&mut self.merged, table);
            let Some(Is::List(resources)) = resources.map(|entry| entry.value.is) else { continue };
            if let Some(there) = self.merged.list_mut("resource") {
                merge_resources(there, resources);
            }
        }
        let whole = [api::claims_without_dra(&self.merged), telemetry::contradiction(&self.merged)];
        whole.into_iter().flatten().for_each(|problem| self.problem(|| problem));
        let place = |problem: &ConfigError| {
            let file = self.files.iter().position(|file| Some(file.as_path()) == problem.file());
            (file, problem.line(), problem.column())
        };
        self.problems.sort_by_key(place);
        self
    }
}

/// The error of one part of a file, checked separately: a table, or one resource.
pub(super) fn problem_of(key: &str, is: Is, part: &Value) -> Option<ConfigError> {
    let mut alone = Table::default();
    alone.set(key, is);
    let problem = match typed::read::<Fragment>(&alone) {
        Ok(fragment) => validate::validate(&fragment, Vec::new()).err().map(|problem| {
            let place = part.place_of(without_resource_name(problem.problem()));
            problem.at(place.as_ref())
        }),
        Err(problem) => Some(problem),
    };
    problem.map(
        |problem| if problem.line().is_some() { problem } else { problem.at(part.place.as_ref()) },
    )
}

/// Merges tables: later keys win, resources add up. Unknown keys are left out. They were reported
/// as errors, and there may be any number of them.
fn merge_table(merged: &mut Table, mut over: Table) {
    over.0.retain(|entry| keys::TABLES.contains(&&*entry.key));
    for mut entry in over.0 {
        if let Is::Table(table) = &mut entry.value.is {
            table.0.retain(|below| keys::of(&entry.key).any(|(_, key, _)| *key == below.key));
        }
        let there = merged.0.iter_mut().find(|there| there.key == entry.key);
        match (there.map(|there| &mut there.value.is), entry.value.is) {
            (Some(Is::Table(there)), Is::Table(over)) => {
                over.0.into_iter().for_each(|entry| there.put(entry));
            }
            (Some(Is::List(there)), Is::List(over)) => there.extend(over),
            (_, is) => merged.put(Entry { value: Value { is, ..entry.value }, ..entry }),
        }
    }
}

/// A resource of a section replaces the one with its name, else it is appended. A resource with a
/// name for each node is inserted before all others of this kind, because the first that matches a
/// node gets it.
fn merge_resources(there: &mut Vec<Value>, resources: Vec<Value>) {
    let name = |resource: &Value| name_of(resource).and_then(Value::as_text).map(str::to_owned);
    let is_for_each_node =
        |resource: &Value| name(resource).is_some_and(|name| name.contains(NODE));
    let at =
        there.iter().enumerate().rev().filter_map(|(at, resource)| Some((name(resource)?, at)));
    let mut at: BTreeMap<String, usize> = at.collect();
    let (patterns, others): (Vec<Value>, Vec<Value>) =
        resources.into_iter().partition(is_for_each_node);
    for resource in others {
        match name(&resource)
            .map(|name| *at.entry(name).or_insert(there.len()))
            .and_then(|at| there.get_mut(at))
        {
            Some(there) => *there = resource,
            None => there.push(resource),
        }
    }
    let first = there.iter().position(is_for_each_node).unwrap_or(there.len());
    there.splice(first..first, patterns);
}

fn resources(table: &Table) -> &[Value] {
    table.get("resource").and_then(Value::as_list).unwrap_or_default()
}

fn name_of(resource: &Value) -> Option<&Value> {
    resource.as_table()?.get("name")
}

/// The part of a message after the name of the resource.
fn without_resource_name(sentence: &str) -> &str {
    sentence
        .strip_prefix("resource `")
        .and_then(|rest| rest.split_once("`: "))
        .map_or(sentence, |(_, rest)| rest)
}

fn not_utf8(bytes: &[u8], valid: usize, path: &Path) -> ConfigError {
    let before = String::from_utf8_lossy(&bytes[..valid]);
    let (line, column) = (
        before.matches('\n').count() + 1,
        before.chars().rev().take_while(|c| *c != '\n').count() + 1,
    );
    let place = super::tree::Place { file: path.into(), line, column };
    ConfigError::new("the file is not UTF-8 at this byte; save it as UTF-8").at(Some(&place))
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
        let config = load(
            Some(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/config.toml"))),
            &Node::default(),
        )
        .unwrap();
        assert!(config.resources.is_empty(), "everything in the shipped file is a comment");
    }

    #[test]
    fn drop_ins_add_resources_and_later_keys_win() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "[telemetry]\nlisten = \"127.0.0.1:1\"\n[ledger]\nhistory_age = \"1d\"\nhistory_size = 5000\n[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n").unwrap();
        let drop_in = |name: &str, text: &str| {
            std::fs::write(dir.path().join("config.d").join(name), text).unwrap();
        };
        drop_in("20.toml", "[telemetry]\nlisten = \"off\"\n[ledger]\nhistory_age = \"365d\"");
        drop_in(
            "10.toml",
            "[telemetry]\nlisten = \"127.0.0.1:2\"\n[[resource]]\nname = \"a.b/d\"\nclass = \"nvme\"\n",
        );
        drop_in("30.toml.rpmsave", "nonsense");
        let config = load(Some(&file), &Node::default()).unwrap();
        assert_eq!(config.listen, None);
        assert_eq!(
            config.retention,
            Retention { age: Duration::from_secs(365 * 24 * 3600), ..Retention::of_grants(5000) }
        );
        assert_eq!(
            config.resources.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>(),
            ["a.b/c", "a.b/d"]
        );
        assert_eq!(config.files.len(), 3);
    }

    #[test]
    fn the_defaults_of_the_ledger_are_the_safe_ones() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "").unwrap();
        assert_eq!(
            load(Some(&file), &Node::default()).unwrap().policy,
            Policy { refuse: Refuse::Proven, when_not_durable: WhenNotDurable::Refuse }
        );
        std::fs::write(&file, "[ledger]\nrefuse = \"never\"\nwhen_not_durable = \"refuse\"\n")
            .unwrap();
        std::fs::write(
            dir.path().join("config.d/1.toml"),
            "[ledger]\nwhen_not_durable = \"serve\"\n",
        )
        .unwrap();
        assert_eq!(
            load(Some(&file), &Node::default()).unwrap().policy,
            Policy { refuse: Refuse::Never, when_not_durable: WhenNotDurable::Serve }
        );
    }

    fn names_its_place(text: &str, expected: &str) {
        let sentence = sentence(text);
        assert!(sentence.contains(expected), "{sentence}\nshould contain: {expected}");
        assert_eq!(sentence.lines().count(), 1, "{sentence}");
        assert!(sentence.contains("`, line ") && sentence.contains(", column "), "{sentence}");
    }

    #[test]
    fn a_mistake_of_the_ledger_is_one_sentence_with_its_place() {
        for (text, expected) in [
            (
                "[ledger]\ndurability = \"power-los\"",
                "unknown value `power-los`; did you mean `power-loss`?",
            ),
            (
                "[ledger]\nhistory_age = \"90\"",
                "`ledger.history_age` is `90`, but must be a time such as `90d`",
            ),
            (
                "[ledger]\nhistory_age = \"1h\"",
                "`ledger.history_age` is `1h`, but must be at least a day",
            ),
            (
                "[ledger]\nhistory_size = 10",
                "`ledger.history_size` is 10, but must be at least 1000",
            ),
            ("[ledger]\nhistory_size = -10", "a size such as \"256MiB\", or a number of grants"),
            (
                "[ledger]\nhistory_size = \"lots\"",
                "`ledger.history_size` is `lots`, but must be a size such as `256MiB`",
            ),
            (
                "[ledger]\nhistory_size = \"99999999999999999GiB\"",
                "must be a size such as `256MiB`",
            ),
            (
                "[ledger]\nhistory_size = \"100KiB\"",
                "`ledger.history_size` is `100KiB`, but must be at least `4MiB`",
            ),
            ("[ledger]\nrefuse = \"nevr\"", "unknown value `nevr`; did you mean `never`?"),
            (
                "[ledger]\nwhen_not_durabel = \"serve\"",
                "unknown key `when_not_durabel`; did you mean `when_not_durable`?",
            ),
            (
                "[ledger]\nwhen_not_durable = \"server\"",
                "unknown value `server`; did you mean `serve`?",
            ),
        ] {
            names_its_place(text, expected);
        }
    }

    #[test]
    fn every_mistake_is_one_sentence_with_its_place() {
        let resource =
            |rest: &str| format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\n{rest}");
        let select = |rest: &str| {
            format!("[[resource]]\nname = \"a.b/c\"\nclass = \"nic\"\nselect = {{ {rest} }}")
        };
        for (text, expected) in [
            ("[nvidia]\nnvml = \"on\"".to_owned(), "`nvidia.nvml` is `on`, but must be `auto`, `off`, or the absolute path"),
            ("[nvidia]\ndriver_root = \"run/nvidia\"".to_owned(), "`nvidia.driver_root` is `run/nvidia`, but must be `auto`, or an absolute path"),
            ("[ledgr]\n".to_owned(), "line 1, column 2: unknown key `ledgr`; did you mean `ledger`?"),
            (resource("replica = 3"), "line 4, column 1: unknown key `replica`; did you mean `replicas`?"),
            (resource("paths = [{ hots = \"/dev/fuse\" }]"), "unknown key `hots`; did you mean `host`?"),
            (resource("replicas = 0\npaths = [\"/dev/fuse\"]"), "resource `a.b/c`: `replicas` is 0"),
            (resource(""), "resource `a.b/c`: the class `char` needs `paths`"),
            (resource("paths = [\"fuse\"]"), "must begin with `/dev/`"),
            (resource("paths = [{ regex = \"^a(\" }]"), "`regex` is `^a(`, which is not a valid regular expression: "),
            (resource("paths = [{ regex = \"\" }]"), "`regex` is ``, but must be a regular expression"),
            (resource("paths = [{ regex = \"^/dev/video\" }]"), "is matched with paths below /dev"),
            (resource("paths = [{ regex = \"a{1000}{1000}\" }]"), "`regex` is `a{1000}{1000}`, which is not a valid regular expression: "),
            (resource("paths = [{ regex = \"a\", host = \"/dev/a\" }]"), "`host` and `regex` exclude each other"),
            (resource("paths = [{ permissions = \"r\" }]"), "the key `host` is missing"),
            (resource("paths = [{ regex = \"^a\", container = \"/dev/a\" }]"), "every match of `^a` would be `/dev/a` in the container"),
            (
                "[[resource]]\nname = \"a.b/{node}\"\nclass = \"gpu\"".to_owned(),
                "`{node}` in the name is for the class `char`, not for `gpu`",
            ),
            (
                "[[resource]]\nname = \"{node}/a\"\nclass = \"char\"\npaths = [\"/dev/a\"]".to_owned(),
                "`{node}` must be in the part after `/`",
            ),
            ("[[resource]]\nname = \"a.b/{nod}\"\nclass = \"char\"\npaths = [\"/dev/a\"]".to_owned(), "`a.b/{nod}` is not a resource name"),
            (resource("paths = [\"/dev/[\"]"), "not a valid glob"),
            (resource("paths = [{ host = \"/dev/fuse\", permissions = \"rx\" }]"), "permissions `rx`"),
            (
                resource("paths = [{ host = \"/dev/video*\", container = \"/dev/cam\" }]"),
                "every match of `/dev/video*` would be `/dev/cam` in the container; end a folder with `/`, as in `/dev/cam/`",
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
            ("[telemetry]\nlisten = \"9477\"".to_owned(), "`telemetry.listen` is `9477`"),
            ("[telemetry]\ntoken_file = \"token\"".to_owned(), "`telemetry.token_file` must be an absolute path"),
            (
                "[labels]\nfeatures_d = \"features.d\"".to_owned(),
                "`labels.features_d` must be an absolute path, such as /etc/kubernetes/node",
            ),
            ("[health]\npoll = \"0s\"".to_owned(), "`health.poll` is `0s`, but must be a time from `1s` to `60s`"),
            ("[health]\nignore = [\"no_carier\"]".to_owned(), "unknown value `no_carier`; did you mean `no_carrier`?"),
            ("[health]\nignore = [\"device_gone\"]".to_owned(), "`health.ignore` has `device_gone`, but no container can use"),
            ("[health]\nat_kubelet_start = \"withold\"".to_owned(), "unknown value `withold`; did you mean `withhold`?"),
            ("[[resource]]\nname = \"gpu\"\nclass = \"gpu\"".to_owned(), "`gpu` is not a resource name"),
            ("[[resource]]\nname = \"a.b/c\"\nclass = \"gppu\"".to_owned(), "did you mean `gpu`?"),
            ("[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\nselect = { vendor = [\"xyz\"] }".to_owned(), "`xyz`"),
            (select("pf = [\"ens1f0#3-1\"]"), "resource `a.b/c`: `ens1f0#3-1` must be the interface or the PCI address"),
            (select("link_type = [\"ethernet\"]"), "unknown value `ethernet`; did you mean `ether`?"),
            (select("model = [\"H100[\"]"), "the model `H100[` is not a valid glob"),
            (select("numa_nodes = [0]"), "unknown key `numa_nodes`; did you mean `numa_node`?"),
            (select("iommu_group = [-1]"), "line 4"),
            (select("attribute = { acpi_indexes = [\"1\"] }"), "unknown attribute `acpi_indexes`; did you mean `acpi_index`?"),
            (select("attribute = { serial = [\"a[\"] }"), "the serial `a[` is not a valid glob"),
            (select("vf = true }\nor = [{ vf = false }, {}] #"), "one of them is empty and selects every device"),
            (select("vf = true }\nor = [{ uniform = true }] #"), "`uniform` and `mig_profile` are for `select`"),
            ("[[resource]]\nname = \"a.b/c\"\nclass = \"pci\"\nselect = { driver = [\"vfio-pci\"] }".to_owned(), "the class `pci` has every PCI function"),
            (
                "[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"".to_owned(),
                "two resources are named `a.b/c`",
            ),
            ("a = ".to_owned(), "line 1"),
        ] {
            names_its_place(&text, expected);
        }
    }

    #[test]
    fn distinct_paths_in_the_container_are_valid() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        for paths in [
            "{ host = \"/dev/video*\", container = \"/dev/cam/\" }",
            "\"/dev/video*\", \"/dev/video*\"",
            "{ host = \"/dev/a\", container = \"/dev/x\" }, { host = \"/dev/b\", container = \"/dev/y\" }",
            "{ host = \"/dev/a\", container = \"/dev/x\" }, { host = \"/dev/a\", container = \"/dev/x\" }",
            "{ host = \"/dev/a\", container = \"/dev/b\" }, { host = \"/dev/b\", container = \"/dev/a\" }",
        ] {
            std::fs::write(
                &file,
                format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\npaths = [{paths}]"),
            )
            .unwrap();
            load(Some(&file), &Node::default()).unwrap();
        }
        for paths in [
            "{ host = \"/dev/video*\", container = \"/dev/cam\" }",
            "{ host = \"/dev/a\", container = \"/dev/x\" }, { host = \"/dev/b\", container = \"/dev/x\" }",
        ] {
            let text =
                format!("[[resource]]\nname = \"a.b/c\"\nclass = \"char\"\npaths = [{paths}]");
            std::fs::write(&file, format!("{text}\nper_container = \"one\"\n")).unwrap();
            load(Some(&file), &Node::default()).unwrap();
            std::fs::write(&file, format!("{text}\nreplicas = 2\nper_container = \"distinct\"\n"))
                .unwrap();
            load(Some(&file), &Node::default()).unwrap_err();
        }
    }

    #[test]
    fn several_resources_may_have_the_same_name_for_each_node() {
        let pattern = |header: &str, regex: &str, replicas: u32| {
            format!(
                "[[{header}]]\nname = \"d/{{node}}\"\nclass = \"char\"\npaths = [{{ regex = \"{regex}\" }}]\nreplicas = {replicas}\n"
            )
        };
        let plain = "[[resource]]\nname = \"a.b/c\"\nclass = \"gpu\"\n";
        let section = format!(
            "[[node]]\nmatch = {{ name = \"x\" }}\n{}{}",
            pattern("node.resource", "^i2c-9$", 7),
            pattern("node.resource", "^i2c-8$", 8)
        );
        let text = [
            plain,
            &pattern("resource", "^i2c-[0-9]*$", 1),
            &pattern("resource", "^video", 20),
            &section,
        ]
        .concat();
        let of = |node: &str| {
            let examined = Examined::alone(
                text.as_bytes(),
                Path::new("f"),
                &Node::named(node, Path::new("/")),
            );
            assert_eq!(examined.problems, []);
            let config = examined.config().unwrap();
            let paths = |spec: &crate::domain::ResourceSpec| {
                spec.paths.iter().map(|path| path.host.to_string()).collect::<String>()
            };
            config
                .resources
                .iter()
                .map(|spec| (spec.name.to_string(), paths(spec)))
                .collect::<Vec<_>>()
        };
        let of_node = |regex: &str| ("d/{node}".to_owned(), regex.to_owned());
        let plain = ("a.b/c".to_owned(), String::new());
        assert_eq!(of("y"), [plain.clone(), of_node("^i2c-[0-9]*$"), of_node("^video")]);
        // A section for one node comes before one for all nodes.
        assert_eq!(
            of("x"),
            [
                plain,
                of_node("^i2c-9$"),
                of_node("^i2c-8$"),
                of_node("^i2c-[0-9]*$"),
                of_node("^video")
            ]
        );
    }

    #[test]
    fn a_file_that_was_requested_must_exist() {
        assert!(
            load(Some(Path::new("/nonexistent/config.toml")), &Node::default())
                .unwrap_err()
                .to_string()
                .contains("/nonexistent/config.toml")
        );
    }

    #[test]
    fn a_dangling_link_is_not_a_missing_file() {
        let dir = tempfile::tempdir().unwrap();
        let (main, drop_ins) = (dir.path().join("config.toml"), dir.path().join("config.d"));
        let read = || {
            let examined = Examined::read(&main, &main, true, &Node::default());
            examined.problems.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let link =
            |link: &Path| std::os::unix::fs::symlink("/nonexistent/site.toml", link).unwrap();
        assert_eq!(read(), Vec::<String>::new(), "neither is there");
        std::fs::create_dir(&drop_ins).unwrap();
        link(&drop_ins.join(".#10-site.toml"));
        assert_eq!(read(), Vec::<String>::new(), "an editor's lock");
        link(&main);
        link(&drop_ins.join("50-site.toml"));
        let sentence = |link: &Path| {
            let problem = "is a dangling link to `/nonexistent/site.toml`; create or mount its target, or remove the link";
            format!("configuration `{}`: {problem}", link.display())
        };
        assert_eq!(read(), [sentence(&main), sentence(&drop_ins.join("50-site.toml"))]);
        std::fs::remove_file(&main).unwrap();
        std::fs::remove_dir_all(&drop_ins).unwrap();
        link(&drop_ins);
        assert_eq!(read(), [sentence(&drop_ins)]);
    }
}
