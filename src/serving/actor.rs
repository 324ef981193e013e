//! The shell: makes sockets, and has those closed that are superseded. The connections that come on them answer by themselves.

use super::plugin::{Plugin, Shared};
use crate::kubelet::api;
use crate::kubelet::conversation::Followed;
use crate::messages::{Bind, Crash, Retire};
use actix::{Actor, Context, Handler};
use futures_util::TryStreamExt as _;
use std::any::Any;
use std::sync::Arc;

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

impl Handler<Bind> for Serving {
    type Result = Result<String, String>;

    fn handle(&mut self, Bind { resource, registration }: Bind, _: &mut Self::Context) -> Self::Result {
        let shared = self.shared.clone();
        let problem = |error| format!("no socket can be made in `{}`: {error}", shared.sockets.directory().display());
        let bound = shared.sockets.bind(&resource, registration).map_err(problem)?;
        let plugin = Arc::new(Plugin { resource: resource.clone(), registration, shared });
        let (mut close, serving) = (bound.close.clone(), bound.close);
        let closed = Box::pin(async move {
            // An error means that the table itself is gone, and the daemon with it.
            drop(close.wait_for(|close| *close).await);
        });
        let follower = Arc::clone(&plugin);
        let broke_off: Arc<dyn Fn() + Send + Sync> = Arc::new(move || follower.tell_of_hang_up());
        let plugin: Arc<dyn api::Plugin> = plugin;
        let incoming = bound.listener.incoming().map_ok(move |stream| Followed::new(stream, Arc::clone(&broke_off)));
        let server = tonic::transport::Server::builder().serve_with_incoming_shutdown(api::serve(&plugin), incoming, closed);
        tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%resource, %error, "the server of a socket failed");
            }
            drop(serving);
        });
        Ok(bound.endpoint)
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
