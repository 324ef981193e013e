//! What a test or a user does to the node's pods: create, resize, stop, complete, crash, delete.

use super::event::EventKind;
use super::pod::{Pod, PodPhase, PodSpec};
use super::state::Shared;
use super::worker;
use std::io;
use std::sync::Arc;

impl Shared {
    /// Binds a pod to the node.
    pub(in crate::lab::sim) fn bind_pod(&self, spec: PodSpec) {
        self.update(|state| state.pods.push(Pod::new(spec)));
        self.pod_added.notify_one();
    }

    /// Requests another decision on a running pod.
    pub(in crate::lab::sim) fn resize_pod(&self, uid: &str) {
        self.update(|state| {
            state.instance.as_mut().map(|present| present.resizes.push_back(uid.to_owned()))
        });
        self.pod_added.notify_one();
    }

    /// Deletes a pod whose containers have ended, including one that was deleted by force. Returns
    /// whether there was one.
    pub(in crate::lab::sim) fn end_pod(&self, uid: &str) -> io::Result<bool> {
        let spec = self.peek().spec(uid).cloned();
        let Some(spec) = spec else { return Ok(false) };
        self.environment.remove_cgroup(uid)?;
        self.environment.remove_logs(&spec)?;
        self.update(|state| {
            state.orphans.remove(uid);
            state.pods.retain(|pod| pod.spec.uid != uid);
        });
        self.log(EventKind::Deleted { pod_uid: uid.to_owned() });
        Ok(true)
    }

    /// The containers of a pod have ended and are not started again: it is being deleted.
    pub(in crate::lab::sim) fn stop_pod(&self, uid: &str) {
        self.update(|state| {
            let pods = state.pods.iter_mut().chain(state.orphans.values_mut());
            for pod in pods.filter(|pod| pod.spec.uid == uid) {
                pod.containers
                    .values_mut()
                    .for_each(|container| (container.running, container.ended) = (false, true));
            }
        });
    }

    /// The containers of a pod have done their work. Returns whether the pod ran.
    pub(in crate::lab::sim) fn complete_pod(&self, uid: &str) -> bool {
        self.update(|state| {
            let Some(pod) = state.pod(uid).filter(|pod| pod.phase == PodPhase::Running) else {
                return false;
            };
            pod.containers
                .values_mut()
                .for_each(|container| (container.running, container.ended) = (false, true));
            pod.phase = PodPhase::Succeeded;
            true
        })
    }

    /// Every container dies, and all are to be started again, including init containers.
    pub(in crate::lab::sim) fn end_containers(&self) {
        let now = self.environment.now();
        // No kubelet restarts a pod that was deleted by force; the kubelet removes its log folder.
        let orphans = self.update(|state| std::mem::take(&mut state.orphans));
        for orphan in orphans.values() {
            worker::note(self, self.environment.remove_logs(&orphan.spec));
        }
        self.update(|state| {
            for pod in &mut state.pods {
                pod.has_cgroup = false;
                if pod.is_over() {
                    continue;
                }
                for container in pod.containers.values_mut() {
                    (container.running, container.ended, container.ends_at, container.retry_at) =
                        (false, false, None, now);
                }
            }
        });
    }

    /// A container ends without a command.
    pub(in crate::lab::sim) fn crash_container(self: &Arc<Self>, uid: &str, container: &str) {
        worker::crash(self, uid, container);
    }

    /// A pod is deleted by force: its containers continue to run. Returns whether there was one.
    pub(in crate::lab::sim) fn orphan_pod(&self, uid: &str) -> bool {
        self.update(|state| {
            let orphan = state
                .pods
                .iter()
                .position(|pod| pod.spec.uid == uid)
                .map(|index| state.pods.remove(index));
            orphan.is_some_and(|orphan| state.orphans.insert(uid.to_owned(), orphan).is_none())
        })
    }
}
