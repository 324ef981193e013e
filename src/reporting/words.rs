//! The messages of Events and of the condition; pure.

use super::seen::{DeviceName, Failure, Pod};
use crate::domain::{Reason, printable};
use std::collections::BTreeSet;

/// The limit of an Event's message in events.k8s.io/v1 (`NoteLengthLimit`), also for conditions.
const MESSAGE_BYTES_MAX: usize = 1024;
/// Devices that a message names.
const NAMED_MAX: usize = 4;
/// The longest part of a reading in a message, in characters. A check's output may be long.
const DETAIL_CHARS_MAX: usize = 160;

/// `nvidia.com/gpu GPU-1`.
fn named(device: &DeviceName) -> String {
    format!("{} {}", device.resource, device.id)
}

fn because(failure: &Failure) -> String {
    reading(failure.reason, &failure.detail)
}

/// `xid: a reading`, or `xid` without one.
pub(super) fn reading(reason: Reason, detail: &str) -> String {
    if detail.is_empty() {
        return reason.to_string();
    }
    let detail: String = detail.chars().take(DETAIL_CHARS_MAX).collect();
    format!("{reason}: {detail}")
}

/// The word of a condition for a reason: `PortDown` for `port_down`.
pub(super) fn camel_case(reason: Reason) -> String {
    let capital = |part: &str| {
        let (first, rest) = part.split_at(part.len().min(1));
        first.to_ascii_uppercase() + rest
    };
    reason.as_str().split('_').map(capital).collect()
}

/// ` of pod team/train`, or nothing.
fn of_pods(pods: Option<&BTreeSet<Pod>>) -> String {
    let Some(first) = pods.and_then(BTreeSet::first) else { return String::new() };
    let more = pods.map_or(0, BTreeSet::len) - 1;
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!(" of pod {}/{}{more}", first.namespace, first.name)
}

/// A device that has failed, why, and the pods that are named with it.
pub(super) type Failed<'a> = (&'a DeviceName, &'a Failure, Option<&'a BTreeSet<Pod>>);

/// Devices have failed.
pub(super) fn unhealthy(devices: &[Failed<'_>]) -> String {
    if let [(device, failure, pods)] = devices {
        return bounded(&format!(
            "{}{} is unhealthy: {}",
            named(device),
            of_pods(*pods),
            because(failure)
        ));
    }
    let one = |(device, failure, pods): &Failed<'_>| {
        format!("{}{} ({})", named(device), of_pods(*pods), because(failure))
    };
    let named = devices.iter().take(NAMED_MAX).map(one).collect();
    bounded(&format!("{} devices are unhealthy: {}", devices.len(), list(named, devices.len())))
}

/// Devices are healthy again.
pub(super) fn recovered(devices: &[&DeviceName]) -> String {
    if let [device] = devices {
        return bounded(&format!("{} is healthy again", named(device)));
    }
    let names = devices.iter().take(NAMED_MAX).map(|device| named(device)).collect();
    bounded(&format!("{} devices are healthy again: {}", devices.len(), list(names, devices.len())))
}

/// Some of all devices are in a bad state, with a word for each. The state is given for one device
/// and for several.
pub(super) fn some(devices: &[(&DeviceName, &str)], of: usize, (is, are): (&str, &str)) -> String {
    let verb = if devices.len() == 1 { is } else { are };
    let one = |(device, word): &(&DeviceName, &str)| format!("{} ({word})", named(device));
    let names = devices.iter().take(NAMED_MAX).map(one).collect();
    bounded(&format!("{} of {of} devices {verb}: {}", devices.len(), list(names, devices.len())))
}

fn list(named: Vec<String>, of: usize) -> String {
    let more = of - named.len();
    let named = named.join(", ");
    if more > 0 { format!("{named} and {more} more") } else { named }
}

/// On one line, and cut to the limit of the API.
pub(super) fn bounded(text: &str) -> String {
    let mut text = printable(text).into_owned();
    if text.len() > MESSAGE_BYTES_MAX {
        let mut end = MESSAGE_BYTES_MAX - "…".len();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}
