//! Hooks: places between the steps of the kubelet's flows, where its goroutines may stop for any
//! length of time.
//!
//! On a simulated node the seed decides the outcome at each hook. On real sockets a test puts a
//! [`Gate`] there. An interleaving that a real kubelet shows once in a hundred runs then happens
//! every time.

use futures_util::future::BoxFuture;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// A place in the kubelet's flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// Register has passed its checks; the client is not recorded yet.
    BeforeRegisterClient,
    /// The new client is recorded under the resource's name; it is not dialled yet.
    AfterRegisterClient,
    /// The plugin is connected.
    AfterDial,
    /// The plugin has returned its options.
    AfterOptions,
    /// The new endpoint serves the resource; Register is answered next.
    AfterEndpointSet,
    /// ListAndWatch is called next.
    BeforeListAndWatch,
    /// A list has arrived and is not processed yet.
    OnList,
    /// A stream has ended; the client under the resource's name has not been read yet.
    OnStreamEnd,
    /// The client under the resource's name was removed from the map.
    AfterDeregister,
    /// Its connection is closed next.
    BeforeConnectionClose,
    /// The endpoint that serves the resource is stopped next.
    BeforePluginDisconnected,
    /// Ids are reserved; Allocate is called next.
    BeforeAllocate,
    /// Allocate is under way: lists, listings and purges may come in between.
    DuringAllocate,
    /// Allocate is answered; the grant is not recorded yet.
    AfterAllocate,
    /// The checkpoint is written next.
    BeforeCheckpoint,
    /// The content of the checkpoint is fixed; the file is not in place yet.
    DuringCheckpoint,
    /// A pod is about to be rejected; its status does not show it yet.
    BeforeReject,
    /// The pods that the node has already are admitted next.
    BeforeFirstBatch,
    /// One of these pods is decided, the next one is not.
    BetweenPodsOfBatch,
    /// All of these pods are decided; devices of absent pods cannot be freed yet.
    BeforeSourcesReady,
}

impl Hook {
    /// All hooks, in the order of the flows.
    pub const ALL: [Hook; 20] = [
        Hook::BeforeRegisterClient,
        Hook::AfterRegisterClient,
        Hook::AfterDial,
        Hook::AfterOptions,
        Hook::AfterEndpointSet,
        Hook::BeforeListAndWatch,
        Hook::OnList,
        Hook::OnStreamEnd,
        Hook::AfterDeregister,
        Hook::BeforeConnectionClose,
        Hook::BeforePluginDisconnected,
        Hook::BeforeAllocate,
        Hook::DuringAllocate,
        Hook::AfterAllocate,
        Hook::BeforeCheckpoint,
        Hook::DuringCheckpoint,
        Hook::BeforeReject,
        Hook::BeforeFirstBatch,
        Hook::BetweenPodsOfBatch,
        Hook::BeforeSourcesReady,
    ];

    /// Whether the step that follows can fail, also in a real kubelet.
    #[must_use]
    pub fn can_fail(self) -> bool {
        matches!(
            self,
            Hook::AfterRegisterClient
                | Hook::AfterDial
                | Hook::BeforeListAndWatch
                | Hook::OnList
                | Hook::BeforeAllocate
                | Hook::DuringAllocate
                | Hook::BeforeCheckpoint
        )
    }

    /// Whether the plugin can give up waiting here: inside its own Register.
    #[must_use]
    pub fn can_cancel(self) -> bool {
        matches!(self, Hook::BeforeRegisterClient | Hook::AfterRegisterClient | Hook::AfterDial)
    }
}

/// How a flow continues from a hook.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verdict {
    /// The flow continues as usual.
    #[default]
    Pass,
    /// The step that follows fails, where it can ([`Hook::can_fail`]).
    Fail,
    /// The plugin gives up waiting for its Register, where it waits ([`Hook::can_cancel`]).
    Cancel,
    /// The kubelet dies here.
    Crash,
}

/// The hooks of a kubelet on real sockets: open, unless a test puts gates there. Cheap to clone;
/// clones share their state.
#[derive(Debug, Clone, Default)]
pub struct HookTable(Arc<Mutex<Vec<PendingGate>>>);

#[derive(Debug)]
struct PendingGate {
    hook: Hook,
    /// Flows that may pass before one is held.
    pass: usize,
    reached: oneshot::Sender<()>,
    verdict: oneshot::Receiver<Verdict>,
}

impl HookTable {
    fn pending_gates(&self) -> MutexGuard<'_, Vec<PendingGate>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the next flow that reaches `hook`.
    #[must_use = "a dropped gate is open"]
    pub fn gate(&self, hook: Hook) -> Gate {
        self.gate_after(hook, 0)
    }

    /// Lets `pass` flows through `hook` and holds the next one; later flows are not held.
    #[must_use = "a dropped gate is open"]
    pub fn gate_after(&self, hook: Hook, pass: usize) -> Gate {
        let ((reached, is_reached), (open, verdict)) = (oneshot::channel(), oneshot::channel());
        self.pending_gates().push(PendingGate { hook, pass, reached, verdict });
        Gate { is_reached, open }
    }

    /// A flow reaches `hook`: `None` lets it continue at once.
    pub(super) fn reach(&self, hook: Hook) -> Option<BoxFuture<'static, Verdict>> {
        let mut pending_gates = self.pending_gates();
        let mut held = None;
        for (index, pending) in
            pending_gates.iter_mut().enumerate().filter(|(_, pending)| pending.hook == hook)
        {
            match pending.pass.checked_sub(1) {
                Some(left) => pending.pass = left,
                None => held = held.or(Some(index)),
            }
        }
        let pending = pending_gates.remove(held?);
        // The test may have dropped its gate.
        let _ = pending.reached.send(());
        Some(Box::pin(async move { pending.verdict.await.unwrap_or_default() }))
    }
}

/// Holds one flow at a hook. Dropping it lets the flow pass.
#[derive(Debug)]
pub struct Gate {
    is_reached: oneshot::Receiver<()>,
    open: oneshot::Sender<Verdict>,
}

impl Gate {
    /// Waits until a flow is held here. Returns at once when called again.
    pub async fn reached(&mut self) {
        if !self.is_reached.is_terminated() {
            // An error means that the hooks were dropped and no flow will come.
            let _ = (&mut self.is_reached).await;
        }
    }

    /// Lets the flow continue; a flow that comes later is not held.
    pub fn open(self, verdict: Verdict) {
        // A killed kubelet has no flow left.
        let _ = self.open.send(verdict);
    }
}
