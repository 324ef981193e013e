//! Claims that the kubelet forgot, or that were deleted while the daemon was away, and claims that
//! the ledger has lost.

use crate::common::{Daemon, run, soon, until};
use crate::dra::{NODE, World, claim_manager, claim_ref, stop};
use holdfast::domain::DRA_DRIVER;
use holdfast::lab::sim::api_server::{Fault, Kind, User};
use holdfast::lab::sim::kubelet::Kubelet;
use holdfast::lab::sim::kubelet::claims::{Claim, Release, Times};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// A claim that is prepared for a pod, and whose pod has ended without the knowledge of the daemon,
/// which is killed.
struct Forgotten {
    world: World,
    /// It has the cgroups of the pods.
    kubelet: Kubelet,
    names: Vec<String>,
}

impl World {
    fn record(&self) -> PathBuf {
        self.node.path("kubelet/dra_manager_state")
    }

    /// The kubelet loses its claims with its file, and makes a new one.
    async fn forget(&self) {
        self.manager.stop().await;
        let data = r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[]}"#;
        let document = json!({ "Data": data, "Checksum": crc32fast::hash(data.as_bytes()) });
        fs::write(self.record(), document.to_string()).unwrap();
        self.manager.start_again().unwrap();
    }

    fn history(&self, claim: &str) -> String {
        self.node.json(&["history", "--claim", &format!("ml/{claim}")]).to_string()
    }

    /// Waits for the log: while a verb runs, the kubelet of this thread answers nothing.
    async fn until_released(&self, daemon: &Daemon, claim: &str, proof: &str) {
        daemon.logged("grant released").await;
        assert!(self.holders(claim).is_empty());
        let history = self.history(claim);
        assert!(history.contains(proof), "{history}");
        let file = self.cdi_file(claim);
        until("the end of the CDI file", || file.exists(), |exists| !exists).await;
    }

    /// The answers to requests for a claim.
    fn asked(&self, claim: &str) -> usize {
        let path = format!("/resourceclaims/{claim}");
        let requests = self.server.requests();
        requests.iter().filter(|it| it.starts_with("GET") && it.ends_with(&path)).count()
    }

    fn problems(&self) -> String {
        let output = self.node.output(&["status", "-o", "json"]);
        let status: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        status.map(|status| status["dra_problems"].to_string()).unwrap_or_default()
    }

    fn release(&self, arguments: &[&str]) -> Result<Value, String> {
        let output = self.node.output(&[&["release", "-o", "json"], arguments].concat());
        if output.status.success() {
            return Ok(serde_json::from_slice(&output.stdout).unwrap());
        }
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn cgroup(&self, pod: &str) -> PathBuf {
        self.node.path(&format!("host/sys/fs/cgroup/kubepods/pod{pod}"))
    }
}

/// Claims `ml/<claim>` of one device each, prepared before the daemon was killed.
async fn forgotten(claims: &[&str], user: Option<User>) -> Forgotten {
    let world = World::new(claims.len() + 1).await;
    if let Some(user) = user {
        world.server.add_user(Some("token"), user);
    }
    let kubelet = world.node.start_kubelet().await;
    let mut daemon = world.start();
    let names = world.until_published(claims.len() + 1).await;
    world.until_registered().await;
    for (claim, device) in claims.iter().zip(&names) {
        world.server.bind_claim(NODE, "ml", claim);
        let pod = format!("pod-{claim}");
        world.server.put(
            Kind::Pod,
            json!({ "metadata": { "namespace": "ml", "name": pod, "uid": pod }, "spec": { "nodeName": NODE } }),
        );
        let claim = world.allocate(claim, &pod, std::slice::from_ref(device));
        world.manager.prepare(&pod, &[claim]).await.unwrap();
    }
    daemon.kill();
    Forgotten { world, kubelet, names }
}

#[test]
fn a_claim_that_was_deleted_while_the_daemon_was_away_is_released() {
    run(async {
        let Forgotten { world, kubelet: _kubelet, names } = forgotten(&["train"], None).await;
        world.forget().await;
        world.server.remove(Kind::ResourceClaim, "ml", "train");
        let daemon = world.start();
        world.until_released(&daemon, "train", "claim_gone").await;
        let next = world.allocate("next", "pod-next", &names[..1]);
        world.until_registered().await;
        world.manager.prepare("pod-next", std::slice::from_ref(&next)).await.unwrap();
        assert_eq!(world.holders("next").len(), 1);
        stop(daemon).await;
    });
}

#[test]
fn a_claim_in_the_kubelets_record_is_kept_and_one_that_it_lacks_is_released() {
    run(async {
        let Forgotten { world, kubelet: _kubelet, .. } = forgotten(&["train"], None).await;
        world.server.remove(Kind::ResourceClaim, "ml", "train");
        let daemon = world.start();
        until("a third question", || world.asked("train"), |asked| *asked >= 4).await;
        assert_eq!(world.holders("train").len(), 1, "the kubelet has it in its record");
        world.forget().await;
        world.until_released(&daemon, "train", "claim_gone").await;
        stop(daemon).await;
    });
}

/// The kubelet does not ask to prepare a claim again for a later pod: it adds the pod to its
/// record. A forced deletion removes the pod from there while its container runs.
#[test]
fn a_later_pod_that_was_deleted_by_force_keeps_the_claim_until_its_last_process_has_ended() {
    run(async {
        let world = World::new(1).await;
        let _kubelet = world.node.start_kubelet().await;
        let daemon = world.start();
        let names = world.until_published(1).await;
        world.until_registered().await;
        let mut claim = world.allocate("train", "pod-first", &names);
        claim.pods.insert("pod-later".to_owned());
        for pod in ["pod-first", "pod-later"] {
            world.manager.prepare(pod, std::slice::from_ref(&claim)).await.unwrap();
        }
        let holders = || serde_json::to_string(&world.holders("train")).unwrap();
        until("the later pod", holders, |holders| holders.contains("pod-later")).await;
        let cgroup = world.cgroup("pod-later");
        fs::create_dir_all(&cgroup).unwrap();
        fs::write(cgroup.join("cgroup.events"), "populated 1\n").unwrap();
        for pod in ["pod-later", "pod-first"] {
            world.manager.unprepare(pod).await.unwrap();
        }
        assert!(fs::read_to_string(world.record()).unwrap().contains(r#"List\":[]"#));
        assert_eq!(world.holders("train").len(), 1, "a process of the later pod runs");
        fs::remove_dir_all(&cgroup).unwrap();
        world.until_released(&daemon, "train", "unprepared").await;
        stop(daemon).await;
    });
}

/// Another claim, which is asked about later, is the clock: when it is released, the first one
/// would have been released too.
async fn kept_while_another_is_released(
    fault: impl Fn() -> Fault + Send + 'static,
) -> (World, Kubelet, Daemon) {
    let Forgotten { world, kubelet, .. } = forgotten(&["a", "b"], None).await;
    world.forget().await;
    for claim in ["a", "b"] {
        world.server.remove(Kind::ResourceClaim, "ml", claim);
    }
    world.server.on_request(move |request| {
        let is_first = request.path.ends_with("/resourceclaims/a");
        (is_first || request.path == "/api/v1/pods").then(&fault)
    });
    let daemon = world.start();
    world.until_released(&daemon, "b", "claim_gone").await;
    assert!(world.asked("a") > 0);
    assert_eq!(world.holders("a").len(), 1);
    (world, kubelet, daemon)
}

#[test]
fn a_refusal_of_the_api_server_releases_nothing() {
    run(async {
        let (world, _kubelet, daemon) =
            kept_while_another_is_released(|| Fault::Refuse(403, None)).await;
        assert!(world.server.requests().iter().any(|it| it == "GET /api/v1/pods"));
        stop(daemon).await;
    });
}

#[test]
fn an_api_server_that_is_away_releases_nothing() {
    run(async {
        let (_world, _kubelet, daemon) =
            kept_while_another_is_released(|| Fault::BreakBefore).await;
        stop(daemon).await;
    });
}

/// To a kubelet's credentials a claim that was deleted is 403. Its pods count instead.
#[test]
fn with_the_kubelets_credentials_a_claim_is_kept_while_one_of_its_pods_exists() {
    run(async {
        let user = User::Kubelet(NODE.into());
        let Forgotten { world, kubelet: _kubelet, .. } = forgotten(&["a", "b"], Some(user)).await;
        world.forget().await;
        for claim in ["a", "b"] {
            world.server.remove(Kind::ResourceClaim, "ml", claim);
        }
        world.server.remove(Kind::Pod, "ml", "pod-b");
        let daemon = world.start();
        world.until_released(&daemon, "b", "claim_gone").await;
        assert!(world.asked("a") > 0);
        assert_eq!(world.holders("a").len(), 1);
        stop(daemon).await;
    });
}

/// The grants of a claim without what each process sets again.
fn devices(holders: &[Value]) -> Vec<Value> {
    let part = |grant: &Value| json!([grant["resource"], grant["devices"], grant["claim"]["uid"]]);
    holders.iter().map(part).collect()
}

#[test]
fn claims_that_the_ledger_lost_come_back_from_the_kubelets_record_with_the_same_answer() {
    run(async {
        let Forgotten { world, kubelet: _kubelet, names } = forgotten(&["train"], None).await;
        let claim = claim_ref("train");
        let train = Claim {
            claim: claim.clone(),
            pods: ["pod-train".to_owned()].into(),
            drivers: [DRA_DRIVER.to_owned()].into(),
        };
        let daemon = world.start();
        daemon.logged("ready").await;
        let held = world.holders("train");
        assert_eq!(held.len(), 1);
        let (answer, file) = (world.cdi_names(&train), fs::read(world.cdi_file("train")).unwrap());
        stop(daemon).await;
        fs::remove_dir_all(world.node.state()).unwrap();
        let daemon = world.start();
        daemon.logged("they are back").await;
        world.until_registered().await;
        assert_eq!(devices(&world.holders("train")), devices(&held));
        assert_eq!(fs::read(world.cdi_file("train")).unwrap(), file);
        // No other claim gets the device.
        let other = world.allocate("other", "pod-other", &names[..1]);
        let others = [other];
        let waiting = world.manager.prepare("pod-other", &others);
        tokio::pin!(waiting);
        let prepared = async {
            until("the refusal", || world.asked("other"), |asked| *asked > 0).await;
            // This kubelet appends: another answer would be seen.
            world.manager.prepare("pod-train", std::slice::from_ref(&train)).await.unwrap();
        };
        tokio::select! {
            result = &mut waiting => panic!("{result:?}"),
            () = soon("Prepare", prepared) => {}
        }
        world.manager.restart(Release::V1_36).await.unwrap();
        world.until_registered().await;
        world.manager.prepare("pod-train", std::slice::from_ref(&train)).await.unwrap();
        let again: BTreeSet<String> = world.cdi_names(&train).into_iter().collect();
        assert_eq!(again, answer.into_iter().collect());
        assert_eq!(fs::read(world.cdi_file("train")).unwrap(), file);
        assert_eq!(devices(&world.holders("train")), devices(&held));
        assert!(world.holders("other").is_empty());
        stop(daemon).await;
    });
}

#[test]
fn without_a_record_the_cdi_files_show_which_devices_are_held_and_status_reports_it() {
    run(async {
        let Forgotten { world, kubelet: _kubelet, names } = forgotten(&["train"], None).await;
        fs::remove_dir_all(world.node.state()).unwrap();
        // The kubelet knows the claim, but its record cannot be read from here.
        fs::remove_file(world.record()).unwrap();
        fs::create_dir(world.record()).unwrap();
        let file = fs::read(world.cdi_file("train")).unwrap();
        let daemon = world.start();
        daemon.logged("the ledger lacked claims; they are back").await;
        world.until_registered().await;
        let problems =
            until("the problem", || world.problems(), |it| it.contains("uid-train")).await;
        assert!(problems.contains("holdfast release --claim UID --force"), "{problems}");
        assert_eq!(fs::read(world.cdi_file("train")).unwrap(), file);
        let refused = world.release(&["--claim", "uid-train"]).unwrap_err();
        assert!(refused.contains("may have more pods of claim uid-train"), "{refused}");
        let next = world.allocate("next", "pod-next", &names[..1]);
        let claims = [next];
        fs::remove_dir(world.record()).unwrap();
        let waiting = world.manager.prepare("pod-next", &claims);
        tokio::pin!(waiting);
        let unprepared = async {
            until("the question", || world.asked("next"), |asked| *asked > 0).await;
            assert!(world.holders("next").is_empty());
            world.manager.unprepare("pod-train").await.unwrap();
        };
        let (prepared, ()) =
            soon("the next claim", async { tokio::join!(&mut waiting, unprepared) }).await;
        prepared.unwrap();
        assert_eq!(world.holders("next").len(), 1);
        until("no problem", || world.problems(), |it| it == "null").await;
        assert!(!world.cdi_file("train").exists());
        stop(daemon).await;
    });
}

#[test]
fn an_operator_releases_a_claim_only_if_no_pod_of_it_is_left() {
    run(async {
        let Forgotten { world, kubelet: _kubelet, .. } = forgotten(&["train"], None).await;
        let absent = world.release(&["--claim", "ml/train"]).unwrap_err();
        assert!(absent.contains("no holdfast daemon answers"), "{absent}");
        let daemon = world.start();
        daemon.logged("ready").await;
        let refused = |expected: &str| {
            let refused = world.release(&["--claim", "ml/train", "--force"]).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
            assert_eq!(world.holders("train").len(), 1);
        };
        refused("dra_manager_state");
        world.forget().await;
        let cgroup = world.cgroup("pod-train");
        fs::create_dir_all(&cgroup).unwrap();
        fs::write(cgroup.join("cgroup.events"), "populated 1\n").unwrap();
        refused("a process of pod ml/pod-train runs");
        fs::write(cgroup.join("cgroup.events"), "populated 0\n").unwrap();
        refused("the cgroup of pod ml/pod-train exists");
        fs::remove_dir_all(&cgroup).unwrap();
        let unknown = world.release(&["--claim", "ml/other"]).unwrap_err();
        assert!(unknown.contains("no device is held by a claim `ml/other`"), "{unknown}");
        let released = world.release(&["--claim", "ml/train"]).unwrap();
        assert_eq!(released["claim"]["uid"], "uid-train");
        world.until_released(&daemon, "train", "operator").await;
        stop(daemon).await;
    });
}

#[test]
fn a_kubelet_with_a_root_dir_has_drivers_and_its_record_of_claims_there() {
    run(async {
        let mut world = World::new(2).await;
        let root = world.node.path("root");
        world.manager.stop().await;
        world.manager = claim_manager(root.clone(), Times::default());
        let text = fs::read_to_string(world.node.config_file()).unwrap();
        let socket = root.join("pod-resources/kubelet.sock").display().to_string();
        world.node.write_config(&format!("{text}[kubelet]\npod_resources_socket = {socket:?}\n"));
        let _kubelet = world.node.start_kubelet().await;
        let mut daemon = world.start();
        let names = world.until_published(2).await;
        world.until_registered().await;
        let claim = world.allocate("train", "pod-train", &names[..1]);
        world.manager.prepare("pod-train", &[claim]).await.unwrap();
        daemon.kill();

        // Only the kubelet's record has the claim.
        fs::remove_dir_all(world.node.state()).unwrap();
        fs::remove_dir_all(world.node.path("run/cdi")).unwrap();
        let daemon = world.start();
        daemon.logged("the kubelet registered the DRA driver").await;
        assert_eq!(world.holders("train").len(), 1);
        stop(daemon).await;
    });
}
