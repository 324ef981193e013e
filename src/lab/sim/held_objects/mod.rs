//! Random histories of a small machine show that no kernel object has two holders, on any path to
//! it (I2).
//!
//! Devices are plugged in and out and get other numbers. udev's links move between twins. Disks are
//! named by their own node, by their partitions and by other nodes. A function's node is also
//! offered as a device of its own. Resources change. The daemon restarts, with its ledger or with
//! the grants of the kubelet's checkpoint. The kubelet gives away ids that are healthy in the last
//! list that it has read and that it has not given already. The naming, the selection, the judge,
//! the decision and the ledger are the daemon's own.
//!
//! `HOLDFAST_HISTORIES` sets the number of histories.

mod machine;

use self::machine::{DISK_NODES, Machine, NUMBERS, Plugged, Pod, STICKS, configurations};
use crate::domain::{
    AllocId, ContainerEdits, Device, DeviceId, DeviceNode, EditDevice, Entry, Grant, GrantState,
    GrantedDevice, Listed, Object, PendingHooks, ResourceName, Safeguard, Timestamp,
};
use crate::health::core::{Judge, Rules};
use crate::ledger::core::{Ledger, held_by_another};
use crate::serving;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::sync::Arc;
use std::thread;

impl Machine {
    /// A free healthy device that the kubelet chooses.
    fn choose_free(&mut self) -> Option<(ResourceName, DeviceId)> {
        let given: BTreeSet<(&ResourceName, &DeviceId)> =
            self.pods.iter().map(|pod| (&pod.resource, &pod.id)).collect();
        let free: Vec<(ResourceName, DeviceId)> = self
            .known
            .resources
            .iter()
            .flat_map(|(name, offering)| {
                offering.devices.iter().map(move |(id, offered)| (name, id, offered))
            })
            .filter(|(name, id, offered)| {
                offered.health.is_healthy() && !given.contains(&(*name, *id))
            })
            .map(|(name, id, _)| (name.clone(), id.clone()))
            .collect();
        if free.is_empty() {
            return None;
        }
        Some(free[self.random.below(free.len())].clone())
    }

    /// The grant of the next Allocate.
    fn next_grant(&mut self, resource: &ResourceName, id: &DeviceId, device: &Device) -> Grant {
        self.grants += 1;
        let path = |node: &DeviceNode| EditDevice {
            host: node.host.clone(),
            container: node.container.clone(),
            permissions: "rw".into(),
        };
        Grant {
            alloc_id: AllocId::new(format!("a-{:04}", self.grants)),
            resource: resource.clone(),
            devices: vec![GrantedDevice {
                id: id.clone(),
                key: device.key.clone(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: device.objects(),
            }],
            edits: ContainerEdits {
                devices: device.nodes.iter().map(path).collect(),
                ..ContainerEdits::default()
            },
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            granted_at: Timestamp(self.now),
            version: String::new(),
            state: GrantState::Granted,
        }
    }

    /// The kubelet gives a container a device. The error describes an object that two containers
    /// have now.
    fn allocate(&mut self) -> Result<(), String> {
        let Some((resource, id)) = self.choose_free() else { return Ok(()) };
        let Some(offering) = self.inventory.resources.get(&resource).cloned() else {
            return Ok(());
        };
        let Ok(offered) = serving::core::decide(&offering, std::slice::from_ref(&id)) else {
            return Ok(());
        };
        let device = Arc::clone(&offered[0].device);
        // Allocate finds that a node is absent.
        let exists = |node: &DeviceNode| {
            self.nodes().iter().any(|(found, ..)| found.path == node.host)
                || node.host == "/dev/dri/renderD128"
        };
        if !device.nodes.iter().all(exists) {
            return Ok(());
        }
        let grant = self.next_grant(&resource, &id, &device);
        if held_by_another(&self.ledger, std::iter::empty(), &grant).is_some() {
            return Ok(());
        }
        let real_objects: BTreeSet<String> =
            device.nodes.iter().flat_map(|node| self.real_objects(&node.host)).collect();
        let is_shared = !offering.spec.is_exclusive();
        self.history.push(format!("{resource} {id} is granted: {real_objects:?}"));
        let other = self.pods.iter().find(|pod| {
            let is_meant = pod.is_shared && is_shared && pod.resource == resource;
            !is_meant && !pod.real_objects.is_disjoint(&real_objects)
        });
        let twice = other.map(|other| {
            format!(
                "{:?} of {} {} and of {resource} {id}",
                other.real_objects, other.resource, other.id
            )
        });
        let node = device.nodes[0].host.clone();
        self.pods.push(Pod {
            alloc_id: grant.alloc_id.clone(),
            resource,
            id,
            node,
            real_objects,
            is_shared,
        });
        self.ledger.evolve(&Entry::Grant(Arc::new(grant)));
        twice.map_or(Ok(()), Err)
    }

    /// A pod ends: the kubelet gives its ids to others at once; the ledger proves the release
    /// later.
    fn release(&mut self) {
        if self.pods.is_empty() {
            return;
        }
        let at = self.random.below(self.pods.len());
        let pod = self.pods.remove(at);
        let released = GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(self.now),
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        };
        self.ledger.evolve(&Entry::Moved { alloc_id: pod.alloc_id, state: released });
        self.publish();
    }

    /// Restarts the daemon: with its ledger, or with the answers that the kubelet's checkpoint has.
    fn restart(&mut self) {
        if self.random.chance(0.4) {
            let grants: Vec<Grant> = self.ledger.grants().map(|grant| (**grant).clone()).collect();
            let nodes = self.nodes();
            let found = |path: &str| {
                nodes.iter().find(|(node, ..)| node.path == path).map(|(node, _, _, attributes)| {
                    let disk = attributes.get("disk_id").map(|id| {
                        Object::disk(
                            id,
                            attributes.get("disk_partition").and_then(|n| n.parse().ok()),
                        )
                    });
                    node.objects.iter().cloned().chain(disk).collect::<Vec<_>>()
                })
            };
            let rebuilt = grants.into_iter().map(|mut grant| {
                for device in &mut grant.devices {
                    (device.key, device.objects) = (String::new(), Vec::new());
                }
                grant.resolve(|path| found(path).unwrap_or_default())
            });
            self.names.clear();
            self.ledger = Ledger::from_recovered(
                rebuilt,
                BTreeMap::new(),
                Listed::new(),
                PendingHooks::new(),
                BTreeMap::new(),
            );
        }
        self.judge = Judge::new(
            self.specs.clone().into(),
            Arc::default(),
            &Listed::new(),
            Rules::default(),
            &BTreeMap::new(),
        );
        self.inventory = Arc::default();
        self.scan();
    }

    fn step(&mut self) -> Result<(), String> {
        self.now += 1 + self.random.number() % 5;
        match self.random.below(15) {
            0 => {
                let stick = self.random.below(STICKS);
                let free: Vec<usize> = (0..NUMBERS)
                    .filter(|number| {
                        !self.sticks.iter().flatten().any(|plugged| plugged.number == *number)
                    })
                    .collect();
                if self.sticks[stick].is_none() && !free.is_empty() {
                    let number = free[self.random.below(free.len())];
                    self.sticks[stick] = Some(Plugged { number, by_path: self.random.chance(0.7) });
                    // The last twin that is plugged in gets their link.
                    self.by_id[usize::from(stick == 2)] = self.random.chance(0.8).then_some(stick);
                    self.history.push(format!("stick{stick} is plugged in as {number}"));
                }
            }
            1 => {
                let stick = self.random.below(STICKS);
                self.sticks[stick] = None;
                // A container loses a stick that is taken out. It keeps the number.
                self.pods.iter_mut().for_each(|pod| {
                    pod.real_objects.retain(|object| *object != format!("stick{stick}"));
                });
                self.by_id
                    .iter_mut()
                    .filter(|link| **link == Some(stick))
                    .for_each(|link| *link = None);
                self.history.push(format!("stick{stick} is taken out"));
            }
            2 => {
                let twin = self.random.below(2);
                if self.sticks[twin].is_some() {
                    self.by_id[0] = Some(twin);
                    self.history.push(format!("the twins' link leads to stick{twin}"));
                }
            }
            3 => {
                let stick = self.random.below(STICKS);
                if let Some(plugged) = &mut self.sticks[stick] {
                    plugged.by_path = !plugged.by_path;
                }
            }
            4 => {
                // The disk as a whole, or one of the other nodes that lead to it.
                let nodes = match self.random.below(3) {
                    0 => &DISK_NODES[..],
                    1 => &DISK_NODES[3..4],
                    _ => &DISK_NODES[4..],
                };
                for node in nodes {
                    if !self.disk_nodes.remove(node) {
                        self.disk_nodes.insert(node);
                    }
                    // Without the kernel device, a container can reach nothing through it.
                    self.pods
                        .iter_mut()
                        .filter(|pod| pod.node.ends_with(&format!("/{node}")))
                        .for_each(|pod| pod.real_objects.clear());
                }
            }
            5 => {
                let mut all = configurations();
                self.specs = all.swap_remove(self.random.below(all.len()));
                self.judge.apply_plan(self.specs.clone().into(), Rules::default());
                self.history.push("another configuration".into());
                self.scan();
            }
            6 => self.restart(),
            7 => self.release(),
            8 | 9 => self.known = Arc::clone(&self.inventory),
            10 | 11 => self.scan(),
            _ => return self.allocate(),
        }
        if self.random.chance(0.6) {
            self.scan();
        }
        if self.random.chance(0.7) {
            self.known = Arc::clone(&self.inventory);
        }
        Ok(())
    }
}

/// Plays a history. Returns the number of grants, or the failure with the steps that led to it.
fn run_history(seed: u64) -> Result<usize, String> {
    let mut machine = Machine::new(seed);
    machine.scan();
    for _ in 0..40 {
        machine
            .step()
            .map_err(|twice| format!("seed {seed}: {twice}\n{}", machine.history.join("\n")))?;
    }
    Ok(usize::try_from(machine.grants).unwrap())
}

fn histories() -> u64 {
    std::env::var("HOLDFAST_HISTORIES")
        .ok()
        .and_then(|histories| histories.parse().ok())
        .unwrap_or(500)
}

#[test]
fn no_two_containers_have_one_object() {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let grants: usize = thread::scope(|scope| {
        let part = |first| {
            move || {
                (first..histories())
                    .step_by(threads)
                    .map(|seed| run_history(seed).unwrap_or_else(|twice| panic!("{twice}")))
                    .sum::<usize>()
            }
        };
        let parts: Vec<_> = (0..threads as u64).map(|first| scope.spawn(part(first))).collect();
        parts.into_iter().map(|part| part.join().unwrap()).sum()
    });
    assert!(grants as u64 > histories(), "only {grants} grants in {} histories", histories());
}

#[test]
fn without_the_rule_two_containers_have_one_object() {
    let twice =
        Safeguard::HeldObjects.without(|| (0..500).find_map(|seed| run_history(seed).err()));
    assert!(twice.is_some(), "the histories do not detect the missing rule");
}
