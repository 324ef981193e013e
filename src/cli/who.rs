//! `holdfast who`: which container holds which device.

use super::document::{
    self, Row, UnhealthyDevices, devices, holder_in_words, proof_in_words, row, table,
};
use super::query::{DeviceQuery, GrantFilter, KnownResources, is_named};
use super::watch::{self, QueryResult, Watch};
use super::{history, source};
use crate::admin::{ControlError, DeviceReport, Processors, control_get};
use crate::console::exit::{FAILURE, Failed, NO_HOLDER};
use crate::console::text::Text;
use crate::console::{Global, block_on};
use crate::domain::{DeviceId, Grant, GrantState};
use crate::store::ExportLine;
use clap::Args;
use serde::Serialize;
use std::collections::BTreeSet;

/// The legend of `--help`.
const STATES: &str = "\
States:
  granted          given by an Allocate; the kubelet has not named the container yet
  bound            a container holds the devices
  prepared         a ResourceClaim holds the devices
  unprepared       the kubelet unprepared the claim; a process of its pods still runs
  pod gone         the kubelet removed the pod; the release waits for proof
  pod ended        no process of the pod runs; the kubelet may start it again
  pod deleted      the kubelet forgot the pod, but a process of it still runs
  pod not started  not seen since the last boot; the kubelet may start it again
  pod unlisted     the kubelet no longer lists the pod; nothing else is known
WAITS FOR has the missing proof. A device is given to the next container only after it.
`holdfast explain DEVICE` has more about one device.";

/// Filters of the grants.
#[derive(Debug, Clone, Default, Args)]
#[command(after_help = STATES)]
pub struct Options {
    /// Show the holder of this device: its id or a prefix of it, a PCI address, a node such as
    /// /dev/fuse, or its name on the host such as mlx5_2
    pub device: Option<String>,
    #[command(flatten)]
    filter: GrantFilter,
    /// The holders at this time: 2026-11-21T03:12:00Z, "2026-11-21 03:12" or 03:12 in local time,
    /// or 2h ago; as `history --device DEVICE --at TIME`
    #[arg(long, allow_hyphen_values = true, value_name = "TIME", conflicts_with = "watch")]
    at: Option<String>,
    #[command(flatten)]
    watch: Watch,
}

/// Prints the live grants from the running daemon, or from the ledger's files if none runs.
///
/// # Errors
/// When neither can be read, or when a filter matches no live grant, or none at the given time.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    if let Some(at) = &options.at {
        let (device, filter) = (options.device.clone(), options.filter.clone());
        return match history::held_at(global, device, filter, at)? {
            true => Ok(()),
            false => Err(Failed::reported(NO_HOLDER)),
        };
    }
    let is_question = options.device.is_some() || !options.filter.is_all();
    watch::repeat(options.watch, global.output, || {
        if is_question { filtered(global, options) } else { all_grants(global, options.watch) }
    })
}

fn all_grants(global: &Global, watch: Watch) -> Result<QueryResult, Failed> {
    let mut remarks = Vec::new();
    let asked: Result<Vec<Grant>, ControlError> =
        block_on(control_get(&global.run_dir, "/v1/grants"))?;
    let grants = match asked {
        Ok(grants) => grants,
        Err(error @ ControlError::Absent { .. }) => {
            let grants = source::files(global)?.grants;
            remarks.push(format!(
                "{error}; the answer is from the journal in `{}`",
                global.state_dir.display()
            ));
            grants
        }
        Err(error) => return Err(Failed::new(FAILURE, error)),
    };
    let processors = processors(global);
    let (unhealthy_devices, pending) =
        (unhealthy_devices(global), source::pending_releases(global));
    let table = |_: &_| {
        if grants.is_empty() {
            Text::of_line(format_args!("no container holds a device"))
        } else {
            table(&grants, &processors, &unhealthy_devices, &pending)
        }
    };
    let text = watch.format_document(
        global.output,
        &document::document(&grants, &processors, &unhealthy_devices, &pending),
        table,
    )?;
    Ok(QueryResult { text, remarks, end: Ok(()) })
}

/// The unhealthy devices, from the running daemon. Without a daemon there are no verdicts.
fn unhealthy_devices(global: &Global) -> UnhealthyDevices {
    let asked = block_on(control_get::<Vec<DeviceReport>>(&global.run_dir, "/v1/devices"));
    let devices = asked.ok().and_then(Result::ok).unwrap_or_default();
    // Include devices that no list has any longer and that have only a verdict.
    let reason = |device: DeviceReport| Some((DeviceId::new(&device.id), device.reason?));
    devices.into_iter().filter_map(reason).collect()
}

/// The exclusive CPUs of containers; empty if the daemon or the kubelet does not report them.
fn processors(global: &Global) -> Vec<Processors> {
    let asked = block_on(control_get::<Option<Vec<Processors>>>(&global.run_dir, "/v1/processors"));
    asked.ok().and_then(Result::ok).flatten().unwrap_or_default()
}

/// The document of `who` with a filter.
#[derive(Debug, Serialize)]
struct FilteredDocument<'a> {
    schema: u32,
    grants: Vec<Row<'a>>,
    /// If no live grant matches: the last one that did.
    last: Option<Row<'a>>,
}

fn filtered(global: &Global, options: &Options) -> Result<QueryResult, Failed> {
    let mut search = Search::new(
        options,
        options.device.as_deref().map(|text| source::device_query(global, text)),
    );
    let problem = source::read(global, |part| search.take(part))?.problem;
    let ids = search.wanted.as_ref().map(DeviceQuery::matches).transpose().map_err(|sentence| {
        let pod = search
            .pod
            .as_ref()
            .map(|pod| format!("; there is a pod of this name, see `holdfast who --pod {pod}`"))
            .unwrap_or_default();
        Failed::new(FAILURE, format_args!("{sentence}{pod}"))
    })?;
    let (held, last) = search.found();
    if held.is_empty() && last.is_none() {
        let known =
            search.resources.check(options.filter.resource.as_ref(), || source::offered(global));
        known.map_err(|sentence| Failed::new(FAILURE, sentence))?;
    }
    let (processors, unhealthy_devices, pending) = if held.is_empty() {
        Default::default()
    } else {
        (processors(global), unhealthy_devices(global), source::pending_releases(global))
    };
    let rows = held.iter().map(|grant| {
        row(grant, &processors).with_health(grant, &unhealthy_devices).with_pending(grant, &pending)
    });
    let answer = FilteredDocument {
        schema: 1,
        grants: rows.collect(),
        last: last.map(|grant| row(grant, &[])),
    };
    let text = options.watch.format_document(global.output, &answer, |_| {
        if held.is_empty() {
            no_holder(ids, &options.filter, last)
        } else {
            table(held.iter().copied(), &processors, &unhealthy_devices, &pending)
        }
    })?;
    let unread = problem.filter(|_| held.is_empty() && last.is_none());
    let remarks =
        unread.map(|problem| format!("holdfast: released grants cannot be read: {problem}"));
    let end = if held.is_empty() { Err(Failed::reported(NO_HOLDER)) } else { Ok(()) };
    Ok(QueryResult { text, remarks: remarks.into_iter().collect(), end })
}

/// Candidates for the answer from the ledger.
#[derive(Debug)]
struct Search {
    wanted: Option<DeviceQuery>,
    /// A pod that has the name that was given for the device.
    pod: Option<String>,
    resources: KnownResources,
    filter: GrantFilter,
    live: Vec<Grant>,
    released: Vec<Grant>,
}

impl Search {
    fn new(options: &Options, wanted: Option<DeviceQuery>) -> Self {
        let (pod, resources) = Default::default();
        Search {
            wanted,
            pod,
            resources,
            filter: options.filter.clone(),
            live: Vec::new(),
            released: Vec::new(),
        }
    }

    /// Adds one part of the ledger. Returns whether more is needed.
    fn take(&mut self, part: ExportLine) -> bool {
        self.resources.add(&part);
        let grant = match part {
            ExportLine::Grant(grant) => grant,
            ExportLine::Notes { names, .. } => {
                self.wanted
                    .iter_mut()
                    .for_each(|wanted| names.iter().for_each(|(key, id)| wanted.add(key, id)));
                return true;
            }
        };
        if !grant.is_live() && self.is_answered() {
            return false;
        }
        if let Some((wanted, pod)) = self
            .wanted
            .as_ref()
            .zip(grant.pod())
            .filter(|(wanted, pod)| is_named(pod, wanted.typed()))
        {
            self.pod = Some(
                pod.name.as_ref().map_or_else(|| wanted.typed().to_owned(), |_| pod.to_string()),
            );
        }
        let may_match = self.wanted.as_mut().is_none_or(|wanted| wanted.add_grant(&grant));
        if may_match && self.filter.fits(&grant) {
            if grant.is_live() { &mut self.live } else { &mut self.released }.push(*grant);
        }
        true
    }

    /// Whether the rest of the history cannot change the answer. It follows the live grants, newest
    /// release first.
    fn is_answered(&self) -> bool {
        let is_certain = self.wanted.as_ref().is_none_or(DeviceQuery::is_certain);
        is_certain
            && (!self.live.is_empty() || self.released.iter().any(|grant| self.is_match(grant)))
    }

    fn is_match(&self, grant: &Grant) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.matches_grant(grant))
    }

    /// The live grants that match; if there are none, the last released one.
    fn found(&self) -> (Vec<&Grant>, Option<&Grant>) {
        let held: Vec<&Grant> = self.live.iter().filter(|grant| self.is_match(grant)).collect();
        let last = self.released.iter().find(|grant| held.is_empty() && self.is_match(grant));
        (held, last)
    }
}

/// The message if no live grant matches.
fn no_holder(ids: Option<&BTreeSet<DeviceId>>, filter: &GrantFilter, last: Option<&Grant>) -> Text {
    let device = ids.map_or("a device".to_owned(), |ids| {
        ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
    });
    let of = filter.resource.as_ref().map(|resource| format!(" of {resource}")).unwrap_or_default();
    let who = match (&filter.claim, &filter.pod) {
        (Some(claim), None) => format!("no claim {claim} holds"),
        (Some(claim), Some(pod)) => format!("no claim {claim} of pod {pod} holds"),
        (None, Some(pod)) => format!("no pod {pod} holds"),
        (None, None) => "no container holds".to_owned(),
    };
    let mut text = Text::of_line(format_args!("{who} {device}{of}"));
    match last.map(|grant| (grant, &grant.state)) {
        Some((grant, GrantState::Released { released_at, released_by, .. })) => {
            text.line(format_args!("  last held by  {}", holder_in_words(grant)));
            text.line(format_args!("  devices       {} ({})", devices(grant), grant.resource));
            text.line(format_args!("  from          {}", grant.granted_at.to_seconds()));
            text.line(format_args!("  until         {}", released_at.to_seconds()));
            text.line(format_args!("  proof         {}", proof_in_words(released_by)));
        }
        _ => text.line(format_args!("  nor did any before, as far as the history goes back")),
    }
    text
}
