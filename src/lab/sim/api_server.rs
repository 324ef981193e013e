//! A simulated Kubernetes API server with one node, for tests: lists, watches, and what goes wrong
//! with them.
//!
//! It speaks HTTP/1.1 on an address of this machine, without TLS. It reads only the parts of a
//! request that matter here: the path, the query, and the token.

use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, watch};
use tokio::task::JoinSet;

/// The lines that a watch may be behind.
const BEHIND_MAX: usize = 64;

/// The counts of requests that were answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Lists.
    pub lists: usize,
    /// Watches that were opened.
    pub watches: usize,
    /// Requests that were refused.
    pub refused: usize,
}

/// A message to the open watches.
#[derive(Debug, Clone)]
enum Sent {
    /// A line.
    Line(String),
    /// The watch ends at its time limit.
    End,
    /// The connection breaks.
    Break,
}

#[derive(Debug)]
struct State {
    name: String,
    /// The labels; `None` while the node does not exist.
    labels: Option<BTreeMap<String, String>>,
    version: u64,
    /// Changes before this version are no longer known.
    oldest: u64,
    /// The lines with their versions.
    history: Vec<(u64, String)>,
    /// The token that requests must have.
    token: Option<String>,
    /// The code of the answer to every request, and its `Retry-After` in seconds.
    refusal: Option<(u16, Option<u32>)>,
    is_silent: bool,
}

/// The API server. Its connections break when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    sent: broadcast::Sender<Sent>,
    served: watch::Sender<Served>,
    _tasks: JoinSet<()>,
}

/// The parts that a connection needs.
#[derive(Debug, Clone)]
struct Shared {
    state: Arc<Mutex<State>>,
    sent: broadcast::Sender<Sent>,
    served: watch::Sender<Served>,
}

impl ApiServer {
    /// Starts with a node of this name and these labels. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the system has no port for it.
    pub async fn start(name: &str, labels: &[(&str, &str)]) -> io::Result<Self> {
        Self::start_at("127.0.0.1:0".parse().map_err(io::Error::other)?, name, labels).await
    }

    /// The same at an address, such as that of a former one.
    ///
    /// # Errors
    /// When the address is in use.
    pub async fn start_at(
        address: SocketAddr,
        name: &str,
        labels: &[(&str, &str)],
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let state = Arc::new(Mutex::new(State {
            name: name.to_owned(),
            labels: Some(owned(labels)),
            version: 100,
            oldest: 0,
            history: Vec::new(),
            token: None,
            refusal: None,
            is_silent: false,
        }));
        let (sent, served) = (broadcast::Sender::new(BEHIND_MAX), watch::Sender::default());
        let address = listener.local_addr()?;
        let shared =
            Shared { state: Arc::clone(&state), sent: sent.clone(), served: served.clone() };
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = shared.clone();
                connections.spawn(async move { drop(shared.serve(stream).await) });
            }
        });
        Ok(ApiServer { address, state, sent, served, _tasks: tasks })
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Writes a kubeconfig for it, with the token in a file next to it: `kubeconfig`, `token`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn kubeconfig(&self, folder: &Path, token: &str) -> io::Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "sim",
            "contexts": [{ "name": "sim", "context": { "cluster": "sim", "user": "sim" } }],
            "clusters": [{ "name": "sim", "cluster": { "server": format!("http://{}", self.address) } }],
            "users": [{ "name": "sim", "user": { "tokenFile": "token" } }],
        });
        std::fs::write(folder.join("token"), token)?;
        let file = folder.join("kubeconfig");
        std::fs::write(&file, config.to_string())?;
        Ok(file)
    }

    /// Gives the node these labels only.
    pub fn set_labels(&self, labels: &[(&str, &str)]) {
        self.change("MODIFIED", |state| state.labels = Some(owned(labels)));
    }

    /// Removes the node.
    pub fn delete_node(&self) {
        self.change("DELETED", |state| state.labels = None);
    }

    /// Sends a bookmark to the open watches: a version without a change.
    pub fn bookmark(&self) {
        let line = {
            let state = self.lock();
            let metadata = json!({ "resourceVersion": state.version.to_string() });
            json!({ "type": "BOOKMARK", "object": { "kind": "PartialObjectMetadata", "metadata": metadata } })
        };
        self.send(Sent::Line(line.to_string()));
    }

    /// Forgets all changes so far, and ends the open watches with 410.
    pub fn expire(&self) {
        {
            let mut state = self.lock();
            state.version += 1;
            state.oldest = state.version;
            state.history.clear();
        }
        self.send(Sent::Line(expired()));
        self.send(Sent::End);
    }

    /// Ends the open watches as at their time limit.
    pub fn end_watches(&self) {
        self.send(Sent::End);
    }

    /// Breaks the connections of the open watches.
    pub fn disconnect(&self) {
        self.send(Sent::Break);
    }

    /// Whether open watches receive nothing: their connections stay open.
    pub fn silence(&self, is_silent: bool) {
        self.lock().is_silent = is_silent;
    }

    /// Requires this token from now on.
    pub fn require_token(&self, token: &str) {
        self.lock().token = Some(token.to_owned());
    }

    /// Refuses every request with this code, and this header `Retry-After` in seconds. `None`
    /// answers again.
    pub fn refuse(&self, refusal: Option<(u16, Option<u32>)>) {
        self.lock().refusal = refusal;
    }

    /// The counts of requests.
    #[must_use]
    pub fn served(&self) -> watch::Receiver<Served> {
        self.served.subscribe()
    }

    fn change(&self, kind: &str, change: impl FnOnce(&mut State)) {
        let line = {
            let mut state = self.lock();
            state.version += 1;
            // The object in the event of a removal is the last one.
            let before = state.object();
            change(&mut state);
            let object = state.object().or(before);
            let line = json!({ "type": kind, "object": object }).to_string();
            let version = state.version;
            state.history.push((version, line.clone()));
            line
        };
        self.send(Sent::Line(line));
    }

    fn send(&self, sent: Sent) {
        if !self.lock().is_silent {
            // Without a watch there is no receiver.
            drop(self.sent.send(sent));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn object(&self) -> Option<serde_json::Value> {
        let labels = self.labels.as_ref()?;
        Some(json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
            "metadata": {
                "name": self.name, "uid": "1", "resourceVersion": self.version.to_string(), "labels": labels,
            },
        }))
    }

    /// The body of a list. Without a node of this name it is empty.
    fn list(&self, name: &str) -> String {
        let items: Vec<_> = self.object().into_iter().filter(|_| self.name == name).collect();
        let metadata = json!({ "resourceVersion": self.version.to_string() });
        json!({ "kind": "PartialObjectMetadataList", "metadata": metadata, "items": items })
            .to_string()
    }
}

/// The parts of a request that matter.
#[derive(Debug, Default)]
struct Asked {
    path: String,
    query: BTreeMap<String, String>,
    token: Option<String>,
}

impl Asked {
    /// Reads the head of a request; `None` at the end of the connection.
    async fn read(stream: &mut BufReader<TcpStream>) -> io::Result<Option<Asked>> {
        let mut asked = Asked::default();
        let mut line = String::new();
        loop {
            line.clear();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(None);
            }
            let text = line.trim_end();
            if text.is_empty() {
                return Ok(Some(asked));
            }
            if asked.path.is_empty() {
                let target = text.split(' ').nth(1).unwrap_or_default();
                let (path, query) = target.split_once('?').unwrap_or((target, ""));
                path.clone_into(&mut asked.path);
                let pair = |pair: &str| {
                    pair.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
                };
                asked.query = query.split('&').filter_map(pair).collect();
            } else if let Some((name, value)) = text.split_once(": ")
                && name.eq_ignore_ascii_case("authorization")
            {
                asked.token = value.strip_prefix("Bearer ").map(str::to_owned);
            }
        }
    }

    /// The name in `fieldSelector=metadata.name%3D<name>`.
    fn name(&self) -> &str {
        let selector = self.query.get("fieldSelector").map(String::as_str);
        selector.and_then(|text| text.strip_prefix("metadata.name%3D")).unwrap_or_default()
    }
}

impl Shared {
    async fn serve(&self, stream: TcpStream) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        while let Some(asked) = Asked::read(&mut stream).await? {
            if let Some((code, retry_after)) = self.refusal(&asked) {
                self.served.send_modify(|served| served.refused += 1);
                let status = json!({ "kind": "Status", "code": code, "message": format!("refused with {code}") });
                let header = retry_after
                    .map(|seconds| format!("Retry-After: {seconds}\r\n"))
                    .unwrap_or_default();
                answer(&mut stream, code, &header, &status.to_string()).await?;
            } else if asked.query.contains_key("watch") {
                self.watch(&mut stream, &asked).await?;
            } else {
                let list = self.lock().list(asked.name());
                self.served.send_modify(|served| served.lists += 1);
                answer(&mut stream, 200, "", &list).await?;
            }
        }
        Ok(())
    }

    /// Why a request is refused: its code.
    fn refusal(&self, asked: &Asked) -> Option<(u16, Option<u32>)> {
        let state = self.lock();
        let is_known = state.token.is_none() || state.token == asked.token;
        let is_path = asked.path == "/api/v1/nodes" && !asked.name().is_empty();
        state.refusal.or((!is_known).then_some((401, None))).or((!is_path).then_some((403, None)))
    }

    /// Answers a watch until it ends.
    async fn watch(&self, stream: &mut BufReader<TcpStream>, asked: &Asked) -> io::Result<()> {
        let from: u64 =
            asked.query.get("resourceVersion").and_then(|text| text.parse().ok()).unwrap_or(0);
        let (missed, mut sent) = {
            let state = self.lock();
            let missed: Vec<String> = if from < state.oldest {
                vec![expired()]
            } else {
                let after = state.history.iter().filter(|(version, _)| *version > from);
                after.map(|(_, line)| line.clone()).collect()
            };
            (missed, self.sent.subscribe())
        };
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        for line in missed {
            chunk(stream, &line).await?;
        }
        self.served.send_modify(|served| served.watches += 1);
        loop {
            match sent.recv().await {
                Ok(Sent::Line(line)) => chunk(stream, &line).await?,
                Ok(Sent::End) => return stream.write_all(b"0\r\n\r\n").await,
                Ok(Sent::Break) | Err(_) => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn owned(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
    labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// The event of a watch whose version is too old.
fn expired() -> String {
    let status = json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version" });
    json!({ "type": "ERROR", "object": status }).to_string()
}

async fn answer(
    stream: &mut BufReader<TcpStream>,
    code: u16,
    header: &str,
    body: &str,
) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {code} Code\r\nContent-Type: application/json\r\n{header}Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).await
}

async fn chunk(stream: &mut BufReader<TcpStream>, line: &str) -> io::Result<()> {
    let mut text = String::new();
    // The end of the line is part of the chunk.
    let _ = write!(text, "{:x}\r\n{line}\n\r\n", line.len() + 1);
    stream.write_all(text.as_bytes()).await
}
