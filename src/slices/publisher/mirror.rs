//! The slices of this driver on this node, as the API server has them.

use super::super::DRIVER;
use super::super::api::ResourceSlice;
use super::super::names::NodeName;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Versions that are remembered. A watch is late by a few versions at most.
const SEEN_MAX: usize = 4096;

/// An object's UID and one of its versions.
type Version = (String, String);

/// A change that another program made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Foreign {
    /// It wrote a slice.
    Written {
        /// The slice that was changed, or the pool that has a new one.
        what: String,
    },
    /// It deleted a slice.
    Deleted {
        /// The slice.
        what: String,
    },
}

/// The slices by the names of their objects.
#[derive(Debug)]
pub(super) struct Mirror {
    node: NodeName,
    slices: BTreeMap<String, ResourceSlice>,
    /// The versions that were in `slices`, the newest last. Events report a version late, and a
    /// version that was here is no news.
    seen: VecDeque<Version>,
}

impl Mirror {
    pub(super) fn new(node: NodeName) -> Self {
        Mirror { node, slices: BTreeMap::new(), seen: VecDeque::new() }
    }

    /// The slices.
    pub(super) fn slices(&self) -> impl Iterator<Item = &ResourceSlice> {
        self.slices.values()
    }

    /// A slice by the name of its object.
    pub(super) fn get(&self, name: &str) -> Option<&ResourceSlice> {
        self.slices.get(name)
    }

    /// Takes a list. The watch after it begins at its version, so versions before it are forgotten.
    pub(super) fn list(&mut self, listed: Vec<ResourceSlice>) -> Vec<Foreign> {
        let mut foreign = Vec::new();
        let former = std::mem::take(&mut self.slices);
        let seen = std::mem::take(&mut self.seen);
        for slice in listed {
            if !self.is_ours(&slice) {
                continue;
            }
            let version = version_of(&slice);
            if !seen.contains(&version) && !is_known(&former, &slice) {
                foreign.push(Foreign::Written { what: changed(&former, &slice) });
            }
            self.note(version);
            self.slices.insert(slice.metadata.name.clone(), slice);
        }
        let names: BTreeSet<&String> = self.slices.keys().collect();
        let deleted = former.keys().filter(|name| !names.contains(name));
        foreign.extend(deleted.map(|name| Foreign::Deleted { what: name.clone() }));
        foreign
    }

    /// Takes a version from a watch; `None` if it is no news.
    pub(super) fn change(&mut self, slice: ResourceSlice) -> Option<Foreign> {
        let version = version_of(&slice);
        if !self.is_ours(&slice) || self.seen.contains(&version) {
            return None;
        }
        let is_known = is_known(&self.slices, &slice);
        let what = changed(&self.slices, &slice);
        self.note(version);
        self.slices.insert(slice.metadata.name.clone(), slice);
        (!is_known).then_some(Foreign::Written { what })
    }

    /// Takes a deletion from a watch; `None` if it is no news, or of an earlier object of the name.
    pub(super) fn delete(&mut self, slice: &ResourceSlice) -> Option<Foreign> {
        let known = self.slices.get(&slice.metadata.name)?;
        if known.metadata.uid != slice.metadata.uid {
            return None;
        }
        self.slices.remove(&slice.metadata.name);
        Some(Foreign::Deleted { what: slice.metadata.name.clone() })
    }

    /// Takes the answer to a write. The watch may have reported this version before, and a later
    /// one too.
    pub(super) fn wrote(&mut self, slice: ResourceSlice) {
        let version = version_of(&slice);
        if !self.seen.contains(&version) {
            self.note(version);
            self.slices.insert(slice.metadata.name.clone(), slice);
        }
    }

    /// Takes the answer that an object does not exist any longer.
    pub(super) fn remove(&mut self, name: &str) {
        self.slices.remove(name);
    }

    fn note(&mut self, version: Version) {
        if self.seen.len() >= SEEN_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(version);
    }

    fn is_ours(&self, slice: &ResourceSlice) -> bool {
        slice.spec.driver == DRIVER && slice.spec.node_name.as_deref() == Some(self.node.as_str())
    }
}

/// The name of a changed slice, or the pool of a new one: its name may be another one each time.
fn changed(known: &BTreeMap<String, ResourceSlice>, slice: &ResourceSlice) -> String {
    let name = &slice.metadata.name;
    if known.contains_key(name) { name.clone() } else { slice.spec.pool.name.clone() }
}

/// Whether only the metadata of a slice has changed, such as its labels.
fn is_known(known: &BTreeMap<String, ResourceSlice>, slice: &ResourceSlice) -> bool {
    known.get(&slice.metadata.name).is_some_and(|known| {
        known.metadata.uid == slice.metadata.uid && known.spec.is_like(&slice.spec)
    })
}

fn version_of(slice: &ResourceSlice) -> Version {
    (slice.metadata.uid.clone(), slice.metadata.resource_version.clone())
}
