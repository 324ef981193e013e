//! The daemon's problems in words, each with its remedy: for `status` and for the page.

use super::{DeviceReport, HookReport, ResourceReport, Status};
use crate::domain::{HookState, LedgerHealth, PendingHook, Reason, Unreadable, UnreadableReason, times};
use crate::hook::NotRun;
use crate::kubelet::checkpoint::CheckpointUnread;
use crate::picture::Holder;
use crate::serving::Unrecorded;

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// One sentence.
    pub what: String,
    /// The operator's remedy.
    pub todo: &'static str,
}

impl Status {
    /// The problems, the worst first: the kubelet, the ledger, the configuration, telemetry,
    /// resources, hooks, devices.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut add = |what: String, todo| problems.push(Problem { what, todo });
        if self.kubelet.is_none() {
            add("there is no kubelet".into(), "start it; if it runs, name its directory with `--kubelet-dir` of `holdfast run`");
        } else if self.socket_left_behind {
            add(
                "the kubelet has left its socket behind, and does not run".into(),
                "start it: `systemctl status kubelet` says why it ended",
            );
        }
        if let Some(CheckpointUnread { since, why, .. }) = &self.checkpoint_unread {
            let what = format!("no new grant is bound to its pod, so its devices stay held, since {}: {why}", since.to_seconds());
            add(
                what,
                "the kubelet writes that file with the next pod that gets a device; if this lasts, look at the path, and at the kubelet's log",
            );
        }
        let LedgerHealth { journal, database, not_durable, unreadable } = self.ledger;
        if !journal {
            let what = match &self.not_recorded {
                _ if !self.ledger_refuses => format!("the ledger cannot be written; {not_durable} answers of meanwhile are in memory only"),
                None => "the ledger cannot be written, so new pods that ask for a device are refused".into(),
                Some(Unrecorded { refused, why }) => {
                    format!("the ledger cannot be written, so new pods that ask for a device are refused, {refused} so far: {why}")
                }
            };
            add(what, "make room on its disk, or make that writable; it goes on by itself, and the log has the disk's error");
        } else if let Some(unreadable) = unreadable {
            let (what, todo) = of_history(unreadable);
            add(what, todo);
        } else if !database {
            add(
                "the ledger's second copy is not kept at present".into(),
                "look for errors of the disk in the log: `journalctl -u holdfast`",
            );
        }
        if let Some(error) = &self.config.error {
            let what = format!("the last good configuration runs on, since the files are not valid: {error}");
            add(what, "`holdfast config check` says all that is wrong with them; mend it, and `systemctl reload holdfast`");
        }
        if let Some(why) = &self.not_served {
            add(why.clone(), "it is tried again by itself; end what has the address (`ss -ltnp`), or set `telemetry.listen` to a free one");
        }
        for why in &self.unread {
            let what =
                format!("{why}; the devices that this concerns are taken to be as they were, and those that are new are not offered");
            add(what, "it is tried again by itself; if that lasts, mend what the error names: a limit, a permission, a mount");
        }
        for ResourceReport { name, registered, problem, disagreement, .. } in &self.resources {
            match problem {
                Some(problem) => {
                    add(format!("{name}: {problem}"), "it is tried again by itself; the kubelet's log says more: `journalctl -u kubelet`");
                }
                None if !registered && self.kubelet.is_some() && !self.socket_left_behind => {
                    add(
                        format!("{name}: the kubelet has not opened its stream"),
                        "it is tried again by itself; if that lasts, the kubelet's log says more: `journalctl -u kubelet`",
                    );
                }
                None => {}
            }
            if let Some(disagreement) = disagreement {
                add(format!("{name}: {disagreement}"), "take another plugin for this resource off the node");
            }
        }
        self.hook_problems(&mut add);
        let is_sick = |device: &&DeviceReport| {
            let is_wanted = device.cordoned.is_some() || device.reason.as_deref().is_some_and(Reason::is_of_the_configuration);
            device.health.as_deref() == Some("Unhealthy") && !is_wanted
        };
        let todo = "`holdfast device show` with an id tells its last failures, docs/health.md what each reason needs";
        match self.ailing.iter().filter(is_sick).count() {
            0 => {}
            1 => add("one device is unhealthy".into(), todo),
            sick => add(format!("{sick} devices are unhealthy"), todo),
        }
        problems
    }

    /// Hooks that have failed, and hooks that cannot be run.
    fn hook_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        for HookReport { owed: PendingHook { resource, device, state, .. }, awaited_by } in &self.hooks {
            if let HookState::Failed { tries, why, .. } = state {
                let so = match awaited_by.as_slice() {
                    [] => format!("device {device} is unhealthy"),
                    pods => format!("{} cannot start yet with device {device}", in_words(pods)),
                };
                let what = format!("{resource}: {so}, since the hook after its release has failed {}: {why}", times(u64::from(*tries)));
                add(what, "`holdfast device show` with the device's id shows what it wrote last; it is tried again by itself");
            }
        }
        for NotRun { resource, phase, since, why } in &self.not_run {
            let so = match phase.as_str() {
                "check" => "the check cannot be run, and says nothing of the devices",
                "before_start" => "the hook before start cannot be run, and containers wait",
                _ => "the hook after release cannot be run, and its devices wait",
            };
            add(
                format!("{resource}: {so}, since {}: {why}", since.to_seconds()),
                "it is tried again by itself; see whether the program is there, and whether the daemon may have more processes (`TasksMax` of the \
                 unit, the pod's limit of PIDs)",
            );
        }
    }

    /// Facts that are worth knowing and are not problems.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if self.resources.is_empty() {
            let nothing = "no resource is offered: `holdfast discover` shows the devices, the configuration which of them are offered";
            remarks.push(nothing.to_owned());
        }
        if !self.config.needs_restart.is_empty() {
            remarks.push(format!("counts from the next start on: {}", self.config.needs_restart.join(", ")));
        }
        let waiting = |hook: &&HookReport| !matches!(hook.owed.state, HookState::Failed { .. });
        for HookReport { owed: PendingHook { resource, device, .. }, awaited_by } in self.hooks.iter().filter(waiting) {
            remarks.push(match awaited_by.as_slice() {
                [] => format!("{resource}: device {device} waits for the hook after its release"),
                pods => format!("{resource}: {} starts with device {device} when the hook after its release has ended", in_words(pods)),
            });
        }
        remarks.extend(self.signals_off.iter().map(|(source, why)| format!("the signal {source} is off: {why}")));
        remarks.extend(self.recovery.iter().map(|recovery| format!("the ledger was damaged when the daemon started: {recovery}")));
        remarks
    }
}

/// Why the history cannot be read, and the remedy.
fn of_history(Unreadable { since, because }: Unreadable) -> (String, &'static str) {
    let since = since.to_seconds();
    match because {
        UnreadableReason::Slow => (
            format!("the history cannot be read yet: its database has been opening since {since}"),
            "nothing is lost, and it goes on by itself; look at how busy the ledger's disk is: `iostat -x`",
        ),
        UnreadableReason::Refused => (
            format!("the history cannot be read: its database could not be opened since {since}"),
            "nothing is lost, and it is tried again by itself; the log has the system's error: `journalctl -u holdfast`",
        ),
        UnreadableReason::Failed => (
            format!("the history cannot be read: its database was closed after an error at {since}"),
            "it is opened again by itself; look for errors of the disk in the log: `journalctl -u holdfast`",
        ),
    }
}

/// Pods, by name.
fn in_words(pods: &[Holder]) -> String {
    pods.iter().map(|pod| format!("pod {}", pod.in_words())).collect::<Vec<_>>().join(", ")
}

/// The number of problems, in words.
#[must_use]
pub fn verdict(problems: &[Problem]) -> String {
    match problems.len() {
        0 => "everything is in order".into(),
        1 => "one thing is wrong".into(),
        wrong => format!("{wrong} things are wrong"),
    }
}
