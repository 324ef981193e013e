//! Renders pages, one at a time, on the thread that the runtime's pool always has.
//!
//! A page takes some milliseconds, and `/metrics` reads the disk's free space. Requests that wait
//! for the same page at the same time get the same one.

use crate::host;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Mutex, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until, timeout};

/// How long a request waits for its page, including the pages before it. Prometheus gives up after
/// ten seconds.
const WITHIN: Duration = Duration::from_secs(3);
/// The pause after a page, as a multiple of its duration. So pages use at most a fifth of a
/// processor.
const PAUSE: u32 = 4;
/// The longest pause: a page that was slow on a busy machine must not delay the next one beyond its
/// deadline.
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// The niceness of the thread that renders, in addition to that of the thread that answers probes.
const NICENESS: i32 = 5;

/// Identifies a page. Requests for the same page may share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKey {
    /// `/metrics`.
    Metrics,
    /// `/`, with the interval of its refresh in seconds.
    Overview(Option<u32>),
}

/// There was no page in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Busy;

/// Renders pages.
#[derive(Debug)]
pub(super) struct Renderer {
    within: Duration,
    state: Mutex<State>,
}

impl Default for Renderer {
    fn default() -> Self {
        Renderer { within: WITHIN, state: Mutex::default() }
    }
}

#[derive(Debug, Default)]
struct State {
    /// The page that is being rendered. Its request may have given up.
    running: Option<(PageKey, Instant, oneshot::Receiver<String>)>,
    /// The last page, while a connection still sends it.
    last: Option<(PageKey, Instant, Weak<String>)>,
    pause_until: Option<Instant>,
}

impl Renderer {
    /// A page whose rendering began after this call.
    pub(super) async fn page(
        &self,
        key: PageKey,
        render: impl FnOnce() -> String + Send + 'static,
    ) -> Result<Arc<String>, Busy> {
        let requested = Instant::now();
        let page = async {
            let mut state = self.state.lock().await;
            // That page began before this request, so it may lack the caller's latest change.
            drop(state.finish().await);
            if let Some(page) = state.rendered_since(key, requested) {
                return Ok(page);
            }
            if let Some(until) = state.pause_until {
                sleep_until(until).await;
            }
            state.start(key, render);
            state.finish().await.ok_or(Busy)
        };
        timeout(self.within, page).await.unwrap_or(Err(Busy))
    }
}

impl State {
    fn rendered_since(&self, key: PageKey, requested: Instant) -> Option<Arc<String>> {
        let (of, began, page) = self.last.as_ref()?;
        if *of == key && *began >= requested { page.upgrade() } else { None }
    }

    fn start(&mut self, key: PageKey, render: impl FnOnce() -> String + Send + 'static) {
        let (send, receive) = oneshot::channel();
        drop(spawn_blocking(move || {
            host::lower_thread_priority_by(NICENESS);
            // The receiver may have been dropped.
            drop(send.send(render()));
        }));
        self.running = Some((key, Instant::now(), receive));
    }

    /// Waits for the page that is being rendered. `None` if there is none, or if its thread
    /// panicked.
    async fn finish(&mut self) -> Option<Arc<String>> {
        let (key, began, receive) = self.running.as_mut()?;
        let page = receive.await.map(Arc::new);
        self.pause_until = Some(Instant::now() + (began.elapsed() * PAUSE).min(PAUSE_MAX));
        self.last = page.as_ref().ok().map(|page| (*key, *began, Arc::downgrade(page)));
        self.running = None;
        page.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[tokio::test]
    async fn requests_that_wait_while_a_page_is_rendered_share_the_next_one() {
        let (renderer, rendered) = (Renderer::default(), Arc::new(AtomicUsize::new(0)));
        let (release, wait) = mpsc::channel();
        // The content of a page is the number of pages before it.
        let count = |wait: Option<mpsc::Receiver<()>>| {
            let rendered = Arc::clone(&rendered);
            move || {
                wait.map(|wait| wait.recv());
                rendered.fetch_add(1, Ordering::SeqCst).to_string()
            }
        };
        let first = renderer.page(PageKey::Metrics, count(Some(wait)));
        let waiting = async {
            tokio::task::yield_now().await;
            let waiting = (0..100).map(|_| renderer.page(PageKey::Metrics, count(None)));
            let waiting = futures_util::future::join_all(waiting);
            let release = async {
                tokio::task::yield_now().await;
                release.send(()).unwrap();
            };
            tokio::join!(waiting, release).0
        };
        let (first, waiting) = tokio::join!(first, waiting);
        assert_eq!(first.unwrap().as_str(), "0");
        assert!(waiting.iter().all(|page| page.as_ref().unwrap().as_str() == "1"), "{waiting:?}");
        let overview = renderer.page(PageKey::Overview(None), count(None)).await.unwrap();
        assert_eq!(overview.as_str(), "2", "another page");
        assert_eq!(
            renderer.page(PageKey::Metrics, count(None)).await.unwrap().as_str(),
            "3",
            "a later request gets a newer page"
        );
    }

    #[tokio::test]
    async fn while_a_page_hangs_no_second_one_is_started() {
        let mut renderer = Renderer { within: Duration::from_millis(1), ..Renderer::default() };
        let (release, wait) = mpsc::channel::<()>();
        let hangs = move || {
            let _released = wait.recv();
            "late".to_owned()
        };
        assert_eq!(renderer.page(PageKey::Metrics, hangs).await, Err(Busy));
        for _ in 0..2 {
            assert_eq!(
                renderer.page(PageKey::Metrics, || unreachable!("one at a time")).await,
                Err(Busy)
            );
        }
        drop(release);
        renderer.within = Duration::from_secs(60);
        assert_eq!(
            renderer.page(PageKey::Metrics, || "next".to_owned()).await.unwrap().as_str(),
            "next"
        );
        assert_eq!(
            renderer.page(PageKey::Metrics, || panic!("requested to crash")).await,
            Err(Busy)
        );
        assert_eq!(
            renderer.page(PageKey::Metrics, || "after".to_owned()).await.unwrap().as_str(),
            "after"
        );
    }
}
