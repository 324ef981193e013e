//! The watch of one object by its name.
//!
//! Each round lists the object, then watches its changes from that version on. A round ends when
//! the API server ends the watch at its time limit, when it no longer has the changes (410), when
//! nothing arrives, or with an error. After a pause the next round begins.

use super::connection::{Connection, refused};
use super::credentials::Credentials;
use super::error::ClusterError;
use super::lines::Lines;
use super::metadata::{Event, List, Object, ObjectMeta, Status};
use super::pauses::Pauses;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The forms of the answers: only the metadata, or the whole object from a server that does not
/// know this form.
const LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
const OBJECT: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";

/// The times of a watch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// The limit of a connect, and of an answer.
    pub(super) answer: Duration,
    /// The API server sends a bookmark about every minute. After this time without anything, the
    /// connection counts as lost.
    pub(super) silence: Duration,
    /// The least time after which the API server ends the watch, up to twice of it.
    pub(super) watch: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times {
            answer: Duration::from_secs(15),
            silence: Duration::from_secs(150),
            watch: Duration::from_secs(300),
        }
    }
}

/// What the watch reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The object exists. It is reported at each list and each change, also if its metadata is the
    /// same as before.
    Present(ObjectMeta),
    /// The object does not exist.
    Absent,
    /// The API server could not be used. The watch tries again after the pause.
    Failed {
        /// Why.
        error: ClusterError,
        /// How long.
        pause: Duration,
    },
}

/// The watch of one object.
#[derive(Debug)]
pub struct ObjectWatch {
    credentials: Credentials,
    /// The path of the objects, such as `/api/v1/nodes`.
    path: &'static str,
    name: String,
    times: Times,
    pauses: Pauses,
    random: RandomState,
    round: Option<Round>,
    /// The report that follows the last one at once.
    following: Option<Report>,
    /// When the next round begins.
    next: Instant,
    rounds: u64,
}

/// An open watch.
#[derive(Debug)]
struct Round {
    connection: Connection,
    body: Incoming,
    lines: Lines,
    began: Instant,
}

/// One event of a watch, as far as it matters.
enum Step {
    Report(Report),
    Nothing,
    /// The API server has ended the watch at its time limit.
    End,
}

impl ObjectWatch {
    /// Watches the node of this name. Nothing happens before [`ObjectWatch::next`].
    #[must_use]
    pub fn node(credentials: Credentials, name: &str) -> Self {
        Self::with_times(credentials, name, Times::default())
    }

    pub(super) fn with_times(credentials: Credentials, name: &str, times: Times) -> Self {
        ObjectWatch {
            credentials,
            path: "/api/v1/nodes",
            name: name.to_owned(),
            times,
            pauses: Pauses::default(),
            random: RandomState::new(),
            round: None,
            following: None,
            next: Instant::now(),
            rounds: 0,
        }
    }

    /// The next report. Returns within the pause after a failure, otherwise when there is something
    /// to report. The future may be dropped; the next one continues.
    pub async fn next(&mut self) -> Report {
        if let Some(report) = self.following.take() {
            return report;
        }
        loop {
            let Some(round) = &mut self.round else {
                tokio::time::sleep_until(self.next).await;
                let began = Instant::now();
                match self.begin(began).await {
                    Ok(report) => return report,
                    Err(error) => return self.failed(error, began.elapsed()),
                }
            };
            match round.step(self.times.silence).await {
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

    /// Lists the object, and opens the watch.
    async fn begin(&mut self, began: Instant) -> Result<Report, ClusterError> {
        let mut connection = Connection::open(&self.credentials, self.times.answer).await?;
        let selector = format!("?fieldSelector=metadata.name%3D{}", escaped(&self.name));
        let List { metadata, items } =
            connection.get_json(&format!("{}{selector}", self.path), LIST).await?;
        let found = items.into_iter().find(|item| item.metadata.name == self.name);
        let (version, limit) = (escaped(&metadata.resource_version), self.limit().as_secs());
        let watch = format!(
            "{}{selector}&watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={limit}",
            self.path
        );
        match connection.get(&watch, OBJECT).await {
            Ok(answer) => {
                let body = answer.into_body();
                self.round = Some(Round { connection, body, lines: Lines::default(), began });
            }
            // The list is an answer all the same: it is reported before the error.
            Err(error) => self.following = Some(self.failed(error, began.elapsed())),
        }
        Ok(found.map_or(Report::Absent, |Object { metadata }| Report::Present(metadata)))
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

    fn failed(&mut self, error: ClusterError, lasted: Duration) -> Report {
        let pause = self.pause(Some(&error), lasted);
        Report::Failed { error, pause }
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

impl Round {
    async fn step(&mut self, silence: Duration) -> Result<Step, ClusterError> {
        if let Some(line) = self.lines.next() {
            return event(&line);
        }
        match timeout(silence, self.body.frame()).await {
            Err(_) => Err(self.connection.silent(silence)),
            Ok(None) => Ok(Step::End),
            Ok(Some(Err(error))) => Err(self.connection.broken(&error)),
            Ok(Some(Ok(frame))) => {
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

/// One line of a watch (`WatchEvent` of apimachinery's `meta/v1`). A bookmark has only a version.
fn event(line: &[u8]) -> Result<Step, ClusterError> {
    let unreadable = |error: serde_json::Error| ClusterError::Unreadable(error.to_string());
    let Event { r#type, object } = serde_json::from_slice(line).map_err(unreadable)?;
    Ok(match r#type.as_str() {
        "ADDED" | "MODIFIED" => {
            let Object { metadata } = serde_json::from_value(object).map_err(unreadable)?;
            Step::Report(Report::Present(metadata))
        }
        "DELETED" => Step::Report(Report::Absent),
        "ERROR" => {
            let status: Status = serde_json::from_value(object).unwrap_or_default();
            return Err(refused(status.code, &status.message, status.retry_after()));
        }
        _ => Step::Nothing,
    })
}

/// A value in a query (RFC 3986, section 2.3).
fn escaped(value: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let one = |byte: u8| {
        if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    value.bytes().map(one).collect()
}
