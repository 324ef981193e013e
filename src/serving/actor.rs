//! The shell: makes sockets, and has those closed that are superseded. The connections that come on them answer by themselves.

use super::plugin::{Plugin, Shared};
use crate::host::peer::TrustedListener;
use crate::kubelet::api;
use crate::kubelet::conversation::Followed;
use crate::messages::{Adopt, Bind, Crash, RegistrationNumber, Retire};
use crate::telemetry::metrics;
use actix::{Actor, Context, Handler};
use futures_util::TryStreamExt as _;
use std::any::Any;
use std::fs;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The number of no registration of this process: they are counted from 1.
const NOBODYS: RegistrationNumber = 0;

/// The actor.
#[derive(Debug)]
pub struct Serving {
    shared: Shared,
    _life: Box<dyn Any + Send>,
}

impl Serving {
    /// Builds one life of the actor. What the services behind the sockets need outlives it.
    pub fn new(shared: Shared, life: impl Any + Send) -> Self {
        Serving { shared, _life: Box::new(life) }
    }
}

impl Actor for Serving {
    type Context = Context<Self>;
}

impl Serving {
    /// Answers what comes on a socket until it is to be closed. What is returned is done when it is.
    fn serve(&self, listener: &Arc<TrustedListener>, plugin: Plugin, mut close: watch::Receiver<bool>) -> JoinHandle<()> {
        let (resource, sockets, serving) = (plugin.resource.clone(), Arc::clone(&self.shared.sockets), close.clone());
        let plugin = Arc::new(plugin);
        let follower = Arc::clone(&plugin);
        let broke_off: Arc<dyn Fn() + Send + Sync> = Arc::new(move || follower.tell_of_hang_up());
        let plugin: Arc<dyn api::Plugin> = plugin;
        let incoming = Arc::clone(listener).incoming().map_ok(move |stream| {
            let mut followed = Followed::new(stream, Arc::clone(&broke_off));
            sockets.connections.serve(&mut followed);
            followed
        });
        let closed = Box::pin(async move {
            // An error means that who would say so is gone: the daemon is ending, or the handover is over.
            drop(close.wait_for(|close| *close).await);
        });
        let server = api::server().serve_with_incoming_shutdown(api::serve(&plugin), incoming, closed);
        tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%resource, %error, "the server of a socket failed");
            }
            // Whoever closes it waits until nobody has this.
            drop(serving);
        })
    }
}

impl Handler<Bind> for Serving {
    type Result = Result<String, String>;

    fn handle(&mut self, Bind { resource, registration }: Bind, _: &mut Self::Context) -> Self::Result {
        let shared = self.shared.clone();
        let problem = |error| format!("no socket can be made in `{}`: {error}", shared.sockets.directory().display());
        let bound = shared.sockets.bind(&resource, registration).map_err(problem)?;
        self.serve(&bound.listener, Plugin::new(resource, registration, shared), bound.close);
        Ok(bound.endpoint)
    }
}

impl Handler<Adopt> for Serving {
    type Result = ();

    fn handle(&mut self, Adopt { resource, listener, close }: Adopt, _: &mut Self::Context) {
        let listener = match TrustedListener::adopt(&listener, || metrics::refused("plugin")) {
            Ok(listener) => Arc::new(listener),
            Err(error) => return tracing::warn!(%resource, %error, "the socket of the former instance cannot be served"),
        };
        let path = listener.path().filter(|path| path.parent() == Some(self.shared.sockets.directory()));
        let serving = self.serve(&listener, Plugin::new(resource, NOBODYS, self.shared.clone()), close);
        tokio::spawn(async move {
            drop(serving.await);
            // Whoever made the file cannot take it away any more.
            path.into_iter().for_each(|path| drop(fs::remove_file(path)));
        });
    }
}

impl Handler<Retire> for Serving {
    type Result = ();

    fn handle(&mut self, Retire { resource, newest }: Retire, _: &mut Self::Context) {
        self.shared.sockets.supersede(&resource, newest);
    }
}

impl Handler<Crash> for Serving {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
