//! The registration client: tells the kubelet of one resource and the socket that serves it.

use super::proto::v1beta1::registration_client::RegistrationClient;
use super::proto::v1beta1::{DevicePluginOptions, RegisterRequest};
use super::uds;
use crate::domain::ResourceName;
use std::error::Error;
use std::path::Path;
use std::time::Duration;
use tonic::transport::Channel;

/// The version of the API.
pub const API_VERSION: &str = "v1beta1";

/// Bounds the kubelet's dial of our socket and its call for the options, which both happen inside Register. The
/// kubelet itself would dial for ten seconds and wait for the options for ever.
pub const REGISTER_DEADLINE: Duration = Duration::from_secs(2);

/// What every resource of Holdfast tells the kubelet of itself.
#[must_use]
pub fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// Why a Register did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// Nobody listens on the kubelet's socket: the kubelet is absent, or just starting.
    #[error("the kubelet's registration socket does not answer: {0}")]
    Absent(String),
    /// The kubelet answered with an error.
    #[error("the kubelet refused the registration ({code}): {message}", code = .0.code(), message = .0.message())]
    Refused(Box<tonic::Status>),
}

/// A connection to the kubelet's registration server.
#[derive(Debug)]
pub struct Registrar(RegistrationClient<Channel>);

impl Registrar {
    /// Connects to the kubelet's socket.
    ///
    /// # Errors
    /// [`RegisterError::Absent`] when nobody listens.
    pub async fn connect(kubelet_socket: &Path) -> Result<Self, RegisterError> {
        match tokio::time::timeout(REGISTER_DEADLINE, uds::connect(kubelet_socket)).await {
            Ok(Ok(channel)) => Ok(Registrar(RegistrationClient::new(channel))),
            // The transport's own words say nothing; its cause is the system's error.
            Ok(Err(error)) => Err(RegisterError::Absent(error.source().map_or_else(|| error.to_string(), ToString::to_string))),
            Err(_) => Err(RegisterError::Absent(format!("no connection within {REGISTER_DEADLINE:?}"))),
        }
    }

    /// Registers `resource`, served on `endpoint` (a path below the device-plugin directory).
    ///
    /// # Errors
    /// [`RegisterError::Refused`] when the kubelet says no or takes longer than [`REGISTER_DEADLINE`].
    pub async fn register(mut self, resource: &ResourceName, endpoint: &str) -> Result<(), RegisterError> {
        let mut request = tonic::Request::new(RegisterRequest {
            version: API_VERSION.into(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_string(),
            options: Some(options()),
        });
        // Sent along as grpc-timeout: the kubelet gives up with us, instead of registering after we stopped waiting.
        request.set_timeout(REGISTER_DEADLINE);
        let refused = |status| RegisterError::Refused(Box::new(status));
        match tokio::time::timeout(REGISTER_DEADLINE, self.0.register(request)).await {
            Ok(Ok(_)) => Ok(()),
            // A status with a cause was made on our side: the connection broke, the kubelet said nothing.
            Ok(Err(status)) if status.source().is_some() => Err(RegisterError::Absent("it closed the connection".into())),
            Ok(Err(status)) => Err(refused(status)),
            Err(_) => Err(refused(tonic::Status::deadline_exceeded("no answer in time"))),
        }
    }
}
