//! Parses TOML into a tree in which every value knows its place.

use super::ConfigError;
use super::tree::{Entry, Is, Place, Table, Value};
use std::path::Path;
use std::sync::Arc;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

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
