//! The watch of a collection, or of the part of it that a selector chooses.
//!
//! Each round lists the objects, then watches their changes from that version on. A round ends when
//! the API server ends the watch at its time limit, when it no longer has the changes (410), when
//! nothing arrives, or with an error. After a pause the next round begins.
//!
//! A watch without changes has a bookmark a minute, so its silence shows little. After some of it
//! the API server is asked for its version, which needs no right, on a connection of its own. Any
//! answer shows that it works.

use super::client::{Client, Limits};
use super::collection::{Collection, escaped};
use super::connection::{Connection, JSON, LIST_BYTES_MAX, Question, refused};
use super::credentials::Credentials;
use super::error::ClusterError;
use super::lines::Lines;
use super::metadata::{Event, EventObject, List, Status};
use super::pauses::Pauses;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// The forms of the answers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forms {
    pub(super) list: &'static str,
    object: &'static str,
}

/// Whole objects.
pub(super) const WHOLE: Forms = Forms { list: JSON, object: JSON };
/// Only the metadata, or the whole object from a server that does not know this form.
pub(super) const METADATA: Forms = Forms {
    list: "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json",
    object: "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json",
};

/// The times of a watch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// The limit of a connect, and of an answer.
    pub(super) answer: Duration,
    /// After this time without anything, the API server is asked whether it answers. Its answer
    /// is for the same time.
    pub(super) quiet: Duration,
    /// The API server sends a bookmark about every minute. After this time without anything, the
    /// connection counts as lost, also if the API server answers.
    pub(super) silence: Duration,
    /// The least time after which the API server ends the watch, up to twice of it.
    pub(super) watch: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times {
            answer: Duration::from_secs(15),
            quiet: Duration::from_secs(25),
            silence: Duration::from_secs(150),
            watch: Duration::from_secs(300),
        }
    }
}

/// What a watch reports (`WatchEvent` of apimachinery's `meta/v1`, and what precedes it).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchEvent<T> {
    /// All objects, and the version of the list. What was reported before and is not in it was
    /// deleted. A list comes first, and again after each failure, and after some minutes.
    Listed(Vec<T>, String),
    /// An object was created, or is now selected.
    Added(T),
    /// An object was changed.
    Modified(T),
    /// An object was deleted, or is no longer selected: its last content.
    Deleted(T),
    /// The API server could not be used. The watch tries again after the pause.
    Failed {
        /// Why.
        error: ClusterError,
        /// How long.
        pause: Duration,
    },
}

/// The watch of a collection. It has a connection of its own.
#[derive(Debug)]
pub struct Watch<T> {
    credentials: Credentials,
    collection: Collection,
    forms: Forms,
    times: Times,
    pauses: Pauses,
    random: RandomState,
    /// Asks whether the API server answers.
    client: Client,
    opening: Option<Opening<T>>,
    round: Option<Round>,
    /// The report that follows the last one at once.
    following: Option<WatchEvent<T>>,
    /// When the next round begins.
    next: Instant,
    rounds: u64,
}

/// A round that begins. It runs on when the future of [`Watch::next`] is dropped, and ends with
/// this value.
#[derive(Debug)]
struct Opening<T> {
    began: Instant,
    task: JoinHandle<Result<Opened<T>, ClusterError>>,
}

impl<T> Drop for Opening<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A list, and the watch from there on.
#[derive(Debug)]
struct Opened<T> {
    items: Vec<T>,
    version: String,
    round: Result<Round, ClusterError>,
}

/// An open watch.
#[derive(Debug)]
struct Round {
    connection: Connection,
    body: Incoming,
    lines: Lines,
    began: Instant,
    /// When something arrived.
    heard: Instant,
    /// When the API server was last known to answer.
    answered: Instant,
    probe: Option<Probe>,
}

/// The question whether the API server answers. It ends with this value.
#[derive(Debug)]
struct Probe(JoinHandle<Result<(), ClusterError>>);

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Probe {
    fn start(client: &Client) -> Self {
        let client = client.clone();
        Probe(tokio::spawn(async move { client.version().await.map(drop) }))
    }

    /// Why the API server does not answer. A refusal is an answer.
    async fn failure(probe: &mut Option<Probe>) -> Option<ClusterError> {
        let Some(Probe(task)) = probe else { return std::future::pending().await };
        let result = task.await;
        *probe = None;
        let lost = |error: &ClusterError| {
            matches!(
                error,
                ClusterError::Connect { .. }
                    | ClusterError::Silent { .. }
                    | ClusterError::Broken { .. }
            )
        };
        result.ok().and_then(Result::err).filter(lost)
    }
}

/// One event of a watch, as far as it matters.
enum Step<T> {
    Report(WatchEvent<T>),
    Nothing,
    /// The API server has ended the watch at its time limit.
    End,
}

impl<T: DeserializeOwned + Send + 'static> Watch<T> {
    /// Watches whole objects. Nothing happens before [`Watch::next`].
    #[must_use]
    pub fn new(credentials: Credentials, collection: Collection) -> Self {
        Self::with(credentials, collection, WHOLE, Times::default())
    }

    pub(super) fn with(
        credentials: Credentials,
        collection: Collection,
        forms: Forms,
        times: Times,
    ) -> Self {
        let limits =
            Limits { answer: times.answer, idle: times.quiet + times.answer, age: times.watch };
        Watch {
            client: Client::with_limits(credentials.clone(), limits),
            credentials,
            collection,
            forms,
            times,
            pauses: Pauses::default(),
            random: RandomState::new(),
            opening: None,
            round: None,
            following: None,
            next: Instant::now(),
            rounds: 0,
        }
    }

    /// Ends the open watch: the next report is a list. A pause after a failure is kept.
    pub fn list_again(&mut self) {
        // A list that was sent before may be older.
        self.opening = None;
        if self.round.take().is_some() {
            self.next = Instant::now();
        }
    }

    /// The next report. Returns within the pause after a failure, otherwise when there is something
    /// to report. The future may be dropped; the next one continues.
    pub async fn next(&mut self) -> WatchEvent<T> {
        if let Some(report) = self.following.take() {
            return report;
        }
        loop {
            let Some(round) = &mut self.round else { return self.begin().await };
            match round.step(&self.client, self.times, self.collection.path()).await {
                Ok(Step::Report(report)) => return report,
                Ok(Step::Nothing) => {}
                Ok(Step::End) => {
                    let lasted = round.began.elapsed();
                    self.pause(None, lasted);
                }
                Err(ClusterError::Expired) => {
                    let lasted = round.began.elapsed();
                    self.pause(Some(&ClusterError::Expired), lasted);
                }
                Err(error) => {
                    let lasted = round.began.elapsed();
                    return self.failed(error, lasted);
                }
            }
        }
    }

    /// Lists the objects, and opens the watch. The future may be dropped; the next one continues.
    async fn begin(&mut self) -> WatchEvent<T> {
        if self.opening.is_none() {
            tokio::time::sleep_until(self.next).await;
        }
        let limit = self.limit();
        let opening = self.opening.get_or_insert_with(|| {
            let (credentials, collection) = (self.credentials.clone(), self.collection.clone());
            let open = open(credentials, collection, self.forms, self.times.answer, limit);
            Opening { began: Instant::now(), task: tokio::spawn(open) }
        });
        let opened = (&mut opening.task).await;
        let lasted = opening.began.elapsed();
        self.opening = None;
        match opened.unwrap_or_else(|error| Err(ClusterError::Unreadable(error.to_string()))) {
            Ok(Opened { items, version, round }) => {
                match round {
                    Ok(round) => self.round = Some(round),
                    // The list is an answer all the same: it is reported before the error.
                    Err(error) => self.following = Some(self.failed(error, lasted)),
                }
                WatchEvent::Listed(items, version)
            }
            Err(error) => self.failed(error, lasted),
        }
    }

    /// The time limit of a watch. It differs, so that the nodes of a cluster do not return at the
    /// same moment.
    fn limit(&mut self) -> Duration {
        let least = self.times.watch;
        let millis = u64::try_from(least.as_millis()).unwrap_or(u64::MAX).max(1);
        least + Duration::from_millis(self.number() % millis)
    }

    fn number(&mut self) -> u64 {
        self.rounds += 1;
        self.random.hash_one(self.rounds)
    }

    fn failed(&mut self, error: ClusterError, lasted: Duration) -> WatchEvent<T> {
        let pause = self.pause(Some(&error), lasted);
        WatchEvent::Failed { error, pause }
    }

    /// Ends the round, and schedules the next one.
    fn pause(&mut self, error: Option<&ClusterError>, lasted: Duration) -> Duration {
        self.round = None;
        let random = self.number();
        let pause = self.pauses.after(error, lasted, random);
        self.next = Instant::now() + pause;
        pause
    }
}

async fn open<T: DeserializeOwned>(
    credentials: Credentials,
    collection: Collection,
    forms: Forms,
    answer: Duration,
    limit: Duration,
) -> Result<Opened<T>, ClusterError> {
    let began = Instant::now();
    let mut connection = Connection::open(&credentials, answer).await?;
    let list = Question::get(collection.query(""), forms.list);
    let answer = connection.call(&list, LIST_BYTES_MAX).await?;
    let List { resource_version: version, items } = serde_json::from_slice(&answer)
        .map_err(|error| ClusterError::Unreadable(error.to_string()))?;
    let (from, limit) = (escaped(&version), limit.as_secs());
    let parameters = format!(
        "watch=true&allowWatchBookmarks=true&resourceVersion={from}&timeoutSeconds={limit}"
    );
    let watch = Question::get(collection.query(&parameters), forms.object);
    let round = match connection.send(&watch).await {
        Ok(answer) => {
            let body = answer.into_body();
            let (lines, now) = (Lines::default(), Instant::now());
            let (heard, answered, probe) = (now, now, None);
            Ok(Round { connection, body, lines, began, heard, answered, probe })
        }
        Err(failed) => Err(failed.error),
    };
    Ok(Opened { items, version, round })
}

impl Round {
    /// The next event. The future may be dropped: all times count from the events.
    async fn step<T: DeserializeOwned>(
        &mut self,
        client: &Client,
        times: Times,
        path: &str,
    ) -> Result<Step<T>, ClusterError> {
        if let Some(line) = self.lines.next() {
            return event(&line, path);
        }
        let frame = tokio::select! {
            biased;
            frame = self.body.frame() => frame,
            failure = Probe::failure(&mut self.probe) => {
                self.answered = Instant::now();
                return failure.map_or(Ok(Step::Nothing), Err);
            }
            () = tokio::time::sleep_until(self.heard + times.silence) => {
                return Err(self.connection.silent(times.silence));
            }
            () = tokio::time::sleep_until(self.answered + times.quiet), if self.probe.is_none() => {
                self.probe = Some(Probe::start(client));
                return Ok(Step::Nothing);
            }
        };
        let now = Instant::now();
        (self.heard, self.answered, self.probe) = (now, now, None);
        match frame {
            None => Ok(Step::End),
            Some(Err(error)) => Err(self.connection.broken(&error)),
            Some(Ok(frame)) => {
                let piece = frame.into_data().unwrap_or_default();
                self.lines.add(&piece).map_err(|_| {
                    let server = self.connection.server();
                    ClusterError::Unreadable(format!("a line of {server} has no end"))
                })?;
                Ok(Step::Nothing)
            }
        }
    }
}

/// One line of a watch. A bookmark has only a version.
fn event<T: DeserializeOwned>(line: &[u8], path: &str) -> Result<Step<T>, ClusterError> {
    let unreadable = |error: serde_json::Error| ClusterError::Unreadable(error.to_string());
    let Event { r#type } = serde_json::from_slice(line).map_err(unreadable)?;
    let as_report: fn(T) -> WatchEvent<T> = match r#type.as_str() {
        "ADDED" => WatchEvent::Added,
        "MODIFIED" => WatchEvent::Modified,
        "DELETED" => WatchEvent::Deleted,
        "ERROR" => {
            let status = serde_json::from_slice::<EventObject<Status>>(line);
            return Err(refused(status.map(|it| it.object).unwrap_or_default(), None, path));
        }
        _ => return Ok(Step::Nothing),
    };
    let EventObject { object } = serde_json::from_slice(line).map_err(unreadable)?;
    Ok(Step::Report(as_report(object)))
}
