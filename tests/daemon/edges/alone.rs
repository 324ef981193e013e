//! A separate serving actor next to a daemon: the kubelet's calls are answered, and the test
//! receives the actor's messages.

use crate::common::Node;
use crate::edges::stage::gpu;
use actix::{Arbiter, Message};
use futures_util::future::BoxFuture;
use holdfast::app::App;
use holdfast::domain::limits::ConnectionLimits;
use holdfast::hook::HookExecutor;
use holdfast::host::HostRoot;
use holdfast::kubelet::uds;
use holdfast::messages::{Bind, CallError, Deliver, Mailbox};
use holdfast::serving::{Affinity, Preparer, Refusals, Serving, Shared, Sockets, SpecFiles};
use holdfast::supervisor::{Policy, Slot, Supervision};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tonic::transport::Channel;

/// The actor.
pub(crate) struct Alone {
    bind: Mailbox<Bind>,
    pub(crate) supervision: Supervision,
}

impl Alone {
    /// Serves the inventory of `app`. Its messages are dropped, except those that `change`
    /// redirects.
    pub(crate) fn serve(node: &Node, app: &App, change: impl FnOnce(&mut Shared)) -> Alone {
        let (escalate, _escalated) = mpsc::channel(1);
        let supervision =
            Supervision { policy: Policy::default(), escalate, ending: watch::channel(false).1 };
        let serving = Slot::<Serving>::new("serving");
        let (bind, host_root) = (serving.handle().mailbox(), HostRoot::new(node.path("host")));
        let files = SpecFiles::new(&node.path("cdi"), &node.path("devinfo"), &host_root);
        let inventory = app.views.inventory.clone();
        let preparer = Preparer::new(
            inventory,
            host_root.clone(),
            files,
            "boot".to_owned(),
            watch::channel(None).1,
        );
        let mut shared = Shared {
            lists: app.views.inventory.clone(),
            grants: app.views.grants.clone(),
            performer: HookExecutor::new(host_root),
            preparer: Arc::new(preparer),
            record: Mailbox::new(Nobody),
            unusable: Mailbox::new(Nobody),
            check_start: Mailbox::new(Nobody),
            opened: Mailbox::new(Nobody),
            ended: Mailbox::new(Nobody),
            closed_early: Mailbox::new(Nobody),
            sockets: Arc::new(Sockets::new(&node.path("plugins"), ConnectionLimits::of(None))),
            affinity: Affinity::default(),
            refusals: Refusals::default(),
            gate: Arc::default(),
            resend: watch::channel(()).1,
            leaving: watch::channel(false).1,
        };
        change(&mut shared);
        serving.start(Arbiter::current(), supervision.clone(), move |life| {
            Serving::new(shared.clone(), life)
        });
        Alone { bind, supervision }
    }

    /// Binds the socket of this registration and connects to it.
    pub(crate) async fn connect(&self, node: &Node, registration: u64) -> Channel {
        let made =
            self.bind.call(Bind { resource: gpu(), registration }, Duration::from_secs(2)).await;
        uds::connect(node.path("plugins").join(made.unwrap().unwrap())).await.unwrap()
    }
}

/// A receiver that never answers.
#[derive(Debug)]
pub(crate) struct Nobody;

impl<M: Message + Send + 'static> Deliver<M> for Nobody
where
    M::Result: Send,
{
    fn call(&self, _: M, _: Duration) -> BoxFuture<'static, Result<M::Result, CallError>> {
        Box::pin(std::future::pending())
    }

    fn send(&self, _: M) {}
}

/// A receiver that forwards messages to the test.
#[derive(Debug)]
pub(crate) struct Heard<M>(pub(crate) mpsc::UnboundedSender<M>);

impl<M: Message + Send + 'static> Deliver<M> for Heard<M>
where
    M::Result: Send,
{
    fn call(&self, _: M, _: Duration) -> BoxFuture<'static, Result<M::Result, CallError>> {
        Box::pin(std::future::pending())
    }

    fn send(&self, message: M) {
        self.0.send(message).unwrap();
    }
}
