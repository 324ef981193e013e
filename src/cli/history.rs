//! `holdfast history`: every grant, held and given back, and who held what at a given time.

use super::document::{Row, history_table, row};
use super::exit::{FAILURE, Failed, USAGE};
use super::query::{Wanted, Whose};
use super::when;
use super::{Global, show, source};
use crate::domain::{ContainerEdits, Grant, GrantState, Timestamp};
use crate::store::Told;
use clap::Args;
use jiff::tz::TimeZone;
use serde::Serialize;

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
    let (mut grants, mut remembers_from) = (Vec::new(), None);
    let problem = source::read(global, |told| {
        match told {
            Told::Notes { names, .. } => wanted.iter_mut().for_each(|wanted| names.iter().for_each(|(key, id)| wanted.see(key, id))),
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
    if let Some(wanted) = &wanted {
        wanted.decide().map_err(|sentence| Failed::new(FAILURE, sentence))?;
        grants.retain(|grant| wanted.is_of(grant));
    }
    grants.sort_by(|a, b| (a.granted_at, &a.alloc_id).cmp(&(b.granted_at, &b.alloc_id)));
    let document = Document {
        schema: 1,
        at: time.at(),
        since: time.since(),
        remembers_from,
        problem: problem.as_deref(),
        grants: grants.iter().map(|grant| row(grant, &[])).collect(),
    };
    show(global.output, &document, |_| if grants.is_empty() { nothing(time) } else { history_table(&grants) })?;
    for remark in remarks(time, remembers_from, problem.as_deref(), &grants) {
        super::eprintln(format_args!("holdfast: {remark}"));
    }
    Ok(())
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
        let document = Document { schema: 1, at, since: None, remembers_from: None, problem: None, grants: Vec::new() };
        let wanted = r#"{"schema":1,"at":"2023-11-14T22:13:20.000Z","since":null,"remembers_from":null,"problem":null,"grants":[]}"#;
        assert_eq!(serde_json::to_string(&document).unwrap(), wanted);
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
