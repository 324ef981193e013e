//! The daemon: whether it runs, whether it is the only one, and the problems that it reports.

use super::super::codes::{
    DAEMON_ABSENT, DAEMON_HANGS, DAEMON_NOT_READY, DAEMON_NOT_RUNNING, DAEMON_OTHER_VERSION,
    HOOK_FAILED, HOOK_NOT_RUN, METRICS_UNDECIDED, MPS_DOWN, MPS_PROGRAMS_MISSING,
    RESOURCE_NOT_REGISTERED, SIGNALS_OFF, TWO_DAEMONS,
};
use super::super::{Answer, Facts, Finding, PathState};
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
            let todo = "start it; its log shows why it ended";
            let found = "no daemon answers here, although systemd starts it at boot";
            Some(vec![
                Finding::new(&DAEMON_NOT_RUNNING, on, found, todo)
                    .by("systemctl restart holdfast; journalctl -u holdfast -n 50"),
            ])
        }
        Answer::Absent => {
            let todo = "start it with `holdfast run` or its unit, or name its --run-dir";
            Some(vec![Finding::new(&DAEMON_ABSENT, on, "no daemon answers here", todo)])
        }
        Answer::Unresponsive(why) => {
            let todo = "its log may show what it waits for; systemd kills it when it has been stuck for 30 s";
            Some(vec![
                Finding::new(&DAEMON_HANGS, on, why.clone(), todo)
                    .by("journalctl -u holdfast -n 50"),
            ])
        }
        Answer::Status(status) => Some(report(status, &on)),
    }
}

fn report(status: &Value, on: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let uptime = number(status, "uptime_seconds");
    if !is_true(status, "ready") && uptime > READY_SECONDS {
        let waits = format!("it has run for {uptime} s and is still not ready");
        let todo = "see the findings on the kubelet and on registrations; if there are none, its \
                    log shows what it waits for";
        found.push(Finding::new(&DAEMON_NOT_READY, on, waits, todo).by("holdfast status"));
    }
    let (own, theirs) = (env!("CARGO_PKG_VERSION"), text(status, "version"));
    if own != theirs {
        let differs = format!("the daemon is holdfast {theirs}, but this program is {own}");
        found.push(
            Finding::new(
                &DAEMON_OTHER_VERSION,
                on,
                differs,
                "hand over from the daemon to the installed version",
            )
            .by("holdfast handover"),
        );
    }
    found
}

pub(super) fn alone(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "stop one of them; a DaemonSet and a package on one node are two daemons. During a handover there are two for some \
                seconds";
    if facts.processes.is_none() && facts.daemon.is_none() {
        return None;
    }
    // Daemons for other kubelets, such as those of tests, are allowed.
    let same =
        facts.processes.iter().flatten().filter(|process| process.kubelet == facts.roots.kubelet);
    let pids: Vec<String> = same.map(|process| process.pid.to_string()).collect();
    if pids.len() > 1 {
        let found =
            format!("{} daemons run with one kubelet: processes {}", pids.len(), pids.join(", "));
        let ps = format!("ps -o pid,lstart,args -p {}", pids.join(","));
        return Some(vec![
            Finding::new(&TWO_DAEMONS, facts.roots.kubelet.display(), found, todo).by(ps),
        ]);
    }
    let daemon = facts.daemon.as_ref();
    let found = daemon.and_then(|daemon| match (daemon.lock_holder, daemon.pid) {
        (Some(holder), Some(pid)) if holder != pid => Some(format!(
            "process {holder} has the ledger, but process {pid} answers in `{}`",
            facts.roots.run.display()
        )),
        (Some(holder), None) if daemon.answer == Answer::Absent => Some(format!(
            "process {holder} has the ledger, but no process answers in `{}`",
            facts.roots.run.display()
        )),
        _ => None,
    });
    let on = facts.roots.state.join("lock");
    Some(
        found
            .map(|found| Finding::new(&TWO_DAEMONS, on.display(), found, todo))
            .into_iter()
            .collect(),
    )
}

pub(super) fn registrations(facts: &Facts) -> Option<Vec<Finding>> {
    let status = facts.status()?;
    // Without a kubelet no registration is possible; another finding reports that.
    facts.kubelet.as_ref().filter(|kubelet| kubelet.socket == PathState::Listening)?;
    let todo = "the daemon retries automatically; its log and the kubelet's log show the kubelet's \
                answers";
    let missing = list(status, "resources")
        .iter()
        .filter(|resource| !is_true(resource, "registered") && !is_true(resource, "only_claims"));
    // The check of other plugins reports these.
    let missing = missing.filter(|resource| !text(resource, "problem").contains("another plugin"));
    let find = |resource: &Value| {
        let problem = Some(text(resource, "problem"))
            .filter(|problem| !problem.is_empty())
            .unwrap_or("the kubelet has opened no stream");
        Finding::new(&RESOURCE_NOT_REGISTERED, text(resource, "name"), problem, todo)
            .by("journalctl -u holdfast -u kubelet -n 200")
    };
    Some(missing.map(find).collect())
}

pub(super) fn hooks(facts: &Facts) -> Option<Vec<Finding>> {
    let todo = "fix the cause that the end of the hook's output names; the daemon retries the hook \
                (docs/hooks.md)";
    let failed =
        list(facts.status()?, "hooks").iter().filter(|hook| text(hook, "hook") == "failed");
    let find = |hook: &Value| {
        let (device, tries, why) =
            (text(hook, "device"), times(number(hook, "tries")), text(hook, "why"));
        let pods: Vec<_> = list(hook, "awaited_by")
            .iter()
            .map(|pod| format!("{}/{}", text(pod, "namespace"), text(pod, "pod")))
            .collect();
        let waits = if pods.is_empty() {
            String::new()
        } else {
            format!("; pod {} waits for the hook", pods.join(", "))
        };
        let found =
            format!("the after_release hook of device {device} failed {tries}: {why}{waits}");
        Finding::new(&HOOK_FAILED, text(hook, "resource"), found, todo)
    };
    let todo_run = "check that the program exists and that the daemon may create processes (`TasksMax` of the unit, the pod's limit of PIDs); \
                    the daemon retries automatically";
    let find_not_run = |not_run: &Value| {
        let found = format!("`{}` cannot be run: {}", text(not_run, "phase"), text(not_run, "why"));
        Finding::new(&HOOK_NOT_RUN, text(not_run, "resource"), found, todo_run)
    };
    let not_run = list(facts.status()?, "not_run").iter();
    Some(failed.map(find).chain(not_run.map(find_not_run)).collect())
}

/// The daemon knows why; without one, the programs may be missing.
pub(super) fn mps(facts: &Facts) -> Option<Vec<Finding>> {
    if let Some(status) = facts.status() {
        let todo = "give the daemon what it needs for MPS (docs/contracts.md), or set `mps_control \
                    = \"external\"` if another program runs the control daemon";
        let states = status.get("mps").and_then(Value::as_object).into_iter().flatten();
        let down = states.filter(|(_, state)| text(state, "state") == "down");
        let find = |(resource, state): (&String, &Value)| {
            Finding::new(&MPS_DOWN, resource, text(state, "why"), todo)
        };
        return Some(down.map(find).collect());
    }
    let wants = &facts.config.as_ref()?.as_ref().ok()?.mps;
    if wants.is_empty() || facts.mps_programs? {
        return Some(Vec::new());
    }
    let found =
        "nvidia-cuda-mps-control and nvidia-smi are not installed where the daemon finds them";
    let todo = "install the driver's programs; in a container use the component mps, or set \
                `mps_control = \"external\"` if another program runs the control daemon";
    Some(vec![Finding::new(&MPS_PROGRAMS_MISSING, wants.join(", "), found, todo)])
}

/// With `telemetry.authorize`, whether the API server decides who may read `/metrics`.
pub(super) fn readers(facts: &Facts) -> Option<Vec<Finding>> {
    if !facts.config.as_ref()?.as_ref().ok()?.authorize {
        return Some(Vec::new());
    }
    let todo = "the component metrics-authorize, or `telemetry.authorize` of the chart, has the \
                ClusterRole and the token; the kubelet's own credentials need no right \
                (docs/metrics.md)";
    let why = facts.reviews.as_ref()?.as_ref().err();
    let finding = |why| Finding::new(&METRICS_UNDECIDED, "telemetry.authorize", why, todo);
    Some(why.map(finding).into_iter().collect())
}

pub(super) fn signals(facts: &Facts) -> Option<Vec<Finding>> {
    let off = facts.status()?.get("signals_off").and_then(Value::as_object)?;
    // The kernel log has a check of its own.
    let off = off.iter().filter(|(source, _)| *source != "kernel_log");
    let find = |(source, why): (&String, &Value)| {
        let todo = "if you want this signal, give the daemon the access that is named \
                    (docs/health.md, docs/install.md)";
        Finding::new(&SIGNALS_OFF, source, why.as_str().unwrap_or_default(), todo)
    };
    Some(off.map(find).collect())
}
