//! The first steps: discovery of devices, their registration, and their allocation to pods.

use super::environment::{
    all_run, answered, held_by_grants, held_by_kubelet, offered, pods, recorded,
};
use super::{Demo, Step, Stop, ms};
use crate::admin::control_get;
use crate::domain::{DeviceId, Grant, Inventory, Offering, ResourceName};
use crate::lab::sim::hardware::{ADAPTERS, GPUS, VFS_PER_ADAPTER};
use crate::lab::sim::kubelet::{EventKind, PodSpec, View};
use crate::registration::ResourceStatus;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The number of devices of each resource on the simulated node.
pub(super) const DEVICES: [usize; 3] = [GPUS, ADAPTERS * VFS_PER_ADAPTER, 1];

impl Demo {
    pub(super) async fn devices(&mut self) -> Result<(), Stop> {
        self.begin(Step::Devices)?;
        if self.env.breaks(Step::Devices) {
            self.env.node.remove_function(self.env.node.gpu_address(GPUS - 1))?;
        }
        if self.env.breaks(Step::Registration) {
            self.env.kubelet.stop();
        }
        let took = self.env.start_daemon().await?;
        self.screen.explain(format_args!(
            "From the start to the first inventory, read from sysfs and /dev: {}.",
            ms(took)
        ))?;
        let inventory = self.env.daemon()?.views.inventory.clone();
        for name in self.env.resources() {
            let text = inventory.borrow().resources.get(name).map(|offering| describe(offering));
            self.screen.fact(name.as_str(), text.unwrap_or_default())?;
        }

        let counts = self.env.resources().into_iter().zip(DEVICES);
        let expected: BTreeMap<_, _> = counts
            .map(|(name, count)| (name.clone(), format!("{name}: {count} healthy")))
            .collect();
        let expected = expected.into_values().collect::<Vec<_>>().join("\n");
        let seen = self
            .env
            .daemon_shows(&inventory, &expected, |inventory: &Arc<Inventory>| offered(inventory))
            .await;
        self.screen.claim("every device is found once and is healthy; physical functions and bridges are not offered", expected, seen)?;

        let uuids: Vec<String> = (0..GPUS).map(|index| self.env.node.gpu_uuid(index)).collect();
        let ids = |offering: &Arc<Offering>| {
            offering.devices.keys().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        let seen = inventory.borrow().resources.get(&self.env.gpu).map(ids).unwrap_or_default();
        self.screen.claim(
            "a GPU's id is its UUID, which survives reboots and changes of the order",
            uuids.join("\n"),
            seen,
        )
    }

    pub(super) async fn registration(&mut self) -> Result<(), Stop> {
        self.begin(Step::Registration)?;
        self.screen.explain(
            "Register, then ListAndWatch: the kubelet counts the devices of the first list.",
        )?;
        let expected = self.env.capacities_of(DEVICES, DEVICES);
        let registrations = self.env.daemon()?.views.registrations.clone();
        let all = |registrations: &BTreeMap<ResourceName, ResourceStatus>| {
            let registered = registrations.iter().filter(|(_, status)| status.registered);
            registered.map(|(name, _)| name.to_string()).collect::<Vec<_>>().join("\n")
        };
        let names: BTreeMap<_, _> =
            self.env.resources().into_iter().map(|name| (name, name.to_string())).collect();
        let names = names.into_values().collect::<Vec<_>>().join("\n");
        let (seen, registered) = tokio::join!(
            self.env.kubelet_shows(&expected, |view| self.env.capacities(view)),
            self.env.daemon_shows(&registrations, &names, all),
        );
        for name in self.env.resources() {
            let took =
                registrations.borrow().get(name).and_then(|status| status.last_registration_us);
            let took = took.map(|us| {
                format!("registered, and its stream open, in {}", ms(Duration::from_micros(us)))
            });
            self.screen.fact(name.as_str(), took.as_deref().unwrap_or("not registered"))?;
        }
        self.screen.claim("the kubelet counts every device as allocatable", expected, seen)?;
        self.screen.claim("the daemon agrees: every resource is registered", names, registered)
    }

    pub(super) async fn pods(&mut self) -> Result<(), Stop> {
        self.begin(Step::Pods)?;
        let (gpu, rdma, fpga) =
            (self.env.gpu.clone(), self.env.rdma.clone(), self.env.fpga.clone());
        let mut train =
            PodSpec::new("demo", "train-0").init("stage-data", &gpu, 2).app("trainer", &gpu, 2);
        if let Some(trainer) = train.containers.last_mut() {
            trainer.resources.insert(rdma.clone(), 1);
        }
        let serve = PodSpec::new("demo", "serve-0").app("api", &gpu, 1);
        let filter = PodSpec::new("demo", "filter-0").app("match", &fpga, 1);
        self.screen.explain(
            "The kubelet calls Allocate for each container. train-0's init \
             container uses the GPUs first.",
        )?;
        let train_uid = train.uid.clone();
        for spec in [train, serve, filter] {
            self.env.add_pod(spec).await;
        }
        if self.env.breaks(Step::Pods) {
            std::fs::remove_dir_all(self.env.state_dir().join("journal"))?;
        }
        // Read at once, before anything could be written later.
        let on_disk =
            self.env.on_disk().map_or_else(|error| error.to_string(), |grants| recorded(&grants));
        self.show_allocations(0)?;
        let (expected, seen) = self.env.kubelet.view(|view| (all_run(view), pods(view)));
        self.screen.claim("every pod runs", expected, seen)?;
        let expected = self.env.kubelet.view(|view| answered(view, 0));
        self.screen.claim(
            "every grant is on disk by the time its container starts",
            expected,
            on_disk,
        )?;

        let (init, main) =
            (self.gpus_of(&train_uid, "stage-data"), self.gpus_of(&train_uid, "trainer"));
        self.screen.claim(
            "the main container got the same GPUs as its init container",
            lines(&init),
            lines(&main),
        )?;
        let visible = self.visible(&train_uid, "trainer");
        self.screen.claim("its NVIDIA_VISIBLE_DEVICES names them", lines(&main), visible)?;
        self.screen.claim("they are on one NUMA node", 1, self.numa_nodes(&main)?)?;
        self.holders_agree(
            "the daemon knows the pod and container of each, and agrees with the kubelet",
        )
        .await
    }

    /// Prints one line for each Allocate since the event at `from`.
    pub(super) fn show_allocations(&self, from: usize) -> Result<(), Stop> {
        let lines = self.env.kubelet.view(|view| {
            let allocated = |kind: &EventKind| match kind {
                EventKind::Allocated { resource, pod_uid, container, devices, took } => {
                    let pod =
                        view.pod(pod_uid).map(|pod| pod.spec.name.clone()).unwrap_or_default();
                    Some((
                        format!("{pod}/{container}"),
                        format!("{} of {resource:18} answered in {}", devices.len(), ms(*took)),
                    ))
                }
                _ => None,
            };
            view.events()
                .iter()
                .skip(from)
                .filter_map(|event| allocated(&event.kind))
                .collect::<Vec<_>>()
        });
        lines.iter().try_for_each(|(holder, text)| self.screen.fact(holder, text))
    }

    /// Claims that the daemon's answer to `holdfast who` matches the kubelet's own record.
    pub(super) async fn holders_agree(&mut self, claim: &str) -> Result<(), Stop> {
        let expected = self.env.kubelet.view(held_by_kubelet);
        let views = &self.env.daemon()?.views;
        // A grant is bound as soon as the kubelet has written its checkpoint.
        self.env
            .daemon_shows(&views.grants, &expected, |grants: &Arc<Vec<Arc<Grant>>>| {
                held_by_grants(grants.iter().map(AsRef::as_ref))
            })
            .await;
        let seen = self.ask_who().await.map(|grants| held_by_grants(&grants));
        self.screen.claim(claim, expected, seen.unwrap_or_else(|error| error))
    }

    /// The grants, over the control socket as for `holdfast who`.
    pub(super) async fn ask_who(&self) -> Result<Vec<Grant>, String> {
        control_get(&self.env.settings.roots.run, "/v1/grants")
            .await
            .map_err(|error| error.to_string())
    }

    /// The GPUs of a container in the kubelet's record.
    pub(super) fn gpus_of(&self, pod_uid: &str, container: &str) -> Vec<DeviceId> {
        let mut held = self.env.kubelet.devices(pod_uid, container);
        held.remove(&self.env.gpu).unwrap_or_default().into_iter().collect()
    }

    fn visible(&self, pod_uid: &str, container: &str) -> String {
        let text_of = |view: &View<'_>| {
            let edits = &view.pod(pod_uid)?.containers.get(container)?.edits;
            let mut ids: Vec<_> =
                edits.envs.get("NVIDIA_VISIBLE_DEVICES")?.split(',').map(str::to_owned).collect();
            ids.sort();
            Some(ids.join("\n"))
        };
        self.env.kubelet.view(text_of).unwrap_or_default()
    }

    fn numa_nodes(&self, ids: &[DeviceId]) -> Result<usize, Stop> {
        let inventory = self.env.daemon()?.views.inventory.borrow().clone();
        let offering = inventory.resources.get(&self.env.gpu);
        let nodes = ids
            .iter()
            .filter_map(|id| offering?.devices.get(id))
            .map(|offered| offered.device.numa_nodes.clone());
        Ok(nodes.collect::<std::collections::BTreeSet<_>>().len())
    }
}

/// Ids, one a line.
pub(super) fn lines(ids: &[DeviceId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A resource's devices in one line: number, class and NUMA nodes.
fn describe(offering: &Offering) -> String {
    let devices = || offering.devices.values().map(|offered| &offered.device);
    let mut numa: BTreeMap<u32, usize> = BTreeMap::new();
    for node in devices().flat_map(|device| &device.numa_nodes) {
        *numa.entry(*node).or_default() += 1;
    }
    let numa: Vec<String> =
        numa.into_iter().map(|(node, count)| format!("NUMA {node}: {count}")).collect();
    let first = offering.devices.keys().next().map(ToString::to_string).unwrap_or_default();
    format!(
        "{} {:5}  {:20}  {first}{}",
        devices().count(),
        offering.spec.class,
        numa.join(", "),
        if devices().count() > 1 { " ..." } else { "" }
    )
}
