//! Makes pages, one at a time and away from the thread that asks for them: a page takes some milliseconds, and `/metrics` asks the disk
//! for its room. Those who ask at the same time get the same page.

use crate::host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tokio::sync::{Mutex, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

/// How long somebody waits for a page, with those before it: a scraper gives up after ten seconds.
const WITHIN: Duration = Duration::from_secs(3);
/// After a page there is rest of so many times the time that it took, so that pages take a fifth of a processor at most.
const RESTS: u32 = 4;
/// The longest rest: a page that took long on a busy machine does not keep the next one waiting for as long as somebody waits.
const REST_MAX: Duration = Duration::from_millis(500);

/// How far the thread of a page steps back behind the one that answers probes.
const BEHIND: i32 = 5;

/// What a page is about: what is asked for the same subject at the same time is the same page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// `/metrics`.
    Metrics,
    /// `/`, which is loaded again after so many seconds.
    Overview(Option<u32>),
}

/// Why there is no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Busy;

/// Made pages, and the one that is being made.
#[derive(Debug)]
pub(super) struct Press {
    within: Duration,
    turn: Mutex<Turn>,
}

impl Default for Press {
    fn default() -> Self {
        Press { within: WITHIN, turn: Mutex::default() }
    }
}

#[derive(Debug, Default)]
struct Turn {
    /// It may be left behind here by somebody who has waited too long.
    under_way: Option<(Subject, Instant, oneshot::Receiver<String>)>,
    /// For as long as somebody has it.
    last: Option<(Subject, Instant, Weak<String>)>,
    rests_until: Option<Instant>,
}

impl Press {
    /// The page, of now or of a moment after it was asked for.
    pub(super) async fn page(&self, subject: Subject, make: impl FnOnce() -> String + Send + 'static) -> Result<Arc<String>, Busy> {
        let asked = Instant::now();
        let page = async {
            let mut turn = self.turn.lock().await;
            // One that has begun before may lack what this one asks for.
            drop(turn.end().await);
            if let Some(page) = turn.made_since(subject, asked) {
                return Ok(page);
            }
            if let Some(until) = turn.rests_until {
                sleep_until(until).await;
            }
            turn.begin(subject, make)?;
            turn.end().await.ok_or(Busy)
        };
        timeout(self.within, page).await.unwrap_or(Err(Busy))
    }
}

impl Turn {
    fn made_since(&self, subject: Subject, asked: Instant) -> Option<Arc<String>> {
        let (of, began, page) = self.last.as_ref()?;
        if *of == subject && *began >= asked { page.upgrade() } else { None }
    }

    fn begin(&mut self, subject: Subject, make: impl FnOnce() -> String + Send + 'static) -> Result<(), Busy> {
        let (tell, told) = oneshot::channel();
        let make = move || {
            host::lower_priority(BEHIND);
            // Whoever asked may have gone.
            drop(tell.send(make()));
        };
        let spawned = thread::Builder::new().name("page".into()).spawn(make);
        spawned.map_err(|error| {
            tracing::warn!(%error, "no thread can be started for a page");
            Busy
        })?;
        self.under_way = Some((subject, Instant::now(), told));
        Ok(())
    }

    /// Waits for the page that is under way. `None` when there is none, or its maker panicked.
    async fn end(&mut self) -> Option<Arc<String>> {
        let (subject, began, told) = self.under_way.as_mut()?;
        let page = told.await.map(Arc::new);
        self.rests_until = Some(Instant::now() + (began.elapsed() * RESTS).min(REST_MAX));
        self.last = page.as_ref().ok().map(|page| (*subject, *began, Arc::downgrade(page)));
        self.under_way = None;
        page.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    /// What was made, in order, by a press whose pages wait to be let go.
    #[tokio::test]
    async fn those_who_ask_while_a_page_is_made_share_the_next_one() {
        let (press, made) = (Press::default(), Arc::new(AtomicUsize::new(0)));
        let (go, wait) = mpsc::channel();
        let count = |wait: Option<mpsc::Receiver<()>>| {
            let made = Arc::clone(&made);
            move || {
                wait.map(|wait| wait.recv());
                made.fetch_add(1, Ordering::SeqCst).to_string()
            }
        };
        let first = press.page(Subject::Metrics, count(Some(wait)));
        let others = async {
            tokio::task::yield_now().await;
            let others = (0..100).map(|_| press.page(Subject::Metrics, count(None)));
            let others = futures_util::future::join_all(others);
            let go = async {
                tokio::task::yield_now().await;
                go.send(()).unwrap();
            };
            tokio::join!(others, go).0
        };
        let (first, others) = tokio::join!(first, others);
        assert_eq!(first.unwrap().as_str(), "0");
        assert!(others.iter().all(|page| page.as_ref().unwrap().as_str() == "1"), "{others:?}");
        let overview = press.page(Subject::Overview(None), count(None)).await.unwrap();
        assert_eq!(overview.as_str(), "2", "another subject is another page");
        assert_eq!(press.page(Subject::Metrics, count(None)).await.unwrap().as_str(), "3", "what was made before is not told again");
    }

    #[tokio::test]
    async fn a_page_that_hangs_is_waited_for_and_no_second_one_begins_beside_it() {
        let mut press = Press { within: Duration::from_millis(1), ..Press::default() };
        let (go, wait) = mpsc::channel::<()>();
        let hangs = move || {
            let _gone = wait.recv();
            "late".to_owned()
        };
        assert_eq!(press.page(Subject::Metrics, hangs).await, Err(Busy));
        for _ in 0..2 {
            assert_eq!(press.page(Subject::Metrics, || unreachable!("one at a time")).await, Err(Busy));
        }
        drop(go);
        press.within = Duration::from_secs(60);
        assert_eq!(press.page(Subject::Metrics, || "next".to_owned()).await.unwrap().as_str(), "next");
        assert_eq!(press.page(Subject::Metrics, || panic!("asked to crash")).await, Err(Busy));
        assert_eq!(press.page(Subject::Metrics, || "after".to_owned()).await.unwrap().as_str(), "after");
    }
}
