//! The daemon's problems in words, each with its remedy: for `status` and for the page.

use super::{DeviceReport, HookReport, ResourceReport, Status};
use crate::domain::{
    HookState, LedgerHealth, MpsState, PendingHook, Reason, Unreadable, UnreadableReason, times,
};
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
    /// NVIDIA's driver, resources, hooks, devices.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut add = |what: String, todo| problems.push(Problem { what, todo });
        self.kubelet_problems(&mut add);
        self.ledger_problem(&mut add);
        if let Some(error) = &self.config.error {
            let what = format!(
                "the configuration files are invalid, and the previous configuration stays in \
                 force: {error}"
            );
            add(
                what,
                "`holdfast config check` reports every error; fix them, and run `systemctl reload \
                 holdfast`",
            );
        }
        self.telemetry_problems(&mut add);
        self.label_problems(&mut add);
        for why in &self.not_reported {
            add(
                why.clone(),
                "Holdfast retries automatically, without a right every 5 minutes; check \
                 `cluster.credentials` and the rights of Holdfast in the cluster (docs/install.md), \
                 or set `cluster.events` and `cluster.node_condition` to false",
            );
        }
        for why in &self.dra_problems {
            add(
                why.clone(),
                "Holdfast retries what has failed; if this persists, docs/dra.md has each problem and \
                 what to do, and `holdfast doctor` checks the rights in the cluster and the kubelet's \
                 directories",
            );
        }
        if let Some(why) = &self.nvidia_driver {
            add(
                why.clone(),
                "install what is missing on the host, or set `[nvidia] driver_root`; Holdfast \
                 reads the driver again every 30 s, and `holdfast doctor` shows which root it uses",
            );
        }
        for why in &self.unread {
            let what = format!(
                "{why}; the affected devices keep their last state, and new ones are not offered"
            );
            add(
                what,
                "Holdfast retries automatically; if this persists, fix the limit, the permission \
                 or the mount that the error names",
            );
        }
        self.resource_problems(&mut add);
        self.mps_problems(&mut add);
        self.hook_problems(&mut add);
        let is_sick = |device: &&DeviceReport| {
            let is_wanted = device.cordoned.is_some()
                || device.reason.as_deref().is_some_and(Reason::is_of_the_configuration);
            device.health.as_deref() == Some("Unhealthy") && !is_wanted
        };
        let todo = "`holdfast device show` with an id shows its last failures, and docs/health.md has \
             the remedy for each reason";
        match self.ailing.iter().filter(is_sick).count() {
            0 => {}
            1 => add("one device is unhealthy".into(), todo),
            sick => add(format!("{sick} devices are unhealthy"), todo),
        }
        problems
    }

    /// An absent kubelet, and an unreadable checkpoint.
    fn kubelet_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        if self.kubelet.is_none() {
            add(
                "the kubelet's socket is missing".into(),
                "start the kubelet; if it is running, set its directory with `--kubelet-dir` of \
                 `holdfast run`",
            );
        } else if self.socket_left_behind {
            add(
                "the kubelet is not running, but its socket still exists".into(),
                "start the kubelet; `systemctl status kubelet` shows why it ended",
            );
        }
        if let Some(CheckpointUnread { since, why, .. }) = &self.checkpoint_unread {
            let what = format!(
                "new grants are not bound to their pods, so their devices stay held, since {}: \
                 {why}",
                since.to_seconds()
            );
            add(
                what,
                "the kubelet writes that file when the next pod gets a device; if this persists, \
                 check the path and the kubelet's log",
            );
        }
    }

    /// An address that is not served, and readers that are refused.
    fn telemetry_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        if let Some(why) = &self.not_served {
            add(
                why.clone(),
                "Holdfast retries automatically; end the process that uses the address (`ss \
                 -ltnp`), or set `telemetry.listen` to a free one",
            );
        }
        for why in &self.not_readable {
            add(
                why.clone(),
                "Holdfast retries automatically; check the files of `telemetry.tls_cert`, \
                 `telemetry.tls_key` and `telemetry.tls_client_ca`, and with `telemetry.authorize` \
                 the rights of Holdfast in the cluster (docs/metrics.md)",
            );
        }
    }

    /// Labels that are not read, and labels that are not written.
    fn label_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        if let Some(why) = &self.labels_not_followed {
            add(
                format!(
                    "the labels of this node are not followed, and the last known ones stay: {why}"
                ),
                "Holdfast retries automatically; if this persists, check the file of \
                 `cluster.node_labels`, or with \"api\" `cluster.credentials` and the rights of \
                 Holdfast in the cluster (docs/install.md)",
            );
        }
        if let Some(why) = &self.labels_not_written {
            add(
                format!("the labels of this node are not written: {why}"),
                "Holdfast retries every 30 s; make the folder of `labels.features_d` writable for it \
                 (docs/operate.md)",
            );
        }
    }

    /// The worst problem of the ledger.
    fn ledger_problem(&self, add: &mut impl FnMut(String, &'static str)) {
        let LedgerHealth { journal, database, not_durable, unreadable } = self.ledger;
        if self.ledger_hangs {
            let refused = self.not_recorded.as_ref().map(|unrecorded| unrecorded.refused);
            let refused = refused.map(|refused| format!(", {refused} so far")).unwrap_or_default();
            add(
                format!(
                    "the ledger does not answer, so new pods that request a device may be \
                     refused{refused}"
                ),
                "a write to the disk of the state directory may hang; `dmesg` has the disk's errors, \
                 and `/proc/pressure/io` shows a disk that is too slow; Holdfast continues when the \
                 write ends",
            );
        } else if !journal {
            let what = match &self.not_recorded {
                _ if !self.ledger_refuses => {
                    format!(
                        "the ledger cannot be written; {not_durable} grants made since then exist \
                         only in memory"
                    )
                }
                None => {
                    "the ledger cannot be written, so new pods that request a device are refused"
                        .into()
                }
                Some(Unrecorded { refused, why }) => {
                    format!(
                        "the ledger cannot be written, so new pods that request a device are \
                         refused, {refused} so far: {why}"
                    )
                }
            };
            add(
                what,
                "free space on its disk, or make the disk writable; Holdfast then continues \
                 automatically, and the log has the disk's error",
            );
        } else if let Some(unreadable) = unreadable {
            let (what, todo) = of_history(unreadable);
            add(what, todo);
        } else if !database {
            add(
                "the second copy of the ledger is not written at present".into(),
                "check the log for disk errors: `journalctl -u holdfast`",
            );
        }
    }

    /// Resources without a stream, and those that another plugin has.
    fn resource_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        for report in self.resources.iter().filter(|report| !report.only_claims) {
            let ResourceReport { name, registered, problem, disagreement, .. } = report;
            match problem {
                Some(problem) if report.too_long => {
                    add(
                        format!("{name}: {problem}"),
                        "offer fewer replicas, or split the resource by `select`",
                    );
                }
                Some(problem) => {
                    add(
                        format!("{name}: {problem}"),
                        "Holdfast retries automatically; the kubelet's log has details: \
                         `journalctl -u kubelet`",
                    );
                }
                None if !registered && self.kubelet.is_some() && !self.socket_left_behind => {
                    add(
                        format!("{name}: the kubelet has not opened its stream"),
                        "Holdfast retries automatically; if this persists, check the kubelet's \
                         log: `journalctl -u kubelet`",
                    );
                }
                None => {}
            }
            if let Some(disagreement) = disagreement.as_ref().filter(|_| !report.too_long) {
                add(
                    format!("{name}: {disagreement}"),
                    "remove the other plugin for this resource from the node",
                );
            }
        }
    }

    /// Control daemons of MPS that do not answer.
    fn mps_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        for (resource, state) in &self.mps {
            if let MpsState::Down { why } = state {
                add(
                    format!("{resource}: its shares by MPS are unhealthy: {why}"),
                    "Holdfast retries automatically; docs/contracts.md lists what the control \
                     daemon needs (the drop-in mps.conf, or the component mps)",
                );
            }
        }
    }

    /// Hooks that have failed, and hooks that cannot be run.
    fn hook_problems(&self, add: &mut impl FnMut(String, &'static str)) {
        for HookReport { owed: PendingHook { resource, device, state, .. }, awaited_by } in
            &self.hooks
        {
            if let HookState::Failed { tries, why, .. } = state {
                let so = match awaited_by.as_slice() {
                    [] => format!("device {device} is unhealthy"),
                    pods => format!("{} cannot start yet with device {device}", in_words(pods)),
                };
                let what = format!(
                    "{resource}: {so}, since the hook after its release has failed {}: {why}",
                    times(u64::from(*tries))
                );
                add(
                    what,
                    "`holdfast device show` with the device's id shows the hook's last output; \
                     Holdfast retries automatically",
                );
            }
        }
        for NotRun { resource, phase, since, why } in &self.not_run {
            let so = match phase.as_str() {
                "check" => "the check cannot be run, and the devices are not checked",
                "before_start" => "the hook before start cannot be run, and containers wait",
                _ => "the hook after release cannot be run, and its devices wait",
            };
            add(
                format!("{resource}: {so}, since {}: {why}", since.to_seconds()),
                "Holdfast retries automatically; check that the program exists, and that the daemon may start more processes (`TasksMax` of the \
                 unit, the pod's limit of PIDs)",
            );
        }
    }

    /// Facts that are worth knowing and are not problems.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if self.resources.is_empty() {
            let none = "no resource is offered; `holdfast discover` shows the devices, and the \
                 configuration selects those to offer";
            remarks.push(none.to_owned());
        }
        if !self.config.needs_restart.is_empty() {
            remarks.push(format!(
                "takes effect after a restart: {}",
                self.config.needs_restart.join(", ")
            ));
        }
        let waiting = |hook: &&HookReport| !matches!(hook.owed.state, HookState::Failed { .. });
        for HookReport { owed: PendingHook { resource, device, .. }, awaited_by } in
            self.hooks.iter().filter(waiting)
        {
            remarks.push(match awaited_by.as_slice() {
                [] => format!("{resource}: device {device} waits for the hook after its release"),
                pods => format!("{resource}: {} starts with device {device} when the hook after its release has ended", in_words(pods)),
            });
        }
        remarks.extend(
            self.signals_off
                .iter()
                .map(|(source, why)| format!("the signal {source} is off: {why}")),
        );
        remarks.extend(
            self.recovery.iter().map(|recovery| {
                format!("the ledger was damaged when the daemon started: {recovery}")
            }),
        );
        remarks
    }
}

/// Why the history cannot be read, and the remedy.
fn of_history(Unreadable { since, because }: Unreadable) -> (String, &'static str) {
    let since = since.to_seconds();
    match because {
        UnreadableReason::Slow => (
            format!("the history cannot be read yet: its database has been opening since {since}"),
            "nothing is lost, and Holdfast continues automatically; check how busy the ledger's \
             disk is: `iostat -x`",
        ),
        UnreadableReason::Refused => (
            format!("the history cannot be read: its database could not be opened since {since}"),
            "nothing is lost, and Holdfast retries automatically; the log has the system's error: \
             `journalctl -u holdfast`",
        ),
        UnreadableReason::Failed => (
            format!(
                "the history cannot be read: its database was closed after an error at {since}"
            ),
            "Holdfast opens it again automatically; check the log for disk errors: `journalctl -u \
             holdfast`",
        ),
    }
}

/// Pods, by name.
fn in_words(pods: &[Holder]) -> String {
    pods.iter().map(|pod| format!("pod {}", pod.in_words())).collect::<Vec<_>>().join(", ")
}

/// The number of problems, in words.
#[must_use]
pub fn problem_summary(problems: &[Problem]) -> String {
    match problems.len() {
        0 => "no problems".into(),
        1 => "one problem".into(),
        count => format!("{count} problems"),
    }
}
