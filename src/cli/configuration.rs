//! `holdfast config`: checks, shows and compares configurations, and imports those of other
//! plugins.

use crate::config::import::{self, Imported, Peer};
use crate::config::{self, Change, ConfigError, Examined, Node, ResourceChange, Section, Shown};
use crate::console::exit::{CONFIG, FAILURE, Failed, INCOMPLETE};
use crate::console::text::Text;
use crate::console::{Global, Output, print, show};
use clap::Subcommand;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Verbs on the configuration. None of them needs a daemon.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Report every error with file, line and column; exit code 3 if there is one
    Check {
        /// A single file, or `-` for standard input; by default the files that the daemon reads,
        /// drop-ins included
        file: Option<PathBuf>,
        /// Check as the node of this name; sections for other nodes are still checked
        #[arg(long, value_name = "NAME")]
        node: Option<String>,
    },
    /// Print the effective configuration: defaults, files, drop-ins and sections merged, with the
    /// origin of each value
    Show {
        /// Show the configuration of the node of this name
        #[arg(long, value_name = "NAME")]
        node: Option<String>,
    },
    /// Print what would change if FILE replaced the main file; drop-ins stay
    Diff {
        /// The new main file
        file: PathBuf,
        /// Compare as the node of this name
        #[arg(long, value_name = "NAME")]
        node: Option<String>,
    },
    /// Convert the configuration of another plugin, and print it
    ///
    /// Settings without an equivalent cause a warning. A wrong value drops the part that contains
    /// it; the exit code is then 9.
    Import {
        /// The other plugin
        #[arg(value_name = "PLUGIN")]
        peer: Peer,
        /// Its file in YAML or JSON: a manifest, the output of `kubectl get -o yaml`, or chart
        /// values; `-` is standard input
        file: PathBuf,
        /// The key of the ConfigMap, or the object's name, if several have a file of the plugin
        #[arg(long)]
        key: Option<String>,
        /// The domain of its resources; overrides a flag in the manifest: `-resource-prefix`,
        /// `--domain`
        #[arg(long, value_name = "DOMAIN")]
        prefix: Option<String>,
    },
}

/// Runs one verb.
///
/// # Errors
/// When the configuration is invalid, or the other plugin's configuration cannot be converted.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Check { file, node } => check(global, file.as_deref(), node.as_deref()),
        Verb::Show { node } => {
            let node = global.node(node.as_deref());
            let examined = Examined::of(global.config.as_deref(), &node);
            let shown = examined.show(&node)?;
            show(global.output, &ShowDocument::of(&node, &examined, &shown), |_| {
                Text::document(&shown.text)
            })
        }
        Verb::Diff { file, node } => diff(global, file, node.as_deref()),
        Verb::Import { peer, file, key, prefix } => {
            let text = String::from_utf8(read(file)?).map_err(|_| {
                Failed::new(FAILURE, format_args!("`{}` is not UTF-8 text", file.display()))
            })?;
            let imported = import::import(*peer, &text, key.as_deref(), prefix.as_deref())
                .map_err(|error| {
                    error.warnings.iter().for_each(|warning| {
                        crate::console::eprintln(format_args!("warning: {warning}"));
                    });
                    Failed::new(
                        FAILURE,
                        format_args!("cannot import `{}`: {error}", file.display()),
                    )
                })?;
            let Imported { toml, warnings, wrong } = &imported;
            if global.output != Output::Json {
                warnings.iter().for_each(|warning| {
                    crate::console::eprintln(format_args!("warning: {warning}"));
                });
            }
            show(
                global.output,
                &ImportDocument { schema: 1, toml, warnings, wrong: *wrong },
                |document| Text::document(document.toml),
            )?;
            if *wrong == 0 {
                return Ok(());
            }
            let file = file.display();
            Err(Failed::new(
                INCOMPLETE,
                match wrong {
                    1 => format!("a part of `{file}` has a wrong value and was left out"),
                    parts => {
                        format!("{parts} parts of `{file}` have wrong values and were left out")
                    }
                },
            ))
        }
    }
}

fn check(global: &Global, file: Option<&Path>, node: Option<&str>) -> Result<(), Failed> {
    let node = global.node(node);
    let examined = match file {
        Some(file) => Examined::alone(&read(file)?, file, &node),
        None => Examined::of(global.config.as_deref(), &node),
    };
    let (resources, failed) = match examined.config() {
        Ok(config) => (config.resources.iter().map(|spec| spec.name.to_string()).collect(), None),
        Err(error) => (Vec::new(), Some(error)),
    };
    // Some errors appear only in the merged configuration; report them too.
    let problems =
        if examined.problems.is_empty() { failed.as_slice() } else { &examined.problems };
    let document = CheckDocument::of(&node, &examined, resources, problems);
    match global.output {
        Output::Json => show(global.output, &document, |_| Text::default())?,
        Output::Table | Output::Ascii | Output::Svg => print(&document.table())?,
    }
    if document.valid { Ok(()) } else { Err(Failed::reported(CONFIG)) }
}

fn diff(global: &Global, file: &Path, node: Option<&str>) -> Result<(), Failed> {
    let node = global.node(node);
    let current = Examined::of(global.config.as_deref(), &node).config()?;
    let new = Examined::with_main(global.config.as_deref(), Some(file), &node).config()?;
    let change = Change::between(&current, &new);
    show(
        global.output,
        &ChangeDocument::of(&change),
        // A change prints one line for each resource and key; their names contain no unprintable
        // characters.
        |_| {
            if change.is_empty() {
                Text::of_line(format_args!("no change"))
            } else {
                Text::document(&format!("{change}\n"))
            }
        },
    )
}

fn read(file: &Path) -> Result<Vec<u8>, Failed> {
    config::read_file(file).map_err(|error| {
        Failed::new(CONFIG, format_args!("cannot read `{}`: {error}", file.display()))
    })
}

#[derive(Debug, Serialize)]
struct CheckDocument<'a> {
    schema: u32,
    valid: bool,
    node: Option<&'a str>,
    files: &'a [PathBuf],
    resources: Vec<String>,
    sections: Vec<SectionEntry<'a>>,
    problems: Vec<Problem<'a>>,
    /// Number of further problems that are not in `problems`.
    more_problems: usize,
}

#[derive(Debug, Serialize)]
struct SectionEntry<'a> {
    file: Option<&'a Path>,
    line: Option<usize>,
    matches: bool,
    why: &'a str,
}

#[derive(Debug, Serialize)]
struct Problem<'a> {
    file: Option<&'a Path>,
    line: Option<usize>,
    column: Option<usize>,
    problem: &'a str,
}

#[derive(Debug, Serialize)]
struct ShowDocument<'a> {
    schema: u32,
    node: Option<&'a str>,
    files: &'a [PathBuf],
    sections: Vec<SectionEntry<'a>>,
    values: Vec<ValueEntry<'a>>,
}

/// `file` and `line` are null for a default.
#[derive(Debug, Serialize)]
struct ValueEntry<'a> {
    key: &'a str,
    value: &'a serde_json::Value,
    file: Option<&'a Path>,
    line: Option<usize>,
}

#[derive(Debug, Serialize)]
struct ChangeDocument<'a> {
    schema: u32,
    resources: Vec<ResourceEntry<'a>>,
    /// Whether the resources that remain have a new order.
    reordered: bool,
    live: &'a [&'static str],
    needs_restart: &'a [&'static str],
}

#[derive(Debug, Serialize)]
struct ResourceEntry<'a> {
    name: &'a str,
    change: &'static str,
    keys: &'a [&'static str],
}

#[derive(Debug, Serialize)]
struct ImportDocument<'a> {
    schema: u32,
    toml: &'a str,
    warnings: &'a [String],
    /// Number of parts that were left out because of a wrong value.
    wrong: usize,
}

fn sections(sections: &[Section]) -> Vec<SectionEntry<'_>> {
    fn entry(section: &Section) -> SectionEntry<'_> {
        let (file, line) = section.place().unzip();
        SectionEntry { file, line, matches: section.matches(), why: section.why() }
    }
    sections.iter().map(entry).collect()
}

impl<'a> CheckDocument<'a> {
    fn of(
        node: &'a Node,
        examined: &'a Examined,
        resources: Vec<String>,
        problems: &'a [ConfigError],
    ) -> Self {
        let problem = |error: &'a ConfigError| Problem {
            file: error.file(),
            line: error.line(),
            column: error.column(),
            problem: error.problem(),
        };
        CheckDocument {
            schema: 1,
            valid: problems.is_empty(),
            node: node.name(),
            files: &examined.files,
            resources,
            sections: sections(&examined.sections),
            problems: problems.iter().map(problem).collect(),
            more_problems: examined.more_problems,
        }
    }

    /// One line for each error in the format of compilers, so that editors can jump to it. For a
    /// valid configuration: its files, resources and sections.
    fn table(&self) -> Text {
        if self.valid {
            return self.valid_summary();
        }
        let mut text = Text::default();
        for problem in &self.problems {
            let place = [problem.line, problem.column]
                .into_iter()
                .flatten()
                .map(|number| format!(":{number}"))
                .collect::<String>();
            let file =
                problem.file.map(|file| format!("{}{place}: ", file.display())).unwrap_or_default();
            text.line(format_args!("{file}{}", problem.problem));
        }
        if self.more_problems > 0 {
            text.line(format_args!("and {} more errors", self.more_problems));
        }
        text
    }

    fn valid_summary(&self) -> Text {
        let files: Vec<String> = self.files.iter().map(|file| file.display().to_string()).collect();
        let files = if files.is_empty() {
            "no file; the defaults apply".to_owned()
        } else {
            files.join(", ")
        };
        let resources = match self.resources.as_slice() {
            [] => "known hardware under its default names".to_owned(),
            names => names.join(", "),
        };
        let mut text = Text::of_line(format_args!("valid: {files}"));
        text.line(format_args!("offers: {resources}"));
        for section in &self.sections {
            let verb = if section.matches { "matches" } else { "does not match" };
            let place = section
                .file
                .zip(section.line)
                .map(|(file, line)| format!("{}:{line} ", file.display()))
                .unwrap_or_default();
            text.line(format_args!(
                "section: {place}{verb} {}: {}",
                self.node.unwrap_or("this node"),
                section.why
            ));
        }
        text
    }
}

impl<'a> ChangeDocument<'a> {
    fn of(change: &'a Change) -> Self {
        let entry = |(name, change): (&'a crate::domain::ResourceName, &'a ResourceChange)| {
            let (change, keys) = match change {
                ResourceChange::Added => ("added", [].as_slice()),
                ResourceChange::Removed => ("removed", [].as_slice()),
                ResourceChange::Changed(keys) => ("changed", keys.as_slice()),
            };
            ResourceEntry { name: name.as_str(), change, keys }
        };
        ChangeDocument {
            schema: 1,
            resources: change.resources.iter().map(entry).collect(),
            reordered: change.reordered,
            live: &change.live,
            needs_restart: &change.needs_restart,
        }
    }
}

impl<'a> ShowDocument<'a> {
    fn of(node: &'a Node, examined: &'a Examined, shown: &'a Shown) -> Self {
        let value =
            |(key, value, origin): &'a (String, serde_json::Value, Option<config::Origin>)| {
                ValueEntry {
                    key,
                    value,
                    file: origin.as_ref().map(|origin| origin.file.as_path()),
                    line: origin.as_ref().map(|origin| origin.line),
                }
            };
        ShowDocument {
            schema: 1,
            node: node.name(),
            files: &examined.files,
            sections: sections(&examined.sections),
            values: shown.values.iter().map(value).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = concat!(
        "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\n",
        "[[node]]\nmatch = { name = \"gpu-*\" }\n[node.telemetry]\nlisten = \"off\"\n",
    );

    fn examined(text: &str, node: &Node) -> Examined {
        Examined::alone(text.as_bytes(), Path::new("/etc/holdfast/config.toml"), node)
    }

    fn json(document: &impl Serialize) -> String {
        serde_json::to_string(document).unwrap()
    }

    #[test]
    fn a_valid_configuration_is_printed_with_its_sections() {
        let node = Node::named("cpu-1", Path::new("/"));
        let examined = examined(TEXT, &node);
        let document = CheckDocument::of(&node, &examined, vec!["nvidia.com/gpu".into()], &[]);
        let expected = concat!(
            "valid: /etc/holdfast/config.toml\n",
            "offers: nvidia.com/gpu\n",
            "section: /etc/holdfast/config.toml:4 does not match cpu-1: the name matches none of its patterns\n",
        );
        assert_eq!(document.table(), expected);
        let expected = concat!(
            r#"{"schema":1,"valid":true,"node":"cpu-1","files":["/etc/holdfast/config.toml"],"resources":["nvidia.com/gpu"],"#,
            r#""sections":[{"file":"/etc/holdfast/config.toml","line":4,"matches":false,"why":"the name matches none of its patterns"}],"#,
            r#""problems":[],"more_problems":0}"#,
        );
        assert_eq!(json(&document), expected);
    }

    #[test]
    fn every_error_is_a_line_that_editors_parse() {
        let node = Node::default();
        let examined = examined("[ledgr]\n\n[telemetry]\nlisten = 3\n", &node);
        let document = CheckDocument::of(&node, &examined, Vec::new(), &examined.problems);
        let expected = concat!(
            "/etc/holdfast/config.toml:1:2: unknown key `ledgr`; did you mean `ledger`?\n",
            "/etc/holdfast/config.toml:4:10: found integer `3`, where a text in quotes is expected\n",
        );
        assert_eq!(document.table(), expected);
        let expected = concat!(
            r#"{"schema":1,"valid":false,"node":null,"files":["/etc/holdfast/config.toml"],"resources":[],"sections":[],"problems":["#,
            r#"{"file":"/etc/holdfast/config.toml","line":1,"column":2,"problem":"unknown key `ledgr`; did you mean `ledger`?"},"#,
            r#"{"file":"/etc/holdfast/config.toml","line":4,"column":10,"problem":"found integer `3`, where a text in quotes is expected"}],"more_problems":0}"#,
        );
        assert_eq!(json(&document), expected);
    }

    #[test]
    fn the_shown_configuration_has_a_line_for_each_value() {
        let node = Node::named("gpu-1", Path::new("/"));
        let examined = examined(
            "[[node]]\nmatch = { name = \"gpu-*\" }\n[node.telemetry]\nlisten = \"off\"\n",
            &node,
        );
        let shown = examined.show(&node).unwrap();
        let golden = include_str!("configuration/golden/show.toml");
        assert_eq!(shown.text, golden);
        let document = serde_json::to_value(ShowDocument::of(&node, &examined, &shown)).unwrap();
        assert_eq!(
            document["values"][0],
            serde_json::json!({"key": "ledger.durability", "value": "power-loss", "file": null, "line": null})
        );
        let listen = serde_json::json!({"key": "telemetry.listen", "value": "off", "file": "/etc/holdfast/config.toml", "line": 4});
        assert_eq!(document["values"][5], listen);
        assert_eq!(document["sections"][0]["matches"], true);
    }

    #[test]
    fn a_change_names_resources_and_keys() {
        let node = Node::default();
        let config = |text: &str| examined(text, &node).config().unwrap();
        let resource = |name: &str, rest: &str| {
            format!("[[resource]]\nname = \"a.b/{name}\"\nclass = \"gpu\"\n{rest}\n")
        };
        let before = [resource("x", ""), resource("y", "")].concat();
        let after = [
            "[telemetry]\nlisten = \"off\"\n[health]\npoll = \"2s\"\n",
            &resource("x", "replicas = 2"),
            &resource("z", ""),
        ]
        .concat();
        let change = Change::between(&config(&before), &config(&after));
        let expected = concat!(
            r#"{"schema":1,"resources":[{"name":"a.b/x","change":"changed","keys":["sharing"]},{"name":"a.b/y","change":"removed","keys":[]},"#,
            r#"{"name":"a.b/z","change":"added","keys":[]}],"reordered":false,"live":["health.poll"],"needs_restart":["telemetry.listen"]}"#,
        );
        assert_eq!(json(&ChangeDocument::of(&change)), expected);
    }
}
