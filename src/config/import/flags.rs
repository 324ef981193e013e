//! The flags of a plugin's command line and the variables of its container's environment.

use super::doc::{Doc, Is, Lines, Scalar, State};
use super::draft::Draft;
use super::field::{Decoder, Field};

/// A flag or a variable.
#[derive(Debug)]
pub(super) struct Flag {
    /// Without the dashes.
    pub(super) name: String,
    pub(super) value: Doc,
    /// Its path in the manifest.
    pub(super) path: String,
}

/// The flags and variables of a container.
#[derive(Debug, Default)]
pub(super) struct Flags {
    pub(super) flags: Vec<Flag>,
    pub(super) variables: Vec<Flag>,
    /// Variables with a value from elsewhere, and flags that use such a variable.
    pub(super) elsewhere: Vec<Elsewhere>,
}

/// A value that the manifest does not contain.
#[derive(Debug)]
pub(super) struct Elsewhere {
    /// The name of the flag or variable.
    pub(super) name: String,
    pub(super) place: String,
}

impl Flags {
    /// Adds the flags and variables of a container. `booleans` are flags without a following value.
    pub(super) fn read(&mut self, container: &Field<'_>, booleans: &[&str]) {
        for (name, variable) in variables(container) {
            // In charts the value is directly below the name.
            let value = variable
                .get("value")
                .or_else(|| Some(variable.clone()).filter(|value| !value.is_map()));
            match value.and_then(|value| value.scalar_text().ok().map(|scalar| (value, scalar))) {
                Some((value, scalar)) => {
                    let value_of =
                        Doc::new(value.line(), Is::Scalar(unquoted(scalar, &scalar.text)));
                    self.variables.push(Flag { name, value: value_of, path: value.path });
                }
                None if variable.get("valueFrom").is_some() => {
                    self.elsewhere.push(Elsewhere { name, place: variable.place() });
                }
                None => {}
            }
            variable.read_all();
        }
        self.read_words(&words(container), booleans);
    }

    fn read_words(&mut self, words: &[(Field<'_>, Scalar)], booleans: &[&str]) {
        let mut rest = words.iter();
        while let Some((field, word)) = rest.next() {
            let Some(flag) =
                word.text.strip_prefix('-').map(|flag| flag.strip_prefix('-').unwrap_or(flag))
            else {
                continue;
            };
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, unquoted(word, value)),
                None if booleans.contains(&flag) => (flag, unquoted(word, "true")),
                None => match rest.as_slice().first() {
                    Some((_, next)) if !next.text.starts_with('-') => {
                        rest.next();
                        (flag, unquoted(next, &next.text))
                    }
                    _ => (flag, unquoted(word, "")),
                },
            };
            let line = match value.lines {
                Lines::From(line) | Lines::In(line) => line,
            };
            match self.expanded(&value.text) {
                Some(text) => {
                    let value = Doc::new(line, Is::Scalar(Scalar { text, ..value }));
                    self.flags.push(Flag {
                        name: name.to_owned(),
                        value,
                        path: format!("--{name}"),
                    });
                }
                None => {
                    self.elsewhere.push(Elsewhere { name: name.to_owned(), place: field.place() });
                }
            }
        }
    }

    /// The text with the variables that Kubernetes substitutes; `None` if the value of one is
    /// unknown.
    fn expanded(&self, text: &str) -> Option<String> {
        let mut expanded = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once("$(") {
            let Some((name, after)) = behind.split_once(')') else { break };
            expanded.push_str(before);
            let variable = self.variables.iter().rev().find(|variable| variable.name == name);
            match variable.map(|variable| &variable.value.is) {
                Some(Is::Scalar(value)) => expanded.push_str(&value.text),
                _ if self.elsewhere.iter().any(|elsewhere| elsewhere.name == name) => return None,
                _ => expanded.push_str(&format!("$({name})")),
            }
            rest = after;
        }
        expanded.push_str(rest);
        Some(expanded)
    }

    /// The last flag with one of these names, else the variable.
    pub(super) fn last(&self, names: &[&str], variable: &str) -> Option<&Flag> {
        let flag = self.flags.iter().rev().find(|flag| names.contains(&&*flag.name));
        flag.or_else(|| {
            self.variables.iter().rev().find(|known| !variable.is_empty() && known.name == variable)
        })
    }
}

/// Flags about logs, and those that print something and end. They have no meaning for an import.
const OF_LOGS: [&str; 12] = [
    "alsologtostderr",
    "help",
    "log-dir",
    "log-level",
    "log_dir",
    "log_file",
    "logtostderr",
    "stderrthreshold",
    "v",
    "version",
    "vmodule",
    "zap-log-level",
];

impl Flags {
    /// Warns of each flag that was not read. `file` are the flags that name the plugin's file.
    pub(super) fn warn_of_unread(&self, file: &[&str], draft: &mut Draft) {
        for (at, flag) in self.flags.iter().enumerate() {
            let name = flag.name.as_str();
            if flag.value.state.get() == State::Read
                || OF_LOGS.contains(&name)
                || file.contains(&name)
            {
                continue;
            }
            // A later one counts instead.
            if self.flags[at + 1..].iter().all(|later| later.name != name) {
                let (path, line) = (&flag.path, flag.value.line);
                draft.warn(format!(
                    "`{path}` (line {line}) is left out: the import does not read it"
                ));
            }
        }
    }
}

impl Flag {
    pub(super) fn field(&self, decoder: Decoder) -> Field<'_> {
        Field::at(&self.value, decoder, &self.path)
    }
}

/// The variables of a container: a list in Kubernetes, a map by name in charts.
fn variables<'a>(container: &Field<'a>) -> Vec<(String, Field<'a>)> {
    let Some(env) = container.get("env") else { return Vec::new() };
    if let Ok(entries) = env.entries() {
        return entries.into_iter().map(|(name, variable)| (name.to_owned(), variable)).collect();
    }
    let named =
        |variable: Field<'a>| Some((variable.get("name")?.text().ok()?.to_owned(), variable));
    env.items().unwrap_or_default().into_iter().filter_map(named).collect()
}

/// The words of the command line after the program, with their places.
fn words<'a>(container: &Field<'a>) -> Vec<(Field<'a>, Scalar)> {
    let list =
        |key: &str| container.get(key).and_then(|list| list.items().ok()).unwrap_or_default();
    let command = list("command").into_iter().skip(1);
    let word = |field: Field<'a>| field.scalar_text().ok().cloned().map(|word| (field, word));
    command.chain(list("args")).filter_map(word).collect()
}

/// A part of a word. It no longer shows whether it was in quotes.
fn unquoted(word: &Scalar, text: &str) -> Scalar {
    Scalar { text: text.to_owned(), is_plain: true, lines: word.lines }
}
