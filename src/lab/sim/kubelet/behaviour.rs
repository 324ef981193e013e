//! The behaviour of a kubelet, in any environment.

use super::profile::Profile;
use std::time::Duration;

/// The waits of a kubelet's start, from one phase to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gaps {
    /// From the pod-resources API to the container manager, which records the running containers.
    pub to_container_manager: Duration,
    /// From there to the device manager, which reads the checkpoint, cleans its directory and
    /// creates `kubelet.sock`.
    pub to_device_manager: Duration,
    /// From `kubelet.sock` to the first status of the node.
    pub to_first_status: Duration,
    /// From `kubelet.sock` to the admission of the pods that the node has already. A real kubelet
    /// checks at 0, 100, 300 and 700 ms after the start of its sync loop whether the runtime is
    /// ready and everything has started. It sleeps in between. `kubelet.sock` is created during one
    /// of these sleeps, so this gap is the rest of that sleep: between 0 and 200 ms, and nearly the
    /// same at every start of one machine. Measured: 19, 64 to 86, and 171 ms.
    pub to_first_batch: Duration,
}

/// The behaviour of a kubelet.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// Its version, for registration.
    pub profile: Profile,
    /// Whether it crashes where it uses a device that has left the list: from 1.35 on.
    pub panics: bool,
    /// Whether a topology policy is active: the kubelet then reads more devices, and so crashes at
    /// more places.
    pub topology_manager: bool,
    /// How long a Register may dial its endpoint: 10 s.
    pub dial_within: Duration,
    /// The waits of its start.
    pub gaps: Gaps,
    /// The wait before it restarts a container that ended or could not be started.
    pub restart_after: Duration,
    /// The longest run time of an init container.
    pub init_takes: Duration,
    /// The longest time to kill the containers of a rejected pod.
    pub kill_within: Duration,
}

impl Default for Behaviour {
    /// Kubelet 1.36 with its measured gaps. The gap to the first status is derived from its code
    /// instead.
    fn default() -> Self {
        Behaviour {
            profile: Profile::K125,
            panics: true,
            topology_manager: false,
            dial_within: Duration::from_secs(10),
            gaps: Gaps {
                to_container_manager: Duration::from_millis(100),
                to_device_manager: Duration::ZERO,
                to_first_status: Duration::from_millis(21),
                to_first_batch: Duration::from_millis(75),
            },
            restart_after: Duration::from_secs(10),
            init_takes: Duration::from_secs(1),
            kill_within: Duration::from_secs(1),
        }
    }
}
