//! Differences between kubelet versions: how each keeps its clients, and which client the end of a
//! stream disconnects.

use super::client::Client;
use crate::domain::ResourceName;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The behaviour of a range of kubelet versions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// 1.9: the API before v1beta1, in version v1alpha2. Its registration is that of
    /// [`Profile::K110`], without options, and a new endpoint closes the connection of the previous
    /// one. The real one has no pod-resources API, drops annotations and writes its checkpoint in
    /// another format. This one has v1alpha1, as kubelets from 1.13 on. It keeps annotations, as
    /// later kubelets do, and writes the checkpoint of 1.20.
    K19,
    /// 1.10 to 1.24: Register is answered first and dials afterwards, so the plugin learns of no
    /// failure. The options are those of the request. The end of a stream stops only its own
    /// endpoint.
    K110,
    /// 1.25 to 1.36: clients are known by the resource's name alone, and the late end of an old
    /// stream disconnects the new client (kubernetes#121994).
    #[default]
    K125,
    /// 1.37 and newer: clients are known by resource and socket; a second Register of a socket in
    /// use is an error (kubernetes#135437).
    K137,
    /// Like [`Profile::K137`], but a second Register of a socket in use is a success without effect
    /// (kubernetes#139765).
    K137Dedupe,
}

impl Profile {
    /// Whether it speaks `deviceplugin` and v1alpha1, and neither v1beta1 nor v1.
    #[must_use]
    pub fn is_alpha(self) -> bool {
        self == Profile::K19
    }

    /// The version that Register has to name, and its form in a refusal: a list in the versions
    /// that have a list.
    pub(super) fn version(self) -> (&'static str, &'static str) {
        if self.is_alpha() { ("v1alpha2", r#""v1alpha2""#) } else { ("v1beta1", r#"["v1beta1"]"#) }
    }

    /// Whether Register is answered before the plugin is dialled.
    #[must_use]
    pub fn answers_first(self) -> bool {
        matches!(self, Profile::K19 | Profile::K110)
    }

    /// Whether the pod-resources API has GetAllocatableResources and Get. Real kubelets have the
    /// former since 1.23, and the latter switched on since 1.34; here the profiles up to 1.24 lack
    /// both.
    #[must_use]
    pub fn has_allocatable(self) -> bool {
        !self.answers_first()
    }

    /// Whether a new endpoint closes the connection of the previous one.
    pub(super) fn closes_previous_connection(self) -> bool {
        self == Profile::K19
    }

    /// Whether clients are known by their sockets too.
    #[must_use]
    pub fn knows_sockets(self) -> bool {
        matches!(self, Profile::K137 | Profile::K137Dedupe)
    }
}

/// The clients that the kubelet believes to be connected. Here it confuses a new client with an old
/// one.
#[derive(Debug)]
pub(super) struct Clients {
    profile: Profile,
    /// At most one for each resource where clients are known by name alone.
    by_name: BTreeMap<ResourceName, Vec<Arc<Client>>>,
}

impl Clients {
    pub(super) fn new(profile: Profile) -> Self {
        Clients { profile, by_name: BTreeMap::new() }
    }

    /// A Register begins. Returns the clients that are forgotten for it.
    pub(super) fn add(&mut self, client: Arc<Client>) -> Vec<Arc<Client>> {
        let present = self.by_name.entry(client.resource.clone()).or_default();
        let forgotten =
            if self.profile.knows_sockets() { Vec::new() } else { std::mem::take(present) };
        present.push(client);
        forgotten
    }

    /// A Register failed. Returns the client that is forgotten for it, which can be another client.
    pub(super) fn failed(&mut self, client: &Client) -> Option<Arc<Client>> {
        let present = self.by_name.get_mut(&client.resource)?;
        let index = if self.profile.knows_sockets() {
            present.iter().rposition(|other| other.number == client.number)?
        } else {
            present.len().checked_sub(1)?
        };
        Some(present.remove(index))
    }

    /// A stream of the client ended. Returns the client that is disconnected for it, which can be
    /// another client.
    pub(super) fn ended(&mut self, client: &Client) -> Option<Arc<Client>> {
        let present = self.by_name.get_mut(&client.resource)?;
        let index = if self.profile.knows_sockets() {
            present.iter().position(|other| other.socket == client.socket)?
        } else {
            present.len().checked_sub(1)?
        };
        Some(present.remove(index))
    }

    /// Another client on the same socket, in versions that know sockets.
    pub(super) fn duplicate(&self, client: &Client) -> Option<&Arc<Client>> {
        let others = self.by_name.get(&client.resource).filter(|_| self.profile.knows_sockets())?;
        others.iter().find(|other| other.socket == client.socket && other.number != client.number)
    }

    /// The newest client of a resource.
    pub(super) fn newest(&self, resource: &ResourceName) -> Option<&Arc<Client>> {
        self.by_name.get(resource)?.last()
    }

    /// Whether the end of a client's stream will stop its endpoint. Before 1.25 this does not
    /// depend on the map of clients.
    pub(super) fn tracks(&self, client: &Client) -> bool {
        self.profile.answers_first() || self.has(client)
    }

    /// Whether a client is known.
    pub(super) fn has(&self, client: &Client) -> bool {
        self.by_name
            .get(&client.resource)
            .is_some_and(|present| present.iter().any(|other| other.number == client.number))
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_name.values().all(Vec::is_empty)
    }
}
