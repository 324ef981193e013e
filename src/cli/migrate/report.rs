//! The report: a JSON document, and a text for people.

use super::compare::{Comparison, Resource, Verdict};
use super::fate::{Fate, How};
use crate::console::screen::{Screen, Tint};
use crate::console::table::Table;
use crate::console::text::Text;
use crate::domain::DeviceId;
use serde::Serialize;
use std::collections::BTreeMap;

/// The version of the document's format.
const SCHEMA: u32 = 1;
/// Free ids that the text lists for each resource; the document has all.
const FREE_MAX: usize = 8;

/// What the document has besides the comparison.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// The verdict.
    pub(super) verdict: Verdict,
    /// The sockets of other plugins, each with the offered resource to which it belongs by name.
    pub(super) plugins: Vec<(String, Option<String>)>,
    /// Why the verdict may be unknown, one sentence each.
    pub(super) unknown: Vec<String>,
    /// Further remarks, one sentence each.
    pub(super) notes: Vec<String>,
}

/// The document of `migrate check -o json`.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    schema: u32,
    /// `no-drain`, `drain` or `unknown`.
    verdict: &'static str,
    /// The pods that need a drain.
    drain: Vec<String>,
    /// Why the verdict may be unknown.
    unknown: Vec<String>,
    resources: Vec<ResourceEntry>,
    /// The resources that appear with the switch, with the number of their ids.
    appearing: BTreeMap<String, usize>,
    plugins: Vec<PluginEntry>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ResourceEntry {
    name: String,
    /// Whether Holdfast would offer a resource of this name.
    offered: bool,
    /// Whether `--keep` names it.
    kept: bool,
    /// Number of ids that the kubelet has.
    ids: usize,
    /// Number of them that stay.
    stay: usize,
    /// Number of containers that have an answer of Holdfast already.
    from_holdfast: usize,
    /// The free ids that do not stay.
    free: Vec<IdEntry>,
    holders: Vec<HolderEntry>,
    /// How answers to new containers differ; null if it is not known.
    new_pods: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
struct HolderEntry {
    pod_uid: String,
    namespace: Option<String>,
    pod: Option<String>,
    container: String,
    /// Whether the pod has no cgroup: it has ended, and needs no drain.
    ended: bool,
    ids: Vec<IdEntry>,
}

#[derive(Debug, Serialize)]
struct IdEntry {
    id: String,
    /// `same`, `unhealthy`, `other-name`, `other-id`, `as-shares`, `as-whole`, `fewer-shares`,
    /// `as-parts`, `within-whole`, `not-offered`, `no-device`, `unread` or `kept`.
    then: &'static str,
    /// Whether its pod needs a drain; null if that is unknown.
    drain: Option<bool>,
    /// The resource that offers the device otherwise.
    resource: Option<String>,
    /// The ids of the device there.
    ids: Vec<String>,
    /// The same in words.
    text: String,
}

#[derive(Debug, Serialize)]
struct PluginEntry {
    socket: String,
    /// The resource that Holdfast offers too, by the socket's name.
    resource: Option<String>,
}

impl Document {
    /// Of a comparison.
    #[must_use]
    pub(super) fn of(comparison: &Comparison, facts: Facts) -> Self {
        let appearing = comparison.appearing.iter();
        Document {
            schema: SCHEMA,
            verdict: match facts.verdict {
                Verdict::NoDrain => "no-drain",
                Verdict::Drain => "drain",
                Verdict::Unknown => "unknown",
            },
            drain: comparison.to_drain().into_iter().collect(),
            unknown: facts.unknown,
            resources: comparison.resources.iter().map(resource).collect(),
            appearing: appearing.map(|(name, ids)| (name.to_string(), *ids)).collect(),
            plugins: facts
                .plugins
                .into_iter()
                .map(|(socket, resource)| PluginEntry { socket, resource })
                .collect(),
            notes: facts.notes,
        }
    }

    /// The text for people.
    #[must_use]
    pub(super) fn text(&self) -> Text {
        let mut text = Text::default();
        let holders = self.holders();
        if !holders.is_empty() {
            text += holders.into();
            text.end_line();
        }
        for resource in &self.resources {
            resource.write(&mut text);
        }
        for (name, ids) in &self.appearing {
            text.line(format_args!("{name}: new, {ids} ids"));
        }
        for PluginEntry { socket, resource } in &self.plugins {
            if let Some(resource) = resource {
                text.line(format_args!(
                    "plugin: `{socket}` has a listener and may serve {resource}; remove its plugin \
                     before Holdfast starts"
                ));
            }
        }
        for note in &self.notes {
            text.line(format_args!("note: {note}"));
        }
        for why in &self.unknown {
            text.line(format_args!("unknown: {why}"));
        }
        let screen = Screen::get();
        let (tint, verdict) = match self.verdict {
            "no-drain" => (Tint::Green, "no pod needs a drain".to_owned()),
            "drain" => (Tint::Red, format!("drain first: {}", self.drain.join(", "))),
            _ => (Tint::Yellow, "it cannot be determined whether a pod needs a drain".to_owned()),
        };
        text.paint(screen, tint, &verdict);
        text.end_line();
        text
    }

    fn holders(&self) -> Table {
        let table =
            Table::new(&["drain", "pod", "container", "resource", "id", "after the switch"]);
        let mut table =
            table.shrinking(&["after the switch", "id", "resource"]).tinted("drain", |cell| {
                match cell {
                    "yes" => Tint::Red,
                    "?" => Tint::Yellow,
                    _ => Tint::Plain,
                }
            });
        for resource in &self.resources {
            for holder in &resource.holders {
                let pod = holder.namespace.as_ref().zip(holder.pod.as_ref()).map_or_else(
                    || holder.pod_uid.clone(),
                    |(namespace, pod)| format!("{namespace}/{pod}"),
                );
                for id in &holder.ids {
                    let drain = match id.drain {
                        _ if holder.ended => "no",
                        Some(true) => "yes",
                        Some(false) => "no",
                        None => "?",
                    };
                    let after =
                        if holder.ended { "the pod has ended".to_owned() } else { id.text.clone() };
                    let name = resource.name.clone();
                    let container = holder.container.clone();
                    table.row([drain.into(), pod.clone(), container, name, id.id.clone(), after]);
                }
            }
        }
        table
    }
}

impl ResourceEntry {
    fn write(&self, text: &mut Text) {
        let ResourceEntry { name, ids, stay, .. } = self;
        if self.kept {
            text.line(format_args!("{name}: {ids} ids; its plugin stays"));
            if self.offered {
                text.line(format_args!(
                    "  Holdfast offers it too: two plugins would take it from each other"
                ));
            }
            return;
        }
        if self.offered {
            text.line(format_args!("{name}: {stay} of {ids} ids stay"));
        } else {
            text.line(format_args!(
                "{name}: {ids} ids; Holdfast does not offer it. It disappears with its plugin \
                 (--keep {name} if the plugin stays)"
            ));
        }
        if self.from_holdfast > 0 {
            let count = self.from_holdfast;
            text.line(format_args!("  {count} containers have an answer of Holdfast already"));
        }
        for IdEntry { id, text: after, .. } in self.free.iter().take(FREE_MAX) {
            text.line(format_args!("  {id} (free): {after}"));
        }
        if let Some(more) = self.free.len().checked_sub(FREE_MAX).filter(|more| *more > 0) {
            text.line(format_args!("  and {more} more free ids (-o json lists them)"));
        }
        match self.new_pods.as_deref() {
            Some([]) => text.line(format_args!("  new pods get devices in the same way")),
            Some(changes) => {
                for change in changes {
                    text.line(format_args!("  new pods: {change}"));
                }
            }
            None if self.offered => text.line(format_args!(
                "  new pods: not compared, since no container shows the present plugin's answer"
            )),
            None => {}
        }
    }
}

fn resource(resource: &Resource) -> ResourceEntry {
    let ids = |ids: &[(DeviceId, Fate)]| ids.iter().map(|(id, fate)| entry(id, fate)).collect();
    let holders = resource.holders.iter().map(|(holder, held)| HolderEntry {
        pod_uid: holder.pod.uid.clone(),
        namespace: holder.pod.namespace.clone(),
        pod: holder.pod.name.clone(),
        container: holder.container.clone(),
        ended: holder.has_ended,
        ids: ids(held),
    });
    ResourceEntry {
        name: resource.name.to_string(),
        offered: resource.is_offered,
        kept: resource.is_kept,
        ids: resource.listed,
        stay: resource.same,
        from_holdfast: resource.of_ours,
        free: ids(&resource.free),
        holders: holders.collect(),
        new_pods: resource.changes.clone(),
    }
}

fn entry(id: &DeviceId, fate: &Fate) -> IdEntry {
    let (then, text) = in_words(fate);
    let (resource, ids) = match fate {
        Fate::Otherwise { resource, ids, .. } => (Some(resource.to_string()), ids.as_slice()),
        Fate::NotOffered(device) => (None, std::slice::from_ref(device)),
        _ => (None, [].as_slice()),
    };
    IdEntry {
        id: id.to_string(),
        then,
        drain: fate.needs_drain(),
        resource,
        ids: ids.iter().map(ToString::to_string).collect(),
        text,
    }
}

/// The word of the document, and a sentence.
fn in_words(fate: &Fate) -> (&'static str, String) {
    match fate {
        Fate::Same => ("same", "stays".into()),
        Fate::Kept => ("kept", "its plugin stays".into()),
        Fate::Unhealthy(reason) => {
            ("unhealthy", format!("stays, but is unhealthy: {}", reason.as_str()))
        }
        Fate::NotOffered(device) => {
            ("not-offered", format!("no resource offers its device, {device}"))
        }
        Fate::NoDevice => ("no-device", "no device of this node has this id".into()),
        Fate::Unread => ("unread", "unknown: the host could not be read completely".into()),
        Fate::Otherwise { how, resource, ids } => {
            let first = ids.first().map_or("", DeviceId::as_str);
            let count = ids.len();
            match how {
                How::OtherName => ("other-name", format!("{resource} offers it")),
                How::OtherId => ("other-id", format!("is {first} of {resource}")),
                How::AsShares => ("as-shares", format!("{count} shares: {first} of {resource}")),
                How::AsWhole => ("as-whole", format!("the whole device: {first} of {resource}")),
                How::FewerShares => {
                    ("fewer-shares", format!("only {count} shares remain: {first} of {resource}"))
                }
                How::AsParts => ("as-parts", format!("{count} parts: {first} of {resource}")),
                How::WithinWhole => ("within-whole", format!("a part of {first} of {resource}")),
            }
        }
    }
}
