//! The actor: binds sockets, and closes superseded ones. Their connections answer calls without the
//! actor.

use super::plugin::Plugin;
use super::shared::Shared;
use super::sockets::Bound;
use crate::domain::ResourceName;
use crate::kubelet::api;
use crate::kubelet::tracked_stream::TrackedStream;
use crate::messages::{Bind, Crash, RegistrationNumber, Retire};
use actix::{Actor, Context, Handler};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The actor.
#[derive(Debug)]
pub struct Serving {
    shared: Shared,
    _life: Box<dyn Any + Send>,
}

impl Serving {
    /// Builds one life of the actor. The state that the services behind the sockets need outlives
    /// it.
    pub fn new(shared: Shared, life: impl Any + Send) -> Self {
        Serving { shared, _life: Box::new(life) }
    }
}

impl Actor for Serving {
    type Context = Context<Self>;
}

/// Answers the calls on a socket until it is closed.
fn serve(shared: Shared, resource: ResourceName, number: RegistrationNumber, bound: Bound) {
    let Bound { listener, close: mut closed, .. } = bound;
    // The server holds these while connections may come, so the socket exists until the server has
    // ended.
    let serving = (closed.clone(), Arc::clone(&listener));
    let plugin = Arc::new(Plugin::new(resource.clone(), number, shared.clone()));
    let notified = Arc::clone(&plugin);
    let on_early_close: Arc<dyn Fn() + Send + Sync> =
        Arc::new(move || notified.report_early_close());
    let plugin: Arc<dyn api::Plugin> = plugin;
    let (Shared { sockets, mut leaving, .. }, served) = (shared, resource.clone());
    // Later connections wait in the socket's queue, for another process.
    let last = async move {
        if leaving.wait_for(|leaving| *leaving).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let incoming = listener.incoming().take_until(last).map_ok(move |stream| {
        let stream = TrackedStream::new(
            stream,
            Arc::clone(&sockets.connections.changed),
            Arc::clone(&on_early_close),
        );
        sockets.connections.serve(Some(&served), &stream);
        stream
    });
    // A server whose incoming stream ends would send GOAWAY on each connection.
    let incoming = incoming.chain(stream::pending()).boxed();
    let closed = Box::pin(async move {
        // An error means that the daemon is ending.
        drop(closed.wait_for(|close| *close).await);
    });
    let server = api::server().serve_with_incoming_shutdown(api::serve(&plugin), incoming, closed);
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%resource, %error, "gRPC server failed");
        }
        // The code that closes the socket waits until this is dropped.
        drop(serving);
    });
}

/// Answers the calls on a socket of an earlier instance too.
///
/// # Errors
/// When the descriptor is not a socket in our directory.
pub fn serve_passed(shared: &Shared, resource: &ResourceName, socket: OwnedFd) -> io::Result<()> {
    let (number, bound) = shared.sockets.take(resource, socket)?;
    serve(shared.clone(), resource.clone(), number, bound);
    Ok(())
}

impl Handler<Bind> for Serving {
    type Result = Result<String, String>;

    fn handle(
        &mut self,
        Bind { resource, registration }: Bind,
        _: &mut Self::Context,
    ) -> Self::Result {
        let shared = self.shared.clone();
        let problem = |error| {
            format!("cannot create a socket in `{}`: {error}", shared.sockets.directory().display())
        };
        let bound = shared.sockets.bind(&resource, registration).map_err(problem)?;
        let endpoint = bound.endpoint.clone();
        serve(shared, resource, registration, bound);
        Ok(endpoint)
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
