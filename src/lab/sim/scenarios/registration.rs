//! The daemon's registrations: a state machine for each resource, its sockets, and the work of the
//! actor around them.

use super::daemon::Inner;
use super::service::Service;
use crate::domain::{ResourceName, Safeguard};
use crate::kubelet::api::negotiation::{NegotiatedVersion, Negotiation};
use crate::kubelet::register::REGISTER_DEADLINE;
use crate::lab::sim::executor::Task;
use crate::lab::sim::memory::{Bound, RegisterError, RegisterRequest};
use crate::registration::core::{Event, Machine, State};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::mpsc;

/// One resource's registration.
#[derive(Debug)]
pub(super) struct Registration {
    events: mpsc::UnboundedSender<Event>,
    state: Mutex<RegistrationState>,
}

/// The state of a registration.
#[derive(Debug)]
pub(super) struct RegistrationState {
    pub(super) machine: Machine,
    sockets: BTreeMap<u64, Socket>,
    /// The version of the API that worked last.
    spoken: Option<NegotiatedVersion>,
}

#[derive(Debug)]
struct Socket {
    bound: Bound,
    streams: u32,
    superseded: bool,
}

impl Registration {
    pub(super) fn new(now: Duration) -> (Self, mpsc::UnboundedReceiver<Event>) {
        let (events, received) = mpsc::unbounded_channel();
        let state = RegistrationState {
            machine: Machine::new(now, 0),
            sockets: BTreeMap::new(),
            spoken: None,
        };
        (Registration { events, state: Mutex::new(state) }, received)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RegistrationState> {
        self.state.lock().unwrap()
    }

    /// The number of the latest registration.
    pub(super) fn latest(&self) -> u64 {
        self.lock().machine.latest()
    }

    pub(super) fn stream_opened(&self, number: u64) {
        if let Some(socket) = self.lock().sockets.get_mut(&number) {
            socket.streams += 1;
        }
        self.send(Event::StreamOpened(number));
    }

    pub(super) fn stream_ended(&self, number: u64) {
        let mut state = self.lock();
        if let Some(socket) = state.sockets.get_mut(&number) {
            socket.streams = socket.streams.saturating_sub(1);
        }
        state.close_unused();
        let is_replaced = state.has_superseded(number);
        drop(state);
        if !is_replaced {
            self.send(Event::StreamEnded(number));
        }
    }

    pub(super) fn send(&self, event: Event) {
        // The process may be dead.
        let _ = self.events.send(event);
    }
}

impl RegistrationState {
    /// Whether the kubelet ended this registration's stream only to replace it by a newer one.
    fn has_superseded(&self, number: u64) -> bool {
        number < self.machine.latest()
            && self
                .spoken
                .is_some_and(|spoken| spoken.version.package().replaces_connection_on_register())
    }

    fn retire(&mut self, newest: u64) {
        for (_, socket) in self.sockets.range_mut(..newest) {
            socket.superseded = true;
        }
        self.close_unused();
    }

    fn close_unused(&mut self) {
        for (_, socket) in
            self.sockets.extract_if(.., |_, socket| socket.superseded && socket.streams == 0)
        {
            socket.bound.close();
        }
    }
}

impl Inner {
    pub(super) fn registration(&self, resource: &ResourceName) -> &Registration {
        &self.registrations[resource]
    }

    pub(super) async fn register(
        self: Arc<Self>,
        resource: ResourceName,
        mut events: mpsc::UnboundedReceiver<Event>,
    ) {
        let mut kubelet = self.node.kubelet_socket();
        let first = *kubelet.borrow_and_update();
        let mut attempt = None;
        self.on(&resource, Event::Kubelet(first), &mut attempt);
        self.on(&resource, Event::Tick, &mut attempt);
        loop {
            let deadline = self.registration(&resource).lock().machine.next_deadline();
            let wait = deadline.map_or(Duration::from_secs(3600), |deadline| {
                deadline.saturating_sub(self.node.moment().boot)
            });
            let event = tokio::select! {
                biased;
                Some(event) = events.recv() => event,
                _ = kubelet.changed() => Event::Kubelet(*kubelet.borrow_and_update()),
                () = self.node.handle().sleep(wait) => Event::Tick,
            };
            self.on(&resource, event, &mut attempt);
        }
    }

    fn on(self: &Arc<Self>, resource: &ResourceName, event: Event, attempt: &mut Option<Task>) {
        let mut state = self.registration(resource).lock();
        let was_contested = state.machine.is_contested();
        let begin = state.machine.on(event, self.node.moment().boot);
        let doubt_until = state.machine.doubt_until();
        if state.machine.is_contested() && !was_contested {
            self.disk.lock().truces += 1;
        }
        if matches!(state.machine.state(), State::Steady | State::Settling { .. }) {
            let newest = state.machine.latest();
            state.retire(newest);
        }
        drop(state);
        if let Some(number) = begin {
            self.audit.registered(self.node.moment().boot, doubt_until);
            if let Some(superseded) = attempt.take() {
                superseded.abort();
            }
            *attempt = Some(self.process.spawn(Arc::clone(self).attempt(resource.clone(), number)));
        }
    }

    async fn attempt(self: Arc<Self>, resource: ResourceName, number: u64) {
        let event = if self.node.kubelet_socket().borrow().is_none() {
            Event::Absent(number)
        } else {
            let endpoint = self.bind(&resource, number);
            match self
                .node
                .handle()
                .timeout(REGISTER_DEADLINE, self.negotiate(&resource, &endpoint))
                .await
            {
                Some(Ok(())) => Event::Registered(number),
                Some(Err(RegisterError::Absent(_))) => Event::Absent(number),
                Some(Err(RegisterError::Refused(_))) | None => Event::Refused(number),
            }
        };
        let registration = self.registration(&resource);
        if matches!(event, Event::Absent(_) | Event::Refused(_)) {
            registration.lock().retire(number);
        }
        registration.send(event);
    }

    /// Registers in the version that the kubelet accepts.
    async fn negotiate(
        &self,
        resource: &ResourceName,
        endpoint: &str,
    ) -> Result<(), RegisterError> {
        let kubelet = *self.node.kubelet_socket().borrow();
        let worked =
            self.registration(resource).lock().spoken.and_then(|spoken| spoken.with(kubelet));
        let mut negotiation = Negotiation::new(worked);
        let mut last = None;
        while let Some(version) = negotiation.next() {
            self.disk
                .lock()
                .registers
                .entry((self.instance, kubelet, resource.clone()))
                .or_default()
                .push(self.node.handle().now());
            let request = RegisterRequest {
                version: version.name().into(),
                resource: resource.to_string(),
                endpoint: endpoint.into(),
                options: None,
            };
            match self.node.register(request).await {
                Ok(()) => {
                    self.registration(resource).lock().spoken =
                        Some(NegotiatedVersion { version, kubelet });
                    return Ok(());
                }
                Err(RegisterError::Refused(status)) if negotiation.refused(version, &status) => {
                    last = Some(RegisterError::Refused(status));
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap())
    }

    /// A socket for one registration.
    fn bind(self: &Arc<Self>, resource: &ResourceName, number: u64) -> String {
        let (unique, stem, instance) =
            (Safeguard::UniqueSockets.is_on(), resource.file_stem(), self.instance);
        let path = if unique {
            format!(".holdfast/{stem}-{instance}-{number}.sock")
        } else {
            format!(".holdfast/{stem}.sock")
        };
        let mut state = self.registration(resource).lock();
        if !unique && let Some((_, socket)) = state.sockets.pop_last() {
            state.sockets.insert(number, socket);
            return path;
        }
        let service = Service { inner: Arc::clone(self), resource: resource.clone(), number };
        let bound = self.process.bind(&path, Arc::new(service)).unwrap();
        state.sockets.insert(number, Socket { bound, streams: 0, superseded: false });
        path
    }
}
