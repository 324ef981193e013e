//! The result of an importer before validation, and its warnings.

use super::error::ImportError;
use super::field::Field;
use crate::config::error::{nearest, printable};
use crate::config::tree::{Table, Value};

/// The limit of warnings about unknown settings. A file with more is probably not the plugin's.
const UNKNOWN_MAX: usize = 100;

/// The result of an importer before validation.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) offers: Vec<Offer>,
    /// Tables next to the resources.
    pub(super) tables: Table,
    pub(super) warnings: Vec<String>,
    pub(super) wrong: usize,
    /// What the plugin offers in each of two resources, and whether they may select the same.
    pub(super) overlap: Option<(&'static str, MayOverlap)>,
    /// The names of resources that are left out, each with later ones that may get its devices.
    pub(super) unclaimed: Vec<(String, Vec<String>)>,
}

/// Whether two resources may select the same device.
type MayOverlap = fn(&Table, &Table) -> bool;

/// A resource, and its place in the source.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) table: Table,
    pub(super) place: String,
}

impl Draft {
    pub(super) fn offer(&mut self, table: Table, at: &Field<'_>) {
        self.offers.push(Offer { table, place: at.place() });
    }

    pub(super) fn warn(&mut self, warning: impl AsRef<str>) {
        self.warnings.push(printable(warning.as_ref()));
    }

    /// Warns of devices that may be in another one of these resources than in the plugin. They are
    /// those of the result: others offer nothing.
    pub(super) fn note_moved(&mut self, resources: &[Value]) {
        let tables: Vec<&Table> = resources.iter().filter_map(Value::as_table).collect();
        let name = |table: &Table| table.get("name").and_then(Value::as_text).map(str::to_owned);
        if let Some((what, may)) = self.overlap {
            for (n, later) in tables.iter().enumerate() {
                let earlier = tables.iter().take(n).find(|one| may(one, later));
                if let Some((earlier, later)) = earlier.and_then(|one| name(one)).zip(name(later)) {
                    self.warn(format!(
                        "{earlier} and {later} may select the same {what}: the plugin offers it in \
                         both, and Holdfast in {earlier} only; put the narrower resource first, or \
                         change what one of them selects"
                    ));
                }
            }
        }
        let names: Vec<String> = tables.iter().filter_map(|table| name(table)).collect();
        for (left_out, mut later) in std::mem::take(&mut self.unclaimed) {
            later.retain(|name| names.contains(name));
            if !later.is_empty() {
                self.warn(format!(
                    "devices of {left_out} may be in {} here, and the plugin offers them in {left_out} \
                     only; write {left_out} by hand before, or change what the others select",
                    later.join(" or ")
                ));
            }
        }
    }

    /// Warns of a part that is left out because a value in it is wrong.
    pub(super) fn wrong(&mut self, what: &str, why: &ImportError) {
        self.wrong += 1;
        self.warn(format!("{what} is left out: {why}"));
    }

    /// The value of a setting. A setting with a wrong value is left out with a warning.
    pub(super) fn setting<'a, T>(
        &mut self,
        field: Option<Field<'a>>,
        read: impl FnOnce(&Field<'a>) -> Result<T, ImportError>,
    ) -> Option<T> {
        let field = field?;
        match read(&field) {
            Ok(value) => Some(value),
            Err(error) => {
                field.read_all();
                self.wrong(&format!("`{}`", field.path), &error);
                None
            }
        }
    }

    /// Warns of a setting that has an effect in the plugin and no equivalent here.
    pub(super) fn no_equivalent(&mut self, setting: Option<Field<'_>>, why: &str) {
        let Some(setting) = setting else { return };
        setting.read_all();
        if setting.has_effect() {
            self.warn(format!("{} is left out: {why}", setting.place()));
        }
    }

    /// Warns of every part that was not read, with a hint for each.
    pub(super) fn unknown(&mut self, root: &Field<'_>, known: &[&str]) {
        let (unread, more) = root.unread(UNKNOWN_MAX);
        for unknown in &unread {
            let (path, line) = (&unknown.path, unknown.line);
            if let Some(by) = unknown.overruled_by {
                self.warn(format!("`{path}` (line {line}) is left out: line {by} overrides it"));
                continue;
            }
            // Such as a selector that has no meaning for devices of this kind.
            if known.contains(&without_indices(path).as_str()) {
                self.warn(format!(
                    "`{path}` (line {line}) has no effect here in the plugin, and is left out"
                ));
                continue;
            }
            self.warn(format!(
                "`{path}` (line {line}) is not a setting of this plugin, and is left out{}",
                hint(path, known)
            ));
        }
        if more > 0 {
            self.warn(format!("{more} more are not settings of this plugin, and are left out"));
        }
    }
}

/// The path of a key as in a list of known keys. Some lists are optional, as in `selectors`.
fn without_indices(path: &str) -> String {
    let mut plain = String::new();
    for (n, part) in path.split('[').enumerate() {
        match part.split_once(']').filter(|_| n > 0) {
            Some((_, rest)) => plain.push_str(&format!("[]{rest}")),
            None => plain.push_str(part),
        }
    }
    plain.replace("selectors[].", "selectors.")
}

/// The keys where an unknown key would be read, or the known key that it resembles.
fn hint(path: &str, known: &[&str]) -> String {
    let key = path.rsplit('.').next().unwrap_or(path);
    let of = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let there: Vec<String> = known
        .iter()
        .filter(|known| of(known).eq_ignore_ascii_case(key))
        .map(|known| format!("`{known}`"))
        .collect();
    if !there.is_empty() {
        return format!("; it is read at {}", there.join(" and "));
    }
    let keys: Vec<String> = known.iter().map(|known| of(known)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    nearest(key, &keys).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default()
}
