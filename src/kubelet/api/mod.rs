//! The versions of the device-plugin API, and the only module that knows their differences.
//!
//! An [`ApiPackage`] is one package of the API on the wire, with one or more versions that Register
//! names. Each package has a file of its own that registers, serves and translates, and nothing
//! else. Every package is served on every socket, and [`negotiation`] decides which one is used
//! with a kubelet. The service behind a socket is a [`Plugin`]. It uses the domain's types. Of the
//! version that called it, a plugin knows only which fields an answer can carry
//! ([`ApiCapabilities`]).
//!
//! Another version of the API needs one more file here and one more line in [`API_PACKAGES`].

pub mod negotiation;
pub mod v1alpha;
pub mod v1beta1;

use crate::domain::{ApiCapabilities, ContainerEdits, DeviceId, Offering, ResourceName, printable};
use crate::kubelet::services::Services;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use prost::Message;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Channel, Server};
use tonic::{Request, Status};

/// Every supported package, the preferred one first.
pub const API_PACKAGES: &[&dyn ApiPackage] = &[&v1beta1::V1Beta1, &v1alpha::V1Alpha];

/// The limit of a request. It has each id of a list at most twice: as available, and as one that
/// must be included.
const REQUEST_BYTES_MAX: usize = 2 * LIST_BYTES_MAX;

/// Calls in flight on one connection. The kubelet makes a few. Further calls wait for an answer.
const CALLS_MAX: u32 = 128;

/// Bytes of the headers of a call. The kubelet sends a few hundred.
const HEADERS_BYTES_MAX: u32 = 8 << 10;

/// The limit of a list. The kubelet accepts 4 MiB in one message. With a larger one it ends the
/// stream, and registration would repeat without end.
pub(super) const LIST_BYTES_MAX: usize = 3_500_000;
/// A list of this length fits: an entry of a device with 63 NUMA nodes has some hundred bytes.
const DEVICES_FIT: usize = 4096;

/// One package of the API on the wire.
#[tonic::async_trait]
pub trait ApiPackage: fmt::Debug + Send + Sync {
    /// The versions that Register names, the newest first. They share this package's messages.
    fn versions(&self) -> &'static [&'static str];

    /// Whether its kubelets close the former connection before a new registration, and identify
    /// each connection. Then the end of an older stream is no loss, and another Register would only
    /// close the newer stream.
    fn replaces_connection_on_register(&self) -> bool;

    /// Whether its kubelets keep the annotations of an answer in their checkpoint. Then an answer
    /// without an alloc-id is not ours.
    fn keeps_annotations(&self) -> bool;

    /// Registers with the kubelet behind `channel`. The kubelet must give up after `time`.
    async fn register(
        &self,
        channel: Channel,
        request: RegisterRequest,
        time: Duration,
    ) -> Result<(), Status>;

    /// Adds the service that answers this package's calls with `plugin`.
    fn serve(&self, plugin: Arc<dyn Plugin>, services: Services) -> Services;
}

/// The content of a Register call.
#[derive(Debug, Clone)]
pub struct RegisterRequest {
    /// The version of the API.
    pub version: Version,
    /// The resource.
    pub resource: ResourceName,
    /// Its socket, a path below the device-plugin directory.
    pub endpoint: String,
    /// Whether the kubelet must call before a container starts.
    pub pre_start: bool,
}

/// One version of the API, by its name in Register.
#[derive(Clone, Copy)]
pub struct Version {
    name: &'static str,
    package: &'static dyn ApiPackage,
}

impl Version {
    /// The name that the kubelet knows.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The package of this version.
    #[must_use]
    pub fn package(self) -> &'static dyn ApiPackage {
        self.package
    }

    /// Whether both versions use the same messages and the same service.
    #[must_use]
    pub fn shares_package(self, other: Version) -> bool {
        self.package.versions() == other.package.versions()
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
    API_PACKAGES.iter().flat_map(|package| {
        package.versions().iter().map(|name| Version { name, package: *package })
    })
}

/// The service behind a socket, for every version of the API.
#[tonic::async_trait]
pub trait Plugin: fmt::Debug + Send + Sync {
    /// The complete list at once, then again after every change. Dropped when the kubelet's stream
    /// has ended.
    ///
    /// # Errors
    /// When there are too many streams already.
    fn lists(&self) -> Result<BoxStream<'static, Arc<Offering>>, Status>;

    /// The answer for each container's ids; the grants are durable before this returns (I1).
    async fn allocate(
        &self,
        containers: Vec<Vec<DeviceId>>,
        wire: ApiCapabilities,
    ) -> Result<Vec<ContainerEdits>, Status>;

    /// The ids of `available` that the plugin prefers.
    fn preferred(
        &self,
        available: Vec<DeviceId>,
        must_include: Vec<DeviceId>,
        size: usize,
    ) -> Result<Vec<DeviceId>, Status>;

    /// Whether the kubelet must call [`Plugin::pre_start`] before a container starts.
    fn needs_pre_start(&self) -> bool;

    /// Prepares these devices before a container starts with them. Does nothing unless the resource
    /// has such a hook.
    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status>;
}

/// A server for one socket, with its limits (I14).
pub fn server() -> Server {
    Server::builder()
        .max_concurrent_streams(CALLS_MAX)
        .http2_max_header_list_size(HEADERS_BYTES_MAX)
}

/// The services of all packages with one plugin, for one socket.
pub fn serve(plugin: &Arc<dyn Plugin>) -> Services {
    API_PACKAGES
        .iter()
        .fold(Services::default(), |services, package| package.serve(Arc::clone(plugin), services))
}

/// The stream of one ListAndWatch, in one package's messages.
type ListStream<M> = BoxStream<'static, Result<M, Status>>;

/// A plugin's lists as messages. A list that is too large for the kubelet is left out, so the last
/// list that was sent stays in force.
fn list_stream<M: Message + 'static>(
    plugin: &dyn Plugin,
    message: fn(&Offering) -> M,
) -> Result<ListStream<M>, Status> {
    Ok(plugin
        .lists()?
        .filter_map(move |offering| std::future::ready(within_size_limit(&offering, message)))
        .boxed())
}

/// Whether the list of a resource is longer than the kubelet accepts in one message.
#[must_use]
pub fn is_too_long(offering: &Offering) -> bool {
    offering.devices.len() > DEVICES_FIT && v1beta1::list(offering).encoded_len() > LIST_BYTES_MAX
}

/// A list as a message, if the kubelet accepts its size.
fn within_size_limit<M: Message>(
    offering: &Offering,
    message: fn(&Offering) -> M,
) -> Option<Result<M, Status>> {
    let list = message(offering);
    if list.encoded_len() > LIST_BYTES_MAX {
        tracing::error!(
            resource = %offering.spec.name, devices = offering.devices.len(),
            "the list is larger than the kubelet accepts in one message; offer fewer replicas, or \
             split the resource"
        );
        return None;
    }
    Some(Ok(list))
}

/// A request with its deadline in the header grpc-timeout.
fn with_timeout<T>(time: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time);
    request
}

/// The ids of a request.
fn ids(texts: Vec<String>) -> Vec<DeviceId> {
    texts.into_iter().map(DeviceId::new).collect()
}

/// An error for a pod's events: the message is on one line, even if an id contains line breaks.
fn on_one_line(status: Status) -> Status {
    Status::new(status.code(), printable(status.message()))
}

#[cfg(test)]
mod tests;
