//! The driver's side of the kubelet's DRA API (Dynamic Resource Allocation), for the driver
//! [`DRA_DRIVER`](crate::domain::DRA_DRIVER).
//!
//! ```text
//! <root>/plugins_registry/holdfast.dev@reg.sock   registration: the kubelet finds this socket
//! <root>/plugins/holdfast.dev/dra.sock            Prepare, Unprepare: v1 and v1beta1
//!                                                 health: v1 and v1alpha1
//! <root>/dra_manager_state                        the claims that the kubelet has recorded
//! ```
//!
//! `<root>` is the kubelet's directory. [`Listeners`] opens both sockets, and a [`Server`] answers
//! on them with a [`Claims`]. The messages of each version are translated here, and nothing is
//! decided here. Each UID of a request gets exactly one answer, also if [`Claims`] returns none or
//! two. [`state`] reads the kubelet's record.

mod answers;
mod health;
pub(crate) mod plugin;
mod registration;
mod server;
mod sockets;
pub mod state;
#[cfg(test)]
mod tests;

pub use registration::{Notice, SERVICES};
pub use server::{OnEnd, Server, Tracking};
pub use sockets::{DraSocket, Listeners, registration_socket, remove_passed, service_socket};

use crate::domain::{ClaimHealth, ClaimRef, PreparedDevice};
use std::sync::Arc;
use tokio::sync::watch;

/// One result for each claim of a call.
pub type Answers<T> = Vec<(ClaimRef, Result<T, String>)>;

/// The driver behind the services. A call may be repeated, also after its answer, and also by
/// another kubelet process. A call's future is dropped when the kubelet cancels the call or
/// restarts; Prepare or Unprepare of the same claim may follow.
pub trait Claims: Clone + Send + Sync + 'static {
    /// Prepares claims of one pod. The same claim must get an answer of the same bytes each time:
    /// kubelets up to 1.36 append a second answer to the first. The kubelet waits for 45 s, and
    /// after an error it calls again after 60 to 90 s. The text of an error becomes part of an
    /// event of the pod.
    fn prepare(
        &self,
        claims: Vec<ClaimRef>,
    ) -> impl Future<Output = Answers<Vec<PreparedDevice>>> + Send;

    /// Releases claims whose last pod on this node has ended. The objects may be deleted already.
    /// An unknown claim is a success. After an error the pod stays in Terminating, and the kubelet
    /// calls again.
    fn unprepare(&self, claims: Vec<ClaimRef>) -> impl Future<Output = Answers<()>> + Send;

    /// The health of all devices, always the complete list.
    fn health(&self) -> watch::Receiver<Arc<[ClaimHealth]>>;
}
