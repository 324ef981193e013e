//! Pods, as grants and claims name them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A pod. Its UID distinguishes it from an earlier pod of the same name; an unknown name is `None`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// The pod's UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its name.
    pub name: Option<String>,
}

impl PodRef {
    /// Its namespace and name, if both are known.
    #[must_use]
    pub fn names(&self) -> Option<(&str, &str)> {
        self.namespace.as_deref().zip(self.name.as_deref())
    }

    /// The same, as a name of its own.
    #[must_use]
    pub fn full_name(&self) -> Option<PodName> {
        let (namespace, name) = self.names()?;
        Some(PodName { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// Whether a pod with this UID is a static one: the UID is a hash of its manifest, 32 hexadecimal
/// digits (`applyDefaults` in `pkg/kubelet/config/common.go`). One from the API server has dashes.
/// A static pod that was removed may return with its UID.
#[must_use]
pub fn is_of_static_pod(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Namespace and name of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl fmt::Display for PodRef {
    /// `namespace/name`, or the UID where the name is not known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => write!(f, "{namespace}/{name}"),
            _ => f.pad(&self.uid),
        }
    }
}
