//! Device ids: chosen from stable properties, unique on the machine, and kept once they were
//! published (I6).

use crate::domain::{Device, DeviceClass, DeviceId, Objects};
use std::collections::{BTreeMap, BTreeSet};

/// The id of a device by its place alone: a PCI address, with the name of a part, or the path of a
/// node. It is unique.
pub(super) fn place_of(device: &Device) -> DeviceId {
    let Some(function) = &device.pci else { return DeviceId::new(device.key.clone()) };
    // `pci:<address>/<ids>/<part>`
    let part = device.key.splitn(3, '/').nth(2).map(|part| format!("-{part}")).unwrap_or_default();
    DeviceId::new(format!("{}{part}", function.address))
}

/// Gives the disk's own id to one of several paths to it: the path that had it before, else the
/// first. The others are named by their places: an id must not change when a second path appears.
pub(super) fn merge_paths(devices: &mut [Device], remembered: &BTreeMap<String, DeviceId>) {
    let mut by_id: BTreeMap<DeviceId, Vec<usize>> = BTreeMap::new();
    for (index, device) in
        devices.iter().enumerate().filter(|(_, device)| device.class == DeviceClass::Nvme)
    {
        by_id.entry(device.id.clone()).or_default().push(index);
    }
    for (id, paths) in by_id.into_iter().filter(|(_, paths)| paths.len() > 1) {
        let mut disk: Objects<()> = Objects::default();
        disk.hold(&(), devices[paths[0]].objects());
        let leads_there =
            |index: &usize| disk.conflict(&devices[*index].objects(), |()| false).is_some();
        if !paths.iter().all(leads_there) {
            continue;
        }
        let had_it = |index: &usize| remembered.get(&devices[*index].key) == Some(&id);
        let first = paths.iter().copied().find(had_it).unwrap_or(paths[0]);
        for index in paths.into_iter().filter(|index| *index != first) {
            devices[index].attributes.insert("second_path", id.to_string());
            devices[index].id = place_of(&devices[index]);
        }
    }
}

/// Gives every device of a clash the id of its place: an identity that two devices show names
/// neither.
pub(super) fn make_unique(devices: &mut [Device]) {
    // The first round can cause a new clash only with an identity that is spelled like a place. In
    // the second round that device gets the id of its place too.
    for _ in 0..2 {
        let mut counts: BTreeMap<DeviceId, usize> = BTreeMap::new();
        for device in devices.iter() {
            *counts.entry(device.id.clone()).or_default() += 1;
        }
        if counts.len() == devices.len() {
            return;
        }
        for device in devices.iter_mut().filter(|device| counts[&device.id] > 1) {
            device.id = place_of(device);
        }
    }
}

/// Replaces computed ids by remembered ones. Returns the new names, which must be remembered.
///
/// A device keeps its id if a better identity appears later (a GPU's UUID before its first use), or
/// if its identity is temporarily unreadable. It gets another id only if its place shows a
/// different identity, because the card was replaced: an id must not pass to another card. No two
/// devices ever share an id.
pub fn remember(
    devices: &mut [Device],
    remembered: &BTreeMap<String, DeviceId>,
) -> Vec<(String, DeviceId)> {
    let mut taken: BTreeSet<DeviceId> = BTreeSet::new();
    let mut open: Vec<usize> = (0..devices.len()).collect();
    // A card that shows the remembered identity comes before a card that is only in its place.
    for shown in [true, false] {
        open.retain(|&index| {
            let device = &mut devices[index];
            let kept = remembered.get(&device.key).filter(|known| {
                (**known == device.id) == shown
                    && !was_replaced(device, known)
                    && !taken.contains(*known)
            });
            if let Some(known) = kept {
                device.id = known.clone();
                taken.insert(known.clone());
            }
            kept.is_none()
        });
    }
    let mut named = Vec::new();
    for index in open {
        let device = &mut devices[index];
        // The id of a device may be the remembered id of another one. The id of its place may be
        // that of an earlier device.
        if taken.contains(&device.id) {
            let choices = [place_of(device), DeviceId::new(device.key.clone())];
            if let Some(free) = choices.into_iter().find(|id| !taken.contains(id)) {
                device.id = free;
            }
        }
        taken.insert(device.id.clone());
        named.push((device.key.clone(), device.id.clone()));
    }
    named
}

/// Whether the function in this place shows an identity of its own that differs from the remembered
/// one. A `/dev` node is never replaced: its key already identifies it.
fn was_replaced(device: &Device, known: &DeviceId) -> bool {
    let place = place_of(device);
    device.pci.is_some() && *known != place && device.id != place && *known != device.id
}

#[cfg(test)]
mod tests {
    use super::super::testing::device;
    use super::*;

    fn ids(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.id.as_str()).collect()
    }

    fn memory(devices: &[Device], ids: &[&str]) -> BTreeMap<String, DeviceId> {
        devices
            .iter()
            .zip(ids)
            .map(|(device, id)| (device.key.clone(), DeviceId::new(*id)))
            .collect()
    }

    #[test]
    fn an_identity_that_two_devices_show_names_neither() {
        let mut devices = [
            device("0000:01:00.0", "same"),
            device("0000:02:00.0", "same"),
            device("0000:03:00.0", "other"),
        ];
        make_unique(&mut devices);
        assert_eq!(ids(&devices), ["0000:01:00.0", "0000:02:00.0", "other"]);
    }

    #[test]
    fn parts_keep_their_names_when_the_whole_gets_a_better_name() {
        let part = |id: &str, part: &str| {
            let device = device("0000:01:00.0", id);
            Device { key: format!("{}/{part}", device.key), ..device }
        };
        let mut devices =
            [device("0000:01:00.0", "same"), part("same", "gi1-ci0"), part("same", "gi2-ci0")];
        make_unique(&mut devices);
        assert_eq!(ids(&devices), ["0000:01:00.0", "0000:01:00.0-gi1-ci0", "0000:01:00.0-gi2-ci0"]);

        let mut first = [part("0000:01:00.0-gi1-ci0", "gi1-ci0")];
        let remembered = remember(&mut first, &BTreeMap::new()).into_iter().collect();
        let mut later = [part("GPU-1-gi1-ci0", "gi1-ci0")];
        assert!(remember(&mut later, &remembered).is_empty());
        assert_eq!(ids(&later), ["0000:01:00.0-gi1-ci0"]);
    }

    #[test]
    fn a_later_identity_does_not_rename() {
        let mut devices = [device("0000:01:00.0", "GPU-1")];
        let remembered = memory(&devices, &["0000:01:00.0"]);
        assert!(remember(&mut devices, &remembered).is_empty());
        assert_eq!(ids(&devices), ["0000:01:00.0"]);
    }

    #[test]
    fn an_identity_that_cannot_be_read_is_remembered() {
        let mut devices = [device("0000:01:00.0", "0000:01:00.0")];
        let remembered = memory(&devices, &["GPU-1"]);
        assert!(remember(&mut devices, &remembered).is_empty());
        assert_eq!(ids(&devices), ["GPU-1"]);
    }

    #[test]
    fn a_replaced_card_gets_its_own_name() {
        let mut devices = [device("0000:01:00.0", "GPU-2")];
        let remembered = memory(&devices, &["GPU-1"]);
        assert_eq!(
            remember(&mut devices, &remembered),
            [(devices[0].key.clone(), DeviceId::new("GPU-2"))]
        );
    }

    #[test]
    fn a_moved_card_keeps_its_name() {
        let mut devices = [device("0000:01:00.0", "0000:01:00.0"), device("0000:02:00.0", "GPU-1")];
        let remembered = memory(&devices, &["GPU-1", "GPU-1"]);
        assert_eq!(remember(&mut devices, &remembered).len(), 1);
        assert_eq!(ids(&devices), ["0000:01:00.0", "GPU-1"]);
    }

    #[test]
    fn new_names_are_reported_once_and_do_not_collide() {
        let mut devices = [device("0000:01:00.0", "GPU-1"), device("0000:02:00.0", "0000:02:00.0")];
        let remembered = BTreeMap::from([(devices[1].key.clone(), DeviceId::new("GPU-1"))]);
        let named = remember(&mut devices, &remembered);
        assert_eq!(ids(&devices), ["0000:01:00.0", "GPU-1"]);
        assert_eq!(named, [(devices[0].key.clone(), DeviceId::new("0000:01:00.0"))]);
        let all = named.into_iter().chain(remembered).collect();
        let mut again = [device("0000:01:00.0", "GPU-1"), device("0000:02:00.0", "0000:02:00.0")];
        assert!(remember(&mut again, &all).is_empty());
        assert_eq!(ids(&again), ids(&devices));
    }
}
