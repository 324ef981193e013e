//! Rules for the source: layers, imports between actors, pure cores, one place for each external
//! crate, the length of files, the prose, and the pages of the manual.
//!
//! The tests read the text of the files, so they need no build. A failure names the file, the line
//! and the remedy.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test would")]

#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/pages.rs"]
mod pages;

use imports::{Imports, is_below, module_of};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The layers from the bottom up. A module imports from its own layer and from those before it,
/// except in `SEPARATE`.
const LAYERS: &[&[&str]] = &[
    &["domain"],
    &["host"],
    &[
        "config",
        "contract",
        "hardware",
        "hook",
        "kubelet",
        "picture",
        "reporting",
        "slices",
        "store",
        "telemetry",
    ],
    &["cluster", "handover"],
    &["messages"],
    &["supervisor"],
    &["discovery", "health", "ledger", "registration", "serving"],
    &["admin", "tasks"],
    &["app"],
    &["daemon", "doctor"],
    &["console"],
    &["lab"],
    &["cli"],
    &["fuzz"],
];

const ACTORS: &[&str] = LAYERS[6];

/// Layers whose modules do not know each other: the actors; the background tasks and the admin
/// interface.
const SEPARATE: &[&[&str]] = &[ACTORS, LAYERS[7]];

/// What only these files may name: word, where, and what the others use.
const ONE_PLACE: &[(&str, &[&str], &str)] = &[
    ("sled::", &["store/index"], "the `Store`"),
    ("nix::", &["host/"], "a function of `host`"),
    ("nvml_wrapper::", &["host/nvml.rs", "host/nvml/"], "`host::query_nvml`"),
    (
        "rustls::",
        &["cluster/", "telemetry/tls.rs"],
        "the `Connection` of `cluster`, or telemetry's `Tls`",
    ),
    ("inotify::", &["host/"], "`host::DirWatch`"),
    ("kubelet::proto", &["kubelet/", "lab/", "fuzz/"], "the domain's types"),
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
        self.name.ends_with("tests.rs")
            || self.name.contains("/tests/")
            || self.name.contains("testing")
            || self.name.contains("samples")
    }

    /// The lines that ship: without comments, and without the tests at the end.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let shipped = self
            .text
            .find("#[cfg(test)]\nmod tests {")
            .map_or(self.text.as_str(), |end| &self.text[..end]);
        let numbered = shipped.lines().enumerate().map(|(index, line)| (index + 1, line));
        numbered.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// The crate's own modules that the shipped code names, with the line.
    fn imports(&self) -> Vec<(usize, String)> {
        let mut imports = Vec::new();
        for (number, line) in self.code() {
            for rest in line.split("crate::").skip(1) {
                let words = rest
                    .strip_prefix('{')
                    .map_or(rest, |group| group.split('}').next().unwrap_or_default());
                let grouped = rest.starts_with('{');
                for word in words.split(',').take(if grouped { usize::MAX } else { 1 }) {
                    let name: String = word
                        .trim()
                        .chars()
                        .take_while(|c| c.is_alphanumeric() || *c == '_')
                        .collect();
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
    for source in sources().iter().filter(|source| {
        !source.is_test() && !["lib.rs", "main.rs"].contains(&source.name.as_str())
    }) {
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
                problems.push(format!(
                    "src/{}:{line}: `{}` imports `{import}`, a higher layer",
                    source.name,
                    source.module()
                ));
            }
            let has_both = |layer: &&[&str]| {
                layer.contains(&import.as_str()) && layer.contains(&source.module())
            };
            if import != source.module() && SEPARATE.iter().any(has_both) {
                problems.push(format!(
                    "src/{}:{line}: modules of this layer talk through `messages`, never to `{import}` itself",
                    source.name
                ));
            }
        }
    }
    report(&problems);
}

/// Circles of imports between files that may stay: the beginnings of their names, and why.
///
/// A file and its own parts (`core.rs` and `core/…`) are no circle: the parts use its vocabulary,
/// and it puts them together.
const CIRCLES: &[(&[&str], &str)] = &[
    (
        &["store/error.rs", "store/journal/codec.rs"],
        "an error names the newest version of the format that the codec reads",
    ),
    (
        &["store/index/database.rs", "store/index/reader.rs", "store/index/work.rs"],
        "the writer and the reader of the same trees share their keys, and the messages of both",
    ),
    (
        &["lab/sim/kubelet/"],
        "the simulated kubelet is one machine of goroutines: its state holds the parts that change it",
    ),
    (&["lab/sim/memory/"], "a process of a simulated node and its node know each other"),
    (&["lab/sim/scenarios/"], "the simulated daemon holds the tasks that change it"),
];

#[test]
fn files_do_not_import_each_other_in_circles() {
    let imports = Imports::of(&sources());
    let mut problems = Vec::new();
    let mut met = vec![false; CIRCLES.len()];
    for circle in imports.circles() {
        let is_of = |(parts, _): &(&[&str], &str)| {
            let files = circle.iter().map(|module| &imports.files[module]);
            files.into_iter().all(|file| parts.iter().any(|part| file.starts_with(part)))
        };
        match CIRCLES.iter().position(is_of) {
            Some(known) => met[known] = true,
            None => problems.push(format!(
                "a circle of imports; move what both sides need into a file of its own:\n{}",
                imports.describe(&circle)
            )),
        }
    }
    for ((parts, _), _) in CIRCLES.iter().zip(met).filter(|(_, met)| !met) {
        problems.push(format!(
            "tests/tidy.rs: no circle in {parts:?} any longer; remove it from CIRCLES"
        ));
    }
    report(&problems);
}

/// The crates that a core may use, apart from std.
const CRATES_OF_CORES: &[&str] = &["serde", "thiserror"];

/// Modules that are cores as a whole.
const PURE: &[&str] = &["reporting", "slices"];

/// Parts of std that are effects, and macros that write.
const EFFECTS: &[&str] = &[
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::env",
    "SystemTime::now",
    "Instant::now",
    "println!",
];

/// The names of the crates that this one depends on, as paths write them.
fn dependencies() -> Vec<String> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let text = fs::read_to_string(manifest).unwrap();
    let (_, section) = text.split_once("\n[dependencies]\n").unwrap();
    let section = section.split("\n[").next().unwrap();
    let names = section.lines().filter_map(|line| line.split_once(" = "));
    names
        .map(|(name, _)| name.trim().replace('-', "_"))
        .filter(|name| !name.starts_with('#'))
        .collect()
}

#[test]
fn cores_are_pure() {
    let (mut problems, mut cores) = (Vec::new(), 0);
    let sources = sources();
    let imports = Imports::of(&sources);
    let foreign: Vec<String> = dependencies()
        .into_iter()
        .filter(|name| !CRATES_OF_CORES.contains(&name.as_str()))
        .map(|name| format!("{name}::"))
        .collect();
    assert!(foreign.iter().any(|name| name == "tokio::"), "{foreign:?}");
    for source in sources.iter().filter(|source| !source.is_test()) {
        let module = module_of(&source.name);
        let core = if PURE.contains(&source.module()) {
            source.module().to_owned()
        } else {
            format!("{}::core", source.module())
        };
        let has_core = PURE.contains(&source.module()) || ACTORS.contains(&source.module());
        if !has_core || !is_below(&module, &core) {
            continue;
        }
        cores += 1;
        for (other, path) in imports.edges.get(&module).into_iter().flatten() {
            if !is_below(other, &core) && !is_below(other, "domain") {
                problems.push(format!(
                    "src/{}: `{path}`: a core uses only std, serde, thiserror and the domain, not `{other}`",
                    source.name
                ));
            }
        }
        for (number, line) in source.code() {
            let effects = EFFECTS.iter().copied().filter(|effect| line.contains(effect));
            for used in
                foreign.iter().map(String::as_str).filter(|name| names(line, name)).chain(effects)
            {
                problems.push(format!(
                    "src/{}:{number}: `{used}` in a core; time and effects are the shell's",
                    source.name
                ));
            }
        }
    }
    assert!(cores > 15, "only {cores} files of cores were found");
    report(&problems);
}

#[test]
fn every_external_crate_and_call_has_one_place() {
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| !source.is_test()) {
        for (word, places, instead) in ONE_PLACE {
            if places.iter().any(|place| source.name.starts_with(place)) {
                continue;
            }
            for (number, line) in source.code().filter(|(_, line)| names(line, word)) {
                problems.push(format!(
                    "src/{}:{number}: `{word}` belongs to {places:?}; use {instead}: {}",
                    source.name,
                    line.trim()
                ));
            }
        }
    }
    report(&problems);
}

/// Whether `line` names `word` as a path of its own, not as the end of another (`super::sled::` is
/// our file).
fn names(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':')
    })
}

#[test]
fn every_file_has_a_description_and_a_bounded_length() {
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
                    problems.push(format!(
                        "src/{}:{}: `{word}`: do it, or file it",
                        source.name,
                        number + 1
                    ));
                }
            }
        }
    }
    report(&problems);
}

#[test]
fn the_architecture_document_names_every_module_and_every_invariant() {
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md")).unwrap();
    let mut problems = Vec::new();
    for module in LAYERS.iter().flat_map(|layer| layer.iter()) {
        if !text.contains(&format!("`{module}")) {
            problems.push(format!("ARCHITECTURE.md: does not mention the module `{module}`"));
        }
    }
    let invariants: BTreeMap<usize, bool> =
        (1..=14).map(|n| (n, text.contains(&format!("**I{n}")))).collect();
    problems.extend(
        invariants
            .iter()
            .filter(|(_, named)| !**named)
            .map(|(n, _)| format!("ARCHITECTURE.md: I{n} is missing")),
    );
    report(&problems);
}

/// Words and frames that make a sentence hard to read, each with better ones.
const WORDS: &[(&str, &str)] = &[
    ("anew", "again"),
    ("anybody", "any user, any process"),
    ("as ever", "as usual"),
    ("asleep", "idle, blocked"),
    ("awake", "running"),
    ("beside", "next to, in addition to"),
    ("by itself", "automatically, alone"),
    ("by themselves", "automatically, alone"),
    ("everybody", "all users, every thread"),
    ("for want of", "without"),
    ("goes on", "continues"),
    ("has gone", "was removed, has exited"),
    ("in peace", "idle"),
    ("is gone", "is absent, has exited"),
    ("looked at", "read, checked, probed"),
    ("mend", "fix"),
    ("no more", "no longer"),
    ("nobody", "no process, no client, no pod"),
    ("of which", "that; or two sentences"),
    ("said", "reported, logged"),
    ("say", "report, log, state"),
    ("says", "reports, logs, states"),
    ("so many", "the number, a bounded number of"),
    ("somebody", "a user, another process"),
    ("tell", "report, return, send, show"),
    ("tells", "reports, returns, sends, shows"),
    ("told", "reported, returned, sent, shown"),
    ("whatever", "every, any"),
    ("whoever", "the caller, the client, the process"),
];

/// Texts with such a word for a reason: values of the configuration, JSON keys, rows and texts that
/// programs read.
const EXCEPTIONS: &[&str] =
    &["\"tell\"", "\\\"tell\\\"", "\"said\"", "\"told\"", "file anew + fsync", ", and said last: "];

/// The widest line of prose.
const COMMENT_COLUMNS: usize = 100;
const DOCUMENT_COLUMNS: usize = 120;

/// Extensions of texts for people.
const TEXTS: &[&str] =
    &["rs", "md", "toml", "yaml", "yml", "json", "service", "conf", "proto", "tpl", "txt", "py"];

/// Every text of the repository for people, with its name. Scripts have no extension.
fn texts() -> Vec<Source> {
    fn walk(path: &Path, files: &mut Vec<PathBuf>) {
        if path.is_dir() {
            fs::read_dir(path).unwrap().for_each(|entry| walk(&entry.unwrap().path(), files));
        } else if path
            .extension()
            .is_none_or(|extension| TEXTS.iter().any(|text| extension == *text))
        {
            files.push(path.to_path_buf());
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for top in [
        "src",
        "docs",
        "packaging",
        "systemd",
        "proto",
        "examples",
        "benches",
        ".ci",
        ".github",
        "tests",
        "build.rs",
        "fuzz/README.md",
        "fuzz/run",
        "deny.toml",
        "README.md",
        "SECURITY.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ] {
        assert!(root.join(top).exists(), "{top} is missing");
        walk(&root.join(top), &mut files);
    }
    files.sort();
    let text = |path: PathBuf| {
        let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        fs::read_to_string(path).ok().map(|text| Source { name, text })
    };
    files.into_iter().filter_map(text).collect()
}

/// The words of a line in lower case. A name of code (`tell_all`) is one word, and no word of
/// prose.
fn words(line: &str) -> Vec<String> {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '\'');
    words.filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

#[test]
fn prose_has_no_banned_words_and_no_wide_lines() {
    let mut problems = Vec::new();
    for source in &texts() {
        let mut in_code = false;
        // Tests have names and texts of their own: only their comments are prose.
        let is_test = source.name.starts_with("tests/");
        for (number, line) in source.text.lines().enumerate() {
            if is_test && !line.trim_start().starts_with("//") {
                continue;
            }
            in_code ^= line.starts_with("```");
            let line = EXCEPTIONS
                .iter()
                .fold(line.to_owned(), |line, exception| line.replace(exception, ""));
            let words = words(&line);
            for (banned, better) in WORDS {
                let frame: Vec<&str> = banned.split(' ').collect();
                if words.windows(frame.len()).any(|window| window == frame) {
                    problems.push(format!(
                        "{}:{}: `{banned}`; better: {better}",
                        source.name,
                        number + 1
                    ));
                }
            }
            let columns = line.chars().count();
            let is_comment = source.name.ends_with(".rs") && line.trim_start().starts_with("//");
            let is_prose = source.name.ends_with(".md")
                && !in_code
                && !line.starts_with('|')
                && !line.contains("](");
            if is_comment && columns > COMMENT_COLUMNS || is_prose && columns > DOCUMENT_COLUMNS {
                problems.push(format!("{}:{}: {columns} columns", source.name, number + 1));
            }
        }
    }
    report(&problems);
}
