//! The spec of a `ResourceSlice` (resource.k8s.io/v1). Unknown fields are errors: a real API server
//! drops them with a warning, so a misspelled name would pass without a sign.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Structures whose fields are left out if they are empty, as Go's `omitempty` does.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
        pub(super) struct $name {$(
            $(#[$attribute])*
            #[serde(skip_serializing_if = "is_default")]
            pub(super) $field: $type,
        )*}
    )*};
}

structures! {
    Spec {
        driver: String,
        pool: Pool,
        node_name: Option<String>,
        node_selector: Option<Value>,
        all_nodes: Option<bool>,
        devices: Vec<Device>,
        per_device_node_selection: Option<bool>,
        shared_counters: Vec<CounterSet>,
    }

    Pool {
        name: String,
        generation: i64,
        resource_slice_count: i64,
    }

    Device {
        name: String,
        attributes: BTreeMap<String, Attribute>,
        capacity: BTreeMap<String, Capacity>,
        consumes_counters: Vec<Consumption>,
        node_name: Option<String>,
        node_selector: Option<Value>,
        all_nodes: Option<bool>,
        taints: Vec<Taint>,
        binds_to_node: Option<bool>,
        binding_conditions: Vec<String>,
        binding_failure_conditions: Vec<String>,
        allow_multiple_allocations: Option<bool>,
    }

    Attribute {
        int: Option<i64>,
        bool: Option<bool>,
        string: Option<String>,
        version: Option<String>,
        ints: Vec<i64>,
        bools: Vec<bool>,
        strings: Vec<String>,
        versions: Vec<String>,
    }

    Capacity {
        value: String,
        request_policy: Option<RequestPolicy>,
    }

    RequestPolicy {
        r#default: Option<String>,
        valid_values: Vec<String>,
        valid_range: Option<ValidRange>,
    }

    ValidRange {
        min: Option<String>,
        max: Option<String>,
        step: Option<String>,
    }

    CounterSet {
        name: String,
        counters: BTreeMap<String, Counter>,
    }

    Consumption {
        counter_set: String,
        counters: BTreeMap<String, Counter>,
    }

    Counter {
        value: String,
    }

    Taint {
        key: String,
        value: String,
        effect: String,
        time_added: Option<String>,
    }
}

impl Spec {
    /// All quantities. The API server reads them when it decodes a request.
    pub(super) fn quantities(&mut self) -> impl Iterator<Item = &mut String> {
        let sets = self.shared_counters.iter_mut().flat_map(|set| set.counters.values_mut());
        let devices = self.devices.iter_mut().flat_map(|device| {
            let sets = device.consumes_counters.iter_mut();
            let counters = sets.flat_map(|set| set.counters.values_mut());
            let capacities = device.capacity.values_mut().flat_map(Capacity::quantities);
            counters.map(|counter| &mut counter.value).chain(capacities)
        });
        sets.map(|counter| &mut counter.value).chain(devices)
    }
}

impl Capacity {
    fn quantities(&mut self) -> impl Iterator<Item = &mut String> {
        let policy = self.request_policy.iter_mut().flat_map(|policy| {
            let range = policy.valid_range.iter_mut().flat_map(|range| {
                range.min.iter_mut().chain(&mut range.max).chain(&mut range.step)
            });
            policy.r#default.iter_mut().chain(&mut policy.valid_values).chain(range)
        });
        std::iter::once(&mut self.value).chain(policy)
    }
}

impl Attribute {
    /// The number of kinds of value that are set.
    pub(super) fn kinds(&self) -> usize {
        let scalar = [
            self.int.is_some(),
            self.bool.is_some(),
            self.string.is_some(),
            self.version.is_some(),
        ];
        scalar.into_iter().chain(self.lists()).filter(|is_set| *is_set).count()
    }

    pub(super) fn lists(&self) -> [bool; 4] {
        [
            !self.ints.is_empty(),
            !self.bools.is_empty(),
            !self.strings.is_empty(),
            !self.versions.is_empty(),
        ]
    }

    /// The number of values.
    pub(super) fn values(&self) -> usize {
        let lists = self.ints.len() + self.bools.len() + self.strings.len() + self.versions.len();
        lists.max(1)
    }
}
