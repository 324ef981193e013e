//! The versions of Kubernetes, as far as they differ in what they keep of a slice; pure.

use super::schema::{Attribute, Spec};

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
        ..Profile::V1_35
    };

    /// Drops the fields whose gate is off.
    pub(super) fn drop_fields(self, spec: &mut Spec) {
        if !self.counters {
            spec.shared_counters.clear();
            spec.per_device_node_selection = None;
        }
        for device in &mut spec.devices {
            if !self.taints {
                device.taints.clear();
            }
            if !self.counters {
                device.consumes_counters.clear();
                (device.node_name, device.node_selector, device.all_nodes) = (None, None, None);
            }
            if !self.consumable_capacity {
                device.allow_multiple_allocations = None;
                device.capacity.values_mut().for_each(|capacity| capacity.request_policy = None);
            }
            if !self.binding_conditions {
                device.binds_to_node = None;
                device.binding_conditions.clear();
                device.binding_failure_conditions.clear();
            }
            if !self.lists {
                for Attribute { ints, bools, strings, versions, .. } in
                    device.attributes.values_mut()
                {
                    ints.clear();
                    bools.clear();
                    strings.clear();
                    versions.clear();
                }
            }
        }
    }
}
