//! One node with a kubelet whose flows can be held, and the common waits and checks.

use crate::common::{HANG, Node, name, run, soon};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use holdfast::app::App;
use holdfast::domain::{AllocId, Grant, ResourceName};
use holdfast::lab::sim::kubelet::{
    EventKind, HookTable, Interleaving, Kubelet, KubeletConfig, Pod, PodPhase, PodSpec, Profile,
    View,
};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// The kubelets that Holdfast runs under.
pub(crate) const PROFILES: [Profile; 3] = [Profile::K125, Profile::K137, Profile::K137Dedupe];

/// The devices of `example.com/gpu`.
pub(crate) const GPUS: usize = 4;

pub(crate) fn gpu() -> ResourceName {
    name("example.com/gpu")
}

/// Runs a test once for each profile, in parallel: most of the time is waiting.
pub(crate) fn on_every_profile<F: Future<Output = ()>>(test: impl Fn(Profile) -> F) {
    let reported = async |profile| {
        let outcome = AssertUnwindSafe(test(profile)).catch_unwind().await;
        outcome.inspect_err(|_panic| println!("this was {profile:?}"))
    };
    for outcome in run(join_all(PROFILES.map(reported))) {
        outcome.unwrap_or_else(|panic| resume_unwind(panic));
    }
}

/// A node and its kubelet.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) node: Node,
    pub(crate) kubelet: Kubelet,
    pub(crate) hooks: HookTable,
}

impl Stage {
    /// A node with [`GPUS`] devices and a kubelet that has settled.
    pub(crate) async fn new(profile: Profile) -> Stage {
        Stage::on(Node::with(&[("gpu", GPUS)]), profile, |_| {}).await
    }

    pub(crate) async fn on(
        node: Node,
        profile: Profile,
        adapt: impl FnOnce(&mut KubeletConfig),
    ) -> Stage {
        let hooks = HookTable::default();
        let first_batch_after = Duration::from_millis(1);
        let mut config = KubeletConfig {
            profile,
            hooks: hooks.clone(),
            first_batch_after,
            ..node.kubelet_config()
        };
        adapt(&mut config);
        let kubelet = Kubelet::start(config).await.unwrap();
        let stage = Stage { node, kubelet, hooks };
        stage.wait(|view| view.is_settled()).await;
        stage
    }

    pub(crate) async fn wait(&self, seen: impl Fn(&View<'_>) -> bool) {
        self.kubelet.wait_for(seen, HANG).await.unwrap();
    }

    /// Starts the daemon and waits until it has settled: later events are reactions to the test.
    pub(crate) async fn start_app(&self) -> App {
        let before = self.kubelet.view(|view| registrations(view).len());
        let app = self.node.start_app().await;
        self.settled_after(before).await;
        app
    }

    /// Waits until the daemon has registered after the given number of registrations, and has
    /// settled.
    pub(crate) async fn settled_after(&self, before: usize) {
        let settled = |view: &View<'_>| {
            let clients = registrations(view);
            clients.len() >= before + 2
                && clients.last().is_some_and(|(client, _)| has_listed(view, *client))
        };
        self.wait(settled).await;
        self.wait_until_recovered(GPUS).await;
    }

    /// Waits until the kubelet's state of `example.com/gpu` is sound, and all cut clients have
    /// ended.
    pub(crate) async fn wait_until_recovered(&self, healthy: usize) {
        self.wait(|view| is_recovered(view, healthy)).await;
    }

    pub(crate) async fn saw(&self, which: Interleaving) {
        self.wait(|view| view.interleavings().contains_key(&which)).await;
    }

    pub(crate) async fn saw_event(&self, fits: impl Fn(&EventKind) -> bool) {
        self.wait(|view| view.last(&fits).is_some()).await;
    }

    /// Has a pod admitted, which must run.
    pub(crate) async fn admit(&self, pod: PodSpec) -> Pod {
        let outcome = soon("an admission", self.kubelet.add_pod(pod)).await;
        assert_eq!(outcome.phase, PodPhase::Running);
        self.pod(&outcome.uid)
    }

    /// Has a pod admitted with `devices` devices in one container.
    pub(crate) async fn admit_one(&self, pod: &str, devices: u32) -> Pod {
        self.admit(PodSpec::new("default", pod).app("main", &gpu(), devices)).await
    }

    pub(crate) fn pod(&self, uid: &str) -> Pod {
        self.kubelet.view(|view| view.pod(uid).cloned()).unwrap()
    }
}

/// The clients of Holdfast's registrations of `example.com/gpu` since the kubelet's start, and
/// their endpoints, in order.
pub(crate) fn registrations(view: &View<'_>) -> Vec<(u64, String)> {
    let mut found = Vec::new();
    for event in view.events().iter() {
        match &event.kind {
            EventKind::Started { .. } => found.clear(),
            EventKind::Registered { client, endpoint, resource }
                if *resource == gpu() && endpoint.starts_with(".holdfast/") =>
            {
                found.push((*client, endpoint.clone()));
            }
            _ => {}
        }
    }
    found
}

/// Whether this client has sent a list since the kubelet's start.
pub(crate) fn has_listed(view: &View<'_>, number: u64) -> bool {
    let events = view
        .events()
        .iter()
        .rev()
        .take_while(|event| !matches!(event.kind, EventKind::Started { .. }));
    events
        .into_iter()
        .any(|event| matches!(event.kind, EventKind::Listed { client, .. } if client == number))
}

/// The condition of every recovery: the serving client is known and its stream open, nothing is
/// stopped, every device is healthy, and every client that was cut has ended.
fn is_recovered(view: &View<'_>, healthy: usize) -> bool {
    let endpoint = view.endpoint_state(&gpu());
    let (mut cut, mut ended) = (BTreeSet::new(), BTreeSet::new());
    for event in view.events().iter() {
        match event.kind {
            EventKind::Started { .. } => (cut, ended) = (BTreeSet::new(), BTreeSet::new()),
            EventKind::Disconnected { client, .. } => drop(cut.insert(client)),
            EventKind::StreamEnded { client, .. } => drop(ended.insert(client)),
            _ => {}
        }
    }
    let serves = endpoint.is_tracked && endpoint.is_streaming && !endpoint.is_stopped;
    serves && endpoint.healthy.len() == healthy && cut.is_subset(&ended)
}

/// Matches the end of one client's stream.
pub(crate) fn ended(number: u64) -> impl Fn(&EventKind) -> bool {
    move |kind| matches!(kind, EventKind::StreamEnded { client, .. } if *client == number)
}

/// The alloc-id that a container was started with.
pub(crate) fn alloc_id(pod: &Pod, container: &str) -> AllocId {
    pod.containers[container].alloc_ids[&gpu()].clone()
}

/// Waits until the published grants satisfy `seen`.
pub(crate) async fn granted(
    app: &App,
    what: &str,
    seen: impl Fn(&[Arc<Grant>]) -> bool,
) -> Vec<Arc<Grant>> {
    let mut grants = app.views.grants.clone();
    let grants = soon(what, grants.wait_for(|grants| seen(grants))).await.unwrap();
    grants.to_vec()
}

/// Whether a grant is bound to a container of this pod.
pub(crate) fn is_bound_to(grant: &Grant, uid: &str) -> bool {
    matches!(&grant.state, holdfast::domain::GrantState::Bound { pod, .. } if pod.uid == uid)
}
