//! Every message that crosses actors, and the door through which it goes.
//!
//! ```text
//!   app, host watch ─ Rescan ──────▶ discovery ─ Discovered ─▶ health ─ Inventory (watch) ─▶ serving, registration
//!   serving ─ Broken ──────────────▶ health ◀─ Happened ─ host watch; Instruct ─ app
//!   health ─ Judged ───────────────▶ ledger
//!   serving ─ Record, Pass ────────▶ ledger ─ Ledger (watch) ─▶ health, telemetry, cli
//!   hook runner ─ HookEnded ───────▶ ledger ─ due hooks (watch) ─▶ hook runner, health, cli
//!   discovery ─ Remember, Found ───▶ ledger ◀─ Reconcile ─ host watch; Publish, TakeOver ─ app
//!   ledger ─ Forget ───────────────▶ health
//!   serving ─ StreamOpened/Ended, HungUp ─▶ registration ◀─ KubeletSeen, CheckpointWritten, SocketLost ─ host watch
//!   app ─ Plan (watch) ────────────▶ discovery ─ with Discovered ─▶ health; ledger, host watch
//!   registration ─ Bind, Retire ───▶ serving
//! ```
//!
//! An actor may die and be rebuilt between a message and its answer; then the message is sent again (see
//! [`Mailbox::call`]). Every message therefore means the same when it arrives twice.

use crate::domain::{
    CheckResult, DeviceEvent, DeviceId, Evidence, Grant, KubeletGeneration, Moment, OperatorRequest, PendingHook, Plan, Reason, Refusal,
    ResourceName, StartBlocked, Verdict,
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
    /// The deadline passed; whether the message took effect is unknown.
    #[error("the {0} actor did not answer within {1:?}")]
    TimedOut(&'static str, Duration),
    /// The supervisor gave the actor up; the daemon is about to end.
    #[error("the {0} actor has died too often and was given up")]
    GivenUp(&'static str),
}

/// What an actor's handle can do with one kind of message. Implemented by the supervisor's handle.
pub trait Door<M: Message>: Send + Sync {
    /// Sends `message`, again after every death of the actor, until it is answered or `deadline` has passed.
    fn call(&self, message: M, deadline: Duration) -> BoxFuture<'static, Result<M::Result, CallError>>;
    /// Sends `message` without waiting for an answer.
    fn tell(&self, message: M);
}

/// A stable address for one kind of message: it outlives every death of the actor behind it.
pub struct Mailbox<M: Message>(Arc<dyn Door<M>>);

impl<M: Message> Mailbox<M> {
    /// Makes a mailbox of anything that takes the message.
    pub fn new(door: impl Door<M> + 'static) -> Self {
        Mailbox(Arc::new(door))
    }

    /// Sends `message` and waits for the answer, across deaths of the actor.
    ///
    /// # Errors
    /// When `deadline` passes, or when the supervisor has given the actor up.
    pub async fn call(&self, message: M, deadline: Duration) -> Result<M::Result, CallError> {
        self.0.call(message, deadline).await
    }

    /// Sends `message` and does not wait.
    pub fn tell(&self, message: M) {
        self.0.tell(message);
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

/// A message with its own reply sender, for an actor that answers from a later message of its own. When the actor
/// dies before it has answered, the sender is dropped, and the mailbox sends the message to the next life.
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

/// → discovery: read the host again; answered when the result has been handed on.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Rescan {
    /// When it was asked for (`CLOCK_BOOTTIME`): a scan that began later has answered it already.
    pub asked_at: Duration,
}

/// discovery → health: what one scan found.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Discovered {
    /// What it found.
    pub evidence: Arc<Evidence>,
    /// The plan that it was made with: what it selects is judged by the same resources.
    pub plan: Arc<Plan>,
}

/// serving → health: an Allocate found the device behind this id unusable; answered when the list says so.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Broken {
    /// The resource.
    pub resource: ResourceName,
    /// The id of the kubelet's list.
    pub id: DeviceId,
    /// What is wrong.
    pub reason: Reason,
}

/// host watch → health: the kernel has told that something happened to a device.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Happened {
    /// What.
    pub event: DeviceEvent,
    /// When, as far as the kernel says so; else when it was heard of.
    pub at: Moment,
}

/// app → health: the check of a device's resource has ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Checked {
    /// The device, by its own id.
    pub device: DeviceId,
    /// When the check began: what it says is not older.
    pub at: Moment,
    /// What it says.
    pub result: CheckResult,
}

/// app → health: do what an operator asks for; answered when it is durable and in the list.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), InstructError>")]
pub struct Instruct {
    /// Which device, by its own id.
    pub device: DeviceId,
    /// What.
    pub instruction: OperatorRequest,
}

/// Why an operator's word has no effect.
#[derive(Debug, Clone, thiserror::Error)]
pub enum InstructError {
    /// Nothing is known by that id.
    #[error("no device has the id `{0}`; `holdfast discover` lists the devices of this node")]
    Unknown(DeviceId),
    /// It could not be made durable; it counts until the daemon ends.
    #[error("it counts until the daemon ends, and cannot be recorded: {0}")]
    NotRecorded(String),
}

/// health → ledger: remember these verdicts, or (`None`) forget them; answered when that is durable.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct Judged(pub Vec<(DeviceId, Option<Verdict>)>);

/// serving → ledger, as [`WithReply`]: make this grant durable; answered when it is (I1). Sent twice, it is recorded once.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), RecordError>")]
pub struct Record {
    /// The grant.
    pub grant: Arc<Grant>,
    /// Whether one container at a time may have its devices: then a living one that has them is in the way (I2).
    pub exclusive: bool,
}

/// Why a grant is not made.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RecordError {
    /// Somebody else has one of its devices, provably.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It could not be made durable.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
}

/// discovery → ledger: these physical keys got these ids, for good (I6).
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct Remember(pub Vec<(String, DeviceId)>);

/// discovery → ledger: what the latest scan has found. The ledger forgets in the end what it has not found.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Found(pub Arc<Evidence>);

/// ledger → health: nothing is remembered any more of these devices, which have gone.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Forget(pub Vec<DeviceId>);

/// serving → ledger: a container is about to start with these ids. It may, or why it has to wait for which of them; it is asked
/// again until it may.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), (DeviceId, StartBlocked)>")]
pub struct Pass {
    /// The resource.
    pub resource: ResourceName,
    /// Every id that the container gets of it.
    pub ids: Vec<DeviceId>,
}

/// hook runner → ledger: this hook has been run after a release; answered when that is durable. `Err` says why it has failed.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct HookEnded {
    /// The hook, as it was due.
    pub hook: PendingHook,
    /// What became of the run.
    pub result: Result<(), String>,
}

/// → ledger: look at the kubelet's files and at the pods; the checkpoint has changed, or time has passed.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Reconcile;

/// app → ledger: take over what another plugin has given away of these resources, as the kubelet's checkpoint tells, before a list of them
/// is published. Answers with the number of grants that are new.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<usize, String>")]
pub struct TakeOver(pub Vec<ResourceName>);

/// app → ledger: publish what is known now; a person who asks after an Allocate is told of it.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Publish;

/// host watch → registration: the kubelet's socket as it is on disk, `None` where there is none.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct KubeletSeen(pub Option<KubeletGeneration>);

/// host watch → registration: the kubelet has written its checkpoint, as it does for every list and every allocation.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct CheckpointWritten;

/// Counts the registrations of this process; each has a socket of its own.
pub type RegistrationNumber = u64;

/// serving → registration: the kubelet opened a ListAndWatch stream on the socket of this registration.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct StreamOpened {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it came to.
    pub registration: RegistrationNumber,
}

/// serving → registration: such a stream ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct StreamEnded {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it was on.
    pub registration: RegistrationNumber,
}

/// serving → registration: the kubelet came to the socket of this registration, and hung up before it asked for the lists.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct HungUp {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it came to.
    pub registration: RegistrationNumber,
}

/// host watch → registration: the file of this registration's socket is gone.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct SocketLost {
    /// The resource.
    pub resource: ResourceName,
    /// The registration whose socket it was.
    pub registration: RegistrationNumber,
}

/// registration → serving: listen on a new socket for this registration; answers its path below the plugin directory.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<String, String>")]
pub struct Bind {
    /// The resource.
    pub resource: ResourceName,
    /// The registration that will name the socket.
    pub registration: RegistrationNumber,
}

/// registration → serving: this registration has been superseded; close its socket once its streams have ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Retire {
    /// The resource.
    pub resource: ResourceName,
    /// The newest registration; all older ones are superseded.
    pub newest: RegistrationNumber,
}

/// Tests and the demo → any actor: panic, so that the supervisor's promise can be seen (I10).
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Crash;
