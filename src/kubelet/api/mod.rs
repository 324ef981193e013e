//! The versions of the device-plugin API: the one place where they differ.
//!
//! A [`Dialect`] is one package of the API on the wire, with one or more versions that are named at Register. Each has a
//! file of its own that registers, serves and translates, and nothing else; every dialect is served on every socket, and
//! [`negotiation`] decides which one a kubelet is spoken to in. What stands behind a socket is a [`Plugin`]: it speaks the
//! domain's words and never learns which version asks, but for what its answer has room for ([`Wire`]).
//!
//! Another version of the API is one more file beside these, and one more line in [`DIALECTS`].

pub mod negotiation;
pub mod v1alpha;
pub mod v1beta1;

use crate::domain::{ContainerEdits, DeviceId, Offering, ResourceName, Wire, printable};
use crate::kubelet::services::Services;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use prost::Message;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Channel, Server};
use tonic::{Request, Status};

/// Every dialect that is spoken, the preferred one first.
pub const DIALECTS: &[&dyn Dialect] = &[&v1beta1::V1Beta1, &v1alpha::V1Alpha];

/// A request of the kubelet has each id of a list twice at most: as available, and as one that must be included.
const REQUEST_BYTES_MAX: usize = 2 * LIST_BYTES_MAX;

/// Calls in flight on one connection. The kubelet has a few; more wait for an answer of others.
const CALLS_MAX: u32 = 128;

/// Bytes of the headers of a call. The kubelet sends a few hundred.
const HEADERS_BYTES_MAX: u32 = 8 << 10;

/// The kubelet takes 4 MiB in one message, and ends the stream at more: an endless loop of registrations.
const LIST_BYTES_MAX: usize = 3_500_000;

/// One package of the API on the wire.
#[tonic::async_trait]
pub trait Dialect: fmt::Debug + Send + Sync {
    /// The versions that are named at Register, the newest first. They share this package's messages.
    fn versions(&self) -> &'static [&'static str];

    /// Whether its kubelets close the connection of the registration before a new one, and know each by identity: then the
    /// end of an older stream is no loss, and another Register would only close the next one.
    fn closes_the_former(&self) -> bool;

    /// Whether its kubelets keep the annotations of an answer in their checkpoint: then one without an alloc-id is not ours.
    fn keeps_annotations(&self) -> bool;

    /// Registers with the kubelet behind `channel`, which is to give up when the time is over.
    async fn register(&self, channel: Channel, announcement: Announcement, time: Duration) -> Result<(), Status>;

    /// Adds the service that answers this dialect's calls out of `plugin`.
    fn serve(&self, plugin: Arc<dyn Plugin>, services: Services) -> Services;
}

/// What Register says.
#[derive(Debug, Clone)]
pub struct Announcement {
    /// The version of the API.
    pub version: Version,
    /// The resource.
    pub resource: ResourceName,
    /// Its socket, a path below the device-plugin directory.
    pub endpoint: String,
    /// Whether the kubelet is to call before a container starts.
    pub pre_start: bool,
}

/// One version of the API, by the name that Register gives it.
#[derive(Clone, Copy)]
pub struct Version {
    name: &'static str,
    dialect: &'static dyn Dialect,
}

impl Version {
    /// Its name, as the kubelet knows it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// How it is spoken.
    #[must_use]
    pub fn dialect(self) -> &'static dyn Dialect {
        self.dialect
    }

    /// Whether both are spoken with the same messages, by the same service.
    #[must_use]
    pub fn shares_dialect(self, other: Version) -> bool {
        self.dialect.versions() == other.dialect.versions()
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Version {}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Every version, the preferred one first.
pub fn versions() -> impl Iterator<Item = Version> {
    DIALECTS.iter().flat_map(|dialect| dialect.versions().iter().map(|name| Version { name, dialect: *dialect }))
}

/// What stands behind a socket, whatever version of the API it is asked in.
#[tonic::async_trait]
pub trait Plugin: fmt::Debug + Send + Sync {
    /// The complete list at once, then again after every change. Dropped when the kubelet's stream has ended.
    ///
    /// # Errors
    /// When there are too many streams already.
    fn lists(&self) -> Result<BoxStream<'static, Arc<Offering>>, Status>;

    /// What each container gets for the ids that it asks for; durable before it is answered (I1).
    async fn allocate(&self, containers: Vec<Vec<DeviceId>>, wire: Wire) -> Result<Vec<ContainerEdits>, Status>;

    /// The ids of `available` that the plugin would choose.
    fn preferred(&self, available: Vec<DeviceId>, must_include: Vec<DeviceId>, size: usize) -> Result<Vec<DeviceId>, Status>;

    /// Whether the kubelet is to call [`Plugin::pre_start`] before a container starts.
    fn needs_pre_start(&self) -> bool;

    /// What is done to these devices before a container starts with them. Nothing, where that is not asked for.
    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status>;
}

/// A server for one socket, with its limits (I14).
pub fn server() -> Server {
    Server::builder().max_concurrent_streams(CALLS_MAX).http2_max_header_list_size(HEADERS_BYTES_MAX)
}

/// Every dialect's service over one plugin, for one socket.
pub fn serve(plugin: &Arc<dyn Plugin>) -> Services {
    DIALECTS.iter().fold(Services::default(), |services, dialect| dialect.serve(Arc::clone(plugin), services))
}

/// The stream of one ListAndWatch, in one dialect's messages.
type Listing<M> = BoxStream<'static, Result<M, Status>>;

/// A plugin's lists as messages. One that the kubelet would not take is left out: what was sent last stays true for it.
fn listing<M: Message + 'static>(plugin: &dyn Plugin, message: fn(&Offering) -> M) -> Result<Listing<M>, Status> {
    Ok(plugin.lists()?.filter_map(move |offering| std::future::ready(fitting(&offering, message))).boxed())
}

/// A list, if the kubelet takes it.
fn fitting<M: Message>(offering: &Offering, message: fn(&Offering) -> M) -> Option<Result<M, Status>> {
    let list = message(offering);
    if list.encoded_len() > LIST_BYTES_MAX {
        tracing::error!(
            resource = %offering.spec.name, devices = offering.devices.len(),
            "the list is larger than the kubelet takes in one message; offer fewer replicas, or split the resource"
        );
        return None;
    }
    Some(Ok(list))
}

/// A request whose deadline is sent along, as grpc-timeout.
fn within<T>(time: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time);
    request
}

/// Ids as the API carries them.
fn ids(texts: Vec<String>) -> Vec<DeviceId> {
    texts.into_iter().map(DeviceId::new).collect()
}

/// An error as the kubelet shows it in a pod's events: on one line, whatever ids it names.
fn legible(status: Status) -> Status {
    Status::new(status.code(), printable(status.message()))
}

#[cfg(test)]
mod tests;
