//! `holdfast migrate status` and `plan`: a resource moves to claims and back, step by step as
//! planned, while pods hold devices.

use crate::common::{Daemon, HANG, offered, run};
use crate::dra::{World, stop};
use crate::dra_both::{gpu, id_in, id_of, pod_by_number, reload, set_api};
use holdfast::lab::sim::kubelet::{Kubelet, View};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const RESOURCE: &str = "example.com/gpu";

/// The resource in the document of `migrate status`.
fn status(world: &World) -> Value {
    let document = world.node.json(&["migrate", "status"]);
    let resources = document["resources"].as_array().unwrap();
    let mut resource = resources.iter().find(|it| it["name"] == RESOURCE).unwrap().clone();
    resource["dra"] = document["dra"].clone();
    resource
}

/// The text of a verb, whose lines are short.
fn text(world: &World, verb: &[&str]) -> String {
    let output = world.node.output(verb);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let wide = text.lines().find(|line| line.chars().count() > 80);
    assert_eq!(wide, None, "{text}");
    text
}

fn steps(world: &World, to: &str) -> Vec<Value> {
    let plan = world.node.json(&["migrate", "plan", "--to", to, RESOURCE]);
    assert_eq!((&plan["to"], &plan["resources"]), (&json!(to), &json!([RESOURCE])));
    plan["steps"].as_array().unwrap().clone()
}

fn kinds(steps: &[Value]) -> Vec<&str> {
    steps.iter().map(|step| step["kind"].as_str().unwrap()).collect()
}

fn plan(world: &World, to: &str) -> String {
    text(world, &["migrate", "plan", "--to", to, RESOURCE])
}

/// Waits for these numbers: free by number, free for claims, and in the slices.
async fn until_free(world: &World, numbers: [usize; 3]) -> Value {
    let of = |it: &Value| ["by_number", "by_claim", "published"].map(|key| it[key].clone());
    let began = Instant::now();
    loop {
        let seen = status(world);
        if of(&seen) == numbers.map(|it| json!(it)) {
            return seen;
        }
        assert!(began.elapsed() < 4 * HANG, "not {numbers:?}: {seen}");
        // Each question is a process, and the kubelets run on this thread.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What the next step waits for, by `status`.
fn waits(status: &Value) -> String {
    let waits = status["waits_for"].as_array().unwrap();
    waits.iter().map(|it| it.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Waits until the kubelet could give away this many devices. The end of a pod is proven by two
/// passes of the ledger.
async fn until_allocatable(kubelet: &Kubelet, count: usize) {
    let is_it = |view: &View<'_>| view.capacity(&gpu()).allocatable == count;
    kubelet.wait_for(is_it, 4 * HANG).await.unwrap();
}

/// Carries out the first step of a plan: an order to the daemon.
async fn carry_out(world: &World, daemon: &mut Daemon, to: &str) {
    let steps = steps(world, to);
    match kinds(&steps)[0] {
        "enable" => {
            let config = std::fs::read_to_string(world.node.config_file()).unwrap();
            world.node.write_config(&config.replace("enabled = false", "enabled = true"));
            daemon.kill();
            *daemon = world.start();
            world.until_registered().await;
        }
        "set" => {
            let action = steps[0]["action"].as_str().unwrap();
            let (_, rest) = action.split_once("`api = \"").unwrap();
            reload(world, daemon, rest.split_once('"').unwrap().0).await;
        }
        other => panic!("{other}: {steps:?}"),
    }
}

#[test]
fn following_the_plans_moves_a_resource_to_claims_and_back() {
    run(async {
        let world = World::new(3).await;
        set_api(&world, "plugin");
        let config = std::fs::read_to_string(world.node.config_file()).unwrap();
        world.node.write_config(&config.replace("enabled = true", "enabled = false"));
        let kubelet = world.node.start_old_kubelet(world.node.kubelet_config()).await;
        let mut daemon = world.start();
        offered(&kubelet, &gpu(), 3).await;
        let web = pod_by_number(&kubelet, "web").await.unwrap();
        let of_web = id_in(&kubelet, &web);
        let first = until_free(&world, [2, 0, 0]).await;
        assert_eq!((&first["dra"], &first["api"]), (&json!(false), &json!("plugin")));

        // Both APIs.
        assert_eq!(kinds(&steps(&world, "both")), ["enable", "set"]);
        assert!(plan(&world, "both").contains("no pod has to end before"));
        carry_out(&world, &mut daemon, "both").await;
        assert_eq!(kinds(&steps(&world, "both")), ["set"]);
        carry_out(&world, &mut daemon, "both").await;
        let both = until_free(&world, [2, 2, 3]).await;
        assert_eq!((waits(&both).as_str(), &both["dra"]), ("", &json!(true)), "{both}");
        assert!(steps(&world, "both").is_empty());
        assert!(plan(&world, "both").starts_with("nothing to do: api = \"both\""));
        let names = world.until_published(3).await;
        let free: Vec<String> = names.into_iter().filter(|name| id_of(name) != of_web).collect();
        let train = world.allocate("train", "train-0", &free[..1]);
        world.manager.prepare("train-0", &[train]).await.unwrap();
        let both = until_free(&world, [1, 1, 3]).await;
        assert_eq!(both["held"].as_array().unwrap().len(), 2, "{both}");

        // Claims alone. The container holds up the end of the resource, and the claim does not.
        let of_dra = steps(&world, "dra");
        assert_eq!(kinds(&of_dra), ["set", "end"]);
        assert!(of_dra[1]["action"].as_str().unwrap().contains(&format!("({of_web})")));
        carry_out(&world, &mut daemon, "dra").await;
        let dra = until_free(&world, [0, 1, 3]).await;
        assert!(waits(&dra).contains("ml/web, container main"), "{dra}");
        assert!(!waits(&dra).contains("ml/train"), "{dra}");
        assert_eq!(kinds(&steps(&world, "dra")), ["end"]);
        let shown = text(&world, &["migrate", "status"]);
        assert!(shown.contains(&format!("{of_web} by number: ml/web, container main")), "{shown}");
        kubelet.delete_pod(&web).unwrap();
        until_allocatable(&kubelet, 0).await;
        let dra = until_free(&world, [0, 2, 3]).await;
        assert!(steps(&world, "dra").is_empty());
        assert_eq!((waits(&dra).as_str(), &dra["listed"]), ("", &json!(false)), "{dra}");

        // And back.
        let of_plugin = steps(&world, "plugin");
        assert_eq!(kinds(&of_plugin), ["set", "wait", "end"]);
        assert!(of_plugin[2]["action"].as_str().unwrap().contains("claim ml/train"));
        carry_out(&world, &mut daemon, "plugin").await;
        let returning = status(&world);
        assert_eq!((&returning["returning"], &returning["by_number"]), (&json!(true), &json!(0)));
        assert!(waits(&returning).contains("10 s"), "{returning}");
        assert_eq!(kinds(&steps(&world, "plugin")), ["wait", "end"]);
        until_allocatable(&kubelet, 2).await;
        let plugin = until_free(&world, [2, 0, 1]).await;
        assert!(waits(&plugin).contains("claim ml/train"), "{plugin}");
        assert_eq!(kinds(&steps(&world, "plugin")), ["end"]);
        world.manager.unprepare("train-0").await.unwrap();
        let plugin = until_free(&world, [3, 0, 0]).await;
        assert_eq!(waits(&plugin), "", "{plugin}");
        assert!(steps(&world, "plugin").is_empty());
        offered(&kubelet, &gpu(), 3).await;
        let unknown = world.node.output(&["migrate", "plan", "--to", "dra", "example.com/gpus"]);
        assert_eq!(unknown.status.code(), Some(1));
        stop(daemon).await;
    });
}
