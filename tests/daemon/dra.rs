//! Claims of Dynamic Resource Allocation: the daemon between a simulated API server and the DRA
//! manager of a simulated kubelet, on real sockets.

use crate::common::{Daemon, HANG, Node, name, offered, resource, run, soon, until};
use holdfast::domain::{ClaimRef, DRA_DRIVER};
use holdfast::lab::sim::api_server::{ApiServer, Kind};
use holdfast::lab::sim::kubelet::claims::{Claim, ClaimManager, ClaimsConfig, Release, Times};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

pub(crate) const NODE: &str = "n1";

/// A node with an API server, whose GPUs are for claims.
pub(crate) struct World {
    pub(crate) node: Node,
    pub(crate) server: ApiServer,
    pub(crate) manager: ClaimManager,
}

impl World {
    pub(crate) async fn new(gpus: usize) -> World {
        World::with_telemetry(gpus, "off").await
    }

    pub(crate) async fn with_telemetry(gpus: usize, listen: &str) -> World {
        World::with(gpus, listen, Times::default()).await
    }

    /// The same, with a kubelet that is as fast as this.
    pub(crate) async fn with(gpus: usize, listen: &str, times: Times) -> World {
        let node = Node::with(&[("gpu", gpus), ("nic", 1)]);
        let server = ApiServer::start(NODE, &[]).await.unwrap();
        let kubeconfig = server.kubeconfig(&node.path("etc"), "token").unwrap();
        node.write_config(&format!(
            "[telemetry]\nlisten = {listen:?}\n[cluster]\ncredentials = {:?}\n[cdi]\ndirectory = {:?}\n\
             [dra]\nenabled = true\n{}api = \"dra\"\n{}",
            kubeconfig.display().to_string(),
            node.path("run/cdi").display().to_string(),
            resource("gpu"),
            resource("nic"),
        ));
        let manager = claim_manager(node.path("kubelet"), times);
        World { node, server, manager }
    }

    pub(crate) fn start(&self) -> Daemon {
        Daemon::spawn(self.node.command(&["run"]).env("NODE_NAME", NODE))
    }

    /// The names of the published devices, by slice and device.
    pub(crate) fn published(&self) -> Vec<String> {
        let devices = |slice: &Value| slice["spec"]["devices"].as_array().cloned();
        let slices = self.server.objects(Kind::ResourceSlice);
        let devices = slices.iter().filter_map(devices).flatten();
        devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    }

    pub(crate) async fn until_published(&self, count: usize) -> Vec<String> {
        until("the slices", || self.published(), |names| names.len() == count).await
    }

    pub(crate) async fn until_registered(&self) {
        let connected = |manager: &ClaimManager| {
            manager.instances(DRA_DRIVER).iter().any(|one| one.is_connected).then_some(())
        };
        self.manager.wait_for(HANG, connected).await.unwrap();
    }

    /// Makes the control plane allocate these devices to a claim, for a pod.
    pub(crate) fn allocate(&self, claim: &str, pod: &str, devices: &[String]) -> Claim {
        self.allocate_in("char", claim, pod, devices)
    }

    /// The same with the devices of this pool.
    pub(crate) fn allocate_in(
        &self,
        pool: &str,
        claim: &str,
        pod: &str,
        devices: &[String],
    ) -> Claim {
        let of = claim_ref(claim);
        let result = |device: &String| {
            json!({ "request": "gpu", "driver": DRA_DRIVER, "pool": format!("{NODE}/{pool}"),
                    "device": device })
        };
        let field = json!({ "key": "metadata.name", "operator": "In", "values": [NODE] });
        self.server.put(
            Kind::ResourceClaim,
            json!({
                "metadata": { "namespace": of.namespace, "name": of.name, "uid": of.uid },
                "status": {
                    "allocation": {
                        "devices": { "results": devices.iter().map(result).collect::<Vec<_>>() },
                        "nodeSelector": { "nodeSelectorTerms": [{ "matchFields": [field] }] },
                    },
                    "reservedFor": [{ "resource": "pods", "name": pod, "uid": pod }],
                },
            }),
        );
        Claim { claim: of, pods: [pod.to_owned()].into(), drivers: [DRA_DRIVER.to_owned()].into() }
    }

    /// The CDI names of a claim, as the kubelet passes them to the runtime.
    pub(crate) fn cdi_names(&self, claim: &Claim) -> Vec<String> {
        let devices = self.manager.devices(&claim.claim, DRA_DRIVER);
        devices.into_iter().flat_map(|device| device.cdi_devices).collect()
    }

    pub(crate) fn cdi_file(&self, claim: &str) -> PathBuf {
        self.node.path("run/cdi").join(format!("holdfast-claim-{}.json", claim_ref(claim).uid))
    }

    pub(crate) fn holders(&self, claim: &str) -> Vec<Value> {
        let mut grants = self.node.json(&["who"])["grants"].as_array().unwrap().clone();
        grants.retain(|grant| grant["claim"]["name"] == claim);
        grants
    }
}

/// The DRA manager of a kubelet with this `--root-dir`.
pub(crate) fn claim_manager(kubelet_dir: PathBuf, times: Times) -> ClaimManager {
    let (release, appends) = (Release::V1_36, Some(true));
    ClaimManager::start(ClaimsConfig { kubelet_dir, release, appends, times }).unwrap()
}

pub(crate) fn claim_ref(name: &str) -> ClaimRef {
    ClaimRef { uid: format!("uid-{name}"), namespace: "ml".into(), name: name.into() }
}

pub(crate) async fn stop(mut daemon: Daemon) {
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.ended().await.success());
}

#[test]
fn a_claim_gets_its_devices_and_keeps_them_over_a_kill_until_it_is_unprepared() {
    run(async {
        let world = World::new(3).await;
        // It has the cgroups of the pods, which show that no process runs.
        let _kubelet = world.node.start_kubelet().await;
        let mut daemon = world.start();
        let names = world.until_published(3).await;
        world.until_registered().await;
        let claim = world.allocate("train", "pod-1", &names[..2]);
        world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
        let cdi = world.cdi_names(&claim);
        assert_eq!(cdi.len(), 2);
        let file = std::fs::read_to_string(world.cdi_file("train")).unwrap();
        for qualified in &cdi {
            let (kind, device) = qualified.split_once('=').unwrap();
            assert!(file.contains(kind) && file.contains(device), "{file}");
        }
        assert!(["/dev/gpu0", "/dev/gpu1"].iter().all(|node| file.contains(node)), "{file}");
        assert_eq!(world.holders("train").len(), 1);

        // The kubelet repeats Prepare after its restart. This one appends: another answer would
        // give the containers each device twice.
        daemon.kill();
        std::fs::remove_dir_all(world.node.path("run/cdi")).unwrap();
        let daemon = world.start();
        let written = || std::fs::read_to_string(world.cdi_file("train")).ok();
        until("the file after a boot", written, |now| now.as_deref() == Some(&file)).await;
        world.manager.restart(Release::V1_36).await.unwrap();
        world.until_registered().await;
        world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
        let again: BTreeSet<String> = world.cdi_names(&claim).into_iter().collect();
        assert_eq!(again, cdi.iter().cloned().collect());

        world.manager.unprepare("pod-1").await.unwrap();
        assert!(!world.cdi_file("train").exists());
        assert!(world.holders("train").is_empty());
        let history = world.node.json(&["history", "--claim", "ml/train"]);
        assert!(history.to_string().contains("unprepared"), "{history}");
        stop(daemon).await;
    });
}

#[test]
fn a_claim_waits_for_the_end_of_another_claim_with_its_device() {
    run(async {
        let world = World::new(1).await;
        let _kubelet = world.node.start_kubelet().await;
        let daemon = world.start();
        let names = world.until_published(1).await;
        world.until_registered().await;
        let first = world.allocate("first", "pod-1", &names);
        world.manager.prepare("pod-1", &[first]).await.unwrap();
        let second = world.allocate("second", "pod-2", &names);
        let claims = [second.clone()];
        let waiting = world.manager.prepare("pod-2", &claims);
        tokio::pin!(waiting);
        let ended = async {
            daemon.logged("claim waits for its devices").await;
            assert!(world.holders("second").is_empty());
            world.manager.unprepare("pod-1").await.unwrap();
        };
        let (prepared, ()) =
            soon("the second claim", async { tokio::join!(&mut waiting, ended) }).await;
        prepared.unwrap();
        assert_eq!(world.cdi_names(&second).len(), 1);
        assert!(world.holders("first").is_empty());
        assert_eq!(world.holders("second").len(), 1);
        stop(daemon).await;
    });
}

#[test]
fn the_slices_return_each_time_that_the_kubelet_deletes_them() {
    run(async {
        let world = World::new(2).await;
        let daemon = world.start();
        let names = world.until_published(2).await;
        world.until_registered().await;
        for _ in 0..5 {
            assert_eq!(world.server.wipe(NODE, None), 1);
            assert_eq!(world.until_published(2).await, names);
        }
        // A new device is added to the slice.
        world.node.create_device("gpu", 2);
        world.until_published(3).await;
        assert_eq!(world.server.objects(Kind::ResourceSlice).len(), 1);
        stop(daemon).await;
    });
}

#[test]
fn without_the_api_server_the_device_plugin_serves_and_status_says_why_claims_wait() {
    run(async {
        let world = World::new(1).await;
        world.server.refuse(Some((503, None)));
        let kubelet = world.node.start_kubelet().await;
        let daemon = world.start();
        offered(&kubelet, &name("example.com/nic"), 1).await;
        let problems = || world.node.json(&["status"])["dra_problems"].to_string();
        until("the problem", problems, |problems| problems.contains("503")).await;
        assert!(world.published().is_empty());
        world.server.refuse(None);
        world.until_published(1).await;
        until("no problem", problems, |problems| problems == "null").await;
        stop(daemon).await;
    });
}
