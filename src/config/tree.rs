//! TOML as a tree in which every value knows its place: the form that is merged, shown and checked.

use std::path::Path;
use std::sync::Arc;

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
