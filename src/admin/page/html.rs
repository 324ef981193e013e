//! The page as text: no scripts, no other files, and all input escaped.

use super::kubelet_since;
use crate::admin::{DeviceReport, Problem, ResourceReport, Status, problem_summary};
use crate::domain::{Grant, PendingRelease, Timestamp};
use crate::picture::Holder;
use crate::picture::markup::escape;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

/// The style sheet.
pub(super) const STYLE: &str = include_str!("style.css");
/// Rows of a table. A longer table is not readable on a page; the verbs print all rows.
const ROWS_MAX: usize = 128;
/// Events on the page.
const EVENTS_MAX: usize = 20;

/// The content of a page.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) status: &'a Status,
    pub(super) devices: &'a [DeviceReport],
    pub(super) grants: &'a [Arc<Grant>],
    /// As SVG.
    pub(super) picture: String,
    pub(super) refresh: Option<u32>,
    pub(super) now: Timestamp,
}

/// Writes the page, which is also valid XML.
pub(super) fn page(facts: &Facts<'_>, style: &str) -> String {
    let Facts { status, devices, grants, picture, refresh, now, .. } = facts;
    let problems = status.problems();
    let title = problem_summary(&problems);
    let again = refresh
        .map(|seconds| format!("<meta http-equiv=\"refresh\" content=\"{seconds}\"/>\n"))
        .unwrap_or_default();
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n{again}\
         <title>holdfast: {}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<header>\n<h1>holdfast</h1>\n",
        escape(&title)
    );
    let class = if problems.is_empty() { "good" } else { "bad" };
    let sign = if problems.is_empty() { "✓" } else { "✗" };
    add(&mut html, format_args!("<p class=\"verdict {class}\">{sign} {}</p>\n", escape(&title)));
    html += &problem_list(&problems);
    html += &summary(facts);
    html += "</header>\n<main>\n";
    html += &section("Resources", &resources(&status.resources));
    html += &section("Devices", &all_devices(devices));
    html += &section("Holders", &holders(grants));
    html += &section("Events", &events(facts));
    html += &section("Topology", &format!("<div class=\"picture\">{picture}</div>\n"));
    let every = [5, 30].map(|seconds| format!("<code>?refresh={seconds}</code>")).join(" or ");
    add(
        &mut html,
        format_args!(
            "</main>\n<footer>As of {}. Add {every} to reload it automatically. See also <code>/metrics</code>, <code>/healthz</code>, \
             <code>/readyz</code>, and the verbs <code>holdfast status</code>, <code>who</code>, <code>history</code>.</footer>\n</body>\n</html>\n",
            now.to_seconds()
        ),
    );
    html
}

fn add(html: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to memory cannot fail.
    let _infallible = html.write_fmt(text);
}

fn section(title: &str, body: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n{body}</section>\n")
}

/// Text with its parts in backticks as code.
fn prose(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts
        .map(
            |(n, part)| {
                if n % 2 == 1 { format!("<code>{}</code>", escape(part)) } else { escape(part) }
            },
        )
        .collect()
}

fn problem_list(problems: &[Problem]) -> String {
    if problems.is_empty() {
        return String::new();
    }
    let item = |Problem { what, todo }: &Problem| {
        format!("<li>{}<br/><span class=\"soft\">{}</span></li>\n", prose(what), prose(todo))
    };
    let more = problems.len().saturating_sub(ROWS_MAX);
    let more = if more > 0 {
        format!("<li>and {more} more: <code>holdfast status</code></li>\n")
    } else {
        String::new()
    };
    format!(
        "<ul class=\"problems\">\n{}{more}</ul>\n",
        problems.iter().take(ROWS_MAX).map(item).collect::<String>()
    )
}

fn summary(facts: &Facts<'_>) -> String {
    let Status { version, uptime_seconds, ready, ledger, .. } = facts.status;
    let uptime = humantime::format_duration(Duration::from_secs(*uptime_seconds)).to_string();
    let (registered, listed) = facts.status.registered();
    let kubelet = kubelet_since(facts.status).map_or("absent".to_owned(), |since| {
        if facts.status.socket_left_behind {
            return "absent (socket left behind)".to_owned();
        }
        format!(
            "present since {}, {registered} of {listed} resources registered",
            since.to_seconds()
        )
    });
    let written = match (ledger.journal, ledger.database) {
        (true, true) => "both copies are written".to_owned(),
        (true, false) => "only one of two copies is written".to_owned(),
        (false, _) if ledger.not_durable > 0 => {
            format!("cannot be written; {} grants exist only in memory", ledger.not_durable)
        }
        (false, _) => "cannot be written".to_owned(),
    };
    let ready = if *ready { "ready" } else { "not ready yet" };
    let rows = [
        ("version", version.clone()),
        ("state", format!("{ready}, up {uptime}")),
        ("kubelet", kubelet),
        ("ledger", written),
        ("configuration", facts.status.config.to_string()),
    ];
    let mut html = String::from("<dl>\n");
    for (name, value) in rows {
        add(&mut html, format_args!("<dt>{name}</dt><dd>{}</dd>\n", escape(&value)));
    }
    for remark in facts.status.remarks().iter().take(ROWS_MAX) {
        add(&mut html, format_args!("<dt>remark</dt><dd>{}</dd>\n", prose(remark)));
    }
    html + "</dl>\n"
}

/// A table that scrolls on its own. A heading or a cell that begins with `#` is a number; one that
/// begins with `=` is text that may wrap. A cell is already HTML.
fn table(headings: &[&str], rows: &[Vec<String>], more: &str) -> String {
    let class = |text: &str| match text.chars().next() {
        Some('#') => " class=\"number\"",
        Some('=') => " class=\"words\"",
        _ => "",
    };
    let bare = |text: &str| text.trim_start_matches(['#', '=']).to_owned();
    let mut html = String::from("<div class=\"wide\"><table>\n<tr>");
    headings.iter().for_each(|heading| {
        add(&mut html, format_args!("<th{}>{}</th>", class(heading), bare(heading)));
    });
    html += "</tr>\n";
    for row in rows.iter().take(ROWS_MAX) {
        html += "<tr>";
        row.iter().zip(headings).for_each(|(cell, heading)| {
            add(&mut html, format_args!("<td{}>{cell}</td>", class(heading)));
        });
        html += "</tr>\n";
    }
    html += "</table></div>\n";
    if rows.len() > ROWS_MAX {
        add(
            &mut html,
            format_args!(
                "<p class=\"soft\">and {} more: <code>{more}</code></p>\n",
                rows.len() - ROWS_MAX
            ),
        );
    }
    html
}

fn resources(reports: &[ResourceReport]) -> String {
    if reports.is_empty() {
        return "<p class=\"soft\">No resource is offered.</p>\n".into();
    }
    let row = |report: &ResourceReport| {
        let registered = match report.registered() {
            "yes" => "<span class=\"good\">✓ yes</span>",
            "no" => "<span class=\"bad\">✗ no</span>",
            claims => claims,
        };
        let healthy = if report.healthy < report.devices { "bad" } else { "good" };
        vec![
            escape(&report.name),
            registered.to_owned(),
            report.devices.to_string(),
            format!("<span class=\"{healthy}\">{}</span>", report.healthy),
            report.held.to_string(),
            escape(report.api_version.as_deref().unwrap_or("–")),
            report.last_registration_ms.map_or("–".into(), |ms| format!("{ms:.1} ms")),
        ]
    };
    let rows: Vec<_> = reports.iter().map(row).collect();
    table(
        &["resource", "registered", "#devices", "#healthy", "#held", "API", "#registered in"],
        &rows,
        "holdfast status",
    )
}

/// Unhealthy devices are visible; healthy ones are folded behind their number.
fn all_devices(devices: &[DeviceReport]) -> String {
    let is_well = |device: &&DeviceReport| {
        device.health.as_deref() == Some("Healthy") && device.state != "suspect"
    };
    let (well, ailing): (Vec<&DeviceReport>, Vec<&DeviceReport>) =
        devices.iter().partition(is_well);
    let of = |devices: &[&DeviceReport]| {
        let rows: Vec<_> =
            devices.iter().take(ROWS_MAX + 1).map(|device| device_row(device)).collect();
        let rest = devices.len().saturating_sub(ROWS_MAX + 1);
        let rows: Vec<_> = rows.into_iter().chain(std::iter::repeat_n(Vec::new(), rest)).collect();
        table(&["health", "device", "=why", "since", "resource"], &rows, "holdfast device show")
    };
    match (ailing.len(), well.len()) {
        (0, 0) => "<p class=\"soft\">No resource has a device.</p>\n".into(),
        (0, well_count) => {
            format!("<details><summary>{well_count} healthy</summary>\n{}</details>\n", of(&well))
        }
        (_, 0) => of(&ailing),
        (_, well_count) => format!(
            "{}<details><summary>{well_count} healthy</summary>\n{}</details>\n",
            of(&ailing),
            of(&well)
        ),
    }
}

fn device_row(device: &DeviceReport) -> Vec<String> {
    let health = device.health.as_deref().unwrap_or("not offered");
    let (class, sign) = match (health, device.state.as_str()) {
        ("Healthy", "suspect") => ("may", "?"),
        ("Healthy", _) => ("good", "✓"),
        ("Unhealthy", _) => ("bad", "✗"),
        _ => ("soft", "–"),
    };
    let state = if ["suspect", "recovering"].contains(&device.state.as_str()) {
        format!(", {}", device.state)
    } else {
        String::new()
    };
    let why = [device.reason.as_deref(), device.detail.as_deref()]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(": ");
    vec![
        format!("<span class=\"{class}\">{sign} {}{state}</span>", escape(health)),
        format!("<code>{}</code>", escape(&device.id)),
        escape(&why),
        device.since().map(Timestamp::to_seconds).unwrap_or_default(),
        escape(&device.resources.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
    ]
}

fn holders(grants: &[Arc<Grant>]) -> String {
    let live: Vec<&Arc<Grant>> = grants.iter().filter(|grant| grant.is_live()).collect();
    if live.is_empty() {
        return "<p class=\"soft\">No container holds a device.</p>\n".into();
    }
    let row = |grant: &&Arc<Grant>| {
        let devices =
            grant.devices.iter().map(|device| device.id.as_str()).collect::<Vec<_>>().join(", ");
        vec![
            escape(&Holder::of(grant).in_words()),
            escape(grant.resource.as_str()),
            format!("<code>{}</code>", escape(&devices)),
            grant.granted_at.to_seconds(),
            escape(grant.container().unwrap_or("–")),
            grant.state_for_people(PendingRelease::of_state(grant).as_ref()).to_owned(),
        ]
    };
    let rows: Vec<_> = live.iter().map(row).collect();
    let count = if live.len() == 1 {
        "one grant is".to_owned()
    } else {
        format!("{} grants are", live.len())
    };
    let table = table(
        &["pod", "resource", "=devices", "since", "container", "state"],
        &rows,
        "holdfast who",
    );
    format!(
        "<details{}><summary>{count} held</summary>\n{table}</details>\n",
        if live.len() <= 16 { " open=\"open\"" } else { "" }
    )
}

/// Recent events, newest first: starts, failures and their ends, grants.
fn events(facts: &Facts<'_>) -> String {
    let Facts { status, devices, grants, now, .. } = facts;
    let mut events = vec![(
        Timestamp(now.0.saturating_sub(status.uptime_seconds.saturating_mul(1000))),
        "holdfast has started".to_owned(),
    )];
    events.extend(
        kubelet_since(status).map(|since| (since, "the kubelet has created its socket".to_owned())),
    );
    for device in *devices {
        for incident in &device.incidents {
            events.push((
                incident.at,
                format!("`{}` has failed: {incident}", device.id.replace('`', "'")),
            ));
            events.extend(incident.until.map(|until| {
                (until, format!("`{}` is healthy again", device.id.replace('`', "'")))
            }));
        }
    }
    let held = grants.iter().filter(|grant| grant.is_live());
    events.extend(held.map(|grant| {
        let (count, to) = (grant.devices.len(), Holder::of(grant).in_words().replace('`', "'"));
        (grant.granted_at, format!("{count} × {} granted to {to}", grant.resource))
    }));
    events.sort_by(|a, b| b.cmp(a));
    let rows: Vec<_> = events
        .into_iter()
        .take(EVENTS_MAX)
        .map(|(at, what)| vec![at.to_seconds(), prose(&what)])
        .collect();
    table(&["when", "=what"], &rows, "holdfast history")
}

#[cfg(test)]
mod tests;
