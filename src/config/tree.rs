//! TOML as a tree in which every value knows its place: the form that is merged, shown and checked.

use super::ConfigError;
use super::error::printable;
use crate::domain::is_unprintable;
use std::path::Path;
use std::sync::Arc;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A place in a file. Both numbers begin at 1, and a column counts characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) file: Arc<Path>,
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A value and its place. A value that is not from a file has no place.
#[derive(Debug, Clone)]
pub(super) struct Value {
    pub(super) place: Option<Place>,
    pub(super) is: Is,
}

#[derive(Debug, Clone)]
pub(super) enum Is {
    Text(String),
    /// A number, a boolean or a date, in its spelling.
    Plain(String),
    List(Vec<Value>),
    Table(Table),
}

/// Keys in the order of insertion.
#[derive(Debug, Clone, Default)]
pub(super) struct Table(pub(super) Vec<Entry>);

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) place: Option<Place>,
    pub(super) value: Value,
}

impl Table {
    /// Parses a file.
    ///
    /// # Errors
    /// Invalid TOML.
    pub(super) fn parse(text: &str, file: &Path) -> Result<Self, ConfigError> {
        let source =
            Source { file: file.into(), text, starts: line_starts(text), marks: marks(text) };
        match DeTable::parse(text) {
            Ok(table) => Ok(source.table(table.into_inner())),
            Err(error) => {
                let place = error.span().map(|span| source.place(span.start));
                Err(ConfigError::of_parser(&error, place.as_ref()).in_file(file))
            }
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    /// Removes a key and returns its entry.
    pub(super) fn take(&mut self, key: &str) -> Option<Entry> {
        let index = self.0.iter().position(|entry| entry.key == key)?;
        Some(self.0.remove(index))
    }

    /// Adds an entry, or replaces the one with its key.
    pub(super) fn put(&mut self, entry: Entry) {
        match self.0.iter_mut().find(|there| there.key == entry.key) {
            Some(there) => *there = entry,
            None => self.0.push(entry),
        }
    }

    /// Sets a value that is not from a file.
    pub(super) fn set(&mut self, key: &str, is: Is) {
        self.put(Entry { key: key.to_owned(), place: None, value: Value { place: None, is } });
    }

    /// The list below a key; created if the key is missing. `None` if the value is not a list.
    pub(super) fn list_mut(&mut self, key: &str) -> Option<&mut Vec<Value>> {
        if self.get(key).is_none() {
            self.set(key, Is::List(Vec::new()));
        }
        match self.0.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.value.is) {
            Some(Is::List(list)) => Some(list),
            _ => None,
        }
    }
}

impl Value {
    pub(super) fn as_text(&self) -> Option<&str> {
        match &self.is {
            Is::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn as_table(&self) -> Option<&Table> {
        match &self.is {
            Is::Table(table) => Some(table),
            _ => None,
        }
    }

    pub(super) fn as_list(&self) -> Option<&[Value]> {
        match &self.is {
            Is::List(list) => Some(list),
            _ => None,
        }
    }

    /// The text of a text, or of a number in its spelling.
    fn as_word(&self) -> Option<&str> {
        match &self.is {
            Is::Text(word) | Is::Plain(word) => Some(word),
            _ => None,
        }
    }

    /// The place that a message is about: that of its first word in backticks that is a key, or a
    /// value, in this tree.
    pub(super) fn place_of(&self, sentence: &str) -> Option<Place> {
        let words = || sentence.split('`').skip(1).step_by(2);
        let found = words().find_map(|word| {
            let key = word.rsplit('.').next().unwrap_or(word);
            self.find(&|entry: &Entry| entry.key == word || entry.key == key, &|value| {
                value.as_word() == Some(word)
            })
        });
        found.or_else(|| self.place.clone())
    }

    /// The first matching key in the order of the tree, else the first matching value.
    fn find(
        &self,
        is_key: &dyn Fn(&Entry) -> bool,
        is_value: &dyn Fn(&Value) -> bool,
    ) -> Option<Place> {
        self.find_key(is_key).or_else(|| self.find_value(is_value))
    }

    fn find_key(&self, is_plugin_container: &dyn Fn(&Entry) -> bool) -> Option<Place> {
        match &self.is {
            Is::Table(Table(entries)) => {
                let here = entries
                    .iter()
                    .find(|entry| is_plugin_container(entry))
                    .and_then(|entry| entry.place.clone());
                here.or_else(|| {
                    entries.iter().find_map(|entry| entry.value.find_key(is_plugin_container))
                })
            }
            Is::List(list) => list.iter().find_map(|value| value.find_key(is_plugin_container)),
            Is::Text(_) | Is::Plain(_) => None,
        }
    }

    fn find_value(&self, is_plugin_container: &dyn Fn(&Value) -> bool) -> Option<Place> {
        match &self.is {
            Is::Table(Table(entries)) => {
                entries.iter().find_map(|entry| entry.value.find_value(is_plugin_container))
            }
            Is::List(list) => list.iter().find_map(|value| value.find_value(is_plugin_container)),
            Is::Text(_) | Is::Plain(_) => {
                is_plugin_container(self).then(|| self.place.clone()).flatten()
            }
        }
    }
}

struct Source<'a> {
    file: Arc<Path>,
    text: &'a str,
    starts: Vec<usize>,
    /// The number of characters that begin before each [`MARK`]th byte. A line may be as long as
    /// the file, and every value in it needs a column. Marks make that cheap.
    marks: Vec<usize>,
}

/// Bytes from one mark to the next.
const MARK: usize = 1024;

fn line_starts(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect()
}

/// Whether a character begins with this byte of UTF-8.
fn begins_character(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| begins_character(**byte)).count()
}

fn marks(text: &str) -> Vec<usize> {
    let mark = |before: &mut usize, chunk: &[u8]| {
        let mark = *before;
        *before += characters(chunk);
        Some(mark)
    };
    text.as_bytes().chunks(MARK).scan(0, mark).collect()
}

impl Source<'_> {
    fn place(&self, offset: usize) -> Place {
        let line = self.starts.partition_point(|start| *start <= offset);
        let start =
            line.checked_sub(1).and_then(|index| self.starts.get(index)).copied().unwrap_or(0);
        let column =
            self.characters_before(offset).saturating_sub(self.characters_before(start)) + 1;
        Place { file: self.file.clone(), line, column }
    }

    fn characters_before(&self, offset: usize) -> usize {
        let mark = offset / MARK;
        let rest = self.text.as_bytes().get(mark * MARK..offset).map_or(0, characters);
        self.marks
            .get(mark)
            .map_or_else(|| characters(self.text.as_bytes()), |before| before + rest)
    }

    fn table(&self, table: DeTable<'_>) -> Table {
        let mut entries: Vec<(usize, Entry)> = Vec::with_capacity(table.len());
        for (key, value) in table {
            let start = key.span().start;
            let entry = Entry {
                place: Some(self.place(start)),
                value: self.value(value),
                key: key.into_inner().into_owned(),
            };
            entries.push((start, entry));
        }
        // The parser sorts the entries by name.
        entries.sort_by_key(|(start, _)| *start);
        Table(entries.into_iter().map(|(_, entry)| entry).collect())
    }

    fn value(&self, value: Spanned<DeValue<'_>>) -> Value {
        let place = Some(self.place(value.span().start));
        let is = match value.into_inner() {
            DeValue::String(text) => Is::Text(text.into_owned()),
            DeValue::Integer(number) => Is::Plain(number.to_string()),
            DeValue::Float(number) => Is::Plain(number.to_string()),
            DeValue::Boolean(truth) => Is::Plain(truth.to_string()),
            DeValue::Datetime(time) => Is::Plain(time.to_string()),
            DeValue::Array(list) => {
                Is::List(list.into_iter().map(|value| self.value(value)).collect())
            }
            DeValue::Table(table) => Is::Table(self.table(table)),
        };
        Value { place, is }
    }
}

/// Makes the comment behind a value from its place.
type Origin<'a> = Option<&'a dyn Fn(Option<&Place>) -> String>;

/// A tree as TOML text, one line for each key. `origin` makes a comment behind each value.
pub(super) fn written(table: &Table, origin: Origin<'_>) -> String {
    let mut writer = Writer::default();
    writer.table("", table, origin);
    writer.text
}

#[derive(Debug, Default)]
struct Writer {
    text: String,
}

impl Writer {
    fn table(&mut self, path: &str, Table(entries): &Table, origin: Origin<'_>) {
        let end = |text: &mut String, place: Option<&Place>| {
            if let Some(origin) = origin {
                text.push_str("  # ");
                text.push_str(&printable(&origin(place)));
            }
            text.push('\n');
        };
        let (blocks, lines): (Vec<&Entry>, Vec<&Entry>) =
            entries.iter().partition(|entry| is_block(entry));
        for Entry { key, value, .. } in lines {
            self.text.push_str(&key_text(key));
            self.text.push_str(" = ");
            self.inline(value);
            end(&mut self.text, value.place.as_ref());
        }
        for Entry { key, place, value } in blocks {
            let path =
                if path.is_empty() { key_text(key) } else { format!("{path}.{}", key_text(key)) };
            match &value.is {
                Is::Table(table) => {
                    // A table that contains only blocks needs no header: the headers of the blocks
                    // imply it.
                    if table.0.is_empty() || !table.0.iter().all(is_block) {
                        self.gap();
                        self.text.push_str(&format!("[{path}]"));
                        end(&mut self.text, place.as_ref());
                    }
                    self.table(&path, table, origin);
                }
                Is::List(list) => {
                    for value in list {
                        self.gap();
                        self.text.push_str(&format!("[[{path}]]"));
                        end(&mut self.text, value.place.as_ref());
                        if let Is::Table(table) = &value.is {
                            self.table(&path, table, origin);
                        }
                    }
                }
                Is::Text(_) | Is::Plain(_) => {}
            }
        }
    }

    fn gap(&mut self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
    }

    fn inline(&mut self, value: &Value) {
        match &value.is {
            Is::Text(text) => self.text.push_str(&quoted(text)),
            Is::Plain(plain) => self.text.push_str(plain),
            Is::List(list) => {
                self.text.push('[');
                for (index, value) in list.iter().enumerate() {
                    self.text.push_str(if index == 0 { "" } else { ", " });
                    self.inline(value);
                }
                self.text.push(']');
            }
            Is::Table(Table(entries)) if entries.is_empty() => self.text.push_str("{}"),
            Is::Table(Table(entries)) => {
                self.text.push('{');
                for (index, entry) in entries.iter().enumerate() {
                    self.text.push_str(if index == 0 { " " } else { ", " });
                    self.text.push_str(&key_text(&entry.key));
                    self.text.push_str(" = ");
                    self.inline(&entry.value);
                }
                self.text.push_str(" }");
            }
        }
    }
}

/// Whether an entry has a header of its own. Lists of tables have one where people usually write
/// one.
fn is_block(entry: &Entry) -> bool {
    match &entry.value.is {
        Is::Table(_) => true,
        Is::List(list) => {
            matches!(&*entry.key, "resource" | "node")
                && !list.is_empty()
                && list.iter().all(|value| matches!(value.is, Is::Table(_)))
        }
        Is::Text(_) | Is::Plain(_) => false,
    }
}

fn key_text(key: &str) -> String {
    let is_bare = !key.is_empty()
        && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    if is_bare { key.to_owned() } else { quoted(key) }
}

/// A text in quotes, on one line.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            c if is_unprintable(c) && u32::from(c) > 0xffff => {
                quoted.push_str(&format!("\\U{:08X}", u32::from(c)))
            }
            c if is_unprintable(c) => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_tree_equals_the_read_one_and_has_every_place() {
        let text = "a = 0x1F\n\n[b.\"c d\"]\nx = \"\"\"\none\n\"two\\u0007\"\"\"\"\ny = [ {z = 1979-05-27},\n  { w = -1.5e3 } ]\n[[resource]]\n\"ö\" = true\n[[resource]]\n";
        let tree = Table::parse(text, Path::new("f")).unwrap();
        let text = written(&tree, None);
        let expected = "a = 0x1F\n\n[b.\"c d\"]\nx = \"one\\n\\\"two\\u0007\\\"\"\ny = [{ z = 1979-05-27 }, { w = -1.5e3 }]\n\n[[resource]]\n\"ö\" = true\n\n[[resource]]\n";
        assert_eq!(text, expected);
        let again = written(&Table::parse(&text, Path::new("f")).unwrap(), None);
        assert_eq!(again, text);
        let origin = |place: Option<&Place>| {
            place.map_or("default".into(), |place| format!("{}:{}", place.line, place.column))
        };
        let text = written(&tree, Some(&origin));
        for line in [
            "a = 0x1F  # 1:5",
            "y = [{ z = 1979-05-27 }, { w = -1.5e3 }]  # 7:5",
            "\"ö\" = true  # 10:7",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert!(
            text.contains("[[resource]]  # 9:1") && text.contains("[[resource]]  # 11:1"),
            "{text}"
        );
    }

    #[test]
    fn a_column_counts_characters_however_long_the_line_is() {
        let list: Vec<String> = (0..2000).map(|n| format!("\"ä{n}\"")).collect();
        let text = format!("# ü\na = [{}] # ö\nb = 1", list.join(", "));
        let tree = Table::parse(&text, Path::new("f")).unwrap();
        let places = tree
            .get("a")
            .and_then(Value::as_list)
            .unwrap()
            .iter()
            .map(|value| value.place.clone().unwrap());
        let line: Vec<char> = text.lines().nth(1).unwrap().chars().collect();
        for (place, wanted) in places.zip(&list) {
            let found: String =
                line[place.column - 1..].iter().take(wanted.chars().count()).collect();
            assert_eq!((place.line, &found), (2, wanted));
        }
        let b = tree.get("b").unwrap().place.clone().unwrap();
        assert_eq!((b.line, b.column), (3, 5));
    }

    #[test]
    fn a_problem_is_placed_at_the_first_quoted_key_that_exists() {
        let text = "name = \"a.b/c\"\npaths = [\n  { hots = \"fuse\" },\n]\n";
        let tree =
            Value { place: None, is: Is::Table(Table::parse(text, Path::new("f")).unwrap()) };
        let place =
            |sentence: &str| tree.place_of(sentence).map(|place| (place.line, place.column));
        assert_eq!(place("`nothing` but `hots` is wrong"), Some((3, 5)));
        assert_eq!(place("the path `fuse` must be"), Some((3, 12)));
        assert_eq!(place("`resource.paths` is"), Some((2, 1)));
        assert_eq!(place("nothing"), None);
    }
}
