//! Why the API server could not be used.

use std::time::Duration;

/// Why the API server could not be used. Each message names the remedy, if there is one.
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
    #[error("the API server answered {code}: {message}{}", remedy(*.code))]
    Refused {
        /// The status code of HTTP.
        code: u16,
        /// Its message.
        message: String,
        /// How long it wants to be left alone: the header `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// The version at which the watch should begin, or continue, is no longer available (410).
    #[error("the API server no longer has the changes since the last answer")]
    Expired,
    /// The answer is not the requested one.
    #[error("the API server's answer cannot be read: {0}")]
    Unreadable(String),
}

impl ClusterError {
    /// How long the API server wants to be left alone.
    #[must_use]
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            ClusterError::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

fn remedy(code: u16) -> &'static str {
    match code {
        401 => "; the token or the certificate is not valid there",
        403 => "; grant get, list and watch of nodes (docs/install.md)",
        _ => "",
    }
}
