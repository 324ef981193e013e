//! The plan of a scan, with the resources of each node of `/dev`.

use crate::domain::{Plan, ResourceSpec};
use crate::hardware;
use crate::host::{HostRoot, ReadFailure};
use std::sync::Arc;
use tokio::sync::watch;

/// The plan, with a resource for each existing node of the resources with a name for each node.
/// Where `/dev` cannot be read, no resource comes or goes. Also returns warnings, or the read
/// failure.
pub(super) fn planned(
    root: &HostRoot,
    current: &watch::Sender<Arc<Plan>>,
) -> (Arc<Plan>, Result<Vec<String>, ReadFailure>) {
    let plan = current.borrow().clone();
    if plan.patterns.is_empty() {
        return (plan, Ok(Vec::new()));
    }
    let hardware::ExpandedSpecs { specs, warnings } =
        match hardware::expand_patterns(root, &plan.patterns) {
            Ok(each) => each,
            Err(failure) => return (plan, Err(failure)),
        };
    // A resource that only the ledger knows stays until its last id has left the list.
    let orphans = plan
        .specs
        .iter()
        .filter(|spec| spec.is_orphan() && !specs.iter().any(|known| known.name == spec.name));
    let orphans: Vec<_> = orphans.cloned().collect();
    // An equal resource is shared: none is in memory twice.
    let same = |spec: Arc<ResourceSpec>| {
        plan.specs.iter().find(|known| **known == spec).map_or(spec, Arc::clone)
    };
    let specs: Arc<[_]> = specs.into_iter().chain(orphans).map(same).collect();
    if specs != plan.specs {
        current.send_if_modified(|current| {
            // A newer configuration has its own nodes. The next scan, which it requests, sees them.
            let is_current = current.number == plan.number;
            if is_current {
                *current = Arc::new(Plan { number: plan.number + 1, specs, ..Plan::clone(&plan) });
            }
            is_current
        });
    }
    (current.borrow().clone(), Ok(warnings))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{CharPath, DeviceClass, NodePattern, ResourceName};
    use crate::host::faults::with_faults;

    #[test]
    fn a_dev_that_cannot_be_read_leaves_the_resources_of_its_nodes_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().join("dev");
        let host = NodePattern::Regex("^i2c-[0-9]*$".into());
        let pattern = ResourceSpec {
            paths: vec![CharPath { host, container: None, permissions: "rw".into() }],
            ..ResourceSpec::new(
                ResourceName::for_each_node("board/{node}").unwrap(),
                DeviceClass::Char,
            )
        };
        let plan = Plan { number: 1, patterns: Arc::new([Arc::new(pattern)]), ..Plan::default() };
        let (root, plan) = (HostRoot::new(dir.path()), watch::Sender::new(Arc::new(plan)));
        let rescan = || {
            let (planned, warnings) = planned(&root, &plan);
            assert_eq!(planned, *plan.borrow());
            (
                planned.number,
                planned
                    .specs
                    .iter()
                    .map(|spec| spec.name.to_string())
                    .collect::<Vec<_>>()
                    .join(" "),
                warnings.ok(),
            )
        };
        std::fs::create_dir(&dev).unwrap();
        std::fs::write(dev.join("i2c-1"), "").unwrap();
        assert_eq!(rescan(), (2, "board/i2c-1".into(), Some(vec![])));
        std::fs::write(dev.join("i2c-13"), "").unwrap();
        assert_eq!(rescan(), (3, "board/i2c-1 board/i2c-13".into(), Some(vec![])));
        assert_eq!(rescan().0, 3, "nothing has changed");
        let (_, calls) = with_faults(|_| None, rescan);
        assert!(calls >= 3, "the directory and its nodes");
        for failing in 0..calls {
            let seen = with_faults(move |call| (call == failing).then_some(24), rescan).0;
            assert_eq!(seen, (3, "board/i2c-1 board/i2c-13".into(), None));
        }
        std::fs::remove_file(dev.join("i2c-1")).unwrap();
        assert_eq!(rescan(), (4, "board/i2c-13".into(), Some(vec![])));
    }
}
