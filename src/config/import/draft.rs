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
}

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

    /// Warns of each resource that may select the same devices as an earlier one. The plugin offers
    /// such a device in both, and Holdfast in the first.
    pub(super) fn overlapping(&mut self, what: &str, may: impl Fn(&Table, &Table) -> bool) {
        let name =
            |offer: &Offer| offer.table.get("name").and_then(Value::as_text).map(str::to_owned);
        let mut warnings = Vec::new();
        for (n, later) in self.offers.iter().enumerate() {
            let earlier = self.offers.iter().take(n).find(|one| may(&one.table, &later.table));
            if let Some((earlier, later)) = earlier.and_then(name).zip(name(later)) {
                warnings.push(format!(
                    "{earlier} and {later} may select the same {what}: the plugin offers it in both, \
                     and Holdfast in {earlier} only; put the narrower resource first, or change what \
                     one of them selects"
                ));
            }
        }
        warnings.iter().for_each(|warning| self.warn(warning));
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
