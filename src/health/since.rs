//! The grants that are new since the last list.

use crate::domain::Grant;
use std::sync::Arc;

/// The grants that have changed. Both lists are sorted by id.
pub(super) fn new_since<'a>(
    before: &'a [Arc<Grant>],
    grants: &'a [Arc<Grant>],
) -> impl Iterator<Item = &'a Grant> {
    let mut before = before.iter().peekable();
    let is_new = move |grant: &&Arc<Grant>| {
        while before
            .next_if(|known| !Arc::ptr_eq(known, grant) && known.alloc_id < grant.alloc_id)
            .is_some()
        {}
        before.next_if(|known| Arc::ptr_eq(known, grant)).is_none()
    };
    grants.iter().filter(is_new).map(AsRef::as_ref)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{AllocId, ContainerEdits, GrantState, Timestamp};

    fn grant(id: &str) -> Arc<Grant> {
        Arc::new(Grant {
            alloc_id: AllocId::new(id),
            resource: "example.com/gpu".parse().unwrap(),
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: "1".into(),
            state: GrantState::Granted,
        })
    }

    #[test]
    fn only_new_and_changed_grants_are_returned() {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(grant);
        let new = |before: &[&Arc<Grant>], grants: &[&Arc<Grant>]| {
            let owned = |grants: &[&Arc<Grant>]| {
                grants.iter().map(|grant| Arc::clone(grant)).collect::<Vec<_>>()
            };
            let (before, grants) = (owned(before), owned(grants));
            new_since(&before, &grants).map(|grant| grant.alloc_id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(new(&[], &[&a, &b]), ["a", "b"]);
        assert_eq!(new(&[&a, &b], &[&a, &b, &c]), ["c"]);
        assert_eq!(new(&[&a, &b, &c], &[&b, &d]), ["d"], "two were released");
        assert_eq!(new(&[&b, &d], &[&a, &b, &c, &d]), ["a", "c"]);
        assert_eq!(new(&[&a, &b], &[&a, &grant("b")]), ["b"], "its state has changed");
        assert_eq!(new(&[&a, &b], &[]), [""; 0]);
    }
}
