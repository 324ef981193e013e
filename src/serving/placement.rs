//! Chooses the free ids that fit together best. Pure, deterministic, of exactly the requested size.
//!
//! The devices of a resource are the leaves of a tree: NUMA nodes, host bridges, root ports,
//! switches, cards, and hives. A hive is a group of GPUs with direct links (NVLink, XGMI), which
//! are nearer than any switch. Of all choices of the requested size, the best one has the smallest
//! score, compared row by row:
//!
//! | | `closest` | `packed` | `spread` |
//! | --- | --- | --- | --- |
//! | 1 | pairs of shares of one device | the same | the same |
//! | 2 | neighbour distance (a) | the same | the same |
//! | 3 | distance of the two farthest | groups that were whole | uneven use of sockets |
//! | 4 | neighbour distance (b) | left over in used groups | uneven use of their groups, ... |
//! | 5 | groups that were whole and are split | neighbour distance (b) | the same |
//! | 6 | left over in the smallest group around all, then around it | | |
//! | 7 | uneven use of devices | | |
//! | last | the ids | the ids | the ids |
//!
//! The lowest ids are the best; with `api = "both"` the highest ones.
//!
//! (a) if there are at least as many neighbours as requested ids; (b) if there are fewer.
//!
//! A group is whole while everything in it is free. It is split when only a part of it is taken.
//! The neighbours are the devices of other resources that the same container was just given
//! (`serving/affinity.rs`). The neighbour distance is the number of groups around each of them that
//! contain no chosen device. So the best adapters for eight GPUs are those on all sides of them. A
//! few adapters are near the GPUs, even if the policy would keep groups whole. Many GPUs are near
//! each other first, and near the adapter second.
//!
//! The result is exact: the best choice of each size in a group is composed from its parts' ones.

mod choices;
mod search;
mod tree;

use self::search::Policy;
use self::tree::{Tree, rank};
use crate::domain::{Device, DeviceId, Offering};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Why there is no answer. The kubelet never sends such a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unanswerable {
    /// More ids must be included than are requested.
    #[error("{must} devices must be included, but only {size} are requested")]
    TooManyMust {
        /// Number of ids that must be included.
        must: usize,
        /// Number of requested ids.
        size: usize,
    },
    /// Fewer ids are available than are requested.
    #[error("{size} devices are requested, but only {available} are available")]
    TooFew {
        /// Number of requested ids.
        size: usize,
        /// Number of available ids.
        available: usize,
    },
}

/// Chooses `size` ids of `available` that include `must_include`, by the resource's placement. The
/// answer has the ids that must be included first, then the others, each in order of preference.
///
/// # Errors
/// When that many cannot be chosen.
pub fn choose(
    offering: &Offering,
    available: &[DeviceId],
    must_include: &[DeviceId],
    size: usize,
) -> Result<Vec<DeviceId>, Unanswerable> {
    choose_near(offering, &[], available, must_include, size)
}

/// The same, near devices of other resources that the container has.
///
/// # Errors
/// When that many cannot be chosen.
pub fn choose_near(
    offering: &Offering,
    neighbours: &[Arc<Device>],
    available: &[DeviceId],
    must_include: &[DeviceId],
    size: usize,
) -> Result<Vec<DeviceId>, Unanswerable> {
    let must = sorted(must_include.iter().collect());
    let ids = sorted(available.iter().chain(must_include).collect());
    if must.len() > size {
        return Err(Unanswerable::TooManyMust { must: must.len(), size });
    }
    if ids.len() < size {
        return Err(Unanswerable::TooFew { size, available: ids.len() });
    }
    let neighbours: BTreeMap<&DeviceId, &Device> =
        neighbours.iter().map(|device| (&device.id, &**device)).collect();
    let tree = Tree::new(offering, &neighbours, &ids, &must);
    let policy =
        Policy { placement: offering.spec.placement, neighbours_first: neighbours.len() >= size };
    let chosen = tree.choose(policy, size);
    let id = |chosen| ids[rank(offering, ids.len(), chosen)];
    let (first, rest): (Vec<_>, Vec<_>) =
        chosen.into_iter().map(id).partition(|id| must.binary_search(id).is_ok());
    Ok(first.into_iter().chain(rest).cloned().collect())
}

/// The ids, sorted and without duplicates.
fn sorted(mut ids: Vec<&DeviceId>) -> Vec<&DeviceId> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests;
