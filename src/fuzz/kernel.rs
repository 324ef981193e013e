//! What the kernel sends: its log, its uevents. And the answers of NVIDIA's management library.

use super::Seeds;
use super::input::Input;
use crate::domain::{
    GpuDescription, MigAttributes, MigInstance, MigPlace, NvLinks, NvmlGpu, NvmlGpuQuery,
    NvmlQuery, NvmlSnapshot, PciAddress,
};
use crate::hardware;
use crate::host::{KernelRecord, Uevent};
use std::collections::{BTreeMap, BTreeSet};

/// A record of `/dev/kmsg`. Only a line of the kernel itself is an error of a GPU, and only one
/// that begins as the driver writes it.
pub fn kernel_log(data: &[u8]) {
    let Some(record) = KernelRecord::parse(data) else { return };
    assert!(!record.text.contains('\n'), "one line: {record:?}");
    let priority = String::from_utf8_lossy(data);
    let priority = priority.split(',').next().unwrap_or_default();
    assert!(priority.parse::<u64>().is_ok_and(|number| number < 8), "a line of user space");
    let KernelRecord { sequence, since_boot, text } = &record;
    let written = format!("6,{sequence},{},-;{text}\n DEVICE=x\n", since_boot.as_micros());
    assert_eq!(KernelRecord::parse(written.as_bytes()).as_ref(), Some(&record));
    let Some(event) = hardware::xid(text) else { return };
    let place = text.strip_prefix("NVRM: Xid (").and_then(|rest| rest.split_once("): "));
    let (place, _) = place.expect("the line begins as the driver writes it");
    assert!(event.whole_slot && event.at.function == 0, "{event:?}");
    let slot = event.at.to_string();
    let slot = slot.trim_end_matches(".0").trim_start_matches('0');
    let is_there = place.to_lowercase().contains(slot.split_once(':').map_or("", |(_, bus)| bus));
    assert!(is_there, "the address is that of the line: {event:?}");
    // What follows the first line cannot change the event.
    assert_eq!(hardware::xid(&format!("{text} ")).map(|it| it.at), Some(event.at));
}

/// Lines of NVIDIA's driver, of other drivers, and of user space.
pub(super) fn kernel_log_seeds() -> Seeds {
    [
        ("xid", "2,3964,206764307,-;NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=a, Timeout\n"),
        ("mig", "2,1,2,-;NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, Contained\n"),
        (
            "recovery",
            "3,5,6,-,caller=T1;NVRM: Xid (PCI:0018:02:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)\n",
        ),
        ("old", "2,7,8,-;NVRM: Xid (0000:01:00): 31, Ch 00000010\n"),
        ("function", "2,7,8,-;NVRM: Xid (PCI:00000000:3B:00.0): 79\n"),
        ("pci", "4,7,140900,-;pci 0000:00:02.0: a; b, c\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00:02.0\n"),
        ("user", "12,7,8,-;NVRM: Xid (PCI:0000:9b:00): 79, forged\n"),
    ]
    .map(|(name, line)| (name, line.as_bytes().to_vec()))
    .into()
}

/// A datagram of the kernel. An event is of a function that the path names, and a synthetic one is
/// none.
pub fn uevent(data: &[u8]) {
    let Some(uevent) = Uevent::parse(data) else { return };
    assert!(uevent.action.bytes().all(|byte| byte.is_ascii_lowercase()), "{uevent:?}");
    assert!(uevent.devpath.starts_with('/'), "{uevent:?}");
    let mut datagram = format!("{}@{}", uevent.action, uevent.devpath);
    let subsystem = uevent.subsystem.iter().map(|subsystem| ("SUBSYSTEM", subsystem.clone()));
    let sequence = uevent.sequence.iter().map(|number| ("SEQNUM", number.to_string()));
    let fields = uevent.fields.iter().map(|(key, value)| (*key, value.clone()));
    for (key, value) in subsystem.chain(sequence).chain(fields) {
        datagram.push_str(&format!("\0{key}={value}"));
    }
    assert_eq!(Uevent::parse(datagram.as_bytes()).as_ref(), Some(&uevent));
    let Some(event) = hardware::event(&uevent) else { return };
    assert!(uevent.field("SYNTH_UUID").is_none(), "any process can cause a synthetic event");
    let parts = uevent.devpath.split('/');
    let named: Vec<PciAddress> = parts.filter_map(|part| part.parse().ok()).collect();
    assert_eq!(named.last(), Some(&event.at), "the nearest function of the path");
    // A scan must follow, or the health of the device would be that of the last one.
    assert!(uevent.may_matter() || !uevent.devpath.starts_with("/devices/"), "{uevent:?}");
}

/// Events of functions, bridges, GPUs, and of other devices.
pub(super) fn uevent_seeds() -> Seeds {
    let datagram = |text: &str| text.replace(' ', "\0").into_bytes();
    const CARD: &str = "/devices/pci0000:00/0000:00:02.0/0000:03:00.0";
    vec![
        (
            "bind",
            datagram(&format!("bind@{CARD} ACTION=bind SUBSYSTEM=pci DRIVER=mlx5_core SEQNUM=7")),
        ),
        (
            "recovery",
            datagram(&format!(
                "change@{CARD} SUBSYSTEM=pci ERROR_EVENT=BEGIN_RECOVERY DEVICE_ONLINE=0 SEQNUM=8"
            )),
        ),
        (
            "wedged",
            datagram(&format!("change@{CARD}/drm/card0 SUBSYSTEM=drm WEDGED=rebind,bus-reset")),
        ),
        ("reset", datagram(&format!("change@{CARD}/drm/card0 SUBSYSTEM=drm WEDGED=none"))),
        ("synthetic", datagram(&format!("unbind@{CARD} SUBSYSTEM=pci SYNTH_UUID=0"))),
        ("veth", datagram("add@/devices/virtual/net/veth1 SUBSYSTEM=net SEQNUM=9")),
        ("udev", b"libudev\0\xfe\xed\xca\xfe".to_vec()),
    ]
}

/// Queries and answers of NVML one after the other. A fact is the newest one that was answered
/// since it was first queried, and a fact that is no longer queried is forgotten.
pub fn nvml(data: &[u8]) {
    let mut input = Input::new(data);
    let mut known = NvmlSnapshot::empty();
    for _ in 0..8 {
        if input.is_empty() {
            return;
        }
        let query: NvmlQuery = (0..input.small(4)).map(|_| query(&mut input)).collect();
        let gpus = (0..input.small(4)).map(|_| answer(&mut input)).collect();
        let answer = NvmlSnapshot { gpus };
        let next = known.merged(answer.clone(), &query);
        is_merged(&known, &answer, &query, &next);
        assert_eq!(next.merged(NvmlSnapshot::empty(), &query), next, "silence changes nothing");
        is_described(&next, &query);
        known = next;
    }
}

fn is_merged(old: &NvmlSnapshot, answer: &NvmlSnapshot, query: &NvmlQuery, next: &NvmlSnapshot) {
    for (gpu, facts) in &next.gpus {
        let wanted = query.get(gpu).expect("only facts of the query are known");
        let of = |snapshot: &NvmlSnapshot| snapshot.gpus.get(gpu).cloned().unwrap_or_default();
        let (old, answer) = (of(old), of(answer));
        let newest = |now: Option<bool>, then: Option<bool>| now.or(then);
        assert_eq!(facts.uuid, answer.uuid.or(old.uuid), "the UUID of {gpu}");
        let mode = wanted.mig_mode.then(|| newest(answer.mig_mode, old.mig_mode)).flatten();
        assert_eq!(facts.mig_mode, mode, "the MIG mode of {gpu}");
        let links = wanted.links.then(|| answer.links.or(old.links)).flatten();
        assert_eq!(facts.links, links, "the links of {gpu}");
        let described = answer.description.or(old.description).filter(|_| wanted.described);
        assert_eq!(facts.description, described, "the description of {gpu}");
        for (place, instance) in &facts.instances {
            assert!(wanted.instances.contains(place), "an instance that is not queried");
            let (old, now) = (old.instances.get(place), answer.instances.get(place));
            let newest = now.or(old).expect("an instance that was answered");
            assert_eq!(instance.uuid, newest.uuid, "the newest UUID");
            assert_eq!(instance.index, newest.index, "the newest number");
            let same = old.filter(|old| old.uuid == newest.uuid);
            let profile = newest.profile.clone().or(same.and_then(|old| old.profile.clone()));
            assert_eq!(instance.profile, profile, "the profile of this instance, and of no other");
        }
    }
}

fn is_described(snapshot: &NvmlSnapshot, query: &NvmlQuery) {
    let hives = snapshot.hives();
    for (gpu, hive) in &hives {
        assert!(snapshot.gpus.contains_key(gpu), "a hive of an unknown GPU");
        // A hive may contain another one.
        let is_same = |other: &String| other.starts_with(hive) || hive.starts_with(other.as_str());
        let others = hives.values().filter(|other| is_same(other)).count();
        assert!(others > 1, "`{hive}` has one GPU");
    }
    for profile in snapshot.mig_profiles() {
        drop(format!("nvidia.com/mig-{profile}").parse::<crate::domain::ResourceName>());
    }
    let complete = !snapshot.is_incomplete_for(query) && !snapshot.lacks_profile(query);
    if complete {
        for (gpu, wanted) in query.iter().filter(|(_, wanted)| wanted.mig_mode) {
            assert!(snapshot.gpus[gpu].mig_mode.is_some(), "{gpu} of {wanted:?}");
        }
    }
    if snapshot.withholds_whole(query) {
        assert!(query.keys().any(|gpu| snapshot.is_in_mig_mode(*gpu)), "a GPU without MIG mode");
    }
}

fn gpu(input: &mut Input<'_>) -> PciAddress {
    format!("0000:{:02x}:00.0", input.small(5)).parse().expect("an address")
}

fn place(input: &mut Input<'_>) -> MigPlace {
    (input.small(3).into(), input.small(2).into())
}

fn query(input: &mut Input<'_>) -> (PciAddress, NvmlGpuQuery) {
    let (gpu, flags) = (gpu(input), input.byte());
    let instances: BTreeSet<MigPlace> = (0..input.small(4)).map(|_| place(input)).collect();
    let [uuid, links, mig_mode, described] = [1, 2, 4, 8].map(|flag| flags & flag > 0);
    (gpu, NvmlGpuQuery { uuid, instances, links, mig_mode, described })
}

fn answer(input: &mut Input<'_>) -> (PciAddress, NvmlGpu) {
    let at = gpu(input);
    let instance = |input: &mut Input<'_>| MigInstance {
        uuid: format!("MIG-{}", input.small(3)),
        profile: input.option(|input| input.text(8)),
        index: input.option(|input| input.small(4).into()),
    };
    let instances: BTreeMap<MigPlace, MigInstance> =
        (0..input.small(4)).map(|_| (place(input), instance(input))).collect();
    let facts = NvmlGpu {
        uuid: input.option(|input| format!("GPU-{}", input.small(3))),
        instances,
        links: input.option(|input| NvLinks {
            peers: (0..input.small(5)).map(|_| (gpu(input), input.small(4).into())).collect(),
            down: input.small(2).into(),
        }),
        mig_mode: input.option(Input::truth),
        description: input.option(|input| GpuDescription {
            memory_mib: input.option(|input| input.byte().into()),
            instances: [((1, 0), MigAttributes::default())].into(),
            ..GpuDescription::default()
        }),
    };
    (at, facts)
}

/// A GPU with MIG instances that change, and GPUs with links.
pub(super) fn nvml_seeds() -> Seeds {
    const ONE: [u8; 6] = [1, 1, 15, 1, 1, 0];
    const NAMED: [u8; 17] = [1, 1, 1, 1, 0, 0, 1, 4, b'1', b'g', b'.', b'x', 0, 0, 0, 0, 0];
    const UNNAMED: [u8; 12] = [1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0];
    // A query: GPU, flags, instances. An answer: GPU, instances, UUID, links, mode, description.
    let queried = [1, 1, 15, 2, 1, 0, 2, 0];
    let first = [1, 1, 2, 1, 0, 0, 1, 3, b'1', b'g', b'.', 0, 2, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0];
    let silent = [1, 1, 0, 0, 0, 0, 0];
    let linked = [2, 1, 2, 0, 2, 2, 0];
    let ends = [2, 1, 0, 0, 1, 1, 2, 3, 0, 0, 0, 2, 0, 0, 1, 1, 1, 3, 0, 0, 0];
    vec![
        ("mig", [&queried[..], &first, &queried, &silent].concat()),
        ("links", [&linked[..], &ends].concat()),
        // The instance at the same place is another one, and has no profile yet.
        ("another", [&ONE[..], &NAMED, &ONE, &UNNAMED].concat()),
    ]
}
