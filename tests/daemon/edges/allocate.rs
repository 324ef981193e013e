//! Allocate calls that are repeated, parallel, abandoned by the kubelet, or for a device that is
//! not free.

use crate::common::{Node, allocate, dial, ids, offered, run, soon};
use crate::edges::alone::Alone;
use crate::edges::lister::{Answer, Lister};
use crate::edges::stage::{GPUS, Stage, alloc_id, gpu, granted, is_bound_to, on_every_profile};
use actix::{Actor, Arbiter, Context, Handler};
use futures_util::future::{join, join_all};
use holdfast::domain::{DeviceId, Durability, Grant, KubeletGeneration};
use holdfast::kubelet::checkpoint::CheckpointReader;
use holdfast::kubelet::pod_resources::PodResources;
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::lab::sim::kubelet::{
    Hook, HookTable, KubeletConfig, PodPhase, PodSpec, Profile, Verdict,
};
use holdfast::ledger::{LedgerActor, LedgerConfig};
use holdfast::messages::{Reconcile, Record, WithReply};
use holdfast::store::Store;
use holdfast::supervisor::Slot;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use tokio::sync::{RwLock, watch};

/// A client that lists the pods during an Allocate makes the kubelet forget its reservation, and
/// the next pod gets the same id. The daemon cannot prevent that; the ledger has both holders.
#[test]
fn edge_13_both_holders_of_a_device_that_is_granted_twice_are_known() {
    on_every_profile(async |profile| {
        let stage = Stage::on(Node::with(&[("gpu", 2)]), profile, |_| {}).await;
        let app = stage.node.start_app().await;
        stage.wait_until_recovered(2).await;
        let dead = stage.admit_one("dead", 1).await;
        let mut gate = stage.hooks.gate(Hook::DuringAllocate);
        let list = async {
            gate.reached().await;
            assert!(stage.kubelet.delete_pod(&dead.spec.uid).unwrap());
            PodResources::new(stage.node.path("kubelet/pod-resources/kubelet.sock"))
                .list()
                .await
                .unwrap();
            gate.open(Verdict::Pass);
        };
        let (first, ()) = join(stage.admit_one("first", 1), list).await;
        let second = stage.admit_one("second", 2).await;
        let shared: BTreeSet<DeviceId> = first.containers["main"].devices[&gpu()].clone();
        assert!(
            shared.is_subset(&second.containers["main"].devices[&gpu()]),
            "the kubelet was to give it twice"
        );

        let holds = |grants: &[Arc<Grant>], uid: &str| {
            grants.iter().any(|grant| is_bound_to(grant, uid) && shared.is_subset(&ids(grant)))
        };
        granted(&app, "both hold it", |grants| {
            holds(grants, &first.spec.uid) && holds(grants, &second.spec.uid)
        })
        .await;
        app.shut_down().await;
    });
}

/// A listing for a pod that has ended would make the kubelet forget an Allocate of another plugin.
/// Kubelets that do not know single pods get listings.
#[test]
fn edge_13_a_removed_pod_is_released_without_a_listing() {
    let release = async |profile| {
        let node = Node::with(&[("gpu", 1)]);
        let config = KubeletConfig { profile, ..node.kubelet_config() };
        let kubelet = node.start_old_kubelet(config).await;
        let app = node.start_app().await;
        offered(&kubelet, &gpu(), 1).await;
        let pod = kubelet.add_pod(PodSpec::new("default", "web").app("main", &gpu(), 1)).await;
        granted(&app, "the pod has the device", |grants| {
            grants.iter().any(|grant| is_bound_to(grant, &pod.uid))
        })
        .await;
        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        granted(&app, "the device is free", |grants| grants.is_empty()).await;
        let listings = kubelet.view(|view| view.listings());
        assert_eq!(listings > 0, profile == Profile::K110, "{listings} with {profile:?}");
        app.shut_down().await;
    };
    run(async {
        tokio::join!(release(Profile::K110), release(Profile::K125), release(Profile::K137));
    });
}

/// While the daemon answers an Allocate it does not start a listing, even if the ledger needs one;
/// afterwards it does.
#[test]
fn edge_13_no_listing_begins_while_an_allocate_is_under_way() {
    run(async {
        let stage = Stage::new(Profile::K125).await;
        let (lister, logs) =
            (Lister::start(&stage.node, Answer::Never), stage.node.path("host/var/log/pods"));
        std::fs::remove_dir(&logs).unwrap();
        std::fs::write(&logs, "").unwrap();
        let app = stage.start_app().await;
        let pod = stage.admit_one("unnamed", 1).await;
        granted(&app, "the grant is bound", |grants| {
            grants.iter().any(|grant| is_bound_to(grant, &pod.spec.uid))
        })
        .await;
        app.shut_down().await;

        // The ledger alone, with an Allocate that the test holds. Only a listing could prove that
        // the pod has ended. Its log folder has its name: once the ledger knows the name, it has
        // made its pass.
        std::fs::remove_dir_all(
            stage.node.path(&format!("host/sys/fs/cgroup/kubepods/pod{}", pod.spec.uid)),
        )
        .unwrap();
        std::fs::remove_file(&logs).unwrap();
        std::fs::create_dir_all(logs.join(format!("default_unnamed_{}", pod.spec.uid))).unwrap();
        let (gate, before_allocate) = (Arc::new(RwLock::new(())), lister.requests());
        let under_way = gate.read().await;
        let (grants, mut looked) = watch::channel(Arc::default());
        stage.node.unlocked().await;
        let (store, _) = Store::open(&stage.node.state(), Durability::PowerLoss, None).unwrap();
        let config = LedgerConfig {
            kept: Arc::new(watch::Sender::new(store.kept())),
            store: Arc::new(Mutex::new(store)),
            recovered: Arc::default(),
            process_crash: false,
            plan: watch::channel(Arc::default()).1,
            grants: Arc::new(grants),
            due: Arc::new(watch::Sender::default()),
            forget: None,
            names: Arc::new(watch::Sender::default()),
            inventory: watch::channel(Arc::default()).1,
            checkpoint: CheckpointReader::new(stage.node.path("kubelet/device-plugins")),
            pod_resources: PodResources::new(stage.node.path("lister.sock")),
            host_root: stage.node.path("host"),
            boot_id: "boot".to_owned(),
            // Old enough for its listings to count.
            kubelet: watch::channel(Some(KubeletGeneration { inode: 1, made_ns: 1 })).1,
            claims: watch::channel(Arc::default()).1,
            gate: Arc::clone(&gate),
            resend: Arc::default(),
        };
        let arbiter = Arbiter::new();
        let ledger =
            LedgerActor::start_in_arbiter(&arbiter.handle(), move |_| LedgerActor::new(config, ()));
        let is_named = |grants: &Arc<Vec<Arc<Grant>>>| {
            grants.iter().any(|grant| grant.pod().is_some_and(|pod| pod.name.is_some()))
        };
        drop(soon("the pass", looked.wait_for(is_named)).await.unwrap());
        assert_eq!(lister.requests(), before_allocate, "pods were listed during the Allocate");
        drop(under_way);
        ledger.send(Reconcile).await.unwrap();
        lister.was_requested(before_allocate + 1).await;
        arbiter.stop();
    });
}

/// Until the kubelet has recorded an answer, a listing would make it forget the device. It would
/// give the device to the next pod too.
#[test]
fn edge_13_no_listing_begins_before_the_kubelet_has_recorded_an_answer() {
    run(async {
        let (node, hooks) = (Node::with(&[("gpu", 3)]), HookTable::default());
        let lister = Lister::start(&node, Answer::Busy);
        let config = KubeletConfig { hooks: hooks.clone(), ..node.kubelet_config() };
        let kubelet = node.start_old_kubelet(config).await;
        let app = node.start_app().await;
        offered(&kubelet, &gpu(), 3).await;
        let pod =
            |name: &str| kubelet.add_pod(PodSpec::new("default", name).app("main", &gpu(), 1));
        let is_named = |grant: &Arc<Grant>| grant.pod().is_some_and(|pod| pod.name.is_some());
        let ended = soon("an admission", pod("ended")).await;
        granted(&app, "its name", |grants| grants.iter().any(is_named)).await;
        // Until its log folder is there, this pod has no name.
        let logs = node.path("host/var/log/pods");
        std::fs::remove_dir_all(&logs).unwrap();
        std::fs::write(&logs, "").unwrap();
        let unnamed = soon("an admission", pod("unnamed")).await;
        granted(&app, "the grant is bound", |grants| {
            grants.iter().any(|grant| is_bound_to(grant, &unnamed.uid))
        })
        .await;
        let cgroup = format!("host/sys/fs/cgroup/kubepods/pod{}", ended.uid);
        std::fs::remove_dir_all(node.path(&cgroup)).unwrap();
        let look = app.actors.ledger.mailbox::<Reconcile>();
        look.send(Reconcile);
        lister.was_requested(1).await;

        let mut answered = hooks.gate(Hook::AfterAllocate);
        let held = async {
            soon("an answer", answered.reached()).await;
            let before = lister.requests();
            // A pass that needs a listing learns the name.
            std::fs::remove_file(&logs).unwrap();
            std::fs::create_dir_all(logs.join(format!("default_unnamed_{}", unnamed.uid))).unwrap();
            look.send(Reconcile);
            granted(&app, "both names", |grants| {
                grants.iter().filter(|it| is_named(it)).count() == 2
            })
            .await;
            assert_eq!(lister.requests(), before, "pods were listed before the record");
            answered.open(Verdict::Pass);
            before
        };
        let (_, before) = join(soon("an admission", pod("next")), held).await;
        lister.was_requested(before + 1).await;
        app.shut_down().await;
    });
}

/// An init container leaves its devices to the next one: the kubelet allocates the same ids again
/// within milliseconds, without a pod name. Every answer is the same except for its alloc-id, and
/// each container has its own grant.
async fn pass_devices_on(profile: Profile, inits: &[&str]) {
    let stage = Stage::new(profile).await;
    let app = stage.start_app().await;
    let spec = inits
        .iter()
        .fold(PodSpec::new("default", "train"), |spec, init| spec.init(init, &gpu(), 2))
        .app("main", &gpu(), 2);
    let pod = stage.admit(spec).await;
    let main = &pod.containers["main"];
    let grants = granted(&app, "every container is bound", |grants| {
        grants.iter().filter(|grant| is_bound_to(grant, &pod.spec.uid)).count() == inits.len() + 1
    });
    let grants = grants.await;
    for (name, container) in &pod.containers {
        assert_eq!(container.devices, main.devices, "{name}");
        assert_eq!(
            (&container.edits.devices, &container.edits.envs),
            (&main.edits.devices, &main.edits.envs),
            "{name}"
        );
        let grant = grants.iter().find(|grant| grant.alloc_id == alloc_id(&pod, name)).unwrap();
        assert_eq!(ids(grant), main.devices[&gpu()], "{name}");
    }
    assert_eq!(stage.kubelet.panicked(), None);
    app.shut_down().await;
}

/// A held id is allocated again, correctly.
#[test]
fn edge_14_an_init_container_passes_its_devices_to_the_next_container() {
    on_every_profile(async |profile| pass_devices_on(profile, &["prepare"]).await);
}

/// The same with several init containers: each gets the devices of the one before.
#[test]
fn edge_15_several_init_containers_pass_the_same_devices_to_the_next() {
    on_every_profile(async |profile| {
        pass_devices_on(profile, &["fetch", "prepare", "warm-up"]).await;
    });
}

/// The kubelet dies with the answer on its way: the grant is durable but has no holder. It blocks
/// nothing: the next kubelet allocates again, and every device can be given.
#[test]
fn edge_17_a_kubelet_that_dies_during_an_allocate_leaves_no_device_blocked() {
    const HOOKS: [Hook; 5] = [
        Hook::BeforeAllocate,
        Hook::DuringAllocate,
        Hook::AfterAllocate,
        Hook::BeforeCheckpoint,
        Hook::DuringCheckpoint,
    ];
    on_every_profile(async |profile| {
        let devices = 2 * HOOKS.len();
        let stage = Stage::on(Node::with(&[("gpu", devices)]), profile, |_| {}).await;
        let app = stage.node.start_app().await;
        stage.wait_until_recovered(devices).await;
        for hook in HOOKS {
            let before = stage.node.grants().len();
            stage.hooks.gate(hook).open(Verdict::Crash);
            let outcome = stage
                .kubelet
                .add_pod(PodSpec::new("default", "train").app("main", &gpu(), 2))
                .await;
            assert_eq!(outcome.phase, PodPhase::Pending, "{hook:?}");
            let mut gate = stage.hooks.gate(Hook::BeforeFirstBatch);
            stage.kubelet.start_again().await.unwrap();
            gate.reached().await;
            stage.wait_until_recovered(devices).await;
            gate.open(Verdict::Pass);
            // At the end the pods hold every device: a device whose grant reached no container was
            // free each time.
            stage
                .wait(|view| {
                    view.pod(&outcome.uid).is_some_and(|pod| pod.phase == PodPhase::Running)
                })
                .await;
            let grants = stage.node.grants();
            assert!(
                grants
                    .iter()
                    .any(|grant| grant.alloc_id == alloc_id(&stage.pod(&outcome.uid), "main")),
                "{hook:?}: {grants:#?}"
            );
            if hook == Hook::AfterAllocate {
                assert_eq!(
                    grants.len(),
                    before + 2,
                    "each answer is recorded, no matter which container got it"
                );
            }
        }
        app.shut_down().await;
    });
}

/// A ledger that accepts a grant and never answers: its disk hangs.
#[derive(Debug, Default)]
struct Stuck(Vec<WithReply<Record>>);

impl Actor for Stuck {
    type Context = Context<Self>;
}

impl Handler<WithReply<Record>> for Stuck {
    type Result = ();

    fn handle(&mut self, request: WithReply<Record>, _: &mut Self::Context) {
        self.0.push(request);
    }
}

/// The kubelet sets no deadline, and its whole sync loop waits. The daemon ends such an Allocate on
/// its own.
#[test]
fn edge_18_an_allocate_on_a_hanging_disk_ends_with_an_error() {
    run(async {
        let node = Node::with(&[("gpu", GPUS)]);
        let app = node.start_app().await;
        let ledger = Slot::<Stuck>::new("ledger");
        let alone =
            Alone::serve(&node, &app, |shared| shared.record = ledger.handle().replying_mailbox());
        ledger.start(Arbiter::current(), alone.supervision.clone(), |_| Stuck::default());
        let channel = alone.connect(&node, 1).await;
        let answer =
            soon("an Allocate", allocate(&mut DevicePluginClient::new(channel), &["dev:gpu0"]))
                .await;
        let error = answer.unwrap_err();
        assert!(
            error.code() == tonic::Code::Unavailable && error.message().contains("ledger"),
            "{error}"
        );
        app.shut_down().await;
    });
}

/// An Allocate waits for a listing that is under way. A listing that the kubelet never answers is
/// given up soon.
#[test]
fn edge_18_an_allocate_succeeds_in_spite_of_a_listing_that_hangs() {
    on_every_profile(async |profile| {
        let node = Node::with(&[("gpu", GPUS)]);
        let lister = Lister::start(&node, Answer::Never);
        let stage = Stage::on(node, profile, |_| {}).await;
        let app = stage.start_app().await;
        let pod = stage.admit_one("gone", 1).await;
        // Its cgroup is absent, so the next pass requests a listing; the checkpoint of the next pod
        // triggers that pass.
        std::fs::remove_dir_all(
            stage.node.path(&format!("host/sys/fs/cgroup/kubepods/pod{}", pod.spec.uid)),
        )
        .unwrap();
        stage.admit_one("next", 1).await;
        lister.was_requested(1).await;
        stage.admit_one("waiting", 1).await;
        app.shut_down().await;
    });
}

/// After a restart the kubelet starts containers without PreStartContainer until the plugin is
/// back. Nothing depends on the call: the options do not request it, and it does nothing.
#[test]
fn edge_31_nothing_depends_on_pre_start_container() {
    run(async {
        let stage = Stage::new(Profile::K125).await;
        let app = stage.start_app().await;
        let mut plugin = dial(&stage.kubelet, &stage.node, &gpu()).await;
        let options = plugin.get_device_plugin_options(api::Empty {}).await.unwrap().into_inner();
        assert!(!options.pre_start_required && options.get_preferred_allocation_available);
        plugin
            .pre_start_container(api::PreStartContainerRequest {
                devices_ids: vec!["dev:gpu0".to_owned()],
            })
            .await
            .unwrap();
        assert!(stage.node.grants().is_empty());
        app.shut_down().await;
    });
}

/// The kubelet uses the usable part of a preference: of too many ids a random part, and it
/// completes too few at random. The answer has the requested size, and includes the required ids.
#[test]
fn edge_41_the_preferred_allocation_has_the_requested_size_and_the_required_devices() {
    run(async {
        let stage = Stage::new(Profile::K125).await;
        let app = stage.start_app().await;
        let mut plugin = dial(&stage.kubelet, &stage.node, &gpu()).await;
        let all: Vec<String> = (0..GPUS).map(|index| format!("dev:gpu{index}")).collect();
        for size in 1..=GPUS {
            for must in 0..=size {
                let must: Vec<String> = all.iter().rev().take(must).cloned().collect();
                let request = api::ContainerPreferredAllocationRequest {
                    available_device_i_ds: all.clone(),
                    must_include_device_i_ds: must.clone(),
                    allocation_size: i32::try_from(size).unwrap(),
                };
                let request = api::PreferredAllocationRequest { container_requests: vec![request] };
                let mut answer = plugin
                    .get_preferred_allocation(request)
                    .await
                    .unwrap()
                    .into_inner()
                    .container_responses;
                let chosen: BTreeSet<String> = answer.remove(0).device_i_ds.into_iter().collect();
                assert!(
                    chosen.len() == size && must.iter().all(|id| chosen.contains(id)),
                    "{size} with {must:?}: {chosen:?}"
                );
            }
        }
        app.shut_down().await;
    });
}

/// Containers start in parallel, so calls for one resource overlap. Each call is answered and
/// recorded.
#[test]
fn edge_42_many_calls_at_once_are_all_answered_and_recorded() {
    run(async {
        const CALLS: usize = 64;
        let node = Node::with(&[("gpu", CALLS)]);
        let kubelet = node.start_kubelet().await;
        let app = node.start_app().await;
        offered(&kubelet, &gpu(), CALLS).await;
        let plugin = dial(&kubelet, &node, &gpu()).await;
        let call = async |index: usize| {
            let (mut one, mut other) = (plugin.clone(), plugin.clone());
            let id = format!("dev:gpu{index}");
            let (request, ids) =
                (api::PreStartContainerRequest { devices_ids: vec![id.clone()] }, [id.as_str()]);
            let (started, allocated) =
                join(one.pre_start_container(request), allocate(&mut other, &ids)).await;
            started.unwrap();
            allocated.unwrap()
        };
        let answered: BTreeSet<_> =
            soon("the answers", join_all((0..CALLS).map(call))).await.into_iter().collect();
        assert_eq!(answered, node.grants().into_iter().map(|grant| grant.alloc_id).collect());
        assert_eq!(answered.len(), CALLS);
        app.shut_down().await;
    });
}
