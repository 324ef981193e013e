//! `holdfast migrate`: what a switch from another device plugin means for the pods of this node,
//! and the way of resources between the two APIs of Kubernetes. Reads only, and changes nothing.
//!
//! The switch (`check`): `fate`, `compare` and `answers` are pure, and compare what the kubelet has
//! with what Holdfast would offer. `report` prints the result.
//!
//! The APIs (`status` and `plan`): `apis` asks the daemon and prints. `steps` has the plan. It
//! is pure.

mod answers;
mod apis;
mod compare;
mod fate;
mod report;
mod steps;
#[cfg(test)]
mod tests;

use self::answers::Answer;
use self::compare::{Holder, Theirs, Verdict, compare};
use self::fate::{Host, Offer, Plan, offers};
use self::report::{Document, Facts};
use super::found::{Found, find};
use crate::config::Config;
use crate::console::exit::{CANNOT_TELL, Failed, NEEDS_DRAIN};
use crate::console::{Global, block_on, show};
use crate::contract::{self, NvidiaExtras, Request};
use crate::doctor::{listening_plugins, resource_of_socket};
use crate::domain::{
    AllocId, CgroupState, CheckpointGrant, Contract, DRA_DRIVER, DeviceId, PodName, PodRef,
    ResourceName,
};
use crate::hardware::{self, Discovery};
use crate::host::HostRoot;
use crate::host::pods::{self, PodCgroups};
use crate::kubelet::checkpoint::{CheckpointError, WholeCheckpoint, read_whole_checkpoint};
use crate::kubelet::dra::state::read_drivers;
use crate::kubelet::pod_resources::PodResources;
use clap::{Args, Subcommand};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Verbs on the switch from another device plugin, and on the API that gives devices to pods.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Report which pods need a drain before a switch from another device plugin, and what changes
    ///
    /// Compares what the kubelet has of other plugins with what Holdfast offers under the
    /// configuration. Changes nothing. Exit codes: 0 no pod needs a drain, 1 a pod needs one, 2
    /// this cannot be determined.
    Check(Options),
    /// Show which API gives the devices of each resource to pods, who holds them, and what the next
    /// step waits for
    Status,
    /// Print the steps that lead resources to another API, with what happens to pods
    ///
    /// Changes nothing. Each step has what it does to pods, and what a restart of the kubelet or a
    /// reboot of the node does after it. `--to both` is the way to change workloads one by one.
    Plan(apis::PlanOptions),
}

/// Options of the check.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// A resource whose plugin stays: its name, or `DOMAIN/*`; may be repeated
    #[arg(long, value_name = "RESOURCE")]
    keep: Vec<String>,
}

impl Options {
    /// Whether the plugin of this resource stays.
    fn keeps(&self, resource: &ResourceName) -> bool {
        self.keep.iter().any(|kept| match kept.strip_suffix("/*") {
            Some(domain) => resource.prefix() == domain,
            None => resource.as_str() == kept,
        })
    }
}

/// Runs one verb.
///
/// # Errors
/// When no daemon runs. `check`: [`NEEDS_DRAIN`] or [`CANNOT_TELL`] after the report, or when the
/// configuration is invalid.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Check(options) => check(global, options),
        Verb::Status => apis::status(global),
        Verb::Plan(options) => apis::plan(global, options),
    }
}

fn check(global: &Global, options: &Options) -> Result<(), Failed> {
    let config = global.load_config()?;
    let root = HostRoot::new(&global.host_root).with_nvidia(&config.nvidia_roots);
    let kubelet = Kubelet::read(global, &config);
    let Found { discovery, unread, .. } = find(global, &config, &root);
    let mut unread: BTreeSet<String> = unread.into_iter().collect();
    unread.extend(discovery.unread.reasons().into_iter().map(str::to_owned));
    let plan = plan(&root, &discovery);
    let host = Host { plan: &plan, devices: &discovery.devices, is_unread: !unread.is_empty() };
    let then = answers(&root, &discovery, &plan);
    let comparison = compare(&kubelet.resources, &host, &then, |resource| options.keeps(resource));
    let verdict = comparison.verdict(kubelet.unknown.is_empty());
    let names: Vec<&str> = plan.keys().map(ResourceName::as_str).collect();
    let plugins = kubelet
        .plugins
        .iter()
        .map(|socket| (socket.clone(), resource_of_socket(socket, &names).map(str::to_owned)));
    let document = Document::of(
        &comparison,
        Facts {
            verdict,
            plugins: plugins.collect(),
            // Only what the verdict depends on: an unread host matters if an id was not found.
            unknown: kubelet
                .unknown
                .iter()
                .cloned()
                .chain(unread.into_iter().filter(|_| comparison.has_unread()))
                .collect(),
            notes: kubelet
                .notes
                .iter()
                .cloned()
                .chain(discovery.selection.warnings.clone())
                .collect(),
        },
    );
    show(global.output, &document, Document::text)?;
    match verdict {
        Verdict::NoDrain => Ok(()),
        Verdict::Drain => Err(Failed::reported(NEEDS_DRAIN)),
        Verdict::Unknown => Err(Failed::reported(CANNOT_TELL)),
    }
}

/// The kubelet's side.
#[derive(Debug, Default)]
struct Kubelet {
    resources: BTreeMap<ResourceName, Theirs>,
    /// The sockets of other plugins that have a listener.
    plugins: Vec<String>,
    /// Why the holders are not known, one sentence each.
    unknown: Vec<String>,
    notes: Vec<String>,
}

impl Kubelet {
    fn read(global: &Global, config: &Config) -> Kubelet {
        let plugins = global.kubelet_dir.join("device-plugins");
        let mut kubelet = Kubelet::default();
        match listening_plugins(&plugins) {
            Ok(sockets) => kubelet.plugins = sockets,
            Err(error) => kubelet.unknown.push(format!(
                "`{}` cannot be read: {error}; name the kubelet's directory with --kubelet-dir, and \
                 run this as root",
                plugins.display()
            )),
        }
        let allocatable = allocatable(&config.pod_resources(&global.kubelet_dir));
        let whole = match read_whole_checkpoint(&plugins) {
            Ok(whole) => whole,
            Err(error) => {
                kubelet.unknown.extend(why_unknown(&error, &allocatable));
                WholeCheckpoint::default()
            }
        };
        kubelet.notes.extend(
            allocatable
                .as_ref()
                .err()
                .map(|why| format!("the ids are those of the kubelet's checkpoint: {why}")),
        );
        kubelet.notes.extend(claims(&config.kubelet_root(&global.kubelet_dir)));
        for (name, ids) in whole.registered.into_iter().chain(allocatable.unwrap_or_default()) {
            kubelet.resources.entry(name).or_default().listed.extend(ids);
        }
        for grant in whole.ours {
            kubelet.resources.entry(grant.resource).or_default().of_ours += 1;
        }
        kubelet.add_holders(&global.host_root, whole.others);
        // The kubelet keeps the name of a resource without a device and without a holder.
        kubelet.resources.retain(|_, theirs| !theirs.listed.is_empty() || theirs.of_ours > 0);
        kubelet
    }

    fn add_holders(&mut self, host_root: &Path, grants: Vec<CheckpointGrant>) {
        let names = pods::names(host_root).unwrap_or_else(|error| {
            self.notes.push(format!("pods are shown by UID: var/log/pods cannot be read: {error}"));
            BTreeMap::new()
        });
        let cgroups = PodCgroups::find(host_root, None);
        for grant in grants {
            let (namespace, name) = names
                .get(&grant.pod_uid)
                .map(|PodName { namespace, name }| (namespace.clone(), name.clone()))
                .unzip();
            let has_ended = cgroups.state(&grant.pod_uid) == CgroupState::Absent;
            let theirs = self.resources.entry(grant.resource).or_default();
            let ids: BTreeSet<DeviceId> = grant.devices.into_keys().collect();
            theirs.listed.extend(ids.iter().cloned());
            theirs.holders.push(Holder {
                pod: PodRef { uid: grant.pod_uid, namespace, name },
                container: grant.container,
                ids,
                edits: grant.edits,
                has_ended,
            });
        }
    }
}

/// The notes on claims of other DRA drivers: the switch does not concern them, and they
/// may hold the devices that Holdfast would offer.
fn claims(kubelet_root: &Path) -> Vec<String> {
    let drivers = match read_drivers(kubelet_root) {
        Ok(drivers) => drivers,
        Err(error) if error.is_absent() => return Vec::new(),
        Err(error) => return vec![format!("whether claims hold devices is not known: {error}")],
    };
    let others = drivers.into_iter().filter(|(driver, _)| driver != DRA_DRIVER);
    let note = |(driver, claims): (String, usize)| {
        let claims = if claims == 1 { "one claim".into() } else { format!("{claims} claims") };
        format!(
            "{claims} of the DRA driver `{driver}` on this node: Holdfast does not take claims over, \
             and does not know which devices they hold. Let one driver have a device (docs/dra.md)"
        )
    };
    others.map(note).collect()
}

/// The kubelet's healthy ids by resource, from its pod-resources API.
fn allocatable(socket: &Path) -> Result<BTreeMap<ResourceName, BTreeSet<DeviceId>>, String> {
    let asked = block_on(async { PodResources::new(socket).allocatable().await });
    let asked = asked.map_err(|failed| failed.sentence.unwrap_or_default())?;
    asked.map_err(|error| format!("`{}`: {error}", socket.display()))
}

/// Why a checkpoint that cannot be read leaves the holders unknown; `None` if it is missing on a
/// node whose kubelet answers that it has no device.
fn why_unknown(
    error: &CheckpointError,
    allocatable: &Result<BTreeMap<ResourceName, BTreeSet<DeviceId>>, String>,
) -> Option<String> {
    match allocatable {
        _ if !error.is_missing() => Some(error.to_string()),
        Ok(ids) if ids.is_empty() => None,
        Ok(_) => Some(format!("{error}, although the kubelet has devices")),
        Err(why) => Some(format!("{error}; and the kubelet does not answer: {why}")),
    }
}

/// The ids that Holdfast would offer.
fn plan(root: &HostRoot, discovery: &Discovery) -> Plan {
    let plan = discovery.specs.iter().map(|spec| {
        let devices = discovery.selection.resources.get(&spec.name).into_iter().flatten();
        let offered: Vec<Offer> = devices
            .map(|device| Offer { device: device.clone(), health: discovery.health(root, device) })
            .collect();
        (spec.name.clone(), offers(spec, &offered))
    });
    plan.collect()
}

/// Holdfast's answer of each resource for one device.
fn answers(root: &HostRoot, discovery: &Discovery, plan: &Plan) -> BTreeMap<ResourceName, Answer> {
    let alloc_id = AllocId::new("");
    let answers = discovery.specs.iter().filter_map(|spec| {
        let offer = plan.get(&spec.name)?.values().next()?;
        let channels = match &spec.contract {
            Contract::Nvidia(options) => options.imex_channels.as_slice(),
            _ => &[],
        };
        let nvidia = NvidiaExtras {
            features: hardware::nvidia_features(root),
            channels: channels
                .iter()
                .map(|channel| hardware::imex_channel(root, *channel))
                .collect(),
        };
        let request = Request {
            spec,
            devices: &[&offer.device],
            alloc_id: &alloc_id,
            node_exists: &|path| root.node_exists(path),
            nvidia: &nvidia,
        };
        Some((spec.name.clone(), Answer::of(&contract::edits(&request))))
    });
    answers.collect()
}
