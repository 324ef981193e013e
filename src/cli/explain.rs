//! `holdfast explain`: what is known of one device, or of the devices of a pod or a claim, why, and
//! what happens next.

mod words;

use self::words::{heading, held, last_held, offered, upcoming};
use super::device::{fetch_devices, health, why};
use super::document::{Row, row};
use super::query::{DeviceQuery, NEAR_MIN, NO_NAME, is_claim, is_named};
use super::source;
use crate::admin::{DeviceReport, HookReport, Status, control_get};
use crate::console::exit::{FAILURE, Failed, UNKNOWN};
use crate::console::screen::Screen;
use crate::console::text::Text;
use crate::console::{Global, block_on, show};
use crate::domain::{DeviceId, Grant, PendingRelease, PendingReleases};
use crate::store::ExportLine;
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The widest line.
const COLUMNS: usize = 80;
/// The column where values begin.
const INDENT: usize = 13;
/// The most names of pods and claims that an error suggests.
const NEAR_MAX: usize = 3;

/// The subject.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// A device: its id or a prefix of it, a PCI address, a node such as /dev/fuse, or its name on
    /// the host such as mlx5_2. Or a pod or a ResourceClaim: [NAMESPACE/]NAME or uid:…
    #[arg(value_parser = crate::console::non_empty)]
    subject: String,
}

/// Asks the running daemon, and prints the explanation.
///
/// # Errors
/// When no daemon runs, and with [`UNKNOWN`] when nothing has this name.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let facts = Facts::ask(global)?;
    let mut subject = facts.find(&options.subject);
    if subject.as_ref().is_none_or(|subject| subject.grants.is_empty()) {
        let last = last_grant(global, &options.subject, subject.as_ref());
        subject = subject.or_else(|| last.as_ref().map(|_| Subject::default()));
        if let Some(subject) = &mut subject {
            subject.last = last;
        }
    }
    let Some(subject) = subject else {
        return Err(Failed::new(UNKNOWN, facts.unknown(&options.subject)?));
    };
    let document = document(&facts, &subject);
    show(global.output, &document, |document| text(document, Screen::get()))
}

/// What the daemon knows.
#[derive(Debug, Default)]
struct Facts {
    devices: Vec<DeviceReport>,
    grants: Vec<Grant>,
    pending: PendingReleases,
    hooks: Vec<HookReport>,
}

/// What the user means.
#[derive(Debug, Default)]
struct Subject {
    /// The pod or the claim; `None` for a device.
    holder: Option<String>,
    devices: BTreeSet<DeviceId>,
    /// The live grants.
    grants: Vec<Grant>,
    /// If there is none: the last one.
    last: Option<Grant>,
}

/// The device behind an id: for a share the whole device.
fn whole(id: &DeviceId) -> DeviceId {
    id.shared().unwrap_or_else(|| id.clone())
}

impl Facts {
    fn ask(global: &Global) -> Result<Facts, Failed> {
        let devices = fetch_devices(global)?;
        let failed = |error| Failed::new(FAILURE, error);
        let grants = block_on(control_get(&global.run_dir, "/v1/grants"))?.map_err(failed)?;
        let status = block_on(control_get::<Status>(&global.run_dir, "/v1/status"))?;
        let hooks = status.map_err(failed)?.hooks;
        Ok(Facts { devices, grants, pending: source::pending_releases(global), hooks })
    }

    /// A whole name of a pod or claim counts more than the beginning of a device's id.
    fn find(&self, text: &str) -> Option<Subject> {
        let query = self.query(text);
        let of_device = || {
            let devices: BTreeSet<DeviceId> = query.matches().ok()?.iter().map(whole).collect();
            let has = |grant: &&Grant| {
                grant.devices.iter().any(|device| devices.contains(&whole(&device.id)))
            };
            let grants = self.grants.iter().filter(has).cloned().collect();
            Some(Subject { holder: None, devices, grants, last: None })
        };
        if query.is_certain() {
            return of_device();
        }
        self.holder(text).or_else(of_device)
    }

    fn query(&self, text: &str) -> DeviceQuery {
        let mut query = DeviceQuery::new(text);
        for DeviceReport { id, key, names, .. } in &self.devices {
            query.add_named(key, &DeviceId::new(id), names);
        }
        for grant in self.grants.iter().filter(|grant| grant.is_live()) {
            query.add_grant(grant);
        }
        query
    }

    fn holder(&self, text: &str) -> Option<Subject> {
        let grants: Vec<Grant> =
            self.grants.iter().filter(|grant| is_of(grant, text)).cloned().collect();
        let first = grants.first()?;
        let claim = first.claim.as_ref().filter(|hold| is_claim(&hold.claim, text));
        let pod = || first.pods().find(|pod| is_named(pod, text));
        let holder = match claim {
            Some(hold) => format!("claim {}", hold.claim),
            None => format!("pod {}", pod()?),
        };
        let devices = grants.iter().flat_map(|grant| &grant.devices);
        let devices = devices.map(|device| whole(&device.id)).collect();
        Some(Subject { holder: Some(holder), devices, grants, last: None })
    }

    /// The error if nothing has this name, with similar names.
    fn unknown(&self, text: &str) -> Result<String, Failed> {
        let query = self.query(text);
        if !query.is_unknown() {
            let sentence = query.matches().err().unwrap_or_default();
            return Err(Failed::new(FAILURE, sentence));
        }
        let names: BTreeSet<String> = self.grants.iter().flat_map(names_of).collect();
        let likeness = |name: &String| {
            let short = name.rsplit('/').next().unwrap_or_default();
            let like = |name: &str| strsim::normalized_damerau_levenshtein(name, text);
            like(name).max(like(short))
        };
        let mut near: Vec<&String> =
            names.iter().filter(|name| likeness(name) >= NEAR_MIN).collect();
        near.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
        let near: Vec<String> = query
            .similar()
            .into_iter()
            .chain(near.into_iter().take(NEAR_MAX).map(String::as_str))
            .map(|name| format!("`{name}`"))
            .collect();
        let near = if near.is_empty() {
            String::new()
        } else {
            format!("did you mean {}? ", near.join(", "))
        };
        Ok(format!(
            "{NO_NAME}{text}`; {near}`holdfast discover` lists the devices, `holdfast who` the pods"
        ))
    }

    fn device<'a>(&'a self, id: &DeviceId) -> Option<&'a DeviceReport> {
        self.devices.iter().find(|device| device.id == id.as_str())
    }
}

/// Whether a pod or the claim of a grant has this name.
fn is_of(grant: &Grant, text: &str) -> bool {
    grant.claim.as_ref().is_some_and(|hold| is_claim(&hold.claim, text))
        || grant.pods().any(|pod| is_named(pod, text))
}

fn names_of(grant: &Grant) -> Vec<String> {
    let claim = grant.claim.iter().map(|hold| hold.claim.to_string());
    grant.pods().filter(|pod| pod.name.is_some()).map(ToString::to_string).chain(claim).collect()
}

/// The newest grant in the history of what the user means; `None` too if it cannot be read.
fn last_grant(global: &Global, text: &str, subject: Option<&Subject>) -> Option<Grant> {
    let is_it = |grant: &Grant| match subject {
        Some(subject) => {
            grant.devices.iter().any(|device| subject.devices.contains(&whole(&device.id)))
        }
        None => is_of(grant, text),
    };
    let mut last = None;
    let read = source::read(global, |part| {
        if let ExportLine::Grant(grant) = part
            && !grant.is_live()
            && is_it(&grant)
        {
            last = Some(*grant);
        }
        last.is_none()
    });
    read.ok().and(last)
}

/// The document of `explain -o json`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    /// The pod or the claim that was asked for; null for a device.
    holder: Option<&'a str>,
    devices: Vec<Explained<'a>>,
    /// If nothing holds it now: the last grant.
    last: Option<Row<'a>>,
    #[serde(skip)]
    last_grant: Option<&'a Grant>,
}

/// One device.
#[derive(Debug, Serialize)]
struct Explained<'a> {
    id: &'a str,
    /// What it is, in words.
    is: String,
    /// Whether and as what it is offered, in words.
    offered: String,
    /// `Healthy` or `Unhealthy`; null for a device that no resource lists.
    health: Option<&'a str>,
    /// The health in words, with the reason.
    judged: String,
    /// What happens next, in words.
    next: Option<String>,
    held_by: Vec<Held<'a>>,
}

/// A grant of a device.
#[derive(Debug, Serialize)]
struct Held<'a> {
    #[serde(flatten)]
    row: Row<'a>,
    /// The holder, in words.
    holder: String,
    /// The API by which it got the device, in words.
    api: &'static str,
    /// The state, in words.
    explained: String,
    /// What the release waits for, in words.
    waits: Vec<String>,
    /// What happens next, in words.
    next: &'static str,
}

fn document<'a>(facts: &'a Facts, subject: &'a Subject) -> Document<'a> {
    let releases: BTreeMap<_, _> = subject
        .grants
        .iter()
        .filter_map(|grant| Some((&grant.alloc_id, PendingRelease::of(grant, &facts.pending)?)))
        .collect();
    let explained = |id: &'a DeviceId| {
        let report = facts.device(id);
        let has = |grant: &&Grant| grant.devices.iter().any(|device| whole(&device.id) == *id);
        let grants: Vec<&Grant> = subject.grants.iter().filter(has).collect();
        let of = |device: &DeviceReport| match why(device) {
            none if none.is_empty() => health(device),
            reason => format!("{}: {reason}", health(device)),
        };
        Explained {
            id: id.as_str(),
            is: heading(id, report, grants.first().copied()),
            offered: offered(report),
            health: report.and_then(|device| device.health.as_deref()),
            judged: report.map(of).unwrap_or_default(),
            next: upcoming(id, report, &facts.hooks, !grants.is_empty()),
            held_by: grants
                .into_iter()
                .map(|grant| {
                    let row = row(grant, &[]).with_pending(grant, &facts.pending);
                    held(grant, row, releases.get(&grant.alloc_id))
                })
                .collect(),
        }
    };
    Document {
        schema: 1,
        holder: subject.holder.as_deref(),
        devices: subject.devices.iter().map(explained).collect(),
        last: subject.last.as_ref().map(|grant| row(grant, &[])),
        last_grant: subject.last.as_ref(),
    }
}

fn text(document: &Document<'_>, screen: Screen) -> Text {
    let mut text = Text::default();
    if let Some(holder) = document.holder {
        let count = match document.devices.len() {
            1 => "one device".to_owned(),
            count => format!("{count} devices"),
        };
        text.line(format_args!("{holder} has {count}"));
    }
    // The same for the documents of other nodes. A document of strings cannot fail.
    let devices = document.devices.iter().map(|it| serde_json::to_value(it).unwrap_or_default());
    let devices: Vec<Value> = devices.collect();
    for alike in devices.chunk_by(are_alike) {
        if document.holder.is_some() {
            text.end_line();
        }
        text += devices_text(alike, screen);
    }
    if let Some(grant) = document.last_grant {
        if document.devices.is_empty() {
            text.line(format_args!("it holds no device"));
        }
        for (name, value) in last_held(grant) {
            line(&mut text, narrow(screen), name, &value);
        }
    }
    text
}

/// Whether the explanations of two devices differ in nothing but the device.
#[must_use]
pub fn are_alike(one: &Value, other: &Value) -> bool {
    ["node", "offered", "judged", "held_by", "next"].iter().all(|key| one[*key] == other[*key])
}

/// The explanation of a device, or of several that are alike, from their JSON. A missing value has
/// no line.
#[must_use]
pub fn devices_text(alike: &[Value], screen: Screen) -> Text {
    let Some(device) = alike.first() else { return Text::default() };
    let screen = narrow(screen);
    let of = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let mut text = Text::default();
    let heading = match alike.len() {
        1 => of(device, "is"),
        count => {
            let ids: Vec<String> = alike.iter().map(|device| of(device, "id")).collect();
            format!("{count} devices: {}", ids.join(", "))
        }
    };
    text.wrap(screen, 2, &heading);
    text.end_line();
    line(&mut text, screen, "offered", &of(device, "offered"));
    line(&mut text, screen, "health", &of(device, "judged"));
    for held in device["held_by"].as_array().into_iter().flatten() {
        line(&mut text, screen, "held by", &of(held, "holder"));
        line(&mut text, screen, "by", &of(held, "api"));
        line(&mut text, screen, "state", &of(held, "explained"));
        for wait in held["waits"].as_array().into_iter().flatten() {
            line(&mut text, screen, "waits for", wait.as_str().unwrap_or_default());
        }
        line(&mut text, screen, "then", &of(held, "next"));
    }
    line(&mut text, screen, "next", &of(device, "next"));
    text
}

/// At most 80 columns, also in a pipe: these are sentences, not a table.
pub(super) fn narrow(screen: Screen) -> Screen {
    Screen { width: Some(screen.width.unwrap_or(COLUMNS).min(COLUMNS)), ..screen }
}

pub(super) fn line(text: &mut Text, screen: Screen, name: &str, value: &str) {
    if !value.is_empty() {
        text.put(format_args!("  {name:<11}"));
        text.wrap(screen, INDENT, value);
        text.end_line();
    }
}

#[cfg(test)]
mod tests;
