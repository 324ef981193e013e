//! Staying awake for an answer that is a moment away.
//!
//! A thread that sleeps until another one has an answer is woken by that one's processor, and its own has gone to sleep too
//! meanwhile: on an idle machine that takes up to a quarter of a disk's sync, and an eighth of an Allocate that waits for no
//! disk. An Allocate comes alone, now and then, and a whole kubelet waits for it; so whoever is to answer it stays awake, for as
//! long as such a sync takes and no longer.

use std::num::NonZero;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A sync of a disk that is fast takes less, and beside one that is slow a wake-up is of no account.
const AWAKE_MAX: Duration = Duration::from_millis(1);

/// Counts those who wait for an answer. Clones count together.
#[derive(Debug, Clone)]
pub struct Awake {
    waiting: Arc<AtomicUsize>,
    /// Whether the process has a processor for this besides that of the thread that is waited for.
    has_room: bool,
}

impl Default for Awake {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        Awake { waiting: Arc::default(), has_room: processors > 1 }
    }
}

impl Awake {
    /// Waits for an answer that another thread gives. Tasks of this thread go on meanwhile. Where several wait there is enough to do,
    /// and nobody stays awake.
    pub async fn until<T>(&self, answer: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let waiting = Waiting::new(&self.waiting);
        let mut answer = pin!(answer);
        loop {
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                () = tokio::task::yield_now(), if self.has_room && waiting.is_only_one() && began.elapsed() < AWAKE_MAX => {
                    // The kernel may have put the thread that is waited for behind this one.
                    std::thread::yield_now();
                }
            }
        }
    }
}

/// One of those who wait, until it is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(waiting)
    }

    fn is_only_one(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 1
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::task::{Context, Wake, Waker};
    use tokio::sync::oneshot;

    #[test]
    fn whoever_stays_awake_lets_the_other_tasks_of_the_thread_go_on_and_gets_the_answer() {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let awake = Awake { waiting: Arc::default(), has_room: true };
            let (answer, answered) = oneshot::channel();
            tokio::spawn(async move {
                tokio::task::yield_now().await;
                answer.send(7).unwrap();
            });
            assert_eq!(awake.until(answered).await, Ok(7));
            assert_eq!(awake.waiting.load(Ordering::Relaxed), 0);
        });
    }

    /// How often a task wanted to be polled again.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a wait that is polled now sleeps.
    fn sleeps(wait: &mut (impl Future<Output = ()> + Unpin)) -> bool {
        let wakes = Arc::new(Wakes::default());
        assert!(pin!(wait).poll(&mut Context::from_waker(&Waker::from(Arc::clone(&wakes)))).is_pending());
        wakes.0.load(Ordering::Relaxed) == 0
    }

    #[test]
    fn a_wait_that_is_alone_stays_awake_for_as_long_as_a_sync_takes() {
        let awake = Awake { waiting: Arc::default(), has_room: true };
        let began = Instant::now();
        let mut wait = Box::pin(awake.until(pending()));
        let slept = sleeps(&mut wait);
        assert!(!slept || began.elapsed() >= AWAKE_MAX);
        let polled = Instant::now();
        let mut another = Box::pin(awake.until(pending()));
        assert!(sleeps(&mut another) && sleeps(&mut wait), "there is enough to do");
        drop(another);
        while polled.elapsed() < AWAKE_MAX {}
        assert!(sleeps(&mut wait));
        drop(wait);
        assert_eq!(awake.waiting.load(Ordering::Relaxed), 0, "nobody wants it any more");

        let crowded = Awake { waiting: Arc::default(), has_room: false };
        assert!(sleeps(&mut Box::pin(crowded.until(pending()))));
    }
}
