//! How a kubelet behaves, wherever it lives.

use super::profile::Profile;
use std::time::Duration;

/// The waits of a kubelet's start, from one phase to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gaps {
    /// From the pod-resources API to the container manager, which notes the containers that run.
    pub to_container_manager: Duration,
    /// From there to the device manager, which reads the checkpoint, cleans its directory and makes `kubelet.sock`.
    pub to_device_manager: Duration,
    /// From `kubelet.sock` to the first status of the node.
    pub to_first_status: Duration,
    /// From `kubelet.sock` to the admission of the pods that the node has already. A real one looks 0, 100, 300 and 700 ms
    /// after the start of its sync loop whether the runtime is there and everything has begun, and sleeps in between;
    /// `kubelet.sock` is made during one of these naps. So this is what is left of the nap: anything from nothing to
    /// 200 ms, and much the same at every start of one machine. Seen were 19, 64 to 86, and 171 ms.
    pub to_first_batch: Duration,
}

/// How a kubelet behaves.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// Its version, as far as registration is concerned.
    pub profile: Profile,
    /// Whether it crashes where it takes a device that has left the list: from 1.35 on.
    pub panics: bool,
    /// Whether a topology policy is active: it looks at more devices, and so crashes at more places.
    pub topology_manager: bool,
    /// How long a Register may dial its endpoint: 10 s.
    pub dial_within: Duration,
    /// The waits of its start.
    pub gaps: Gaps,
    /// How long it waits before it starts a container again that ended or could not be started.
    pub restart_after: Duration,
    /// How long an init container runs at most.
    pub init_takes: Duration,
    /// How long it takes at most to kill the containers of a pod that it rejects.
    pub kill_within: Duration,
}

impl Default for Behaviour {
    /// Kubelet 1.36: its gaps as they were measured, but for the one to the first status, which is derived from its code.
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
