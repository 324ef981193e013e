//! Prepare and Unprepare for the claims of a pod.

use super::instances::{Callee, chosen};
use super::record::{self, ClaimInfo};
use super::{Claim, Shared, State};
use crate::domain::{CheckpointClaimDevice, ClaimRef};
use std::collections::BTreeMap;
use std::path::Path;

/// The claims of one call by driver.
type Batches = BTreeMap<String, (Callee, Vec<ClaimRef>)>;

/// Prepares the claims of a pod, as before its sandbox is created.
pub(super) async fn prepare(shared: &Shared, pod: &str, claims: &[Claim]) -> Result<(), String> {
    let kubelet_dir = &shared.config.kubelet_dir;
    let batches = shared.with(|state| plan(state, kubelet_dir, pod, claims))?;
    for (driver, (callee, asked)) in &batches {
        let answers = callee.prepare(asked.clone(), shared.config.times.call).await;
        let answers = answers.map_err(|error| format!("NodePrepareResources: {error}"))?;
        let count = answers.len();
        for (uid, result) in answers {
            let claim = named("NodePrepareResources", asked, &uid)?;
            let devices = result.map_err(|error| {
                format!("NodePrepareResources failed for ResourceClaim {}: {error}", claim.name)
            })?;
            shared.add_devices(claim, driver, devices)?;
        }
        all_answered("NodePrepareResources", asked, count)?;
    }
    shared.with(|state| {
        for claim in batches.values().flat_map(|(_, claims)| claims) {
            if let Some(info) = state.claims.get_mut(&key(claim)) {
                info.prepared = true;
            }
        }
        checkpoint(state, kubelet_dir)
    })
}

/// The calls to make, after the claims and the pod are in the checkpoint.
fn plan(
    state: &mut State,
    kubelet_dir: &Path,
    pod: &str,
    claims: &[Claim],
) -> Result<Batches, String> {
    for Claim { claim, pods, drivers } in claims {
        if !pods.contains(pod) {
            return Err(format!(
                "pod {pod} is not allowed to use ResourceClaim {} ({})",
                claim.name, claim.uid
            ));
        }
        // Nothing is recorded if a driver is missing.
        drivers.iter().try_for_each(|driver| callee(state, driver).map(drop))?;
    }
    let mut batches = Batches::new();
    for Claim { claim, drivers, .. } in claims {
        let info = state.claims.entry(key(claim)).or_insert_with(|| ClaimInfo {
            claim: claim.clone(),
            pods: [].into(),
            drivers: drivers.iter().map(|driver| (driver.clone(), Vec::new())).collect(),
            prepared: false,
        });
        if info.claim.uid != claim.uid {
            return Err(format!(
                "old ResourceClaim with same name {} and different UID {} still exists (previous pod \
                 force-deleted?!)",
                claim.name, info.claim.uid
            ));
        }
        info.pods.insert(pod.to_owned());
        let (prepared, drivers) = (info.prepared, info.drivers.keys().cloned().collect::<Vec<_>>());
        checkpoint(state, kubelet_dir)?;
        if prepared {
            continue;
        }
        for driver in drivers {
            let callee = callee(state, &driver)?;
            batches.entry(driver).or_insert((callee, Vec::new())).1.push(claim.clone());
        }
    }
    Ok(batches)
}

/// Unprepares the claims whose only pod this is. The others lose the pod.
pub(super) async fn unprepare(shared: &Shared, pod: &str) -> Result<(), String> {
    let kubelet_dir = &shared.config.kubelet_dir;
    let mut batches: BTreeMap<String, Vec<ClaimRef>> = BTreeMap::new();
    shared.with(|state| {
        for info in state.claims.values_mut().filter(|info| info.pods.contains(pod)) {
            if info.pods.len() > 1 {
                info.pods.remove(pod);
                continue;
            }
            for driver in info.drivers.keys() {
                batches.entry(driver.clone()).or_default().push(info.claim.clone());
            }
        }
    });
    for (driver, asked) in &batches {
        let callee = shared.with(|state| callee(state, driver))?;
        let answers = callee.unprepare(asked.clone(), shared.config.times.call).await;
        let answers = answers.map_err(|error| format!("NodeUnprepareResources: {error}"))?;
        let count = answers.len();
        for (uid, result) in answers {
            let claim = named("NodeUnprepareResources", asked, &uid)?;
            result.map_err(|error| {
                format!("NodeUnprepareResources failed for ResourceClaim {}: {error}", claim.name)
            })?;
        }
        all_answered("NodeUnprepareResources", asked, count)?;
    }
    shared.with(|state| {
        for claim in batches.values().flatten() {
            state.claims.remove(&key(claim));
        }
        checkpoint(state, kubelet_dir)
    })
}

/// The kubelet knows claims by namespace and name.
fn key(claim: &ClaimRef) -> (String, String) {
    (claim.namespace.clone(), claim.name.clone())
}

fn callee(state: &State, driver: &str) -> Result<Callee, String> {
    let instances = state.instances.get(driver).map_or(&[][..], Vec::as_slice);
    let instance = chosen(instances);
    instance.map(Callee::from).ok_or_else(|| format!("DRA driver {driver} is not registered"))
}

fn checkpoint(state: &State, kubelet_dir: &Path) -> Result<(), String> {
    let written = record::write(kubelet_dir, state.claims.values());
    written.map_err(|error| format!("checkpoint ResourceClaim cache: {error}"))
}

fn named<'a>(call: &str, asked: &'a [ClaimRef], uid: &str) -> Result<&'a ClaimRef, String> {
    let unknown = || format!("{call} returned result for unknown claim UID {uid}");
    asked.iter().find(|claim| claim.uid == uid).ok_or_else(unknown)
}

fn all_answered(call: &str, asked: &[ClaimRef], count: usize) -> Result<(), String> {
    match asked.len().saturating_sub(count) {
        0 => Ok(()),
        skipped => Err(format!("{call} skipped {skipped} ResourceClaims")),
    }
}

impl Shared {
    /// Adds the devices of an answer to those of the claim, or replaces them.
    fn add_devices(
        &self,
        claim: &ClaimRef,
        driver: &str,
        mut devices: Vec<CheckpointClaimDevice>,
    ) -> Result<(), String> {
        let (appends, reads_shares) = (self.appends(), self.release().reads_shares());
        if !reads_shares {
            devices.iter_mut().for_each(|device| device.share_id = None);
        }
        self.with(|state| {
            let info = state.claims.get_mut(&key(claim)).ok_or_else(|| {
                format!(
                    "internal error: unable to get claim info for ResourceClaim {} in namespace {}",
                    claim.name, claim.namespace
                )
            })?;
            let known = info.drivers.entry(driver.to_owned()).or_default();
            if !appends {
                known.clear();
            }
            known.extend(devices);
            Ok(())
        })
    }
}
