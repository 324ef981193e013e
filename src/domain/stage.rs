//! What one instance of the daemon is to the kubelet, from its start to its end.

use super::ResourceName;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Where the instance that has taken over answers for each resource.
pub type Successor = Arc<BTreeMap<ResourceName, PathBuf>>;

/// Two instances may be there at a time, while one hands over to the other; the kubelet has connections to both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Stage {
    /// It answers.
    #[default]
    Serving,
    /// It has given the ledger away, or is about to: its lists stand still, and what it is asked waits.
    Frozen,
    /// Another instance has the ledger: what is asked here is passed on to it.
    Succeeded(Successor),
    /// Its streams end. What is still asked goes to the one that has taken over, where there is one.
    Ending(Option<Successor>),
}
