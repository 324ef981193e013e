//! A client of the Kubernetes API server: credentials, requests for objects, lists and watches. It
//! knows nothing about devices and decides nothing.
//!
//! ```text
//!   Credentials ─ read before each connection: a token or certificate that was rotated is used
//!        │
//!        ▼
//!   Connection ─ TLS 1.3, HTTP/1.1, one request at a time
//!        │
//!        ▼
//!   Client ─ get, list, create, replace, patch, delete: a connection that is kept while it is used
//!
//!   Watch ─ list ─▶ watch ─▶ … ends after minutes, or silent, or 410 ─┐
//!            ▲                                                        │
//!            └──────────── Pauses: how long until the next list ◀─────┘
//! ```
//!
//! Each watch begins with a list, so a watch that missed something is corrected after minutes.
//! [`ObjectWatch`] is a watch of the metadata of one object (`PartialObjectMetadata` of
//! apimachinery's `meta/v1`). Nothing is connected, and no thread is started, before the first
//! request, and until a watch is polled.
//!
//! HTTP/2 is not needed for one request at a time. Plugins of a kubeconfig that run programs
//! (`exec`) are refused: the daemon starts no program of another user's choice.

mod client;
mod collection;
mod connection;
mod credentials;
mod error;
mod kubeconfig;
mod lines;
mod login;
mod metadata;
mod object_watch;
mod objects;
mod pauses;
mod requests;
mod tls;
mod watch;

#[cfg(test)]
#[cfg(feature = "lab")]
mod tests;

pub use client::Client;
pub use collection::{Collection, NODES, PODS, RESOURCE_SLICES};
pub use credentials::Credentials;
pub use error::{Cause, ClusterError, Details};
pub use metadata::{List, ObjectMeta};
pub use object_watch::{ObjectWatch, Report};
pub use objects::{
    AllocatedDevices, Allocation, ClaimStatus, Condition, Consumer, DeviceConfig, DeviceResult,
    DeviceStatus, NetworkData, Node, NodeInfo, NodeStatus, OpaqueConfig, ResourceClaim, UserInfo,
};
pub use watch::{Watch, WatchEvent};
