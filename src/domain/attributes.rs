//! The attributes of a device: values by name.
//!
//! A node has thousands of devices, most with two or three attributes, kept for as long as the
//! daemon runs. A sorted vector takes a tenth of the memory of a `BTreeMap`.

use serde::{Serialize, Serializer};

/// Values by name, sorted by name. [`Device::attributes`](super::Device::attributes) lists the
/// names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes(Vec<(&'static str, Box<str>)>);

impl Attributes {
    /// Sets a value, or replaces the previous one.
    pub fn insert(&mut self, name: &'static str, value: impl Into<Box<str>>) {
        match self.find(name) {
            Ok(at) => self.0[at].1 = value.into(),
            Err(at) => {
                self.0.reserve_exact(1);
                self.0.insert(at, (name, value.into()));
            }
        }
    }

    /// The value of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.find(name).ok().map(|at| &*self.0[at].1)
    }

    /// Whether a name has a value.
    #[must_use]
    pub fn contains_key(&self, name: &str) -> bool {
        self.find(name).is_ok()
    }

    /// All attributes, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, value)| (*name, &**value))
    }

    fn find(&self, name: &str) -> Result<usize, usize> {
        self.0.binary_search_by_key(&name, |(known, _)| known)
    }
}

impl<V: Into<Box<str>>> Extend<(&'static str, V)> for Attributes {
    fn extend<I: IntoIterator<Item = (&'static str, V)>>(&mut self, attributes: I) {
        attributes.into_iter().for_each(|(name, value)| self.insert(name, value));
    }
}

impl<V: Into<Box<str>>> FromIterator<(&'static str, V)> for Attributes {
    fn from_iter<I: IntoIterator<Item = (&'static str, V)>>(attributes: I) -> Self {
        let mut all = Attributes::default();
        all.extend(attributes);
        all
    }
}

#[cfg(test)]
impl std::ops::Index<&str> for Attributes {
    type Output = str;

    /// Panics if the name has no value, as a map does.
    fn index(&self, name: &str) -> &str {
        match self.get(name) {
            Some(value) => value,
            None => panic!("there is no attribute `{name}`"),
        }
    }
}

impl Serialize for Attributes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_name_replaced_and_written_in_order() {
        let mut attributes: Attributes = [("serial", "S1"), ("model", "X")].into_iter().collect();
        attributes.insert("model", "Y");
        attributes.extend([("nsid", 1.to_string())]);
        assert_eq!(
            (attributes.get("model"), attributes.get("mode"), &attributes["nsid"]),
            (Some("Y"), None, "1")
        );
        assert_eq!(
            serde_json::to_string(&attributes).unwrap(),
            r#"{"model":"Y","nsid":"1","serial":"S1"}"#
        );
    }
}
