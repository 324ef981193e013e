//! `ResourceSlice` of resource.k8s.io/v1, as far as it is written and read here. Fields that are
//! not known are ignored when an object is read.

use super::DRIVER;
use super::names::NodeName;
use crate::domain::null_as_empty;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `apiVersion` of a slice.
pub const API_VERSION: &str = "resource.k8s.io/v1";

/// `kind` of a slice.
pub const KIND: &str = "ResourceSlice";

/// The limits of one slice and its devices (Kubernetes `staging/src/k8s.io/api/resource/v1`).
pub mod limits {
    /// Devices of a slice. A slice whose devices have no taints may have 128; with taints it is 64.
    pub const DEVICES: usize = 64;
    /// Attributes and capacities of a device, together.
    pub const ATTRIBUTES: usize = 32;
    /// The longest name of an attribute or capacity, without its domain.
    pub const KEY: usize = 32;
    /// The longest domain of an attribute or capacity, and of the key of a taint.
    pub const DOMAIN: usize = 63;
    /// The longest value of an attribute, in bytes: a string or a version.
    pub const VALUE: usize = 64;
    /// Taints of a device.
    pub const TAINTS: usize = 16;
    /// The longest value of a taint, a label value.
    pub const TAINT_VALUE: usize = 63;
    /// Sets of counters of a slice.
    pub const COUNTER_SETS: usize = 8;
    /// Sets of counters that a device consumes.
    pub const CONSUMED_SETS: usize = 2;
}

/// A slice: a part of the devices of one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ResourceSlice {
    /// [`API_VERSION`].
    pub api_version: String,
    /// [`KIND`]. Empty in the items of a list.
    pub kind: String,
    /// The object.
    pub metadata: ObjectMeta,
    /// The devices.
    pub spec: Spec,
}

/// The metadata of an object: what identifies it, and what an update must keep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectMeta {
    /// Its name; empty to let the API server choose one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The beginning of the name that the API server chooses.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub generate_name: String,
    /// Distinguishes it from an earlier object of the same name; set by the API server.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Its version. An update with another one is refused (409).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    /// The objects with which it is deleted.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub owner_references: Vec<OwnerReference>,
    /// Labels, which other programs may set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations, which other programs may set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What other programs do before the object is deleted.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub finalizers: Vec<String>,
}

/// An object with which another one is deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnerReference {
    /// The version of its API: `v1`.
    pub api_version: String,
    /// Its kind: `Node`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Whether it is the one owner that manages the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<bool>,
}

/// `spec` of a slice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// The driver; immutable.
    pub driver: String,
    /// The pool.
    pub pool: Pool,
    /// The node that has the devices; immutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The devices, at most [`limits::DEVICES`]. The scheduler takes the first one that fits.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub devices: Vec<Device>,
    /// Sets of counters, at most [`limits::COUNTER_SETS`]. From Kubernetes 1.35 on, a slice has
    /// devices or counters.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub shared_counters: Vec<Counters>,
}

/// The pool of a slice. The scheduler uses only the slices of its highest generation, and only if
/// all of them are there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pool {
    /// Its name; immutable.
    pub name: String,
    /// The generation of the slice.
    pub generation: i64,
    /// How many slices the pool has in this generation.
    pub resource_slice_count: i64,
}

/// A device of a slice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    /// Its name, unique in the pool: a DNS label.
    pub name: String,
    /// Its attributes. A name without a domain has the driver's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_empty")]
    pub attributes: BTreeMap<String, Attribute>,
    /// Its capacities, such as memory.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_empty")]
    pub capacity: BTreeMap<String, Capacity>,
    /// Whether several claims may have it, each with a part of its capacities (KEP-5075).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_multiple_allocations: bool,
    /// Why a claim without a toleration does not get it.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub taints: Vec<Taint>,
    /// What it consumes of sets of the pool while it is allocated, at most
    /// [`limits::CONSUMED_SETS`] of them.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub consumes_counters: Vec<Counters>,
}

/// A set of counters (`CounterSet`), or what a device consumes of one
/// (`DeviceCounterConsumption`). Exactly one of both names is there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Counters {
    /// The name of the set, unique in the pool: a DNS label.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The set that is consumed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub counter_set: String,
    /// The counters by name, each with what there is or what is consumed.
    #[serde(deserialize_with = "null_as_empty")]
    pub counters: BTreeMap<String, Capacity>,
}

/// The value of an attribute (`DeviceAttribute`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RawAttribute", into = "RawAttribute")]
pub enum Attribute {
    /// A text of at most [`limits::VALUE`] bytes.
    Text(String),
    /// A number.
    Int(i64),
    /// Yes or no.
    Bool(bool),
    /// A version by the rules of semver 2.0.0.
    Version(String),
    /// A type of a newer API; never written.
    Unknown,
}

impl Attribute {
    /// A text.
    pub fn text(text: impl Into<String>) -> Self {
        Attribute::Text(text.into())
    }
}

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct RawAttribute {
    #[serde(skip_serializing_if = "Option::is_none")]
    string: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    int: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bool: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
}

impl From<RawAttribute> for Attribute {
    fn from(raw: RawAttribute) -> Self {
        match raw {
            RawAttribute { string: Some(text), .. } => Attribute::Text(text),
            RawAttribute { int: Some(number), .. } => Attribute::Int(number),
            RawAttribute { bool: Some(is), .. } => Attribute::Bool(is),
            RawAttribute { version: Some(version), .. } => Attribute::Version(version),
            _ => Attribute::Unknown,
        }
    }
}

impl From<Attribute> for RawAttribute {
    fn from(attribute: Attribute) -> Self {
        let mut raw = RawAttribute::default();
        match attribute {
            Attribute::Text(text) => raw.string = Some(text),
            Attribute::Int(number) => raw.int = Some(number),
            Attribute::Bool(is) => raw.bool = Some(is),
            Attribute::Version(version) => raw.version = Some(version),
            Attribute::Unknown => {}
        }
        raw
    }
}

/// A capacity (`DeviceCapacity`), or the value of a counter (`Counter`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Capacity {
    /// A quantity, as the API server writes it: `80Gi`.
    pub value: String,
    /// What a claim may have of it. Without one, a claim that requests nothing of it has all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_policy: Option<RequestPolicy>,
}

/// What one claim may have of a capacity (`CapacityRequestPolicy`). It is allowed only for a device
/// that several claims may have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestPolicy {
    /// What a claim has that requests nothing of it: a quantity.
    #[serde(rename = "default")]
    pub usual: String,
    /// What a claim may request; `None` allows every quantity up to the value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_range: Option<ValidRange>,
}

/// The least and the most that a claim may request of a capacity (`CapacityRequestPolicyRange`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ValidRange {
    /// A smaller request becomes this quantity.
    pub min: String,
    /// A larger request is refused by the scheduler. `None`: the value of the capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<String>,
}

impl Capacity {
    /// A capacity of bytes in the form that the API server returns: the largest unit without a
    /// fraction.
    #[must_use]
    pub fn of_bytes(bytes: u64) -> Self {
        let units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        let (mut value, mut unit) = (bytes, 0);
        while value > 0 && value.is_multiple_of(1024) && unit + 1 < units.len() {
            value /= 1024;
            unit += 1;
        }
        Capacity { value: format!("{value}{}", units[unit]), request_policy: None }
    }
}

/// A taint of a device (`DeviceTaint`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Taint {
    /// Its key: `holdfast.dev/xid`.
    pub key: String,
    /// A label value.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// What it does.
    pub effect: String,
    /// When it was added, set by the API server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}

/// A taint that keeps new claims from the device.
pub const NO_SCHEDULE: &str = "NoSchedule";

/// A taint that also deletes the pods that use the device by a claim.
pub const NO_EXECUTE: &str = "NoExecute";

impl Taint {
    /// Whether two taints are equal but for the time that the API server sets.
    #[must_use]
    pub fn is_like(&self, other: &Taint) -> bool {
        (&self.key, &self.value, &self.effect) == (&other.key, &other.value, &other.effect)
    }
}

impl Device {
    /// Makes it a device for one claim at a time.
    pub fn undivide(&mut self) {
        self.allow_multiple_allocations = false;
        self.capacity.values_mut().for_each(|capacity| capacity.request_policy = None);
    }

    /// Whether two devices are equal but for the times of their taints.
    #[must_use]
    pub fn is_like(&self, other: &Device) -> bool {
        let taints = |a: &[Taint], b: &[Taint]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_like(b))
        };
        (&self.name, &self.attributes, &self.capacity, &self.consumes_counters)
            == (&other.name, &other.attributes, &other.capacity, &other.consumes_counters)
            && self.allow_multiple_allocations == other.allow_multiple_allocations
            && taints(&self.taints, &other.taints)
    }
}

impl Spec {
    /// Whether two specs have equal devices in the same order, and equal counters; the generations
    /// may differ.
    #[must_use]
    pub fn has_content_like(&self, other: &Spec) -> bool {
        self.shared_counters == other.shared_counters
            && self.devices.len() == other.devices.len()
            && self.devices.iter().zip(&other.devices).all(|(a, b)| a.is_like(b))
    }

    /// Whether two specs are equal but for the times of taints.
    #[must_use]
    pub fn is_like(&self, other: &Spec) -> bool {
        (&self.driver, &self.pool, &self.node_name)
            == (&other.driver, &other.pool, &other.node_name)
            && self.has_content_like(other)
    }
}

/// The object of one slice with this content.
pub(super) fn object(
    node: &NodeName,
    pool: &str,
    index: u32,
    generation: i64,
    count: usize,
    content: Spec,
) -> ResourceSlice {
    ResourceSlice {
        api_version: API_VERSION.to_owned(),
        kind: KIND.to_owned(),
        metadata: ObjectMeta { name: node.slice(pool, index), ..ObjectMeta::default() },
        spec: Spec {
            driver: DRIVER.to_owned(),
            pool: Pool {
                name: pool.to_owned(),
                generation,
                resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
            },
            node_name: Some(node.as_str().to_owned()),
            ..content
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::with_one_null;
    use serde_json::json;

    #[test]
    fn a_slice_has_the_fields_of_the_api_and_ignores_others() {
        let object = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {
                "name": "n1-holdfast.dev-gpu-0", "uid": "u1", "resourceVersion": "7",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u0", "controller": true}],
                "labels": {"a": "b"}, "annotations": {"c": "d"}, "finalizers": ["e"],
            },
            "spec": {
                "driver": "holdfast.dev",
                "pool": {"name": "n1/gpu", "generation": 3, "resourceSliceCount": 1},
                "nodeName": "n1",
                "devices": [{
                    "name": "0000-18-00-0",
                    "attributes": {
                        "class": {"string": "gpu"}, "vf": {"bool": false},
                        "driverVersion": {"version": "580.95.5"}, "iommuGroup": {"int": 4},
                    },
                    "capacity": {"memory": {"value": "80Gi", "requestPolicy": {
                        "default": "20Gi", "validRange": {"min": "1Gi", "max": "40Gi"},
                    }}},
                    "allowMultipleAllocations": true,
                    "taints": [{"key": "holdfast.dev/xid", "value": "79", "effect": "NoSchedule"}],
                    "consumesCounters": [{"counterSet": "c", "counters": {"parts": {"value": "1"}}}],
                }],
            },
        });
        let slice: ResourceSlice = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(serde_json::to_value(&slice).unwrap(), object);
        let maps = ["labels", "annotations", "attributes", "capacity", "counters"];
        let nulls = with_one_null(&object, &maps);
        assert_eq!(nulls.len(), 10);
        for (at, object) in nulls {
            let read = serde_json::from_value::<ResourceSlice>(object);
            assert!(read.is_ok_and(|read| read != slice), "{at} is null");
        }
        let mut newer = object;
        newer["status"] = json!({});
        newer["metadata"]["managedFields"] = json!([{"manager": "holdfast"}]);
        newer["spec"]["nodeSelector"] = json!({});
        newer["spec"]["devices"][0]["bindsToNode"] = json!(true);
        newer["spec"]["devices"][0]["taints"][0]["timeAdded"] = json!("2026-01-01T00:00:00Z");
        newer["spec"]["devices"][0]["attributes"]["cpus"] = json!({"ints": [1, 2]});
        let mut newer: ResourceSlice = serde_json::from_value(newer).unwrap();
        assert!(
            !newer.spec.is_like(&slice.spec),
            "an attribute of an unknown type is a difference"
        );
        let cpus = newer.spec.devices[0].attributes.remove("cpus");
        assert_eq!(cpus, Some(Attribute::Unknown));
        assert!(newer.spec.is_like(&slice.spec) && newer != slice);
        let counters = json!([{"name": "c", "counters": {"parts": {"value": "2"}}}]);
        let spec: Spec = serde_json::from_value(json!({"sharedCounters": counters})).unwrap();
        assert_eq!(serde_json::to_value(&spec).unwrap()["sharedCounters"], counters);
        assert!(!spec.is_like(&Spec::default()), "counters are a difference");
        newer.spec.devices[0].consumes_counters[0].counters.clear();
        assert!(!newer.spec.is_like(&slice.spec), "and so is what is consumed of them");
        let (mut one, all) = (slice.spec.devices[0].clone(), &slice.spec.devices[0]);
        one.undivide();
        assert!(!one.is_like(all), "a device for one claim is another than one for several");
        let text = serde_json::to_string(&one).unwrap();
        assert!(!text.contains("allow") && !text.contains("Policy"), "{text}");
    }

    #[test]
    fn a_capacity_has_the_form_that_the_api_server_returns() {
        for (bytes, value) in [
            (0, "0"),
            (1023, "1023"),
            (80 << 30, "80Gi"),
            (81_559 << 20, "81559Mi"),
            (1 << 60, "1Ei"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(Capacity::of_bytes(bytes).value, value);
        }
    }
}
