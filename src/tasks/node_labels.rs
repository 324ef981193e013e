//! Writes the node's labels: the feature file in the folder that Node Feature Discovery reads, if
//! the configuration names that folder.
//!
//! The file is not removed when the daemon ends. The devices stay on the node, and labels that
//! disappeared at every upgrade would move pods.

use crate::domain::{Inventory, NvidiaNode, Plan};
use crate::host::{self, SpecFolder, read_bounded};
use crate::telemetry::gpu_labels::GpuOffers;
use crate::telemetry::labels::{FILE, FILE_BYTES_MAX, GpuPart, features};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The names of temporary files begin with this. A write that was cut off leaves one; readers of
/// the folder ignore it.
const HIDDEN: char = '.';
/// How often the file is ensured without a change: a write may have failed, and another program may
/// have removed the file.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 30_000 });

/// What the labels follow from.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) plan: watch::Receiver<Arc<Plan>>,
    /// The GPUs of NVIDIA's driver; `None` while they cannot be read.
    pub(crate) gpus: watch::Receiver<Option<Arc<NvidiaNode>>>,
}

impl Sources {
    /// The text of the file now. `part` is the former part about GPUs, and becomes the current one.
    fn text(&mut self, part: &mut Option<GpuPart>) -> String {
        let node = self.gpus.borrow_and_update().clone();
        let offers = GpuOffers::of(&self.plan.borrow_and_update());
        let inventory = self.inventory.borrow_and_update().clone();
        let Some(offers) = offers else { return features(&inventory, None) };
        let Some(node) = node else { return features(&inventory, part.as_ref()) };
        let current = GpuPart::of(&node, &offers, part.as_ref());
        let text = features(&inventory, current.as_ref());
        // Without GPUs the former part stays known: the driver may come back.
        *part = current.or(part.take());
        text
    }

    /// Waits for a change. Returns whether there is still a source.
    async fn changed(&mut self) -> bool {
        let changed = tokio::select! {
            changed = self.inventory.changed() => changed,
            changed = self.plan.changed() => changed,
            changed = self.gpus.changed() => changed,
        };
        changed.is_ok()
    }
}

/// Writes the file now, at every change of its content, and when it is missing. The first of
/// several errors is logged, and `not_written` has the last one.
pub(crate) async fn keep(
    folder: PathBuf,
    mut sources: Sources,
    not_written: watch::Sender<Option<String>>,
) {
    let files = SpecFolder::new(&folder, FILE);
    let former = read_bounded(&files.file(FILE), FILE_BYTES_MAX).unwrap_or_default();
    let mut gpus = GpuPart::in_file(&String::from_utf8_lossy(&former));
    for name in files.own().into_iter().filter(|name| name.starts_with(HIDDEN)) {
        drop(files.remove(&name));
    }
    loop {
        let text = sources.text(&mut gpus);
        let why = files
            .ensure(FILE, &text)
            .err()
            .map(|error| format!("`{}`: {error}", files.file(FILE).display()));
        if let Some(why) = &why
            && not_written.borrow().is_none()
        {
            tracing::warn!(%why, "cannot write the node's labels; check the folder in `labels.features_d`");
        }
        not_written.send_replace(why);
        tokio::select! {
            has_source = sources.changed() => if !has_source { return },
            () = tokio::time::sleep(host::until_tick(AGAIN)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        Attributes, Contract, Device, DeviceClass, DeviceId, Health, NvidiaOptions, Offered,
        Offering, Reason, ResourceSpec,
    };
    use std::collections::BTreeMap;
    use std::os::unix::fs::MetadataExt as _;
    use std::time::Duration;

    fn inventory(devices: u32, health: Health) -> Arc<Inventory> {
        let spec = Arc::new(ResourceSpec::new("a.b/c".parse().unwrap(), DeviceClass::Char));
        let offered = |n: u32| {
            let id = DeviceId::new(format!("dev:c{n}"));
            let attributes = Attributes::default();
            let device = Device {
                id: id.clone(),
                key: String::new(),
                class: DeviceClass::Char,
                pci: None,
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes,
            };
            (id, Offered { device: Arc::new(device), health })
        };
        let offering =
            Offering { devices: (0..devices).map(offered).collect(), spec: Arc::clone(&spec) };
        Arc::new(Inventory { resources: BTreeMap::from([(spec.name.clone(), Arc::new(offering))]) })
    }

    #[test]
    fn the_gpus_of_the_former_file_stay_while_they_cannot_be_read() {
        let (inventory, plan, gpus) =
            (watch::Sender::default(), watch::Sender::default(), watch::Sender::default());
        let mut sources = Sources {
            inventory: inventory.subscribe(),
            plan: plan.subscribe(),
            gpus: gpus.subscribe(),
        };
        let former = "# GPUs of NVIDIA's driver: 00000000\nnvidia.com/gpu.memory=1\n";
        let part = || GpuPart::in_file(former);
        let has_memory = |text: &str| text.contains("\nnvidia.com/gpu.memory=1\n");
        assert!(!has_memory(&sources.text(&mut part())), "another plugin offers the GPUs");
        let spec = ResourceSpec {
            contract: Contract::Nvidia(NvidiaOptions::default()),
            ..ResourceSpec::new("nvidia.com/gpu".parse().unwrap(), DeviceClass::Gpu)
        };
        plan.send_replace(Arc::new(Plan { specs: [Arc::new(spec)].into(), ..Plan::default() }));
        assert!(has_memory(&sources.text(&mut part())));
        gpus.send_replace(Some(Arc::new(NvidiaNode::default())));
        let mut known = part();
        assert!(!has_memory(&sources.text(&mut known)), "the GPUs were removed");
        assert_eq!(known, part());
    }

    #[tokio::test]
    async fn the_file_is_written_only_when_the_devices_change() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("features.d");
        let file = folder.join(FILE);
        let read = |count: u32| {
            let file = file.clone();
            async move {
                let wanted = format!("holdfast.dev/a.b_c.count={count}\n");
                let there = async {
                    while !std::fs::read_to_string(&file).is_ok_and(|text| text.ends_with(&wanted))
                    {
                        tokio::task::yield_now().await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(20), there)
                    .await
                    .expect("the file is written");
                std::fs::metadata(&file).unwrap().ino()
            }
        };
        let sender = watch::Sender::new(inventory(2, Health::Healthy));
        let (plan, gpus) = (watch::Sender::default(), watch::Sender::default());
        let begin = || {
            let (inventory, plan, gpus) = (sender.subscribe(), plan.subscribe(), gpus.subscribe());
            let sources = Sources { inventory, plan, gpus };
            tokio::spawn(keep(folder.clone(), sources, watch::Sender::default()))
        };
        let keeping = begin();
        let first = read(2).await;
        // An unhealthy device is still a device. When the next change is published, this one was
        // processed.
        sender.send_replace(inventory(2, Health::Unhealthy(Reason::Xid)));
        tokio::task::yield_now().await;
        assert_eq!(read(2).await, first);
        sender.send_replace(inventory(3, Health::Healthy));
        let second = read(3).await;
        assert_ne!(first, second, "written under another name, and renamed");
        keeping.abort();

        // The next daemon finds a correct file. A write that a kill cut off is removed; files of
        // others stay.
        std::fs::write(folder.join(".holdfast-cut.new"), "x").unwrap();
        std::fs::write(folder.join("holdfast-of-mine"), "mine=1").unwrap();
        let keeping = begin();
        let removed = async {
            while folder.join(".holdfast-cut.new").exists() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), removed).await.expect("the file is removed");
        assert_eq!(read(3).await, second, "the same text is not written again");
        assert!(folder.join("holdfast-of-mine").exists());
        keeping.abort();
    }
    #[tokio::test]
    async fn a_failed_write_is_repeated_and_a_removed_file_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("features.d");
        // In the place of the folder is a file.
        std::fs::write(&folder, "").unwrap();
        let inventory = watch::Sender::new(inventory(2, Health::Healthy));
        let (plan, gpus) = (watch::Sender::default(), watch::Sender::default());
        let sources = Sources {
            inventory: inventory.subscribe(),
            plan: plan.subscribe(),
            gpus: gpus.subscribe(),
        };
        let not_written = watch::Sender::default();
        let mut problem = not_written.subscribe();
        let keeping = tokio::spawn(keep(folder.clone(), sources, not_written));
        let limit = Duration::from_secs(20);
        let failed = tokio::time::timeout(limit, problem.wait_for(Option::is_some)).await;
        let why = failed.expect("the problem is published").unwrap().clone().unwrap();
        assert!(why.contains("features.d/holdfast`: "), "{why}");
        std::fs::remove_file(&folder).unwrap();
        let written = tokio::time::timeout(limit, problem.wait_for(Option::is_none)).await;
        drop(written.expect("the write is repeated").unwrap());
        std::fs::remove_file(folder.join(FILE)).unwrap();
        let there = async {
            while !folder.join(FILE).exists() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(limit, there).await.expect("the file is written again");
        keeping.abort();
    }
}
