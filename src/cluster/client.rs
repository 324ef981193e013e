//! Requests for objects: get, list, create, replace, patch and delete, over one connection.
//!
//! The connection stays open while it is used. It is opened again, with credentials that are read
//! again, when it was lost, when the API server does not accept the credentials (401), and after a
//! minute. A request is repeated once at most, and only if that cannot do anything twice.

use super::collection::Collection;
use super::connection::{
    APPLY, Connection, Failed, JSON, LIST_BYTES_MAX, OBJECT_BYTES_MAX, Question, STRATEGIC_MERGE,
};
use super::credentials::Credentials;
use super::error::ClusterError;
use super::metadata::List;
use hyper::Method;
use hyper::body::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

/// The times of a client.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The limit of a connect, and of each part of an answer.
    pub(super) answer: Duration,
    /// An unused connection is closed after this time.
    pub(super) idle: Duration,
    /// A connection is not used longer than this: the kubelet renews tokens and certificates.
    pub(super) age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            answer: Duration::from_secs(15),
            idle: Duration::from_secs(30),
            age: Duration::from_secs(60),
        }
    }
}

/// A client of the API server. Its clones share one connection, and their requests wait for each
/// other.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    credentials: Credentials,
    limits: Limits,
    /// The connection between two requests.
    kept: Mutex<Option<Kept>>,
}

#[derive(Debug)]
struct Kept {
    connection: Connection,
    _closer: Closer,
}

/// The task that closes an idle connection. It ends with this value.
#[derive(Debug)]
struct Closer(JoinHandle<()>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Client {
    /// A client with these credentials. Nothing is connected before the first request.
    #[must_use]
    pub fn new(credentials: Credentials) -> Self {
        Self::with_limits(credentials, Limits::default())
    }

    pub(super) fn with_limits(credentials: Credentials, limits: Limits) -> Self {
        Client { shared: Arc::new(Shared { credentials, limits, kept: Mutex::default() }) }
    }

    /// The object at this path.
    ///
    /// # Errors
    /// When the API server cannot be used, or refuses.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClusterError> {
        let question = Question::get(path.to_owned(), JSON);
        read(&self.ask(&question, OBJECT_BYTES_MAX).await?)
    }

    /// The object at this path, or `None` if the API server reports that it does not exist.
    ///
    /// # Errors
    /// As [`Client::get`]. An answer 404 that is not about the object is an error.
    pub async fn find<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>, ClusterError> {
        match self.get(path).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.is_absence() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The objects of a collection, all in one answer.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn list<T: DeserializeOwned>(
        &self,
        collection: &Collection,
    ) -> Result<List<T>, ClusterError> {
        self.list_as(collection, JSON).await
    }

    /// The objects of a collection in one of their forms.
    pub(super) async fn list_as<T: DeserializeOwned>(
        &self,
        collection: &Collection,
        accept: &'static str,
    ) -> Result<List<T>, ClusterError> {
        let question = Question::get(collection.query(""), accept);
        read(&self.ask(&question, LIST_BYTES_MAX).await?)
    }

    /// Creates an object in the collection at this path. Returns it as the API server has stored
    /// it: fields behind a disabled feature gate are missing.
    ///
    /// # Errors
    /// As [`Client::get`]; 409 with the reason `AlreadyExists` if the name is used.
    pub async fn create<T: DeserializeOwned>(
        &self,
        path: &str,
        object: &impl Serialize,
    ) -> Result<T, ClusterError> {
        self.write(Method::POST, path, object, false).await
    }

    /// Asks a question that the API server answers without storing anything: a review.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn review<T: DeserializeOwned>(
        &self,
        path: &str,
        object: &impl Serialize,
    ) -> Result<T, ClusterError> {
        self.write(Method::POST, path, object, true).await
    }

    /// Replaces the object at this path. Its `metadata.resourceVersion` is that of the content that
    /// it replaces. Returns it as the API server has stored it.
    ///
    /// # Errors
    /// As [`Client::get`]; 409 with the reason `Conflict` if it has another version by now, which a
    /// repeated request may have caused.
    pub async fn replace<T: DeserializeOwned>(
        &self,
        path: &str,
        object: &impl Serialize,
    ) -> Result<T, ClusterError> {
        self.write(Method::PUT, path, object, true).await
    }

    /// Changes the fields of the object at this path that `patch` has (strategic merge patch). An
    /// empty one changes nothing. Returns the object as the API server has stored it.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn patch<T: DeserializeOwned>(
        &self,
        path: &str,
        patch: &impl Serialize,
    ) -> Result<T, ClusterError> {
        self.patch_as(path, patch, STRATEGIC_MERGE).await
    }

    /// Has the object at this path have the fields of `patch` (server-side apply). `path` has the
    /// field manager. Its other fields in the object are removed. Returns the object as the API
    /// server has stored it.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn apply<T: DeserializeOwned>(
        &self,
        path: &str,
        patch: &impl Serialize,
    ) -> Result<T, ClusterError> {
        self.patch_as(path, patch, APPLY).await
    }

    async fn patch_as<T: DeserializeOwned>(
        &self,
        path: &str,
        patch: &impl Serialize,
        content_type: &'static str,
    ) -> Result<T, ClusterError> {
        let question = question(Method::PATCH, path, patch, true)?;
        let question = Question { content_type, ..question };
        read(&self.ask(&question, OBJECT_BYTES_MAX).await?)
    }

    /// Deletes the object at this path, if it has this UID and, if given, this version. Returns
    /// `false` if it did not exist.
    ///
    /// # Errors
    /// As [`Client::get`]; 409 with the reason `Conflict` if it has another UID or version.
    pub async fn delete(
        &self,
        path: &str,
        uid: &str,
        resource_version: Option<&str>,
    ) -> Result<bool, ClusterError> {
        let mut preconditions = json!({ "uid": uid });
        if let Some(version) = resource_version {
            preconditions["resourceVersion"] = version.into();
        }
        let options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions,
        });
        let question = question(Method::DELETE, path, &options, true)?;
        match self.ask(&question, OBJECT_BYTES_MAX).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_absence() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn write<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        object: &impl Serialize,
        may_repeat: bool,
    ) -> Result<T, ClusterError> {
        let question = question(method, path, object, may_repeat)?;
        read(&self.ask(&question, OBJECT_BYTES_MAX).await?)
    }

    /// Sends a request, and once again if that cannot do anything twice. A dropped future closes
    /// the connection, since the rest of an answer would be that of the next request.
    async fn ask(&self, question: &Question, bytes_max: usize) -> Result<Bytes, ClusterError> {
        let Shared { credentials, limits, kept } = &*self.shared;
        let mut kept = kept.lock().await;
        let mut is_second = false;
        loop {
            let known = kept.take().map(|kept| kept.connection);
            let known = known.filter(|connection| connection.is_usable(limits.age));
            let was_known = known.is_some();
            let mut connection = match known {
                Some(connection) => connection,
                None => Connection::open(credentials, limits.answer).await?,
            };
            let failed = match connection.call(question, bytes_max).await {
                Ok(answer) => {
                    *kept = Some(self.keep(connection));
                    return Ok(answer);
                }
                Err(failed) => failed,
            };
            if failed.error.code().is_some_and(|code| code != 401) {
                *kept = Some(self.keep(connection));
            }
            if is_second || !is_repeated(question, &failed, was_known) {
                return Err(failed.error);
            }
            is_second = true;
        }
    }

    /// A connection until the next request, or until it is idle for too long.
    fn keep(&self, connection: Connection) -> Kept {
        let (shared, idle) = (Arc::downgrade(&self.shared), self.shared.limits.idle);
        let closing = async move {
            tokio::time::sleep(idle).await;
            if let Some(shared) = shared.upgrade()
                && let Ok(mut kept) = shared.kept.try_lock()
            {
                drop(kept.take());
            }
        };
        Kept { connection, _closer: Closer(tokio::spawn(closing)) }
    }
}

/// Whether a failed request is sent again. A request that was refused with 401, or that was not
/// sent, has done nothing.
fn is_repeated(question: &Question, failed: &Failed, was_known: bool) -> bool {
    match &failed.error {
        // The credentials of another connection were read just now.
        ClusterError::Refused { code: 401, .. } => was_known,
        ClusterError::Broken { .. } => !failed.was_sent || question.may_repeat,
        _ => false,
    }
}

fn question(
    method: Method,
    path: &str,
    object: &impl Serialize,
    may_repeat: bool,
) -> Result<Question, ClusterError> {
    let body = serde_json::to_vec(object).map_err(|error| {
        ClusterError::Unreadable(format!("the object for `{path}` is no JSON: {error}"))
    })?;
    let body = Some(Bytes::from(body));
    let path = path.to_owned();
    Ok(Question { method, path, accept: JSON, body, content_type: JSON, may_repeat })
}

fn read<T: DeserializeOwned>(answer: &[u8]) -> Result<T, ClusterError> {
    serde_json::from_slice(answer).map_err(|error| ClusterError::Unreadable(error.to_string()))
}
