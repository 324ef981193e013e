//! One look at the kubelet: its checkpoint, the pods' logs and cgroups, and where needed its listing.

use super::actor::LedgerConfig;
use crate::domain::Observation;
use std::collections::BTreeSet;

#[derive(Debug, Clone)]
pub(super) struct Looker {}
#[derive(Debug, Clone)]
pub(super) struct Wants {
    pub(super) pods: BTreeSet<String>,
    pub(super) list: bool,
}
impl Looker {
    pub(super) fn new(_: &LedgerConfig) -> Self {
        Looker {}
    }
    pub(super) async fn look(self, _: Wants) -> Observation {
        Observation::default()
    }
}
