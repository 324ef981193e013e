//! The inputs and the states of the machine.

use crate::domain::KubeletGeneration;
use std::time::Duration;

/// An input of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The kubelet's socket exists with this identity, or does not exist.
    Kubelet(Option<KubeletGeneration>),
    /// Register succeeded.
    Registered(u64),
    /// Register failed: the kubelet answered with an error, or our own socket could not be made.
    Refused(u64),
    /// Register failed: no process listens on the kubelet's socket.
    Absent(u64),
    /// A stream opened on the socket of this registration.
    StreamOpened(u64),
    /// A stream on the socket of this registration ended.
    StreamEnded(u64),
    /// The kubelet closed its connection to this registration's socket before it requested the
    /// lists.
    ClosedEarly(u64),
    /// The file of this registration's socket was removed.
    SocketLost(u64),
    /// The kubelet has the resource from another plugin, or not at all, although a stream is open
    /// (`audit.rs`).
    Mismatch,
    /// The options that Register announced have changed.
    Changed,
    /// Time has passed.
    Tick,
}

/// What is known about the resource in the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// No kubelet to register with.
    AwaitingKubelet { retry_at: Duration },
    /// A Register is in progress; its result is unknown.
    Registering,
    /// The last try failed, or its stream ended. The next try is due at this time.
    BackingOff { until: Duration },
    /// Registered. It is unknown whether the kubelet will open the stream.
    AwaitingStream { until: Duration },
    /// The stream is open after a loss. It is unknown whether the kubelet has kept the endpoint.
    Settling { until: Duration },
    /// Registered, the stream is open, nothing is due.
    Steady,
    /// Lost too often: another plugin takes the resource too. The next try is due at this time.
    Contested { until: Duration },
}
