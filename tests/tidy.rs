//! The shape of the source, held by a test: layers, sideways imports, pure cores, one place for each outside thing.
//!
//! It reads the text of `src/`, so it needs no build of it. A rule that fails names the file, the line and what to do.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test would")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The layers from the bottom up. A module imports from its own layer and from those before it; actors are the one
/// layer whose modules do not know each other.
const LAYERS: &[&[&str]] = &[
    &["domain"],
    &["host"],
    &["config", "contract", "hardware", "hook", "kubelet", "picture", "store", "telemetry"],
    &["handover"],
    &["messages"],
    &["discovery", "health", "ledger", "registration", "serving"],
    &["app"],
    &["daemon", "doctor"],
    &["sim"],
    &["cli"],
];

const ACTORS: &[&str] = LAYERS[5];

/// What only these files may name: word, where, and what the others use.
const ONE_PLACE: &[(&str, &[&str], &str)] = &[
    ("sled::", &["store/database"], "the `Store`"),
    ("nix::", &["host/", "sim/hardware.rs"], "a function of `host`"),
    ("nvml_wrapper::", &["host/nvml.rs"], "`host::ask_nvml`"),
    ("inotify::", &["host/"], "`host::DirWatch`"),
    ("kubelet::proto", &["kubelet/", "sim/", "cli/bench"], "the domain's types"),
    ("std::process::exit", &[], "an exit code that `main` returns"),
];

/// Longer files cannot be read in one sitting. Tests do not count.
const LINES_MAX: usize = 400;

struct Source {
    /// Below `src/`, with `/`.
    name: String,
    text: String,
}

impl Source {
    fn module(&self) -> &str {
        self.name.split(['/', '.']).next().unwrap_or_default()
    }

    fn is_test(&self) -> bool {
        self.name.ends_with("tests.rs") || self.name.contains("/tests/") || self.name.contains("testing") || self.name.contains("samples")
    }

    /// The lines that ship: without comments, and without the tests at the end.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let shipped = self.text.find("#[cfg(test)]\nmod tests {").map_or(self.text.as_str(), |end| &self.text[..end]);
        let numbered = shipped.lines().enumerate().map(|(index, line)| (index + 1, line));
        numbered.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// The crate's own modules that the shipped code names, with the line.
    fn imports(&self) -> Vec<(usize, String)> {
        let mut imports = Vec::new();
        for (number, line) in self.code() {
            for rest in line.split("crate::").skip(1) {
                let words = rest.strip_prefix('{').map_or(rest, |group| group.split('}').next().unwrap_or_default());
                let grouped = rest.starts_with('{');
                for word in words.split(',').take(if grouped { usize::MAX } else { 1 }) {
                    let name: String = word.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                    imports.push((number, name));
                }
            }
        }
        imports
    }
}

fn sources() -> Vec<Source> {
    fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    files.sort();
    let source = |path: PathBuf| Source {
        name: path.strip_prefix(&root).unwrap().to_string_lossy().into_owned(),
        text: fs::read_to_string(&path).unwrap(),
    };
    files.into_iter().map(source).collect()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// Fails with every problem at once.
fn report(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn lower_layers_never_import_higher_ones_and_actors_never_each_other() {
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| !source.is_test() && !["lib.rs", "main.rs"].contains(&source.name.as_str())) {
        let Some(own) = layer(source.module()) else {
            problems.push(format!(
                "src/{}: belongs to no layer; put its module into LAYERS of tests/tidy.rs and into ARCHITECTURE.md",
                source.name
            ));
            continue;
        };
        for (line, import) in source.imports() {
            let Some(theirs) = layer(&import) else { continue };
            if theirs > own {
                problems.push(format!("src/{}:{line}: `{}` imports `{import}`, a higher layer", source.name, source.module()));
            }
            if import != source.module() && ACTORS.contains(&import.as_str()) && ACTORS.contains(&source.module()) {
                problems.push(format!("src/{}:{line}: actors talk through `messages`, never to `{import}` itself", source.name));
            }
        }
    }
    report(&problems);
}

#[test]
fn cores_are_pure() {
    let mut problems = Vec::new();
    let is_core = |name: &str| ACTORS.iter().any(|actor| name == format!("{actor}/core.rs") || name.starts_with(&format!("{actor}/core/")));
    for source in sources().iter().filter(|source| is_core(&source.name) && !source.is_test()) {
        for (number, line) in source.code() {
            let used = line.trim_start().strip_prefix("use ").or(line.trim_start().strip_prefix("pub use "));
            let allowed = ["std::", "core::", "serde", "thiserror", "crate::domain", "super::", "self::"];
            if let Some(used) = used
                && !allowed.iter().any(|prefix| used.starts_with(prefix))
                // A core's own sub-modules.
                && used.contains("::{") | used.contains("crate::")
            {
                problems.push(format!("src/{}:{number}: a core uses only std, serde, thiserror and the domain: `{used}`", source.name));
            }
            for impure in ["std::fs", "std::net", "SystemTime::now", "Instant::now", "tokio", "actix", "tracing", "println!"] {
                if line.contains(impure) {
                    problems.push(format!("src/{}:{number}: `{impure}` in a core; time and effects are the shell's", source.name));
                }
            }
        }
    }
    report(&problems);
}

#[test]
fn every_outside_thing_has_one_place() {
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| !source.is_test()) {
        for (word, places, instead) in ONE_PLACE {
            if places.iter().any(|place| source.name.starts_with(place)) {
                continue;
            }
            for (number, line) in source.code().filter(|(_, line)| names(line, word)) {
                problems.push(format!("src/{}:{number}: `{word}` belongs to {places:?}; use {instead}: {}", source.name, line.trim()));
            }
        }
    }
    report(&problems);
}

/// Whether `line` names `word` as a path of its own, not as the end of another (`super::sled::` is our file).
fn names(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':')
    })
}

#[test]
fn every_file_says_what_it_is_and_can_be_read_in_one_sitting() {
    let mut problems = Vec::new();
    for source in sources() {
        if !source.text.starts_with("//! ") {
            problems.push(format!("src/{}: begins without `//!`: what is it for?", source.name));
        }
        let lines = source.code().last().map_or(0, |(number, _)| number);
        if !source.is_test() && lines > LINES_MAX {
            problems.push(format!("src/{}: {lines} lines before its tests, more than {LINES_MAX}; split it by subject", source.name));
        }
        for (number, line) in source.text.lines().enumerate() {
            for word in ["FIXME", "TODO", "XXX", "HACK"] {
                if line.split(|c: char| !c.is_alphanumeric()).any(|found| found == word) {
                    problems.push(format!("src/{}:{}: `{word}`: do it, or file it", source.name, number + 1));
                }
            }
        }
    }
    report(&problems);
}

#[test]
fn the_architecture_document_names_every_module_and_every_invariant() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md")).unwrap();
    let mut problems = Vec::new();
    for module in LAYERS.iter().flat_map(|layer| layer.iter()) {
        if !text.contains(&format!("`{module}")) {
            problems.push(format!("ARCHITECTURE.md: says nothing of the module `{module}`"));
        }
    }
    let invariants: BTreeMap<usize, bool> = (1..=14).map(|n| (n, text.contains(&format!("**I{n}")))).collect();
    problems.extend(invariants.iter().filter(|(_, named)| !**named).map(|(n, _)| format!("ARCHITECTURE.md: I{n} is missing")));
    report(&problems);
}
