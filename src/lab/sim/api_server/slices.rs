//! The rules of the API server for a `ResourceSlice` (resource.k8s.io/v1, validation); pure.

use super::names;
use super::profile::Profile;
use super::refusal::Cause;
use super::schema::{Capacity, CounterSet, Device, RequestPolicy, Spec, Taint};
use std::collections::BTreeSet;

/// The devices of a slice, and those of one with taints, counters or lists.
const DEVICES_MAX: usize = 128;
const DEVICES_WITH_MORE_MAX: usize = 64;
const COUNTER_SETS_MAX: usize = 8;
const COUNTERS_MAX: usize = 32;
const CONSUMED_SETS_MAX: usize = 2;
/// Attributes and capacities of a device, and their values.
const ENTRIES_MAX: usize = 32;
const VALUES_MAX: usize = 48;
const TEXT_BYTES_MAX: usize = 64;
const TAINTS_MAX: usize = 16;
const CONDITIONS_MAX: usize = 4;
const POLICY_VALUES_MAX: usize = 10;

/// Causes of an answer 422, with their reasons (`field.ErrorType` of apimachinery).
#[derive(Debug, Default)]
pub(super) struct Problems(Vec<Cause>);

impl Problems {
    fn add(&mut self, reason: &'static str, field: &str, message: impl Into<String>) {
        self.0.push(Cause { reason, field: field.to_owned(), message: message.into() });
    }

    fn invalid(&mut self, is_valid: bool, field: &str, message: &str) {
        if !is_valid {
            self.add("FieldValueInvalid", field, format!("Invalid value: {message}"));
        }
    }

    fn required(&mut self, is_there: bool, field: &str, message: &str) {
        if !is_there {
            self.add("FieldValueRequired", field, format!("Required value: {message}"));
        }
    }

    fn at_most(&mut self, max: usize, found: usize, field: &str) {
        if found > max {
            let message = format!("Too many: {found}: must have at most {max} items");
            self.add("FieldValueTooMany", field, message);
        }
    }

    fn not_longer(&mut self, max: usize, text: &str, field: &str) {
        if text.len() > max {
            let message = format!("Too long: may not be more than {max} bytes");
            self.add("FieldValueTooLong", field, message);
        }
    }

    fn unique<'a>(&mut self, names: impl Iterator<Item = (&'a str, String)>) {
        let mut known = BTreeSet::new();
        for (name, field) in names {
            if !known.insert(name) {
                self.add("FieldValueDuplicate", &field, format!("Duplicate value: \"{name}\""));
            }
        }
    }
}

/// The problems of a spec. `old` is what it replaces.
pub(super) fn problems(spec: &Spec, old: Option<&Spec>, profile: Profile) -> Vec<Cause> {
    let mut found = Problems::default();
    if let Some(old) = old {
        for (is_same, field) in [
            (old.driver == spec.driver, "spec.driver"),
            (old.pool.name == spec.pool.name, "spec.pool.name"),
            (old.node_name == spec.node_name, "spec.nodeName"),
        ] {
            found.invalid(is_same, field, "field is immutable");
        }
    }
    found.required(!spec.driver.is_empty(), "spec.driver", "");
    found.not_longer(63, &spec.driver, "spec.driver");
    let is_driver = spec.driver.is_empty() || names::is_subdomain(&spec.driver, usize::MAX);
    found.invalid(is_driver, "spec.driver", "a lowercase RFC 1123 subdomain");
    pool(spec, &mut found);
    nodes(spec, &mut found);
    let has_more = spec.devices.iter().any(|device| {
        let has_list =
            device.attributes.values().any(|attribute| attribute.lists().contains(&true));
        has_list || !device.taints.is_empty() || !device.consumes_counters.is_empty()
    });
    let max = if has_more { DEVICES_WITH_MORE_MAX } else { DEVICES_MAX };
    found.at_most(max, spec.devices.len(), "spec.devices");
    if profile.counters_apart && !spec.devices.is_empty() && !spec.shared_counters.is_empty() {
        found.invalid(false, "spec", "only one of `sharedCounters` or `devices` is allowed");
    }
    let names = spec.devices.iter().enumerate();
    found.unique(names.map(|(n, device)| (&*device.name, format!("spec.devices[{n}].name"))));
    for (n, one) in spec.devices.iter().enumerate() {
        device(one, spec, &format!("spec.devices[{n}]"), &mut found);
    }
    counters(&spec.shared_counters, &mut found);
    found.0
}

fn pool(spec: &Spec, found: &mut Problems) {
    found.required(!spec.pool.name.is_empty(), "spec.pool.name", "");
    found.not_longer(253, &spec.pool.name, "spec.pool.name");
    let is_name =
        spec.pool.name.is_empty() || spec.pool.name.len() > 253 || names::is_pool(&spec.pool.name);
    found.invalid(is_name, "spec.pool.name", "RFC 1123 subdomains, joined by /");
    let is_counted = spec.pool.resource_slice_count > 0;
    found.invalid(is_counted, "spec.pool.resourceSliceCount", "must be greater than zero");
    let has_generation = spec.pool.generation >= 0;
    found.invalid(has_generation, "spec.pool.generation", "must be at least zero");
}

/// Exactly one of four ways to name the nodes.
fn nodes(spec: &Spec, found: &mut Problems) {
    if let Some(name) = &spec.node_name {
        found.required(!name.is_empty(), "spec.nodeName", "must not be empty if set");
        let is_name = name.is_empty() || names::is_subdomain(name, 253);
        found.invalid(is_name, "spec.nodeName", "a lowercase RFC 1123 subdomain");
    }
    for (value, field) in [
        (spec.all_nodes, "spec.allNodes"),
        (spec.per_device_node_selection, "spec.perDeviceNodeSelection"),
    ] {
        found.invalid(value != Some(false), field, "must be true if set");
    }
    let ways = [
        spec.node_name.is_some(),
        spec.node_selector.is_some(),
        spec.all_nodes.is_some(),
        spec.per_device_node_selection.is_some(),
    ];
    let message = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, \
                   `perDeviceNodeSelection` is required";
    match ways.into_iter().filter(|is_set| *is_set).count() {
        1 => {}
        0 => found.required(false, "spec", message),
        _ => found.invalid(false, "spec", message),
    }
}

fn device(device: &Device, spec: &Spec, at: &str, found: &mut Problems) {
    found.required(!device.name.is_empty(), &format!("{at}.name"), "");
    let is_name = device.name.is_empty() || names::is_label(&device.name);
    found.invalid(is_name, &format!("{at}.name"), "a lowercase RFC 1123 label, at most 63 bytes");
    let entries = device.attributes.len() + device.capacity.len();
    found.at_most(ENTRIES_MAX, entries, at);
    let values = device.attributes.values().map(super::schema::Attribute::values).sum::<usize>();
    found.at_most(VALUES_MAX, values + device.capacity.len(), at);
    attributes(device, at, found);
    for (name, capacity) in &device.capacity {
        let at = format!("{at}.capacity[{name}]");
        found.invalid(names::is_attribute(name), &at, "a C identifier, at most 32 bytes");
        self::capacity(capacity, device.allow_multiple_allocations == Some(true), &at, found);
    }
    let is_per_device = spec.per_device_node_selection == Some(true);
    let has_nodes =
        device.node_name.is_some() || device.node_selector.is_some() || device.all_nodes.is_some();
    if has_nodes != is_per_device {
        let message = "nodes of a device and `perDeviceNodeSelection` require each other";
        found.invalid(false, at, message);
    }
    found.at_most(
        CONSUMED_SETS_MAX,
        device.consumes_counters.len(),
        &format!("{at}.consumesCounters"),
    );
    let sets = device.consumes_counters.iter().enumerate();
    found.unique(
        sets.map(|(n, set)| (&*set.counter_set, format!("{at}.consumesCounters[{n}].counterSet"))),
    );
    for (n, set) in device.consumes_counters.iter().enumerate() {
        counter_set(
            (&set.counter_set, "counterSet"),
            set.counters.keys().collect(),
            &format!("{at}.consumesCounters[{n}]"),
            found,
        );
    }
    found.at_most(TAINTS_MAX, device.taints.len(), &format!("{at}.taints"));
    for (n, one) in device.taints.iter().enumerate() {
        taint(one, &format!("{at}.taints[{n}]"), found);
    }
    conditions(device, at, found);
}

fn attributes(device: &Device, at: &str, found: &mut Problems) {
    for (name, attribute) in &device.attributes {
        let at = format!("{at}.attributes[{name}]");
        let syntax = "a C identifier, at most 32 bytes, with or without a domain before it";
        found.invalid(names::is_attribute(name), &at, syntax);
        match attribute.kinds() {
            1 => {}
            0 => found.required(false, &at, "exactly one value must be specified"),
            _ => found.invalid(false, &at, "exactly one value must be specified"),
        }
        let strings = attribute.string.iter().map(|text| (text, format!("{at}.string")));
        let listed = attribute.strings.iter().enumerate();
        let listed = listed.map(|(n, text)| (text, format!("{at}.strings[{n}]")));
        for (text, field) in strings.chain(listed) {
            found.not_longer(TEXT_BYTES_MAX, text, &field);
        }
        let versions = attribute.version.iter().map(|text| (text, format!("{at}.version")));
        let listed = attribute.versions.iter().enumerate();
        let listed = listed.map(|(n, text)| (text, format!("{at}.versions[{n}]")));
        for (text, field) in versions.chain(listed) {
            found.not_longer(TEXT_BYTES_MAX, text, &field);
            let message = "must be a string compatible with semver.org spec 2.0.0";
            found.invalid(names::is_version(text), &field, message);
        }
    }
}

fn capacity(capacity: &Capacity, is_multiple: bool, at: &str, found: &mut Problems) {
    let value = quantity(&capacity.value);
    let Some(policy) = &capacity.request_policy else { return };
    let at = format!("{at}.requestPolicy");
    if !is_multiple {
        let message = "Forbidden: allowed only with `allowMultipleAllocations`";
        found.add("FieldValueForbidden", &at, message);
    }
    let RequestPolicy { r#default, valid_values, valid_range } = policy;
    let chosen = r#default.as_deref().and_then(quantity);
    let has_choice = !valid_values.is_empty() || valid_range.is_some();
    found.required(!has_choice || r#default.is_some(), &format!("{at}.default"), "");
    let is_one = valid_values.is_empty() || valid_range.is_none();
    found.invalid(is_one, &at, "at most one of `validValues` and `validRange`");
    let field = format!("{at}.validValues");
    found.at_most(POLICY_VALUES_MAX, valid_values.len(), &field);
    let values: Vec<i128> = valid_values.iter().filter_map(|text| quantity(text)).collect();
    found.invalid(values.is_sorted_by(|a, b| a < b), &field, "must be sorted, each value once");
    if let Some(chosen) = chosen {
        let is_listed = values.is_empty() || values.contains(&chosen);
        found.invalid(is_listed, &format!("{at}.default"), "must be one of `validValues`");
        let is_within = value.is_none_or(|value| chosen <= value);
        found.invalid(is_within, &format!("{at}.default"), "must not be above the capacity");
    }
    let Some(range) = valid_range else { return };
    let at = format!("{at}.validRange");
    found.required(range.min.is_some(), &format!("{at}.min"), "");
    let bound = |text: &Option<String>| text.as_deref().and_then(quantity);
    let (min, max, step) = (bound(&range.min), bound(&range.max), bound(&range.step));
    let is_order = min.zip(max).is_none_or(|(min, max)| min <= max);
    found.invalid(is_order, &format!("{at}.max"), "must not be below `min`");
    let is_step = step.is_none_or(|step| step > 0);
    found.invalid(is_step, &format!("{at}.step"), "must be greater than zero");
    let is_in = chosen.is_none_or(|chosen| {
        min.is_none_or(|min| min <= chosen) && max.is_none_or(|max| chosen <= max)
    });
    found.invalid(is_in, &at, "the default must be in the range");
}

/// The value of a quantity. One that cannot be read is refused when the request is decoded.
fn quantity(text: &str) -> Option<i128> {
    names::quantity(text).map(|(value, _)| value)
}

fn counters(sets: &[CounterSet], found: &mut Problems) {
    found.at_most(COUNTER_SETS_MAX, sets.len(), "spec.sharedCounters");
    let names = sets.iter().enumerate();
    found.unique(names.map(|(n, set)| (&*set.name, format!("spec.sharedCounters[{n}].name"))));
    for (n, set) in sets.iter().enumerate() {
        counter_set(
            (&set.name, "name"),
            set.counters.keys().collect(),
            &format!("spec.sharedCounters[{n}]"),
            found,
        );
    }
}

/// Counters under the name of their set; `name` is that name and its field.
fn counter_set(name: (&str, &str), counters: Vec<&String>, at: &str, found: &mut Problems) {
    let (name, field) = name;
    found.required(!name.is_empty(), &format!("{at}.{field}"), "");
    let is_name = name.is_empty() || names::is_label(name);
    found.invalid(is_name, &format!("{at}.{field}"), "a lowercase RFC 1123 label");
    found.required(!counters.is_empty(), &format!("{at}.counters"), "");
    found.at_most(COUNTERS_MAX, counters.len(), &format!("{at}.counters"));
    for name in counters {
        let at = format!("{at}.counters[{name}]");
        found.invalid(names::is_label(name), &at, "a lowercase RFC 1123 label");
    }
}

fn taint(taint: &Taint, at: &str, found: &mut Problems) {
    found.required(!taint.key.is_empty(), &format!("{at}.key"), "");
    let is_key = taint.key.is_empty() || names::is_label_name(&taint.key);
    found.invalid(is_key, &format!("{at}.key"), "the name of a label");
    let is_value = names::is_label_value(&taint.value);
    found.invalid(is_value, &format!("{at}.value"), "the value of a label");
    found.required(!taint.effect.is_empty(), &format!("{at}.effect"), "");
    if !["", "None", "NoSchedule", "NoExecute"].contains(&&*taint.effect) {
        let message = format!("Unsupported value: \"{}\"", taint.effect);
        found.add("FieldValueNotSupported", &format!("{at}.effect"), message);
    }
}

fn conditions(device: &Device, at: &str, found: &mut Problems) {
    let (to, failed) = (&device.binding_conditions, &device.binding_failure_conditions);
    found.at_most(CONDITIONS_MAX, to.len(), &format!("{at}.bindingConditions"));
    found.at_most(CONDITIONS_MAX, failed.len(), &format!("{at}.bindingFailureConditions"));
    let has_both = to.is_empty() == failed.is_empty();
    found.invalid(has_both, at, "`bindingConditions` and `bindingFailureConditions`: both or none");
    let is_apart = !to.iter().any(|condition| failed.contains(condition));
    found.invalid(is_apart, &format!("{at}.bindingFailureConditions"), "not in both lists");
}
