//! The commands and the configurations that the manual shows, held against this version.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test would")]

use super::command;
use crate::config::{Examined, Node};
use clap::error::ErrorKind;
use std::path::Path;

/// The pages of the manual, each with its name.
fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(root.join("docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path());
    let all = docs.chain([root.join("README.md"), root.join("SECURITY.md")]);
    let texts = all.filter(|path| path.extension().is_some_and(|it| it == "md")).map(|path| {
        (path.file_name().unwrap().to_string_lossy().into(), std::fs::read_to_string(path).unwrap())
    });
    texts.collect()
}

/// The words of a command as a shell reads them, up to a pipe, a comment or another command.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for character in command.chars() {
        match (character, quote) {
            (end, Some(begin)) if end == begin => quote = None,
            ('"' | '\'', None) => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            ('|' | '>' | ';' | '&' | '(' | ')', None) => break,
            ('#', None) if word.is_none() => break,
            (' ', None) => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    // The number of a redirected descriptor: `2>`.
    words.pop_if(|last| last == "2");
    words
}

/// The commands of `program` in a text: in blocks of code, and between backticks.
fn commands<'a>(page: &'a str, program: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    let mut in_code = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if in_code {
            let line = line.trim_start().trim_start_matches(['#', '$', ' ']);
            found.push(line.strip_prefix("sudo ").unwrap_or(line));
        } else {
            found.extend(line.split('`').skip(1).step_by(2));
        }
    }
    found.retain(|text| text.strip_prefix(program).is_some_and(|rest| rest.starts_with(' ')));
    found
}

#[test]
fn every_command_is_understood() {
    let (mut seen, mut wrong) = (0, Vec::new());
    for (name, page) in pages() {
        let own = commands(&page, "holdfast").into_iter().map(|text| (text, text.to_owned()));
        let plugin = commands(&page, "kubectl holdfast")
            .into_iter()
            .map(|text| (text, text.replacen("kubectl holdfast", "holdfast kubectl", 1)));
        let tour = commands(&page, "./on-this-node")
            .into_iter()
            .map(|text| (text, text.replacen("./on-this-node", "holdfast", 1)));
        for (text, line) in own.chain(plugin).chain(tour) {
            // A word in capitals is a placeholder for any verb.
            let mut words = words(&line);
            words.retain(|word| word != "VERB" && word != "[RESOURCE…]");
            seen += 1;
            let kind = command().try_get_matches_from(&words).err().map(|error| error.kind());
            let is_abridged = matches!(
                kind,
                None | Some(
                    ErrorKind::DisplayHelp
                        | ErrorKind::DisplayVersion
                        | ErrorKind::MissingRequiredArgument
                        | ErrorKind::MissingSubcommand
                        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                )
            );
            if !is_abridged {
                wrong.push(format!("{name}: `{text}`: {kind:?}"));
            }
        }
    }
    assert!(seen > 200, "{seen}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[cfg(feature = "cluster")]
#[test]
fn every_configuration_is_valid() {
    let mut seen = 0;
    for (name, page) in pages() {
        for rest in page.split("```toml\n").skip(1) {
            let mut text = rest.split("```").next().unwrap().to_owned();
            if text.contains("api = \"") && !text.contains("[dra]") {
                text.insert_str(0, "[dra]\nenabled = true\n");
            }
            seen += 1;
            let examined = Examined::alone(text.as_bytes(), Path::new(&name), &Node::default());
            assert!(examined.problems.is_empty(), "{text}\n{:?}", examined.problems);
            assert!(examined.config().is_ok(), "{text}");
        }
    }
    assert!(seen > 20, "{seen}");
}
