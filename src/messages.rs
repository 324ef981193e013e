//! Every message between actors, and `Mailbox`, the address that delivers it.
//!
//! | from | message | to |
//! | --- | --- | --- |
//! | app, host watch, nvml, health | `Rescan` | discovery |
//! | discovery | `Discovered` | health |
//! | health | the inventory (watch) | discovery, ledger, tasks, admin |
//! | health | the lists for the device plugin (watch) | serving, registration, admin |
//! | serving | `ReportUnusable` | health |
//! | host watch, kernel log, nvml | `DeviceEventSeen` | health |
//! | admin | `ApplyOperatorRequest` | health |
//! | checks | `Checked` | health |
//! | health | `RecordVerdicts` | ledger |
//! | serving | `Record`, `CheckStart` | ledger |
//! | hook runner | `HookEnded` | ledger |
//! | discovery | `Remember`, `Found` | ledger |
//! | host watch, dra | `Reconcile` | ledger |
//! | admin | `Publish`, `FindPending`, `ReleaseStuck` | ledger |
//! | dra | `RecordClaim`, `ReleaseClaim`, `RestoreClaims` | ledger |
//! | app | `TakeOver` | ledger |
//! | ledger | `Forget` | health |
//! | ledger | the grants (watch) | health, telemetry, cli |
//! | ledger | the due hooks (watch) | hook runner, health, cli |
//! | serving | `StreamOpened`, `StreamEnded`, `ClosedEarly` | registration |
//! | host watch | `KubeletSeen`, `CheckpointWritten`, `SocketLost` | registration |
//! | registration | `Bind`, `Retire` | serving |
//! | app | the plan (watch) | discovery (health gets it with `Discovered`), ledger, host watch |
//!
//! An actor may die and be rebuilt between a message and its answer. The message is then sent again
//! (see [`Mailbox::call`]). So every message is idempotent.

mod claims;

pub use claims::{RecordClaim, ReleaseClaim, ReleaseStuck, RestoreClaims};

use crate::domain::{
    CheckResult, DeviceEvent, DeviceId, Evidence, Grant, KubeletGeneration, Moment,
    OperatorRequest, PendingHook, PendingReleases, Plan, Reason, Refusal, ResourceName,
    StartBlocked, Verdict,
};
use crate::store::StoreError;
use actix::Message;
use futures_util::future::BoxFuture;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Why a call got no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The deadline passed. It is unknown whether the message took effect.
    #[error("the {0} actor did not answer within {1:?}")]
    TimedOut(&'static str, Duration),
    /// The supervisor gave the actor up. The daemon is about to end.
    #[error("the {0} actor has died too often and was given up")]
    GivenUp(&'static str),
}

/// Delivers one kind of message to an actor. The supervisor's handle implements it.
pub trait Deliver<M: Message>: Send + Sync {
    /// Sends `message`, again after every death of the actor, until it is answered or `deadline`
    /// has passed.
    fn call(
        &self,
        message: M,
        deadline: Duration,
    ) -> BoxFuture<'static, Result<M::Result, CallError>>;
    /// Sends `message` without waiting for an answer.
    fn send(&self, message: M);
}

/// A stable address for one kind of message. It stays valid across deaths of the actor.
pub struct Mailbox<M: Message>(Arc<dyn Deliver<M>>);

impl<M: Message> Mailbox<M> {
    /// A mailbox for any receiver of the message.
    pub fn new(receiver: impl Deliver<M> + 'static) -> Self {
        Mailbox(Arc::new(receiver))
    }

    /// Sends `message` and waits for the answer, across deaths of the actor.
    ///
    /// # Errors
    /// When `deadline` passes, or when the supervisor has given the actor up.
    pub async fn call(&self, message: M, deadline: Duration) -> Result<M::Result, CallError> {
        self.0.call(message, deadline).await
    }

    /// Sends `message` and does not wait.
    pub fn send(&self, message: M) {
        self.0.send(message);
    }
}

impl<M: Message> Clone for Mailbox<M> {
    fn clone(&self) -> Self {
        Mailbox(Arc::clone(&self.0))
    }
}

impl<M: Message> fmt::Debug for Mailbox<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mailbox").field(&std::any::type_name::<M>()).finish()
    }
}

/// A message with its own reply sender, for an actor that answers from a later message of its own.
/// If the actor dies before it has answered, the sender is dropped, and the mailbox sends the
/// message again to the next life.
#[derive(Debug)]
pub struct WithReply<M: Message> {
    /// The message.
    pub message: M,
    /// Where the answer goes. A caller that no longer waits has dropped the receiver.
    pub reply: oneshot::Sender<M::Result>,
}

impl<M: Message> Message for WithReply<M> {
    type Result = ();
}

/// → discovery: scan the host again. Answered when the result was sent to health, with the
/// processor time of the scan: zero if an earlier scan has answered the request.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Duration")]
pub struct Rescan {
    /// When the request was made (`CLOCK_BOOTTIME`). A scan that began later has answered it
    /// already.
    pub asked_at: Duration,
}

/// discovery → health: the result of one scan.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Discovered {
    /// The devices that it found.
    pub evidence: Arc<Evidence>,
    /// The plan of the scan. The judge uses the same plan.
    pub plan: Arc<Plan>,
}

/// serving → health: an Allocate found the device of this id unusable. Answered when the list shows
/// that.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct ReportUnusable {
    /// The resource.
    pub resource: ResourceName,
    /// The id of the kubelet's list.
    pub id: DeviceId,
    /// Why it is unusable.
    pub reason: Reason,
}

/// host watch, kernel log, nvml → health: the kernel or the driver reported an event of a device.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct DeviceEventSeen {
    /// The event.
    pub event: DeviceEvent,
    /// The time of receipt. A line that was in the kernel's log before the daemon's start has the
    /// kernel's time.
    pub at: Moment,
}

/// checks → health: a device's check has ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Checked {
    /// The device, by its own id.
    pub device: DeviceId,
    /// When the check began. Its result is no older.
    pub at: Moment,
    /// Its result.
    pub result: CheckResult,
}

/// admin → health: an operator's request. Answered when it is durable and in the list.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), OperatorRequestError>")]
pub struct ApplyOperatorRequest {
    /// The device, by its own id.
    pub device: DeviceId,
    /// What the operator requests.
    pub request: OperatorRequest,
}

/// Why an operator's request failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OperatorRequestError {
    /// No device has this id.
    #[error("no device has the id `{0}`; `holdfast discover` lists the devices of this node")]
    Unknown(DeviceId),
    /// The request could not be made durable. It is in effect until the daemon ends.
    #[error("applied, but not persisted; it will be lost when the daemon restarts: {0}")]
    NotRecorded(String),
}

/// health → ledger: record these verdicts, or forget them (`None`). Answered when that is durable.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct RecordVerdicts(pub Vec<(DeviceId, Option<Verdict>)>);

/// serving → ledger, as [`WithReply`]: record this grant. Answered when it is durable (I1). A
/// repeated message is recorded once.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), RecordError>")]
pub struct Record {
    /// The grant.
    pub grant: Arc<Grant>,
    /// Whether only one container at a time may have its devices. Then a running container that has
    /// one of them blocks the grant (I2).
    pub exclusive: bool,
}

/// Why a grant is refused.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RecordError {
    /// One of its devices has another holder, or a pending hook.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It could not be made durable.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
    /// The request is not about one claim.
    #[error("the request does not have the devices of one allocation of one claim, and a pod")]
    NotOneClaim,
}

/// discovery → ledger: the ids that were assigned to these physical keys, permanently (I6).
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct Remember(pub Vec<(String, DeviceId)>);

/// discovery → ledger: the result of the latest scan. The ledger eventually forgets devices that
/// are absent from it.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Found(pub Arc<Evidence>);

/// ledger → health: these devices are absent, and the ledger has forgotten them.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Forget(pub Vec<DeviceId>);

/// serving → ledger: may a container start with these ids? The error is the device that it has to
/// wait for, and the reason. Serving repeats the message until the container may start.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), (DeviceId, StartBlocked)>")]
pub struct CheckStart {
    /// The resource.
    pub resource: ResourceName,
    /// All ids of the resource that the container gets.
    pub ids: Vec<DeviceId>,
}

/// hook runner → ledger: a hook after release has run. Answered when that is durable. `Err` has the
/// reason of a failure.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct HookEnded {
    /// The due hook.
    pub hook: PendingHook,
    /// The result of the run.
    pub result: Result<(), String>,
}

/// → ledger: reconcile the grants with the kubelet's files and the pods, because the checkpoint has
/// changed, or time has passed.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Reconcile;

/// app → ledger: record the grants that another plugin made of these resources, from the kubelet's
/// checkpoint, before the first list of them is published. Answers with the number of new grants.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<usize, String>")]
pub struct TakeOver(pub Vec<ResourceName>);

/// admin → ledger: publish the present state, so that a query after an Allocate sees its grant.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Publish;

/// admin → ledger: which releases wait for proof, by a look at the pods' cgroups now. If there are
/// any, a pass of reconciliation begins, so that the release does not wait for the timer.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "PendingReleases")]
pub struct FindPending;

/// host watch → registration: the kubelet's socket on disk, `None` if there is none.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct KubeletSeen(pub Option<KubeletGeneration>);

/// host watch → registration: the kubelet has written its checkpoint, as it does for every list and
/// every allocation.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct CheckpointWritten;

/// The number of a registration of this process. Each has a socket of its own.
pub type RegistrationNumber = u64;

/// serving → registration: the kubelet opened a ListAndWatch stream on the socket of this
/// registration.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct StreamOpened {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it came to.
    pub registration: RegistrationNumber,
}

/// serving → registration: a ListAndWatch stream on the socket of this registration ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct StreamEnded {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it was on.
    pub registration: RegistrationNumber,
}

/// serving → registration: the kubelet connected to the socket of this registration, and closed the
/// connection before it requested the lists.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct ClosedEarly {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it came to.
    pub registration: RegistrationNumber,
}

/// host watch → registration: the socket file of this registration was removed.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct SocketLost {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it was.
    pub registration: RegistrationNumber,
}

/// registration → serving: bind a new socket for this registration. Answers with its path below the
/// plugin directory.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<String, String>")]
pub struct Bind {
    /// The resource.
    pub resource: ResourceName,
    /// The registration that will name the socket.
    pub registration: RegistrationNumber,
}

/// registration → serving: older registrations are superseded. Close their sockets when their
/// streams have ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Retire {
    /// The resource.
    pub resource: ResourceName,
    /// The newest registration; all older ones are superseded.
    pub newest: RegistrationNumber,
}

/// Tests and the demo → any actor: panic, so that they can observe the supervisor (I10).
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Crash;
