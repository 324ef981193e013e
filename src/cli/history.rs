//! `holdfast history`: every grant, held or released, and who held which device at a given time.

use super::document::{Row, history_table, holder_in_words, row};
use super::query::{GrantFilter, KnownResources};
use super::source;
use super::when;
use crate::admin::LedgerEnd;
use crate::console::exit::{FAILURE, Failed, USAGE};
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, Output, show};
use crate::domain::{
    AllocId, ContainerEdits, DeviceId, Grant, GrantState, Incident, Timestamp, Verdicts,
};
use crate::store::ExportLine;
use clap::Args;
use jiff::tz::TimeZone;
use serde::Serialize;
use std::collections::BTreeSet;

/// Filters of the history.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Show only this device: its id or a prefix of it, a PCI address, a node such as /dev/fuse, or
    /// its name on the host such as mlx5_2
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    #[command(flatten)]
    filter: GrantFilter,
    /// Show only grants held at this time: 2026-11-21T03:12:00Z, "2026-11-21 03:12" or 03:12 in
    /// local time, or 2h ago
    #[arg(long, allow_hyphen_values = true, value_name = "TIME", conflicts_with = "since")]
    at: Option<String>,
    /// Show only grants held at this time or later
    #[arg(long, allow_hyphen_values = true, value_name = "TIME")]
    since: Option<String>,
}

/// The document of `history -o json`, the newest grant last.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    at: Option<Timestamp>,
    since: Option<Timestamp>,
    /// Time of the latest release that was removed because of its age or the number of releases.
    /// The history is complete after it. Null if none was removed.
    remembers_from: Option<Timestamp>,
    /// Why released grants cannot be read.
    problem: Option<&'a str>,
    grants: Vec<Row<'a>>,
    /// With `--device`: its failures in the selected time, the newest last.
    failures: Option<Vec<Failure>>,
}

/// A failure of a device, with its holders at that time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Failure {
    device: DeviceId,
    #[serde(flatten)]
    incident: Incident,
}

/// The time filter: when a grant must have been held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Time {
    Ever,
    At(Timestamp),
    Since(Timestamp),
}

impl Time {
    fn of(options: &Options, now: Timestamp, zone: &TimeZone) -> Result<Self, String> {
        let parse = |text: &String| when::parse(text, now, zone);
        Ok(match (&options.at, &options.since) {
            (Some(at), _) => Time::At(parse(at)?),
            (_, Some(since)) => Time::Since(parse(since)?),
            (None, None) => Time::Ever,
        })
    }

    /// Whether the grant was held then: from the answer to Allocate until the proof of its release.
    fn fits(self, grant: &Grant) -> bool {
        match self {
            Time::Ever => true,
            Time::At(at) => {
                grant.granted_at <= at && released_at(grant).is_none_or(|released| at < released)
            }
            Time::Since(since) => released_at(grant).is_none_or(|released| since < released),
        }
    }

    /// Whether the failure existed at that time; one without an end still exists.
    fn fits_failure(self, incident: &Incident) -> bool {
        match self {
            Time::Ever => true,
            Time::At(at) => incident.at <= at && incident.until.is_none_or(|until| at < until),
            Time::Since(since) => incident.until.is_none_or(|until| since < until),
        }
    }

    /// The selected time in words; `None` if there is no filter.
    fn in_words(self) -> Option<String> {
        match self {
            Time::Ever => None,
            Time::At(at) => Some(format!("at {}", at.to_seconds())),
            Time::Since(since) => Some(format!("at {} or later", since.to_seconds())),
        }
    }

    fn at(self) -> Option<Timestamp> {
        if let Time::At(at) = self { Some(at) } else { None }
    }

    fn since(self) -> Option<Timestamp> {
        if let Time::Since(since) = self { Some(since) } else { None }
    }
}

fn released_at(grant: &Grant) -> Option<Timestamp> {
    if let GrantState::Released { released_at, .. } = &grant.state {
        Some(*released_at)
    } else {
        None
    }
}

/// Prints the history from the running daemon, or from the ledger's files if none runs.
///
/// # Errors
/// When neither can be read, or when an option names no valid time or no known device.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    answer(global, options).map(|_any| ())
}

/// Prints the grants that were held at a time. Returns whether there are any.
///
/// # Errors
/// As [`run`].
pub(super) fn held_at(
    global: &Global,
    device: Option<String>,
    filter: GrantFilter,
    at: &str,
) -> Result<bool, Failed> {
    answer(global, &Options { device, filter, at: Some(at.to_owned()), since: None })
}

fn answer(global: &Global, options: &Options) -> Result<bool, Failed> {
    let time = Time::of(options, when::now(), &TimeZone::system())
        .map_err(|sentence| Failed::new(USAGE, sentence))?;
    let mut wanted = options.device.as_deref().map(|text| source::device_query(global, text));
    let (mut grants, mut verdicts) = (Vec::new(), Verdicts::new());
    let mut resources = KnownResources::default();
    let LedgerEnd { problem, forgotten_until } = source::read(global, |part| {
        resources.add(&part);
        match part {
            ExportLine::Notes { names, verdicts: part, .. } => {
                if let Some(wanted) = &mut wanted {
                    names.iter().for_each(|(key, id)| wanted.add(key, id));
                    part.keys().for_each(|id| wanted.add("", id));
                }
                verdicts = part;
            }
            ExportLine::Grant(mut grant) => {
                let may_match = wanted.as_mut().is_none_or(|wanted| wanted.add_grant(&grant));
                if may_match && options.filter.fits(&grant) && time.fits(&grant) {
                    // `edits` is the largest part of a grant; it is needed only to match a device
                    // node.
                    if wanted.is_none() {
                        grant.edits = ContainerEdits::default();
                    }
                    grants.push(*grant);
                }
            }
        }
        true
    })?;
    let mut failures = None;
    if let Some(wanted) = &wanted {
        let ids = wanted.matches().map_err(|sentence| Failed::new(FAILURE, sentence))?;
        grants.retain(|grant| wanted.matches_grant(grant));
        failures = Some(failures_of(ids, &verdicts, time));
    }
    if grants.is_empty() {
        let known = resources.check(options.filter.resource.as_ref(), || source::offered(global));
        known.map_err(|sentence| Failed::new(FAILURE, sentence))?;
    }
    grants.sort_by(|a, b| (a.granted_at, &a.alloc_id).cmp(&(b.granted_at, &b.alloc_id)));
    let document = Document {
        schema: 1,
        at: time.at(),
        since: time.since(),
        remembers_from: forgotten_until,
        problem: problem.as_deref(),
        grants: grants.iter().map(|grant| row(grant, &[])).collect(),
        failures,
    };
    show(global.output, &document, |document| {
        let mut held = if grants.is_empty() {
            no_grants(options, time)
        } else {
            history_table(&grants).into()
        };
        held += document
            .failures
            .as_deref()
            .map(|failures| failures_table(failures, &grants))
            .unwrap_or_default();
        held
    })?;
    // Print the time as it was understood: a short form or local time may be ambiguous. The JSON
    // document contains it anyway.
    if global.output != Output::Json && !grants.is_empty() {
        time.in_words().iter().for_each(|time| {
            crate::console::eprintln(format_args!("holdfast: grants held {time}"));
        });
    }
    for remark in remarks(time, forgotten_until, problem.as_deref(), &grants) {
        crate::console::eprintln(format_args!("holdfast: {remark}"));
    }
    Ok(!grants.is_empty())
}

/// The failures of these devices. A share has the failures of its device.
fn failures_of(ids: &BTreeSet<DeviceId>, verdicts: &Verdicts, time: Time) -> Vec<Failure> {
    let devices: BTreeSet<DeviceId> = ids
        .iter()
        .map(|id| {
            if verdicts.contains_key(id) { None } else { id.shared() }.unwrap_or_else(|| id.clone())
        })
        .collect();
    let of = |device: &DeviceId| {
        let incidents = verdicts.get(device).into_iter().flat_map(|verdict| &verdict.incidents);
        let matching = incidents.filter(|incident| time.fits_failure(incident));
        matching
            .map(|incident| Failure { device: device.clone(), incident: incident.clone() })
            .collect::<Vec<_>>()
    };
    let mut failures: Vec<Failure> = devices.iter().flat_map(of).collect();
    failures.sort_by_key(|failure| failure.incident.at);
    failures
}

/// Each failure with its holders: the pod if its grant is known, otherwise the grant's id.
fn failures_table(failures: &[Failure], grants: &[Grant]) -> Text {
    if failures.is_empty() {
        return Text::default();
    }
    let holder = |alloc_id: &AllocId| {
        let grant = grants.iter().find(|grant| grant.alloc_id == *alloc_id);
        grant.map_or_else(|| alloc_id.to_string(), holder_in_words)
    };
    let mut table = Table::new(&["FAILED", "HEALTHY AGAIN", "WHY", "HELD BY"]);
    for Failure { incident, .. } in failures {
        let until = incident.until.map(Timestamp::to_seconds).unwrap_or_default();
        let held_by = incident.held_by.iter().map(holder).collect::<Vec<_>>().join("; ");
        table.row([incident.at.to_seconds(), until, incident.to_string(), held_by]);
    }
    let mut text = Text::default();
    text.end_line();
    text += table.into();
    text
}

/// The message for an empty result; it names the pod, the device, the resource and the time.
fn no_grants(options: &Options, time: Time) -> Text {
    let GrantFilter { pod, resource, claim } = &options.filter;
    let who = match (claim, pod) {
        (Some(claim), None) => format!("no claim {claim}"),
        (Some(claim), Some(pod)) => format!("no claim {claim} of pod {pod}"),
        (None, Some(pod)) => format!("no pod {pod}"),
        (None, None) => "no container".to_owned(),
    };
    let what = options
        .device
        .as_ref()
        .map_or_else(|| "a device".to_owned(), |device| format!("`{}`", device.trim()));
    let of = resource.as_ref().map(|resource| format!(" of {resource}")).unwrap_or_default();
    let when = time.in_words().map(|time| format!(" {time}")).unwrap_or_default();
    Text::of_line(format_args!("{who} is known to have held {what}{of}{when}"))
}

/// Limitations of the answer: released grants that are missing or forgotten, and suspect grants.
fn remarks(
    time: Time,
    forgotten_until: Option<Timestamp>,
    problem: Option<&str>,
    grants: &[Grant],
) -> Vec<String> {
    let mut remarks: Vec<String> = problem
        .iter()
        .map(|problem| format!("some released grants are missing here: {problem}"))
        .collect();
    if let (Some(asked), Some(until)) = (time.at().or(time.since()), forgotten_until)
        && asked < until
    {
        let (asked, until) = (asked.to_seconds(), until.to_seconds());
        remarks.push(format!(
            "the history begins at {until} (limited by `history_age` and `history_size` in [ledger]); grants released between \
             {asked} and then may be missing"
        ));
    }
    for grant in grants {
        if let GrantState::Suspect { suspect_at, .. } = &grant.state {
            let (holder, suspect_at) = (holder_in_words(grant), suspect_at.to_seconds());
            remarks.push(format!(
                "{holder}, is suspect: the kubelet has not listed the pod since {suspect_at}, but \
                 its end is not proven yet"
            ));
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{AllocId, PodRef};

    fn grant(granted_at: u64, state: GrantState) -> Grant {
        Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(granted_at),
            version: "0.1.0".into(),
            state,
        }
    }

    fn released(at: u64) -> GrantState {
        let released_by = "pod_gone".into();
        GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(at),
            other_pods: Vec::new(),
            released_by,
        }
    }

    #[test]
    fn a_grant_holds_from_the_answer_until_the_proof() {
        let (live, ended) = (grant(10, GrantState::Granted), grant(10, released(20)));
        let at = |at, grant| Time::At(Timestamp(at)).fits(grant);
        assert_eq!([9, 10, 19, 20].map(|time| at(time, &live)), [false, true, true, true]);
        assert_eq!([9, 10, 19, 20].map(|time| at(time, &ended)), [false, true, true, false]);
        let since = |at, grant| Time::Since(Timestamp(at)).fits(grant);
        assert_eq!([0, 19, 20].map(|time| since(time, &live)), [true, true, true]);
        assert_eq!([0, 19, 20].map(|time| since(time, &ended)), [true, true, false]);
    }

    #[test]
    fn the_document_is_what_is_promised() {
        let at = Some(Timestamp(1_700_000_000_000));
        let document = Document {
            schema: 1,
            at,
            since: None,
            remembers_from: None,
            problem: None,
            grants: Vec::new(),
            failures: None,
        };
        let wanted = r#"{"schema":1,"at":"2023-11-14T22:13:20.000Z","since":null,"remembers_from":null,"problem":null,"grants":[],"failures":null}"#;
        assert_eq!(serde_json::to_string(&document).unwrap(), wanted);
    }

    #[test]
    fn a_failure_names_the_holders() {
        use crate::domain::{Reason, Verdict};
        let incident = |at, until: Option<u64>| Incident {
            reason: Reason::Xid,
            detail: "Xid 79".into(),
            at: Timestamp(at),
            until: until.map(Timestamp),
            held_by: vec![AllocId::new("a-1"), AllocId::new("a-9")],
        };
        let verdict = Verdict {
            incidents: vec![incident(10_000, Some(20_000)), incident(30_000, None)],
            ..Verdict::default()
        };
        let verdicts = Verdicts::from([(DeviceId::new("GPU-a"), verdict)]);
        let failures =
            |time| failures_of(&BTreeSet::from([DeviceId::new("GPU-a::1")]), &verdicts, time);
        assert_eq!(
            [
                Time::Ever,
                Time::At(Timestamp(15_000)),
                Time::At(Timestamp(25_000)),
                Time::Since(Timestamp(25_000))
            ]
            .map(|time| failures(time).len()),
            [2, 1, 0, 1]
        );
        let pod = PodRef {
            uid: "u".into(),
            namespace: Some("default".into()),
            name: Some("train".into()),
        };
        let mut held =
            grant(1, GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(2) });
        held.alloc_id = AllocId::new("a-1");
        let wanted = "
FAILED                HEALTHY AGAIN         WHY           HELD BY
1970-01-01T00:00:10Z  1970-01-01T00:00:20Z  xid (Xid 79)  default/train, container main; a-9
1970-01-01T00:00:30Z  -                     xid (Xid 79)  default/train, container main; a-9
";
        assert_eq!(failures_table(&failures(Time::Ever), &[held]), wanted);
        let json = serde_json::to_value(&failures(Time::Ever)[0]).unwrap();
        assert_eq!(
            (&json["device"], &json["reason"], &json["held_by"][1]),
            (&"GPU-a".into(), &"xid".into(), &"a-9".into())
        );
    }

    #[test]
    fn limits_of_the_answer_are_remarks() {
        let forgotten = Some(Timestamp(100_000));
        assert!(remarks(Time::Ever, forgotten, None, &[]).is_empty());
        assert!(remarks(Time::At(Timestamp(100_000)), forgotten, None, &[]).is_empty());
        let found = remarks(Time::At(Timestamp(99_000)), forgotten, None, &[]);
        assert!(found[0].starts_with("the history begins at 1970-01-01T00:01:40Z"), "{found:?}");
        assert!(remarks(Time::Ever, forgotten, Some("no"), &[])[0].contains("missing here: no"));
        let pod =
            PodRef { uid: "u".into(), namespace: Some("ml".into()), name: Some("train-0".into()) };
        let state = GrantState::Suspect {
            pod,
            container: "main".into(),
            bound_at: Timestamp(1),
            suspect_at: Timestamp(5_000),
        };
        let found = remarks(Time::Ever, None, None, &[grant(1, state)]);
        assert!(
            found[0].starts_with(
                "ml/train-0, container main, is suspect: the kubelet has not listed the pod since \
                 1970-01-01T00:00:05Z"
            ),
            "{found:?}"
        );
    }

    #[test]
    fn an_empty_result_names_the_filter() {
        let at = Time::At(Timestamp(0));
        let asked = |device: Option<&str>, pod: Option<&str>, resource: Option<&str>| Options {
            device: device.map(Into::into),
            filter: GrantFilter {
                pod: pod.map(Into::into),
                resource: resource.map(|name| name.parse().unwrap()),
                claim: None,
            },
            ..Options::default()
        };
        for (options, time, wanted) in [
            (
                asked(None, None, None),
                at,
                "no container is known to have held a device at 1970-01-01T00:00:00Z\n",
            ),
            (
                asked(Some("18:00.0"), None, None),
                at,
                "no container is known to have held `18:00.0` at 1970-01-01T00:00:00Z\n",
            ),
            (
                asked(None, Some("ml/web"), Some("a/b")),
                Time::Ever,
                "no pod ml/web is known to have held a device of a/b\n",
            ),
            (
                asked(None, None, Some("a/b")),
                Time::Since(Timestamp(0)),
                "no container is known to have held a device of a/b at 1970-01-01T00:00:00Z or later\n",
            ),
        ] {
            assert_eq!(no_grants(&options, time), wanted);
        }
    }
}
