//! The control plane: claims, pods, the scheduler and the controller of claims.

use super::world::{MS, SECOND, World, name_of};
use crate::domain::{Allocated, AllocatedClaim, ClaimRef, DeviceClass, DeviceId, DraName, PodRef};
use crate::slices::api::ResourceSlice;
use crate::slices::attributes::SHARES;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// A request of a claim.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) name: &'static str,
    pub(super) class: DeviceClass,
    pub(super) count: usize,
    pub(super) is_admin: bool,
}

/// A claim.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) of: ClaimRef,
    requests: Vec<Request>,
    /// Empty while it is not allocated.
    pub(super) allocation: Vec<Allocated>,
    /// The pods that it is reserved for, by their UIDs.
    pub(super) reserved_for: BTreeSet<String>,
    /// Whether it is deleted with its pod.
    is_of_template: bool,
    /// Whether it is deleted when no pod uses it any longer.
    is_deleted: bool,
}

/// A pod of the node.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) uid: String,
    /// The names of its claims.
    pub(super) claims: Vec<String>,
    /// Devices that it wants by number.
    pub(super) numbers: usize,
    /// Whether the scheduler has bound it.
    pub(super) is_bound: bool,
    /// Whether it is being deleted.
    pub(super) is_deleted: bool,
}

/// A device, and the share id of a part of it.
pub(super) type Part = (DraName, Option<String>);

/// An allocation of a claim: its devices, and the time when it ended.
#[derive(Debug, Clone)]
pub(super) struct Period {
    devices: Vec<Allocated>,
    until: Option<Duration>,
}

#[derive(Debug, Default)]
pub(super) struct Cluster {
    /// By name.
    claims: BTreeMap<String, Claim>,
    pub(super) pods: BTreeMap<String, Pod>,
    pub(super) slices: BTreeMap<String, ResourceSlice>,
    /// The changes of slices that the watch of the daemon has not read yet.
    pub(super) changed_slices: Vec<(bool, ResourceSlice)>,
    pub(super) version: u64,
    /// Every allocation, by the UID of its claim.
    periods: BTreeMap<String, Vec<Period>>,
    uids: u64,
    /// Whether it does not answer.
    pub(super) is_away: bool,
    /// Whether it does not answer questions about claims that may have ended.
    pub(super) hides_ends: bool,
    /// The longest time until an answer about a claim.
    pub(super) slowest: Duration,
}

impl Cluster {
    fn next_uid(&mut self, kind: &str) -> String {
        self.uids += 1;
        format!("{kind}{}", self.uids)
    }

    /// Creates a claim. Its name may have been used before.
    pub(super) fn create_claim(
        &mut self,
        name: Option<String>,
        requests: Vec<Request>,
        is_of_template: bool,
    ) -> String {
        let uid = self.next_uid("c");
        let name = name.unwrap_or_else(|| format!("claim-{uid}"));
        let of = ClaimRef { uid, namespace: "ml".into(), name: name.clone() };
        let claim = Claim {
            of,
            requests,
            allocation: Vec::new(),
            reserved_for: BTreeSet::new(),
            is_of_template,
            is_deleted: false,
        };
        self.claims.insert(name.clone(), claim);
        name
    }

    pub(super) fn create_pod(&mut self, claims: Vec<String>, numbers: usize) -> String {
        let uid = self.next_uid("p");
        let pod = Pod { uid: uid.clone(), claims, numbers, is_bound: false, is_deleted: false };
        self.pods.insert(uid.clone(), pod);
        uid
    }

    /// The names of claims that several pods may use.
    pub(super) fn standing_claims(&self) -> Vec<String> {
        let standing =
            self.claims.values().filter(|claim| !claim.is_of_template && !claim.is_deleted);
        standing.map(|claim| claim.of.name.clone()).collect()
    }

    /// Deletes a claim by force, with its pods. Their containers run.
    pub(super) fn forget_claim(&mut self, name: &str, now: Duration) {
        self.pods.retain(|_, pod| !pod.claims.iter().any(|claim| claim == name));
        self.control(now);
        self.claims.remove(name);
    }

    /// Deletes a claim: at once if no pod uses it, else after the last one.
    pub(super) fn delete_claim(&mut self, name: &str, now: Duration) {
        if let Some(claim) = self.claims.get_mut(name) {
            claim.is_deleted = true;
        }
        self.control(now);
    }

    pub(super) fn delete_pod(&mut self, uid: &str) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.is_deleted = true;
            if !pod.is_bound {
                self.pods.remove(uid);
            }
        }
    }

    /// The claim as the API server answers it.
    pub(super) fn get(&self, name: &str) -> Option<AllocatedClaim> {
        let claim = self.claims.get(name)?;
        let pod = |uid: &String| PodRef {
            uid: uid.clone(),
            namespace: Some("ml".into()),
            name: Some(format!("pod-{uid}")),
        };
        Some(AllocatedClaim {
            claim: claim.of.clone(),
            is_allocated: !claim.allocation.is_empty(),
            devices: claim.allocation.clone(),
            reserved_for: claim.reserved_for.iter().map(pod).collect(),
            configs: Vec::new(),
            is_by_number: false,
            pod_claim: None,
            is_deleted: claim.is_deleted,
        })
    }

    /// The devices that the scheduler may use: published, and without a taint. Each with the claims
    /// that may have a part of it, if several may.
    fn free(&self) -> BTreeMap<DraName, Option<usize>> {
        let newest = |pool: &str| {
            let of_pool = self.slices.values().filter(|slice| slice.spec.pool.name == pool);
            of_pool.map(|slice| slice.spec.pool.generation).max()
        };
        let slices = self
            .slices
            .values()
            .filter(|slice| newest(&slice.spec.pool.name) == Some(slice.spec.pool.generation));
        slices
            .flat_map(|slice| {
                let pool = &slice.spec.pool.name;
                let usable = slice.spec.devices.iter().filter(|device| device.taints.is_empty());
                usable.map(|device| {
                    let parts = device.capacity.get(SHARES).map(|it| it.value.parse().unwrap());
                    let parts = parts.filter(|_| device.allow_multiple_allocations);
                    (DraName { pool: pool.clone(), device: device.name.clone() }, parts)
                })
            })
            .collect()
    }

    /// One turn of the scheduler: allocates the claims of the pods that wait, and binds the pods
    /// whose claims are all allocated.
    fn schedule(&mut self) {
        let waiting: Vec<Pod> =
            self.pods.values().filter(|pod| !pod.is_bound && !pod.is_deleted).cloned().collect();
        for pod in waiting {
            let Some(allocations) = self.fit(&pod) else { continue };
            for (name, devices) in allocations {
                let claim = self.claims.get_mut(&name).unwrap();
                claim.allocation.clone_from(&devices);
                let period = Period { devices, until: None };
                self.periods.entry(claim.of.uid.clone()).or_default().push(period);
            }
            for name in &pod.claims {
                let claim = self.claims.get_mut(name).unwrap();
                claim.reserved_for.insert(pod.uid.clone());
            }
            self.pods.get_mut(&pod.uid).unwrap().is_bound = true;
        }
    }

    /// Devices for the claims of a pod that are not allocated; `None` if not all fit.
    fn fit(&self, pod: &Pod) -> Option<Vec<(String, Vec<Allocated>)>> {
        let published = self.free();
        let allocated = self.claims.values().flat_map(|claim| &claim.allocation);
        let mut used: Vec<DraName> =
            allocated.filter(|of| !of.admin).map(|of| of.name.clone()).collect();
        let mut allocations = Vec::new();
        for name in &pod.claims {
            let claim = self.claims.get(name).filter(|claim| !claim.is_deleted)?;
            if !claim.allocation.is_empty() {
                continue;
            }
            let mut devices: Vec<Allocated> = Vec::new();
            for request in &claim.requests {
                let mut left = request.count;
                for (name, parts) in &published {
                    let is_of_class = is_of_class(name, request.class);
                    let is_twice = devices.iter().any(|of| of.name == *name);
                    let is_free = request.is_admin || !used.contains(name);
                    let mut of = Allocated {
                        request: request.name.into(),
                        name: name.clone(),
                        share_id: None,
                        admin: request.is_admin,
                    };
                    if let Some(parts) = parts.filter(|_| is_of_class) {
                        let has = used.iter().filter(|used| *used == name).count() + devices.len();
                        for nth in 0..left.min(parts.saturating_sub(has)) {
                            let (uid, times) = (&claim.of.uid, self.periods.get(&claim.of.uid));
                            let times = times.map_or(0, Vec::len);
                            of.share_id = Some(format!("{uid}-{times}-{nth}"));
                            devices.push(of.clone());
                            left -= 1;
                        }
                    } else if left > 0 && is_of_class && is_free && !is_twice {
                        left -= 1;
                        devices.push(of);
                    }
                }
                if left > 0 {
                    return None;
                }
            }
            used.extend(devices.iter().filter(|of| !of.admin).map(|of| of.name.clone()));
            allocations.push((name.clone(), devices));
        }
        Some(allocations)
    }

    /// One turn of the controller of claims: pods that no longer exist give up their claims, and
    /// claims without a pod give up their devices.
    pub(super) fn control(&mut self, now: Duration) {
        let Cluster { claims, pods, periods, .. } = self;
        let wanted: BTreeSet<&String> = pods.values().flat_map(|pod| &pod.claims).collect();
        claims.retain(|name, claim| {
            claim.reserved_for.retain(|uid| pods.contains_key(uid));
            if !claim.reserved_for.is_empty() {
                return true;
            }
            if !claim.allocation.is_empty() {
                claim.allocation.clear();
                let last = periods.get_mut(&claim.of.uid).and_then(|periods| periods.last_mut());
                last.unwrap().until = Some(now);
            }
            !claim.is_deleted && (!claim.is_of_template || wanted.contains(name))
        });
    }

    /// Whether these are the devices that the claim had at some time of the period.
    pub(super) fn had(&self, uid: &str, devices: &BTreeSet<Part>, from: Duration) -> bool {
        let is_same = |period: &Period| {
            let had: BTreeSet<Part> =
                period.devices.iter().map(|of| (of.name.clone(), of.share_id.clone())).collect();
            period.until.is_none_or(|until| until >= from) && had == *devices
        };
        self.periods.get(uid).is_some_and(|periods| periods.iter().any(is_same))
    }

    /// The devices that a claim has now, by its UID.
    pub(super) fn devices_of(&self, uid: &str) -> BTreeSet<DraName> {
        let mut claims = self.claims.values().filter(|claim| claim.of.uid == uid);
        let devices = claims.next().into_iter().flat_map(|claim| &claim.allocation);
        devices.map(|of| of.name.clone()).collect()
    }

    /// Whether the claim has, or had, the device with access for an administrator. That is a
    /// property of its request.
    pub(super) fn is_admin(&self, uid: &str, id: &DeviceId) -> bool {
        let periods = self.periods.get(uid).into_iter().flatten();
        let mut devices = periods.flat_map(|period| &period.devices);
        devices.any(|of| of.admin && id_of(&of.name).as_ref() == Some(id))
    }
}

fn is_of_class(name: &DraName, class: DeviceClass) -> bool {
    name.pool == name_of(&DeviceId::new("x"), class).pool
}

/// The id of a device by its name.
pub(super) fn id_of(name: &DraName) -> Option<DeviceId> {
    let all = super::machine::devices();
    let mut named = all.filter(|(id, pool)| name_of(id, pool.class) == *name);
    named.next().map(|(id, _)| id)
}

/// Runs the scheduler and the controller.
pub(super) async fn run(world: Arc<World>) {
    loop {
        world.pause(50 * MS, 500 * MS).await;
        let now = world.handle.now();
        if world.random(|random| random.chance(0.5)) {
            world.cluster().schedule();
        } else {
            world.cluster().control(now);
        }
    }
}

/// Asks the API server for a claim.
pub(super) async fn ask(world: &World, name: &str) -> Result<Option<AllocatedClaim>, String> {
    let (slowest, is_away) = {
        let cluster = world.cluster();
        (cluster.slowest, cluster.is_away)
    };
    if is_away {
        world.pause(MS, 2 * SECOND).await;
        return Err("the API server is away".into());
    }
    world.pause(MS, 5 * MS).await;
    let before = world.random(|random| random.chance(0.5));
    // The answer is as old as its way back is long.
    let answer = world.cluster().get(name);
    world.pause(Duration::ZERO, slowest).await;
    if before { Ok(answer) } else { Ok(world.cluster().get(name)) }
}
