//! One attempt to register: is the kubelet there? Then a socket of its own, then Register.

use super::config::RegistrationConfig;
use crate::domain::ResourceName;
use crate::kubelet::api::negotiation::NegotiatedVersion;
use crate::kubelet::register::{REGISTER_DEADLINE, RegisterError, Registrar};
use crate::messages::{Bind, RegistrationNumber};
use crate::telemetry::metrics;
use actix::Message;
use std::sync::Arc;
use std::time::Duration;

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

/// The kubelet asks for the lists right after its answer, and is sent the first one at once.
const LISTS_WITHIN: Duration = Duration::from_millis(50);

/// Makes it, and reports what came of it.
pub(super) async fn attempt(
    config: RegistrationConfig,
    resource: ResourceName,
    number: RegistrationNumber,
    pre_start: bool,
    spoken: Option<NegotiatedVersion>,
    report: actix::Recipient<Attempted>,
) {
    let registering = Arc::clone(&config.registering).read_owned().await;
    let outcome = match register(&config, &resource, number, pre_start, spoken).await {
        Ok(spoken) => Outcome::Registered(spoken),
        Err(outcome) => outcome,
    };
    let is_registered = matches!(outcome, Outcome::Registered(_));
    if !matches!(outcome, Outcome::Absent(_)) {
        metrics::registered(resource.as_str(), is_registered);
    }
    // The actor may have died meanwhile; its next life registers anew.
    let _ = report.send(Attempted { resource, number, outcome }).await;
    if is_registered {
        // Offered before its lists are read, the connection would be ended with them.
        tokio::time::sleep(LISTS_WITHIN).await;
    }
    drop(registering);
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
