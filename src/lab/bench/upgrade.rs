//! `holdfast bench upgrade`: what the kubelet notices when a daemon hands over to its successor.
//!
//! Two processes of this executable, as in an upgrade, on a simulated kubelet in this process. The
//! kubelet admits one pod after the other without a pause, each with a device. Every round: a time
//! without a handover; then `run --take-over`, until the successor has taken over and its
//! predecessor has ended; then again a time without a handover.
//!
//! With `--in-place` the daemon is ended and started again, as `systemctl restart` does it. No pod
//! is admitted in between, because without a daemon every pod would be rejected.

use super::allocate::Promise;
use super::caller::failed;
use super::instance::{Common, Instance, Interrupts, Offer};
use super::logged_daemon::LoggedDaemon;
use super::report::{Durations, Report, span};
use crate::console::exit::Failed;
use crate::console::progress::Progress;
use crate::console::{Global, block_on};
use crate::domain::ResourceName;
use crate::lab::sim::kubelet::{Event, EventKind, Kubelet, KubeletConfig, PodPhase, PodSpec, View};
use clap::Args;
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// How long the first daemon may take to be there.
const READY_DEADLINE: Duration = Duration::from_secs(30);
/// The time of a round before and after the handover.
const PEACE: Duration = Duration::from_millis(500);

/// How much.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Handovers
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    rounds: u64,
    /// Devices
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=512))]
    devices: u64,
    /// End the daemon and start it again, as `systemctl restart` does, half of the devices held
    #[arg(long)]
    in_place: bool,
    /// What a grant survives when it is answered [default: the configuration's]
    #[arg(long, value_name = "PROMISE")]
    durability: Option<Promise>,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let durability = Promise::durability(options.durability, global)?;
    let offer = Offer { resources: 1, files: options.devices, replicas: 1 };
    let instance = Instance::create(options.common.place(&global.state_dir)?, durability, offer)?;
    let measured = async {
        Ok(match options.in_place {
            true => {
                restarts(options, durability.as_str(), restart_in_place(&instance, options).await?)
            }
            false => report(options, durability.as_str(), measure(&instance, options).await?),
        })
    };
    block_on(async { Interrupts::new()?.or(measured).await })??
        .show(global, options.common.plot.as_deref())
}

/// What was seen in one part of the rounds.
struct Part {
    allocate: Durations,
    /// The longest time of each round from one successful answer to the next.
    silence: Durations,
}

impl Part {
    fn new() -> Result<Self, Failed> {
        Ok(Part { allocate: Durations::new()?, silence: Durations::new()? })
    }
}

/// What was seen in all rounds.
struct Found {
    before: Part,
    during: Part,
    after: Part,
    /// From the start of the successor to the end of its predecessor.
    handover: Durations,
    /// Moments in which the kubelet had no device.
    dips: Durations,
    refused: Vec<String>,
    shrunk: u64,
    registers: u64,
    failed_registers: u64,
}

impl Found {
    fn new() -> Result<Self, Failed> {
        Ok(Found {
            before: Part::new()?,
            during: Part::new()?,
            after: Part::new()?,
            handover: Durations::new()?,
            dips: Durations::new()?,
            refused: Vec::new(),
            shrunk: 0,
            registers: 0,
            failed_registers: 0,
        })
    }

    /// Reads what happened in a round.
    fn read<'a>(&mut self, events: impl Iterator<Item = &'a Event>, round: &Round, devices: usize) {
        let (mut last, mut lost, mut longest) = (round.began, None, [Duration::ZERO; 3]);
        for event in events.filter(|event| event.at >= round.began && event.at < round.ended) {
            match &event.kind {
                EventKind::Allocated { took, .. } => {
                    let part = match event.at.saturating_sub(*took) {
                        asked if asked < round.handover => &mut self.before,
                        asked if asked < round.handed => &mut self.during,
                        _ => &mut self.after,
                    };
                    part.allocate.add(*took);
                    // A silence that the handover meets is the handover's.
                    let part =
                        usize::from(event.at >= round.handover) + usize::from(last >= round.handed);
                    longest[part] = longest[part].max(event.at - last);
                    last = event.at;
                }
                EventKind::Rejected { reason, message, .. } => {
                    self.refused.push(format!("{reason}: {message}"));
                }
                EventKind::Registered { .. } => self.registers += 1,
                EventKind::RegisterFailed { .. } => self.failed_registers += 1,
                EventKind::Disconnected { .. } => lost = lost.or(Some(event.at)),
                EventKind::Listed { healthy, .. } if *healthy < devices => self.shrunk += 1,
                EventKind::Listed { .. } => {
                    lost.take().into_iter().for_each(|since| self.dips.add(event.at - since));
                }
                _ => {}
            }
        }
        for (part, longest) in
            [&mut self.before, &mut self.during, &mut self.after].into_iter().zip(longest)
        {
            part.silence.add(longest);
        }
        self.handover.add(round.handed - round.handover);
    }
}

/// The moments of a round, by the kubelet's clock.
struct Round {
    began: Duration,
    handover: Duration,
    handed: Duration,
    ended: Duration,
}

/// A kubelet and a daemon that offers it all devices.
struct Node {
    kubelet: Kubelet,
    resource: ResourceName,
    devices: usize,
    daemon: LoggedDaemon,
}

impl Node {
    async fn start(instance: &Instance, options: &Options) -> Result<Node, Failed> {
        let resource: ResourceName = Instance::resource(0).parse().map_err(failed)?;
        let devices = usize::try_from(options.devices).unwrap_or(usize::MAX);
        let kubelet =
            Kubelet::start(KubeletConfig::new(instance.kubelet_dir(), instance.roots().host))
                .await?;
        let daemon = LoggedDaemon::start(instance, &["run"])?;
        let offered = kubelet
            .wait_for(|view| view.capacity(&resource).allocatable == devices, READY_DEADLINE)
            .await;
        offered.map_err(|_| failed("the private daemon did not register in time"))?;
        Ok(Node { kubelet, resource, devices, daemon })
    }

    /// Waits until the kubelet has lost all devices since then, and has them again.
    async fn is_back(&self, since: Duration) -> Result<(), Failed> {
        let is_back = |view: &View<'_>| {
            let lost = view
                .last(|kind| matches!(kind, EventKind::Disconnected { .. }))
                .filter(|lost| lost.at >= since);
            let listed = view.last(|kind| matches!(kind, EventKind::Listed { .. }));
            lost.zip(listed).is_some_and(|(lost, listed)| listed.at > lost.at)
        };
        let back = self.kubelet.wait_for(is_back, READY_DEADLINE).await;
        back.map_err(|_| failed("the private daemon did not register again in time"))
    }
}

/// The moments without devices, one for each restart.
async fn restart_in_place(instance: &Instance, options: &Options) -> Result<Durations, Failed> {
    let mut node = Node::start(instance, options).await?;
    for number in 0..node.devices / 2 {
        node.kubelet
            .add_pod(PodSpec::new("bench", format!("pod-{number}")).app("main", &node.resource, 1))
            .await;
    }
    let mut found = Found::new()?;
    let mut progress = Progress::new("restarts measured");
    for number in 0..options.rounds {
        progress.at(
            usize::try_from(number).unwrap_or(usize::MAX),
            usize::try_from(options.rounds).ok(),
        );
        let began = node.kubelet.now();
        tokio::time::sleep(PEACE).await;
        let handover = node.kubelet.now();
        node.daemon.end().await?;
        node.daemon = LoggedDaemon::start(instance, &["run"])?;
        node.is_back(handover).await?;
        let handed = node.kubelet.now();
        tokio::time::sleep(PEACE).await;
        let round = Round { began, handover, handed, ended: node.kubelet.now() };
        node.kubelet.view(|view| found.read(view.events().iter(), &round, node.devices));
    }
    node.daemon.end().await?;
    Ok(found.dips)
}

async fn measure(instance: &Instance, options: &Options) -> Result<Found, Failed> {
    let Node { kubelet, resource, devices, daemon } = Node::start(instance, options).await?;
    let daemon = RefCell::new(Some(daemon));

    let stop = Cell::new(false);
    let rounds = async {
        let mut found = Found::new()?;
        let mut progress = Progress::new("handovers measured");
        for number in 0..options.rounds {
            progress.at(
                usize::try_from(number).unwrap_or(usize::MAX),
                usize::try_from(options.rounds).ok(),
            );
            let began = kubelet.now();
            tokio::time::sleep(PEACE).await;
            let handover = kubelet.now();
            let mut next = LoggedDaemon::start(instance, &["run", "--take-over"])?;
            next.logs("took over from another instance").await?;
            let former = daemon.borrow_mut().replace(next);
            if let Some(former) = former {
                former.end().await?;
            }
            let handed = kubelet.now();
            tokio::time::sleep(PEACE).await;
            let round = Round { began, handover, handed, ended: kubelet.now() };
            kubelet.view(|view| found.read(view.events().iter(), &round, devices));
        }
        Ok(found)
    };
    let rounds = async {
        let found = rounds.await;
        stop.set(true);
        found
    };
    let (found, load) = tokio::join!(rounds, pods_come_and_go(&kubelet, &resource, &stop));
    load?;
    if let Some(last) = daemon.take() {
        last.end().await?;
    }
    found
}

/// One pod after the other is admitted with a device, and deleted.
async fn pods_come_and_go(
    kubelet: &Kubelet,
    resource: &ResourceName,
    stop: &Cell<bool>,
) -> Result<(), Failed> {
    let mut number = 0_u64;
    while !stop.get() {
        number += 1;
        let outcome = kubelet
            .add_pod(PodSpec::new("bench", format!("pod-{number}")).app("main", resource, 1))
            .await;
        if outcome.phase == PodPhase::Pending {
            return Err(failed(format_args!(
                "the private kubelet has ended{}",
                kubelet.panicked().map(|site| format!(": {site}")).unwrap_or_default()
            )));
        }
        kubelet.delete_pod(&outcome.uid)?;
    }
    Ok(())
}

fn restarts(options: &Options, durability: &str, dips: Durations) -> Report {
    let Options { rounds, devices, .. } = options;
    let title =
        format!("Restart in place: {rounds} of a daemon with {devices} devices, {durability}");
    Report {
        heading: "what",
        title: title.clone(),
        document: json!({
            "rounds": rounds,
            "devices": devices,
            "durability": durability,
            "moments_without_devices": dips.document(),
        }),
        rows: vec![("without devices", dips)],
        remarks: vec![title],
    }
}

fn report(options: &Options, durability: &str, found: Found) -> Report {
    let Options { rounds, devices, .. } = options;
    let Found {
        before,
        during,
        after,
        handover,
        dips,
        refused,
        shrunk,
        registers,
        failed_registers,
    } = found;
    let part = |part: &Part| json!({ "allocate": part.allocate.document(), "longest_silence": part.silence.document() });
    let document = json!({
        "rounds": rounds,
        "devices": devices,
        "durability": durability,
        "before": part(&before),
        "during": part(&during),
        "after": part(&after),
        "handover": handover.document(),
        "longest_silence_us": during.silence.us(1.0),
        "refused": refused.len(),
        "lists_that_lost_a_device": shrunk,
        "moments_without_devices": dips.document(),
        "registers": registers,
        "failed_registers": failed_registers,
    });
    let title = format!(
        "Upgrade: {rounds} handovers of {devices} devices, {durability}, pods without a pause"
    );
    let mut remarks = vec![
        title.clone(),
        format!(
            "longest time without an answered Allocate: {}; without a handover {}",
            span(during.silence.us(1.0)),
            span(before.silence.us(1.0).max(after.silence.us(1.0)))
        ),
        format!(
            "refused: {}; lists that lost a device: {shrunk}; moments in which the kubelet had none: {}",
            refused.len(),
            dips.count()
        ),
        format!("Registers: {registers}, and {failed_registers} that failed"),
    ];
    remarks.extend(refused.first().map(|why| format!("the first refusal: {why}")));
    let rows = vec![
        ("Allocate before", before.allocate),
        ("Allocate during", during.allocate),
        ("Allocate after", after.allocate),
        ("longest silence before", before.silence),
        ("longest silence during", during.silence),
        ("longest silence after", after.silence),
        ("without devices", dips),
        ("whole handover", handover),
    ];
    Report { heading: "what", title, document, rows, remarks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::BTreeSet;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn found(events: &[(u64, EventKind)]) -> Found {
        let events: Vec<Event> =
            events.iter().map(|(at, kind)| Event { at: ms(*at), kind: kind.clone() }).collect();
        let round =
            Round { began: ms(1000), handover: ms(2000), handed: ms(3000), ended: ms(4000) };
        let mut found = Found::new().unwrap();
        found.read(events.iter(), &round, 16);
        found
    }

    fn gpu() -> ResourceName {
        "example.com/gpu".parse().unwrap()
    }

    fn allocated(took: u64) -> EventKind {
        let (pod_uid, container) = (String::new(), String::new());
        EventKind::Allocated {
            resource: gpu(),
            pod_uid,
            container,
            devices: BTreeSet::new(),
            took: ms(took),
        }
    }

    /// To three digits, as they are kept.
    fn longest(durations: &Durations) -> (u64, String) {
        (durations.count(), format!("{:.0}", durations.us(1.0) / 1e4))
    }

    #[test]
    fn a_call_belongs_to_when_it_was_asked_and_a_silence_to_the_handover_that_it_meets() {
        let answers = [
            (900, 1),
            (1200, 10),
            (1900, 10),
            (2300, 350),
            (2800, 20),
            (3100, 200),
            (3400, 30),
            (4100, 1),
        ];
        let found = found(&answers.map(|(at, took)| (at, allocated(took))));
        let calls =
            [&found.before, &found.during, &found.after].map(|part| longest(&part.allocate));
        assert_eq!(calls, [(3, "35".into()), (2, "20".into()), (1, "3".into())]);
        let silences =
            [&found.before, &found.during, &found.after].map(|part| longest(&part.silence));
        assert_eq!(silences, [(1, "70".into()), (1, "50".into()), (1, "30".into())]);
        assert_eq!(longest(&found.handover), (1, "100".into()));
    }

    #[test]
    fn what_the_kubelet_has_lost_is_counted_until_it_has_all_of_it_again() {
        let listed = |healthy| EventKind::Listed {
            resource: gpu(),
            client: 2,
            healthy,
            unhealthy: 16 - healthy,
        };
        let rejected = EventKind::Rejected {
            pod_uid: String::new(),
            reason: "Unexpected".into(),
            message: "no endpoint".into(),
        };
        let found = found(&[
            (1500, listed(16)),
            (
                2100,
                EventKind::RegisterFailed {
                    resource: "example.com/gpu".into(),
                    error: "on purpose".into(),
                },
            ),
            (2200, EventKind::Disconnected { resource: gpu(), client: 1 }),
            (2250, rejected),
            (2300, EventKind::Registered { resource: gpu(), client: 2, endpoint: String::new() }),
            (2400, listed(15)),
            (2600, listed(16)),
        ]);
        assert_eq!((found.shrunk, found.registers, found.failed_registers), (1, 1, 1));
        assert_eq!(longest(&found.dips), (1, "40".into()));
        let report = report(&Line::parse_from(["upgrade"]).options, "power-loss", found);
        assert_eq!(report.document["refused"], 1);
        let wanted =
            "refused: 1; lists that lost a device: 1; moments in which the kubelet had none: 1";
        assert_eq!(
            (report.remarks[2].as_str(), report.remarks[4].as_str()),
            (wanted, "the first refusal: Unexpected: no endpoint")
        );
    }
}
