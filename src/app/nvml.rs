//! Asks NVML for what discovery has found no answer to in the driver's files, and has discovery look again when it is told.
//!
//! ```text
//!  discovery ─ question (watch) ─▶ asker ─ a thread for each call ─▶ NVML
//!      ▲──── snapshot (watch), Rescan ──┘
//! ```
//!
//! Nobody waits for it: the first list goes out without it. A call that does not end is told as a signal that is off and tried
//! again ever more rarely, on so many threads at most; an answer that comes late counts all the same.

use crate::domain::{NvmlLibrary, NvmlQuestion, NvmlSnapshot, Source};
use crate::health::Judgement;
use crate::host::{self, HostRoot, NvmlAnswer, ask_nvml};
use crate::messages::{Mailbox, Rescan};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Calls that may hang. With so many nothing is asked any more before one of them ends.
const HANGING_MAX: usize = 3;

/// How patient the asker is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// After so long a call is told as hanging. To wake up the GPUs of a node may take tens of seconds.
    deadline: Duration,
    /// How long after a failure it is tried again; doubled from time to time.
    retry: Duration,
    /// But not longer than this.
    retry_max: Duration,
    /// MIG instances can be made anew under their old numbers, and nothing tells.
    renew: Duration,
    /// The moments of polls, for which the machine is woken up anyway.
    tick: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            deadline: Duration::from_secs(60),
            retry: Duration::from_secs(10),
            retry_max: Duration::from_secs(600),
            renew: Duration::from_secs(300),
            tick: Duration::from_secs(30),
        }
    }
}

/// Who asks.
#[derive(Debug)]
pub(super) struct Asker {
    pub(super) host_root: HostRoot,
    pub(super) library: NvmlLibrary,
    pub(super) question: watch::Receiver<NvmlQuestion>,
    pub(super) snapshot: watch::Sender<Arc<NvmlSnapshot>>,
    pub(super) rescan: Mailbox<Rescan>,
    pub(super) judgement: Arc<watch::Sender<Judgement>>,
    pub(super) pace: Pace,
}

/// The answer of one call.
struct Told {
    /// The call.
    number: u64,
    question: NvmlQuestion,
    answer: NvmlAnswer,
}

impl Asker {
    /// Until discovery is gone.
    pub(super) async fn run(mut self) {
        let (tell, mut told) = mpsc::channel::<Told>(HANGING_MAX);
        // Calls that have not ended; until when the last of them is waited for; when the next one is due.
        let (mut calls, mut waiting, mut due) = (0, None, Some(Instant::now()));
        // The last call, and the last one whose answer was taken: it is not undone by one that comes late.
        let (mut last, mut taken) = (0, 0);
        let mut pause = self.pace.retry;
        loop {
            tokio::select! {
                changed = self.question.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    (due, pause) = (Some(Instant::now()), self.pace.retry);
                }
                Some(Told { number, question, answer }) = told.recv() => {
                    calls -= 1;
                    let is_complete = number > taken && self.take(answer);
                    taken = taken.max(number);
                    if number == last {
                        waiting = None;
                        due = self.after(&question, is_complete, &mut pause);
                    } else if waiting.is_none() && due.is_none() {
                        due = Some(Instant::now());
                    }
                }
                () = at(waiting) => {
                    waiting = None;
                    let deadline = humantime::format_duration(self.pace.deadline);
                    self.off(&format!("NVML has not answered for {deadline}: the driver hangs, or its GPUs take long to wake up"));
                    due = Some(self.after_failure(&mut pause));
                }
                () = at(due), if waiting.is_none() => {
                    due = None;
                    let question = self.question.borrow_and_update().clone();
                    if question.is_empty() {
                        self.publish(NvmlSnapshot::default());
                        self.on();
                    } else if self.library == NvmlLibrary::Off {
                        self.off("the configuration says so (`[nvidia] nvml = \"off\"`)");
                    } else if calls < HANGING_MAX {
                        match self.ask(last + 1, question, tell.clone()) {
                            Ok(()) => (last, calls, waiting) = (last + 1, calls + 1, Some(Instant::now() + self.pace.deadline)),
                            Err(error) => {
                                self.off(&format!("there is no thread to ask NVML on ({error})"));
                                due = Some(self.after_failure(&mut pause));
                            }
                        }
                    }
                }
            }
        }
    }

    fn ask(&self, number: u64, question: NvmlQuestion, tell: mpsc::Sender<Told>) -> std::io::Result<()> {
        let asked = question.clone();
        // A send that fails is one to a daemon that ends.
        ask_nvml(&self.host_root, &self.library, asked, move |answer| drop(tell.blocking_send(Told { number, question, answer })))
    }

    /// Whether the answer was complete.
    fn take(&self, answer: NvmlAnswer) -> bool {
        let renewed = self.snapshot.borrow().renewed(answer.told, &self.question.borrow());
        self.publish(renewed);
        match &answer.failed {
            Some(why) => self.off(&format!("NVML does not tell everything: {why}")),
            None => self.on(),
        }
        answer.failed.is_none()
    }

    /// When to ask again after an answer.
    fn after(&self, question: &NvmlQuestion, is_complete: bool, pause: &mut Duration) -> Option<Instant> {
        if *self.question.borrow() != *question {
            return Some(Instant::now());
        }
        if !is_complete {
            return Some(self.after_failure(pause));
        }
        *pause = self.pace.retry;
        let can_change = question.values().any(|instances| !instances.is_empty());
        can_change.then(|| self.at_tick(self.pace.renew))
    }

    fn publish(&self, snapshot: NvmlSnapshot) {
        let is_news = self.snapshot.send_if_modified(|known| {
            **known != snapshot && {
                *known = Arc::new(snapshot);
                true
            }
        });
        if is_news {
            self.rescan.tell(Rescan { asked_at: host::now().boot });
        }
    }

    /// Says it once for each reason.
    fn off(&self, why: &str) {
        let known = |judgement: &Judgement| judgement.off.get(&Source::Nvml).is_some_and(|known| known == why);
        let is_news = self.judgement.send_if_modified(|judgement| {
            !known(judgement) && {
                judgement.off.insert(Source::Nvml, why.to_owned());
                true
            }
        });
        if is_news {
            tracing::info!(why, "what only NVML tells is not known: UUIDs of MIG instances, and of GPUs that nobody has used yet");
        }
    }

    fn on(&self) {
        if self.judgement.send_if_modified(|judgement| judgement.off.remove(&Source::Nvml).is_some()) {
            tracing::info!("NVML tells again all that it is asked for");
        }
    }

    fn after_failure(&self, pause: &mut Duration) -> Instant {
        let at = self.at_tick(*pause);
        *pause = (*pause * 2).min(self.pace.retry_max);
        at
    }

    /// The first moment of a poll after `pause`.
    fn at_tick(&self, pause: Duration) -> Instant {
        let now = Instant::now();
        let ticks = |until: Duration| until.as_nanos().saturating_sub(1) / self.pace.tick.as_nanos().max(1);
        let first = host::until_tick(self.pace.tick);
        let more = u32::try_from(ticks(pause)).unwrap_or(u32::MAX);
        now + first + self.pace.tick * more
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
