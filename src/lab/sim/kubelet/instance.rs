//! One instance of the simulated kubelet: its memory from a start to the next stop.

use super::client::Client;
use super::core::DeviceManager;
use super::environment::Stop;
use super::interleaving::Streams;
use super::limiter::Limiter;
use super::profile::Clients;
use crate::domain::ResourceName;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// One instance of the kubelet, from a start to the next stop.
#[derive(Debug)]
pub(in crate::lab::sim) struct Instance {
    pub(super) number: u64,
    /// Empty until the checkpoint is read.
    pub(super) manager: DeviceManager<Arc<Client>>,
    pub(super) clients: Clients,
    pub(super) streams: Streams,
    /// Pods that this instance knows; the API server's first batch comes only after a delay.
    pub(super) known: BTreeSet<String>,
    /// Pods with a running worker.
    pub(super) workers: BTreeSet<String>,
    /// Pods to be admitted again, with an unchanged size.
    pub(super) resizes: VecDeque<String>,
    pub(super) tasks: Vec<Box<dyn Stop>>,
    pub(super) clients_made: u64,
    /// Clients that the kubelet has forgotten without closing them. It leaks their connections.
    pub(super) leaked: Vec<Arc<Client>>,
    pub(super) limiter: Limiter,
    /// Allocate calls under way. `allocating_since` is the start of the period without a gap
    /// between them.
    pub(super) allocating: usize,
    pub(super) allocating_since: Duration,
    /// Register calls by resource. `lists` counts lists.
    pub(super) registers: BTreeMap<String, u64>,
    pub(super) lists: BTreeMap<ResourceName, u64>,
}

impl Instance {
    /// Keeps a client's connection open until the plugin closes it.
    pub(super) fn leak(&mut self, client: Arc<Client>) {
        self.leaked.retain(|client| client.is_open());
        self.leaked.push(client);
    }

    /// The number of the next client.
    pub(super) fn number_client(&mut self) -> u64 {
        self.clients_made += 1;
        self.clients_made
    }
}
