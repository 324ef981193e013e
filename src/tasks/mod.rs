//! The background tasks: what the daemon does next to the actors, each in one tokio task.
//!
//! | task | what it does |
//! | --- | --- |
//! | `watcher` | turns inotify events and uevents into messages |
//! | `kernel_log` | reads driver errors (Xid) from the kernel log |
//! | `xid_events` | takes these errors from NVML's events where that log cannot be read |
//! | `nvml` | queries NVML, and never blocks discovery |
//! | `mps` | runs the control daemons of NVIDIA's MPS |
//! | `hooks` | runs the hooks after release |
//! | `checks` | runs the check commands of resources |
//! | `spec_files` | writes CDI files and device-info files |
//! | `dra` | answers the kubelet's calls about claims, and publishes the devices for claims |
//! | `api_labels` | keeps a copy of the labels that the node has in the API server |
//! | `reporting` | writes Events and the condition of the node |
//! | `node_labels` | writes the node's labels for Node Feature Discovery |
//!
//! `rescans` limits the rate of scans for `watcher`, `config_links` finds a replaced configuration,
//! and `label_file` other labels of the node.
//!
//! A task knows the mailboxes that it sends to and the snapshots that it reads. `app` starts each
//! one and aborts it at the end of the daemon.

#[cfg(feature = "cluster")]
pub(crate) mod api_labels;
pub(crate) mod checks;
pub(crate) mod config_links;
#[cfg(feature = "cluster")]
pub(crate) mod dra;
pub(crate) mod hooks;
pub(crate) mod kernel_log;
pub(crate) mod label_file;
pub(crate) mod mps;
pub(crate) mod node_labels;
pub(crate) mod nvml;
#[cfg(feature = "cluster")]
pub(crate) mod reporting;
mod rescans;
pub(crate) mod spec_files;
pub(crate) mod watcher;
pub(crate) mod xid_events;
