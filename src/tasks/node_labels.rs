//! Writes the node's labels: the feature file in the folder that Node Feature Discovery reads, if
//! the configuration names that folder.
//!
//! The file is not removed when the daemon ends. The devices stay on the node, and labels that
//! disappeared at every upgrade would move pods.

use crate::domain::Inventory;
use crate::host::SpecFolder;
use crate::telemetry::labels::{FILE, features};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// The names of temporary files begin with this. A write that was cut off leaves one; readers of
/// the folder ignore it.
const HIDDEN: char = '.';

/// Writes the file now and at every change of its content. Write errors are logged once.
pub(crate) async fn keep(folder: PathBuf, mut inventory: watch::Receiver<Arc<Inventory>>) {
    let files = SpecFolder::new(&folder, FILE);
    for name in files.own().into_iter().filter(|name| name.starts_with(HIDDEN)) {
        drop(files.remove(&name));
    }
    let mut failed = false;
    loop {
        let text = features(&inventory.borrow_and_update());
        match files.ensure(FILE, &text) {
            Ok(()) => failed = false,
            Err(error) if !std::mem::replace(&mut failed, true) => {
                tracing::warn!(file = %files.file(FILE).display(), %error, "cannot write the node's labels; check the folder in `labels.features_d`");
            }
            Err(_) => {}
        }
        if inventory.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        Attributes, Device, DeviceClass, DeviceId, Health, Offered, Offering, Reason, ResourceSpec,
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
        let begin = || {
            let (folder, inventory) = (folder.clone(), sender.subscribe());
            tokio::spawn(keep(folder, inventory))
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
}
