//! A simulated Kubernetes API server for tests: nodes with their conditions, slices, claims and
//! Events, lists and watches, and what goes wrong with them.
//!
//! It speaks HTTP/1.1 on an address of this machine, without TLS. Objects are JSON. It has the
//! rules of a real one for versions and preconditions, for the content of a `ResourceSlice`, for
//! for the status of a claim's devices, for the fields behind feature gates, and for who may do
//! what. The rules are written independently of
//! the code of the daemon, so that each is a test of the other.
//!
//! ```text
//!   http ─▶ requests: user, rights (access), path and selector (target)
//!                │
//!                ▼
//!            store: versions, history ─▶ events of the open watches
//!                │
//!                ▼
//!            slices (schema, names), patch, claim_status: 422;  profile: dropped fields
//! ```

mod access;
mod claim_status;
mod http;
mod names;
mod patch;
mod profile;
mod refusal;
mod requests;
mod reviews;
mod schema;
mod slices;
mod state;
mod store;
mod target;

pub use access::User;
pub use http::Request;
pub use profile::Profile;
pub use state::Fault;
pub use target::Kind;

use requests::Shared;
use serde_json::{Value, json};
use state::{Sent, State};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use target::Selector;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinSet;

/// The events that a watch may be behind.
const BEHIND_MAX: usize = 1024;

/// The counts of requests that were answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Lists.
    pub lists: usize,
    /// Watches that were opened.
    pub watches: usize,
    /// Writes that were done.
    pub writes: usize,
    /// Requests that were refused.
    pub refused: usize,
}

/// The counts of connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Connections {
    /// Since the start.
    pub all: usize,
    /// Now.
    pub open: usize,
}

/// The API server. Its connections break when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    shared: Shared,
    _tasks: JoinSet<()>,
}

impl ApiServer {
    /// Starts with a node of this name and these labels. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the system has no port for it.
    pub async fn start(name: &str, labels: &[(&str, &str)]) -> io::Result<Self> {
        Self::start_at("127.0.0.1:0".parse().map_err(io::Error::other)?, name, labels).await
    }

    /// The same at an address, such as that of a former one.
    ///
    /// # Errors
    /// When the address is in use.
    pub async fn start_at(
        address: SocketAddr,
        name: &str,
        labels: &[(&str, &str)],
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let shared = Shared {
            state: Arc::new(State::new(name).into()),
            sent: broadcast::Sender::new(BEHIND_MAX),
            served: watch::Sender::default(),
            connections: watch::Sender::default(),
        };
        let serving = shared.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = serving.clone();
                connections.spawn(async move { drop(shared.serve(stream).await) });
            }
        });
        let server = ApiServer { address, shared, _tasks: tasks };
        server.set_labels(labels);
        Ok(server)
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Writes a kubeconfig for it, with the token in a file next to it: `kubeconfig`, `token`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn kubeconfig(&self, folder: &Path, token: &str) -> io::Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "sim",
            "contexts": [{ "name": "sim", "context": { "cluster": "sim", "user": "sim" } }],
            "clusters": [{ "name": "sim", "cluster": { "server": format!("http://{}", self.address) } }],
            "users": [{ "name": "sim", "user": { "tokenFile": "token" } }],
        });
        std::fs::write(folder.join("token"), token)?;
        let file = folder.join("kubeconfig");
        std::fs::write(&file, config.to_string())?;
        Ok(file)
    }

    /// Gives the node these labels only. Creates the node if it does not exist.
    pub fn set_labels(&self, labels: &[(&str, &str)]) {
        let labels: serde_json::Map<String, Value> =
            labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
        self.change_node(|node| node["metadata"]["labels"] = labels.into());
    }

    /// Gives the node what its kubelet has read on its machine: the boot id and the machine id.
    pub fn set_node_info(&self, boot: &str, machine: &str) {
        let info = json!({ "bootID": boot, "machineID": machine });
        self.change_node(|node| node["status"]["nodeInfo"] = info);
    }

    /// Removes the node.
    pub fn delete_node(&self) {
        let name = self.lock().node.clone();
        self.remove(Kind::Node, "", &name);
    }

    fn change_node(&self, change: impl FnOnce(&mut Value)) {
        let mut state = self.lock();
        let name = state.node.clone();
        let known = state.store.get(Kind::Node, "", &name).cloned();
        let mut node = known.unwrap_or_else(|| json!({ "metadata": { "name": name } }));
        change(&mut node);
        state.store.put(Kind::Node, node);
        self.shared.publish(&mut state);
    }

    /// Stores an object as the control plane does, without rules: a claim with its allocation, or a
    /// slice of another driver. Its name and namespace are in its metadata. Returns what is stored.
    pub fn put(&self, kind: Kind, object: Value) -> Value {
        let mut state = self.lock();
        let stored = state.store.put(kind, object);
        self.shared.publish(&mut state);
        stored
    }

    /// Removes an object, as the control plane does. Returns whether it existed.
    pub fn remove(&self, kind: Kind, namespace: &str, name: &str) -> bool {
        let mut state = self.lock();
        let removed = state.store.remove(kind, namespace, name);
        self.shared.publish(&mut state);
        removed.is_some()
    }

    /// The object of this name.
    #[must_use]
    pub fn object(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.lock().store.get(kind, namespace, name).cloned()
    }

    /// All objects of a kind.
    #[must_use]
    pub fn objects(&self, kind: Kind) -> Vec<Value> {
        self.lock().store.list(kind, "", &Selector::default())
    }

    /// Deletes the slices of a node, as its kubelet does at its start; those of one driver only, as
    /// it does after the driver was away. Returns how many.
    pub fn wipe(&self, node: &str, driver: Option<&str>) -> usize {
        let driver = driver.map(|driver| format!(",spec.driver={driver}")).unwrap_or_default();
        let text = format!("spec.nodeName={node}{driver}");
        let selector = Selector::read(&text, Kind::ResourceSlice).unwrap_or_default();
        let mut state = self.lock();
        let deleted = state.store.delete_all(Kind::ResourceSlice, "", &selector);
        self.shared.publish(&mut state);
        deleted
    }

    /// Makes this token, or a request without one, that of a user. As soon as one user is known,
    /// every other token is refused with 401; before that every request is an administrator's.
    pub fn add_user(&self, token: Option<&str>, user: User) {
        self.lock().users.insert(token.map(str::to_owned), user);
    }

    /// Binds a pod with this claim to a node: the node's kubelet may read the claim.
    pub fn bind_claim(&self, node: &str, namespace: &str, name: &str) {
        let claim = (node.to_owned(), namespace.to_owned(), name.to_owned());
        self.lock().bound.insert(claim);
    }

    /// The version of Kubernetes, from now on.
    pub fn set_profile(&self, profile: Profile) {
        self.lock().profile = profile;
    }

    /// Asks this function before each request is answered. It replaces the former one.
    pub fn on_request(&self, decide: impl FnMut(&Request) -> Option<Fault> + Send + 'static) {
        self.lock().faults.set(decide);
    }

    /// The requests so far: `GET /api/v1/nodes`. Watches are `WATCH`.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.lock().requests.clone()
    }

    /// Sends a bookmark to the open watches: a version without a change.
    pub fn bookmark(&self) {
        let version = self.lock().store.version();
        self.send(Sent::Bookmark(version));
    }

    /// Forgets all changes so far, and ends the open watches with 410.
    pub fn expire(&self) {
        {
            let mut state = self.lock();
            state.store.expire();
            state.published = state.store.version();
        }
        self.send(Sent::Expired);
        self.send(Sent::End);
    }

    /// Ends the open watches as at their time limit.
    pub fn end_watches(&self) {
        self.send(Sent::End);
    }

    /// Breaks the connections of the open watches.
    pub fn disconnect(&self) {
        self.send(Sent::Break);
    }

    /// Whether open watches receive nothing: their connections stay open.
    pub fn silence(&self, is_silent: bool) {
        self.lock().is_silent = is_silent;
    }

    /// Requires this token from now on.
    pub fn require_token(&self, token: &str) {
        self.lock().token = Some(token.to_owned());
    }

    /// Refuses every request with this code, and this header `Retry-After` in seconds. `None`
    /// answers again.
    pub fn refuse(&self, refusal: Option<(u16, Option<u32>)>) {
        self.lock().refusal = refusal;
    }

    /// The counts of requests.
    #[must_use]
    pub fn served(&self) -> watch::Receiver<Served> {
        self.shared.served.subscribe()
    }

    /// The counts of connections.
    #[must_use]
    pub fn connections(&self) -> watch::Receiver<Connections> {
        self.shared.connections.subscribe()
    }

    fn send(&self, sent: Sent) {
        let state = self.lock();
        self.shared.send(&state, sent);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }
}

#[cfg(test)]
mod tests;
