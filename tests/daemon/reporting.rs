//! Events and the condition of the node, in a simulated API server with the rights of the service
//! account.

use crate::common::{
    Daemon, HANG, Node, http_get, ids, name, offered, resource, run, telemetry, until,
};
use crate::dra::{NODE, stop};
use holdfast::lab::sim::api_server::{ApiServer, Fault, Kind, User};
use holdfast::lab::sim::kubelet::{Kubelet, PodPhase, PodSpec};
use serde_json::{Value, json};
use tokio::sync::watch;

/// A node with GPUs and an API server.
struct World {
    node: Node,
    server: ApiServer,
    kubelet: Kubelet,
}

/// The condition of another program.
fn ready() -> Value {
    json!({
        "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "posting",
        "lastHeartbeatTime": "2026-01-02T03:04:05Z", "lastTransitionTime": "2026-01-02T03:04:05Z",
    })
}

impl World {
    /// With these keys of `[cluster]`.
    async fn new(gpus: usize, keys: &str) -> World {
        let node = Node::with(&[("gpu", gpus)]);
        let server = ApiServer::start(NODE, &[]).await.unwrap();
        server.add_user(Some("token"), User::Pod(Some(NODE.into())));
        let status = json!({ "conditions": [ready()] });
        server.put(Kind::Node, json!({ "metadata": { "name": NODE }, "status": status }));
        let kubeconfig = server.kubeconfig(&node.path("etc"), "token").unwrap();
        node.write_config(&format!(
            "[telemetry]\nlisten = \"127.0.0.1:0\"\n[cluster]\ncredentials = {:?}\n{keys}{}",
            kubeconfig.display().to_string(),
            resource("gpu"),
        ));
        let kubelet = node.start_kubelet().await;
        World { node, server, kubelet }
    }

    async fn start(&self, gpus: usize) -> Daemon {
        let daemon = Daemon::spawn(self.node.command(&["run"]).env("NODE_NAME", NODE));
        offered(&self.kubelet, &name("example.com/gpu"), gpus).await;
        daemon
    }

    /// Runs a pod with GPUs. Returns their numbers and the UID of the pod, which the ledger knows.
    async fn run_pod(&self, pod: &str, gpus: u32) -> (Vec<usize>, String) {
        let spec = PodSpec::new("team", pod).app("main", &name("example.com/gpu"), gpus);
        assert_eq!(self.kubelet.add_pod(spec).await.phase, PodPhase::Running);
        let bound = |grants: &Vec<holdfast::domain::Grant>| {
            grants.iter().any(|grant| grant.pod().is_some_and(|of| of.name.as_deref() == Some(pod)))
        };
        let grants = until("the pod in the ledger", || self.node.grants(), bound).await;
        let grant = grants.iter().find(|grant| grant.pod().is_some()).unwrap();
        let number = |id: &str| id.strip_prefix("dev:gpu").unwrap().parse().unwrap();
        let numbers = ids(grant).iter().map(|id| number(id.as_str())).collect();
        (numbers, grant.pod().unwrap().uid.clone())
    }

    /// Waits, from write to write of the daemon, until the API server has this.
    async fn until_stored<T>(
        &self,
        what: &str,
        ask: impl Fn(&ApiServer) -> T,
        fits: impl Fn(&T) -> bool,
    ) -> T {
        let mut served = self.server.served();
        let seen = async {
            loop {
                served.borrow_and_update();
                let now = ask(&self.server);
                if fits(&now) {
                    return now;
                }
                served.changed().await.unwrap();
            }
        };
        // A second change of the same kind waits for half a minute.
        tokio::time::timeout(HANG * 2, seen).await.unwrap_or_else(|_| panic!("never: {what}"))
    }

    async fn until_condition(&self, status: &str) -> Value {
        self.until_stored(status, condition, |now| now["status"] == status).await
    }

    async fn until_events(&self, reason: &str, count: usize) -> Vec<Value> {
        let of_reason = |server: &ApiServer| {
            let mut events = server.objects(Kind::Event);
            events.retain(|event| event["reason"] == reason);
            events
        };
        self.until_stored(reason, of_reason, |events| events.len() == count).await
    }

    async fn problems(&self, text: &str) -> String {
        let problems = || self.node.json(&["status"])["not_reported"].to_string();
        until(text, problems, |problems| problems.contains(text)).await
    }

    async fn until_sick(&self, count: usize) {
        let ailing = || self.node.json(&["status"])["ailing"].as_array().map_or(0, Vec::len);
        until("the failures", ailing, |sick| *sick == count).await;
    }
}

/// The condition of Holdfast.
fn condition(server: &ApiServer) -> Value {
    let node = server.object(Kind::Node, "", NODE).unwrap_or_default();
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let own = conditions.into_iter().find(|it| it["type"] == "HoldfastDevicesHealthy");
    own.unwrap_or_default()
}

const BOTH: &str = "events = true\nnode_condition = true\n";

#[test]
fn a_failure_of_a_held_device_and_its_end_are_shown_on_the_pod_and_on_the_node() {
    run(async {
        let world = World::new(2, BOTH).await;
        let daemon = world.start(2).await;
        let healthy = world.until_condition("True").await;
        assert_eq!(healthy["message"], "2 of 2 devices are healthy");
        let (held, uid) = world.run_pod("train", 1).await;
        let of = |server: &ApiServer| server.object(Kind::Node, "", NODE).unwrap();
        world.node.remove_device("gpu", held[0]);

        let sick = world.until_condition("False").await;
        let device = format!("example.com/gpu dev:gpu{}", held[0]);
        assert_eq!(sick["reason"], "DevicesUnhealthy");
        let message = sick["message"].as_str().unwrap();
        assert!(
            message.starts_with(&format!("1 of 2 devices is unhealthy: {device}")),
            "{message}"
        );
        let conditions = of(&world.server)["status"]["conditions"].clone();
        assert_eq!(conditions[0], ready(), "another program's condition");
        assert_eq!(conditions.as_array().unwrap().len(), 2);

        let events = world.until_events("DeviceUnhealthy", 2).await;
        let about = |kind: &str| {
            events.iter().find(|event| event["involvedObject"]["kind"] == kind).unwrap()
        };
        let pod = &about("Pod")["involvedObject"];
        assert_eq!([&pod["namespace"], &pod["name"], &pod["uid"]], ["team", "train", &uid]);
        let message = about("Pod")["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{device} is unhealthy: ")), "{message}");
        let message = about("Node")["message"].as_str().unwrap();
        assert!(
            message.starts_with(&format!("{device} of pod team/train is unhealthy")),
            "{message}"
        );
        assert_eq!(about("Node")["reportingComponent"], "holdfast.dev");

        world.node.create_device("gpu", held[0]);
        let events = world.until_events("DeviceRecovered", 2).await;
        assert!(events.iter().any(|event| event["involvedObject"]["uid"] == uid.as_str()));
        let again = world.until_condition("True").await;
        assert_ne!(again["lastTransitionTime"], healthy["lastTransitionTime"]);
        let page = http_get(telemetry(&daemon).await, "/metrics").1;
        for line in [
            "holdfast_report_writes_total{kind=\"event\",result=\"ok\"} 4\n",
            "holdfast_report_writes_total{kind=\"event\",result=\"forbidden\"} 0\n",
        ] {
            assert!(page.contains(line), "`{line}` is not in:\n{page}");
        }
        assert_eq!(world.node.json(&["status"])["not_reported"], Value::Null);
        stop(daemon).await;
    });
}

#[test]
fn after_an_outage_of_the_api_server_only_the_newest_state_is_written() {
    run(async {
        let world = World::new(2, BOTH).await;
        let daemon = world.start(2).await;
        world.until_condition("True").await;
        world.run_pod("train", 2).await;
        let (tried, mut of_second) = watch::channel(false);
        world.server.on_request(move |request| {
            let body = String::from_utf8_lossy(&request.body);
            if body.contains("dev:gpu1") {
                tried.send_replace(true);
            }
            Some(Fault::Refuse(503, None))
        });
        world.node.remove_device("gpu", 0);
        let why = world.problems("503").await;
        assert!(why.contains("cannot write"), "{why}");
        // It recovers, and the other one fails.
        world.node.create_device("gpu", 0);
        world.until_sick(0).await;
        world.node.remove_device("gpu", 1);
        world.until_sick(1).await;
        // Before that, a retry with the former state may still be on its way.
        let tried = tokio::time::timeout(HANG * 2, of_second.wait_for(|tried| *tried)).await;
        assert!(*tried.unwrap().unwrap());
        world.server.on_request(|_| None);
        let sick = world.until_condition("False").await;
        assert!(sick["message"].as_str().unwrap().contains("dev:gpu1"), "{sick}");
        world.until_events("DeviceUnhealthy", 2).await;
        let events = world.server.objects(Kind::Event);
        let is_of_second = |event: &Value| event["message"].to_string().contains("dev:gpu1");
        assert!(events.len() == 2 && events.iter().all(is_of_second), "{events:#?}");
        let problems = || world.node.json(&["status"])["not_reported"].clone();
        until("no problem", problems, Value::is_null).await;
        stop(daemon).await;
    });
}

#[test]
fn a_missing_right_is_one_problem_with_its_verb_and_is_tried_seldom() {
    run(async {
        let world = World::new(2, BOTH).await;
        world.server.add_user(Some("token"), User::Reader);
        let daemon = world.start(2).await;
        world.run_pod("train", 2).await;
        let why = world.problems("nodes/status").await;
        assert!(why.contains("grant patch of nodes/status"), "{why}");
        world.node.remove_device("gpu", 0);
        let why = world.problems("cannot create resource").await;
        assert!(why.contains("grant create and patch of events"), "{why}");
        let text = String::from_utf8(world.node.output(&["status"]).stdout).unwrap();
        assert!(text.contains("cannot write Events"), "{text}");
        // Further failures lead to no further requests.
        world.node.remove_device("gpu", 1);
        world.until_sick(2).await;
        let requests = world.server.requests();
        let writes = |verb: &str| requests.iter().filter(|it| it.starts_with(verb)).count();
        assert_eq!((writes("POST"), writes("PATCH")), (1, 1), "{requests:#?}");
        let logged = daemon.log();
        let logged = logged.iter().filter(|line| line.contains("cannot write to the API server"));
        assert_eq!(logged.count(), 2, "one line for each");
        let page = http_get(telemetry(&daemon).await, "/metrics").1;
        assert!(page.contains("{kind=\"condition\",result=\"forbidden\"} 1\n"), "{page}");
        stop(daemon).await;
    });
}

#[test]
fn without_the_keys_the_api_server_is_never_asked() {
    run(async {
        let world = World::new(1, "").await;
        let daemon = world.start(1).await;
        world.run_pod("train", 1).await;
        world.node.remove_device("gpu", 0);
        world.until_sick(1).await;
        let page = http_get(telemetry(&daemon).await, "/metrics").1;
        assert!(!page.contains("holdfast_report_writes_total{"), "{page}");
        stop(daemon).await;
        assert_eq!(world.server.connections().borrow().all, 0);
        assert_eq!(world.server.requests(), [] as [String; 0]);
    });
}
