//! The `null` of JSON that Go writes.

use serde::{Deserialize, Deserializer};

/// A list or map that may be `null`, for `#[serde(deserialize_with = …)]`.
///
/// Go's `encoding/json` writes an empty slice or map as `null`, unless the field has `omitempty`.
/// Whether it does differs between versions of Kubernetes: `spec.devices` of a `ResourceSlice` has
/// none up to 1.34.
///
/// # Errors
/// When the value is neither `null` nor a `T`.
pub fn null_as_empty<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Copies of a document for tests: in each, one list or one of the named maps is `null`.
#[cfg(test)]
pub(crate) fn with_one_null(
    document: &serde_json::Value,
    maps: &[&str],
) -> Vec<(String, serde_json::Value)> {
    fn pointers(value: &serde_json::Value, at: &str, maps: &[&str], found: &mut Vec<String>) {
        let is_map = maps.iter().any(|map| at.ends_with(&format!("/{map}")));
        if value.is_array() || (value.is_object() && is_map) {
            found.push(at.to_owned());
        }
        match value {
            serde_json::Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    pointers(item, &format!("{at}/{index}"), maps, found);
                }
            }
            serde_json::Value::Object(fields) => {
                for (key, field) in fields {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    pointers(field, &format!("{at}/{key}"), maps, found);
                }
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    pointers(document, "", maps, &mut found);
    let null_at = |at: String| {
        let mut copy = document.clone();
        *copy.pointer_mut(&at).expect("the path was just met") = serde_json::Value::Null;
        (at, copy)
    };
    found.into_iter().map(null_at).collect()
}
