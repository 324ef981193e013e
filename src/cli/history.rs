//! `holdfast history`: every grant, held and given back, and who held what at a given time.

use super::document::{Row, history_table, holder_in_words, row};
use super::exit::{FAILURE, Failed, USAGE};
use super::query::{Wanted, Whose};
use super::table::Table;
use super::when;
use super::{Global, show, source};
use crate::domain::{AllocId, Arrange, ContainerEdits, DeviceId, Gather, Grant, GrantState, Incident, Timestamp, Verdicts};
use crate::store::Told;
use clap::Args;
use jiff::tz::TimeZone;
use serde::Serialize;
use std::collections::BTreeSet;

/// What is asked.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Only of this device: its id or the beginning of it, a PCI address, or a node such as /dev/fuse
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    #[command(flatten)]
    whose: Whose,
    /// Only what was held at this time: 2026-11-21T03:12:00Z, "2026-11-21 03:12" or 03:12 by the machine's clock, or 2h ago
    #[arg(long, value_name = "TIME", conflicts_with = "since")]
    at: Option<String>,
    /// Only what was held at this time or later
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
}

/// The document of `history -o json`, the newest grant last.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    at: Option<Timestamp>,
    since: Option<Timestamp>,
    /// The earliest release that is remembered: of what was given back before, nothing is known.
    remembers_from: Option<Timestamp>,
    /// Why what was given back cannot be read.
    problem: Option<&'a str>,
    grants: Vec<Row<'a>>,
    /// With `--device`: its failures in that time, the newest last.
    failures: Option<Vec<Failure>>,
}

/// A failure of a device, and who held it then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Failure {
    device: DeviceId,
    #[serde(flatten)]
    incident: Incident,
}

/// When a grant must have been held.
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

    /// A grant holds its devices from the answer to Allocate until the proof that they were given back.
    fn fits(self, grant: &Grant) -> bool {
        match self {
            Time::Ever => true,
            Time::At(at) => grant.granted_at <= at && released_at(grant).is_none_or(|released| at < released),
            Time::Since(since) => released_at(grant).is_none_or(|released| since < released),
        }
    }

    /// Whether a failure was, or still is.
    fn fits_failure(self, incident: &Incident) -> bool {
        match self {
            Time::Ever => true,
            Time::At(at) => incident.at <= at && incident.until.is_none_or(|until| at < until),
            Time::Since(since) => incident.until.is_none_or(|until| since < until),
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
    if let GrantState::Released { released_at, .. } = &grant.state { Some(*released_at) } else { None }
}

/// Prints the history, as the running daemon knows it, else as the files tell.
///
/// # Errors
/// When neither can be read, or what is asked names no time or no device.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let time = Time::of(options, when::now(), &TimeZone::system()).map_err(|sentence| Failed::new(USAGE, sentence))?;
    let mut wanted = options.device.as_deref().map(Wanted::new);
    let (mut grants, mut remembers_from, mut verdicts) = (Vec::new(), None, Verdicts::new());
    let problem = source::read(global, |told| {
        match told {
            Told::Notes { names, verdicts: told, .. } => {
                if let Some(wanted) = &mut wanted {
                    names.iter().for_each(|(key, id)| wanted.see(key, id));
                    told.keys().for_each(|id| wanted.see("", id));
                }
                verdicts = told;
            }
            Told::Grant(mut grant) => {
                if let Some(released) = released_at(&grant) {
                    remembers_from = Some(remembers_from.map_or(released, |earliest: Timestamp| earliest.min(released)));
                }
                let could_be = wanted.as_mut().is_none_or(|wanted| wanted.sees(&grant));
                if could_be && options.whose.fits(&grant) && time.fits(&grant) {
                    // The largest part of it. A node that was asked for is looked for in it.
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
        let ids = wanted.decide().map_err(|sentence| Failed::new(FAILURE, sentence))?;
        grants.retain(|grant| wanted.is_of(grant));
        failures = Some(failures_of(ids, &verdicts, time));
    }
    grants.arrange_by(|a, b| (a.granted_at, &a.alloc_id).cmp(&(b.granted_at, &b.alloc_id)));
    let document = Document {
        schema: 1,
        at: time.at(),
        since: time.since(),
        remembers_from,
        problem: problem.as_deref(),
        grants: grants.iter().map(|grant| row(grant, &[])).collect(),
        failures,
    };
    show(global.output, &document, |document| {
        let held = if grants.is_empty() { nothing(time) } else { history_table(&grants).to_string() };
        held + &document.failures.as_deref().map(|failures| failures_table(failures, &grants)).unwrap_or_default()
    })?;
    for remark in remarks(time, remembers_from, problem.as_deref(), &grants) {
        super::eprintln(format_args!("holdfast: {remark}"));
    }
    Ok(())
}

/// The failures of these devices; a share fails with its device.
fn failures_of(ids: &BTreeSet<DeviceId>, verdicts: &Verdicts, time: Time) -> Vec<Failure> {
    let devices: BTreeSet<DeviceId> =
        ids.iter().map(|id| if verdicts.contains_key(id) { None } else { id.shared() }.unwrap_or_else(|| id.clone())).gather();
    let of = |device: &DeviceId| {
        let incidents = verdicts.get(device).into_iter().flat_map(|verdict| &verdict.incidents);
        let told = incidents.filter(|incident| time.fits_failure(incident));
        told.map(|incident| Failure { device: device.clone(), incident: incident.clone() }).collect::<Vec<_>>()
    };
    let mut failures: Vec<Failure> = devices.iter().flat_map(of).collect();
    failures.arrange_by_key(|failure| failure.incident.at);
    failures
}

/// When it failed, and who held it then: the pod where its grant is known, else the grant's name.
fn failures_table(failures: &[Failure], grants: &[Grant]) -> String {
    if failures.is_empty() {
        return String::new();
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
    format!("\n{table}")
}

fn nothing(time: Time) -> String {
    match time {
        Time::Ever => "the ledger knows no such grant\n".into(),
        Time::At(at) => format!("nobody is known to have held it at {}\n", at.to_seconds()),
        Time::Since(since) => format!("nobody is known to have held it since {}\n", since.to_seconds()),
    }
}

/// What somebody must know who believes the answer.
fn remarks(time: Time, remembers_from: Option<Timestamp>, problem: Option<&str>, grants: &[Grant]) -> Vec<String> {
    let mut remarks: Vec<String> = problem.iter().map(|problem| format!("what was given back is missing here: {problem}")).collect();
    let asked = time.at().or(time.since());
    if let (Some(asked), Some(earliest)) = (asked, remembers_from.filter(|_| problem.is_none()))
        && asked < earliest
    {
        let (asked, earliest) = (asked.to_seconds(), earliest.to_seconds());
        remarks.push(format!("the history begins at {earliest}: who gave a device back between {asked} and then may be forgotten"));
    }
    for grant in grants {
        if let GrantState::Suspect { suspect_at, .. } = &grant.state {
            let (id, suspect_at) = (&grant.alloc_id, suspect_at.to_seconds());
            remarks.push(format!(
                "grant {id} is suspect: since {suspect_at} the kubelet does not list its pod, and nothing proves yet that it is gone"
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
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(granted_at),
            version: "0.1.0".into(),
            state,
        }
    }

    fn released(at: u64) -> GrantState {
        let released_by = "pod_gone".into();
        GrantState::Released { pod: None, container: None, bound_at: None, released_at: Timestamp(at), released_by }
    }

    #[test]
    fn a_grant_holds_from_the_answer_until_the_proof() {
        let (live, gone) = (grant(10, GrantState::Granted), grant(10, released(20)));
        let at = |at, grant| Time::At(Timestamp(at)).fits(grant);
        assert_eq!([9, 10, 19, 20].map(|moment| at(moment, &live)), [false, true, true, true]);
        assert_eq!([9, 10, 19, 20].map(|moment| at(moment, &gone)), [false, true, true, false]);
        let since = |at, grant| Time::Since(Timestamp(at)).fits(grant);
        assert_eq!([0, 19, 20].map(|moment| since(moment, &live)), [true, true, true]);
        assert_eq!([0, 19, 20].map(|moment| since(moment, &gone)), [true, true, false]);
    }

    #[test]
    fn the_document_is_what_is_promised() {
        let at = Some(Timestamp(1_700_000_000_000));
        let document = Document { schema: 1, at, since: None, remembers_from: None, problem: None, grants: Vec::new(), failures: None };
        let wanted =
            r#"{"schema":1,"at":"2023-11-14T22:13:20.000Z","since":null,"remembers_from":null,"problem":null,"grants":[],"failures":null}"#;
        assert_eq!(serde_json::to_string(&document).unwrap(), wanted);
    }

    #[test]
    fn a_device_has_failed_in_somebodys_hands() {
        use crate::domain::{Reason, Verdict};
        let incident = |at, until: Option<u64>| Incident {
            reason: Reason::Xid,
            detail: "Xid 79".into(),
            at: Timestamp(at),
            until: until.map(Timestamp),
            held_by: vec![AllocId::new("a-1"), AllocId::new("a-9")],
        };
        let verdict = Verdict { incidents: vec![incident(10_000, Some(20_000)), incident(30_000, None)], ..Verdict::default() };
        let verdicts = Verdicts::from([(DeviceId::new("GPU-a"), verdict)]);
        let failures = |time| failures_of(&BTreeSet::from([DeviceId::new("GPU-a::1")]), &verdicts, time);
        assert_eq!(
            [Time::Ever, Time::At(Timestamp(15_000)), Time::At(Timestamp(25_000)), Time::Since(Timestamp(25_000))]
                .map(|time| failures(time).len()),
            [2, 1, 0, 1]
        );
        let pod = PodRef { uid: "u".into(), namespace: Some("default".into()), name: Some("train".into()) };
        let mut held = grant(1, GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(2) });
        held.alloc_id = AllocId::new("a-1");
        let wanted = "
FAILED                HEALTHY AGAIN         WHY           HELD BY
1970-01-01T00:00:10Z  1970-01-01T00:00:20Z  xid (Xid 79)  default/train, container main; a-9
1970-01-01T00:00:30Z  -                     xid (Xid 79)  default/train, container main; a-9
";
        assert_eq!(failures_table(&failures(Time::Ever), &[held]), wanted);
        let json = serde_json::to_value(&failures(Time::Ever)[0]).unwrap();
        assert_eq!((&json["device"], &json["reason"], &json["held_by"][1]), (&"GPU-a".into(), &"xid".into(), &"a-9".into()));
    }

    #[test]
    fn what_makes_an_answer_uncertain_is_said() {
        let earliest = Some(Timestamp(100_000));
        assert!(remarks(Time::Ever, earliest, None, &[]).is_empty());
        assert!(remarks(Time::At(Timestamp(100_000)), earliest, None, &[]).is_empty());
        let told = remarks(Time::At(Timestamp(99_000)), earliest, None, &[]);
        assert!(told[0].starts_with("the history begins at 1970-01-01T00:01:40Z"), "{told:?}");
        assert!(remarks(Time::Ever, earliest, Some("no"), &[])[0].contains("missing here: no"));
        let pod = PodRef { uid: "u".into(), namespace: None, name: None };
        let state = GrantState::Suspect { pod, container: "main".into(), bound_at: Timestamp(1), suspect_at: Timestamp(5_000) };
        assert!(remarks(Time::Ever, None, None, &[grant(1, state)])[0].contains("suspect: since 1970-01-01T00:00:05Z"));
    }
}
