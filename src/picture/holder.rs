//! The holders of devices: the pod and the container of each grant.

use crate::domain::{
    DeviceId, Grant, PendingRelease, PendingReleases, PodRef, PodSight, Timestamp,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The holder of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Holder {
    /// The pod's namespace.
    pub namespace: Option<String>,
    /// The pod's name.
    pub pod: Option<String>,
    /// The pod's UID; `null` until it is known which container got the device.
    pub pod_uid: Option<String>,
    /// The container.
    pub container: Option<String>,
    /// Since when.
    pub since: Timestamp,
    /// What is seen of the pod, if it has ended or is no longer listed; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_seen: Option<PodSight>,
}

impl Holder {
    /// The holder of a grant. Of several pods that use a claim, the first.
    #[must_use]
    pub fn of(grant: &Grant) -> Holder {
        Holder::of_pod(grant, grant.pod())
    }

    /// Every pod that holds a grant.
    fn all_of(grant: &Grant) -> Vec<Holder> {
        let mut all: Vec<Holder> =
            grant.pods().map(|pod| Holder::of_pod(grant, Some(pod))).collect();
        if all.is_empty() {
            all.push(Holder::of_pod(grant, None));
        }
        all
    }

    fn of_pod(grant: &Grant, pod: Option<&PodRef>) -> Holder {
        Holder {
            namespace: pod.and_then(|pod| pod.namespace.clone()),
            pod: pod.and_then(|pod| pod.name.clone()),
            pod_uid: pod.map(|pod| pod.uid.clone()),
            container: grant.container().map(str::to_owned),
            since: grant.granted_at,
            pod_seen: PendingRelease::of_state(grant).map(|release| release.pod),
        }
    }

    /// The holder with the state of its pending release.
    #[must_use]
    pub fn with_release(self, release: Option<&PendingRelease>) -> Holder {
        Holder { pod_seen: release.map(|release| release.pod), ..self }
    }

    /// The holder, and the state of its pod if that has ended: `ml/train-0 (pod gone)`.
    #[must_use]
    pub fn with_state(&self) -> String {
        let state = self.pod_seen.map(|pod| format!(" ({})", pod.state())).unwrap_or_default();
        self.in_words() + &state
    }

    /// `namespace/pod`, or the pod's UID if its name is unknown, or a text for an unknown holder.
    #[must_use]
    pub fn in_words(&self) -> String {
        match (&self.namespace, &self.pod, &self.pod_uid) {
            (Some(namespace), Some(pod), _) => format!("{namespace}/{pod}"),
            (_, _, Some(uid)) => format!("uid:{uid}"),
            _ => "granted, pod not known yet".into(),
        }
    }
}

/// The holders of each device, by the device's own id, which represents all its shares. Each holder
/// is listed once, sorted.
#[must_use]
pub fn holders<'a>(
    grants: impl IntoIterator<Item = &'a Grant>,
    pending: &PendingReleases,
) -> BTreeMap<DeviceId, Vec<Holder>> {
    let mut holders: BTreeMap<DeviceId, Vec<Holder>> = BTreeMap::new();
    for grant in grants.into_iter().filter(|grant| grant.is_live()) {
        for device in &grant.devices {
            let id = device.id.shared().unwrap_or_else(|| device.id.clone());
            let release = PendingRelease::of(grant, pending);
            let all = Holder::all_of(grant).into_iter();
            let all = all.map(|holder| holder.with_release(release.as_ref()));
            holders.entry(id).or_default().extend(all);
        }
    }
    holders.values_mut().for_each(|holders| {
        holders.sort();
        holders.dedup();
    });
    holders
}
