//! A deterministic executor with virtual time: a whole simulation runs on one thread from one seed.
//!
//! The seed picks the next task among those that are ready. Time jumps to the next timer only when
//! no task is ready. So an hour of a node costs only the steps that run in it. No thread, no real
//! clock and no randomly ordered map is involved: the same seed gives the same run, poll by poll.
//!
//! Tasks may use anything that wakes through a [`Waker`], including the channels of `tokio::sync`.
//! They must not use anything that draws its own random numbers: `tokio::select!` only with
//! `biased`. The order of a channel's wake-ups does not matter, because the ready set is ordered by
//! task number.

use super::random::Random;
use futures_util::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// More steps than this without an advance of time mean a task that never waits: the simulation
/// would never end.
const STEPS_MAX: u64 = 1_000_000;

/// Runs tasks. Dropping it drops every task.
#[derive(Debug)]
pub struct Executor {
    handle: Handle,
}

impl Drop for Executor {
    fn drop(&mut self) {
        // A task's own drop may spawn another one.
        while !self.handle.lock().tasks.is_empty() {
            let tasks = std::mem::take(&mut self.handle.lock().tasks);
            drop(tasks);
        }
    }
}

impl Executor {
    /// An executor without tasks, at time 0.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let state = State {
            now: Duration::ZERO,
            random: Random::new(seed),
            tasks: BTreeMap::new(),
            next_task: 0,
            timers: BTreeMap::new(),
            next_timer: 0,
            polls: 0,
            since_advance: 0,
        };
        Executor {
            handle: Handle(Arc::new(Inner { state: Mutex::new(state), ready: Arc::default() })),
        }
    }

    /// The handle that tasks and their creators use.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Runs until `done` returns true, checked after every step, at the latest until the time
    /// `limit`. Returns whether `done` was reached.
    pub fn run_until(&mut self, limit: Duration, mut done: impl FnMut() -> bool) -> bool {
        while !done() {
            if !self.step(limit) {
                return done();
            }
        }
        true
    }

    /// Runs everything that happens until the time `limit`, then leaves the clock at `limit`.
    pub fn run_to(&mut self, limit: Duration) {
        while self.step(limit) {}
    }

    /// Runs a future to its end, for at most `within`. `None` if it did not end.
    pub fn run<T: Send + 'static>(
        &mut self,
        within: Duration,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let result = Arc::new(Mutex::new(None));
        let place = Arc::clone(&result);
        let task = self.handle.spawn(async move {
            let value = future.await;
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        });
        let limit = self.handle.now() + within;
        self.run_until(limit, || task.is_finished());
        task.abort();
        result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// One step: polls one ready task, or advances the time. Returns false when nothing happens
    /// until `limit`; the clock is at `limit` then.
    fn step(&mut self, limit: Duration) -> bool {
        if let Some((id, mut future, waker)) = self.handle.pick() {
            let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
            self.handle.put_back(id, future, polled.is_pending());
            return true;
        }
        self.handle.advance(limit)
    }
}

/// Time, random numbers and new tasks for code that runs on an [`Executor`]. Cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<Inner>);

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Handle")
            .field("now", &state.now)
            .field("tasks", &state.tasks.len())
            .finish_non_exhaustive()
    }
}

struct Inner {
    state: Mutex<State>,
    ready: Arc<Mutex<BTreeSet<u64>>>,
}

struct State {
    now: Duration,
    random: Random,
    tasks: BTreeMap<u64, Slot>,
    next_task: u64,
    /// By deadline, then in the order of creation.
    timers: BTreeMap<(Duration, u64), Waker>,
    next_timer: u64,
    polls: u64,
    /// Steps since the time last moved.
    since_advance: u64,
}

struct Slot {
    /// `None` while the task is polled.
    future: Option<BoxFuture<'static, ()>>,
    waker: Waker,
}

struct TaskWaker {
    id: u64,
    ready: Arc<Mutex<BTreeSet<u64>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).insert(self.id);
    }
}

impl Handle {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ready(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The virtual time since the executor was created.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    /// The number of polls so far: two runs of one seed agree in it.
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.lock().polls
    }

    /// Draws from the seed's random numbers.
    pub fn random<R>(&self, draw: impl FnOnce(&mut Random) -> R) -> R {
        draw(&mut self.lock().random)
    }

    /// Runs a task. It continues when the returned value is dropped.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Task {
        // Without this, tokio's cooperative budget stops its channels after some steps inside a
        // tokio task, until tokio's scheduler runs again.
        let future: BoxFuture<'static, ()> = Box::pin(tokio::task::unconstrained(task));
        let mut state = self.lock();
        let id = state.next_task;
        state.next_task += 1;
        let waker = Waker::from(Arc::new(TaskWaker { id, ready: Arc::clone(&self.0.ready) }));
        state.tasks.insert(id, Slot { future: Some(future), waker });
        self.ready().insert(id);
        Task { handle: self.clone(), id }
    }

    /// Waits for a time. A zero time does not yield.
    #[must_use]
    pub fn sleep(&self, time: Duration) -> Sleep {
        self.sleep_until(self.now().saturating_add(time))
    }

    /// Waits until a time; returns at once if it is past.
    #[must_use]
    pub fn sleep_until(&self, deadline: Duration) -> Sleep {
        Sleep { handle: self.clone(), deadline, timer: None }
    }

    /// Yields once, so that the seed may run other tasks first.
    #[must_use]
    pub fn pass(&self) -> Pass {
        Pass { passed: false }
    }

    /// The future's value, or `None` if it takes longer than `time`.
    pub async fn timeout<T>(&self, time: Duration, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            value = future => Some(value),
            () = self.sleep(time) => None,
        }
    }

    /// Takes the next task to poll out of the set.
    fn pick(&self) -> Option<(u64, BoxFuture<'static, ()>, Waker)> {
        let mut state = self.lock();
        loop {
            let mut ready = self.ready();
            let nth = state.random.below(ready.len());
            let id = ready.iter().nth(nth).copied()?;
            ready.remove(&id);
            drop(ready);
            // A task may be woken after its end.
            if let Some(slot) = state.tasks.get_mut(&id)
                && let Some(future) = slot.future.take()
            {
                let waker = slot.waker.clone();
                state.polls += 1;
                state.since_advance += 1;
                assert!(
                    state.since_advance < STEPS_MAX,
                    "task {id} or others are polled without ever waiting, at {:?}",
                    state.now
                );
                return Some((id, future, waker));
            }
        }
    }

    fn put_back(&self, id: u64, future: BoxFuture<'static, ()>, is_pending: bool) {
        let mut state = self.lock();
        let mut over = Some(future);
        if !is_pending {
            state.tasks.remove(&id);
        } else if let Some(slot) = state.tasks.get_mut(&id) {
            slot.future = over.take();
        }
        drop(state);
        // Dropped outside the lock: values that a task owns may wake or spawn others.
        drop(over);
    }

    /// Moves the time to the next timer. If `limit` comes first, moves it there and returns false.
    fn advance(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        state.since_advance = 0;
        let next = state.timers.keys().next().map(|(deadline, _)| *deadline);
        let Some(next) = next.filter(|next| *next <= limit) else {
            state.now = state.now.max(limit);
            return false;
        };
        state.now = state.now.max(next);
        let later = state.timers.split_off(&(next, u64::MAX));
        let due = std::mem::replace(&mut state.timers, later);
        drop(state);
        due.into_values().for_each(Waker::wake);
        true
    }
}

/// A task of an [`Executor`].
#[derive(Debug, Clone)]
pub struct Task {
    handle: Handle,
    id: u64,
}

impl Task {
    /// Drops the task where it waits. A task that is being polled is dropped at its next wait.
    pub fn abort(&self) {
        let slot = self.handle.lock().tasks.remove(&self.id);
        drop(slot);
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        !self.handle.lock().tasks.contains_key(&self.id)
    }
}

/// A wait for a time.
#[derive(Debug)]
pub struct Sleep {
    handle: Handle,
    deadline: Duration,
    timer: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.handle.lock();
        if state.now >= this.deadline {
            return Poll::Ready(());
        }
        let timer = *this.timer.get_or_insert_with(|| {
            state.next_timer += 1;
            state.next_timer
        });
        state.timers.insert((this.deadline, timer), context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        // A timer without a waiter must not stop the clock from jumping past it.
        if let Some(timer) = self.timer {
            self.handle.lock().timers.remove(&(self.deadline, timer));
        }
    }
}

/// One yield.
#[derive(Debug)]
pub struct Pass {
    passed: bool,
}

impl Future for Pass {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.passed, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::{mpsc, watch};

    const HOUR: Duration = Duration::from_secs(3600);

    /// Ten tasks that exchange messages, wait and yield; returns their ordered log.
    fn run(seed: u64) -> (Vec<(Duration, usize, usize)>, u64) {
        let mut executor = Executor::new(seed);
        let handle = executor.handle();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (changed, _) = watch::channel(0);
        for task in 0..10 {
            let (handle, log, changed) = (handle.clone(), Arc::clone(&log), changed.clone());
            executor.handle().spawn(async move {
                let mut changes = changed.subscribe();
                for step in 0..5 {
                    match handle.random(|random| random.below(3)) {
                        0 => handle.pass().await,
                        1 => {
                            handle
                                .sleep(handle.random(|random| random.between(Duration::ZERO, HOUR)))
                                .await;
                        }
                        _ => {
                            // Either result will do: a change or a timeout.
                            let _ =
                                handle.timeout(Duration::from_millis(3), changes.changed()).await;
                        }
                    }
                    log.lock().unwrap().push((handle.now(), task, step));
                    changed.send_replace(step);
                }
            });
        }
        executor.run_to(10 * HOUR);
        assert_eq!(handle.now(), 10 * HOUR);
        let log = log.lock().unwrap().clone();
        (log, handle.polls())
    }

    #[test]
    fn the_same_seed_gives_the_same_run_and_another_one_does_not() {
        for seed in 0..50 {
            let first = run(seed);
            assert_eq!(first.0.len(), 50);
            assert_eq!(first, run(seed));
            assert_ne!(first, run(seed + 1));
        }
    }

    #[test]
    fn every_order_of_two_tasks_is_reached() {
        let mut orders = BTreeSet::new();
        for seed in 0..20 {
            let mut executor = Executor::new(seed);
            let (sender, mut received) = mpsc::unbounded_channel();
            for task in 0..2 {
                let sender = sender.clone();
                executor.handle().spawn(async move { sender.send(task).unwrap() });
            }
            executor.run_to(Duration::ZERO);
            orders.insert((received.try_recv().unwrap(), received.try_recv().unwrap()));
        }
        assert_eq!(orders, BTreeSet::from([(0, 1), (1, 0)]));
    }

    #[tokio::test]
    async fn it_runs_inside_a_task_of_tokio_too() {
        let mut executor = Executor::new(1);
        let (sender, mut receiver) = mpsc::unbounded_channel();
        (0..1000).for_each(|number| sender.send(number).unwrap());
        drop(sender);
        let received = executor.run(HOUR, async move {
            let mut count = 0;
            while receiver.recv().await.is_some() {
                count += 1;
            }
            count
        });
        assert_eq!(received, Some(1000));
    }

    #[test]
    fn time_advances_only_when_no_task_is_ready() {
        let mut executor = Executor::new(1);
        let handle = executor.handle();
        let inside = handle.clone();
        let done = executor.run(HOUR, async move {
            for _ in 0..1000 {
                inside.pass().await;
            }
            let before = inside.now();
            inside.sleep(Duration::from_secs(60)).await;
            (before, inside.now())
        });
        assert_eq!(done, Some((Duration::ZERO, Duration::from_secs(60))));
        assert_eq!(executor.run(HOUR, std::future::pending::<()>()), None);
        assert_eq!(handle.now(), HOUR + Duration::from_secs(60));
    }

    #[test]
    #[should_panic(expected = "without ever waiting")]
    fn a_task_that_never_waits_is_detected() {
        let mut executor = Executor::new(1);
        let inside = executor.handle();
        executor.handle().spawn(async move {
            loop {
                inside.pass().await;
            }
        });
        executor.run_to(HOUR);
    }

    #[test]
    fn an_aborted_task_is_dropped_and_its_timer_does_not_delay_time() {
        struct SendOnDrop(mpsc::UnboundedSender<Duration>, Handle);
        impl Drop for SendOnDrop {
            fn drop(&mut self) {
                self.0.send(self.1.now()).unwrap();
            }
        }
        let mut executor = Executor::new(1);
        let handle = executor.handle();
        let (sender, mut received) = mpsc::unbounded_channel();
        let guard = SendOnDrop(sender.clone(), handle.clone());
        let inside = handle.clone();
        let task = handle.spawn(async move {
            let _guard = guard;
            inside.sleep(HOUR).await;
        });
        executor.run_to(Duration::from_secs(1));
        assert!(!task.is_finished());
        task.abort();
        assert!(task.is_finished());
        assert_eq!(received.try_recv(), Ok(Duration::from_secs(1)));
        assert!(!executor.step(2 * HOUR), "nothing is left to happen");

        let guard = SendOnDrop(sender, handle.clone());
        handle.spawn(async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        });
        drop(executor);
        assert_eq!(received.try_recv(), Ok(2 * HOUR), "the end of the executor ends its tasks");
    }
}
