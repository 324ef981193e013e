//! What is true now: the devices, their health and their holders; pure.

use crate::domain::{
    DeviceId, Grant, GrantState, Health, Inventory, Offering, PodRef, Reason, ResourceName,
    Timestamp, Verdicts,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A device of a resource. The shares of one device are one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    /// The resource that offers it.
    pub resource: ResourceName,
    /// Its id, as `status` shows it.
    pub id: DeviceId,
}

/// A pod whose name, namespace and UID are all known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Distinguishes it from an earlier pod of the same name.
    pub uid: String,
}

impl Pod {
    /// `None` if a part is unknown: an Event could be shown on another pod.
    fn of(pod: &PodRef) -> Option<Self> {
        let (namespace, name) = (pod.namespace.clone()?, pod.name.clone()?);
        let is_known = !namespace.is_empty() && !name.is_empty() && !pod.uid.is_empty();
        is_known.then(|| Pod { namespace, name, uid: pod.uid.clone() })
    }
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub reason: Reason,
    /// The reading; may be empty.
    pub detail: String,
    /// When it was found, if that was recorded.
    pub since: Option<Timestamp>,
}

/// What is known about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It is healthy.
    Healthy,
    /// It has failed.
    Failed(Failure),
    /// It could not be read since the start.
    Unread,
    /// It is not given away, for a reason that is no failure: an operator's cordon, the
    /// configuration, a hook that runs. Whether it is healthy is not known then.
    Withheld,
}

impl Standing {
    fn of(health: Health, device: &DeviceId, verdicts: &Verdicts) -> Self {
        let Some(reason) = health.reason() else { return Standing::Healthy };
        match reason {
            Reason::Unread => return Standing::Unread,
            Reason::Cordoned | Reason::HookPending => return Standing::Withheld,
            _ if Reason::is_of_the_configuration(reason.as_str()) => return Standing::Withheld,
            _ => {}
        }
        let verdict = verdicts.get(device);
        let incident = verdict.and_then(|verdict| verdict.incidents.last());
        let is_its = |of: Reason| of == reason || reason == Reason::Flapping;
        Standing::Failed(Failure {
            reason,
            detail: verdict.map(|verdict| verdict.detail(reason).to_owned()).unwrap_or_default(),
            since: incident.filter(|it| is_its(it.reason)).map(|it| it.at),
        })
    }

    /// Shares of one device may differ: the worst counts.
    fn rank(&self) -> u8 {
        match self {
            Standing::Healthy => 0,
            Standing::Withheld => 1,
            Standing::Unread => 2,
            Standing::Failed(_) => 3,
        }
    }
}

/// A device that is held, or not healthy, or asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenDevice {
    /// What is known about it.
    pub standing: Standing,
    /// Whether a grant holds it.
    pub is_held: bool,
    /// The pods that hold it, as far as they are known.
    pub pods: BTreeSet<Pod>,
}

/// What is true now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The devices that are held, or not healthy, or asked for.
    pub devices: BTreeMap<DeviceName, SeenDevice>,
    /// The number of offered devices.
    pub total: usize,
}

/// The holders of an id of a resource.
type Holders<'a> = BTreeMap<(&'a ResourceName, &'a DeviceId), BTreeSet<Pod>>;

impl Seen {
    /// What the snapshots show. `also` are devices that are listed even if they are healthy and
    /// free, as long as they are offered.
    #[must_use]
    pub fn of(
        inventory: &Inventory,
        verdicts: &Verdicts,
        grants: &[Arc<Grant>],
        also: &BTreeSet<DeviceName>,
    ) -> Self {
        let holders = holders(grants);
        let mut seen = Seen::default();
        for (resource, offering) in &inventory.resources {
            seen.add(resource, offering, verdicts, &holders, also);
        }
        seen
    }

    fn add(
        &mut self,
        resource: &ResourceName,
        offering: &Offering,
        verdicts: &Verdicts,
        holders: &Holders<'_>,
        also: &BTreeSet<DeviceName>,
    ) {
        let mut all: BTreeMap<&DeviceId, SeenDevice> = BTreeMap::new();
        for (id, offered) in &offering.devices {
            let device = &offered.device.id;
            let standing = Standing::of(offered.health, device, verdicts);
            let pods = holders.get(&(resource, id));
            let known = all.entry(device).or_insert_with(|| SeenDevice {
                standing: standing.clone(),
                is_held: false,
                pods: BTreeSet::new(),
            });
            if standing.rank() > known.standing.rank() {
                known.standing = standing;
            }
            known.is_held |= pods.is_some();
            known.pods.extend(pods.into_iter().flatten().cloned());
        }
        self.total += all.len();
        for (id, device) in all {
            let name = DeviceName { resource: resource.clone(), id: id.clone() };
            let is_healthy = device.standing == Standing::Healthy;
            if device.is_held || !is_healthy || also.contains(&name) {
                self.devices.insert(name, device);
            }
        }
    }

    /// The devices that have failed.
    pub fn failed(&self) -> impl Iterator<Item = (&DeviceName, &Failure)> {
        self.devices.iter().filter_map(|(name, device)| match &device.standing {
            Standing::Failed(failure) => Some((name, failure)),
            _ => None,
        })
    }

    /// The number of devices with this standing, other than a failure.
    pub(super) fn count(&self, standing: &Standing) -> usize {
        self.devices.values().filter(|device| device.standing == *standing).count()
    }
}

/// The pods that hold each id now. Of a pod that the kubelet no longer lists, and of a claim that
/// was unprepared, only the id.
fn holders(grants: &[Arc<Grant>]) -> Holders<'_> {
    let mut holders = Holders::new();
    for grant in grants.iter().filter(|grant| grant.is_live()) {
        let has_pods = matches!(
            grant.state,
            GrantState::Bound { .. } | GrantState::Prepared { unprepared_at: None, .. }
        );
        for device in grant.held_devices() {
            let pods = holders.entry((&grant.resource, &device.id)).or_default();
            if has_pods {
                pods.extend(grant.pods().filter_map(Pod::of));
            }
        }
    }
    holders
}
