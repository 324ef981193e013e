//! Prepare and Unprepare, step by step.

use super::decide::{self, NotPrepared};
use super::{
    ClaimDevices, ClaimFiles, ClaimLedger, ClaimSource, DecidedClaim, DecidedHold, HeldByNumber,
    NameOf, NotRecorded, RecordedClaim, digest,
};
use crate::contract::claim as contract;
use crate::domain::{
    Allocated, AllocatedClaim, ClaimHold, ClaimRef, ClaimedDevice, DeviceId, DraName,
    PreparedDevice, ResourceName, Safeguard,
};
use futures_util::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard};

/// How long Prepare may take. The kubelet waits for 45 s (`pkg/kubelet/cm/dra/plugin`), and tries a
/// failed call again after a minute or more.
pub const PREPARE_BUDGET: Duration = Duration::from_secs(35);
/// The pause before the first repetition of a read; each further one is doubled.
const READ_AGAIN: Duration = Duration::from_millis(100);
/// The longest pause between two reads.
const READ_AGAIN_MAX: Duration = Duration::from_secs(2);
/// How often the ledger is asked whether a device is free. Former pods end within seconds.
const BLOCKED_AGAIN: Duration = Duration::from_millis(200);

/// A device of a claim: its resource, its id, and its name in the slice.
type Wanted = (ResourceName, DeviceId, DraName);

fn names(decided: &DecidedClaim) -> Vec<Wanted> {
    let of = |hold: &DecidedHold| {
        let devices = hold.hold.devices.iter();
        let wanted = |device: &ClaimedDevice| {
            (hold.resource.clone(), device.id.clone(), device.allocated.name.clone())
        };
        devices.map(wanted).collect::<Vec<_>>()
    };
    decided.holds.iter().flat_map(of).collect()
}

/// The time, which a simulation replaces.
pub trait Clock: Send + Sync {
    /// The time since some moment before the first call.
    fn now(&self) -> Duration;
    /// Waits until a time; returns at once if it is past.
    fn sleep_until(&self, deadline: Duration) -> BoxFuture<'static, ()>;
}

/// The time of tokio.
#[derive(Debug)]
struct RealTime(tokio::time::Instant);

impl Clock for RealTime {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&self, deadline: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep_until(self.0 + deadline))
    }
}

/// Prepares and unprepares claims.
pub struct ClaimPreparer {
    source: Arc<dyn ClaimSource>,
    ledger: Arc<dyn ClaimLedger>,
    devices: Arc<dyn ClaimDevices>,
    name_of: NameOf,
    files: ClaimFiles,
    clock: Arc<dyn Clock>,
    calls: Calls,
}

/// The claims with a running call, by UID.
#[derive(Debug, Default)]
struct Calls(std::sync::Mutex<BTreeMap<String, Weak<Call>>>);

/// What the calls of one claim share: the kubelet may call Unprepare while a Prepare of the same
/// claim still runs.
#[derive(Debug, Default)]
struct Call {
    /// Held while a record and its file change, which is one step. Counts the changes.
    step: Mutex<u64>,
    /// The Unprepares. Each ends the Prepares that began before it: the kubelet has cancelled them,
    /// which a busy daemon may learn later.
    ends: AtomicU64,
}

impl Calls {
    /// Begins a call, which runs for as long as the value lives.
    fn begin(&self, of: &ClaimRef) -> Arc<Call> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(call) = all.get(&of.uid).and_then(Weak::upgrade) {
            return call;
        }
        all.retain(|_, call| call.strong_count() > 0);
        let call = Arc::default();
        all.insert(of.uid.clone(), Arc::downgrade(&call));
        call
    }
}

impl Call {
    async fn step(&self) -> Option<MutexGuard<'_, u64>> {
        if Safeguard::ClaimStep.is_on() { Some(self.step.lock().await) } else { None }
    }

    fn ends(&self) -> u64 {
        if Safeguard::ClaimStep.is_on() { self.ends.load(Ordering::Relaxed) } else { 0 }
    }
}

impl fmt::Debug for ClaimPreparer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimPreparer").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ClaimPreparer {
    /// Over these parts. `name_of` is the function that the published names come from.
    #[must_use]
    pub fn new(
        source: Arc<dyn ClaimSource>,
        ledger: Arc<dyn ClaimLedger>,
        devices: Arc<dyn ClaimDevices>,
        name_of: NameOf,
        files: ClaimFiles,
    ) -> Self {
        let clock = Arc::new(RealTime(tokio::time::Instant::now()));
        let calls = Calls::default();
        ClaimPreparer { source, ledger, devices, name_of, files, clock, calls }
    }

    /// The same, with another time.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        ClaimPreparer { clock, ..self }
    }

    /// Prepares a claim (`NodePrepareResources` of the kubelet's DRA API, for one claim). Returns
    /// its devices, sorted by request and name, from the record. The future may be dropped at any
    /// time, and the call repeated.
    ///
    /// # Errors
    /// When the claim cannot be prepared within [`PREPARE_BUDGET`]. The text is for the event of
    /// the pod.
    pub async fn prepare(&self, of: &ClaimRef) -> Result<Vec<PreparedDevice>, NotPrepared> {
        let deadline = self.clock.now() + PREPARE_BUDGET;
        let prepared = self.prepare_until(of, deadline).await;
        match &prepared {
            Ok(devices) => {
                tracing::info!(claim = %of, uid = of.uid, devices = devices.len(), "claim prepared");
            }
            Err(error) => tracing::warn!(claim = %of, uid = of.uid, %error, "claim not prepared"),
        }
        prepared
    }

    /// Releases a claim (`NodeUnprepareResources`, for one claim). An unknown claim is released.
    ///
    /// # Errors
    /// One sentence, when the release cannot be made durable.
    pub async fn unprepare(&self, of: &ClaimRef) -> Result<(), String> {
        let call = self.calls.begin(of);
        let mut step = call.step().await;
        step.iter_mut().for_each(|changes| **changes += 1);
        call.ends.fetch_add(1, Ordering::Relaxed);
        self.ledger.release(of).await?;
        // A file that is left is removed with the next snapshot of the ledger. An error would keep
        // the pod in the state Terminating.
        if let Err(error) = self.files.remove(of) {
            tracing::warn!(claim = %of, uid = of.uid, %error, "cannot remove the CDI file of a claim");
        }
        tracing::info!(claim = %of, uid = of.uid, "claim unprepared");
        Ok(())
    }

    async fn prepare_until(
        &self,
        of: &ClaimRef,
        deadline: Duration,
    ) -> Result<Vec<PreparedDevice>, NotPrepared> {
        if !contract::is_uid(&of.uid) {
            return Err(NotPrepared::Uid(of.clone()));
        }
        let call = self.calls.begin(of);
        let ends = call.ends();
        let holds = loop {
            let changes = call.step().await.map(|changes| *changes);
            if call.ends() != ends {
                return Err(NotPrepared::Unprepared(of.clone()));
            }
            // Also for a claim that is recorded: it may have been allocated again under its UID.
            let found = self.read(of, deadline).await?;
            let claim = decide::check(of, found.as_ref())?;
            if let Some(holds) = self.record(&call, claim, changes, deadline).await? {
                break holds;
            }
        };
        let devices = holds.iter().flat_map(|hold| &hold.devices);
        let mut answer: Vec<PreparedDevice> = devices.map(PreparedDevice::from).collect();
        answer.sort_by(|a, b| {
            (&a.request, &a.name, &a.share_id).cmp(&(&b.request, &b.name, &b.share_id))
        });
        Ok(answer)
    }

    /// Reads the claim, again and again while the API server does not answer.
    async fn read(
        &self,
        of: &ClaimRef,
        deadline: Duration,
    ) -> Result<Option<AllocatedClaim>, NotPrepared> {
        let mut pause = READ_AGAIN;
        let mut why = "it has not answered at all".to_owned();
        loop {
            match self.within(deadline, self.source.get(of)).await {
                Some(Ok(found)) => return Ok(found),
                Some(Err(error)) => why = error,
                None => {}
            }
            let again = self.clock.now() + pause;
            if again >= deadline {
                return Err(NotPrepared::NoAnswer { claim: of.clone(), why });
            }
            self.clock.sleep_until(again).await;
            pause = (pause * 2).min(READ_AGAIN_MAX);
        }
    }

    /// Has the claim recorded, as soon as its devices are free, and writes its file.
    ///
    /// `changes` is the count from before the claim was read. `None` if it is another now: a call
    /// that the kubelet has cancelled still waits with the allocation of then, and must not replace
    /// a later one.
    async fn record(
        &self,
        call: &Call,
        claim: &AllocatedClaim,
        changes: Option<u64>,
        deadline: Duration,
    ) -> Result<Option<Vec<ClaimHold>>, NotPrepared> {
        let of = &claim.claim;
        let allocation = digest(claim);
        let not_recorded = |why| NotPrepared::NotRecorded { claim: of.clone(), why };
        let mut is_logged = false;
        let mut decided = self.decided(of, claim, &allocation)?;
        loop {
            let wanted = names(&decided);
            let mut step = call.step().await;
            if step.as_deref().copied() != changes {
                return Ok(None);
            }
            let recorded = self.within(deadline, self.ledger.record(decided)).await;
            let mut by_number = None;
            let why = match recorded {
                Some(Ok(holds)) => {
                    step.iter_mut().for_each(|changes| **changes += 1);
                    self.files.ensure(of, &holds).map_err(|error| NotPrepared::NoFile {
                        claim: of.clone(),
                        why: error.to_string(),
                    })?;
                    return Ok(Some(holds));
                }
                Some(Err(NotRecorded::Failed(why))) => return Err(not_recorded(why)),
                Some(Err(NotRecorded::Blocked(why))) => why,
                Some(Err(NotRecorded::HeldByNumber(held))) => by_number.insert(held).why.clone(),
                None => {
                    let why = "the ledger has not answered in time; a write to its disk may hang";
                    return Err(not_recorded(why.to_owned()));
                }
            };
            // Unprepare may come while the claim waits.
            drop(step);
            // Another claim may have taken this share of a device, and another share is free.
            if by_number.is_none() {
                decided = self.decided(of, claim, &allocation)?;
                if names(&decided) != wanted {
                    continue;
                }
            }
            if !std::mem::replace(&mut is_logged, true) {
                tracing::info!(claim = %of, uid = of.uid, why, "claim waits for its devices");
            }
            let again = self.clock.now() + BLOCKED_AGAIN;
            if again >= deadline {
                return Err(match by_number {
                    Some(held) => self.lost(claim, &wanted, &held),
                    None => NotPrepared::Blocked { claim: of.clone(), why },
                });
            }
            self.clock.sleep_until(again).await;
            decided = self.decided(of, claim, &allocation)?;
        }
    }

    /// A container has a device of the claim, and may have it for ever. So the claim's pods are
    /// evicted.
    fn lost(&self, claim: &AllocatedClaim, wanted: &[Wanted], held: &HeldByNumber) -> NotPrepared {
        let is_it = |(resource, id, _): &&Wanted| (resource, id) == (&held.resource, &held.id);
        let lost: BTreeSet<DraName> =
            wanted.iter().filter(is_it).map(|(.., name)| name.clone()).collect();
        let is_part = |of: &Allocated| of.share_id.is_some() && lost.contains(&of.name);
        let delete = |why: &str| {
            let pods: Vec<String> = claim.reserved_for.iter().map(ToString::to_string).collect();
            format!("delete pod {}, because {why}", pods.join(", "))
        };
        let advice = if claim.devices.iter().any(is_part) {
            delete("a taint would also evict the pods of the other claims for parts of the device")
        } else if self.ledger.evict(&lost, &held.container) {
            "a taint of the device evicts the pods of the claim".to_owned()
        } else {
            delete("the API server drops taints of devices (feature gate DRADeviceTaints)")
        };
        NotPrepared::Lost { claim: claim.claim.clone(), why: held.why.clone(), advice }
    }

    /// What to record: the earlier record of the same allocation, whose devices need not be found
    /// again in the same boot, else a new decision. A torn write may have left a part of a record.
    fn decided(
        &self,
        of: &ClaimRef,
        claim: &AllocatedClaim,
        allocation: &str,
    ) -> Result<DecidedClaim, NotPrepared> {
        let has = |recorded: &DecidedClaim, wanted: &Allocated| {
            recorded.holds.iter().any(|each| each.hold.has(wanted))
        };
        let is_same = |RecordedClaim { claim: recorded, .. }: &RecordedClaim| {
            let mut holds = recorded.holds.iter();
            holds.all(|each| each.hold.claim.uid == of.uid && each.hold.allocation == allocation)
                && (claim.devices.iter().all(|of| has(recorded, of))
                    || !Safeguard::ClaimWhole.is_on())
        };
        let recorded = self.ledger.recorded(of).filter(is_same);
        let is_of_boot = recorded.as_ref().is_some_and(|recorded| recorded.is_of_boot);
        let recorded = recorded.map(|RecordedClaim { claim: recorded, .. }| DecidedClaim {
            reserved_for: claim.reserved_for.clone(),
            ..recorded
        });
        match recorded {
            Some(recorded) if is_of_boot || !Safeguard::ClaimOfBoot.is_on() => Ok(recorded),
            recorded => {
                let grants = self.ledger.grants();
                let (devices, name_of) = (&*self.devices, &*self.name_of);
                decide::decide(claim, allocation, devices, &grants, name_of, recorded)
            }
        }
    }

    /// The value of a call, or `None` if it takes longer.
    async fn within<T>(&self, deadline: Duration, call: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            value = call => Some(value),
            () = self.clock.sleep_until(deadline) => None,
        }
    }
}
