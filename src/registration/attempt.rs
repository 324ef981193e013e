//! One attempt to register: connect to the kubelet, bind a new socket, call Register.

use super::config::RegistrationConfig;
use crate::domain::ResourceName;
use crate::kubelet::api::negotiation::NegotiatedVersion;
use crate::kubelet::register::{REGISTER_DEADLINE, RegisterError, Registrar};
use crate::messages::{Bind, RegistrationNumber};
use crate::telemetry::metrics;
use actix::Message;
use std::sync::Arc;
use std::time::Duration;

/// The result of one attempt.
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

/// The kubelet requests the lists right after its answer, and gets the first one at once.
const LISTS_WITHIN: Duration = Duration::from_millis(50);

/// Makes an attempt, and reports the result.
pub(super) async fn attempt(
    config: RegistrationConfig,
    resource: ResourceName,
    number: RegistrationNumber,
    pre_start: bool,
    negotiated: Option<NegotiatedVersion>,
    report: actix::Recipient<Attempted>,
) {
    let registering = Arc::clone(&config.registering).read_owned().await;
    let outcome = match register(&config, &resource, number, pre_start, negotiated).await {
        Ok(negotiated) => Outcome::Registered(negotiated),
        Err(outcome) => outcome,
    };
    let is_registered = matches!(outcome, Outcome::Registered(_));
    if !matches!(outcome, Outcome::Absent(_)) {
        metrics::registered(resource.as_str(), is_registered);
    }
    // The actor may have died. Its next life registers again.
    let _ = report.send(Attempted { resource, number, outcome }).await;
    if is_registered {
        // An offer before the ListAndWatch call would not contain its stream id, and the new
        // instance would end the stream.
        tokio::time::sleep(LISTS_WITHIN).await;
    }
    drop(registering);
}

async fn register(
    config: &RegistrationConfig,
    resource: &ResourceName,
    number: RegistrationNumber,
    pre_start: bool,
    negotiated: Option<NegotiatedVersion>,
) -> Result<NegotiatedVersion, Outcome> {
    let failed = |error: RegisterError| match error {
        RegisterError::Absent(_) => Outcome::Absent(error.to_string()),
        RegisterError::Refused(_) => Outcome::Failed(error.to_string()),
    };
    let kubelet = *config.kubelet.borrow();
    let worked = negotiated.and_then(|negotiated| negotiated.with(kubelet));
    let registrar = Registrar::connect(&config.kubelet_socket).await.map_err(failed)?;
    let bind = Bind { resource: resource.clone(), registration: number };
    let bound = config
        .bind
        .call(bind, REGISTER_DEADLINE)
        .await
        .map_err(|error| Outcome::Failed(error.to_string()))?;
    let endpoint = bound.map_err(Outcome::Failed)?;
    let version =
        registrar.register(resource, &endpoint, pre_start, worked).await.map_err(failed)?;
    Ok(NegotiatedVersion { version, kubelet })
}
