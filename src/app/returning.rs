//! The way of a resource from claims back to the device plugin ([`Api::Returning`]).
//!
//! The schedulers learn from the slices that no new claim gets a device. Until then one may
//! allocate a device to a claim, and such a claim is prepared. So the free devices are given by
//! number a little later. The ledger gives no device twice in any case.

use crate::domain::{Api, Plan, ResourceSpec};
use crate::host;
use crate::messages::{Mailbox, Rescan};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long the scan for the new plan may take.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// The resources after a reload: those that return from claims are on the way for a while.
pub(super) fn after(before: &[Arc<ResourceSpec>], specs: &[Arc<ResourceSpec>]) -> Specs {
    let now = |spec: &Arc<ResourceSpec>| {
        let known = before.iter().find(|known| known.name == spec.name);
        with_api(spec, known.map_or(spec.api, |known| spec.api.after(known.api)))
    };
    specs.iter().map(now).collect()
}

/// The plan in which they have returned; `None` if none is on the way.
fn returned(plan: &Plan) -> Option<Plan> {
    let is_on_the_way = |spec: &Arc<ResourceSpec>| matches!(spec.api, Api::Returning { .. });
    if !plan.specs.iter().chain(plan.patterns.iter()).any(is_on_the_way) {
        return None;
    }
    let of = |specs: &Specs| {
        let now = |spec: &Arc<ResourceSpec>| {
            with_api(spec, if is_on_the_way(spec) { Api::Plugin } else { spec.api })
        };
        specs.iter().map(now).collect()
    };
    let (specs, patterns) = (of(&plan.specs), of(&plan.patterns));
    Some(Plan { number: plan.number + 1, specs, patterns, ..plan.clone() })
}

type Specs = Arc<[Arc<ResourceSpec>]>;

fn with_api(spec: &Arc<ResourceSpec>, api: Api) -> Arc<ResourceSpec> {
    if spec.api == api {
        return Arc::clone(spec);
    }
    Arc::new(ResourceSpec { api, ..ResourceSpec::clone(spec) })
}

/// Ends the way, when it is time.
#[derive(Debug, Default)]
pub(super) struct Returning(Option<JoinHandle<()>>);

impl Returning {
    /// Begins the time again if a resource of the plan is on the way since this reload.
    pub(super) fn follow(
        &mut self,
        before: &Plan,
        plan: &watch::Sender<Arc<Plan>>,
        rescan: &Mailbox<Rescan>,
    ) {
        let is_new = plan.borrow().specs.iter().any(|spec| {
            let is_it =
                |known: &Arc<ResourceSpec>| known.name == spec.name && known.api == spec.api;
            matches!(spec.api, Api::Returning { .. }) && !before.specs.iter().any(is_it)
        });
        if !is_new {
            return;
        }
        self.end();
        let (plan, rescan) = (plan.clone(), rescan.clone());
        self.0 = Some(tokio::spawn(async move {
            tokio::time::sleep(Api::KNOWN_WITHIN).await;
            let is_changed = plan.send_if_modified(|plan| {
                let next = returned(plan).map(Arc::new);
                next.is_some_and(|next| {
                    *plan = next;
                    true
                })
            });
            if !is_changed {
                return;
            }
            tracing::info!("free devices of resources that claims had are given by number again");
            let scan = Rescan { asked_at: host::now().boot };
            if let Err(error) = rescan.call(scan, SETTLED_WITHIN).await {
                tracing::warn!(%error, "the device plugin gets them with the next scan");
            }
        }));
    }

    fn end(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DeviceClass;

    fn specs(apis: &[(&str, Api)]) -> Specs {
        let spec = |(name, api): &(&str, Api)| {
            let name = format!("x.y/{name}").parse().unwrap();
            Arc::new(ResourceSpec { api: *api, ..ResourceSpec::new(name, DeviceClass::Gpu) })
        };
        apis.iter().map(spec).collect()
    }

    #[test]
    fn a_resource_returns_from_claims_in_two_steps_and_others_change_at_once() {
        let all = ["a", "b", "c", "d"];
        let before =
            specs(&[("a", Api::Dra), ("b", Api::Both), ("c", Api::Plugin), ("d", Api::Dra)]);
        let now = specs(&all.map(|name| (name, Api::Plugin)));
        let first = after(&before, &now);
        let of = |by_number| Api::Returning { by_number };
        let apis = |specs: &Specs| specs.iter().map(|spec| spec.api).collect::<Vec<_>>();
        assert_eq!(apis(&first), [of(false), of(true), Api::Plugin, of(false)]);
        assert_eq!(after(&first, &now), first, "an equal configuration changes nothing");
        let back = specs(&[("a", Api::Dra), ("b", Api::Both), ("e", Api::Plugin)]);
        assert_eq!(apis(&after(&first, &back)), [Api::Dra, Api::Both, Api::Plugin]);

        let plan = Plan { number: 4, specs: first.clone(), patterns: first, ..Plan::default() };
        let plan = returned(&plan).unwrap();
        assert_eq!((plan.number, &plan.specs, &plan.patterns), (5, &now, &now));
        assert_eq!(returned(&plan), None);
    }
}
