//! `holdfast discover --slices`: the `ResourceSlice` objects of this node, without a cluster.

use super::discover::{Document, document};
use super::found::{Found, find_described};
use crate::console::exit::{FAILURE, Failed, USAGE};
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, show};
use crate::domain::{
    Api, DeviceId, Grant, Health, Offered, Offering, Reason, ResourceName, ResourceSpec, Sharing,
    Verdicts,
};
use crate::hardware::{self, Discovery};
use crate::health::pool;
use crate::host::{self, HostRoot};
use crate::slices::api::{Attribute, Device, ResourceSlice};
use crate::slices::attributes::Facts;
use crate::slices::holders::Holders;
use crate::slices::names::NodeName;
use crate::slices::wanted::{Inputs, Layout, WantedDevices, wanted_devices};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Scans the host and prints the slices that the configured resources would have, or the default
/// ones if none are configured.
///
/// # Errors
/// When the configuration is invalid, or the name of the node is not known or not valid.
pub fn run(global: &Global, node: Option<&str>) -> Result<(), Failed> {
    let config = global.load_config()?;
    let node = node.map(str::to_owned).or_else(|| global.node(None).api_name());
    let node = node.ok_or_else(|| {
        Failed::new(USAGE, "the name of this node is not known; use --node-name, or set NODE_NAME")
    })?;
    let node = NodeName::new(&node).map_err(|error| Failed::new(USAGE, error))?;
    let root = HostRoot::new(&global.host_root).with_nvidia(&config.nvidia_roots);
    let found = find_described(global, &config, &root);
    let warnings = found.unread.iter().chain(&found.discovery.selection.warnings);
    for why in warnings {
        crate::console::eprintln(format_args!("holdfast: {why}"));
    }
    let driver = hardware::nvidia_node(&root, &found.discovery.devices, &found.nvml)
        .map(|node| node.driver)
        .map_err(|error| {
            Failed::new(
                FAILURE,
                format_args!("cannot read the version of NVIDIA's driver: {error}"),
            )
        })?;
    let boot_id = host::boot_id(&global.host_root).unwrap_or_else(|| "unknown".into());
    let Found { discovery, recovered, grants, .. } = &found;
    let document = document(&root, discovery, true)
        .with_verdicts(&recovered.verdicts, &boot_id)
        .with_holders(grants, discovery);
    let vendors = config.vendor_attributes;
    let facts =
        Facts { nvidia_driver: driver.as_deref(), nvml: Some(&found.nvml), vendors, taken: 0 };
    let resources = offerings(&document, discovery);
    let wanted = wanted_of(&node, &resources, grants, &recovered.verdicts, facts);
    for dropped in &wanted.dropped {
        crate::console::eprintln(format_args!("holdfast: {dropped}"));
    }
    let list = List::of(Layout::new(node).followed_by(&wanted).objects());
    show(global.output, &list, |list| {
        let table = table(list);
        if table.is_empty() {
            Text::of_line(format_args!("no resource offers a device; no slices"))
        } else {
            table.into()
        }
    })
}

/// What a node with these grants publishes.
#[must_use]
pub fn wanted_of(
    node: &NodeName,
    resources: &BTreeMap<ResourceName, Arc<Offering>>,
    grants: &[Arc<Grant>],
    verdicts: &Verdicts,
    facts: Facts<'_>,
) -> WantedDevices {
    let Holders { claimed, shares, held } = &Holders::of(grants);
    wanted_devices(&Inputs { node, resources, claimed, held, shares, verdicts, facts })
}

/// The ids of each resource, with the health that the document shows. A health that is not known is
/// no reason for a taint.
#[must_use]
pub fn offerings(
    document: &Document,
    discovery: &Discovery,
) -> BTreeMap<ResourceName, Arc<Offering>> {
    let reason = |word: &str| serde_json::from_value::<Reason>(word.into()).ok();
    let unhealthy: BTreeMap<&str, Reason> = document
        .devices
        .iter()
        .filter_map(|row| Some((row.id.as_str(), reason(row.reason?)?)))
        .collect();
    let offered = |device: &Arc<crate::domain::Device>| {
        let reason = unhealthy.get(device.id.as_str());
        let health = reason.map_or(Health::Healthy, |reason| Health::Unhealthy(*reason));
        Offered { device: Arc::clone(device), health }
    };
    let of = |spec: &Arc<ResourceSpec>| {
        let selected = discovery.selection.resources.get(&spec.name)?;
        let mut members: Vec<Offered> = selected.iter().map(offered).collect();
        if let Sharing::Pool(_) = spec.sharing {
            members = pool(spec, &members).into_iter().collect();
        }
        let ids = members
            .iter()
            .flat_map(|member| spec.sharing.ids(&member.device.id).map(|id| (id, member.clone())));
        let devices: BTreeMap<DeviceId, Offered> = ids.collect();
        // The slices that the resource would have if claims got its devices.
        let api = if spec.api == Api::Plugin { Api::Dra } else { spec.api };
        let spec = Arc::new(ResourceSpec { api, ..ResourceSpec::clone(spec) });
        Some((spec.name.clone(), Arc::new(Offering { spec, devices })))
    };
    discovery.specs.iter().filter_map(of).collect()
}

/// The slices as a list of Kubernetes objects.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct List {
    api_version: &'static str,
    kind: &'static str,
    /// The slices, by pool and number.
    pub items: Vec<ResourceSlice>,
}

impl List {
    /// A list of these slices.
    #[must_use]
    pub fn of(items: Vec<ResourceSlice>) -> Self {
        List { api_version: "v1", kind: "List", items }
    }
}

/// The devices of the slices, one a line.
fn table(list: &List) -> Table {
    let table = Table::new(&["pool", "class", "resource", "taints", "id", "device"]);
    let mut table = table.shrinking(&["device", "id", "resource", "taints"]);
    for slice in &list.items {
        for device in &slice.spec.devices {
            let taints: Vec<String> = device
                .taints
                .iter()
                .map(|taint| match &taint.value[..] {
                    "" => taint.key.clone(),
                    value => format!("{}={value}", taint.key),
                })
                .collect();
            let pool = slice.spec.pool.name.clone();
            let texts = ["class", "resource"].map(|name| text(device, name));
            let [class, resource] = texts;
            let id = text(device, "id");
            table.row([pool, class, resource, taints.join(" "), id, device.name.clone()]);
        }
    }
    table
}

/// The text of an attribute.
fn text(device: &Device, name: &str) -> String {
    match device.attributes.get(name) {
        Some(Attribute::Text(text)) => text.clone(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::screen::Screen;
    use crate::domain::MigStrategy;
    use crate::hardware::{DiscoverInput, defaults, discover_with, scan};
    use crate::lab::sim::hardware::{GPUS, SimNode};

    #[test]
    fn a_node_has_its_devices_with_taints_for_the_unhealthy_and_the_held() {
        use crate::domain::{AllocId, ContainerEdits, GrantState, GrantedDevice, Timestamp};
        let dir = tempfile::tempdir().unwrap();
        let simulated = SimNode::create(dir.path()).unwrap();
        simulated.remove_gpu_node(1).unwrap();
        let root = HostRoot::new(simulated.root());
        let functions = scan(&root);
        let specs = defaults::or_usual(&[], MigStrategy::None, &functions);
        let found =
            discover_with(&root, functions, &specs, &DiscoverInput::first(&BTreeMap::new()));
        let node = NodeName::new("n1").unwrap();
        let resources = offerings(&document(&root, &found, true), &found);
        let gpu = found.selection.resources.values().flatten().next().unwrap();
        let grant = Arc::new(Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: gpu.id.clone(),
                key: gpu.key.clone(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: gpu.objects(),
            }],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(0),
            version: String::new(),
            state: GrantState::Granted,
        });
        let wanted = wanted_of(&node, &resources, &[grant], &Verdicts::new(), Facts::default());
        let list = List::of(Layout::new(node).followed_by(&wanted).objects());
        let devices = &list.items[0].spec.devices;
        assert_eq!((list.items.len(), devices.len()), (1, GPUS));
        assert_eq!(devices[0].name, gpu.id.as_str().to_lowercase());
        let tainted: Vec<&str> =
            devices.iter().flat_map(|it| &it.taints).map(|it| it.key.as_str()).collect();
        assert_eq!(tainted, ["holdfast.dev/held", "holdfast.dev/node-missing"]);
        let text = table(&list).on(Screen::default());
        let line = "n1/gpu  gpu    nvidia.com/gpu  holdfast.dev/held=device-plugin  GPU-5ca1ab1e-0000-4000-8000-000000000000  gpu-5ca1ab1e-0000-4000-8000-000000000000";
        assert!(text.lines().any(|it| it == line), "{text}");
    }
}
