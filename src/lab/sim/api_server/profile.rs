//! The versions of Kubernetes, as far as they differ in what they keep of a slice; pure.

use super::schema::{Attribute, Device, Spec};

/// The feature gates of an API server. A field behind a gate that is off is dropped without an
/// error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// `DRADeviceTaints`.
    pub taints: bool,
    /// `DRAPartitionableDevices`: counters, and nodes per device.
    pub counters: bool,
    /// `DRAConsumableCapacity`: devices with several allocations, and policies of capacities.
    pub consumable_capacity: bool,
    /// `DRADeviceBindingConditions`.
    pub binding_conditions: bool,
    /// `DRAListTypeAttributes`.
    pub lists: bool,
    /// `DRAResourceClaimDeviceStatus`: what drivers report about the devices of claims.
    pub device_status: bool,
    /// `DRAResourceClaimGranularStatusAuthorization`: that needs a right for each driver.
    pub granular_status: bool,
    /// A slice has devices or counters, and not both (Kubernetes 1.35).
    pub counters_apart: bool,
}

impl Profile {
    /// Kubernetes 1.34 with its default gates.
    pub const V1_34: Profile = Profile {
        taints: false,
        counters: false,
        consumable_capacity: false,
        binding_conditions: false,
        lists: false,
        device_status: true,
        granular_status: false,
        counters_apart: false,
    };
    /// Kubernetes 1.35 with its default gates.
    pub const V1_35: Profile = Profile { counters_apart: true, ..Profile::V1_34 };
    /// Kubernetes 1.36 with its default gates.
    pub const V1_36: Profile = Profile {
        taints: true,
        counters: true,
        consumable_capacity: true,
        binding_conditions: true,
        granular_status: true,
        ..Profile::V1_35
    };

    /// Drops the fields whose gate is off, unless the slice that is replaced uses the feature.
    pub(super) fn drop_fields(self, spec: &mut Spec, old: Option<&Spec>) {
        let is_used = |uses: fn(&Spec) -> bool| old.is_some_and(uses);
        if !self.taints && !is_used(|old| old.devices.iter().any(|one| !one.taints.is_empty())) {
            spec.devices.iter_mut().for_each(|device| device.taints.clear());
        }
        if !self.counters && !is_used(uses_counters) {
            spec.shared_counters.clear();
            spec.per_device_node_selection = None;
            for device in &mut spec.devices {
                device.consumes_counters.clear();
                (device.node_name, device.node_selector, device.all_nodes) = (None, None, None);
            }
        }
        if !self.consumable_capacity && !is_used(uses_capacity) {
            for device in &mut spec.devices {
                device.allow_multiple_allocations = None;
                device.capacity.values_mut().for_each(|capacity| capacity.request_policy = None);
            }
        }
        if !self.binding_conditions && !is_used(uses_binding) {
            for device in &mut spec.devices {
                device.binds_to_node = None;
                device.binding_conditions.clear();
                device.binding_failure_conditions.clear();
            }
        }
        if !self.lists && !is_used(uses_lists) {
            let attributes = spec.devices.iter_mut().flat_map(|one| one.attributes.values_mut());
            for Attribute { ints, bools, strings, versions, .. } in attributes {
                ints.clear();
                bools.clear();
                strings.clear();
                versions.clear();
            }
        }
    }
}

fn uses_counters(spec: &Spec) -> bool {
    let is_used = |device: &Device| {
        let has_nodes = device.node_name.is_some()
            || device.node_selector.is_some()
            || device.all_nodes.is_some();
        has_nodes || !device.consumes_counters.is_empty()
    };
    !spec.shared_counters.is_empty()
        || spec.per_device_node_selection.is_some()
        || spec.devices.iter().any(is_used)
}

fn uses_capacity(spec: &Spec) -> bool {
    spec.devices.iter().any(|device| {
        device.allow_multiple_allocations.is_some()
            || device.capacity.values().any(|capacity| capacity.request_policy.is_some())
    })
}

fn uses_binding(spec: &Spec) -> bool {
    spec.devices.iter().any(|device| {
        device.binds_to_node.is_some()
            || !device.binding_conditions.is_empty()
            || !device.binding_failure_conditions.is_empty()
    })
}

fn uses_lists(spec: &Spec) -> bool {
    let mut attributes = spec.devices.iter().flat_map(|device| device.attributes.values());
    attributes.any(|attribute| attribute.lists().contains(&true))
}
