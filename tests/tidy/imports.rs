//! The imports between the files of `src/`.
//!
//! A path is followed to the file that defines the item, through every `pub use` on the way: a room
//! that uses `crate::domain::Grant` depends on `domain/grant.rs`.

use super::Source;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The imports between files, by module path (`health::core::case`).
pub(crate) struct Imports {
    /// The file of each module.
    pub files: BTreeMap<String, String>,
    /// For each module the modules that it names, with one of the paths that it writes.
    pub edges: BTreeMap<String, BTreeMap<String, String>>,
}

/// What a file writes: its paths, and the names that it takes from elsewhere.
#[derive(Default)]
struct Paths {
    all: Vec<String>,
    names: BTreeMap<String, String>,
}

impl Imports {
    pub(crate) fn of(sources: &[Source]) -> Self {
        let shipped = sources.iter().filter(|source| !source.is_test());
        let modules: BTreeMap<String, &Source> = shipped
            .filter(|source| source.name != "main.rs")
            .map(|source| (module_of(&source.name), source))
            .collect();
        let paths: BTreeMap<&String, Paths> = modules
            .iter()
            .map(|(module, source)| (module, paths_of(module, source, &modules)))
            .collect();
        let mut edges: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for (module, written) in &paths {
            for path in &written.all {
                let found = resolve(&modules, &paths, module, path, 0);
                if let Some(other) = found.filter(|other| other != *module) {
                    let named = edges.entry((*module).clone()).or_default();
                    named.entry(other).or_insert_with(|| path.clone());
                }
            }
        }
        let files = modules.into_iter().map(|(name, source)| (name, source.name.clone()));
        Imports { files: files.collect(), edges }
    }

    /// The modules that `module` names, without its own parts.
    fn outward<'a>(&'a self, module: &'a str) -> impl Iterator<Item = (&'a String, &'a String)> {
        let named = self.edges.get(module).into_iter().flatten();
        named.filter(move |(other, _)| !is_below(other, module))
    }

    /// All modules that `module` depends on, directly or not.
    fn reached(&self, module: &str) -> BTreeSet<String> {
        let mut reached = BTreeSet::new();
        let mut pending = VecDeque::from([module.to_owned()]);
        while let Some(next) = pending.pop_front() {
            for (other, _) in self.outward(&next) {
                if reached.insert(other.clone()) {
                    pending.push_back(other.clone());
                }
            }
        }
        reached
    }

    /// The circles: sets of modules that depend on each other.
    pub(crate) fn circles(&self) -> Vec<BTreeSet<String>> {
        let reached: BTreeMap<&String, BTreeSet<String>> =
            self.edges.keys().map(|module| (module, self.reached(module))).collect();
        let circle = |module: &&String| -> BTreeSet<String> {
            let leads_back = |other: &&String| {
                reached.get(other).is_some_and(|of_other| of_other.contains(*module))
            };
            reached[module].iter().filter(leads_back).cloned().collect()
        };
        let circles: BTreeSet<BTreeSet<String>> = reached.keys().map(circle).collect();
        circles.into_iter().filter(|circle| circle.len() > 1).collect()
    }

    /// The imports inside a circle, one line each.
    pub(crate) fn describe(&self, circle: &BTreeSet<String>) -> String {
        let mut lines = Vec::new();
        for module in circle {
            for (other, path) in self.outward(module).filter(|(other, _)| circle.contains(*other)) {
                let (from, to) = (&self.files[module], &self.files[other]);
                lines.push(format!("    src/{from} uses src/{to}: `{path}`"));
            }
        }
        lines.join("\n")
    }
}

/// Whether `module` is `of` itself or a part of it.
pub(crate) fn is_below(module: &str, of: &str) -> bool {
    of.is_empty()
        || module.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// `health/core/case.rs` is the module `health::core::case`, `health/mod.rs` is `health`.
pub(crate) fn module_of(file: &str) -> String {
    let path = file.trim_end_matches(".rs").replace('/', "::");
    let path = path.strip_suffix("::mod").unwrap_or(&path);
    if path == "lib" { String::new() } else { path.to_owned() }
}

fn join(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_owned() } else { format!("{module}::{name}") }
}

/// The shipped code of a file, without comments.
fn code_of(source: &Source) -> String {
    let mut code = String::new();
    let mut is_test = false;
    for (_, line) in source.code() {
        // The rest of a file after an inline module of tests is not shipped.
        if is_test && line.contains("mod ") && line.ends_with('{') {
            break;
        }
        is_test = line == "#[cfg(test)]";
        code.push_str(line.split(" // ").next().unwrap_or(line));
        code.push('\n');
    }
    code
}

fn paths_of(module: &str, source: &Source, modules: &BTreeMap<String, &Source>) -> Paths {
    let code = code_of(source);
    let mut paths = Paths::default();
    let mut rest = String::new();
    let mut statement: Option<String> = None;
    for line in code.lines() {
        let trimmed = line.trim();
        let visible = trimmed.strip_prefix("pub").map_or(trimmed, |behind| {
            behind
                .split_once(')')
                .filter(|_| behind.starts_with('('))
                .map_or(behind, |(_, end)| end)
        });
        if let Some(begun) = &mut statement {
            begun.push_str(trimmed);
        } else if let Some(tree) = visible.trim_start().strip_prefix("use ") {
            statement = Some(tree.to_owned());
        } else {
            rest.push_str(line);
            rest.push('\n');
        }
        if let Some(tree) = statement.take_if(|tree| tree.ends_with(';')) {
            for leaf in leaves(tree.trim_end_matches(';')) {
                let (path, name) = leaf.split_once(" as ").unwrap_or((&leaf, ""));
                let path = path.trim().trim_end_matches("::self");
                let last = path.rsplit("::").next().unwrap_or(path);
                let name = if name.is_empty() { last } else { name.trim() };
                paths.names.insert(name.to_owned(), path.to_owned());
                paths.all.push(path.to_owned());
            }
        }
    }
    for word in rest.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':') {
        let word = word.trim_end_matches(':');
        let first = word.split("::").next().unwrap_or(word);
        let is_own = word.contains("::") && modules.contains_key(&join(module, first));
        if is_own || word.contains("::") && ["crate", "self", "super"].contains(&first) {
            paths.all.push(word.to_owned());
        }
    }
    paths
}

/// The single paths of a `use` tree.
fn leaves(tree: &str) -> Vec<String> {
    let Some((prefix, body)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let body = &body[..body.rfind('}').unwrap_or(body.len())];
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in body.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            parts.push(String::new());
        } else {
            parts.last_mut().unwrap().push(c);
        }
    }
    let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
    parts.flat_map(|part| leaves(&format!("{}{part}", prefix.trim()))).collect()
}

/// The module that defines the item of a path; `None` for a path out of this crate.
fn resolve(
    modules: &BTreeMap<String, &Source>,
    paths: &BTreeMap<&String, Paths>,
    module: &str,
    path: &str,
    depth: usize,
) -> Option<String> {
    if depth > 8 {
        return None;
    }
    let mut words = path.split("::").peekable();
    let mut at = module.to_owned();
    match *words.peek()? {
        "crate" => {
            words.next();
            at = String::new();
        }
        "self" => drop(words.next()),
        "super" => {
            while words.next_if_eq(&"super").is_some() {
                at = at.rsplit_once("::").map_or_else(String::new, |(above, _)| above.to_owned());
            }
        }
        first if modules.contains_key(&join(module, first)) => {}
        _ => return None,
    }
    while let Some(word) = words.next() {
        let below = join(&at, word);
        if modules.contains_key(&below) {
            at = below;
            continue;
        }
        // A name that this module has from elsewhere.
        let Some(from) = paths.get(&at).and_then(|written| written.names.get(word)) else { break };
        let rest: String = words.map(|word| format!("::{word}")).collect();
        return resolve(modules, paths, &at, &format!("{from}{rest}"), depth + 1);
    }
    modules.contains_key(&at).then_some(at)
}
