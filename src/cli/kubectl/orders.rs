//! Which nodes get an order about a device. Pure.
//!
//! A name such as `mlx5_2` or a PCI address is a device on many nodes. Without a selection of nodes
//! an order is sent only if exactly one device is meant.

use super::replies::{Merged, text};
use std::collections::BTreeSet;

/// How many nodes an error names.
const NAMES_MAX: usize = 4;

/// The arguments of `holdfast` that look a device up on a node.
pub(super) fn lookup(device: &str) -> Vec<String> {
    ["device", "show", "--output=json", "--", device].map(str::to_owned).into()
}

/// The nodes that get the order, from the replies to [`lookup`].
///
/// # Errors
/// One sentence, when no device is found, or when it is not certain which one is meant.
pub(super) fn choose(
    found: &Merged,
    device: &str,
    is_selection: bool,
) -> Result<BTreeSet<String>, String> {
    let devices = found.rows("devices");
    let nodes: BTreeSet<String> = devices.iter().map(|row| text(row, "node")).collect();
    let is_whole_id = devices.iter().all(|row| text(row, "id").eq_ignore_ascii_case(device));
    if nodes.is_empty() {
        return Err(match found.failed.first_key_value() {
            None => not_known(found),
            Some((node, why)) => format!(
                "no node that answered knows `{device}`; {} did not answer, such as {node}: {why}",
                found.failed.len()
            ),
        });
    }
    if is_selection {
        return Ok(nodes);
    }
    if nodes.len() > 1 {
        let some: Vec<&str> = nodes.iter().take(NAMES_MAX).map(String::as_str).collect();
        return Err(format!(
            "`{device}` is a device of {} nodes, such as {}; use its id, or choose the nodes with \
             `--nodes` or `--selector`",
            nodes.len(),
            some.join(", ")
        ));
    }
    if !is_whole_id && !found.failed.is_empty() {
        return Err(format!(
            "{} nodes did not answer, and `{device}` may be a device there too; use its whole id, \
             or choose the node with `--nodes`",
            found.failed.len()
        ));
    }
    Ok(nodes)
}

/// The sentence if no node knows the name, with the first suggestion of a node.
pub(super) fn not_known(merged: &Merged) -> String {
    let suggestion = |sentence: &String| {
        let begin = sentence.find("did you mean ")?;
        let end = begin + sentence.get(begin..)?.find('?')?;
        sentence.get(begin..=end).map(str::to_owned)
    };
    let suggestion = merged.unknown.values().find_map(suggestion);
    format!(
        "no node knows a device or resource of this name (nodes with an answer: {}); {}`kubectl \
         holdfast devices` lists the devices",
        merged.answered(),
        suggestion.map(|suggestion| suggestion + " ").unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::super::replies::Reply;
    use super::*;
    use serde_json::json;

    fn found(replies: &[(&str, Result<&str, bool>)]) -> Merged {
        let replies = replies.iter().map(|(node, reply)| {
            let reply = match reply {
                Ok(id) => Reply::Document(json!({"devices": [{"id": id}]}), Vec::new()),
                Err(true) => Reply::Unknown(
                    "the ledger knows no device `x`; did you mean `GPU-a`? see `y`".into(),
                ),
                Err(false) => Reply::Failed("late".into()),
            };
            ((*node).to_owned(), reply)
        });
        Merged::of(replies.collect(), &["devices"])
    }

    #[test]
    fn an_order_is_sent_only_if_it_is_certain_which_device_is_meant() {
        let (unknown, late) = (Err(true), Err(false));
        let one = found(&[("a", unknown), ("b", Ok("GPU-b"))]);
        let same = found(&[("a", Ok("GPU-a")), ("b", Ok("GPU-b"))]);
        let partial = found(&[("a", late), ("b", Ok("GPU-b"))]);
        let b = Ok(BTreeSet::from(["b".to_owned()]));
        assert_eq!(choose(&one, "b", false), b);
        assert_eq!(choose(&partial, "GPU-b", false), b, "the whole id");
        assert_eq!(choose(&partial, "18:00.0", true), b, "chosen nodes");
        let sentence = choose(&partial, "18:00.0", false).unwrap_err();
        assert!(sentence.starts_with("1 nodes did not answer"), "{sentence}");
        let sentence = choose(&same, "18:00.0", false).unwrap_err();
        assert!(sentence.contains("a device of 2 nodes, such as a, b; "), "{sentence}");
        assert_eq!(choose(&same, "18:00.0", true).unwrap().len(), 2);
        let sentence = choose(&found(&[("a", unknown)]), "x", false).unwrap_err();
        assert!(sentence.contains("; did you mean `GPU-a`? `kubectl holdfast"), "{sentence}");
        let sentence = choose(&found(&[("a", unknown), ("c", late)]), "x", true).unwrap_err();
        assert!(sentence.ends_with("1 did not answer, such as c: late"), "{sentence}");
    }
}
