//! Events of our sockets: the kubelet opens and ends streams, closes a connection early, or a
//! socket file is removed.

use super::actor::Registration;
use super::core::Event;
use crate::messages::{ClosedEarly, SocketLost, StreamEnded, StreamOpened};
use crate::telemetry::metrics;
use actix::Handler;

impl Handler<StreamOpened> for Registration {
    type Result = ();

    fn handle(&mut self, message: StreamOpened, context: &mut Self::Context) {
        self.on(&message.resource, Event::StreamOpened(message.registration), context);
        // The options of the resource may have changed since.
        self.follow(context);
    }
}

impl Handler<StreamEnded> for Registration {
    type Result = ();

    fn handle(&mut self, message: StreamEnded, context: &mut Self::Context) {
        // The end of a removed resource's stream is no loss.
        self.follow(context);
        let resource = self.resources.get(&message.resource);
        let reason = match resource {
            None => "withdrawn",
            Some(resource) if message.registration < resource.machine.latest() => "superseded",
            Some(_) => "lost",
        };
        metrics::stream_ended(message.resource.as_str(), reason);
        if resource.is_some_and(|resource| resource.has_superseded(message.registration)) {
            tracing::debug!(resource = %message.resource, "the kubelet ended the stream of an older registration, as expected");
            return;
        }
        tracing::info!(resource = %message.resource, "the kubelet's stream ended");
        self.on(&message.resource, Event::StreamEnded(message.registration), context);
    }
}

impl Handler<ClosedEarly> for Registration {
    type Result = ();

    fn handle(&mut self, message: ClosedEarly, context: &mut Self::Context) {
        tracing::debug!(resource = %message.resource, "the kubelet closed its connection before it requested the lists");
        self.on(&message.resource, Event::ClosedEarly(message.registration), context);
    }
}

impl Handler<SocketLost> for Registration {
    type Result = ();

    fn handle(&mut self, message: SocketLost, context: &mut Self::Context) {
        tracing::warn!(resource = %message.resource, "another process removed the socket file; registering on a new one");
        self.on(&message.resource, Event::SocketLost(message.registration), context);
    }
}
