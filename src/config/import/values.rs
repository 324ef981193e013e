//! Values of our configuration that importers write.

use super::field::Field;
use crate::config::tree::{Entry, Is, Place, Table, Value};
use std::path::Path;

/// A list of texts as a value.
pub(super) fn texts<T: AsRef<str>>(list: &[T]) -> Is {
    Is::List(
        list.iter()
            .map(|text| Value { place: None, is: Is::Text(text.as_ref().to_owned()) })
            .collect(),
    )
}

pub(super) fn text(text: &str) -> Is {
    Is::Text(text.to_owned())
}

pub(super) fn plain(value: impl ToString) -> Is {
    Is::Plain(value.to_string())
}

/// Sets a value together with its place in the source.
pub(super) fn set_from(table: &mut Table, key: &str, mut is: Is, from: &Field<'_>) {
    let place = Some(Place { file: Path::new(&from.path).into(), line: from.line(), column: 1 });
    if let Is::List(values) = &mut is {
        values.iter_mut().for_each(|value| value.place.clone_from(&place));
    }
    table.put(Entry { key: key.to_owned(), place: place.clone(), value: Value { place, is } });
}

/// A resource with a name and a class.
pub(super) fn resource(name: &str, class: &str) -> Table {
    let mut table = Table::default();
    table.set("name", text(name));
    table.set("class", text(class));
    table
}

/// Sets a table unless it is empty.
pub(super) fn set_table(resource: &mut Table, key: &str, table: Table) {
    if !table.0.is_empty() {
        resource.set(key, Is::Table(table));
    }
}
