//! Queries NVML for facts that the driver's files leave open, and requests a rescan when they
//! change.
//!
//! ```text
//!  discovery ─ question (watch) ─▶ asker ─ a thread for each call ─▶ NVML
//!      ▲──── snapshot (watch), Rescan ──┘
//! ```
//!
//! No caller waits for NVML: the first list is sent without it. A call that does not end is
//! reported as a signal that is off. It is retried with a growing pause, and at most
//! `HANGING_MAX` threads hang. A late answer still counts.
//!
//! Links between GPUs are queried once. If some links are not active, they are queried again for
//! some minutes. The service that sets up the NVLink switches may start later than this daemon.
//! Links are only a preference, so unknown links are not a signal that is off. After these minutes
//! no query wakes up idle GPUs for them.
//!
//! MIG mode is queried in the same way, with one exception: while a GPU is in MIG mode and has no
//! instance, queries continue. When the GPU leaves the mode, it must be offered as a whole, and
//! only NVML reports that.

use super::{Actors, Settings};
use crate::domain::{NvmlLibrary, NvmlQuery, NvmlSnapshot, Source, requests_names};
use crate::health::Judgement;
use crate::host::{self, HostRoot, NvmlAnswer, query_nvml};
use crate::messages::{Mailbox, Rescan};
use std::io;
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

/// Delivers the answer of a call, once.
type Tell = Box<dyn FnOnce(NvmlAnswer) + Send>;
/// Makes a call on a thread of its own.
type Ask = Box<dyn Fn(NvmlQuery, Tell) -> io::Result<()> + Send>;

/// The task that queries NVML.
pub(super) struct Asker {
    /// `None` when the configuration switches NVML off.
    call: Option<Ask>,
    question: watch::Receiver<NvmlQuery>,
    snapshot: watch::Sender<Arc<NvmlSnapshot>>,
    rescan: Mailbox<Rescan>,
    judgement: Arc<watch::Sender<Judgement>>,
    pace: Pace,
    /// The last logged reason why links or MIG modes are unknown.
    said: Option<String>,
}

/// The answer of one call.
struct Told {
    /// The number of the call.
    number: u64,
    question: NvmlQuery,
    answer: NvmlAnswer,
}

impl Asker {
    /// The asker, the sender of its question, and the receiver of its snapshots.
    pub(super) fn new(
        settings: &Settings,
        actors: &Actors,
        judgement: &Arc<watch::Sender<Judgement>>,
    ) -> (Asker, Arc<watch::Sender<NvmlQuery>>, watch::Receiver<Arc<NvmlSnapshot>>) {
        let (root, library) = (HostRoot::new(&settings.roots.host), settings.config.nvml.clone());
        let is_on = library != NvmlLibrary::Off;
        let call = is_on.then(|| -> Ask { Box::new(move |question, tell| query_nvml(&root, &library, question, tell)) });
        let (question, asked) = watch::channel(NvmlQuery::new());
        let (snapshot, told) = watch::channel(Arc::default());
        let (rescan, judgement) = (actors.discovery.mailbox(), Arc::clone(judgement));
        (Asker { call, question: asked, snapshot, rescan, judgement, pace: Pace::default(), said: None }, Arc::new(question), told)
    }

    /// Runs until discovery has ended.
    pub(super) async fn run(mut self) {
        let (tell, mut told) = mpsc::channel::<Told>(HANGING_MAX);
        // Calls that have not ended; until when the last of them is waited for; when the next one
        // is due.
        let (mut calls, mut waiting, mut due) = (0, None, Some(Instant::now()));
        // The last call, and the last one with an accepted answer. A late answer of an older call
        // is dropped.
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
                    due = self.after_failure(&mut pause);
                }
                () = at(due), if waiting.is_none() => {
                    due = None;
                    let question = self.question.borrow_and_update().clone();
                    if question.is_empty() {
                        self.publish(NvmlSnapshot::default());
                        self.on();
                    } else if let Some(call) = &self.call && calls < HANGING_MAX {
                        match ask(call, last + 1, question, tell.clone()) {
                            Ok(()) => (last, calls, waiting) = (last + 1, calls + 1, Some(Instant::now() + self.pace.deadline)),
                            Err(error) => {
                                self.off(&format!("there is no thread to ask NVML on ({error})"));
                                due = self.after_failure(&mut pause);
                            }
                        }
                    } else if self.call.is_none() {
                        self.off("the configuration says so (`[nvidia] nvml = \"off\"`)");
                    }
                }
            }
        }
    }

    /// Publishes an answer. Returns whether it was complete.
    fn take(&mut self, answer: NvmlAnswer) -> bool {
        let renewed = self.snapshot.borrow().merged(answer.facts, &self.question.borrow());
        self.publish(renewed);
        match &answer.failed {
            Some(why) => self.off(&format!("NVML does not tell everything: {why}")),
            None => self.on(),
        }
        if let Some(why) = &answer.incomplete {
            self.without_the_rest(why);
        }
        answer.failed.is_none()
    }

    /// When to query again after an answer.
    fn after(&self, question: &NvmlQuery, is_complete: bool, pause: &mut Duration) -> Option<Instant> {
        if *self.question.borrow() != *question {
            return Some(Instant::now());
        }
        if !is_complete {
            return self.after_failure(pause);
        }
        if question.values().any(|asked| !asked.instances.is_empty()) {
            *pause = self.pace.retry;
            return Some(self.at_tick(self.pace.renew));
        }
        if self.snapshot.borrow().withholds_whole(question) {
            return Some(self.after_pause(pause));
        }
        let is_open = self.snapshot.borrow().is_incomplete_for(question);
        if is_open { self.for_some_minutes(pause) } else { None }
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

    /// Records and logs each reason once. Where no names are asked for, it only logs.
    fn off(&mut self, why: &str) {
        if !requests_names(&self.question.borrow()) {
            self.judgement.send_if_modified(|judgement| judgement.off.remove(&Source::Nvml).is_some());
            return self.without_the_rest(why);
        }
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

    fn without_the_rest(&mut self, why: &str) {
        if self.said.as_deref() != Some(why) {
            let what = "which GPUs are joined by NVLink, and which are in MIG mode, is not known";
            tracing::info!(why, "{what}; those that are near on PCI Express are preferred");
            self.said = Some(why.to_owned());
        }
    }

    fn on(&self) {
        if self.judgement.send_if_modified(|judgement| judgement.off.remove(&Source::Nvml).is_some()) {
            tracing::info!("NVML tells again all that it is asked for");
        }
    }

    fn after_failure(&self, pause: &mut Duration) -> Option<Instant> {
        if requests_names(&self.question.borrow()) { Some(self.after_pause(pause)) } else { self.for_some_minutes(pause) }
    }

    /// Retries until the pause has reached its maximum.
    fn for_some_minutes(&self, pause: &mut Duration) -> Option<Instant> {
        (*pause < self.pace.retry_max).then(|| self.after_pause(pause))
    }

    fn after_pause(&self, pause: &mut Duration) -> Instant {
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

fn ask(call: &Ask, number: u64, question: NvmlQuery, tell: mpsc::Sender<Told>) -> io::Result<()> {
    let asked = question.clone();
    // The send fails only when the daemon ends.
    call(asked, Box::new(move |answer| drop(tell.blocking_send(Told { number, question, answer }))))
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{NvLinks, NvmlGpu, NvmlGpuQuery, PciAddress};
    use crate::messages::{CallError, Door};
    use futures_util::future::BoxFuture;
    use std::sync::Mutex;

    /// A discovery that ignores requests.
    struct Looks;

    impl Door<Rescan> for Looks {
        fn call(&self, _: Rescan, _: Duration) -> BoxFuture<'static, Result<(), CallError>> {
            Box::pin(std::future::ready(Ok(())))
        }

        fn tell(&self, _: Rescan) {}
    }

    /// An asker whose calls end when the test ends them.
    struct Stage {
        calls: Arc<Mutex<Vec<Option<Tell>>>>,
        made: watch::Receiver<usize>,
        question: watch::Sender<NvmlQuery>,
        snapshot: watch::Receiver<Arc<NvmlSnapshot>>,
        judgement: watch::Receiver<Judgement>,
    }

    const HANG: Duration = Duration::from_secs(60);

    fn gpu() -> PciAddress {
        "0000:18:00.0".parse().unwrap()
    }

    fn told(name: &str) -> NvmlAnswer {
        let gpus = [(gpu(), NvmlGpu { instances: [((1, 0), name.to_owned())].into(), ..NvmlGpu::default() })].into();
        NvmlAnswer { facts: NvmlSnapshot { gpus }, ..NvmlAnswer::default() }
    }

    impl Stage {
        fn begin(pace: Pace) -> Stage {
            Stage::asking(NvmlGpuQuery::names([(1, 0)]), pace)
        }

        fn asking(asked: NvmlGpuQuery, pace: Pace) -> Stage {
            let calls: Arc<Mutex<Vec<Option<Tell>>>> = Arc::default();
            let (made, made_view) = watch::channel(0);
            let log = Arc::clone(&calls);
            let call: Ask = Box::new(move |_, tell| {
                let mut calls = log.lock().unwrap();
                calls.push(Some(tell));
                let hanging = calls.iter().flatten().count();
                assert!(hanging <= HANGING_MAX, "{hanging} calls hang");
                made.send_modify(|made| *made += 1);
                Ok(())
            });
            let (question, asked) = watch::channel([(gpu(), asked)].into());
            let (snapshot, snapshot_view) = watch::channel(Arc::default());
            let (judgement, judgement_view) = watch::channel(Judgement::default());
            let (rescan, judgement) = (Mailbox::new(Looks), Arc::new(judgement));
            let asker = Asker { call: Some(call), question: asked, snapshot, rescan, judgement, pace, said: None };
            tokio::spawn(asker.run());
            Stage { calls, made: made_view, question, snapshot: snapshot_view, judgement: judgement_view }
        }

        async fn made(&mut self, calls: usize) {
            tokio::time::timeout(HANG, self.made.wait_for(|made| *made >= calls)).await.unwrap().unwrap();
        }

        /// Ends a call and waits until the asker has processed the answer.
        async fn end(&self, call: usize, answer: NvmlAnswer) {
            let tell = self.calls.lock().unwrap()[call].take().unwrap();
            std::thread::spawn(move || tell(answer)).join().unwrap();
            self.settle().await;
        }

        /// Gives every other task of this thread its turns.
        async fn settle(&self) {
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
        }

        fn name(&self) -> Option<String> {
            self.snapshot.borrow().instance(gpu(), (1, 0)).map(str::to_owned)
        }

        fn off(&self) -> Option<String> {
            self.judgement.borrow().off.get(&Source::Nvml).cloned()
        }
    }

    /// Pauses so short that a test need not wait.
    const HASTY: Pace = Pace {
        deadline: Duration::from_millis(1),
        retry: Duration::from_millis(1),
        retry_max: Duration::from_millis(2),
        renew: HANG,
        tick: Duration::from_millis(1),
    };

    #[tokio::test]
    async fn calls_that_hang_are_told_and_bounded_and_an_older_answer_undoes_no_newer_one() {
        let mut stage = Stage::begin(HASTY);
        stage.made(HANGING_MAX).await;
        let off = stage.judgement.wait_for(|judgement| judgement.off.contains_key(&Source::Nvml));
        tokio::time::timeout(HANG, off).await.unwrap().unwrap();
        assert!(stage.off().unwrap().contains("has not answered for 1ms"), "{:?}", stage.off());
        // Another question arrives, but no further call is made: the limit of hanging calls is
        // reached.
        stage.question.send_modify(|_| ());
        stage.settle().await;

        stage.end(1, told("MIG-new")).await;
        assert_eq!(stage.name().as_deref(), Some("MIG-new"), "late, but an answer");
        stage.end(0, told("MIG-old")).await;
        assert_eq!(stage.name().as_deref(), Some("MIG-new"));
        // Calls that have ended free their place.
        stage.made(HANGING_MAX + 2).await;
        stage.end(HANGING_MAX + 1, told("MIG-newest")).await;
        assert_eq!(stage.name().as_deref(), Some("MIG-newest"));
    }

    #[tokio::test]
    async fn a_failure_takes_no_name_away_and_what_is_gone_is_forgotten() {
        let mut stage = Stage::begin(Pace { deadline: HANG, ..HASTY });
        stage.made(1).await;
        stage.end(0, NvmlAnswer { failed: Some("half of it".into()), ..told("MIG-1") }).await;
        assert_eq!(stage.name().as_deref(), Some("MIG-1"));
        assert!(stage.off().unwrap().contains("half of it"));
        stage.made(2).await;
        stage.end(1, NvmlAnswer { failed: Some("all of it".into()), ..NvmlAnswer::default() }).await;
        assert_eq!(stage.name().as_deref(), Some("MIG-1"));
        stage.made(3).await;
        stage.end(2, told("MIG-1")).await;
        assert_eq!(stage.off(), None);
        // The instance was removed; then the driver's files contain everything.
        stage.question.send_replace(NvmlQuery::new());
        tokio::time::timeout(HANG, stage.snapshot.wait_for(|known| known.gpus.is_empty())).await.unwrap().unwrap();
        assert_eq!((stage.off(), *stage.made.borrow()), (None, 3));
    }

    #[tokio::test]
    async fn a_question_that_changes_meanwhile_is_asked_when_the_call_has_ended() {
        let mut stage = Stage::begin(Pace { deadline: HANG, retry: HANG, retry_max: HANG, ..HASTY });
        stage.made(1).await;
        stage.question.send_replace([(gpu(), NvmlGpuQuery::names([(1, 0), (2, 0)]))].into());
        stage.settle().await;
        assert_eq!(*stage.made.borrow(), 1, "one call at a time");
        stage.end(0, told("MIG-1")).await;
        stage.made(2).await;
        assert_eq!(stage.name().as_deref(), Some("MIG-1"));
    }

    fn links(down: u32) -> NvmlAnswer {
        let links = Some(NvLinks { down, ..NvLinks::default() });
        let gpus = [(gpu(), NvmlGpu { links, ..NvmlGpu::default() })].into();
        NvmlAnswer { facts: NvmlSnapshot { gpus }, ..NvmlAnswer::default() }
    }

    /// Tries after 1 ms, 2 ms and 4 ms, and then none.
    const FOR_LINKS: Pace = Pace { deadline: HANG, retry_max: Duration::from_millis(8), ..HASTY };

    #[tokio::test]
    async fn links_that_are_not_active_are_looked_at_again_for_some_minutes_and_others_never() {
        let asked = || NvmlGpuQuery { links: true, ..NvmlGpuQuery::default() };
        let mut stage = Stage::asking(asked(), FOR_LINKS);
        for call in 0..2 {
            stage.made(call + 1).await;
            stage.end(call, links(4)).await;
        }
        stage.made(3).await;
        stage.end(2, links(0)).await;
        assert!(!stage.snapshot.borrow().is_incomplete_for(&[(gpu(), asked())].into()));
        assert_eq!((*stage.made.borrow(), stage.off()), (3, None));

        let mut stage = Stage::asking(asked(), FOR_LINKS);
        for call in 0..4 {
            stage.made(call + 1).await;
            let failed = NvmlAnswer { failed: Some("no driver".into()), ..NvmlAnswer::default() };
            stage.end(call, if call % 2 == 0 { failed } else { links(4) }).await;
            assert_eq!(stage.off(), None, "a preference that is not known is no signal that is off");
        }
        stage.question.send_replace([(gpu(), NvmlGpuQuery { uuid: true, ..asked() })].into());
        stage.made(5).await;
        stage.end(4, NvmlAnswer { failed: Some("no driver".into()), ..NvmlAnswer::default() }).await;
        assert!(stage.off().unwrap().contains("no driver"), "a name that is not known is");
    }

    #[tokio::test]
    async fn a_gpu_in_mig_mode_without_an_instance_is_asked_for_until_it_has_left_the_mode() {
        let told = |mig_mode| {
            let gpus = [(gpu(), NvmlGpu { mig_mode: Some(mig_mode), ..NvmlGpu::default() })].into();
            NvmlAnswer { facts: NvmlSnapshot { gpus }, ..NvmlAnswer::default() }
        };
        let mut stage = Stage::asking(NvmlGpuQuery { mig_mode: true, ..NvmlGpuQuery::default() }, FOR_LINKS);
        // More often than links.
        for call in 0..8 {
            stage.made(call + 1).await;
            stage.end(call, told(true)).await;
            assert!(stage.snapshot.borrow().is_in_mig_mode(gpu()));
        }
        stage.made(9).await;
        stage.end(8, told(false)).await;
        assert!(!stage.snapshot.borrow().is_in_mig_mode(gpu()));
        tokio::time::sleep(FOR_LINKS.retry_max * 4).await;
        assert_eq!((*stage.made.borrow(), stage.off()), (9, None), "an idle GPU is not woken up for it");
    }

    #[test]
    fn links_are_asked_for_some_minutes_and_names_for_as_long_as_they_are_wanted() {
        let (question, asked) = watch::channel([(gpu(), NvmlGpuQuery { links: true, ..NvmlGpuQuery::default() })].into());
        let (rescan, judgement) = (Mailbox::new(Looks), Arc::new(watch::channel(Judgement::default()).0));
        let snapshot = watch::channel(Arc::default()).0;
        let asker = Asker { call: None, question: asked, snapshot, rescan, judgement, pace: Pace::default(), said: None };
        let tries = |pause: &mut Duration| (0..20).take_while(|_| asker.after_failure(pause).is_some()).count();
        assert_eq!(tries(&mut Duration::from_secs(10)), 6, "after 10, 20, 40, 80, 160 and 320 seconds");
        question.send_replace([(gpu(), NvmlGpuQuery::names([]))].into());
        assert_eq!(tries(&mut Duration::from_secs(10)), 20);
    }

    #[test]
    fn retries_and_renewals_come_at_the_moments_of_polls() {
        let (_, question) = watch::channel(NvmlQuery::new());
        let asker = Asker {
            call: None,
            question,
            snapshot: watch::channel(Arc::default()).0,
            rescan: Mailbox::new(Looks),
            judgement: Arc::new(watch::channel(Judgement::default()).0),
            pace: Pace::default(),
            said: None,
        };
        let mut pause = asker.pace.retry;
        let mut seen = Vec::new();
        for _ in 0..8 {
            seen.push(pause.as_secs());
            let before = Instant::now();
            let at = asker.after_pause(&mut pause);
            let wait = at - before;
            let ticks = asker.pace.tick.as_nanos();
            let from_tick = (host::now().boot + (at - Instant::now())).as_nanos() % ticks;
            assert!(from_tick < 1_000_000_000 || from_tick > ticks - 1_000_000_000, "{wait:?} ends {from_tick} ns after a tick");
        }
        assert_eq!(seen, [10, 20, 40, 80, 160, 320, 600, 600]);
    }
}
