//! The answers to requests that fail: `Status` of apimachinery's `meta/v1`; pure.

use serde_json::{Value, json};

/// One cause of an answer 422.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cause {
    pub(super) reason: &'static str,
    pub(super) field: String,
    pub(super) message: String,
}

/// An answer to a request that fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// The plural of the kind, and the name of the object; both empty if it is about none.
    pub(super) object: (&'static str, String),
    pub(super) causes: Vec<Cause>,
    /// In seconds.
    pub(super) retry_after: Option<u32>,
}

impl Refusal {
    pub(super) fn new(code: u16, message: impl Into<String>) -> Self {
        let reason = match code {
            400 => "BadRequest",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "NotFound",
            405 => "MethodNotAllowed",
            409 => "Conflict",
            413 => "RequestEntityTooLarge",
            415 => "UnsupportedMediaType",
            422 => "Invalid",
            429 => "TooManyRequests",
            503 => "ServiceUnavailable",
            _ => "InternalError",
        };
        Refusal {
            code,
            reason,
            message: message.into(),
            object: ("", String::new()),
            causes: Vec::new(),
            retry_after: None,
        }
    }

    /// The same about an object.
    pub(super) fn of(mut self, plural: &'static str, name: &str) -> Self {
        self.object = (plural, name.to_owned());
        self
    }

    pub(super) fn not_found(plural: &'static str, name: &str) -> Self {
        Refusal::new(404, format!("{plural} \"{name}\" not found")).of(plural, name)
    }

    pub(super) fn exists(plural: &'static str, name: &str) -> Self {
        let mut refusal = Refusal::new(409, format!("{plural} \"{name}\" already exists"));
        refusal.reason = "AlreadyExists";
        refusal.of(plural, name)
    }

    pub(super) fn conflict(plural: &'static str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {plural} \"{name}\": {why}");
        Refusal::new(409, message).of(plural, name)
    }

    pub(super) fn invalid(plural: &'static str, name: &str, causes: Vec<Cause>) -> Self {
        let texts = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message));
        let texts = texts.collect::<Vec<_>>().join(", ");
        let message = format!("{plural} \"{name}\" is invalid: [{texts}]");
        let refusal = Refusal::new(422, message).of(plural, name);
        Refusal { causes, ..refusal }
    }

    /// The body of the answer.
    pub(super) fn status(&self) -> Value {
        let mut details = json!({});
        if !self.object.0.is_empty() {
            details["kind"] = self.object.0.into();
        }
        if !self.object.1.is_empty() {
            details["name"] = self.object.1.as_str().into();
        }
        if let Some(seconds) = self.retry_after {
            details["retryAfterSeconds"] = seconds.into();
        }
        if !self.causes.is_empty() {
            let cause = |cause: &Cause| json!({ "reason": cause.reason, "message": cause.message, "field": cause.field });
            details["causes"] = self.causes.iter().map(cause).collect();
        }
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code, "details": details,
        })
    }
}
