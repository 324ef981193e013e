//! Queries NVML for facts that the driver's files leave open, and requests a rescan when they
//! change.
//!
//! ```text
//!  discovery ─ question (watch) ─▶ task ─ a process for each call ─▶ NVML
//!      ▲──── snapshot (watch), Rescan ──┘
//! ```
//!
//! No caller waits for NVML: the first list is sent without it. A call that does not end is
//! reported as a signal that is off. It is retried with a growing pause, and at most
//! `HANGING_MAX` processes hang. A late answer still counts.
//!
//! Links between GPUs are queried once. If some links are not active, they are queried again for
//! some minutes. The service that sets up the NVLink switches may start later than this daemon.
//! Links are only a preference, so unknown links are not a signal that is off. After these minutes
//! no query wakes up idle GPUs for them.
//!
//! MIG mode is queried in the same way, with one exception: while a GPU is in MIG mode and has no
//! instance, queries continue. When the GPU leaves the mode, it must be offered as a whole, and
//! only NVML reports that.

use crate::domain::{NvmlLibrary, NvmlQuery, NvmlSnapshot, Source, requests_names};
use crate::health::Judgement;
use crate::host::{self, HostRoot, NvmlAnswer, query_nvml};
use crate::messages::{Mailbox, Rescan};
use futures_util::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Calls that may hang at the same time. With this number no call is made before one of them ends.
const HANGING_MAX: usize = 3;

/// The timing of queries.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// After this time a call is reported as hanging. Waking up the GPUs of a node may take tens of
    /// seconds.
    deadline: Duration,
    /// The first pause after a failure. It is doubled with each further try.
    retry: Duration,
    /// The longest pause.
    retry_max: Duration,
    /// The pause after a complete answer. MIG instances can be created again under their old
    /// numbers without an event.
    renew: Duration,
    /// The period of polls. Queries are made at the same moments, when the machine wakes up anyway.
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

/// Makes a call.
type CallNvml = Box<dyn Fn(NvmlQuery) -> BoxFuture<'static, NvmlAnswer> + Send>;

/// The task that queries NVML.
pub(crate) struct NvmlTask {
    /// `None` when the configuration switches NVML off.
    call: Option<CallNvml>,
    question: watch::Receiver<NvmlQuery>,
    snapshot: watch::Sender<Arc<NvmlSnapshot>>,
    /// Whether a call has ended or hangs, or none is possible.
    called: watch::Sender<bool>,
    rescan: Mailbox<Rescan>,
    judgement: Arc<watch::Sender<Judgement>>,
    pace: Pace,
    /// The last logged reason why links or MIG modes are unknown.
    last_logged: Option<String>,
}

/// The answer of one call.
struct CallResult {
    /// The number of the call.
    number: u64,
    question: NvmlQuery,
    answer: NvmlAnswer,
}

impl NvmlTask {
    /// The task, the sender of its question, and the receiver of its snapshots.
    pub(crate) fn new(
        root: HostRoot,
        library: NvmlLibrary,
        rescan: Mailbox<Rescan>,
        judgement: Arc<watch::Sender<Judgement>>,
    ) -> (NvmlTask, Arc<watch::Sender<NvmlQuery>>, watch::Receiver<Arc<NvmlSnapshot>>) {
        let is_on = library != NvmlLibrary::Off;
        let call = is_on.then(|| -> CallNvml {
            Box::new(move |question| Box::pin(query_nvml(root.clone(), library.clone(), question)))
        });
        let (question, question_view) = watch::channel(NvmlQuery::new());
        let (snapshot, snapshot_view) = watch::channel(Arc::default());
        (
            NvmlTask {
                call,
                question: question_view,
                snapshot,
                called: watch::Sender::new(false),
                rescan,
                judgement,
                pace: Pace::default(),
                last_logged: None,
            },
            Arc::new(question),
            snapshot_view,
        )
    }

    /// Another receiver of its snapshots.
    #[cfg(feature = "cluster")]
    pub(crate) fn snapshots(&self) -> watch::Receiver<Arc<NvmlSnapshot>> {
        self.snapshot.subscribe()
    }

    /// Whether a call has ended or hangs, or none is possible: the snapshot has what NVML reports
    /// for now.
    #[cfg(feature = "cluster")]
    pub(crate) fn called(&self) -> watch::Receiver<bool> {
        self.called.subscribe()
    }

    /// Runs until discovery has ended.
    pub(crate) async fn run(mut self) {
        let (results_sender, mut results) = mpsc::channel::<CallResult>(HANGING_MAX);
        // Calls that have not ended; until when the last of them is waited for; when the next one
        // is due.
        let (mut calls, mut waiting, mut due) = (0, None, Some(Instant::now()));
        // The last call, and the last one with an accepted answer. A late answer of an older call
        // is dropped.
        let (mut last, mut accepted) = (0, 0);
        let mut pause = self.pace.retry;
        loop {
            tokio::select! {
                changed = self.question.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    (due, pause) = (Some(Instant::now()), self.pace.retry);
                }
                Some(CallResult { number, question, answer }) = results.recv() => {
                    calls -= 1;
                    let is_complete = number > accepted && self.accept(answer);
                    self.called.send_replace(true);
                    accepted = accepted.max(number);
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
                    self.called.send_replace(true);
                    self.off(&format!("NVML has not answered for {deadline}: the driver hangs, or its GPUs take long to wake up"));
                    due = self.after_failure(&mut pause);
                }
                () = at(due), if waiting.is_none() => {
                    due = None;
                    let question = self.question.borrow_and_update().clone();
                    if question.is_empty() {
                        self.publish(NvmlSnapshot::default());
                        self.on();
                    } else if let Some(call) = &self.call && calls < HANGING_MAX {
                        (last, calls) = (last + 1, calls + 1);
                        waiting = Some(Instant::now() + self.pace.deadline);
                        start_call(call, last, question, results_sender.clone());
                    } else if self.call.is_none() {
                        self.called.send_replace(true);
                        self.off("it is disabled in the configuration (`[nvidia] nvml = \"off\"`)");
                    }
                }
            }
        }
    }

    /// Publishes an answer. Returns whether it was complete.
    fn accept(&mut self, answer: NvmlAnswer) -> bool {
        let renewed = self.snapshot.borrow().merged(answer.facts, &self.question.borrow());
        self.publish(renewed);
        match &answer.failed {
            Some(why) => self.off(&format!("the answer of NVML is incomplete: {why}")),
            None => self.on(),
        }
        if let Some(why) = &answer.incomplete {
            self.log_missing_links(why);
        }
        answer.failed.is_none()
    }

    /// When to query again after an answer.
    fn after(
        &self,
        question: &NvmlQuery,
        is_complete: bool,
        pause: &mut Duration,
    ) -> Option<Instant> {
        if *self.question.borrow() != *question {
            return Some(Instant::now());
        }
        if !is_complete {
            return self.after_failure(pause);
        }
        if question.values().any(|facts| !facts.instances.is_empty()) {
            *pause = self.pace.retry;
            return Some(self.at_tick(self.pace.renew));
        }
        if self.snapshot.borrow().withholds_whole(question) {
            return Some(self.after_pause(pause));
        }
        let is_open = self.snapshot.borrow().is_incomplete_for(question);
        if is_open { self.until_longest_pause(pause) } else { None }
    }

    fn publish(&self, snapshot: NvmlSnapshot) {
        let is_news = self.snapshot.send_if_modified(|known| {
            **known != snapshot && {
                *known = Arc::new(snapshot);
                true
            }
        });
        if is_news {
            self.rescan.send(Rescan { asked_at: host::now().boot });
        }
    }

    /// Records and logs each reason once. Where no names are asked for, it only logs.
    fn off(&mut self, why: &str) {
        if !requests_names(&self.question.borrow()) {
            self.judgement
                .send_if_modified(|judgement| judgement.off.remove(&Source::Nvml).is_some());
            return self.log_missing_links(why);
        }
        let known = |judgement: &Judgement| {
            judgement.off.get(&Source::Nvml).is_some_and(|known| known == why)
        };
        let is_news = self.judgement.send_if_modified(|judgement| {
            !known(judgement) && {
                judgement.off.insert(Source::Nvml, why.to_owned());
                true
            }
        });
        if is_news {
            tracing::info!(
                why,
                "NVML is not available; the UUIDs of MIG instances, and of GPUs that no process \
                 has used yet, are unknown"
            );
        }
    }

    fn log_missing_links(&mut self, why: &str) {
        if self.last_logged.as_deref() != Some(why) {
            let what = "the NVLink connections, the MIG mode and the memory of GPUs are unknown";
            tracing::info!(why, "{what}; GPUs that are close on PCI Express are preferred");
            self.last_logged = Some(why.to_owned());
        }
    }

    fn on(&self) {
        if self
            .judgement
            .send_if_modified(|judgement| judgement.off.remove(&Source::Nvml).is_some())
        {
            tracing::info!("NVML is answering again");
        }
    }

    fn after_failure(&self, pause: &mut Duration) -> Option<Instant> {
        if requests_names(&self.question.borrow()) {
            Some(self.after_pause(pause))
        } else {
            self.until_longest_pause(pause)
        }
    }

    /// Retries until the pause has reached its maximum.
    fn until_longest_pause(&self, pause: &mut Duration) -> Option<Instant> {
        (*pause < self.pace.retry_max).then(|| self.after_pause(pause))
    }

    fn after_pause(&self, pause: &mut Duration) -> Instant {
        let at = self.at_tick(*pause);
        *pause = (*pause * 2).min(self.pace.retry_max);
        at
    }

    fn at_tick(&self, pause: Duration) -> Instant {
        at_tick(pause, self.pace.tick)
    }
}

/// The first moment of a poll with the period `tick` after `pause`.
pub(super) fn at_tick(pause: Duration, tick: Duration) -> Instant {
    let now = Instant::now();
    let ticks = |until: Duration| until.as_nanos().saturating_sub(1) / tick.as_nanos().max(1);
    let more = u32::try_from(ticks(pause)).unwrap_or(u32::MAX);
    now + host::until_tick(tick) + tick * more
}

fn start_call(
    call: &CallNvml,
    number: u64,
    question: NvmlQuery,
    results: mpsc::Sender<CallResult>,
) {
    let answer = call(question.clone());
    tokio::spawn(async move {
        let answer = answer.await;
        // The send fails only when the daemon ends.
        drop(results.send(CallResult { number, question, answer }).await);
    });
}

pub(super) async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{MigInstance, NvLinks, NvmlGpu, NvmlGpuQuery, PciAddress};
    use crate::messages::{CallError, Deliver};
    use std::sync::Mutex;
    use tokio::sync::oneshot;

    /// A discovery that ignores requests.
    struct IgnoringDiscovery;

    impl Deliver<Rescan> for IgnoringDiscovery {
        fn call(&self, _: Rescan, _: Duration) -> BoxFuture<'static, Result<Duration, CallError>> {
            Box::pin(std::future::ready(Ok(Duration::ZERO)))
        }

        fn send(&self, _: Rescan) {}
    }

    /// A task whose calls end when the test ends them.
    struct Setup {
        calls: Arc<Mutex<Vec<Option<oneshot::Sender<NvmlAnswer>>>>>,
        made: watch::Receiver<usize>,
        question: watch::Sender<NvmlQuery>,
        snapshot: watch::Receiver<Arc<NvmlSnapshot>>,
        judgement: watch::Receiver<Judgement>,
    }

    const HANG: Duration = Duration::from_secs(60);

    fn gpu() -> PciAddress {
        "0000:18:00.0".parse().unwrap()
    }

    fn answer(name: &str) -> NvmlAnswer {
        let gpus = [(
            gpu(),
            NvmlGpu {
                instances: [(
                    (1, 0),
                    MigInstance { uuid: name.to_owned(), ..MigInstance::default() },
                )]
                .into(),
                ..NvmlGpu::default()
            },
        )]
        .into();
        NvmlAnswer { facts: NvmlSnapshot { gpus }, ..NvmlAnswer::default() }
    }

    impl Setup {
        fn begin(pace: Pace) -> Setup {
            Setup::with_question(NvmlGpuQuery::names([(1, 0)]), pace)
        }

        fn with_question(facts: NvmlGpuQuery, pace: Pace) -> Setup {
            let calls: Arc<Mutex<Vec<Option<oneshot::Sender<NvmlAnswer>>>>> = Arc::default();
            let (made, made_view) = watch::channel(0);
            let log = Arc::clone(&calls);
            let call: CallNvml = Box::new(move |_| {
                let (reply, answer) = oneshot::channel();
                let mut calls = log.lock().unwrap();
                calls.push(Some(reply));
                let hanging = calls.iter().flatten().count();
                assert!(hanging <= HANGING_MAX, "{hanging} calls hang");
                made.send_modify(|made| *made += 1);
                Box::pin(async move { answer.await.unwrap() })
            });
            let (question, question_view) = watch::channel([(gpu(), facts)].into());
            let (snapshot, snapshot_view) = watch::channel(Arc::default());
            let (judgement, judgement_view) = watch::channel(Judgement::default());
            let (rescan, judgement) = (Mailbox::new(IgnoringDiscovery), Arc::new(judgement));
            let task = NvmlTask {
                call: Some(call),
                question: question_view,
                snapshot,
                called: watch::Sender::new(false),
                rescan,
                judgement,
                pace,
                last_logged: None,
            };
            tokio::spawn(task.run());
            Setup {
                calls,
                made: made_view,
                question,
                snapshot: snapshot_view,
                judgement: judgement_view,
            }
        }

        async fn made(&mut self, calls: usize) {
            tokio::time::timeout(HANG, self.made.wait_for(|made| *made >= calls))
                .await
                .unwrap()
                .unwrap();
        }

        /// Ends a call and waits until the task has processed the answer.
        async fn end(&self, call: usize, answer: NvmlAnswer) {
            let reply = self.calls.lock().unwrap()[call].take().unwrap();
            reply.send(answer).unwrap();
            self.settle().await;
        }

        /// Gives every other task of this thread its turns.
        async fn settle(&self) {
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
        }

        fn name(&self) -> Option<String> {
            self.snapshot.borrow().instance(gpu(), (1, 0)).map(|it| it.uuid.clone())
        }

        fn off(&self) -> Option<String> {
            self.judgement.borrow().off.get(&Source::Nvml).cloned()
        }
    }

    /// Pauses so short that a test need not wait.
    const SHORT_PAUSES: Pace = Pace {
        deadline: Duration::from_millis(1),
        retry: Duration::from_millis(1),
        retry_max: Duration::from_millis(2),
        renew: HANG,
        tick: Duration::from_millis(1),
    };

    #[tokio::test]
    async fn hanging_calls_are_reported_and_bounded_and_late_answers_are_dropped() {
        let mut setup = Setup::begin(SHORT_PAUSES);
        setup.made(HANGING_MAX).await;
        let off = setup.judgement.wait_for(|judgement| judgement.off.contains_key(&Source::Nvml));
        tokio::time::timeout(HANG, off).await.unwrap().unwrap();
        assert!(setup.off().unwrap().contains("has not answered for 1ms"), "{:?}", setup.off());
        // Another question arrives, but no further call is made: the limit of hanging calls is
        // reached.
        setup.question.send_modify(|_| ());
        setup.settle().await;

        setup.end(1, answer("MIG-new")).await;
        assert_eq!(setup.name().as_deref(), Some("MIG-new"), "late, but an answer");
        setup.end(0, answer("MIG-old")).await;
        assert_eq!(setup.name().as_deref(), Some("MIG-new"));
        // Calls that have ended free their place.
        setup.made(HANGING_MAX + 2).await;
        setup.end(HANGING_MAX + 1, answer("MIG-newest")).await;
        assert_eq!(setup.name().as_deref(), Some("MIG-newest"));
    }

    #[tokio::test]
    async fn a_failure_keeps_known_names_and_removed_instances_are_forgotten() {
        let mut setup = Setup::begin(Pace { deadline: HANG, ..SHORT_PAUSES });
        setup.made(1).await;
        setup.end(0, NvmlAnswer { failed: Some("half of it".into()), ..answer("MIG-1") }).await;
        assert_eq!(setup.name().as_deref(), Some("MIG-1"));
        assert!(setup.off().unwrap().contains("half of it"));
        setup.made(2).await;
        setup
            .end(1, NvmlAnswer { failed: Some("all of it".into()), ..NvmlAnswer::default() })
            .await;
        assert_eq!(setup.name().as_deref(), Some("MIG-1"));
        setup.made(3).await;
        setup.end(2, answer("MIG-1")).await;
        assert_eq!(setup.off(), None);
        // The instance was removed; then the driver's files contain everything.
        setup.question.send_replace(NvmlQuery::new());
        tokio::time::timeout(HANG, setup.snapshot.wait_for(|known| known.gpus.is_empty()))
            .await
            .unwrap()
            .unwrap();
        assert_eq!((setup.off(), *setup.made.borrow()), (None, 3));
    }

    #[tokio::test]
    async fn a_changed_question_is_queried_after_the_running_call() {
        let mut setup =
            Setup::begin(Pace { deadline: HANG, retry: HANG, retry_max: HANG, ..SHORT_PAUSES });
        setup.made(1).await;
        setup.question.send_replace([(gpu(), NvmlGpuQuery::names([(1, 0), (2, 0)]))].into());
        setup.settle().await;
        assert_eq!(*setup.made.borrow(), 1, "one call at a time");
        setup.end(0, answer("MIG-1")).await;
        setup.made(2).await;
        assert_eq!(setup.name().as_deref(), Some("MIG-1"));
    }

    fn links(down: u32) -> NvmlAnswer {
        let links = Some(NvLinks { down, ..NvLinks::default() });
        let gpus = [(gpu(), NvmlGpu { links, ..NvmlGpu::default() })].into();
        NvmlAnswer { facts: NvmlSnapshot { gpus }, ..NvmlAnswer::default() }
    }

    /// Tries after 1 ms, 2 ms and 4 ms, and then none.
    const FOR_LINKS: Pace =
        Pace { deadline: HANG, retry_max: Duration::from_millis(8), ..SHORT_PAUSES };

    #[tokio::test]
    async fn inactive_links_are_queried_again_for_some_minutes() {
        let facts = || NvmlGpuQuery { links: true, ..NvmlGpuQuery::default() };
        let mut setup = Setup::with_question(facts(), FOR_LINKS);
        for call in 0..2 {
            setup.made(call + 1).await;
            setup.end(call, links(4)).await;
        }
        setup.made(3).await;
        setup.end(2, links(0)).await;
        assert!(!setup.snapshot.borrow().is_incomplete_for(&[(gpu(), facts())].into()));
        assert_eq!((*setup.made.borrow(), setup.off()), (3, None));

        let mut setup = Setup::with_question(facts(), FOR_LINKS);
        for call in 0..4 {
            setup.made(call + 1).await;
            let failed = NvmlAnswer { failed: Some("no driver".into()), ..NvmlAnswer::default() };
            setup.end(call, if call % 2 == 0 { failed } else { links(4) }).await;
            assert_eq!(setup.off(), None, "unknown preferences do not report the signal as off");
        }
        setup.question.send_replace([(gpu(), NvmlGpuQuery { uuid: true, ..facts() })].into());
        setup.made(5).await;
        setup
            .end(4, NvmlAnswer { failed: Some("no driver".into()), ..NvmlAnswer::default() })
            .await;
        assert!(setup.off().unwrap().contains("no driver"), "unknown names do");
    }

    #[tokio::test]
    async fn a_gpu_in_mig_mode_without_instances_is_queried_until_it_leaves_the_mode() {
        let answer = |mig_mode| {
            let gpus = [(gpu(), NvmlGpu { mig_mode: Some(mig_mode), ..NvmlGpu::default() })].into();
            NvmlAnswer { facts: NvmlSnapshot { gpus }, ..NvmlAnswer::default() }
        };
        let mut setup = Setup::with_question(
            NvmlGpuQuery { mig_mode: true, ..NvmlGpuQuery::default() },
            FOR_LINKS,
        );
        // More often than links.
        for call in 0..8 {
            setup.made(call + 1).await;
            setup.end(call, answer(true)).await;
            assert!(setup.snapshot.borrow().is_in_mig_mode(gpu()));
        }
        setup.made(9).await;
        setup.end(8, answer(false)).await;
        assert!(!setup.snapshot.borrow().is_in_mig_mode(gpu()));
        tokio::time::sleep(FOR_LINKS.retry_max * 4).await;
        assert_eq!(
            (*setup.made.borrow(), setup.off()),
            (9, None),
            "an idle GPU is not woken up for it"
        );
    }

    #[test]
    fn links_are_queried_for_some_minutes_and_names_as_long_as_needed() {
        let (question, question_view) = watch::channel(
            [(gpu(), NvmlGpuQuery { links: true, ..NvmlGpuQuery::default() })].into(),
        );
        let (rescan, judgement) =
            (Mailbox::new(IgnoringDiscovery), Arc::new(watch::channel(Judgement::default()).0));
        let snapshot = watch::channel(Arc::default()).0;
        let task = NvmlTask {
            call: None,
            question: question_view,
            snapshot,
            called: watch::Sender::new(false),
            rescan,
            judgement,
            pace: Pace::default(),
            last_logged: None,
        };
        let tries = |pause: &mut Duration| {
            (0..20).take_while(|_| task.after_failure(pause).is_some()).count()
        };
        assert_eq!(
            tries(&mut Duration::from_secs(10)),
            6,
            "after 10, 20, 40, 80, 160 and 320 seconds"
        );
        question.send_replace([(gpu(), NvmlGpuQuery::names([]))].into());
        assert_eq!(tries(&mut Duration::from_secs(10)), 20);
    }

    #[test]
    fn retries_are_made_at_the_ticks_of_polls() {
        let (_, question) = watch::channel(NvmlQuery::new());
        let task = NvmlTask {
            call: None,
            question,
            snapshot: watch::channel(Arc::default()).0,
            called: watch::Sender::new(false),
            rescan: Mailbox::new(IgnoringDiscovery),
            judgement: Arc::new(watch::channel(Judgement::default()).0),
            pace: Pace::default(),
            last_logged: None,
        };
        let mut pause = task.pace.retry;
        let mut seen = Vec::new();
        for _ in 0..8 {
            seen.push(pause.as_secs());
            let before = Instant::now();
            let at = task.after_pause(&mut pause);
            let wait = at - before;
            let ticks = task.pace.tick.as_nanos();
            let from_tick = (host::now().boot + (at - Instant::now())).as_nanos() % ticks;
            assert!(
                from_tick < 1_000_000_000 || from_tick > ticks - 1_000_000_000,
                "{wait:?} ends {from_tick} ns after a tick"
            );
        }
        assert_eq!(seen, [10, 20, 40, 80, 160, 320, 600, 600]);
    }
}
