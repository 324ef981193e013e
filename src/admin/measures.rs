//! Metrics that are read from the daemon's snapshots at each scrape of `/metrics`.
//!
//! No state is kept for them, so the series of a removed object ends automatically. The number of
//! series is bounded by the node: resources by the configuration; reasons, states and signals by
//! closed lists; holders by the ids that the node offers, because each container that is listed
//! holds at least one; devices by [`UNHEALTHY_DEVICES_MAX`]; pools, taints and drivers by
//! [`Published`].

use super::Views;
use crate::domain::{DueHooks, Grant, HookState, Inventory, LedgerHealth, PodRef};
use crate::host;
use crate::slices::others::OtherDriver;
use crate::slices::published::Published;
use crate::telemetry::exposition::Page;
use crate::telemetry::http::Scrape;
use crate::telemetry::metrics;
use crate::telemetry::table::Metric;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Unhealthy ids that have a series of their own, at most. A pool, or one device with many shares,
/// would make hundreds.
const UNHEALTHY_DEVICES_MAX: usize = 64;

/// The page of `/metrics`, for a daemon that starts now. It copies each snapshot before it writes:
/// this thread has a low priority, and the publisher of the next snapshot waits while one is
/// borrowed.
pub(super) fn scrape(views: Views, state_dir: PathBuf) -> Scrape {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Arc::new(move || {
        metrics::page(|page| {
            page.sample(Metric::Start, &[], started);
            of_daemon(page, &views);
            of_disk(page, *views.ledger_health.borrow(), &state_dir);
            let (inventory, grants) =
                (Arc::clone(&views.inventory.borrow()), Arc::clone(&views.grants.borrow()));
            write_held(page, &inventory, &grants);
            let due = Arc::clone(&views.due.borrow());
            of_hooks(page, &due);
            if let Some(published) = views.published.borrow().clone() {
                of_dra(page, &views, &published, &grants);
            }
        })
    })
}

fn of_daemon(page: &mut Page, views: &Views) {
    page.sample(Metric::BuildInfo, &[env!("CARGO_PKG_VERSION")], 1);
    page.sample(Metric::Ready, &[], u64::from(*views.ready.borrow()));
    page.sample(Metric::LedgerDamaged, &[], u64::from(views.recovery.is_some()));
    let kubelet = *views.kubelet.borrow();
    page.sample(
        Metric::KubeletPresent,
        &[],
        u64::from(kubelet.is_some() && !views.socket_left_behind()),
    );
    if let Some(started) = kubelet.and_then(|kubelet| kubelet.made_at()) {
        page.sample(Metric::KubeletStart, &[], started.0 / 1000);
    }
    page.sample(Metric::CheckpointReadable, &[], u64::from(views.checkpoint_unread().is_none()));
    let off: Vec<_> = views.judgement.borrow().off.keys().copied().collect();
    for signal in off {
        page.sample(Metric::SignalsOff, &[signal.as_str()], 1);
    }
    let unread = views.unread.borrow().reasons().len();
    page.sample(Metric::ScanUnread, &[], unread as u64);
    let registrations = views.registrations.borrow().clone();
    for (resource, status) in registrations.iter() {
        page.sample(Metric::Registered, &[resource.as_str()], u64::from(status.registered));
    }
    for (resource, status) in registrations.iter() {
        page.sample(Metric::Contested, &[resource.as_str()], u64::from(status.contested));
    }
}

fn of_disk(page: &mut Page, health: LedgerHealth, state_dir: &Path) {
    for (copy, is_writable) in [("journal", health.journal), ("database", health.database)] {
        page.sample(Metric::LedgerKept, &[copy], u64::from(is_writable));
    }
    if let Some(unreadable) = health.unreadable {
        page.sample(Metric::HistoryUnreadable, &[], unreadable.since.0 / 1000);
    }
    page.sample(Metric::NotDurable, &[], health.not_durable as u64);
    page.sample(Metric::LedgerSize, &[], host::size_below(state_dir));
    page.sample(Metric::LedgerFree, &[], host::free_bytes(state_dir));
}

/// The driver for claims.
fn of_dra(page: &mut Page, views: &Views, published: &Published, grants: &[Arc<Grant>]) {
    let live = grants.iter().filter(|grant| grant.is_live());
    let claims: BTreeSet<&str> =
        live.filter_map(|grant| Some(grant.claim.as_ref()?.claim.uid.as_str())).collect();
    page.sample(Metric::DraClaims, &[], claims.len() as u64);
    for OtherDriver { driver, devices, same } in &published.others {
        page.sample(Metric::DraOthers, &[driver, "no"], *devices as u64);
        page.sample(Metric::DraOthers, &[driver, "yes"], same.len() as u64);
    }
    let [sockets, slices, claims, statuses] = &views.dra;
    let drivers = published.others.iter().any(|other| !other.same.is_empty());
    for (part, has_problem) in [
        ("claims", claims.borrow().is_some()),
        ("drivers", drivers),
        ("slices", slices.borrow().is_some()),
        ("sockets", sockets.borrow().is_some()),
        ("statuses", statuses.borrow().is_some()),
    ] {
        page.sample(Metric::DraProblems, &[part], u64::from(has_problem));
    }
    for (pool, size) in &published.pools {
        page.sample(Metric::DraDevices, &[pool], size.devices as u64);
    }
    for (pool, size) in &published.pools {
        page.sample(Metric::DraSlices, &[pool], size.slices as u64);
    }
    for ((reason, effect), count) in &published.taints {
        page.sample(Metric::DraTaints, &[reason, effect], *count as u64);
    }
}

/// The metrics that grow with the node: devices, and their holders.
pub fn write_held(page: &mut Page, inventory: &Inventory, grants: &[Arc<Grant>]) {
    of_inventory(page, inventory);
    of_grants(page, inventory, grants);
}

fn of_inventory(page: &mut Page, inventory: &Inventory) {
    let mut reasons: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    let mut named = Vec::new();
    for (resource, offering) in &inventory.resources {
        let resource = resource.as_str();
        let mut unhealthy = 0;
        for (id, reason) in
            offering.devices.iter().filter_map(|(id, offered)| Some((id, offered.health.reason()?)))
        {
            unhealthy += 1;
            *reasons.entry((resource, reason.as_str())).or_default() += 1;
            if named.len() < UNHEALTHY_DEVICES_MAX {
                named.push([resource, id.as_str(), reason.as_str()]);
            }
        }
        page.sample(
            Metric::Devices,
            &[resource, "healthy"],
            offering.devices.len() as u64 - unhealthy,
        );
        page.sample(Metric::Devices, &[resource, "unhealthy"], unhealthy);
    }
    for ((resource, reason), count) in reasons {
        page.sample(Metric::DevicesUnhealthy, &[resource, reason], count);
    }
    for labels in named {
        page.sample(Metric::UnhealthyDevice, &labels, 1);
    }
}

fn of_grants(page: &mut Page, inventory: &Inventory, grants: &[Arc<Grant>]) {
    let states = ["bound", "granted", "suspect"];
    let mut counts: BTreeMap<(&str, &str), u64> = inventory
        .resources
        .keys()
        .flat_map(|resource| states.map(|state| ((resource.as_str(), state), 0)))
        .collect();
    // An id counts once for its container, however often it was granted to it, and once in total.
    let mut held = BTreeSet::new();
    let mut in_use: BTreeMap<&str, BTreeSet<&str>> =
        inventory.resources.keys().map(|resource| (resource.as_str(), BTreeSet::new())).collect();
    for grant in grants.iter().filter(|grant| grant.is_live()) {
        let resource = grant.resource.as_str();
        *counts.entry((resource, grant.state_name())).or_default() += 1;
        in_use
            .entry(resource)
            .or_default()
            .extend(grant.devices.iter().map(|device| device.id.as_str()));
        // Several pods may use a claim.
        let mut holders: Vec<_> = grant.pods().map(|pod| holder(grant, Some(pod))).collect();
        if holders.is_empty() {
            holders.push(holder(grant, None));
        }
        for holder in holders {
            held.extend(grant.devices.iter().map(|device| (holder, device.id.as_str())));
        }
    }
    for ((resource, state), count) in counts {
        page.sample(Metric::Grants, &[resource, state], count);
    }
    for (resource, ids) in in_use {
        page.sample(Metric::DevicesInUse, &[resource], ids.len() as u64);
    }
    let held: Vec<_> = held.into_iter().collect();
    for of_one in held.chunk_by(|(one, _), (next, _)| one == next) {
        page.sample(Metric::DevicesHeld, &of_one[0].0, of_one.len() as u64);
    }
}

/// The labels of a holder.
fn holder<'a>(grant: &'a Grant, pod: Option<&'a PodRef>) -> [&'a str; 4] {
    let namespace = pod.and_then(|pod| pod.namespace.as_deref()).unwrap_or_default();
    let name = pod.and_then(|pod| pod.name.as_deref()).unwrap_or_default();
    [namespace, name, grant.container().unwrap_or_default(), grant.resource.as_str()]
}

fn of_hooks(page: &mut Page, due: &DueHooks) {
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for hook in due.all() {
        let state = match hook.state {
            HookState::Failed { .. } => "failed",
            HookState::Due | HookState::Done => "due",
        };
        *counts.entry((hook.resource.as_str(), state)).or_default() += 1;
    }
    for ((resource, state), count) in counts {
        page.sample(Metric::HooksOwed, &[resource, state], count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        AllocId, Attributes, ContainerEdits, Device, DeviceClass, DeviceId, GrantState,
        GrantedDevice, Health, Offered, Offering, PodRef, Reason, ResourceSpec, Timestamp,
    };

    fn page(write: impl FnOnce(&mut Page)) -> Vec<String> {
        let mut page = Page::default();
        write(&mut page);
        page.into_text().lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    /// A resource with several shares of one device, one for each health.
    fn inventory(healths: impl Iterator<Item = Health>) -> Inventory {
        let spec = Arc::new(ResourceSpec::new("a.b/c".parse().unwrap(), DeviceClass::Char));
        let device = Arc::new(Device {
            id: DeviceId::new("dev:c0"),
            key: "dev:/dev/c0".into(),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        });
        let offered =
            |(n, health)| (device.id.share(n), Offered { device: Arc::clone(&device), health });
        let offering = Offering {
            devices: (0..).zip(healths).map(offered).collect(),
            spec: Arc::clone(&spec),
        };
        Inventory { resources: BTreeMap::from([(spec.name.clone(), Arc::new(offering))]) }
    }

    fn grant(pod: Option<&str>, container: &str, ids: &[&str]) -> Arc<Grant> {
        let device = |id: &&str| GrantedDevice {
            id: DeviceId::new(*id),
            key: String::new(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        };
        let bound = |name: &str| GrantState::Bound {
            pod: PodRef {
                uid: format!("uid-{name}"),
                namespace: Some("team".into()),
                name: Some(name.into()),
            },
            container: container.into(),
            bound_at: Timestamp(1),
        };
        Arc::new(Grant {
            alloc_id: AllocId::new("a"),
            resource: "a.b/c".parse().unwrap(),
            devices: ids.iter().map(device).collect(),
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: pod.map_or(GrantState::Granted, bound),
        })
    }

    #[test]
    fn devices_are_counted_by_health_and_by_reason_and_few_are_named() {
        let sick = |n| if n == 0 { Health::Healthy } else { Health::Unhealthy(Reason::Xid) };
        let lines = page(|page| of_inventory(page, &inventory((0..200).map(sick))));
        assert_eq!(lines[0], r#"holdfast_devices{resource="a.b/c",health="healthy"} 1"#);
        assert_eq!(lines[1], r#"holdfast_devices{resource="a.b/c",health="unhealthy"} 199"#);
        assert_eq!(lines[2], r#"holdfast_devices_unhealthy{resource="a.b/c",reason="xid"} 199"#);
        assert_eq!(
            lines[3],
            r#"holdfast_unhealthy_device_info{resource="a.b/c",device="dev:c0::1",reason="xid"} 1"#
        );
        assert_eq!(lines.len(), 3 + UNHEALTHY_DEVICES_MAX);
    }

    #[test]
    fn holders_are_counted_by_container_and_an_id_once() {
        let inventory = inventory(std::iter::repeat_n(Health::Healthy, 8));
        let grants = [
            grant(Some("train"), "main", &["1", "2"]),
            grant(None, "", &["3"]),
            grant(Some("train"), "main", &["2"]),
            grant(Some("train"), "init", &["2"]),
        ];
        let lines = page(|page| of_grants(page, &inventory, &grants));
        let wanted = [
            r#"holdfast_grants{resource="a.b/c",state="bound"} 3"#,
            r#"holdfast_grants{resource="a.b/c",state="granted"} 1"#,
            r#"holdfast_grants{resource="a.b/c",state="suspect"} 0"#,
            r#"holdfast_devices_in_use{resource="a.b/c"} 3"#,
            r#"holdfast_devices_held{namespace="",pod="",container="",resource="a.b/c"} 1"#,
            r#"holdfast_devices_held{namespace="team",pod="train",container="init",resource="a.b/c"} 1"#,
            r#"holdfast_devices_held{namespace="team",pod="train",container="main",resource="a.b/c"} 2"#,
        ];
        assert_eq!(lines, wanted);
        let given_back = |line: &String| !line.contains("devices_held") && line.ends_with(" 0");
        assert!(
            page(|page| of_grants(page, &inventory, &[])).iter().all(given_back),
            "no series of a removed holder remains"
        );
    }
}
