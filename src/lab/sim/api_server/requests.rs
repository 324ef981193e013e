//! Answers requests: finds out who asks for what, checks the rights, and uses the store.

use super::access::{User, Verb};
use super::http::{self, BODY_BYTES_MAX, Request};
use super::refusal::Refusal;
use super::state::{Fault, Sent, State, refusal};
use super::target::{Kind, Selector, Target};
use super::{Connections, Served};
use super::{claim_status, patch, reviews};
use serde_json::{Value, json};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::sync::{broadcast, watch};

/// The parts that a connection needs.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) state: Arc<Mutex<State>>,
    pub(super) sent: broadcast::Sender<Sent>,
    pub(super) served: watch::Sender<Served>,
    pub(super) connections: watch::Sender<Connections>,
}

/// The answer to a request.
enum Answer {
    Object(u16, Value),
    /// The path does not exist.
    NoPath,
    Watch(Opened),
}

/// A watch that begins.
struct Opened {
    kind: Kind,
    namespace: String,
    selector: Selector,
    is_partial: bool,
    /// The lines that it has missed.
    missed: Vec<String>,
    sent: broadcast::Receiver<Sent>,
}

/// Counts an open connection.
struct Counted<'a>(&'a watch::Sender<Connections>);

impl<'a> Counted<'a> {
    fn new(connections: &'a watch::Sender<Connections>) -> Self {
        connections.send_modify(|count| (count.all, count.open) = (count.all + 1, count.open + 1));
        Counted(connections)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| count.open -= 1);
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, state: &State, sent: Sent) {
        if !state.is_silent {
            // Without a watch there is no receiver.
            drop(self.sent.send(sent));
        }
    }

    /// Sends the changes since the last call to the open watches.
    pub(super) fn publish(&self, state: &mut State) {
        for change in state.store.after(state.published).unwrap_or_default() {
            self.send(state, Sent::Change(change));
        }
        state.published = state.store.version();
    }

    /// Answers the requests of a connection.
    pub(super) async fn serve(&self, stream: TcpStream) -> io::Result<()> {
        let _counted = Counted::new(&self.connections);
        let mut stream = BufReader::new(stream);
        while let Some(request) = Request::read(&mut stream).await? {
            let fault = self.lock().arrived(&request);
            let answer = match fault {
                Some(Fault::BreakBefore) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Some(Fault::Refuse(code, retry_after)) => Err(refusal(code, retry_after)),
                Some(Fault::Delay(delay)) => {
                    tokio::time::sleep(delay).await;
                    self.answer(&request)
                }
                Some(Fault::BreakAfter) | None => self.answer(&request),
            };
            if fault == Some(Fault::BreakAfter) {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let is_whole = request.length <= BODY_BYTES_MAX;
            self.write(&mut stream, answer).await?;
            if !is_whole {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn write(
        &self,
        stream: &mut BufReader<TcpStream>,
        answer: Result<Answer, Refusal>,
    ) -> io::Result<()> {
        match answer {
            Ok(Answer::Watch(opened)) => self.watch(stream, opened).await,
            Ok(Answer::Object(code, object)) => {
                http::answer(stream, code, "", &object.to_string()).await
            }
            Ok(Answer::NoPath) => {
                self.served.send_modify(|served| served.refused += 1);
                http::answer(stream, 404, "", "404 page not found\n").await
            }
            Err(refusal) => {
                self.served.send_modify(|served| served.refused += 1);
                let header = refusal.retry_after;
                let header = header.map(|seconds| format!("Retry-After: {seconds}\r\n"));
                let (code, text) = (refusal.code, refusal.status().to_string());
                http::answer(stream, code, &header.unwrap_or_default(), &text).await
            }
        }
    }

    fn answer(&self, request: &Request) -> Result<Answer, Refusal> {
        let mut state = self.lock();
        let user = state.user(request)?;
        if request.length > BODY_BYTES_MAX {
            return Err(Refusal::new(413, "the request is too large"));
        }
        let State { users, bound, profile, .. } = &*state;
        if let Some(answer) = reviews::answer(request, &user, users, bound, *profile) {
            let (code, object) = answer?;
            return Ok(Answer::Object(code, object));
        }
        let Some(target) = Target::of(&request.path) else { return Ok(Answer::NoPath) };
        let selector = request.query.get("fieldSelector").map_or("", String::as_str);
        let selector = Selector::read(selector, target.kind)?;
        let verb = match (request.method.as_str(), &target.name) {
            ("GET", Some(_)) => Verb::Get,
            ("GET", None) if request.is_watch() => Verb::Watch,
            ("GET", None) => Verb::List,
            ("POST", None) => Verb::Create,
            ("PUT", Some(_)) => Verb::Update,
            ("PATCH", Some(_)) if target.is_patched() => Verb::Patch,
            ("DELETE", Some(_)) => Verb::Delete,
            ("DELETE", None) => Verb::DeleteAll,
            _ => {
                let why = "the server does not allow this method on the requested resource";
                return Err(Refusal::new(405, why));
            }
        };
        let old = target.name.as_deref();
        let old = old.and_then(|name| state.store.get(target.kind, &target.namespace, name));
        user.authorize(verb, &target, &selector, old, &state.bound)?;
        match verb {
            Verb::Get | Verb::List | Verb::Watch => {
                self.read(&state, verb, request, target, selector)
            }
            _ => {
                let done = write(&mut state, verb, request, &user, &target, &selector);
                self.publish(&mut state);
                let writes = usize::from(done.is_ok());
                self.served.send_modify(|served| served.writes += writes);
                done
            }
        }
    }

    fn read(
        &self,
        state: &State,
        verb: Verb,
        request: &Request,
        target: Target,
        selector: Selector,
    ) -> Result<Answer, Refusal> {
        let Target { kind, namespace, name, .. } = target;
        let is_partial = request.accept.contains("as=PartialObjectMetadata");
        let form = |object| if is_partial { partial(&object) } else { object };
        if let Some(name) = name {
            let found = state.store.get(kind, &namespace, &name).cloned();
            let found = found.ok_or_else(|| Refusal::not_found(kind.plural(), &name))?;
            return Ok(Answer::Object(200, form(found)));
        }
        if verb == Verb::List {
            self.served.send_modify(|served| served.lists += 1);
            let items = state.store.list(kind, &namespace, &selector).into_iter().map(form);
            let (items, version) = (items.collect::<Vec<_>>(), state.store.version().to_string());
            let (of, api_version) = match is_partial {
                true => ("PartialObjectMetadata", "meta.k8s.io/v1"),
                false => (kind.name(), kind.api_version()),
            };
            let list = json!({
                "kind": format!("{of}List"), "apiVersion": api_version,
                "metadata": { "resourceVersion": version }, "items": items,
            });
            return Ok(Answer::Object(200, list));
        }
        let from = request.query.get("resourceVersion").and_then(|text| text.parse().ok());
        let sent = self.sent.subscribe();
        let mut opened = Opened { kind, namespace, selector, is_partial, missed: vec![], sent };
        opened.missed = match state.store.after(from.unwrap_or(0)) {
            None => vec![expired()],
            Some(missed) => {
                missed.into_iter().filter_map(|change| opened.line(&Sent::Change(change))).collect()
            }
        };
        Ok(Answer::Watch(opened))
    }

    /// Answers a watch until it ends.
    async fn watch(&self, stream: &mut BufReader<TcpStream>, mut opened: Opened) -> io::Result<()> {
        http::begin(stream).await?;
        for line in std::mem::take(&mut opened.missed) {
            http::chunk(stream, &line).await?;
        }
        self.served.send_modify(|served| served.watches += 1);
        loop {
            match opened.sent.recv().await {
                Ok(Sent::End) => return http::end(stream).await,
                Ok(Sent::Break) | Err(_) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Ok(sent) => {
                    if let Some(line) = opened.line(&sent) {
                        http::chunk(stream, &line).await?;
                    }
                }
            }
        }
    }
}

impl Opened {
    /// The line of a message, if there is one.
    fn line(&self, sent: &Sent) -> Option<String> {
        let (r#type, object) = match sent {
            Sent::Expired => return Some(expired()),
            Sent::Bookmark(version) => {
                let object = json!({
                    "kind": self.kind.name(), "apiVersion": self.kind.api_version(),
                    "metadata": { "resourceVersion": version.to_string() },
                });
                ("BOOKMARK", object)
            }
            Sent::Change(change) => {
                let (r#type, object) = change.event(self.kind, &self.namespace, &self.selector)?;
                (r#type, object.clone())
            }
            Sent::End | Sent::Break => return None,
        };
        let object = if self.is_partial { partial(&object) } else { object };
        Some(json!({ "type": r#type, "object": object }).to_string())
    }
}

fn write(
    state: &mut State,
    verb: Verb,
    request: &Request,
    user: &User,
    target: &Target,
    selector: &Selector,
) -> Result<Answer, Refusal> {
    let (kind, namespace, profile) = (target.kind, target.namespace.as_str(), state.profile);
    let old = target.name.as_deref().and_then(|name| state.store.get(kind, namespace, name));
    match verb {
        Verb::Create | Verb::Update => {
            let object = http::body(request)?;
            user.admit(verb, target, old, Some(&object))?;
            if verb == Verb::Update {
                return Ok(Answer::Object(200, state.store.replace(target, object, profile)?));
            }
            if kind.is_namespaced() && namespace.is_empty() {
                return Err(Refusal::new(405, "objects are created in a namespace"));
            }
            // With `dryRun=All` everything is checked, and nothing is stored.
            if request.query.get("dryRun").is_some_and(|value| value == "All") {
                let trial = state.store.clone().create(target, object, profile)?;
                return Ok(Answer::Object(201, trial));
            }
            Ok(Answer::Object(201, state.store.create(target, object, profile)?))
        }
        Verb::Patch if kind == Kind::ResourceClaim => {
            let patch = http::body_as(request, claim_status::CONTENT_TYPE)?;
            let manager = request.query.get("fieldManager").map_or("", String::as_str);
            let name = target.name.as_deref().unwrap_or_default();
            let old = old.ok_or_else(|| Refusal::not_found(kind.plural(), name))?.clone();
            let new = claim_status::apply(&old, &patch, manager, user, profile)?;
            let stored = if new == old { old } else { state.store.put(kind, new) };
            Ok(Answer::Object(200, stored))
        }
        Verb::Patch => {
            user.admit(verb, target, old, None)?;
            let patch = http::body_as(request, patch::CONTENT_TYPE)?;
            Ok(Answer::Object(200, state.store.patch(target, &patch)?))
        }
        Verb::Delete => {
            user.admit(verb, target, old, None)?;
            let options = if request.body.is_empty() { json!({}) } else { http::body(request)? };
            let deleted = state.store.delete(target, &options["preconditions"])?;
            Ok(Answer::Object(200, deleted))
        }
        _ => {
            for object in state.store.list(kind, namespace, selector) {
                user.admit(verb, target, Some(&object), None)?;
            }
            state.store.delete_all(kind, namespace, selector);
            let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" });
            Ok(Answer::Object(200, status))
        }
    }
}

/// Only the metadata of an object.
fn partial(object: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": object["metadata"],
    })
}

/// The event of a watch whose version is too old.
fn expired() -> String {
    let mut status = Refusal::new(410, "too old resource version").status();
    status["reason"] = "Expired".into();
    json!({ "type": "ERROR", "object": status }).to_string()
}
