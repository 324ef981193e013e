//! The registration client: registers one resource and its socket with the kubelet, in a version of
//! the API that both speak.

use super::api::negotiation::Negotiation;
use super::api::{RegisterRequest, Version};
use super::uds;
use crate::domain::ResourceName;
use std::error::Error;
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::Channel;

/// The deadline of a Register with the tries of all versions. During Register the kubelet dials our
/// socket and calls for the options. Without a deadline it would dial for ten seconds, and wait for
/// the options without end.
pub const REGISTER_DEADLINE: Duration = Duration::from_secs(2);

/// Why a Register did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// No process listens on the kubelet's socket: the kubelet is absent, or just starting.
    #[error("the kubelet's registration socket does not answer: {0}")]
    Absent(String),
    /// The kubelet answered with an error.
    #[error("the kubelet refused the registration ({code}): {message}", code = .0.code(), message = .0.message())]
    Refused(Box<Status>),
}

/// A connection to the kubelet's registration server.
#[derive(Debug)]
pub struct Registrar(Channel);

impl Registrar {
    /// Connects to the kubelet's socket.
    ///
    /// # Errors
    /// [`RegisterError::Absent`] when no process listens.
    pub async fn connect(kubelet_socket: &Path) -> Result<Self, RegisterError> {
        match tokio::time::timeout(REGISTER_DEADLINE, uds::connect(kubelet_socket)).await {
            Ok(Ok(channel)) => Ok(Registrar(channel)),
            // The transport's own message has no details; its cause is the system's error.
            Ok(Err(error)) => Err(RegisterError::Absent(
                error.source().map_or_else(|| error.to_string(), ToString::to_string),
            )),
            Err(_) => {
                Err(RegisterError::Absent(format!("no connection within {REGISTER_DEADLINE:?}")))
            }
        }
    }

    /// Registers `resource` with the socket `endpoint` (a path below the device-plugin directory),
    /// in a version of the API that the kubelet speaks. `worked` is tried first. `pre_start`
    /// requests a call before a container starts. Returns the version.
    ///
    /// # Errors
    /// [`RegisterError::Refused`] when the kubelet refuses, speaks no version that we speak, or
    /// takes longer than [`REGISTER_DEADLINE`].
    pub async fn register(
        self,
        resource: &ResourceName,
        endpoint: &str,
        pre_start: bool,
        worked: Option<Version>,
    ) -> Result<Version, RegisterError> {
        let until = Instant::now() + REGISTER_DEADLINE;
        let refused = |status| Err(RegisterError::Refused(Box::new(status)));
        let mut negotiation = Negotiation::new(worked);
        let mut refusals = Vec::new();
        while let Some(version) = negotiation.next() {
            let request = RegisterRequest {
                version,
                resource: resource.clone(),
                endpoint: endpoint.to_owned(),
                pre_start,
            };
            // The kubelet gives up at the same time as we do, so it does not register after we
            // stopped waiting.
            let within = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout_at(
                until,
                version.package().register(self.0.clone(), request, within),
            )
            .await
            {
                Ok(Ok(())) => return Ok(version),
                Ok(Err(_)) if Instant::now() >= until => {
                    return refused(Status::deadline_exceeded("no answer in time"));
                }
                // A status with a cause was made on our side: the connection broke without an
                // answer.
                Ok(Err(status)) if status.source().is_some() => {
                    return Err(RegisterError::Absent("it closed the connection".into()));
                }
                Ok(Err(status)) if negotiation.refused(version, &status) => {
                    refusals.push(format!("{}: {}", version.name(), status.message()));
                }
                Ok(Err(status)) => return refused(status),
                Err(_) => return refused(Status::deadline_exceeded("no answer in time")),
            }
        }
        refused(Status::unimplemented(format!(
            "the kubelet and Holdfast have no common version of the device-plugin API; {}",
            refusals.join("; ")
        )))
    }
}

#[cfg(test)]
mod tests;
