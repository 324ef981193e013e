//! The labels of this node: the file that `match.label` reads, and the copy of those that the API
//! server had last.
//!
//! The daemon keeps the copy in the state directory. So a restart without the API server has the
//! same labels, and chooses the same configuration. The first line of the copy names the node and
//! the number of labels. A copy of another node, such as one in a disk image, and a copy that a
//! power cut damaged count as none.

use crate::domain::NodeLabels;
use crate::host::read_bounded;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// Labels by their keys.
pub type Labels = BTreeMap<String, String>;

/// The limit of the file with labels. A node's labels have some kilobytes.
const BYTES_MAX: u64 = 1024 * 1024;

/// The path of the copy below the state directory. It has a folder of its own: the journal is
/// written next to it, and a watch of that folder would wake the daemon with every grant.
const COPY: &str = "node/labels";

/// The first line of the copy, without the node's name and the number of labels.
const HEADER: &str = "# Labels of the node ";

/// The path of the copy.
#[must_use]
pub fn copy_of_labels(state: &Path) -> PathBuf {
    state.join(COPY)
}

/// The text of the copy. Labels with characters that Kubernetes does not allow are left out: a line
/// break in a value would be another label.
#[must_use]
pub fn copied_labels(node: &str, labels: &Labels) -> String {
    let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"');
    let is_key = |key: &str| !key.is_empty() && !key.starts_with('#') && !key.contains('=');
    let lines: Vec<String> = labels
        .iter()
        .filter(|(key, value)| is_key(key) && is_plain(key) && is_plain(value))
        .map(|(key, value)| format!("{key}={value}\n"))
        .collect();
    format!("{HEADER}{node}: {}\n{}", lines.len(), lines.concat())
}

/// The labels in a copy; `None` if it is damaged, or that of another node.
fn in_copy(text: &str, node: &str) -> Option<Labels> {
    let (header, _) = text.split_once('\n')?;
    let (of, count) = header.strip_prefix(HEADER)?.rsplit_once(": ")?;
    let labels = labels_in(text).ok()?;
    let is_whole = text.ends_with('\n') && count.parse() == Ok(labels.len());
    (is_whole && of == node).then_some(labels)
}

/// The labels of a file: `key=value` or `key="value"` in each line, as the kubelet writes labels
/// into a volume. Empty lines and lines that begin with `#` do not count.
///
/// # Errors
/// The number of a line without a `=`.
pub(super) fn labels_in(text: &str) -> Result<Labels, usize> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let label = |(number, line): (usize, &str)| {
        let (key, value) = line.split_once('=').ok_or(number)?;
        let plain = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        Ok((key.trim().to_owned(), plain.unwrap_or(value).to_owned()))
    };
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(label).collect()
}

/// The file that the labels of one node are read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LabelFile {
    /// An operator's file, or a volume. It must exist.
    Given(PathBuf),
    /// Our copy for the node of this name.
    Copy {
        file: PathBuf,
        node: String,
        /// Whether the labels were known before. They never become unknown again.
        was_known: bool,
    },
}

impl LabelFile {
    pub(super) fn path(&self) -> &Path {
        match self {
            LabelFile::Given(file) | LabelFile::Copy { file, .. } => file,
        }
    }

    /// The labels; `None` while the API server has not sent them yet.
    ///
    /// # Errors
    /// A file that cannot be read, or that is not a file of labels.
    pub(super) fn read(&self) -> Result<Option<Labels>, String> {
        let problem = |why: String| {
            format!("the file `{}` with the node's labels {why}", self.path().display())
        };
        let unreadable = |error: &io::Error| problem(format!("cannot be read: {error}"));
        let bytes = read_bounded(self.path(), BYTES_MAX);
        let text = |bytes| String::from_utf8(bytes).map_err(|_| problem("is not UTF-8".into()));
        match self {
            LabelFile::Given(_) => {
                let text = text(bytes.map_err(|error| unreadable(&error))?)?;
                let labels = labels_in(&text)
                    .map_err(|line| problem(format!("has no `key=value` in line {line}")))?;
                Ok(Some(labels))
            }
            LabelFile::Copy { node, was_known, .. } => {
                let labels = match bytes {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                    Err(error) => return Err(unreadable(&error)),
                    Ok(bytes) => text(bytes).ok().and_then(|text| in_copy(&text, node)),
                };
                if labels.is_none() && *was_known {
                    let lost = "has disappeared or is damaged; Holdfast writes it again when the \
                                API server answers";
                    return Err(problem(lost.into()));
                }
                Ok(labels)
            }
        }
    }
}

/// The labels that conditions have compared, with the file that they are from.
///
/// The daemon watches the file. Only another value of one of these labels leads to a reload.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ComparedLabels {
    pub(super) file: Option<LabelFile>,
    pub(super) keys: BTreeSet<String>,
    /// The values at the time of the comparison.
    pub(super) values: Option<Labels>,
}

impl ComparedLabels {
    /// The file to watch. `None` if no condition compares a label.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_ref().filter(|_| !self.keys.is_empty()).map(LabelFile::path)
    }

    /// The values at the time of the comparison; `None` while they were unknown.
    #[must_use]
    pub fn values(&self) -> Option<&Labels> {
        self.values.as_ref()
    }

    /// The current values of the same labels; `None` while they are unknown.
    ///
    /// # Errors
    /// When the file cannot be read: one sentence.
    pub fn now(&self) -> Result<Option<Labels>, String> {
        let Some(file) = &self.file else { return Ok(None) };
        Ok(file.read()?.map(|labels| self.only_compared(labels)))
    }

    pub(super) fn only_compared(&self, labels: Labels) -> Labels {
        labels.into_iter().filter(|(key, _)| self.keys.contains(key)).collect()
    }
}

/// The labels of this node by their source, and whether they are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pinned {
    pub(super) source: NodeLabels,
    pub(super) was_known: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn copy(dir: &Path, was_known: bool) -> LabelFile {
        LabelFile::Copy { file: dir.join("labels"), node: "gpu-7".into(), was_known }
    }

    #[test]
    fn a_copy_is_read_by_its_node_only() {
        let known = labels(&[("a.b/c", "d"), ("empty", "")]);
        let text = copied_labels("gpu-7", &known);
        assert_eq!(text, "# Labels of the node gpu-7: 2\na.b/c=d\nempty=\n");
        assert_eq!(in_copy(&text, "gpu-7"), Some(known));
        assert_eq!(in_copy(&text, "gpu-8"), None);
        assert_eq!(in_copy(&copied_labels("gpu-7", &Labels::new()), "gpu-7"), Some(Labels::new()));
    }

    #[test]
    fn a_label_that_would_be_two_lines_is_left_out() {
        let odd = labels(&[("a", "x\nb=y"), ("#c", "z"), ("d=e", "f"), ("g", "\"h\""), ("i", "j")]);
        let text = copied_labels("n", &odd);
        assert_eq!(in_copy(&text, "n"), Some(labels(&[("i", "j")])), "{text}");
    }

    #[test]
    fn a_missing_copy_is_unknown_only_until_it_was_known() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(copy(dir.path(), false).read(), Ok(None));
        let lost = copy(dir.path(), true).read().unwrap_err();
        assert!(lost.contains("has disappeared"), "{lost}");
        std::fs::create_dir(dir.path().join("labels")).unwrap();
        let unread = copy(dir.path(), false).read().unwrap_err();
        assert!(unread.contains("cannot be read: it is a directory"), "{unread}");
    }

    proptest! {
        #[test]
        fn a_cut_copy_counts_as_none(cut in 0_usize..100) {
            let whole = copied_labels("n", &labels(&[("a", "1"), ("b", "2"), ("c", "3")]));
            let cut = cut.min(whole.len() - 1);
            prop_assert_eq!(in_copy(&whole[..cut], "n"), None);
        }

        #[test]
        fn every_file_of_labels_has_labels_or_a_wrong_line(text in "[a-c=\"#\n \r\u{e9}]{0,60}") {
            match labels_in(&text) {
                Ok(labels) => prop_assert!(labels.keys().all(|key| !key.contains('='))),
                Err(line) => prop_assert!((1..=text.lines().count()).contains(&line)),
            }
        }

        #[test]
        fn a_written_label_is_read_again(key in "[a-z./-]{1,20}", value in "[A-Za-z0-9._-]{0,20}") {
            for text in [format!("{key}={value}\n"), format!("{key}=\"{value}\"\n")] {
                let labels = labels_in(&text).unwrap();
                prop_assert_eq!(labels.get(&key), Some(&value));
            }
        }
    }
}
