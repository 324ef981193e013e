//! One attempt to register: is the kubelet there? Then a socket of its own, then Register.

use super::actor::RegistrationConfig;
use crate::domain::ResourceName;
use crate::kubelet::api::negotiation::Spoken;
use crate::kubelet::api::{Announcement, Version};
use crate::kubelet::register::{REGISTER_DEADLINE, RegisterError, Registrar};
use crate::messages::{Bind, RegistrationNumber};
use crate::telemetry::metrics;
use actix::Message;
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
    Registered(Spoken),
    Absent(String),
    Failed(String),
}

/// Makes it, and reports what came of it.
pub(super) async fn attempt(
    config: RegistrationConfig,
    resource: ResourceName,
    number: RegistrationNumber,
    spoken: Option<Spoken>,
    report: actix::Recipient<Attempted>,
) {
    let outcome = match register(&config, &resource, number, spoken).await {
        Ok(spoken) => Outcome::Registered(spoken),
        Err(outcome) => outcome,
    };
    if !matches!(outcome, Outcome::Absent(_)) {
        metrics::registered(resource.as_str(), matches!(outcome, Outcome::Registered(_)));
    }
    // The actor may have died meanwhile; its next life registers anew.
    let _ = report.send(Attempted { resource, number, outcome }).await;
}

/// A socket that is never there, below the device-plugin directory.
const NOWHERE: &str = ".holdfast/nowhere";
/// How long the kubelet is to dial it. Longer is of no use, and shorter may end before the kubelet has begun.
const DIALS_FOR: Duration = Duration::from_millis(40);
/// How long the kubelet may take after that to forget whose the resource is.
const FORGETS_WITHIN: Duration = Duration::from_millis(20);

/// Registers the resource with a socket that is not there, which fails: kubelets up to 1.36 then forget which connection
/// has the resource, keep its devices and its endpoint as they are, and so do nothing when the former instance's stream
/// ends. Newer ones know connections by their socket too, and do nothing in any case.
pub(super) async fn detach(config: RegistrationConfig, resource: ResourceName, version: Version) {
    let announcement = Announcement { version, resource: resource.clone(), endpoint: NOWHERE.into(), pre_start: false };
    let failed = async {
        let registrar = Registrar::connect(&config.kubelet_socket).await?;
        registrar.try_once(announcement, DIALS_FOR).await
    };
    match tokio::time::timeout(2 * DIALS_FOR, failed).await {
        Ok(Ok(())) => tracing::warn!(%resource, "the kubelet takes a socket that is not there"),
        // As it should be.
        Ok(Err(_)) | Err(_) => tokio::time::sleep(FORGETS_WITHIN).await,
    }
}

async fn register(
    config: &RegistrationConfig,
    resource: &ResourceName,
    number: RegistrationNumber,
    spoken: Option<Spoken>,
) -> Result<Spoken, Outcome> {
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
    let pre_start = config.inventory.borrow().resources.get(resource).is_some_and(|offering| offering.spec.needs_pre_start());
    let version = registrar.register(resource, &endpoint, pre_start, worked).await.map_err(failed)?;
    Ok(Spoken { version, kubelet })
}
