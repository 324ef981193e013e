//! One attempt to register: is the kubelet there? Then a socket of its own, then Register.

use super::config::RegistrationConfig;
use crate::domain::ResourceName;
use crate::kubelet::api::negotiation::NegotiatedVersion;
use crate::kubelet::api::{self, RegisterRequest, Version};
use crate::kubelet::register::{REGISTER_DEADLINE, RegisterError, Registrar};
use crate::messages::{Bind, RegistrationNumber};
use crate::telemetry::metrics;
use actix::Message;
use futures_util::future::join_all;

/// What came of one attempt.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Attempted {
    pub(super) resource: ResourceName,
    pub(super) number: RegistrationNumber,
    pub(super) outcome: Outcome,
}

#[derive(Debug)]
pub(super) enum Outcome {
    Registered(NegotiatedVersion),
    Absent(String),
    Failed(String),
}

/// Makes it, and reports what came of it.
pub(super) async fn attempt(
    config: RegistrationConfig,
    resource: ResourceName,
    number: RegistrationNumber,
    pre_start: bool,
    spoken: Option<NegotiatedVersion>,
    report: actix::Recipient<Attempted>,
) {
    let outcome = match register(&config, &resource, number, pre_start, spoken).await {
        Ok(spoken) => Outcome::Registered(spoken),
        Err(outcome) => outcome,
    };
    if !matches!(outcome, Outcome::Absent(_)) {
        metrics::registered(resource.as_str(), matches!(outcome, Outcome::Registered(_)));
    }
    // The actor may have died meanwhile; its next life registers anew.
    let _ = report.send(Attempted { resource, number, outcome }).await;
}

/// The file of a socket that serves nothing, beside our own ones.
const MUTE: &str = ".holdfast/mute";

/// Registers resources with a socket that serves nothing. The kubelet connects, asks for the options, is told that there are
/// none, and answers with an error: up to 1.36 it has then forgotten which connection has the resource, keeps its devices
/// and its endpoint as they are, and so does nothing when the former instance's stream ends. Newer ones know connections by
/// their socket too, and do nothing in any case.
pub(super) async fn detach(config: RegistrationConfig, resources: Vec<(ResourceName, Version)>) {
    let path = config.device_plugins.join(MUTE);
    let mute = match api::serve_dummy(&path) {
        Ok(mute) => mute,
        Err(error) => return tracing::warn!(path = %path.display(), %error, "the kubelet is not detached from the former instance"),
    };
    let attempts = resources.into_iter().map(|(resource, version)| {
        let socket = config.kubelet_socket.clone();
        async move {
            let announcement = RegisterRequest { version, resource: resource.clone(), endpoint: MUTE.into(), pre_start: false };
            let registered = async { Registrar::connect(&socket).await?.try_once(announcement, REGISTER_DEADLINE).await };
            if registered.await.is_ok() {
                tracing::warn!(%resource, "the kubelet takes a socket that serves nothing");
            }
        }
    });
    join_all(attempts).await;
    drop(mute);
    drop(std::fs::remove_file(path));
}

async fn register(
    config: &RegistrationConfig,
    resource: &ResourceName,
    number: RegistrationNumber,
    pre_start: bool,
    spoken: Option<NegotiatedVersion>,
) -> Result<NegotiatedVersion, Outcome> {
    let failed = |error: RegisterError| match error {
        RegisterError::Absent(_) => Outcome::Absent(error.to_string()),
        RegisterError::Refused(_) => Outcome::Failed(error.to_string()),
    };
    let kubelet = *config.kubelet.borrow();
    let worked = spoken.and_then(|spoken| spoken.with(kubelet));
    let registrar = Registrar::connect(&config.kubelet_socket).await.map_err(failed)?;
    let bind = Bind { resource: resource.clone(), registration: number };
    let bound = config.bind.call(bind, REGISTER_DEADLINE).await.map_err(|error| Outcome::Failed(error.to_string()))?;
    let endpoint = bound.map_err(Outcome::Failed)?;
    let version = registrar.register(resource, &endpoint, pre_start, worked).await.map_err(failed)?;
    Ok(NegotiatedVersion { version, kubelet })
}
