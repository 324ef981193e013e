//! The parts of the input that may be the plugin's file, and the choice among them.

use super::doc::{Doc, Is, Scalar};
use super::error::ImportError;
use super::field::Field;
use super::peers::{Facts, Peer, facts};
use std::collections::BTreeMap;

/// The limit of ConfigMap entries that a message names.
const NAMES_MAX: usize = 30;

/// A part of the source that may be the plugin's file.
pub(super) struct Candidate<'a> {
    /// Its key in the ConfigMap, or the name of another object that contains it.
    pub(super) key: String,
    /// The object that contains it, such as `kube-system/sriovdp-config`.
    pub(super) of: String,
    /// Whether it is an entry of a ConfigMap or of a chart's values.
    pub(super) is_entry: bool,
    pub(super) part: Part<'a>,
}

/// The form of a file inside another document.
pub(super) enum Part<'a> {
    Text(&'a Scalar),
    Tree(&'a Doc),
}

impl Part<'_> {
    pub(super) fn parse(&self) -> Result<Vec<Doc>, ImportError> {
        match self {
            Part::Text(text) => Doc::parse(&text.text, text.lines),
            Part::Tree(doc) => Ok(vec![(*doc).clone()]),
        }
    }
}

impl Candidate<'_> {
    /// Whether `--key` means this part. A name stands with or without its namespace.
    fn is_meant(&self, key: &str) -> bool {
        let bare = self.key.rsplit_once('/').map_or(&*self.key, |(_, name)| name);
        self.key == key || !self.is_entry && bare == key
    }
}

/// The texts in an object that may be the file.
pub(super) fn candidates_of<'a>(facts: &Facts, object: &Field<'a>) -> Vec<Candidate<'a>> {
    let mut candidates = Vec::new();
    let kind = object.get("kind").and_then(|kind| kind.text().ok()).unwrap_or_default();
    if let Some(data) = object.get("data").filter(|_| kind == "ConfigMap" || kind.is_empty()) {
        for (key, entry) in data.entries().unwrap_or_default() {
            candidates.extend(entry.scalar_text().map(|text| Candidate {
                key: key.to_owned(),
                of: name(object),
                is_entry: true,
                part: Part::Text(text),
            }));
        }
    }
    for (_, path) in facts.objects.iter().filter(|(of, _)| *of == kind) {
        let field = path.iter().try_fold(object.clone(), |field, key| field.get(key));
        let of = name(object);
        let part = field.map(|field| match field.scalar_text() {
            Ok(text) => Part::Text(text),
            Err(_) => Part::Tree(field.doc()),
        });
        candidates.extend(part.map(|part| Candidate {
            key: of.clone(),
            of,
            is_entry: false,
            part,
        }));
    }
    candidates
}

fn name(object: &Field<'_>) -> String {
    let metadata = object.get("metadata");
    let of = |key: &str| {
        metadata.as_ref().and_then(|metadata| metadata.get(key)).and_then(|name| name.text().ok())
    };
    match (of("namespace"), of("name")) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        (_, Some(name)) => name.to_owned(),
        _ => {
            let kind = object.get("kind").and_then(|kind| kind.text().ok());
            format!("the {}", kind.unwrap_or("ConfigMap"))
        }
    }
}

/// Whether this part may be the plugin's file.
pub(super) fn may_be_file(peer: Peer, part: &Part<'_>) -> bool {
    let Ok(documents) = part.parse() else { return false };
    let keys = facts(peer).keys;
    let is_key = |key: &str| keys.iter().any(|known| known.eq_ignore_ascii_case(key));
    let has_key =
        |doc: &Doc| matches!(&doc.is, Is::Map(map) if map.iter().any(|(key, _)| is_key(key)));
    match documents.first().map(|doc| (doc, &doc.is)) {
        Some((_, Is::List(list))) => peer == Peer::Smarter && list.first().is_some_and(has_key),
        Some((doc, _)) => peer != Peer::Smarter && has_key(doc),
        None => false,
    }
}

/// The files of NVIDIA's plugin among which a label of the node chooses: those of the only object
/// with several files.
pub(super) fn several<'c, 'a>(candidates: &'c [Candidate<'a>]) -> Vec<&'c Candidate<'a>> {
    let mut objects: BTreeMap<&str, Vec<&Candidate<'a>>> = BTreeMap::new();
    for file in candidates.iter().filter(|file| may_be_file(Peer::Nvidia, &file.part)) {
        objects.entry(&file.of).or_default().push(file);
    }
    let mut several = objects.into_values().filter(|files| files.len() > 1);
    match (several.next(), several.next()) {
        (Some(files), None) => files,
        _ => Vec::new(),
    }
}

/// The candidate that the user means, if there is one. A container may run without a file.
pub(super) fn choose<'c, 'a>(
    peer: Peer,
    candidates: &'c [Candidate<'a>],
    key: Option<&str>,
    usual: &str,
    has_container: bool,
) -> Result<Option<&'c Candidate<'a>>, ImportError> {
    let names = |candidates: &[&Candidate<'_>]| {
        let is_one = candidates.iter().all(|candidate| candidate.of == candidates[0].of);
        let name = |candidate: &&Candidate<'_>| {
            if is_one || !candidate.is_entry {
                format!("`{}`", candidate.key)
            } else {
                format!("`{}` of {}", candidate.key, candidate.of)
            }
        };
        let listed = candidates.iter().take(NAMES_MAX).map(name).collect::<Vec<_>>().join(", ");
        match candidates.len().saturating_sub(NAMES_MAX) {
            0 => listed,
            more => format!("{listed} and {more} more"),
        }
    };
    let of_several = |several: &[&Candidate<'_>]| {
        let has = match several.iter().all(|candidate| candidate.is_entry) {
            true => "the ConfigMap has the entries",
            false => "the input has",
        };
        ImportError::new(format!("{has} {}; select one with `--key`", names(several)))
    };
    let all: Vec<&Candidate<'_>> = candidates.iter().collect();
    let named: Vec<&Candidate<'_>> = all
        .iter()
        .copied()
        .filter(|candidate| key.is_none_or(|key| candidate.is_meant(key)))
        .collect();
    if let (Some(key), []) = (key, named.as_slice()) {
        return Err(ImportError::new(match all.as_slice() {
            [] => {
                format!("the file is not a ConfigMap, and has no entry `{key}`; leave out `--key`")
            }
            all if all.iter().all(|candidate| candidate.is_entry) => {
                format!("the ConfigMap has no entry `{key}`; it has {}", names(all))
            }
            all => format!("the input has no `{key}`; it has {}", names(all)),
        }));
    }
    if let (Some(_), [one]) = (key, named.as_slice()) {
        return Ok(Some(one));
    }
    let likely: Vec<&Candidate<'_>> =
        named.iter().copied().filter(|candidate| may_be_file(peer, &candidate.part)).collect();
    match (likely.as_slice(), named.as_slice()) {
        ([one], _) => Ok(Some(one)),
        ([], [one]) if !has_container => Ok(Some(one)),
        ([], []) => Ok(None),
        ([], _) if has_container => Ok(None),
        ([], several) => Err(of_several(several)),
        (several, _) => {
            // One of them is the usual file of NVIDIA's plugin.
            let is_usual =
                |candidate: &&&Candidate<'_>| peer == Peer::Nvidia && candidate.key == usual;
            let mut found = several.iter().filter(is_usual);
            match (found.next(), found.next()) {
                (Some(one), None) => Ok(Some(one)),
                _ => Err(of_several(several)),
            }
        }
    }
}
