//! The supervisor rebuilds an actor that dies, and its callers do not notice (I10).
//!
//! actix's own `Supervisor` restarts an actor that stops, but not one that panics: then the actor
//! is dropped and its address is closed permanently. Here every actor owns a [`Life`]. Its drop
//! notifies the guardian of any death: in a handler, in a timer, in `started` or in the factory.
//! The guardian builds the next actor at once. It waits longer after each death in quick
//! succession, and gives up when an actor dies too often. The daemon then exits, and systemd or the
//! kubelet starts it again.
//!
//! ```text
//!   factory(life) ─▶ actor ── panic ──▶ drop(life) ─▶ guardian ─ backoff ─▶ factory(life) ─▶ actor
//!                      ▲                                  └─ too many ─▶ escalation ─▶ exit code 7
//!   callers ── Handle ─┘   (a watch with the current address; calls wait for it and are repeated)
//! ```

use crate::messages::{CallError, Crash, Deliver, Mailbox, WithReply};
use crate::telemetry::metrics;
use actix::dev::ToEnvelope;
use actix::fut::{ActorFutureExt as _, wrap_future};
use actix::{
    Actor, ActorContext as _, Addr, ArbiterHandle, AsyncContext as _, Context, Handler,
    MailboxError, Message,
};
use futures_util::future::{BoxFuture, FutureExt as _, TryFutureExt as _};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Capacity of an actor's mailbox. The kubelet admits pods one by one; the rest is for tools that
/// measure with many callers. Further callers wait in line, and no message is lost.
const MAILBOX_CAPACITY: usize = 256;

/// How the supervisor handles deaths.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// The pause before the second rebuild in quick succession; doubled each time. The first
    /// rebuild has no pause.
    pub backoff_min: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// This number of deaths within `window` escalates.
    pub deaths_max: usize,
    /// The window of `deaths_max`. Older deaths do not count.
    pub window: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            backoff_min: Duration::from_millis(2),
            backoff_max: Duration::from_secs(1),
            deaths_max: 10,
            window: Duration::from_secs(60),
        }
    }
}

/// The shared state of all guardians.
#[derive(Debug, Clone)]
pub struct Supervision {
    /// How deaths are handled.
    pub policy: Policy,
    /// Receives the name of an actor that has died too often.
    pub escalate: mpsc::Sender<&'static str>,
    /// True when the actors shall end. None is rebuilt then.
    pub ending: watch::Receiver<bool>,
}

/// Owned by an actor as long as it lives. Its drop signals the actor's death.
#[derive(Debug)]
pub struct Life {
    /// Counts the actor's lives, from 1.
    pub number: u64,
    _death: oneshot::Sender<()>,
}

/// A stable address of an actor: cheap to clone, valid across every death.
#[derive(Debug)]
pub struct Handle<A: Actor> {
    name: &'static str,
    address: watch::Receiver<Option<Addr<A>>>,
}

impl<A: Actor> Clone for Handle<A> {
    fn clone(&self) -> Self {
        Handle { name: self.name, address: self.address.clone() }
    }
}

/// A slot for an actor. Its handle exists before the actor is built, so that actors can have each
/// other's handles.
#[derive(Debug)]
pub struct Slot<A: Actor> {
    handle: Handle<A>,
    publish: watch::Sender<Option<Addr<A>>>,
}

impl<A: Actor<Context = Context<A>>> Slot<A> {
    /// An empty slot. Calls to its handle wait until the actor exists.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let (publish, address) = watch::channel(None);
        Slot { handle: Handle { name, address }, publish }
    }

    /// The actor's handle, valid before and after its start.
    #[must_use]
    pub fn handle(&self) -> Handle<A> {
        self.handle.clone()
    }

    /// Starts the actor on `arbiter` and rebuilds it after every death. `factory` builds each life
    /// from durable state. The returned guardian ends when the actor has ended and its factory is
    /// dropped.
    ///
    /// Must be called on the actix system's thread.
    pub fn start<F>(
        self,
        arbiter: ArbiterHandle,
        supervision: Supervision,
        factory: F,
    ) -> JoinHandle<()>
    where
        F: Fn(Life) -> A + Clone + Send + 'static,
    {
        let Slot { handle: Handle { name, address: _ }, publish } = self;
        let Supervision { policy, escalate, ending } = supervision;
        metrics::actor_begins(name);
        actix::spawn(async move {
            let mut deaths: VecDeque<Instant> = VecDeque::new();
            for number in 1.. {
                let (death, died) = oneshot::channel();
                let life = Life { number, _death: death };
                let (factory, mut ends) = (factory.clone(), ending.clone());
                let addr = A::start_in_arbiter(&arbiter, move |context| {
                    context.set_mailbox_capacity(MAILBOX_CAPACITY);
                    let end = async move {
                        if ends.wait_for(|ending| *ending).await.is_err() {
                            // No code is left that could end the actor.
                            std::future::pending::<()>().await;
                        }
                    };
                    context.spawn(wrap_future::<_, A>(end).map(|(), _, context| context.stop()));
                    factory(life)
                });
                publish.send_replace(Some(addr));
                // The sender is never used, only dropped: an error is the expected result.
                drop(died.await);
                publish.send_replace(None);
                if *ending.borrow() {
                    return;
                }

                let now = Instant::now();
                deaths.push_back(now);
                while deaths.front().is_some_and(|death| now.duration_since(*death) > policy.window)
                {
                    deaths.pop_front();
                }
                metrics::actor_restarted(name);
                if deaths.len() >= policy.deaths_max {
                    tracing::error!(
                        actor = name,
                        deaths = deaths.len(),
                        "the actor died too often and is given up; the daemon ends"
                    );
                    // A full channel means that another actor escalated first: the daemon is
                    // ending.
                    let _ = escalate.try_send(name);
                    return;
                }
                let wait = backoff(&policy, deaths.len());
                tracing::warn!(
                    actor = name,
                    life = number,
                    wait_ms = wait.as_millis(),
                    "the actor died and is rebuilt"
                );
                tokio::time::sleep(wait).await;
            }
        })
    }
}

/// The pause after the `deaths`-th death within the window.
fn backoff(policy: &Policy, deaths: usize) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        n => {
            let doublings = u32::try_from(n - 2).unwrap_or(u32::MAX).min(16);
            policy.backoff_min.saturating_mul(1 << doublings).min(policy.backoff_max)
        }
    }
}

impl<A: Actor> Handle<A> {
    /// The mailbox for one kind of message.
    pub fn mailbox<M>(&self) -> Mailbox<M>
    where
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
        M: Message + Clone + Send + 'static,
        M::Result: Send,
    {
        Mailbox::new(self.clone())
    }

    /// The mailbox for a message that the actor answers from a later message. The reply sender is
    /// in the message.
    pub fn replying_mailbox<M>(&self) -> Mailbox<M>
    where
        A: Handler<WithReply<M>>,
        A::Context: ToEnvelope<A, WithReply<M>>,
        M: Message + Clone + Send + 'static,
        M::Result: Send,
    {
        Mailbox::new(Replying(self.clone()))
    }

    /// Makes the present life panic, and waits for the next one. A [`Mailbox::call`] would send the
    /// message to the next life too, and to the one after it.
    ///
    /// # Errors
    /// When the supervisor has given the actor up.
    pub async fn crash(&self) -> Result<(), CallError>
    where
        A: Handler<Crash>,
        A::Context: ToEnvelope<A, Crash>,
    {
        let mut address = self.address.clone();
        let given_up = |_| CallError::GivenUp(self.name);
        let Some(victim) = address.wait_for(Option::is_some).await.map_err(given_up)?.clone()
        else {
            return Ok(());
        };
        // The expected result is no answer.
        let _ = victim.send(Crash).await;
        let next =
            |current: &Option<Addr<A>>| current.as_ref().is_some_and(|current| *current != victim);
        address.wait_for(next).await.map_err(given_up)?;
        Ok(())
    }
}

/// The actor's present life, or its next one; `None` when it has been given up.
async fn alive<A: Actor>(address: &mut watch::Receiver<Option<Addr<A>>>) -> Option<Addr<A>> {
    loop {
        // Cloned at once: holding the borrow would block the supervisor's publication.
        let addr = address.wait_for(Option::is_some).await.ok()?.clone();
        if addr.is_some() {
            return addr;
        }
    }
}

/// Waits until this life is known to be dead. Its address may be published slightly longer than it
/// lives. `None` if the actor was given up.
async fn dead<A: Actor>(
    address: &mut watch::Receiver<Option<Addr<A>>>,
    addr: &Addr<A>,
) -> Option<()> {
    address.wait_for(|current| current.as_ref() != Some(addr)).await.ok().map(drop)
}

impl<A, M> Deliver<M> for Handle<A>
where
    A: Actor + Handler<M>,
    A::Context: ToEnvelope<A, M>,
    M: Message + Clone + Send + 'static,
    M::Result: Send,
{
    fn call(
        &self,
        message: M,
        deadline: Duration,
    ) -> BoxFuture<'static, Result<M::Result, CallError>> {
        let Handle { name, mut address } = self.clone();
        Box::pin(async move {
            let attempts = async move {
                loop {
                    let addr = alive(&mut address).await.ok_or(CallError::GivenUp(name))?;
                    match addr.send(message.clone()).await {
                        Ok(answer) => return Ok(answer),
                        // The actor died with the message in its mailbox, or while it handled it.
                        Err(MailboxError::Closed | MailboxError::Timeout) => {
                            dead(&mut address, &addr).await.ok_or(CallError::GivenUp(name))?;
                        }
                    }
                }
            };
            tokio::time::timeout(deadline, attempts)
                .await
                .unwrap_or(Err(CallError::TimedOut(name, deadline)))
        })
    }

    fn send(&self, message: M) {
        let addr = self.address.borrow().clone();
        if addr.is_some_and(|addr| addr.try_send(message.clone()).is_ok()) {
            return;
        }
        // Outside a runtime the daemon is ending, and no receiver is left.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(delivered(
                self.name,
                self.call(message, DELIVERY_DEADLINE).map_ok(drop).boxed(),
            ));
        }
    }
}

/// How long a message without a waiting caller may wait for an actor that is being rebuilt or is
/// busy.
const DELIVERY_DEADLINE: Duration = Duration::from_secs(5);

/// A handle whose messages carry their reply senders.
#[derive(Debug)]
struct Replying<A: Actor>(Handle<A>);

impl<A, M> Deliver<M> for Replying<A>
where
    A: Actor + Handler<WithReply<M>>,
    A::Context: ToEnvelope<A, WithReply<M>>,
    M: Message + Clone + Send + 'static,
    M::Result: Send,
{
    fn call(
        &self,
        message: M,
        deadline: Duration,
    ) -> BoxFuture<'static, Result<M::Result, CallError>> {
        let Handle { name, mut address } = self.0.clone();
        Box::pin(async move {
            let attempts = async move {
                loop {
                    let addr = alive(&mut address).await.ok_or(CallError::GivenUp(name))?;
                    let (reply, answer) = oneshot::channel();
                    // A message that the actor does not accept is dropped with its reply sender,
                    // like one in a dead actor's mailbox.
                    if let Err(refused) =
                        addr.try_send(WithReply { message: message.clone(), reply })
                    {
                        // The mailbox is full: wait for space.
                        let _ = addr.send(refused.into_inner()).await;
                    }
                    match answer.await {
                        Ok(answer) => return Ok(answer),
                        Err(_) => {
                            dead(&mut address, &addr).await.ok_or(CallError::GivenUp(name))?;
                        }
                    }
                }
            };
            tokio::time::timeout(deadline, attempts)
                .await
                .unwrap_or(Err(CallError::TimedOut(name, deadline)))
        })
    }

    fn send(&self, message: M) {
        // Outside a runtime the daemon is ending, and no receiver is left.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(delivered(
                self.0.name,
                self.call(message, DELIVERY_DEADLINE).map_ok(drop).boxed(),
            ));
        }
    }
}

/// Logs a message that was not delivered. One function for all messages, because a generic one
/// would add a task per message type to the binary.
async fn delivered(actor: &'static str, call: BoxFuture<'static, Result<(), CallError>>) {
    if let Err(error) = call.await {
        tracing::warn!(actor, %error, "a message was not delivered");
    }
}

#[cfg(test)]
mod tests;
