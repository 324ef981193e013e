//! The devices: whether each resource has devices, whether they are healthy, and the requirements
//! of guests.

use super::super::codes::{
    DEVICE_CORDONED, DEVICE_SUSPECT, DEVICE_UNHEALTHY, DRIVER_NOT_BOUND, IOMMU_OFF, IOMMU_UNSAFE,
    RESOURCE_SELECTS_NOTHING,
};
use super::super::{Facts, Finding, Resource};
use super::{list, number, text};
use crate::domain::Reason;
use crate::hardware::Nearest;

pub(super) fn selected(facts: &Facts) -> Option<Vec<Finding>> {
    let resources = facts.resources.as_ref()?;
    // Without a configuration, known hardware is offered if present: none is no error then.
    let is_configured = facts.config.as_ref()?.as_ref().is_ok_and(|wants| wants.has_resources);
    // The daemon may know more: it queries NVML, and keeps held devices.
    let offered = facts.status().map(|status| list(status, "resources")).unwrap_or_default();
    let has_some = |resource: &Resource| match offered
        .iter()
        .find(|offered| text(offered, "name") == resource.name)
    {
        Some(offered) if number(offered, "devices") > 0 => true,
        Some(_) => false,
        None => resource.needs_nvml,
    };
    let empty = resources
        .iter()
        .filter(|resource| is_configured && resource.devices == 0 && !has_some(resource));
    Some(empty.map(selects_nothing).collect())
}

fn selects_nothing(resource: &Resource) -> Finding {
    let Resource { name, class, near, paths, why_none, .. } = resource;
    if !paths.is_empty() {
        // The nodes may be there, and belong to an earlier resource.
        let found = match &why_none[..] {
            [] => format!("nothing in /dev matches {}", paths.join(", ")),
            why => why.join("; "),
        };
        let todo = "fix `paths`, or load the driver that creates a missing node; the daemon \
                    detects a new node automatically";
        return Finding::new(&RESOURCE_SELECTS_NOTHING, name, found, todo);
    }
    let Some(nearest) = Nearest::of(near) else {
        let found = format!(
            "no device of class {class} on this host matches, and none fails only one criterion"
        );
        let todo = "compare `select` with the devices of this host";
        return Finding::new(&RESOURCE_SELECTS_NOTHING, name, found, todo)
            .by("holdfast discover --all -o json");
    };
    let (found, first) = (nearest.to_string(), nearest.first);
    if nearest.is_unbound {
        let todo = match first.wanted.as_str() {
            "any" => "load the driver of these devices; the kernel log shows why it does not bind to them".to_owned(),
            wanted => format!("load the driver {wanted}; the kernel log shows why it does not bind to these devices"),
        };
        return Finding::new(&DRIVER_NOT_BOUND, name, found, todo)
            .by("dmesg | grep -i -e firmware -e probe -e taint");
    }
    let todo = match first.criterion {
        // A term of the SR-IOV operator's policies: the kernel's own driver of the device.
        "driver" if first.wanted == "netdevice" => {
            "`netdevice` is not a driver; remove `driver` from the resource's `select`".to_owned()
        }
        "driver" => format!(
            "change `driver` in the resource's `select`, or bind these devices to {}",
            first.wanted
        ),
        "name" => "an earlier resource of the configuration selects the devices; put this one \
                   first, or narrow the other one's `select`"
            .to_owned(),
        "host" => "the host uses the device, and no pod gets such a device; unmount it, or remove \
                   it from its array"
            .to_owned(),
        "exclude" => "change the resource's `exclude`".to_owned(),
        criterion => format!("change `{criterion}` in the resource's `select`"),
    };
    Finding::new(&RESOURCE_SELECTS_NOTHING, name, found, todo).by("holdfast discover --all -o json")
}

pub(super) fn healthy(facts: &Facts) -> Option<Vec<Finding>> {
    let see = |reason: &str| {
        format!(
            "docs/health.md describes what `{reason}` was read from, and \
             what makes the device healthy again"
        )
    };
    let Some(status) = facts.status() else {
        let sick = facts.resources.as_ref()?.iter().flat_map(|resource| &resource.unhealthy);
        let sick = sick.filter(|(_, reason)| !Reason::is_of_the_configuration(reason));
        return Some(
            sick.map(|(id, reason)| Finding::new(&DEVICE_UNHEALTHY, id, reason, see(reason)))
                .collect(),
        );
    };
    let find = |device: &serde_json::Value| {
        let (id, reason, detail) =
            (text(device, "id"), text(device, "reason"), text(device, "detail"));
        let show = format!("holdfast device show {id}");
        if !text(device, "cordoned").is_empty() {
            let todo = format!("when it may be used again, run `holdfast device uncordon {id}`");
            return Finding::new(&DEVICE_CORDONED, id, text(device, "cordoned"), todo);
        }
        let found =
            if detail.is_empty() { reason.to_owned() } else { format!("{reason}: {detail}") };
        if text(device, "health") == "Unhealthy" {
            return Finding::new(&DEVICE_UNHEALTHY, id, found, see(reason)).by(show);
        }
        let suspected = list(device, "incidents")
            .last()
            .map(|incident| text(incident, "reason"))
            .filter(|reason| !reason.is_empty());
        let found = suspected.map_or_else(|| "an unconfirmed symptom".to_owned(), str::to_owned);
        Finding::new(&DEVICE_SUSPECT, id, found, "wait, or look up its last symptoms").by(show)
    };
    let is_fault =
        |device: &&serde_json::Value| !Reason::is_of_the_configuration(text(device, "reason"));
    Some(list(status, "ailing").iter().filter(is_fault).map(find).collect())
}

pub(super) fn iommu(facts: &Facts) -> Option<Vec<Finding>> {
    let host = facts.host.as_ref()?;
    let guests = facts.resources.as_ref()?.iter().find(|resource| resource.is_for_guests);
    let Some(guests) = guests else { return Some(Vec::new()) };
    if host.is_unsafe {
        let todo =
            "enable the IOMMU, and disable `enable_unsafe_noiommu_mode` of the module `vfio`";
        return Some(vec![Finding::new(
            &IOMMU_UNSAFE,
            &guests.name,
            "VFIO runs without an IOMMU (noiommu mode)",
            todo,
        )]);
    }
    Some(match host.iommu_groups? {
        0 => {
            let todo = "enable the IOMMU in the firmware (VT-d, AMD-Vi); on Intel processors, boot \
                        with `intel_iommu=on`";
            vec![
                Finding::new(
                    &IOMMU_OFF,
                    &guests.name,
                    "its devices are for guests, but this host has no IOMMU group",
                    todo,
                )
                .by("dmesg | grep -i -e dmar -e iommu"),
            ]
        }
        _ => Vec::new(),
    })
}
