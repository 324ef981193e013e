//! The daemon: whether it runs, whether it is the only one, and the problems that it reports.

use super::super::codes::{
    DAEMON_ABSENT, DAEMON_HANGS, DAEMON_NOT_READY, DAEMON_NOT_RUNNING, DAEMON_OTHER_VERSION, HOOK_FAILED, HOOK_NOT_RUN,
    RESOURCE_NOT_REGISTERED, SIGNALS_OFF, TWO_DAEMONS,
};
use super::super::{Answer, Facts, Finding, Is};
use super::{is_true, list, number, text};
use crate::domain::times;
use serde_json::Value;

/// Maximum time until ready; a longer start is blocked. With a slow kubelet, READY may take a
/// minute.
const READY_SECONDS: u64 = 120;

pub(super) fn answers(facts: &Facts) -> Option<Vec<Finding>> {
    let daemon = facts.daemon.as_ref()?;
    let on = facts.roots.run.join("control.sock").display().to_string();
    match &daemon.answer {
        Answer::Denied => None,
        Answer::Absent if daemon.is_enabled => {
            let todo = "start it; its log says why it ended";
            let found = "no daemon answers here, although systemd is to start it at boot";
            Some(vec![Finding::new(&DAEMON_NOT_RUNNING, on, found, todo).by("systemctl restart holdfast; journalctl -u holdfast -n 50")])
        }
        Answer::Absent => {
            let todo = "start it with `holdfast run` or its unit, or name its --run-dir";
            Some(vec![Finding::new(&DAEMON_ABSENT, on, "no daemon answers here", todo)])
        }
        Answer::Silent(why) => {
            let todo = "its log may say what it waits for; systemd ends it by itself when it has been stuck for 30 s";
            Some(vec![Finding::new(&DAEMON_HANGS, on, why.clone(), todo).by("journalctl -u holdfast -n 50")])
        }
        Answer::Status(status) => Some(report(status, &on)),
    }
}

fn report(status: &Value, on: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let uptime = number(status, "uptime_seconds");
    if !is_true(status, "ready") && uptime > READY_SECONDS {
        let waits = format!("it has run for {uptime} s and is not ready");
        let todo = "the findings on the kubelet and on registrations say what it waits for; else its log does";
        found.push(Finding::new(&DAEMON_NOT_READY, on, waits, todo).by("holdfast status"));
    }
    let (own, theirs) = (env!("CARGO_PKG_VERSION"), text(status, "version"));
    if own != theirs {
        let differs = format!("the daemon is holdfast {theirs}, and this program is {own}");
        found.push(Finding::new(&DAEMON_OTHER_VERSION, on, differs, "have it hand over to what is installed").by("holdfast handover"));
    }
    found
}

pub(super) fn alone(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "stop one of them; a DaemonSet and a package on one node are two daemons. While one takes over from another there are two \
                for some seconds";
    if facts.processes.is_none() && facts.daemon.is_none() {
        return None;
    }
    // Daemons for other kubelets, such as those of tests, are allowed.
    let same = facts.processes.iter().flatten().filter(|process| process.kubelet == facts.roots.kubelet);
    let pids: Vec<String> = same.map(|process| process.pid.to_string()).collect();
    if pids.len() > 1 {
        let found = format!("{} daemons run with one kubelet: processes {}", pids.len(), pids.join(", "));
        let ps = format!("ps -o pid,lstart,args -p {}", pids.join(","));
        return Some(vec![Finding::new(&TWO_DAEMONS, facts.roots.kubelet.display(), found, todo).by(ps)]);
    }
    let daemon = facts.daemon.as_ref();
    let found = daemon.and_then(|daemon| match (daemon.lock_holder, daemon.pid) {
        (Some(holder), Some(pid)) if holder != pid => {
            Some(format!("process {holder} has the ledger, and process {pid} answers in `{}`", facts.roots.run.display()))
        }
        (Some(holder), None) if daemon.answer == Answer::Absent => {
            Some(format!("process {holder} has the ledger, and nobody answers in `{}`", facts.roots.run.display()))
        }
        _ => None,
    });
    let on = facts.roots.state.join("lock");
    Some(found.map(|found| Finding::new(&TWO_DAEMONS, on.display(), found, todo)).into_iter().collect())
}

pub(super) fn registrations(facts: &Facts) -> Option<Vec<Finding>> {
    let status = facts.status()?;
    // Without a kubelet no registration is possible; another finding reports that.
    facts.kubelet.as_ref().filter(|kubelet| kubelet.socket == Is::Listening)?;
    let todo = "the daemon tries on by itself; what the kubelet answers is in its log, and in the kubelet's";
    let missing = list(status, "resources").iter().filter(|resource| !is_true(resource, "registered"));
    // The check of other plugins reports these.
    let missing = missing.filter(|resource| !text(resource, "problem").contains("another plugin"));
    let find = |resource: &Value| {
        let problem = Some(text(resource, "problem")).filter(|problem| !problem.is_empty()).unwrap_or("the kubelet has opened no stream");
        Finding::new(&RESOURCE_NOT_REGISTERED, text(resource, "name"), problem, todo).by("journalctl -u holdfast -u kubelet -n 200")
    };
    Some(missing.map(find).collect())
}

pub(super) fn hooks(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "mend what the hook's last words name; it is tried again by itself (docs/hooks.md)";
    let failed = list(facts.status()?, "hooks").iter().filter(|hook| text(hook, "hook") == "failed");
    let find = |hook: &Value| {
        let (device, tries, why) = (text(hook, "device"), times(number(hook, "tries")), text(hook, "why"));
        let pods: Vec<_> = list(hook, "awaited_by").iter().map(|pod| format!("{}/{}", text(pod, "namespace"), text(pod, "pod"))).collect();
        let waits = if pods.is_empty() { String::new() } else { format!("; pod {} waits for it", pods.join(", ")) };
        let found = format!("the hook after release of device {device} has failed {tries}: {why}{waits}");
        Finding::new(&HOOK_FAILED, text(hook, "resource"), found, todo)
    };
    let todo_run = "see whether the program is there, and whether the daemon may have more processes (`TasksMax` of the unit, the pod's limit \
                    of PIDs); it is tried again by itself";
    let find_not_run = |not_run: &Value| {
        let found = format!("`{}` cannot be run: {}", text(not_run, "phase"), text(not_run, "why"));
        Finding::new(&HOOK_NOT_RUN, text(not_run, "resource"), found, todo_run)
    };
    let not_run = list(facts.status()?, "not_run").iter();
    Some(failed.map(find).chain(not_run.map(find_not_run)).collect())
}

pub(super) fn signals(facts: &Facts) -> Option<Vec<Finding>> {
    let off = facts.status()?.get("signals_off").and_then(Value::as_object)?;
    // The kernel log has a check of its own.
    let off = off.iter().filter(|(source, _)| *source != "kernel_log");
    let find = |(source, why): (&String, &Value)| {
        let todo = "give the daemon what is named, if you want this signal (docs/health.md, docs/install.md)";
        Finding::new(&SIGNALS_OFF, source, why.as_str().unwrap_or_default(), todo)
    };
    Some(off.map(find).collect())
}
