//! Which nodes get an order about a device. Pure.
//!
//! A name such as `mlx5_2` or a PCI address, also as a whole id, is a device on many nodes. Without
//! a selection of nodes an order is sent only if all nodes answer and exactly one has the device.

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
    let some: Vec<&str> = nodes.iter().take(NAMES_MAX).map(String::as_str).collect();
    if nodes.len() > 1 {
        return Err(format!(
            "`{device}` is a device of {} nodes, such as {}; use its id, or choose the nodes with \
             `--nodes` or `--selector`",
            nodes.len(),
            some.join(", ")
        ));
    }
    if let Some((node, why)) = found.failed.first_key_value() {
        let chosen = some.join(",");
        return Err(format!(
            "`{device}` is a device of {chosen}, and may be one of nodes without an answer ({}, such \
             as {node}: {why}); if {chosen} is meant, add `--nodes={chosen}`",
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
        assert_eq!(choose(&partial, "GPU-b", true), b, "chosen nodes");
        // Functions have their PCI address as their id, and the late node may have the same one.
        let sentence = choose(&partial, "GPU-b", false).unwrap_err();
        assert!(
            sentence.ends_with("such as a: late); if b is meant, add `--nodes=b`"),
            "{sentence}"
        );
        let sentence = choose(&same, "18:00.0", false).unwrap_err();
        assert!(sentence.contains("a device of 2 nodes, such as a, b; "), "{sentence}");
        assert_eq!(choose(&same, "18:00.0", true).unwrap().len(), 2);
        let sentence = choose(&found(&[("a", unknown)]), "x", false).unwrap_err();
        assert!(sentence.contains("; did you mean `GPU-a`? `kubectl holdfast"), "{sentence}");
        let sentence = choose(&found(&[("a", unknown), ("c", late)]), "x", true).unwrap_err();
        assert!(sentence.ends_with("1 did not answer, such as c: late"), "{sentence}");
    }
}
