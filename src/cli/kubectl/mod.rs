//! `kubectl holdfast` (also `holdfast kubectl`): the verbs of one node, on all or selected nodes of
//! a cluster. It runs on an operator's workstation.
//!
//! ```text
//! kubectl proxy ◀─ unix socket ─ list of pods and nodes; then, 32 nodes at a time, exec of
//!   │                            `holdfast VERB -o json` in the daemon's container
//!   └─▶ API server ─▶ kubelet ─▶ container      (the rights: get and create of pods/exec)
//! ```
//!
//! The daemon itself serves nothing more: the answers come from its control socket, and the API
//! server decides who may ask.

mod bridge;
mod exec;
mod options;
mod orders;
mod replies;
mod tables;
mod targets;

use self::bridge::{Bridge, encoded};
pub use self::options::Options;
use self::options::{Nodes, Verb};
use self::replies::{LISTS_OF_GRANTS, Merged, Reply};
use self::targets::{Pod, Targets};
use super::when;
use crate::console::exit::{FAILURE, FINDINGS, Failed, NO_HOLDER, PARTIAL, USAGE};
use crate::console::progress::Progress;
use crate::console::screen::Screen;
use crate::console::text::Text;
use crate::console::{Global, Output, block_on, eprintln, json, print};
use futures_util::{StreamExt as _, stream};
use jiff::tz::TimeZone;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

/// How many nodes are asked at a time. Each costs the API server a connection to a kubelet.
const PARALLEL: usize = 32;
/// How many names a remark has. The document of `-o json` has all.
const NAMES_MAX: usize = 8;

/// Whole objects, as JSON.
const OBJECTS: &str = "application/json";
/// Only the metadata of objects: a node's status has 20 KB.
const METADATA: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

/// Asks the nodes and prints the merged answer.
///
/// # Errors
/// When the API server cannot be asked, when not all nodes answer ([`PARTIAL`]), and with the codes
/// of the same verb on one node.
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    block_on(async {
        let mut interrupted = signal(SignalKind::interrupt())?;
        let mut terminated = signal(SignalKind::terminate())?;
        // The end of this future also ends kubectl.
        tokio::select! {
            ended = answer(global, options) => ended,
            _ = interrupted.recv() => Err(Failed::new(FAILURE, "interrupted")),
            _ = terminated.recv() => Err(Failed::new(FAILURE, "terminated")),
        }
    })?
}

async fn answer(global: &Global, options: &Options) -> Result<(), Failed> {
    let Options { access, nodes, verb } = options;
    let words = verb.arguments(when::now(), &TimeZone::system());
    let words = words.map_err(|sentence| Failed::new(USAGE, sentence))?;
    let failed = |sentence| Failed::new(FAILURE, sentence);
    let bridge = Bridge::start(access).await.map_err(failed)?;
    let mut targets = find_targets(&bridge, nodes).await.map_err(failed)?;
    let deadline = nodes.deadline(verb);
    if let Verb::Cordon { device, .. } | Verb::Uncordon { device } = verb {
        let lookup = ask(&bridge, &targets.pods, &orders::lookup(device), deadline).await;
        let mut found = Merged::of(lookup, &["devices"]);
        found.failed.append(&mut targets.away);
        let chosen = orders::choose(&found, device, nodes.is_selection()).map_err(failed)?;
        targets.pods.retain(|(node, _)| chosen.contains(node));
        targets.away = found.failed;
        targets.without_daemon.clear();
    }
    let lists: &[&str] = match verb {
        Verb::Who { .. } | Verb::History { .. } => LISTS_OF_GRANTS,
        Verb::Devices { .. } => &["devices"],
        Verb::Explain { .. } => &["devices", "last"],
        Verb::Doctor { .. } => &["findings"],
        Verb::Status | Verb::Topology { .. } | Verb::Cordon { .. } | Verb::Uncordon { .. } => &[],
    };
    let mut merged = Merged::of(ask(&bridge, &targets.pods, &words, deadline).await, lists);
    merged.failed.append(&mut targets.away);
    merged.without_daemon = targets.without_daemon;
    if matches!(verb, Verb::Topology { .. }) {
        merged.devices_of_trees();
    }
    if let Some(wanted) = verb.wanted() {
        merged.keep_devices(wanted);
    }
    report(global, options, &merged, &words)
}

/// Reads which pods there are, and on which nodes.
async fn find_targets(bridge: &Bridge, options: &Nodes) -> Result<Targets, String> {
    let Nodes { nodes: named, selector, namespace, pod_selector, .. } = options;
    let path = format!(
        "/api/v1/namespaces/{}/pods?labelSelector={}",
        encoded(namespace),
        encoded(pod_selector)
    );
    let pods = bridge.list(&path, OBJECTS).await.and_then(targets::daemon_pods);
    let pods = pods.map_err(|why| {
        format!(
            "the daemon's pods cannot be listed: {why}; check the kubeconfig and your right to \
             list pods in the namespace `{namespace}` (docs/kubectl.md)"
        )
    })?;
    let mut path = "/api/v1/nodes".to_owned();
    if let Some(selector) = selector {
        path += &format!("?labelSelector={}", encoded(selector));
    }
    let nodes = match bridge.list(&path, METADATA).await.and_then(targets::node_names) {
        Ok(nodes) => Some(nodes),
        Err(why) if selector.is_some() => {
            return Err(format!("`--selector` needs the list of nodes: {why}"));
        }
        Err(why) => {
            eprintln(format_args!(
                "holdfast: nodes without a daemon are not known: the nodes cannot be listed: {why}"
            ));
            None
        }
    };
    let targets = targets::select(pods, nodes.as_ref(), named, namespace);
    if targets.pods.is_empty() && targets.away.is_empty() {
        return Err(format!(
            "no selected node has a pod with the labels {pod_selector} in namespace {namespace}; \
             `--namespace` and `--pod-selector` name the daemon's pods"
        ));
    }
    Ok(targets)
}

/// Runs a command on each node.
async fn ask(
    bridge: &Bridge,
    pods: &[(String, Pod)],
    words: &[String],
    deadline: Duration,
) -> BTreeMap<String, Reply> {
    let mut progress = Progress::new("asking nodes");
    let asked = pods.iter().map(|(node, pod)| async move {
        let command = ["holdfast"].map(str::to_owned).into_iter();
        let command: Vec<String> = command.chain(pod.paths.iter().chain(words).cloned()).collect();
        let reply = match timeout(deadline, exec::run(bridge, pod, &command)).await {
            Ok(Ok(ended)) => Reply::of(&ended),
            Ok(Err(reason)) => Reply::Failed(reason),
            Err(_) => {
                Reply::Failed(format!("no answer within {}", humantime::format_duration(deadline)))
            }
        };
        (node.clone(), reply)
    });
    let mut asked = stream::iter(asked).buffer_unordered(PARALLEL);
    let mut replies = BTreeMap::new();
    while let Some((node, reply)) = asked.next().await {
        replies.insert(node, reply);
        progress.at(replies.len(), Some(pods.len()));
    }
    replies
}

/// Prints the answer, then on standard error what is missing from it.
fn report(
    global: &Global,
    options: &Options,
    merged: &Merged,
    words: &[String],
) -> Result<(), Failed> {
    let is_known = !merged.nodes.is_empty();
    if global.output == Output::Json {
        print(&json(&merged.document())?)?;
    } else if is_known {
        print(&shown(&options.verb, merged))?;
        // A short form of a time may be ambiguous.
        for (option, word) in [("--at=", "at"), ("--since=", "since")] {
            if let Some(instant) = words.iter().find_map(|text| text.strip_prefix(option)) {
                eprintln(format_args!("holdfast: grants held {word} {instant}"));
            }
        }
    }
    for (remark, nodes) in &merged.remarks {
        eprintln(format_args!("holdfast: {}: {remark}", names(nodes.iter(), NAMES_MAX)));
    }
    if !merged.without_daemon.is_empty() {
        eprintln(format_args!(
            "holdfast: no daemon pod in namespace {} on {}; a daemon that runs as a service is \
             not reachable through the API server",
            options.nodes.namespace,
            names(merged.without_daemon.iter(), NAMES_MAX)
        ));
    }
    let mut reasons: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for (node, reason) in &merged.failed {
        reasons.entry(reason).or_default().push(node);
    }
    if !reasons.is_empty() {
        let (failed, all) = (merged.failed.len(), merged.failed.len() + merged.answered());
        eprintln(format_args!("holdfast: {failed} of {all} nodes did not answer:"));
    }
    for (reason, nodes) in reasons {
        eprintln(format_args!("  {}: {reason}", names(nodes.into_iter(), usize::MAX)));
    }
    end(&options.verb, merged)
}

/// The result for scripts. What is missing comes first: then nothing else is certain.
fn end(verb: &Verb, merged: &Merged) -> Result<(), Failed> {
    if merged.answered() == 0 {
        return Err(Failed::reported(FAILURE));
    }
    if !merged.failed.is_empty() {
        return Err(Failed::reported(PARTIAL));
    }
    if merged.nodes.is_empty() {
        return Err(Failed::new(FAILURE, orders::not_known(merged)));
    }
    match verb {
        Verb::Who { .. } if merged.rows("grants").is_empty() && is_question(verb) => {
            Err(Failed::reported(NO_HOLDER))
        }
        Verb::Doctor { .. } if merged.rows("findings").iter().any(tables::is_to_be_fixed) => {
            Err(Failed::reported(FINDINGS))
        }
        _ => Ok(()),
    }
}

/// Whether `who` has a filter: only then is "no holder" a code of its own, as on one node.
fn is_question(verb: &Verb) -> bool {
    matches!(verb, Verb::Who { device, filter, .. } if device.is_some() || !filter.is_all())
}

/// The answer as tables.
fn shown(verb: &Verb, merged: &Merged) -> Text {
    let rows = |list| merged.rows(list);
    let nodes = merged.nodes.len();
    let or_none = |table: crate::console::table::Table, none: &str| {
        if table.is_empty() {
            Text::of_line(format_args!("{none} (nodes with an answer: {nodes})"))
        } else {
            table.into()
        }
    };
    match verb {
        Verb::Who { at: None, .. } => {
            let mut text = or_none(tables::holders(rows("grants")), "no container holds it");
            if rows("grants").is_empty() && !rows("last").is_empty() {
                text.line(format_args!("last held by:"));
                text += tables::history(rows("last")).into();
            }
            text
        }
        Verb::Who { .. } | Verb::History { .. } => {
            let none = "no container is known to have held it";
            let mut text = or_none(tables::history(rows("grants")), none);
            if !rows("failures").is_empty() {
                text.end_line();
                text += tables::failures(rows("failures")).into();
            }
            text
        }
        Verb::Explain { .. } => {
            let mut text = tables::explained(rows("devices"), Screen::get());
            if !rows("last").is_empty() {
                text.line(format_args!("last held by:"));
                text += tables::history(rows("last")).into();
            }
            text
        }
        Verb::Status => tables::status(&merged.nodes, Screen::get()),
        Verb::Topology { .. } => or_none(tables::topology(rows("devices")), "no such device"),
        Verb::Devices { .. } => or_none(tables::devices(rows("devices")), "no such device"),
        Verb::Doctor { all } => or_none(tables::findings(rows("findings"), *all), "no problems"),
        Verb::Cordon { .. } => tables::orders(merged, "is cordoned"),
        Verb::Uncordon { .. } => tables::orders(merged, "is uncordoned"),
    }
}

/// Names of nodes, separated by commas, with the number of the rest.
fn names<'a>(nodes: impl ExactSizeIterator<Item = &'a String>, most: usize) -> String {
    let rest = nodes.len().saturating_sub(most);
    let mut text = nodes.take(most).map(String::as_str).collect::<Vec<_>>().join(", ");
    if rest > 0 {
        text += &format!(" and {rest} more");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn who(device: Option<&str>) -> Verb {
        Verb::Who {
            device: device.map(str::to_owned),
            filter: crate::cli::query::GrantFilter::default(),
            at: None,
        }
    }

    fn merged(replies: &[(&str, Reply)]) -> Merged {
        Merged::of(
            replies.iter().map(|(node, reply)| ((*node).to_owned(), reply.clone())).collect(),
            &["grants", "last", "findings"],
        )
    }

    fn code(verb: &Verb, replies: &[(&str, Reply)]) -> u8 {
        end(verb, &merged(replies)).map_or_else(|failed| failed.code, |()| 0)
    }

    #[test]
    fn a_missing_answer_decides_the_exit_code() {
        let document = |document| Reply::Document(document, Vec::new());
        let held = document(json!({"grants": [{}]}));
        let free = document(json!({"grants": []}));
        let late = Reply::Failed("late".into());
        let unknown = Reply::Unknown("the ledger knows no device `x`".into());
        let doctor = Verb::Doctor { all: false };
        let finding = |level: &str| document(json!({"findings": [{"level": level}]}));
        for (verb, replies, wanted) in [
            (who(Some("x")), vec![("a", held.clone()), ("b", unknown.clone())], 0),
            (who(Some("x")), vec![("a", held), ("b", late.clone())], PARTIAL),
            (who(Some("x")), vec![("a", free.clone()), ("b", unknown.clone())], NO_HOLDER),
            (who(Some("x")), vec![("a", unknown.clone())], FAILURE),
            (who(Some("x")), vec![("a", unknown), ("b", late.clone())], PARTIAL),
            (who(None), vec![("a", free)], 0),
            (who(None), vec![("a", late)], FAILURE),
            (Verb::Doctor { all: true }, vec![("a", finding("ok"))], 0),
            (Verb::Doctor { all: true }, vec![("a", finding("note"))], 0),
            (doctor, vec![("a", finding("warning"))], FINDINGS),
        ] {
            assert_eq!(code(&verb, &replies), wanted, "{verb:?}: {replies:?}");
        }
    }

    #[test]
    fn without_a_holder_the_last_one_is_shown() {
        let last = json!({"grants": [], "last": {"pod": {"namespace": "ml", "name": "old"}}});
        let shown = shown(&who(Some("x")), &merged(&[("a", Reply::Document(last, Vec::new()))]));
        assert!(
            shown.starts_with("no container holds it (nodes with an answer: 1)\nlast held by:\n")
                && shown.contains("a     -     -      ml         old"),
            "{shown}"
        );
    }

    #[test]
    fn many_names_are_cut_with_their_number() {
        let nodes = std::collections::BTreeSet::from(["a", "b", "c"].map(str::to_owned));
        assert_eq!(names(nodes.iter().collect::<Vec<_>>().into_iter(), 2), "a, b and 1 more");
        assert_eq!(names(nodes.iter(), usize::MAX), "a, b, c");
    }
}
