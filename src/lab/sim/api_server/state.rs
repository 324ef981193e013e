//! The state of the simulated API server, and the messages to its open watches.

use super::access::{Bound, User, Users};
use super::http::Request;
use super::profile::Profile;
use super::refusal::Refusal;
use super::store::{Change, Store};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What goes wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is refused with this code, and this header `Retry-After` in seconds.
    Refuse(u16, Option<u32>),
    /// It is answered later.
    Delay(Duration),
    /// The connection breaks, and nothing is done.
    BreakBefore,
    /// It is done, and the connection breaks instead of an answer.
    BreakAfter,
}

/// A message to the open watches.
#[derive(Debug, Clone)]
pub(super) enum Sent {
    Change(Arc<Change>),
    /// A bookmark with this version.
    Bookmark(u64),
    /// The history no longer reaches back to what the watch has seen.
    Expired,
    /// The watch ends at its time limit.
    End,
    /// The connection breaks.
    Break,
}

type Decide = Box<dyn FnMut(&Request) -> Option<Fault> + Send>;

/// The function that decides what goes wrong.
#[derive(Default)]
pub(super) struct Faults(Option<Decide>);

impl Faults {
    pub(super) fn set(&mut self, decide: impl FnMut(&Request) -> Option<Fault> + Send + 'static) {
        self.0 = Some(Box::new(decide));
    }

    fn next(&mut self, request: &Request) -> Option<Fault> {
        self.0.as_mut().and_then(|decide| decide(request))
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("is_set", &self.0.is_some()).finish()
    }
}

#[derive(Debug)]
pub(super) struct State {
    /// The name of the node of the labels.
    pub(super) node: String,
    pub(super) store: Store,
    /// The version that was sent last to the open watches.
    pub(super) published: u64,
    pub(super) profile: Profile,
    pub(super) users: Users,
    pub(super) bound: Bound,
    /// The token that requests must have.
    pub(super) token: Option<String>,
    /// The code of the answer to every request, and its `Retry-After` in seconds.
    pub(super) refusal: Option<(u16, Option<u32>)>,
    pub(super) is_silent: bool,
    pub(super) faults: Faults,
    pub(super) requests: Vec<String>,
}

impl State {
    pub(super) fn new(node: &str) -> Self {
        State {
            node: node.to_owned(),
            store: Store::new(),
            published: 0,
            profile: Profile::V1_36,
            users: Users::new(),
            bound: Bound::new(),
            token: None,
            refusal: None,
            is_silent: false,
            faults: Faults::default(),
            requests: Vec::new(),
        }
    }

    /// Notes a request, and decides what goes wrong with it.
    pub(super) fn arrived(&mut self, request: &Request) -> Option<Fault> {
        let method = if request.is_watch() { "WATCH" } else { &request.method };
        self.requests.push(format!("{method} {}", request.path));
        self.faults.next(request)
    }

    /// Who sends a request.
    pub(super) fn user(&self, request: &Request) -> Result<User, Refusal> {
        if let Some((code, retry_after)) = self.refusal {
            return Err(refusal(code, retry_after));
        }
        let is_required = self.token.is_none() || self.token == request.token;
        let user = match self.users.is_empty() {
            true => Some(User::Admin),
            false => self.users.get(&request.token).cloned(),
        };
        user.filter(|_| is_required).ok_or_else(|| Refusal::new(401, "Unauthorized"))
    }
}

/// The answer to a request that a test refuses.
pub(super) fn refusal(code: u16, retry_after: Option<u32>) -> Refusal {
    Refusal { retry_after, ..Refusal::new(code, format!("refused with {code}")) }
}
