//! Another configuration for a running daemon: changed settings apply, everything else is
//! unaffected, and an invalid file changes nothing.

use crate::common::{
    Daemon, HANG, Node, Random, Unpolled, allocate, count, dial, hide_expected_panics, http_get,
    name, notified, offered, pause, resource, run, soon, telemetry,
};
use holdfast::admin::ConfigReport;
use holdfast::app::App;
use holdfast::config::ResourceChange;
use holdfast::domain::{Health, Reason, ResourceName};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, PodPhase, PodSpec, View};
use nix::sys::signal::Signal;
use std::cell::Cell;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixDatagram;

/// In operation a removed resource keeps its devices for a minute and ends some seconds later; the
/// tests use this time.
const LEAVE_AFTER: Duration = Duration::from_secs(12);

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

fn nic() -> ResourceName {
    name("example.com/nic")
}

/// A configuration of these resources, without telemetry.
fn config(resources: &[String]) -> String {
    format!("[telemetry]\nlisten = \"off\"\n{}", resources.concat())
}

async fn reload(app: &mut App) -> holdfast::config::Change {
    soon("a reload", app.reload()).await.unwrap()
}

fn report(app: &App) -> ConfigReport {
    app.views.config.borrow().clone()
}

/// The health of an id in the list; `None` if it is absent.
fn health(app: &App, resource: &ResourceName, id: &str) -> Option<Health> {
    let inventory = app.views.inventory.borrow();
    inventory
        .resources
        .get(resource)?
        .devices
        .iter()
        .find(|(listed, _)| listed.as_str() == id)
        .map(|(_, offered)| offered.health)
}

/// The kubelet's counts for a resource: Registers, lists, ends of streams.
fn seen(kubelet: &Kubelet, resource: &ResourceName) -> (usize, usize, usize) {
    let of = |fits: fn(&EventKind) -> bool| {
        count(kubelet, |kind| fits(kind) && kind.resource() == Some(resource))
    };
    let registers = of(|kind| matches!(kind, EventKind::Options { .. }));
    let lists = of(|kind| matches!(kind, EventKind::Listed { .. }));
    (registers, lists, of(|kind| matches!(kind, EventKind::StreamEnded { .. })))
}

/// Waits until the Registers that settle a new registration are complete: one is 12 s after it.
async fn settled(kubelet: &Kubelet, resource: &ResourceName) {
    let is_over = |view: &View<'_>| {
        view.lists(resource) >= 3 && view.lists(resource) == view.registers(resource)
    };
    kubelet.wait_for(is_over, HANG).await.unwrap();
}

async fn standing(
    kubelet: &Kubelet,
    what: &str,
    fits: impl Fn(&View<'_>) -> bool,
    within: Duration,
) {
    kubelet.wait_for(fits, within).await.unwrap_or_else(|error| panic!("{what}: {error}"));
}

async fn answer_has_the_new_environment(kubelet: &Kubelet, node: &Node) {
    let request = api::ContainerAllocateRequest { devices_ids: vec!["dev:nic0".into()] };
    let mut plugin = dial(kubelet, node, &nic()).await;
    let answer = plugin
        .allocate(api::AllocateRequest { container_requests: vec![request] })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.container_responses[0].envs.get("SPEED").map(String::as_str), Some("fast"));
}

#[test]
fn unchanged_resources_are_not_touched_while_others_change_under_load() {
    run(async {
        let node = Node::with(&[("gpu", 8)]);
        (0..4).for_each(|index| node.create_device("nic", index));
        let kubelet = node.start_kubelet().await;
        let mut app = node.start_app().await;
        offered(&kubelet, &gpu(), 8).await;
        settled(&kubelet, &gpu()).await;
        let before = seen(&kubelet, &gpu());

        let (done, calls) = (Cell::new(false), Cell::new(0));
        let load = async {
            let mut plugin = dial(&kubelet, &node, &gpu()).await;
            while !done.get() {
                allocate(&mut plugin, &["dev:gpu0"]).await.unwrap();
                calls.set(calls.get() + 1);
            }
        };
        let reloads = async {
            let enough = async |more: u32| {
                let wanted = calls.get() + more;
                while calls.get() < wanted {
                    pause().await;
                }
            };
            enough(20).await;
            node.write_config(&config(&[resource("gpu"), resource("nic")]));
            let change = reload(&mut app).await;
            assert_eq!(change.resources.get(&nic()), Some(&ResourceChange::Added));
            offered(&kubelet, &nic(), 4).await;
            enough(20).await;
            // Its environment applies to the next Allocate, and the kubelet gets no message.
            settled(&kubelet, &nic()).await;
            let of_nic = seen(&kubelet, &nic());
            node.write_config(&config(&[
                resource("gpu"),
                format!("{}env = {{ SPEED = \"fast\" }}\n", resource("nic")),
            ]));
            assert_eq!(
                reload(&mut app).await.resources.get(&nic()),
                Some(&ResourceChange::Changed(vec!["env"]))
            );
            answer_has_the_new_environment(&kubelet, &node).await;
            assert_eq!(seen(&kubelet, &nic()), of_nic, "the kubelet's data has not changed");
            // The options at Register have changed: the kubelet has to call before a start.
            let hook = "before_start = { command = [\"/bin/true\"] }\n";
            node.write_config(&config(&[resource("gpu"), format!("{}{hook}", resource("nic"))]));
            assert_eq!(
                reload(&mut app).await.resources.get(&nic()),
                Some(&ResourceChange::Changed(vec!["env", "before_start"]))
            );
            standing(
                &kubelet,
                "another Register",
                |view| view.registers(&nic()) > u64::try_from(of_nic.0).unwrap(),
                HANG,
            )
            .await;
            offered(&kubelet, &nic(), 4).await;
            enough(20).await;
            // The same text again is no change.
            let generation = report(&app).generation;
            assert!(reload(&mut app).await.is_empty());
            assert_eq!((report(&app).generation, generation), (4, 4));
            done.set(true);
        };
        tokio::join!(load, reloads);
        println!("{} Allocates, none refused", calls.get());
        assert_eq!(seen(&kubelet, &gpu()), before, "no Register, no list, no end of a stream");
        assert_eq!(kubelet.panicked(), None);
        app.shut_down().await;
    });
}

/// Both resources are removed. The one without a held device ends when its devices may leave, the
/// other one that long after its last release.
#[test]
fn a_removed_resource_stays_while_it_is_held_and_then_ends_cleanly() {
    run(async {
        let node = Node::with(&[("gpu", 2), ("nic", 2)]);
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut app = node.start_app_with(|settings| settings.leave_after = LEAVE_AFTER).await;
        offered(&kubelet, &gpu(), 2).await;
        offered(&kubelet, &nic(), 2).await;
        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").init("prepare", &gpu(), 1).app(
                "main",
                &gpu(),
                1,
            )),
        )
        .await;
        assert_eq!(pod.phase, PodPhase::Running);
        let held = kubelet.devices(&pod.uid, "main")[&gpu()].first().unwrap().to_string();
        let free = if held == "dev:gpu0" { "dev:gpu1" } else { "dev:gpu0" };
        // Waits until the daemon knows the holder; otherwise it would release the grant as never
        // started.
        soon(
            "the binding",
            app.views
                .grants
                .clone()
                .wait_for(|grants| grants.iter().any(|grant| grant.pod().is_some())),
        )
        .await
        .unwrap();

        node.write_config(&config(&[]));
        // Without any resource the known hardware is offered, and there is none.
        reload(&mut app).await;
        assert_eq!(health(&app, &gpu(), &held), Some(Health::Healthy), "a holder keeps it");
        assert_eq!(health(&app, &gpu(), free), Some(Health::Unhealthy(Reason::Deselected)));
        assert_eq!(health(&app, &nic(), "dev:nic0"), Some(Health::Unhealthy(Reason::Deselected)));
        offered(&kubelet, &gpu(), 1).await;
        offered(&kubelet, &nic(), 0).await;
        let refused =
            allocate(&mut dial(&kubelet, &node, &gpu()).await, &[free]).await.unwrap_err();
        assert!(refused.message().contains("deselected"), "{refused}");
        // Also with rebuilt actors.
        hide_expected_panics();
        app.actors.health.crash().await.unwrap();
        app.actors.discovery.crash().await.unwrap();
        app.actors.registration.crash().await.unwrap();
        offered(&kubelet, &gpu(), 1).await;
        assert_eq!(health(&app, &gpu(), &held), Some(Health::Healthy));

        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        let mut inventory = app.views.inventory.clone();
        let gone = async {
            drop(inventory.wait_for(|inventory| inventory.resources.is_empty()).await.unwrap());
        };
        tokio::time::timeout(LEAVE_AFTER + HANG, gone).await.expect("both resources end");
        let is_over = |view: &View<'_>| {
            let ended = |name: &ResourceName| {
                !view.endpoint_state(name).is_streaming && view.capacity(name).capacity == 0
            };
            ended(&gpu()) && ended(&nic())
        };
        standing(&kubelet, "the registrations end", is_over, HANG).await;
        let registers = [seen(&kubelet, &gpu()).0, seen(&kubelet, &nic()).0];
        assert!(app.views.registrations.borrow().is_empty());
        let sockets = || std::fs::read_dir(node.sockets()).into_iter().flatten().count();
        crate::common::until("no socket is left", sockets, |left| *left == 0).await;
        assert_eq!(
            kubelet.panicked(),
            None,
            "no device left a list that the kubelet could have been giving away"
        );

        // It comes back as a new resource.
        node.write_config(&config(&[resource("gpu")]));
        reload(&mut app).await;
        offered(&kubelet, &gpu(), 2).await;
        assert!(seen(&kubelet, &gpu()).0 > registers[0]);
        assert_eq!(
            seen(&kubelet, &nic()).0,
            registers[1],
            "what has ended is not registered again"
        );
        app.shut_down().await;
    });
}

/// The same resources, each given to claims or by number.
#[cfg(feature = "cluster")]
fn with_claims(resources: &[(&str, bool)]) -> String {
    let one = |(name, is_for_claims): &(&str, bool)| {
        resource(name) + if *is_for_claims { "api = \"dra\"\n" } else { "" }
    };
    let resources: Vec<String> = resources.iter().map(one).collect();
    format!("[dra]\nenabled = true\n{}", config(&resources))
}

/// A resource for claims is discovered and judged, and not registered. After a change of `api` the
/// kubelet has the device that a pod got by number, until the pod ends.
#[cfg(feature = "cluster")]
#[test]
fn a_resource_for_claims_is_registered_only_while_a_pod_has_its_devices_by_number() {
    run(async {
        let node = Node::with(&[("gpu", 2), ("nic", 2)]);
        node.write_config(&with_claims(&[("gpu", false), ("nic", true)]));
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut app = node.start_app_with(|settings| settings.leave_after = LEAVE_AFTER).await;
        soon("READY", app.views.ready.clone().wait_for(|ready| *ready)).await.unwrap();
        offered(&kubelet, &gpu(), 2).await;
        assert_eq!(health(&app, &nic(), "dev:nic0"), Some(Health::Healthy));
        let pod = PodSpec::new("default", "train").app("main", &gpu(), 1);
        let pod = soon("an admission", kubelet.add_pod(pod)).await;
        assert_eq!(pod.phase, PodPhase::Running);
        let held = kubelet.devices(&pod.uid, "main")[&gpu()].first().unwrap().to_string();
        let free = if held == "dev:gpu0" { "dev:gpu1" } else { "dev:gpu0" };
        soon(
            "the binding",
            app.views
                .grants
                .clone()
                .wait_for(|grants| grants.iter().any(|grant| grant.pod().is_some())),
        )
        .await
        .unwrap();

        node.write_config(&with_claims(&[("gpu", true), ("nic", true)]));
        let change = reload(&mut app).await;
        assert_eq!(
            change.resources.get(&gpu()),
            Some(&ResourceChange::Changed(vec!["api"])),
            "{change}"
        );
        offered(&kubelet, &gpu(), 1).await;
        assert_eq!(health(&app, &gpu(), free), Some(Health::Healthy), "for claims");
        let refused =
            allocate(&mut dial(&kubelet, &node, &gpu()).await, &[free]).await.unwrap_err();
        assert!(refused.message().contains("deselected"), "{refused}");
        hide_expected_panics();
        app.actors.health.crash().await.unwrap();
        app.actors.registration.crash().await.unwrap();
        offered(&kubelet, &gpu(), 1).await;

        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        let is_over = |view: &View<'_>| !view.endpoint_state(&gpu()).is_streaming;
        standing(&kubelet, "the registration ends", is_over, LEAVE_AFTER + HANG).await;
        let mut registrations = app.views.registrations.clone();
        soon("no registration", registrations.wait_for(|all| all.is_empty())).await.unwrap();
        assert_eq!(health(&app, &gpu(), &held), Some(Health::Healthy), "for claims");
        assert_eq!(seen(&kubelet, &nic()), (0, 0, 0), "it was never registered");
        assert_eq!(kubelet.panicked(), None);

        node.write_config(&with_claims(&[("gpu", false), ("nic", true)]));
        reload(&mut app).await;
        offered(&kubelet, &gpu(), 2).await;
        app.shut_down().await;
    });
}

#[test]
fn a_device_that_moves_is_healthy_in_one_list_at_most() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let resources = |first: &str, second: &str| {
            let one = |name: &str, paths: &str| {
                format!(
                    "[[resource]]\nname = \"example.com/{name}\"\nclass = \"char\"\npaths = [{paths}]\n"
                )
            };
            config(&[one("gpu", first), one("nic", second)])
        };
        node.write_config(&resources(
            "\"/dev/gpu0\", \"/dev/gpu1\"",
            "\"/dev/gpu2\", \"/dev/gpu3\"",
        ));
        let kubelet = node.start_old_kubelet(node.kubelet_config()).await;
        let mut app = node.start_app().await;
        offered(&kubelet, &gpu(), 2).await;
        offered(&kubelet, &nic(), 2).await;
        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)),
        )
        .await;
        let held = kubelet.devices(&pod.uid, "main")[&gpu()].first().unwrap().to_string();
        let free = if held == "dev:gpu0" { "dev:gpu1" } else { "dev:gpu0" };
        soon(
            "the binding",
            app.views
                .grants
                .clone()
                .wait_for(|grants| grants.iter().any(|grant| grant.pod().is_some())),
        )
        .await
        .unwrap();

        // Every published list.
        let mut inventory = app.views.inventory.clone();
        let watched = tokio::task::spawn_local(async move {
            while inventory.changed().await.is_ok() {
                let now = inventory.borrow_and_update().clone();
                for (id, _) in now.resources[&gpu()]
                    .devices
                    .iter()
                    .filter(|(_, offered)| offered.health.is_healthy())
                {
                    let other = now.resources[&nic()].devices.get(id);
                    assert!(
                        other.is_none_or(|offered| !offered.health.is_healthy()),
                        "{id} is healthy twice"
                    );
                }
            }
        });
        node.write_config(&resources(
            "\"/dev/gpu2\", \"/dev/gpu3\"",
            "\"/dev/gpu0\", \"/dev/gpu1\"",
        ));
        reload(&mut app).await;
        assert_eq!(health(&app, &gpu(), &held), Some(Health::Healthy));
        assert_eq!(health(&app, &nic(), &held), Some(Health::Unhealthy(Reason::HeldAsOther)));
        // A free id moves to the other resource after some seconds: an Allocate under way has then
        // recorded its grant.
        assert_eq!(health(&app, &nic(), free), Some(Health::Unhealthy(Reason::HeldAsOther)));
        offered(&kubelet, &nic(), 1).await;
        assert_eq!(health(&app, &nic(), free), Some(Health::Healthy));
        offered(&kubelet, &gpu(), 3).await;
        assert!(allocate(&mut dial(&kubelet, &node, &nic()).await, &[&held]).await.is_err());

        assert!(kubelet.delete_pod(&pod.uid).unwrap());
        offered(&kubelet, &nic(), 2).await;
        assert_eq!(health(&app, &nic(), &held), Some(Health::Healthy));
        assert!(!watched.is_finished(), "two lists offered the same device");
        watched.abort();
        app.shut_down().await;
    });
}

#[test]
fn removed_shares_do_not_affect_their_device() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let shared =
            |replicas: u32| config(&[format!("{}replicas = {replicas}\n", resource("gpu"))]);
        node.write_config(&shared(8));
        let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
        let mut daemon =
            Daemon::spawn(node.command(&["run"]).env("NOTIFY_SOCKET", node.path("notify")));
        notified(&systemd, "READY=1").await;
        let with = async |text: String| {
            node.write_config(&text);
            daemon.signal(Signal::SIGHUP);
            notified(&systemd, "RELOADING=1").await;
            notified(&systemd, "READY=1").await;
            node.json(&["status"])
        };
        let status = with(shared(4)).await;
        let listed = &status["resources"][0];
        assert_eq!(
            (&listed["devices"], &listed["healthy"]),
            (&8.into(), &4.into()),
            "four leave the list: {status}"
        );
        assert_eq!(status["ailing"], serde_json::json!([]), "{status}");
        // When the resource offers no share of it, the device itself is reported.
        let status = with(config(&[resource("nic")])).await;
        assert_eq!(
            (&status["ailing"][0]["id"], &status["ailing"][0]["reason"]),
            (&"dev:gpu0".into(), &"deselected".into()),
            "{status}"
        );
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
    });
}

#[test]
fn an_invalid_file_is_reported_and_the_last_valid_one_stays() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let good = format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu"));
        node.write_config(&good);
        let kubelet = node.start_kubelet().await;
        let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
        let mut daemon =
            Daemon::spawn(node.command(&["run"]).env("NOTIFY_SOCKET", node.path("notify")));
        notified(&systemd, "READY=1").await;
        offered(&kubelet, &gpu(), 2).await;
        let address = telemetry(&daemon).await;
        let metric = |line: &str| http_get(address, "/metrics").1.lines().any(|told| told == line);
        assert!(metric("holdfast_config_last_reload_successful 1"));

        let signal = async |daemon: &Daemon| {
            daemon.signal(Signal::SIGHUP);
            notified(&systemd, "RELOADING=1").await;
            notified(&systemd, "READY=1").await;
        };
        node.write_config(&format!("{good}replica = 3\n"));
        signal(&daemon).await;
        let status = node.json(&["status"]);
        let error = status["config"]["error"].as_str().unwrap();
        let (file, line) = (node.config_file(), good.lines().count() + 1);
        assert!(
            error.contains(&format!("`{}`, line {line}", file.display()))
                && error.contains("unknown key `replica`"),
            "{error}"
        );
        assert_eq!(
            (status["config"]["generation"].as_u64(), status["resources"][0]["healthy"].as_u64()),
            (Some(1), Some(2))
        );
        let table = String::from_utf8(node.output(&["status"]).stdout).unwrap();
        assert!(table.contains(error), "{table}");
        assert!(
            metric("holdfast_config_last_reload_successful 0")
                && metric("holdfast_config_reloads_total{result=\"error\"} 1")
        );
        daemon.logged("keeping the previous one").await;
        allocate(&mut dial(&kubelet, &node, &gpu()).await, &["dev:gpu0"]).await.unwrap();

        // A setting that needs a restart is reported as such, until it has its former value again.
        node.write_config(&good.replace("127.0.0.1:0", "127.0.0.1:1"));
        signal(&daemon).await;
        let status = node.json(&["status"]);
        assert_eq!(
            (&status["config"]["error"], &status["config"]["needs_restart"]),
            (&serde_json::Value::Null, &serde_json::json!(["telemetry.listen"]))
        );
        assert!(
            String::from_utf8(node.output(&["status"]).stdout)
                .unwrap()
                .contains("telemetry.listen")
        );
        assert!(metric("holdfast_config_last_reload_successful 1"));
        node.write_config(&good);
        signal(&daemon).await;
        assert_eq!(node.json(&["status"])["config"]["needs_restart"], serde_json::json!([]));
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
    });
}

/// Publishes a volume as the kubelet does: a folder for each version, and a link that is replaced
/// atomically.
fn publish(volume: &Path, version: &str, files: &[(&str, &str)]) {
    std::fs::create_dir_all(volume.join(version)).unwrap();
    for (file, text) in files {
        std::fs::write(volume.join(version).join(file), text).unwrap();
        let link = volume.join(file);
        if link.symlink_metadata().is_err() {
            symlink(Path::new("..data").join(file), link).unwrap();
        }
    }
    symlink(version, volume.join("..data_tmp")).unwrap();
    std::fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
}

/// A reload begins 200 ms after a change of the files' links.
const LATER_THAN_A_RELOAD: Duration = Duration::from_millis(600);

#[test]
fn a_replaced_config_map_is_applied_automatically_and_an_edit_is_not() {
    run(async {
        let node = Node::new();
        ["gpu", "nic", "disk"].iter().for_each(|stem| node.create_device(stem, 0));
        let (volume, drop_ins) = (node.path("etc"), node.path("etc/config.d"));
        publish(&volume, "..1", &[("config.toml", &config(&[resource("gpu")]))]);
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        offered(&kubelet, &gpu(), 1).await;
        let unpolled = Unpolled::begin().await;
        publish(&volume, "..2", &[("config.toml", &config(&[resource("gpu"), resource("nic")]))]);
        offered(&kubelet, &nic(), 1).await;
        unpolled.end("the reload");
        // Also in a drop-in folder that was created since.
        publish(&drop_ins, "..1", &[("10.toml", &resource("disk"))]);
        offered(&kubelet, &name("example.com/disk"), 1).await;
        // A bad version changes nothing, the next good one applies.
        publish(&volume, "..3", &[("config.toml", "nonsense")]);
        daemon.logged("keeping the previous one").await;
        publish(&volume, "..4", &[("config.toml", &config(&[resource("gpu"), resource("nic")]))]);
        crate::common::until(
            "it is good again",
            || node.json(&["status"])["config"]["error"].is_null(),
            |good| *good,
        )
        .await;

        // An additional file alone triggers no reload: only the reload after the signal finds it.
        std::fs::write(drop_ins.join("20.toml"), "[ledger]\nrefuse = \"never\"\n").unwrap();
        // The reload of another version would find it. It comes later than one that the file had
        // triggered.
        let reloads = |log: Vec<String>| {
            log.iter().filter(|line| line.contains("configuration reloaded")).count()
        };
        let before = reloads(daemon.log());
        tokio::time::sleep(LATER_THAN_A_RELOAD).await;
        assert_eq!(reloads(daemon.log()), before);
        assert_eq!(daemon.log().iter().filter(|line| line.contains("ledger.refuse")).count(), 0);
        daemon.signal(Signal::SIGHUP);
        daemon.logged("ledger.refuse").await;
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
    });
}

/// The open descriptors of a process, its threads, and its sockets.
fn footprint(daemon: &Daemon, node: &Node) -> (usize, usize, usize) {
    let entries = |path: String| std::fs::read_dir(path).unwrap().count();
    let pid = daemon.pid();
    (
        entries(format!("/proc/{pid}/fd")),
        entries(format!("/proc/{pid}/task")),
        std::fs::read_dir(node.sockets()).unwrap().count(),
    )
}

#[test]
fn fifty_reloads_in_a_row_leave_nothing_behind() {
    run(async {
        let node = Node::with(&[("gpu", 2), ("nic", 1)]);
        let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
        // Without a kubelet: descriptors of a registration are not part of this test.
        let mut daemon =
            Daemon::spawn(node.command(&["run"]).env("NOTIFY_SOCKET", node.path("notify")));
        notified(&systemd, "READY=1").await;
        let round = async |number: usize| {
            let env = format!("env = {{ ROUND = \"{number}\" }}\n");
            node.write_config(&config(&[resource("gpu"), format!("{}{env}", resource("nic"))]));
            daemon.signal(Signal::SIGHUP);
            notified(&systemd, "RELOADING=1").await;
            notified(&systemd, "READY=1").await;
        };
        std::fs::create_dir_all(node.sockets()).unwrap();
        let mut rounds = 0;
        for _ in 0..5 {
            round(rounds).await;
            rounds += 1;
        }
        // The runtime keeps its reader threads. It adds one when a reload begins before the last
        // reader has returned to its pool, which a busy machine delays. So threads may grow in one
        // series, and a leak makes them grow in each one.
        let mut is_clean = async || {
            let before = footprint(&daemon, &node);
            for _ in 0..50 {
                round(rounds).await;
                rounds += 1;
            }
            // Descriptors of a scan under way do not count.
            let after = crate::common::until(
                "no descriptor or socket is left",
                || footprint(&daemon, &node),
                |after| after.0 <= before.0 && after.2 <= before.2,
            )
            .await;
            println!(
                "descriptors, threads, sockets: {before:?} before fifty reloads, {after:?} after"
            );
            after.1 <= before.1
        };
        let mut series = 0..5;
        while !is_clean().await {
            assert!(series.next().is_some(), "each series of fifty reloads leaves a thread");
        }
        assert_eq!(node.json(&["status"])["config"]["generation"], serde_json::json!(rounds + 1));
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
    });
}

#[test]
fn a_signal_during_the_start_is_answered_after_it() {
    run(async {
        for _ in 0..5 {
            let node = Node::with(&[("gpu", 1)]);
            node.create_device("nic", 0);
            let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
            let mut daemon =
                Daemon::spawn(node.command(&["run"]).env("NOTIFY_SOCKET", node.path("notify")));
            daemon.logged("starting").await;
            node.write_config(&config(&[resource("gpu"), resource("nic")]));
            daemon.signal(Signal::SIGHUP);
            notified(&systemd, "READY=1").await;
            crate::common::until(
                "the new resource",
                || node.json(&["status"])["resources"].as_array().unwrap().len(),
                |resources| *resources == 2,
            )
            .await;
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().await.code(), Some(0));
        }
    });
}

/// A disk that fails for some time: a read of this process's memory at its start is an error too.
#[test]
fn files_that_cannot_be_read_are_read_again_without_another_signal() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        node.create_device("nic", 0);
        let daemon = Daemon::spawn(&mut node.command(&["run"]));
        daemon.logged("ready").await;
        let drop_in = node.path("etc/config.d/10.toml");
        std::fs::create_dir(node.path("etc/config.d")).unwrap();
        symlink("/proc/self/mem", &drop_in).unwrap();
        daemon.signal(Signal::SIGHUP);
        let error = || node.json(&["status"])["config"]["error"].clone();
        crate::common::until("the error", error, |error| {
            error.as_str().is_some_and(|error| error.contains("Input/output error"))
        })
        .await;
        let valid = node.path("valid");
        std::fs::write(&valid, resource("nic")).unwrap();
        std::fs::rename(&valid, &drop_in).unwrap();
        crate::common::until(
            "the new resource",
            || node.json(&["status"])["resources"].as_array().unwrap().len(),
            |resources| *resources == 2,
        )
        .await;
        assert!(error().is_null());
    });
}

#[test]
fn an_actor_that_dies_after_a_reload_has_the_new_configuration() {
    run(async {
        hide_expected_panics();
        let node = Node::with(&[("gpu", 2)]);
        (0..2).for_each(|index| node.create_device("nic", index));
        let kubelet = node.start_kubelet().await;
        let mut app = node.start_app().await;
        offered(&kubelet, &gpu(), 2).await;
        let env = "env = { GENERATION = \"2\" }\n";
        node.write_config(&config(&[format!("{}{env}", resource("gpu")), resource("nic")]));
        reload(&mut app).await;
        offered(&kubelet, &nic(), 2).await;
        for round in 0..3 {
            let actors = &app.actors;
            actors.discovery.crash().await.unwrap();
            actors.health.crash().await.unwrap();
            actors.ledger.crash().await.unwrap();
            actors.serving.crash().await.unwrap();
            actors.registration.crash().await.unwrap();
            // The rebuilt actors find and judge a new device.
            node.create_device("nic", 2 + round);
            offered(&kubelet, &nic(), 3 + round).await;
            offered(&kubelet, &gpu(), 2).await;
            let request = api::ContainerAllocateRequest { devices_ids: vec!["dev:gpu0".into()] };
            let mut plugin = dial(&kubelet, &node, &gpu()).await;
            let answer = plugin
                .allocate(api::AllocateRequest { container_requests: vec![request] })
                .await
                .unwrap()
                .into_inner();
            assert_eq!(
                answer.container_responses[0].envs.get("GENERATION").map(String::as_str),
                Some("2"),
                "round {round}"
            );
        }
        app.shut_down().await;
    });
}

/// Damages a text: cuts, doubles, flips and swaps, at places that a seed decides.
fn damage(text: &str, random: &mut Random) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..=random.below(3) {
        let at = random.index(bytes.len().max(1)).min(bytes.len().saturating_sub(1));
        match random.below(6) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..(at + 1 + random.index(20)).min(bytes.len()))),
            2 => bytes.insert(at, u8::try_from(random.below(256)).unwrap()),
            3 => bytes[at] ^= 1 << random.below(8),
            4 => {
                let piece: Vec<u8> = bytes[at..(at + random.index(40)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let other = random.index(bytes.len());
                bytes.swap(at, other);
            }
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

/// `HOLDFAST_VARIANTS` is the number of damaged files.
#[test]
fn no_damaged_file_reaches_a_daemon_that_runs() {
    run(async {
        let variants: usize =
            std::env::var("HOLDFAST_VARIANTS").map_or(200, |text| text.parse().unwrap());
        let node = Node::with(&[("gpu", 2)]);
        // A separate, undamaged file, which must keep its effect.
        let good = "[health]\npoll = \"10s\"\nfatal_xids = [48, 79]\n[[resource]]\nname = \"example.com/nic\"\nclass = \"char\"\n\
            paths = [{ host = \"/dev/nic*\", container = \"/dev/net/\", permissions = \"rw\" }]\nreplicas = 2\nenv = { A = \"1\" }\n\
            mounts = [{ host = \"/etc/calibration\", container = \"/etc/calibration\", read_only = true }]\n";
        node.create_device("nic", 0);
        std::fs::create_dir(node.path("etc/config.d")).unwrap();
        let drop_in = node.path("etc/config.d/10.toml");
        std::fs::write(&drop_in, good).unwrap();
        let kubelet = node.start_kubelet().await;
        let mut app = node.start_app().await;
        offered(&kubelet, &gpu(), 2).await;
        settled(&kubelet, &gpu()).await;
        let before = seen(&kubelet, &gpu());
        let mut random = Random::new();
        let (mut refused, mut with_line) = (0, 0);
        for number in 0..variants {
            let text = damage(good, &mut random);
            std::fs::write(&drop_in, &text).unwrap();
            let shown = || format!("variant {number}:\n{}", String::from_utf8_lossy(&text));
            let generation = report(&app).generation;
            match soon("a reload", app.reload()).await {
                // Some damaged files are valid configurations.
                Ok(_) => assert_eq!(report(&app).error, None, "{}", shown()),
                Err(error) => {
                    let error = error.to_string();
                    refused += 1;
                    with_line += usize::from(error.contains(", line "));
                    assert!(error.contains(&drop_in.display().to_string()), "{error}\n{}", shown());
                    assert_eq!(error.lines().count(), 1, "{error}\n{}", shown());
                    assert_eq!(
                        (report(&app).error.as_deref(), report(&app).generation),
                        (Some(error.as_str()), generation)
                    );
                }
            }
            assert_eq!(health(&app, &gpu(), "dev:gpu0"), Some(Health::Healthy), "{}", shown());
        }
        allocate(&mut dial(&kubelet, &node, &gpu()).await, &["dev:gpu0"]).await.unwrap();
        assert_eq!(seen(&kubelet, &gpu()), before, "the other resource is not touched");
        std::fs::write(&drop_in, good).unwrap();
        reload(&mut app).await;
        assert_eq!(report(&app).error, None);
        println!("{variants} damaged files: {refused} refused, {with_line} of them with a line");
        assert!(refused > variants / 2, "{refused} of {variants}");
        app.shut_down().await;
    });
}
