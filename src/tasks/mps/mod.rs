//! Runs the control daemons of NVIDIA's Multi-Process Service (MPS): one for each resource whose
//! GPUs are shared by it.
//!
//! | file | what it does |
//! | --- | --- |
//! | `machine` | decides: look, bring up, stop, with a backoff. Pure |
//! | `control` | makes a step, with the programs of the driver |
//! | `record` | remembers which GPUs were set up, for the next process |
//!
//! The control daemon is a process of its own and outlives this one, as its clients do: after a
//! restart or a handover the next process finds that it answers, and leaves it alone. Where the end
//! of this process ends it too (a container), the next process starts another one.
//!
//! Each step has a thread of its own, so a program that hangs delays neither the other resources
//! nor the rest of the daemon.

mod control;
mod machine;
mod record;

use self::control::Control;
use self::machine::{Left, Machine, Outcome, Step, Want};
use self::record::Record;
use crate::domain::{
    Contract, Grant, Inventory, MpsControl, MpsSetup, MpsState, MpsStates, Offering, ResourceName,
    mps_run_here,
};
use crate::host::{self, HostRoot};
use std::collections::BTreeMap;
use std::io::{self, PipeWriter};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How often a control daemon that answers is asked again. Without clients it uses no processor
/// time, and the question takes a millisecond.
const POLL: Duration = Duration::from_secs(10);
/// The longest wait of a start for the first answers. A control daemon that runs already answers at
/// once, and then its shares are healthy in the first list.
const FIRST_LOOK_MAX: Duration = Duration::from_secs(2);
/// The name of the record in the run directory.
const RECORD: &str = "mps.json";

/// The task.
#[derive(Debug)]
pub(crate) struct MpsTask {
    inventory: watch::Receiver<Arc<Inventory>>,
    grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    states: Arc<watch::Sender<Arc<MpsStates>>>,
    host_root: HostRoot,
    record: PathBuf,
    machines: BTreeMap<ResourceName, Machine>,
}

/// The end of a step.
struct Ended {
    resource: ResourceName,
    outcome: Outcome,
}

impl MpsTask {
    pub(crate) fn new(
        host_root: HostRoot,
        run_dir: &Path,
        inventory: watch::Receiver<Arc<Inventory>>,
        grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
        states: Arc<watch::Sender<Arc<MpsStates>>>,
    ) -> Self {
        let (record, machines) = (run_dir.join(RECORD), BTreeMap::new());
        MpsTask { inventory, grants, states, host_root, record, machines }
    }

    /// Runs until the daemon ends. Steps that still run then are killed, and control daemons are
    /// not.
    pub(crate) async fn run(mut self) {
        let control = Arc::new(Control {
            host_root: self.host_root.clone(),
            record: Record::read(self.record.clone()),
        });
        let (ended_sender, mut ended) = mpsc::channel::<Ended>(16);
        let mut running: BTreeMap<ResourceName, PipeWriter> = BTreeMap::new();
        loop {
            let now = host::now().boot;
            self.compare(&control.record.all(), now);
            let names: Vec<ResourceName> = self.machines.keys().cloned().collect();
            for name in names {
                let Some(machine) = self.machines.get_mut(&name) else { continue };
                let Some(step) = machine.next(now) else { continue };
                match begin(&control, &name, step, machine.want(), &ended_sender) {
                    Ok(cancel) => drop(running.insert(name, cancel)),
                    Err(error) => {
                        let why = format!("cannot start a thread for it: {error}");
                        machine.ended(Outcome::Unknown(why), now, now + POLL);
                    }
                }
            }
            self.publish();
            let wakes_at = self.machines.values().filter_map(Machine::wakes_at).min();
            let is_held = self.machines.values().any(|machine| *machine.want() == Want::Nothing);
            tokio::select! {
                changed = self.inventory.changed() => if changed.is_err() { return },
                changed = self.grants.changed(), if is_held => if changed.is_err() { return },
                Some(Ended { resource, outcome }) = ended.recv() => {
                    running.remove(&resource);
                    self.ended(&resource, outcome);
                }
                () = until(wakes_at) => {}
            }
        }
    }

    fn ended(&mut self, resource: &ResourceName, outcome: Outcome) {
        let Some(machine) = self.machines.get_mut(resource) else { return };
        let (now, before) = (host::now().boot, machine.state().clone());
        machine.ended(outcome, now, now + host::until_tick(POLL));
        if let (Want::Stop(_), MpsState::Down { why }) = (machine.want(), machine.state())
            && before != *machine.state()
        {
            tracing::warn!(%resource, why, "the resource is no longer shared by MPS, and its control daemon cannot be ended yet");
        }
    }

    /// Compares what the configuration wants with what is recorded.
    fn compare(&mut self, recorded: &BTreeMap<ResourceName, Left>, now: Duration) {
        let inventory = self.inventory.borrow_and_update().clone();
        let grants = self.grants.borrow_and_update().clone();
        let mut wants: BTreeMap<ResourceName, Want> = BTreeMap::new();
        for (name, offering) in &inventory.resources {
            let moved = |setup: &MpsSetup| {
                recorded.get(name).is_some_and(|before| before.root != setup.root)
            };
            // Those of another folder are ended first.
            if let Some(setup) = MpsSetup::of(offering).filter(|setup| !moved(setup)) {
                let want = if setup.gpus.is_empty() { Want::Nothing } else { Want::Run(setup) };
                wants.insert(name.clone(), want);
            }
        }
        // Another resource may have these GPUs now.
        let used = |gpu: &String| {
            wants.values().any(|want| matches!(want, Want::Run(setup) if setup.gpus.contains(gpu)))
        };
        let mut left: Vec<(ResourceName, Want)> = Vec::new();
        for (name, before) in recorded.iter().filter(|(name, _)| !wants.contains_key(*name)) {
            let is_held = grants.iter().any(|grant| grant.is_live() && grant.resource == *name);
            let is_external = |offering: &Arc<Offering>| match &offering.spec.contract {
                Contract::Nvidia(options) => options.mps_control == MpsControl::External,
                _ => false,
            };
            let want = if is_held || inventory.resources.get(name).is_some_and(is_external) {
                Want::Nothing
            } else {
                let gpus = before.gpus.iter().filter(|gpu| !used(gpu)).cloned().collect();
                Want::Stop(Left { root: before.root.clone(), gpus })
            };
            left.push((name.clone(), want));
        }
        wants.extend(left);
        for (name, want) in wants {
            let machine = self.machines.entry(name).or_insert_with(|| Machine::new(now));
            machine.set_want(want, now);
        }
        self.machines.retain(|name, machine| {
            let is_over = machine.is_stopped() && !recorded.contains_key(name);
            !is_over
        });
    }

    /// Publishes the states of the resources that are shared by MPS now.
    fn publish(&self) {
        let inventory = self.inventory.borrow().clone();
        let is_run_here = |name: &&ResourceName| {
            inventory
                .resources
                .get(*name)
                .is_some_and(|offering| mps_run_here(&offering.spec).is_some())
        };
        let states: MpsStates = self
            .machines
            .iter()
            .filter(|(name, _)| is_run_here(name))
            .map(|(name, machine)| (name.clone(), machine.state().clone()))
            .collect();
        self.states.send_if_modified(|known| {
            if **known == states {
                return false;
            }
            for (resource, state) in &states {
                match state {
                    state if known.get(resource) == Some(state) => {}
                    MpsState::Starting => {}
                    MpsState::Ready => {
                        tracing::info!(%resource, "the MPS control daemon answers");
                    }
                    MpsState::Down { why } => {
                        tracing::warn!(%resource, why, "the MPS control daemon does not answer; its shares are unhealthy");
                    }
                }
            }
            *known = Arc::new(states.clone());
            true
        });
    }
}

/// Waits until every control daemon was asked once, a bounded time.
pub(crate) async fn first_look(inventory: &Inventory, mut states: watch::Receiver<Arc<MpsStates>>) {
    let wanted: Vec<ResourceName> = inventory
        .resources
        .values()
        .filter(|offering| MpsSetup::of(offering).is_some_and(|setup| !setup.gpus.is_empty()))
        .map(|offering| offering.spec.name.clone())
        .collect();
    if wanted.is_empty() {
        return;
    }
    let is_known = |states: &Arc<MpsStates>| {
        wanted.iter().all(|name| states.get(name).is_some_and(|state| *state != MpsState::Starting))
    };
    drop(tokio::time::timeout(FIRST_LOOK_MAX, states.wait_for(is_known)).await);
}

/// Begins a step on a thread of its own. It is killed when the result is dropped.
fn begin(
    control: &Arc<Control>,
    resource: &ResourceName,
    step: Step,
    want: &Want,
    ended: &mpsc::Sender<Ended>,
) -> io::Result<PipeWriter> {
    let root = match want {
        Want::Run(setup) => setup.root.clone(),
        Want::Stop(left) => left.root.clone(),
        Want::Nothing => String::new(),
    };
    let (cancelled, cancel) = io::pipe()?;
    let (control, resource, ended) = (Arc::clone(control), resource.clone(), ended.clone());
    let work = move || {
        let outcome = control.make(&resource, &step, &root, &cancelled);
        // The send fails only when the daemon ends.
        drop(ended.blocking_send(Ended { resource, outcome }));
    };
    std::thread::Builder::new().name("mps".into()).spawn(work)?;
    Ok(cancel)
}

async fn until(wakes_at: Option<Duration>) {
    match wakes_at {
        Some(at) => tokio::time::sleep(at.saturating_sub(host::now().boot)).await,
        None => std::future::pending().await,
    }
}
