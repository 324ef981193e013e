//! The object of the node, which owns its slices: the control plane deletes them with it.
//!
//! The service starts before the kubelet, and the object of a new node may not exist then. It may
//! also be deleted and created again, with another UID. Slices with a former UID are deleted again
//! and again. So it is read until it is there, and after the events that may show a new one.

use crate::slices::api::OwnerReference;
use crate::slices::names::NodeName;
use std::time::Duration;
use tokio::time::Instant;

/// Before the next attempt, if there is no such object, or no answer. Each further pause is
/// doubled.
const AGAIN_MIN: Duration = Duration::from_secs(5);
/// The longest pause between two attempts.
const AGAIN_MAX: Duration = Duration::from_secs(300);
/// Between two reads for the sake of events.
const PAUSE: Duration = Duration::from_secs(10);

/// What is known of the object.
#[derive(Debug)]
pub(super) struct Owner {
    node: NodeName,
    known: Option<OwnerReference>,
    read_at: Option<Instant>,
    /// No read for the sake of an event is before this time.
    not_before: Instant,
    pause: Duration,
}

impl Owner {
    /// Nothing is known, and it is read at once.
    pub(super) fn new(node: NodeName, now: Instant) -> Self {
        Owner { node, known: None, read_at: Some(now), not_before: now, pause: AGAIN_MIN }
    }

    /// The reference for slices. `None` if there is no such object, or it could not be read yet.
    pub(super) fn reference(&self) -> Option<OwnerReference> {
        self.known.clone()
    }

    /// When it is read next. `None`: after the next event.
    pub(super) fn read_at(&self) -> Option<Instant> {
        self.read_at
    }

    /// An event shows that the object may be another one: the kubelet has registered the driver, or
    /// a slice was deleted.
    pub(super) fn may_be_another(&mut self, now: Instant) {
        let at = now.max(self.not_before);
        self.read_at = Some(self.read_at.map_or(at, |it| it.min(at)));
    }

    /// The answer of the API server: the UID, or `None` if there is no such object.
    pub(super) fn answered(&mut self, found: Result<Option<String>, String>, now: Instant) {
        self.not_before = now + PAUSE;
        match found {
            Ok(Some(uid)) => {
                (self.read_at, self.pause) = (None, AGAIN_MIN);
                self.known = Some(OwnerReference {
                    api_version: "v1".into(),
                    kind: "Node".into(),
                    name: self.node.as_str().to_owned(),
                    uid,
                    controller: Some(true),
                });
                return;
            }
            Ok(None) => {
                self.known = None;
                self.warn("the API server has no such node");
            }
            Err(error) => self.warn(&format!("cannot read this node's object: {error}")),
        }
        self.read_at = Some(now + self.pause);
        self.pause = (self.pause * 2).min(AGAIN_MAX);
    }

    /// Logs the first of several failures.
    fn warn(&self, why: &str) {
        if self.pause == AGAIN_MIN {
            let node = self.node.as_str();
            tracing::warn!(
                node,
                why,
                "the control plane does not delete the slices with the node yet"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_is_read_until_it_is_there_and_again_when_it_may_be_another() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut owner = Owner::new(NodeName::new("n1").unwrap(), at(0));
        assert_eq!((owner.read_at(), owner.reference()), (Some(at(0)), None));
        // A new node: the kubelet has not created it yet.
        owner.answered(Ok(None), at(0));
        assert_eq!(owner.read_at(), Some(at(5)));
        owner.answered(Err("refused".into()), at(5));
        assert_eq!(owner.read_at(), Some(at(15)), "the pause grows");
        owner.answered(Ok(Some("u1".into())), at(15));
        assert_eq!((owner.read_at(), owner.reference().unwrap().uid), (None, "u1".into()));
        owner.may_be_another(at(16));
        owner.may_be_another(at(17));
        assert_eq!(owner.read_at(), Some(at(25)), "events do not become a load");
        // Without an answer it stays, and the object may have been deleted.
        owner.answered(Err("refused".into()), at(25));
        assert_eq!((owner.read_at(), owner.reference().is_some()), (Some(at(30)), true));
        owner.answered(Ok(None), at(30));
        assert_eq!(owner.reference(), None);
        owner.may_be_another(at(100));
        assert_eq!(owner.read_at(), Some(at(40)), "it is due already");
        owner.answered(Ok(Some("u2".into())), at(100));
        assert_eq!(owner.reference().unwrap().uid, "u2");
        let longest = (0..20).map(|n| {
            owner.answered(Ok(None), at(1000 + n));
            owner.read_at().unwrap() - at(1000 + n)
        });
        assert_eq!(longest.max(), Some(AGAIN_MAX));
    }
}
