//! What a request is about: the collection or object of its path, and its field selector; pure.

use super::refusal::Refusal;
use serde_json::Value;

/// A kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Nodes.
    Node,
    /// Slices of devices; cluster scope.
    ResourceSlice,
    /// Claims for devices; in a namespace.
    ResourceClaim,
    /// Pods; in a namespace. Only their collection of all namespaces has a path.
    Pod,
    /// Events of core v1; in a namespace.
    Event,
}

impl Kind {
    pub(super) fn plural(self) -> &'static str {
        match self {
            Kind::Node => "nodes",
            Kind::ResourceSlice => "resourceslices",
            Kind::ResourceClaim => "resourceclaims",
            Kind::Pod => "pods",
            Kind::Event => "events",
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Node => "Node",
            Kind::ResourceSlice => "ResourceSlice",
            Kind::ResourceClaim => "ResourceClaim",
            Kind::Pod => "Pod",
            Kind::Event => "Event",
        }
    }

    pub(super) fn group(self) -> &'static str {
        if self.is_core() { "" } else { "resource.k8s.io" }
    }

    pub(super) fn api_version(self) -> &'static str {
        if self.is_core() { "v1" } else { "resource.k8s.io/v1" }
    }

    pub(super) fn is_namespaced(self) -> bool {
        matches!(self, Kind::ResourceClaim | Kind::Pod | Kind::Event)
    }

    fn is_core(self) -> bool {
        matches!(self, Kind::Node | Kind::Pod | Kind::Event)
    }

    /// The fields that a selector may name.
    fn fields(self) -> &'static [&'static str] {
        match self {
            Kind::Node => &["metadata.name", "spec.unschedulable"],
            Kind::ResourceSlice => &["metadata.name", "spec.nodeName", "spec.driver"],
            Kind::ResourceClaim => &["metadata.name", "metadata.namespace"],
            Kind::Pod => &["metadata.name", "metadata.namespace", "spec.nodeName", "status.phase"],
            Kind::Event => &["metadata.name", "metadata.namespace", "involvedObject.uid"],
        }
    }
}

/// The collection or object of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) kind: Kind,
    /// Empty for kinds of cluster scope, and for the objects of all namespaces.
    pub(super) namespace: String,
    pub(super) name: Option<String>,
    pub(super) is_status: bool,
}

impl Target {
    /// Whether its objects can be patched here: Events, and the status of a node or of a claim.
    pub(super) fn is_patched(&self) -> bool {
        self.kind == Kind::Event || self.is_status
    }

    /// `None` if the API server has no such path.
    pub(super) fn of(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let (kind, namespace, rest) = match parts.as_slice() {
            ["api", "v1", "nodes", rest @ ..] => (Kind::Node, "", rest),
            ["api", "v1", "pods"] => (Kind::Pod, "", &[][..]),
            ["api", "v1", "namespaces", namespace, "events", rest @ ..]
                if !namespace.is_empty() =>
            {
                (Kind::Event, *namespace, rest)
            }
            ["apis", "resource.k8s.io", "v1", rest @ ..] => match rest {
                ["resourceslices", rest @ ..] => (Kind::ResourceSlice, "", rest),
                ["resourceclaims"] => (Kind::ResourceClaim, "", &[][..]),
                ["namespaces", namespace, "resourceclaims", rest @ ..] if !namespace.is_empty() => {
                    (Kind::ResourceClaim, *namespace, rest)
                }
                _ => return None,
            },
            _ => return None,
        };
        let (name, is_status) = match rest {
            [] | [""] => (None, false),
            [name] => (Some(percent_decoded(name)), false),
            [name, "status"] if !matches!(kind, Kind::ResourceSlice | Kind::Event) => {
                (Some(percent_decoded(name)), true)
            }
            _ => return None,
        };
        Some(Target { kind, namespace: percent_decoded(namespace), name, is_status })
    }
}

/// The requirements of a field selector: field, whether the values must be equal, value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Selector(Vec<(String, bool, String)>);

impl Selector {
    /// Reads `a=b,c!=d` as apimachinery's `fields.ParseSelector`.
    pub(super) fn read(text: &str, kind: Kind) -> Result<Self, Refusal> {
        let mut requirements = Vec::new();
        for term in split(text).into_iter().filter(|term| !term.is_empty()) {
            let wrong = || Refusal::new(400, format!("invalid selector: '{term}'"));
            let at = term.find('=').ok_or_else(wrong)?;
            let (left, right) = (&term[..at], &term[at + 1..]);
            let (field, is_equal) = match left.strip_suffix('!') {
                Some(field) => (field, false),
                None => (left, true),
            };
            if !kind.fields().contains(&field) {
                return Err(Refusal::new(400, format!("field label not supported: {field}")));
            }
            let value = right.strip_prefix('=').unwrap_or(right);
            requirements.push((field.to_owned(), is_equal, unescaped(value)));
        }
        Ok(Selector(requirements))
    }

    pub(super) fn fits(&self, object: &Value) -> bool {
        self.0.iter().all(|(field, is_equal, value)| {
            let found = field.split('.').fold(object, |object, part| &object[part]);
            (found.as_str().unwrap_or_default() == value) == *is_equal
        })
    }

    /// The value that the selector requires of a field.
    pub(super) fn required(&self, field: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, is_equal, _)| known == field && *is_equal);
        found.map(|(_, _, value)| value.as_str())
    }
}

/// The terms between commas that are not escaped.
fn split(text: &str) -> Vec<String> {
    let (mut terms, mut is_escaped) = (vec![String::new()], false);
    for letter in text.chars() {
        if letter == ',' && !is_escaped {
            terms.push(String::new());
            continue;
        }
        is_escaped = letter == '\\' && !is_escaped;
        if let Some(term) = terms.last_mut() {
            term.push(letter);
        }
    }
    terms
}

fn unescaped(value: &str) -> String {
    let mut letters = value.chars();
    let mut plain = String::new();
    while let Some(letter) = letters.next() {
        plain.push(if letter == '\\' { letters.next().unwrap_or('\\') } else { letter });
    }
    plain
}

/// The text of a path or a query.
pub(super) fn percent_decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_are_those_of_the_api() {
        let slices = "/apis/resource.k8s.io/v1/resourceslices";
        let found = Target::of(&format!("{slices}/a%2Fb")).unwrap();
        assert_eq!((found.kind, found.name.as_deref()), (Kind::ResourceSlice, Some("a/b")));
        let claims = "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims";
        let found = Target::of(&format!("{claims}/c/status")).unwrap();
        assert_eq!((found.namespace.as_str(), found.is_status), ("n", true));
        assert_eq!(Target::of("/api/v1/nodes").unwrap().name, None);
        for path in [
            "/apis/resource.k8s.io/v1beta1/resourceslices".to_owned(),
            format!("{slices}/a/status"),
            "/api/v1/configmaps".to_owned(),
            "/api/v1/pods/p".to_owned(),
            "/apis/resource.k8s.io/v1/resourceclaims/c".to_owned(),
            String::new(),
        ] {
            assert_eq!(Target::of(&path), None, "{path}");
        }
    }

    #[test]
    fn a_selector_compares_the_fields_that_its_kind_supports() {
        let read = |text| Selector::read(text, Kind::ResourceSlice);
        let object = json!({ "spec": { "nodeName": "a,b=c\\", "driver": "d" } });
        for (text, fits) in [
            ("", true),
            ("spec.driver=d", true),
            ("spec.driver==d", true),
            ("spec.driver!=d", false),
            ("spec.nodeName=a\\,b\\=c\\\\,spec.driver=d", true),
            ("spec.nodeName=a", false),
        ] {
            assert_eq!(read(text).unwrap().fits(&object), fits, "{text}");
        }
        assert_eq!(read("spec.driver=d").unwrap().required("spec.driver"), Some("d"));
        assert_eq!(read("spec.driver!=d").unwrap().required("spec.driver"), None);
        for text in ["spec.pool.name=a", "spec.driver"] {
            assert_eq!(read(text).unwrap_err().code, 400, "{text}");
        }
    }
}
