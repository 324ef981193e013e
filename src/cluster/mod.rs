//! A client of the Kubernetes API server: credentials, one connection, lists and watches. It knows
//! nothing about devices and decides nothing.
//!
//! ```text
//!   Credentials ─ read before each connection: a token or certificate that was rotated is used
//!        │
//!        ▼
//!   Connection ─ TLS 1.3, HTTP/1.1, one request at a time
//!        │
//!        ▼
//!   Watch ─ list ─▶ watch ─▶ … ends after minutes, or silent, or 410 ─┐
//!            ▲                                                        │
//!            └──────────── Pauses: how long until the next list ◀─────┘
//! ```
//!
//! Each watch begins with a list, so a watch that missed something is corrected after minutes.
//! [`ObjectWatch`] is a watch of the metadata of one object (`PartialObjectMetadata`, apimachinery's
//! `meta/v1`). Nothing is connected, and no thread is started, until a watch is polled.
//!
//! HTTP/2 is not needed for one request at a time. Plugins of a kubeconfig that run programs
//! (`exec`) are refused: the daemon starts no program of another user's choice.

mod collection;
mod connection;
mod credentials;
mod error;
mod kubeconfig;
mod lines;
mod login;
mod metadata;
mod object_watch;
mod pauses;
mod tls;
mod watch;

#[cfg(test)]
#[cfg(feature = "lab")]
mod tests;

pub use collection::{Collection, NODES, RESOURCE_SLICES};
pub use credentials::Credentials;
pub use error::{Cause, ClusterError, Details};
pub use metadata::{List, ObjectMeta};
pub use object_watch::{ObjectWatch, Report};
pub use watch::{Watch, WatchEvent};
