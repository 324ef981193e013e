//! Rules for the pages of the manual: every link leads somewhere, a long page has contents, and no
//! sentence is long.

use super::{Source, report, texts};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The most words of a sentence.
const WORDS_MAX: usize = 25;
/// Lines of a page that fits on two screens. A longer one begins with contents.
const SHORT_PAGE: usize = 100;
/// The first lines of a page, which have the contents: links to at least [`CONTENTS_MIN`] sections.
const FIRST_LINES: usize = 40;
const CONTENTS_MIN: usize = 3;

/// Every page of Markdown.
fn pages() -> Vec<Source> {
    let mut pages = texts();
    pages.retain(|page| page.name.ends_with(".md"));
    pages
}

/// Whether a page is part of the manual, which operators read.
fn is_manual(page: &Source) -> bool {
    page.name.starts_with("docs/") || page.name == "README.md" || page.name == "SECURITY.md"
}

/// The lines outside of blocks of code, with their numbers. A line of a block is empty.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut in_code = false;
    let lines = text.lines().enumerate().map(|(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (index + 1, if in_code || is_fence { "" } else { line })
    });
    lines.collect()
}

/// The targets of the links of a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// The text without the targets of links, and with one word for each piece of code.
fn visible(text: &str) -> String {
    let mut shown = String::new();
    for (index, part) in text.split('`').enumerate() {
        shown.push_str(if index % 2 == 0 { part } else { "X" });
    }
    let mut parts = shown.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, rest| text + rest.split_once(')').map_or(rest, |(_, rest)| rest))
}

/// The anchors of a page, as GitHub and other renderers make them of its headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (_, line) in prose(text).into_iter().filter(|(_, line)| line.starts_with('#')) {
        let heading = line.trim_start_matches('#').trim().replace('`', "");
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        let anchor: String = kept.flat_map(char::to_lowercase).collect();
        let anchor = anchor.replace(' ', "-");
        let count = counts.entry(anchor.clone()).or_default();
        found.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    found
}

#[test]
fn every_link_leads_to_a_file_and_a_section() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = pages();
    let sections: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|page| (page.name.as_str(), anchors(&page.text))).collect();
    let (mut seen, mut problems) = (0, Vec::new());
    for page in &pages {
        let folder = Path::new(&page.name).parent().unwrap();
        for (number, line) in prose(&page.text) {
            for link in links(line).filter(|link| !link.contains("://")) {
                seen += 1;
                let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
                let target = if file.is_empty() {
                    page.name.clone()
                } else {
                    // Without `..`, as the names of the pages are.
                    let mut path = folder.to_path_buf();
                    for part in Path::new(file) {
                        if part == ".." {
                            path.pop();
                        } else {
                            path.push(part);
                        }
                    }
                    path.to_string_lossy().into_owned()
                };
                let has_section = anchor.is_empty()
                    || sections.get(target.as_str()).is_some_and(|all| all.contains(anchor));
                if !root.join(&target).exists() || !has_section {
                    problems.push(format!("{}:{number}: `{link}` leads nowhere", page.name));
                }
            }
        }
    }
    assert!(seen > 300, "{seen}");
    report(&problems);
}

#[test]
fn a_long_page_begins_with_contents() {
    let long = pages();
    let long = long.iter().filter(|page| page.text.lines().count() > SHORT_PAGE && is_manual(page));
    let problems: Vec<String> = long
        .filter(|page| {
            let first = page.text.lines().take(FIRST_LINES);
            first.flat_map(links).filter(|link| link.starts_with('#')).count() < CONTENTS_MIN
        })
        .map(|page| format!("{}: no links to its sections in its first lines", page.name))
        .collect();
    report(&problems);
}

#[test]
fn sentences_are_short() {
    let mut problems = Vec::new();
    for page in pages().iter().filter(|page| is_manual(page)) {
        let mut check = |number: usize, text: &str| {
            let text = visible(text);
            let mut sentence: Vec<&str> = Vec::new();
            for word in text.split_whitespace() {
                sentence.extend(Some(word).filter(|word| word.contains(char::is_alphanumeric)));
                let end = word.trim_end_matches(['*', ')', '"', ']']);
                if end.ends_with(['.', '?', '!', ':', ';']) {
                    sentence.clear();
                } else if sentence.len() == WORDS_MAX + 1 {
                    let begin = sentence.join(" ");
                    problems.push(format!(
                        "{}:{number}: more than {WORDS_MAX} words: {begin} …",
                        page.name
                    ));
                }
            }
        };
        let mut paragraph = (1, String::new());
        for (number, line) in prose(&page.text) {
            let begins = |mark: &str| line.trim_start().starts_with(mark);
            if line.starts_with('|') {
                line.split(" | ").for_each(|cell| check(number, cell));
            }
            let is_apart = line.is_empty() || begins("|") || begins("#");
            if is_apart || begins("- ") || begins("1. ") || line.starts_with(char::is_numeric) {
                check(paragraph.0, &std::mem::take(&mut paragraph.1));
                paragraph.0 = number;
            }
            if !is_apart {
                paragraph.1 += line;
                paragraph.1.push(' ');
            }
        }
        check(paragraph.0, &paragraph.1);
    }
    report(&problems);
}
