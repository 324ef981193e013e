//! A collection of objects, and the paths of objects in it; pure.

/// The collection of nodes.
pub const NODES: &str = "/api/v1/nodes";
/// The collection of pods of all namespaces.
pub const PODS: &str = "/api/v1/pods";
/// The collection of `ResourceSlice` objects.
pub const RESOURCE_SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// A collection, or the part of it that a field selector chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collection {
    path: String,
    /// Requirements of the form `field=value`; all of them must be met.
    fields: Vec<String>,
}

impl Collection {
    /// All objects at this path, such as [`NODES`].
    #[must_use]
    pub fn at(path: &str) -> Self {
        Collection { path: path.to_owned(), fields: Vec::new() }
    }

    /// Only those whose field, such as `spec.nodeName`, has this value. The API server supports few
    /// fields of each kind, and answers 400 to others.
    #[must_use]
    pub fn with_field(mut self, field: &str, value: &str) -> Self {
        self.fields.push(format!("{field}={}", escaped_term(value)));
        self
    }

    /// Its path, without a query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The path of one of its objects.
    #[must_use]
    pub fn object(&self, name: &str) -> String {
        format!("{}/{}", self.path, escaped(name))
    }

    /// The path and the query. `more` are further parameters: `watch=true&…`.
    pub(super) fn query(&self, more: &str) -> String {
        let selector = match self.fields.is_empty() {
            true => String::new(),
            false => format!("fieldSelector={}", escaped(&self.fields.join(","))),
        };
        let parts: Vec<&str> =
            [selector.as_str(), more].into_iter().filter(|part| !part.is_empty()).collect();
        match parts.is_empty() {
            true => self.path.clone(),
            false => format!("{}?{}", self.path, parts.join("&")),
        }
    }
}

/// A value in a query, or one part of a path (RFC 3986, section 2.3).
pub(super) fn escaped(value: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let one = |byte: u8| {
        if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    value.bytes().map(one).collect()
}

/// A value in a field selector: apimachinery's `fields.EscapeValue`.
fn escaped_term(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_selects_by_every_field_and_values_are_escaped() {
        let all = Collection::at(RESOURCE_SLICES);
        assert_eq!(all.query(""), RESOURCE_SLICES);
        assert_eq!(all.query("watch=true"), format!("{RESOURCE_SLICES}?watch=true"));
        let own = all.with_field("spec.nodeName", "gpu-7").with_field("spec.driver", "a,b=c\\");
        let selector = "fieldSelector=spec.nodeName%3Dgpu-7%2Cspec.driver%3Da%5C%2Cb%5C%3Dc%5C%5C";
        assert_eq!(own.query(""), format!("{RESOURCE_SLICES}?{selector}"));
        assert_eq!(own.query("watch=true"), format!("{RESOURCE_SLICES}?{selector}&watch=true"));
        assert_eq!(own.object("a/b"), format!("{RESOURCE_SLICES}/a%2Fb"));
    }
}
