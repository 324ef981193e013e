//! Strategic merge patches, and the rules for what they and creates of Events may contain; pure.
//!
//! Maps are merged, `null` removes a field, and a list replaces the old one, except those lists of
//! a node that have a key (`patchMergeKey` in k8s.io/api/core/v1).

use super::refusal::{Cause, Refusal};
use super::target::{Kind, Target};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The header of such a patch.
pub(super) const CONTENT_TYPE: &str = "application/strategic-merge-patch+json";

/// The lists with a key: kind, path, key.
const KEYED: &[(Kind, &str, &str)] =
    &[(Kind::Node, "status.conditions", "type"), (Kind::Node, "status.addresses", "type")];

/// An Event, or a node whose status alone may change, after the patch.
pub(super) fn apply(target: &Target, old: &Value, patch: &Value) -> Result<Value, Refusal> {
    let mut patched = old.clone();
    merge(target.kind, "", &mut patched, patch)?;
    if target.kind == Kind::Event {
        patched["metadata"] = old["metadata"].clone();
        check_event(&patched, &target.namespace)?;
        return Ok(patched);
    }
    let mut node = old.clone();
    let status = patched["status"].take();
    if !status.is_null() {
        node["status"] = status;
    }
    check_conditions(&node)?;
    Ok(node)
}

fn merge(kind: Kind, path: &str, object: &mut Value, patch: &Value) -> Result<(), Refusal> {
    let key = KEYED.iter().find(|(of, known, _)| *of == kind && *known == path);
    match (patch, key) {
        (Value::Object(fields), _) => {
            if !object.is_object() {
                *object = Value::Object(Map::new());
            }
            let Some(known) = object.as_object_mut() else { return Ok(()) };
            for (name, value) in fields.iter().filter(|(name, _)| !name.starts_with('$')) {
                if value.is_null() {
                    known.remove(name);
                    continue;
                }
                let below = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                merge(kind, &below, known.entry(name).or_insert(Value::Null), value)?;
            }
            Ok(())
        }
        (Value::Array(elements), Some((_, _, key))) => {
            let mut list = object.as_array().cloned().unwrap_or_default();
            for element in elements {
                let wanted = element[*key].as_str().ok_or_else(|| {
                    Refusal::new(
                        400,
                        format!("map: {element} does not contain declared merge key: {key}"),
                    )
                })?;
                let place = list.iter().position(|known| known[*key] == wanted);
                if element["$patch"] == "delete" {
                    place.map(|place| list.remove(place));
                    continue;
                }
                let place = place.unwrap_or_else(|| {
                    list.push(Value::Null);
                    list.len() - 1
                });
                merge(kind, "", &mut list[place], element)?;
            }
            *object = list.into();
            Ok(())
        }
        _ => {
            *object = patch.clone();
            Ok(())
        }
    }
}

/// A time of the API, in whole seconds.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Time;

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_whole = text.len() == "2026-01-02T03:04:05Z".len() && text.ends_with('Z');
        let is_time = text.parse::<jiff::Timestamp>().is_ok();
        (is_whole && is_time).then_some(Time).ok_or_else(|| format!("parsing time \"{text}\""))
    }
}

/// `Event` of core v1. Unknown fields are errors, as in `schema`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(dead_code, reason = "the fields are checked by their types")]
struct Event {
    api_version: String,
    kind: String,
    metadata: Value,
    involved_object: ObjectReference,
    reason: String,
    message: String,
    source: Source,
    first_timestamp: Time,
    last_timestamp: Time,
    count: u32,
    r#type: EventType,
    action: String,
    reporting_component: String,
    reporting_instance: String,
}

#[derive(Debug, Deserialize)]
enum EventType {
    Normal,
    Warning,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(dead_code, reason = "the fields are checked by their types")]
struct ObjectReference {
    api_version: String,
    kind: String,
    #[serde(default)]
    namespace: String,
    name: String,
    uid: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "the fields are checked by their types")]
struct Source {
    component: String,
    host: String,
}

/// `NodeCondition` of core v1.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(dead_code, reason = "the fields are checked by their types")]
struct NodeCondition {
    r#type: String,
    status: ConditionStatus,
    last_heartbeat_time: Time,
    last_transition_time: Time,
    reason: String,
    message: String,
}

#[derive(Debug, Deserialize)]
pub(super) enum ConditionStatus {
    True,
    False,
    Unknown,
}

pub(super) fn strict<'de, T: Deserialize<'de>>(value: &'de Value) -> Result<T, Refusal> {
    T::deserialize(value)
        .map_err(|error| Refusal::new(400, format!("strict decoding error: {error}")))
}

/// The rules for an Event (`legacyValidateEvent` of core's validation), and those of events.k8s.io
/// for its texts.
pub(super) fn check_event(event: &Value, namespace: &str) -> Result<(), Refusal> {
    let found: Event = strict(event)?;
    let of = &found.involved_object;
    let is_in_place = match of.namespace.as_str() {
        "" => namespace == "default",
        of_object => of_object == namespace,
    };
    let limits = [(&found.reason, 128), (&found.action, 128), (&found.message, 1024)];
    let wrong = [
        (!is_in_place, "involvedObject.namespace"),
        (of.name.is_empty() || of.uid.is_empty(), "involvedObject.name"),
        (limits.iter().any(|(text, max)| text.is_empty() || text.len() > *max), "message"),
        (found.count == 0, "count"),
    ];
    let causes = wrong.into_iter().filter(|(is_wrong, _)| *is_wrong).map(|(_, field)| Cause {
        reason: "FieldValueInvalid",
        field: field.to_owned(),
        message: "Invalid value".to_owned(),
    });
    let causes: Vec<Cause> = causes.collect();
    let name = event["metadata"]["name"].as_str().unwrap_or_default();
    if causes.is_empty() { Ok(()) } else { Err(Refusal::invalid("events", name, causes)) }
}

/// A node's conditions.
fn check_conditions(node: &Value) -> Result<(), Refusal> {
    let conditions = node["status"]["conditions"].as_array();
    for condition in conditions.into_iter().flatten() {
        let _: NodeCondition = strict(condition)?;
    }
    Ok(())
}
