//! Tokens that the API server decides about, with answers that are kept for a short time.
//!
//! ```text
//!   token ─▶ a kept answer? ─▶ pages, 401 or 403
//!               │ none
//!               ▼
//!            the peer's rate ─▶ one question at a time ─▶ the answer is kept
//!               │ above it           │ no answer in time
//!               ▼                    ▼
//!              503                  503, and a problem
//! ```
//!
//! Without an answer nothing is served: only a kept answer outlives the API server. Any peer can
//! invent tokens. So each peer has a rate of its own, from which a token that was permitted before
//! is exempt, and answers to unknown tokens do not replace those that permit. The addresses of an
//! IPv6 network share a rate, but one with a permitted token has its own: otherwise a pod could
//! keep out the renewed token of another pod on its node.

use super::connections::Peer;
use super::rate::RateLimit;
use super::token::same;
use futures_util::future::BoxFuture;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// How long a token stays permitted after its review. A removed right counts after this time. The
/// kubelet keeps its own answers for as long (`authentication.webhook.cacheTTL`).
const PERMITTED_FOR: Duration = Duration::from_secs(120);
/// How long a token stays refused: a new right counts soon.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// Tokens that are permitted. A node has one or two scrapers, whose tokens change each hour.
const PERMITTED_MAX: usize = 16;
/// Tokens that are refused.
const REFUSED_MAX: usize = 64;
/// Bytes of a token. Those of service accounts have about 1,500, those of other issuers more.
const TOKEN_BYTES_MAX: usize = 8192;
/// Questions of one peer to the API server per second, and the burst. A scraper sends one in two
/// minutes.
const RATE: (u32, u32) = (2, 8);
/// Peers whose rate is known. Above it, the one that came first is forgotten.
const PEERS_MAX: usize = 64;
/// Addresses whose last permitted requests are known. Only a permitted token adds one.
const PERMITTED_FROM_MAX: usize = 16;
/// How long a request waits for the API server, including the questions before it. Prometheus gives
/// up after ten seconds.
const WITHIN: Duration = Duration::from_secs(5);

/// What the API server has decided about a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its user may read pages.
    Permitted,
    /// It is no valid token.
    Unknown,
    /// Its user has no right to read pages.
    Forbidden,
}

/// Asks the API server about a token. An error has the reason in words.
pub type Review = Box<dyn Fn(String) -> BoxFuture<'static, Result<Verdict, String>> + Send + Sync>;

/// Why there is no verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Undecided {
    /// The peer asks too often.
    TooOften,
    /// The API server has not decided.
    NoAnswer,
}

/// Decides about tokens. Its clones share the kept answers.
#[derive(Debug, Clone)]
pub struct Reviews(Arc<Shared>);

struct Shared {
    review: Review,
    within: Duration,
    /// One question at a time.
    asking: tokio::sync::Mutex<()>,
    known: Mutex<Known>,
    peers: Mutex<Vec<(Peer, RateLimit)>>,
    problem: watch::Sender<Option<String>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reviews").finish_non_exhaustive()
    }
}

impl Reviews {
    /// Decides by `review`. While the API server does not answer, `problem` has the reason.
    #[must_use]
    pub fn new(review: Review, problem: watch::Sender<Option<String>>) -> Self {
        Self::answering_within(WITHIN, review, problem)
    }

    fn answering_within(
        within: Duration,
        review: Review,
        problem: watch::Sender<Option<String>>,
    ) -> Self {
        Reviews(Arc::new(Shared {
            review,
            within,
            asking: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            peers: Mutex::default(),
            problem,
        }))
    }

    /// The verdict on the token of a request of this peer.
    pub(super) async fn verdict(&self, token: &[u8], peer: Peer) -> Result<Verdict, Undecided> {
        let Some(token) = std::str::from_utf8(token).ok().filter(|token| is_token(token)) else {
            return Ok(Verdict::Unknown);
        };
        let verdict = self.decide(token, peer).await;
        if verdict == Ok(Verdict::Permitted) {
            lock(&self.0.known).permitted_from(peer);
        }
        verdict
    }

    async fn decide(&self, token: &str, peer: Peer) -> Result<Verdict, Undecided> {
        let shared = &*self.0;
        let (verdict, was_permitted, asker) = {
            let known = lock(&shared.known);
            (known.verdict(token, Instant::now()), known.was_permitted(token), known.asker(peer))
        };
        if let Some(verdict) = verdict {
            return Ok(verdict);
        }
        if !was_permitted && !shared.admits(asker) {
            return Err(Undecided::TooOften);
        }
        let within = shared.within;
        let answer = timeout(within, shared.ask(token)).await.unwrap_or_else(|_| {
            Err(format!("the API server has not answered within {} s", within.as_secs()))
        });
        answer.map_err(|why| {
            shared.report(&why);
            Undecided::NoAnswer
        })
    }
}

impl Shared {
    async fn ask(&self, token: &str) -> Result<Verdict, String> {
        let _one = self.asking.lock().await;
        // Another request may have asked about it in the meantime.
        let known = lock(&self.known).verdict(token, Instant::now());
        if let Some(verdict) = known {
            return Ok(verdict);
        }
        let verdict = (self.review)(token.to_owned()).await?;
        lock(&self.known).keep(token, verdict, Instant::now());
        if self.problem.send_replace(None).is_some() {
            tracing::info!("the API server decides about tokens for /metrics again");
        }
        Ok(verdict)
    }

    fn admits(&self, peer: Peer) -> bool {
        let mut peers = lock(&self.peers);
        if let Some((_, rate)) = peers.iter().find(|(of, _)| *of == peer) {
            return rate.admits();
        }
        if peers.len() >= PEERS_MAX {
            peers.remove(0);
        }
        let rate = RateLimit::new(RATE.0, RATE.1);
        let is_admitted = rate.admits();
        peers.push((peer, rate));
        is_admitted
    }

    fn report(&self, why: &str) {
        let problem = format!(
            "the API server does not decide who may read /metrics, so it is refused: {why}"
        );
        if self.problem.send_replace(Some(problem.clone())).is_none() {
            tracing::error!("{problem}");
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single step: a panic elsewhere cannot leave it half done.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this may be a token (`b64token` of RFC 6750): anything else is not sent to the API
/// server.
fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= TOKEN_BYTES_MAX
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/=:".contains(&byte))
}

/// The kept answers; pure.
#[derive(Default)]
struct Known {
    /// Also those whose time has ended.
    permitted: Vec<Kept>,
    refused: Vec<Kept>,
    /// The addresses of the last permitted requests, the last one at the end.
    permitted_from: Vec<Peer>,
}

struct Kept {
    token: Box<str>,
    verdict: Verdict,
    until: Instant,
}

impl Known {
    fn verdict(&self, token: &str, now: Instant) -> Option<Verdict> {
        // All are compared, each in a time that depends on the lengths only.
        let is_it = |kept: &&Kept| same(kept.token.as_bytes(), token.as_bytes());
        let all = self.permitted.iter().chain(&self.refused).filter(|kept| kept.until > now);
        all.filter(is_it).fold(None, |_, kept| Some(kept.verdict))
    }

    /// Whether the last answer about a token permitted it, at any time.
    fn was_permitted(&self, token: &str) -> bool {
        self.permitted.iter().any(|kept| same(kept.token.as_bytes(), token.as_bytes()))
    }

    fn permitted_from(&mut self, peer: Peer) {
        self.permitted_from.retain(|known| *known != peer);
        if self.permitted_from.len() >= PERMITTED_FROM_MAX {
            self.permitted_from.remove(0);
        }
        self.permitted_from.push(peer);
    }

    /// Whose rate counts for this peer.
    fn asker(&self, peer: Peer) -> Peer {
        if self.permitted_from.contains(&peer) { peer } else { peer.network() }
    }

    /// Keeps an answer instead of an earlier one about the same token. Above the limit the oldest
    /// of its kind is removed.
    fn keep(&mut self, token: &str, verdict: Verdict, now: Instant) {
        self.permitted.retain(|kept| *kept.token != *token);
        self.refused.retain(|kept| kept.until > now && *kept.token != *token);
        let (list, most, time) = match verdict {
            Verdict::Permitted => (&mut self.permitted, PERMITTED_MAX, PERMITTED_FOR),
            Verdict::Unknown | Verdict::Forbidden => (&mut self.refused, REFUSED_MAX, REFUSED_FOR),
        };
        if list.len() >= most {
            list.remove(0);
        }
        list.push(Kept { token: token.into(), verdict, until: now + time });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn peer(address: &str) -> Peer {
        Peer::from(address.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn an_answer_is_kept_for_its_time() {
        let (mut known, start) = (Known::default(), Instant::now());
        known.keep("a", Verdict::Permitted, start);
        known.keep("b", Verdict::Forbidden, start);
        let at = |known: &Known, token, after| known.verdict(token, start + after);
        let almost = Duration::from_millis(1);
        assert_eq!(at(&known, "a", PERMITTED_FOR - almost), Some(Verdict::Permitted));
        assert_eq!(at(&known, "a", PERMITTED_FOR), None);
        assert_eq!(at(&known, "b", REFUSED_FOR - almost), Some(Verdict::Forbidden));
        assert_eq!(at(&known, "b", REFUSED_FOR), None);
        assert_eq!(at(&known, "ab", almost), None);
        // A right that was removed or granted.
        known.keep("a", Verdict::Forbidden, start + almost);
        known.keep("b", Verdict::Permitted, start + almost);
        assert_eq!(at(&known, "a", almost), Some(Verdict::Forbidden));
        assert_eq!(at(&known, "b", REFUSED_FOR * 2), Some(Verdict::Permitted));
    }

    #[test]
    fn invented_tokens_take_bounded_memory_and_do_not_replace_permitted_ones() {
        let (mut known, now) = (Known::default(), Instant::now());
        known.keep("scraper", Verdict::Permitted, now);
        (0..1000).for_each(|number| known.keep(&format!("x{number}"), Verdict::Unknown, now));
        assert_eq!((known.permitted.len(), known.refused.len()), (1, REFUSED_MAX));
        assert_eq!(known.verdict("scraper", now), Some(Verdict::Permitted));
        assert_eq!(
            (known.verdict("x0", now), known.verdict("x999", now)),
            (None, Some(Verdict::Unknown))
        );
        (0..1000).for_each(|number| known.keep(&format!("y{number}"), Verdict::Permitted, now));
        assert_eq!(known.permitted.len(), PERMITTED_MAX);
    }

    /// Reviews by `answer`, and the number of questions so far.
    fn reviews(
        within: Duration,
        answer: impl Fn(&str) -> Option<Result<Verdict, String>> + Send + Sync + 'static,
    ) -> (Reviews, Arc<AtomicUsize>, watch::Receiver<Option<String>>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let review: Review = Box::new(move |token| {
            counted.fetch_add(1, Ordering::Relaxed);
            let answer = answer(&token);
            Box::pin(async move {
                match answer {
                    Some(answer) => answer,
                    None => std::future::pending().await,
                }
            })
        });
        let (problem, problems) = watch::channel(None);
        (Reviews::answering_within(within, review, problem), asked, problems)
    }

    #[tokio::test]
    async fn requests_at_the_same_time_are_one_question() {
        let (reviews, asked, _) = reviews(WITHIN, |_| Some(Ok(Verdict::Permitted)));
        let verdicts =
            futures_util::future::join_all((0..8).map(|_| reviews.verdict(b"a", peer("10.0.0.1"))));
        assert_eq!(verdicts.await, vec![Ok(Verdict::Permitted); 8]);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn a_peer_that_invents_tokens_is_refused_and_others_are_not() {
        let (reviews, asked, _) = reviews(WITHIN, |token| {
            Some(Ok(if token == "good" { Verdict::Permitted } else { Verdict::Unknown }))
        });
        let mut refused = 0;
        for number in 0..500 {
            let token = format!("x{number}");
            if reviews.verdict(token.as_bytes(), peer("10.0.0.1")).await == Err(Undecided::TooOften)
            {
                refused += 1;
            }
        }
        // The burst, and what the rate adds while this runs.
        assert!(refused > 400, "{refused} of 500 are refused");
        assert_eq!(asked.load(Ordering::Relaxed), 500 - refused);
        assert_eq!(reviews.verdict(b"good", peer("10.0.0.2")).await, Ok(Verdict::Permitted));
        // The kept answer is for every peer, and so is the next one about the same token.
        assert_eq!(reviews.verdict(b"good", peer("10.0.0.1")).await, Ok(Verdict::Permitted));
        lock(&reviews.0.known).permitted[0].until = Instant::now();
        assert_eq!(reviews.verdict(b"good", peer("10.0.0.1")).await, Ok(Verdict::Permitted));
    }

    #[tokio::test]
    async fn a_neighbour_in_the_network_does_not_keep_out_a_renewed_token() {
        let (reviews, _, _) = reviews(WITHIN, |token| {
            Some(Ok(if token.starts_with("good") { Verdict::Permitted } else { Verdict::Unknown }))
        });
        let (scraper, other) = (peer("2001:db8::1"), peer("2001:db8::2"));
        assert_eq!(reviews.verdict(b"good1", scraper).await, Ok(Verdict::Permitted));
        let mut number = 0;
        let mut invent = async |peer| {
            number += 1;
            reviews.verdict(format!("x{number}").as_bytes(), peer).await
        };
        while invent(other).await != Err(Undecided::TooOften) {}
        assert_eq!(reviews.verdict(b"good2", scraper).await, Ok(Verdict::Permitted));
        // Another address of the neighbour has no rate of its own, and that of the scraper has one.
        assert_eq!(invent(peer("2001:db8::3")).await, Err(Undecided::TooOften));
        while invent(scraper).await != Err(Undecided::TooOften) {}
    }

    #[test]
    fn the_addresses_of_permitted_requests_are_bounded() {
        let mut known = Known::default();
        let address = |n: usize| peer(&format!("2001:db8::{n:x}"));
        (1..=PERMITTED_FROM_MAX).for_each(|n| known.permitted_from(address(n)));
        known.permitted_from(address(1));
        known.permitted_from(address(99));
        assert_eq!(known.permitted_from.len(), PERMITTED_FROM_MAX);
        assert_eq!(known.asker(address(1)), address(1), "it was permitted again");
        assert_eq!(known.asker(address(2)), peer("2001:db8::"), "the oldest one is forgotten");
    }

    #[tokio::test]
    async fn what_is_no_token_is_not_sent() {
        let (reviews, asked, _) = reviews(WITHIN, |_| Some(Ok(Verdict::Permitted)));
        let long = "x".repeat(TOKEN_BYTES_MAX + 1);
        for token in ["", "a b", "a\"b", "ä", &long] {
            let verdict = reviews.verdict(token.as_bytes(), peer("10.0.0.1")).await;
            assert_eq!(verdict, Ok(Verdict::Unknown), "{token}");
        }
        assert_eq!(reviews.verdict(b"\xff", peer("10.0.0.1")).await, Ok(Verdict::Unknown));
        assert_eq!(asked.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn without_the_api_server_only_kept_answers_permit() {
        let is_there = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let there = Arc::clone(&is_there);
        let (reviews, _, problem) = reviews(Duration::from_millis(100), move |token| {
            match (there.load(Ordering::Relaxed), token) {
                (true, _) => Some(Ok(Verdict::Permitted)),
                (false, "hangs") => None,
                (false, _) => Some(Err("it is away".into())),
            }
        });
        let verdict = async |token: &str| reviews.verdict(token.as_bytes(), peer("10.0.0.1")).await;
        assert_eq!(verdict("a").await, Ok(Verdict::Permitted));
        is_there.store(false, Ordering::Relaxed);
        assert_eq!(verdict("a").await, Ok(Verdict::Permitted), "it is kept");
        assert_eq!(verdict("b").await, Err(Undecided::NoAnswer));
        assert!(problem.borrow().as_deref().unwrap().ends_with("it is away"));
        assert_eq!(verdict("hangs").await, Err(Undecided::NoAnswer));
        lock(&reviews.0.known).permitted[0].until = Instant::now();
        assert_eq!(verdict("a").await, Err(Undecided::NoAnswer));
        is_there.store(true, Ordering::Relaxed);
        assert_eq!(verdict("b").await, Ok(Verdict::Permitted), "a failure is not kept");
        assert_eq!(*problem.borrow(), None);
    }
}
