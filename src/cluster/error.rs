//! Why the API server could not be used.

use super::collection::PODS;
use serde::Deserialize;
use std::time::Duration;

/// The longest pause that the API server may request.
pub(super) const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// Why the API server could not be used. Each message names the remedy, if there is one.
///
/// A request that failed with `Credentials`, `Connect` or `Refused` has changed nothing. After
/// `Silent`, `Broken` and `Unreadable`, the API server may have done it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// There are no usable credentials.
    #[error("no credentials for the API server: {0}")]
    Credentials(String),
    /// No connection.
    #[error("cannot connect to the API server at {server}: {why}")]
    Connect {
        /// Its address.
        server: String,
        /// The system's or TLS's error.
        why: String,
    },
    /// It took too long.
    #[error("the API server at {server} has not answered for {} s", .after.as_secs())]
    Silent {
        /// Its address.
        server: String,
        /// How long.
        after: Duration,
    },
    /// The connection ended too early, or the answer is not HTTP.
    #[error("the connection to the API server at {server} failed: {why}")]
    Broken {
        /// Its address.
        server: String,
        /// The error.
        why: String,
    },
    /// The API server refused the request (`Status` of apimachinery's `meta/v1`).
    #[error("the API server answered {code}: {message}{}", remedy(*.code, &.details.path, .message))]
    Refused {
        /// The status code of HTTP.
        code: u16,
        /// Its message.
        message: String,
        /// How long it wants to be left alone: the header `Retry-After`.
        retry_after: Option<Duration>,
        /// What programs read.
        details: Box<Details>,
    },
    /// The version at which the watch should begin, or continue, is no longer available (410).
    #[error("the API server no longer has the changes since the last answer")]
    Expired,
    /// The answer is not the requested one.
    #[error("the API server's answer cannot be read: {0}")]
    Unreadable(String),
}

/// The parts of a refusal that programs read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details {
    /// The path of the request, without its query.
    pub path: String,
    /// The reason in one word: `AlreadyExists`, `Conflict`, `Invalid`, `Forbidden`, … Empty if a
    /// proxy has answered.
    pub reason: String,
    /// The name of the object, if the refusal is about one object.
    pub object: String,
    /// The causes of an answer 422.
    pub causes: Vec<Cause>,
}

impl Details {
    /// Whether the right to write the status of a claim's devices for this driver is missing. The
    /// strategy of claims checks it (`AuthorizedForDeviceStatus`, Kubernetes 1.36), so the answer
    /// is 422.
    fn is_of_driver(&self) -> bool {
        let is_it = |it: &Cause| it.reason == "FieldValueForbidden" && it.field == "status.devices";
        is_claim_status(&self.path) && self.causes.iter().any(is_it)
    }
}

/// One cause of a refusal (`StatusCause` of apimachinery's `meta/v1`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Cause {
    /// `FieldValueInvalid`, `FieldValueTooMany`, …
    pub reason: String,
    /// For people.
    pub message: String,
    /// The path of the field: `spec.devices[3].attributes[model].string`.
    pub field: String,
}

impl ClusterError {
    /// How long the API server wants to be left alone, at most 10 minutes: a proxy may ask for a
    /// day.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            ClusterError::Refused { retry_after, .. } => {
                retry_after.map(|pause| pause.min(RETRY_AFTER_MAX))
            }
            _ => None,
        }
    }

    /// The status code of HTTP, if the API server has refused the request.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match self {
            ClusterError::Refused { code, .. } => Some(*code),
            ClusterError::Expired => Some(410),
            _ => None,
        }
    }

    /// The reason, the object and the causes, if the API server has refused the request.
    #[must_use]
    pub fn details(&self) -> Option<&Details> {
        match self {
            ClusterError::Refused { details, .. } => Some(details),
            _ => None,
        }
    }

    /// Why, in one word: for metrics.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            ClusterError::Credentials(_) => "credentials",
            ClusterError::Connect { .. } => "connect",
            ClusterError::Silent { .. } => "silent",
            ClusterError::Broken { .. } => "broken",
            ClusterError::Refused { .. } => "refused",
            ClusterError::Expired => "expired",
            ClusterError::Unreadable(_) => "unreadable",
        }
    }

    /// The result of a write that has failed, in one word: for metrics.
    #[must_use]
    pub fn result(&self) -> &'static str {
        match self.code() {
            Some(_) if self.is_of_policy() => "policy",
            Some(_) if self.is_missing_right() => "forbidden",
            Some(401 | 403) => "forbidden",
            Some(404) => "not_found",
            Some(409) => "conflict",
            Some(422) => "invalid",
            Some(429) => "throttled",
            _ => "error",
        }
    }

    /// Whether an admission policy has denied the request. The identity has the right then.
    #[must_use]
    pub fn is_of_policy(&self) -> bool {
        matches!(self, ClusterError::Refused { code, message, .. } if is_denial(*code, message))
    }

    /// Whether a right is missing. A quota, a namespace that is being deleted and admission
    /// policies are answered with 403 too: only the authorizers' message names what the user
    /// `cannot` do (apiserver's `handlers/responsewriters.forbiddenMessage`).
    #[must_use]
    pub fn is_missing_right(&self) -> bool {
        let is_right = |details: &Details| details.reason == "Forbidden";
        if self.details().is_some_and(Details::is_of_driver) {
            return true;
        }
        self.code() == Some(403)
            && self.details().is_some_and(is_right)
            && !self.is_of_policy()
            && matches!(self, ClusterError::Refused { message, .. } if message.contains(CANNOT))
    }

    /// Whether the API server reports that the object does not exist. An answer 404 of a proxy, or
    /// of an API server that does not serve this version of the API, is none of these: it has no
    /// object's name.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        let is_of_object =
            |details: &Details| details.reason == "NotFound" && !details.object.is_empty();
        self.code() == Some(404) && self.details().is_some_and(is_of_object)
    }
}

/// The word of the authorizers' refusals: `User "…" cannot create resource "events" …`.
const CANNOT: &str = " cannot ";

/// Whether a policy has denied the request: `… is forbidden: ValidatingAdmissionPolicy 'P' with
/// binding 'B' denied request: …` (apiserver's `admission/plugin/policy/validating`). The code is
/// that of the policy's `reason`: 422 without one.
fn is_denial(code: u16, message: &str) -> bool {
    let rest = message.split_once("ValidatingAdmissionPolicy '").map(|(_, rest)| rest);
    matches!(code, 401 | 403 | 413 | 422)
        && rest.is_some_and(|rest| rest.contains("' denied request"))
}

/// Whether the path is that of the status of a claim.
fn is_claim_status(path: &str) -> bool {
    path.contains("/resourceclaims/") && path.ends_with("/status")
}

fn remedy(code: u16, path: &str, message: &str) -> &'static str {
    let is_node_status = path.starts_with("/api/v1/nodes/") && path.ends_with("/status");
    let is_right = message.contains(CANNOT);
    match code {
        _ if is_denial(code, message) && path.contains("/resourceslices") => {
            "; a right is not missing: this admission policy denies the write. That of Holdfast \
             permits slices of its driver on the node of the pod's token, which Kubernetes 1.32 and \
             newer add (docs/dra.md)"
        }
        _ if is_denial(code, message) && is_claim_status(path) => {
            "; a right is not missing: this admission policy denies the write. That of Holdfast \
             permits entries of its driver in claims of the node of the pod's token, which \
             Kubernetes 1.32 and newer add (docs/dra.md)"
        }
        _ if is_denial(code, message) => {
            "; a right is not missing: this admission policy denies it"
        }
        401 => "; the token or the certificate is not valid there",
        403 if path.contains("/resourceslices") => {
            "; grant list, watch, create, update and delete of resourceslices"
        }
        403 if path.contains("/events") && is_right => {
            "; grant create and patch of events (docs/install.md)"
        }
        403 if is_node_status && is_right => "; grant patch of nodes/status (docs/install.md)",
        403 if path.contains("/events") || is_node_status => "",
        403 if is_claim_status(path) => "; grant patch of resourceclaims/status (docs/dra.md)",
        422 if is_claim_status(path) && message.contains("resourceclaims/driver") => {
            "; grant associated-node:patch of resourceclaims/driver for holdfast.dev (docs/dra.md)"
        }
        403 if path.contains("/resourceclaims") => "; grant get of resourceclaims",
        403 if path.ends_with("/tokenreviews") || path.ends_with("/subjectaccessreviews") => {
            "; grant create of tokenreviews and subjectaccessreviews (docs/install.md)"
        }
        403 if path == PODS => {
            "; a kubelet may list the pods of its own node: NODE_NAME must be its name in the cluster"
        }
        403 if path.starts_with("/api/v1/nodes/") => "; grant get of nodes (docs/dra.md)",
        403 => "; grant list and watch of nodes (docs/install.md)",
        404 if path.starts_with("/apis/resource.k8s.io/v1/") => {
            "; resource.k8s.io/v1 needs Kubernetes 1.34"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_right_that_its_request_needs() {
        for (path, wanted) in [
            ("/api/v1/nodes", "grant list and watch of nodes"),
            ("/api/v1/nodes/gpu-7", "grant get of nodes"),
            ("/api/v1/pods", "a kubelet may list the pods of its own node"),
        ] {
            let details = Box::new(Details { path: path.into(), ..Details::default() });
            let (message, retry_after) = ("forbidden".into(), None);
            let error = ClusterError::Refused { code: 403, message, retry_after, details };
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }

    #[test]
    fn a_pause_that_is_asked_for_has_a_limit() {
        for (asked, pause) in [(1, 1), (86_400, 600), (u64::MAX, 600)] {
            let error = ClusterError::Refused {
                code: 503,
                message: String::new(),
                retry_after: Some(Duration::from_secs(asked)),
                details: Box::default(),
            };
            assert_eq!(error.retry_after(), Some(Duration::from_secs(pause)));
        }
    }
}
