//! The objects of the simulated API server, with their versions and the history of changes; pure
//! apart from the clock that stamps objects.

use super::profile::Profile;
use super::refusal::{Cause, Refusal};
use super::schema::Spec;
use super::target::{Kind, Selector, Target};
use super::{names, patch, slices};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The changes that are known. A watch that begins before them is answered with 410.
const HISTORY_MAX: usize = 4096;
/// The limit of the part of a generated name that the request has (apiserver's `names` package).
const GENERATED_FROM_MAX: usize = 58;

/// A change of one object.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) kind: Kind,
    /// The last content, also of a removed object.
    pub(super) object: Value,
    pub(super) before: Option<Value>,
    pub(super) is_removal: bool,
}

type Key = (Kind, String, String);

/// All objects.
#[derive(Debug, Clone)]
pub(super) struct Store {
    version: u64,
    /// Changes up to this version are no longer known.
    oldest: u64,
    objects: BTreeMap<Key, Value>,
    history: Vec<Arc<Change>>,
    created: u64,
}

impl Store {
    pub(super) fn new() -> Self {
        let (objects, history) = (BTreeMap::new(), Vec::new());
        Store { version: 100, oldest: 0, objects, history, created: 0 }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<&Value> {
        self.objects.get(&(kind, namespace.to_owned(), name.to_owned()))
    }

    /// The objects of a collection. An empty namespace is all of them.
    pub(super) fn list(&self, kind: Kind, namespace: &str, selector: &Selector) -> Vec<Value> {
        let is_in = |key: &Key| key.0 == kind && (namespace.is_empty() || key.1 == namespace);
        let found = self.objects.iter().filter(|(key, object)| is_in(key) && selector.fits(object));
        found.map(|(_, object)| object.clone()).collect()
    }

    /// The changes after this version; `None` if some of them are no longer known.
    pub(super) fn after(&self, version: u64) -> Option<Vec<Arc<Change>>> {
        let after = self.history.iter().filter(|change| change.version > version);
        (version >= self.oldest).then(|| after.cloned().collect())
    }

    /// Forgets all changes.
    pub(super) fn expire(&mut self) {
        self.version += 1;
        self.oldest = self.version;
        self.history.clear();
    }

    /// Stores an object as the control plane does: without rules.
    pub(super) fn put(&mut self, kind: Kind, mut object: Value) -> Value {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = (kind, text("namespace"), text("name"));
        let old = self.objects.get(&key).cloned();
        object["kind"] = kind.name().into();
        object["apiVersion"] = kind.api_version().into();
        let is_changed = old.as_ref().is_some_and(|old| old["spec"] != object["spec"]);
        self.stamp(&mut object, old.as_ref(), is_changed);
        self.change(key, Some(object.clone()));
        object
    }

    /// Removes an object as the control plane does.
    pub(super) fn remove(&mut self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        let key = (kind, namespace.to_owned(), name.to_owned());
        self.objects.contains_key(&key).then(|| self.change(key, None))
    }

    pub(super) fn create(
        &mut self,
        target: &Target,
        mut object: Value,
        profile: Profile,
    ) -> Result<Value, Refusal> {
        let (kind, plural) = (target.kind, target.kind.plural());
        check_kind(target, &object)?;
        let mut name = text(&object, "name");
        let from = text(&object, "generateName");
        if name.is_empty() && !from.is_empty() {
            let from: String = from.chars().take(GENERATED_FROM_MAX).collect();
            name = format!("{from}{:05}", self.created);
            object["metadata"]["name"] = name.as_str().into();
        }
        if !text(&object, "resourceVersion").is_empty() {
            let why = "resourceVersion should not be set on objects to be created";
            return Err(Refusal::new(500, why));
        }
        if name.is_empty() || !names::is_subdomain(&name, 253) {
            let (reason, message) = match name.is_empty() {
                true => ("FieldValueRequired", "Required value: name or generateName is required"),
                false => ("FieldValueInvalid", "Invalid value: a lowercase RFC 1123 subdomain"),
            };
            let field = "metadata.name".to_owned();
            let cause = Cause { reason, field, message: message.to_owned() };
            return Err(Refusal::invalid(plural, &name, vec![cause]));
        }
        if kind.is_namespaced() {
            object["metadata"]["namespace"] = target.namespace.as_str().into();
        }
        accept(kind, &name, &mut object, None, profile)?;
        if kind == Kind::ResourceClaim {
            object["status"] = json!({});
        }
        let key = (kind, target.namespace.clone(), name.clone());
        if self.objects.contains_key(&key) {
            return Err(Refusal::exists(plural, &name));
        }
        object["metadata"]["uid"] = Value::Null;
        self.stamp(&mut object, None, false);
        self.change(key, Some(object.clone()));
        Ok(object)
    }

    pub(super) fn replace(
        &mut self,
        target: &Target,
        mut object: Value,
        profile: Profile,
    ) -> Result<Value, Refusal> {
        let (kind, plural) = (target.kind, target.kind.plural());
        let name = target.name.clone().unwrap_or_default();
        check_kind(target, &object)?;
        if text(&object, "name") != name {
            let why = "the name of the object does not match the name on the URL";
            return Err(Refusal::new(400, why));
        }
        let key = (kind, target.namespace.clone(), name.clone());
        let old = self.objects.get(&key).cloned();
        let old = old.ok_or_else(|| Refusal::not_found(plural, &name))?;
        let uid = text(&object, "uid");
        if !uid.is_empty() && uid != text(&old, "uid") {
            return Err(Refusal::conflict(plural, &name, "Precondition failed: UID"));
        }
        let version = text(&object, "resourceVersion");
        if version.is_empty() {
            // Stricter than a real one for some kinds: no client of this program writes blindly.
            let cause = Cause {
                reason: "FieldValueInvalid",
                field: "metadata.resourceVersion".into(),
                message: "Invalid value: must be specified for an update".into(),
            };
            return Err(Refusal::invalid(plural, &name, vec![cause]));
        }
        if version != text(&old, "resourceVersion") {
            let why = "the object has been modified; please apply your changes to the latest \
                       version and try again";
            return Err(Refusal::conflict(plural, &name, why));
        }
        let kept = if target.is_status { "spec" } else { "status" };
        if kind != Kind::ResourceSlice {
            object[kept] = old[kept].clone();
        }
        if kind.is_namespaced() {
            object["metadata"]["namespace"] = target.namespace.as_str().into();
        }
        let is_changed = accept(kind, &name, &mut object, Some(&old), profile)?;
        for field in ["uid", "creationTimestamp", "deletionTimestamp", "generation"] {
            match old["metadata"].get(field) {
                Some(value) => object["metadata"][field] = value.clone(),
                None => drop(object["metadata"].as_object_mut().map(|map| map.remove(field))),
            }
        }
        if object == old && !is_changed {
            return Ok(old);
        }
        if text(&old, "deletionTimestamp").is_empty() || has_finalizers(&object) {
            self.stamp(&mut object, Some(&old), is_changed);
            self.change(key, Some(object.clone()));
        } else {
            self.change(key, None);
        }
        Ok(object)
    }

    /// Applies a strategic merge patch. One that changes nothing gives no new version.
    pub(super) fn patch(&mut self, target: &Target, patch: &Value) -> Result<Value, Refusal> {
        let (kind, plural) = (target.kind, target.kind.plural());
        let name = target.name.clone().unwrap_or_default();
        let key = (kind, target.namespace.clone(), name.clone());
        let old = self.objects.get(&key).cloned();
        let old = old.ok_or_else(|| Refusal::not_found(plural, &name))?;
        let mut object = patch::apply(target, &old, patch)?;
        if object == old {
            return Ok(old);
        }
        self.stamp(&mut object, Some(&old), false);
        Ok(self.change(key, Some(object)))
    }

    /// Deletes one object. `preconditions` are those of `DeleteOptions`.
    pub(super) fn delete(
        &mut self,
        target: &Target,
        preconditions: &Value,
    ) -> Result<Value, Refusal> {
        let (kind, plural) = (target.kind, target.kind.plural());
        let name = target.name.clone().unwrap_or_default();
        let key = (kind, target.namespace.clone(), name.clone());
        let old = self.objects.get(&key).cloned();
        let mut old = old.ok_or_else(|| Refusal::not_found(plural, &name))?;
        for field in ["uid", "resourceVersion"] {
            let wanted = preconditions[field].as_str();
            if wanted.is_some_and(|wanted| wanted != text(&old, field)) {
                let why = format!("Precondition failed: {field}");
                return Err(Refusal::conflict(plural, &name, &why));
            }
        }
        if !has_finalizers(&old) {
            return Ok(self.change(key, None));
        }
        if text(&old, "deletionTimestamp").is_empty() {
            let before = old.clone();
            old["metadata"]["deletionTimestamp"] = now().into();
            self.stamp(&mut old, Some(&before), false);
            self.change(key, Some(old.clone()));
        }
        Ok(old)
    }

    /// Deletes the selected objects of a collection. Returns how many.
    pub(super) fn delete_all(&mut self, kind: Kind, namespace: &str, selector: &Selector) -> usize {
        let selected = self.list(kind, namespace, selector);
        for object in &selected {
            let key = (kind, text(object, "namespace"), text(object, "name"));
            self.change(key, None);
        }
        selected.len()
    }

    /// Gives an object its version, and what the first version of it has decided.
    fn stamp(&mut self, object: &mut Value, old: Option<&Value>, is_changed: bool) {
        let version = (self.version + 1).to_string();
        let Some(old) = old else {
            self.created += 1;
            if object["metadata"]["uid"].as_str().unwrap_or_default().is_empty() {
                let uid = format!("00000000-0000-4000-8000-{:012x}", self.created);
                object["metadata"]["uid"] = uid.into();
            }
            object["metadata"]["creationTimestamp"] = now().into();
            object["metadata"]["generation"] = 1.into();
            object["metadata"]["resourceVersion"] = version.into();
            return;
        };
        let known = &old["metadata"];
        let more = i64::from(is_changed);
        object["metadata"]["uid"] = known["uid"].clone();
        object["metadata"]["creationTimestamp"] = known["creationTimestamp"].clone();
        object["metadata"]["generation"] =
            (known["generation"].as_i64().unwrap_or(1) + more).into();
        object["metadata"]["resourceVersion"] = version.into();
    }

    /// Stores or removes an object. Returns the last content, with the version of this change.
    fn change(&mut self, key: Key, object: Option<Value>) -> Value {
        self.version += 1;
        let before = self.objects.remove(&key);
        let is_removal = object.is_none();
        let mut last = object.or_else(|| before.clone()).unwrap_or_default();
        last["metadata"]["resourceVersion"] = self.version.to_string().into();
        let (version, kind, object) = (self.version, key.0, last.clone());
        if !is_removal {
            self.objects.insert(key, last.clone());
        }
        self.history.push(Arc::new(Change { version, kind, object, before, is_removal }));
        if self.history.len() > HISTORY_MAX {
            self.oldest = self.history.remove(0).version;
        }
        last
    }
}

impl Change {
    /// The event of a watch: its type, and the object. `None` if the watch does not select it.
    pub(super) fn event(
        &self,
        kind: Kind,
        namespace: &str,
        selector: &Selector,
    ) -> Option<(&'static str, &Value)> {
        let is_in = namespace.is_empty() || text(&self.object, "namespace") == namespace;
        if kind != self.kind || !is_in {
            return None;
        }
        let was = self.before.as_ref().is_some_and(|before| selector.fits(before));
        let is = !self.is_removal && selector.fits(&self.object);
        match (was, is) {
            (false, true) => Some(("ADDED", &self.object)),
            (true, true) => Some(("MODIFIED", &self.object)),
            (true, false) => Some(("DELETED", &self.object)),
            (false, false) => None,
        }
    }
}

/// Applies the rules of the kind, and drops the fields behind gates. Returns whether the spec was
/// another than that of `old` before fields were dropped: then the generation rises, also if the
/// stored spec is the same as before.
fn accept(
    kind: Kind,
    name: &str,
    object: &mut Value,
    old: Option<&Value>,
    profile: Profile,
) -> Result<bool, Refusal> {
    if kind == Kind::Event {
        let namespace = text(object, "namespace");
        patch::check_event(object, &namespace)?;
    }
    if kind != Kind::ResourceSlice {
        return Ok(old.is_none_or(|old| old["spec"] != object["spec"]));
    }
    let read = |object: &Value| serde_json::from_value::<Spec>(object["spec"].clone());
    let mut spec = read(object)
        .map_err(|error| Refusal::new(400, format!("strict decoding error: spec: {error}")))?;
    for quantity in spec.quantities() {
        let (_, text) = names::quantity(quantity).ok_or_else(|| {
            Refusal::new(400, format!("unable to parse the quantity's value \"{quantity}\""))
        })?;
        *quantity = text;
    }
    for taint in spec.devices.iter_mut().flat_map(|device| &mut device.taints) {
        taint.time_added.get_or_insert_with(now);
    }
    let old = old.and_then(|old| read(old).ok());
    let is_changed = old.as_ref() != Some(&spec);
    profile.drop_fields(&mut spec, old.as_ref());
    let causes = slices::problems(&spec, old.as_ref(), profile);
    if !causes.is_empty() {
        return Err(Refusal::invalid(kind.plural(), name, causes));
    }
    let mut spec = serde_json::to_value(spec).unwrap_or_default();
    // A generation of zero is written: Go does not leave it out.
    if spec["pool"]["generation"].is_null() {
        spec["pool"]["generation"] = 0.into();
    }
    object["spec"] = spec;
    Ok(is_changed)
}

/// The body is an object of the kind and the namespace of the path.
fn check_kind(target: &Target, object: &Value) -> Result<(), Refusal> {
    let kind = target.kind;
    let is_kind = object["kind"] == kind.name() && object["apiVersion"] == kind.api_version();
    if !is_kind || !object["metadata"].is_object() {
        let expected = format!("{}, Kind={}", kind.api_version(), kind.name());
        return Err(Refusal::new(400, format!("the object provided is not {expected}")));
    }
    let namespace = text(object, "namespace");
    if !namespace.is_empty() && namespace != target.namespace {
        let why = "the namespace of the provided object does not match that of the request";
        return Err(Refusal::new(400, why));
    }
    Ok(())
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty())
}

/// A field of the metadata.
pub(super) fn text(object: &Value, field: &str) -> String {
    object["metadata"][field].as_str().unwrap_or_default().to_owned()
}

/// Now, in whole seconds, as RFC 3339.
fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
