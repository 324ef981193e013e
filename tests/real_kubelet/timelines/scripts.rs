//! The scripts. Each begins and ends without a streaming plugin and without pods.

use super::player::Player;
use super::plugin::{Plugin, RESOURCE, SOCKETS};
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

/// A script: its name, its steps, and the recording of a real kubelet.
pub(crate) struct Script {
    pub(crate) name: &'static str,
    pub(crate) play: fn(&mut Player<'_>),
    pub(crate) golden: &'static str,
}

macro_rules! script {
    ($name:ident) => {
        Script {
            name: stringify!($name),
            play: $name,
            golden: include_str!(concat!("golden/", stringify!($name), ".txt")),
        }
    };
}

pub(crate) const ALL: &[Script] = &[
    script!(pods_come_and_go),
    script!(the_kubelet_restarts),
    script!(an_init_container_over_a_restart),
    script!(another_socket_takes_over),
    script!(a_stream_ends_and_is_back),
    script!(a_register_fails),
    script!(pod_resources_after_a_start),
];

/// A plugin that is registered and whose list the kubelet has.
fn registered(player: &mut Player<'_>, name: &'static str) -> Plugin {
    player.begin("the plugin registers");
    let plugin = player.plugin(name);
    plugin.register();
    player.allocatable(4);
    player.end();
    plugin
}

/// The plugin dies and no pod holds a device.
fn over(player: &mut Player<'_>, plugin: Plugin) {
    player.begin("the plugin dies");
    drop(plugin);
    player.allocatable(0);
    player.end();
}

fn pods_come_and_go(player: &mut Player<'_>) {
    let one = registered(player, "one");
    let (calls, register) = ("one#1", "Register(one)");
    player.figure("dialled to Register answered", ("one#1 connection", "opened"), (register, "ok"));
    player.figure(
        "ListAndWatch to checkpoint written",
        (calls, "ListAndWatch"),
        ("kubelet_internal_checkpoint", "replaced"),
    );

    player.begin("a pod asks for two");
    player.run_pod("pair", 2, false);
    player.end();
    player.figure(
        "GetPreferredAllocation to Allocate",
        (calls, "GetPreferredAllocation"),
        (calls, "Allocate"),
    );
    player.figure(
        "Allocate to checkpoint written",
        (calls, "Allocate"),
        ("kubelet_internal_checkpoint", "replaced"),
    );
    player.figure(
        "Allocate to PreStartContainer",
        (calls, "Allocate"),
        (calls, "PreStartContainer"),
    );
    player.checkpoint();

    player.begin("a pod with an init container asks for two");
    player.run_pod("steps", 2, true);
    player.end();
    player.checkpoint();

    player.begin("nothing is left for a third");
    player.rig.create("third", 1, false);
    player.is_rejected("third");
    player.delete_pod("third");
    player.end();

    player.begin("the pods are deleted");
    player.delete_pod("pair");
    player.delete_pod("steps");
    player.end();

    player.begin("one asks for everything");
    player.run_pod("all", 4, false);
    player.end();
    player.checkpoint();

    player.begin("it is deleted");
    player.delete_pod("all");
    player.end();
    over(player, one);
}

fn the_kubelet_restarts(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("a pod asks for one");
    player.run_pod("kept", 1, false);
    player.end();

    // Files of other programs. The kubelet does not read those in a sub-directory.
    let dir = player.rig.kubelet_dir().join("device-plugins");
    one.follow();
    for (signal, next) in [(Signal::SIGTERM, "first"), (Signal::SIGKILL, "second")] {
        player.begin(&format!("the kubelet ends by {signal}"));
        player.rig.stop(signal);
        player.end();

        player.begin(&format!("strange files appear after {signal}"));
        let socket = UnixListener::bind(dir.join("strange.sock")).unwrap();
        symlink(format!("{SOCKETS}/one"), dir.join("link-to-socket")).unwrap();
        if signal == Signal::SIGTERM {
            fs::write(dir.join("notes"), "").unwrap();
            symlink("nowhere", dir.join("dangling")).unwrap();
        }
        player.end();

        player.begin(&format!("the kubelet starts after {signal}"));
        player.rig.start();
        player.runs("kept");
        player.allocatable(4);
        player.end();
        let calls = if signal == Signal::SIGTERM { "one#2" } else { "one#3" };
        player.figures_of_a_start(calls);
        player.directory();
        drop(socket);

        player.begin(&format!("another pod asks for one after {signal}"));
        player.run_pod(next, 1, false);
        player.end();
        player.checkpoint();
    }

    player.begin("the pods are deleted");
    ["kept", "first", "second"].iter().for_each(|name| player.delete_pod(name));
    ["notes", "dangling"].iter().for_each(|name| fs::remove_file(dir.join(name)).unwrap());
    player.end();
    over(player, one);
}

fn an_init_container_over_a_restart(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("two pods run");
    player.run_pod("plain", 1, false);
    player.run_pod("staged", 1, true);
    player.end();

    player.begin("the plugin is back at once");
    one.follow();
    player.rig.stop(Signal::SIGKILL);
    player.rig.start();
    player.runs("plain");
    let batch = player.rig.first_batch();
    if batch.is_none_or(|batch| batch.had_a_list) {
        player.runs("staged");
    } else {
        // It cannot succeed, because another list follows.
        player.is_lost = true;
        player.is_rejected("staged");
    }
    player.allocatable(4);
    player.end();
    player.figures_of_a_start("one#2");

    player.begin("the plugin dies with the kubelet");
    player.rig.stop(Signal::SIGKILL);
    player.end();
    drop(one);
    player.begin("the kubelet is back without it");
    player.rig.start();
    player.is_rejected("staged");
    player.runs("plain");
    player.allocatable(0);
    player.end();

    player.begin("the plugin is back");
    let two = player.plugin("two");
    two.register();
    player.allocatable(4);
    player.runs("plain");
    player.end();
    player.checkpoint();

    player.begin("a pod gets what the rejected one had");
    player.is_over("staged");
    player.run_pod("heir", 2, false);
    player.end();
    player.checkpoint();

    player.begin("the pods are deleted");
    ["plain", "staged", "heir"].iter().for_each(|name| player.delete_pod(name));
    player.end();
    over(player, two);
}

fn another_socket_takes_over(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("a second socket registers");
    let two = player.plugin("two");
    two.register();
    player.end();

    player.begin("the first one has one device less");
    one.list(&["d0", "d1", "d2"]);
    player.allocatable(3);
    player.end();

    player.begin("a pod asks for one");
    player.run_pod("lone", 1, false);
    player.end();

    player.begin("the first stream ends");
    one.end_streams();
    player.allocatable(0);
    player.end();

    player.begin("the second one registers again");
    two.register();
    player.allocatable(4);
    player.end();

    player.begin("another pod asks for one");
    player.run_pod("other", 1, false);
    player.end();

    player.begin("the first one dies");
    drop(one);
    player.allocatable(4);
    player.end();

    player.begin("a third socket registers");
    let three = player.plugin("three");
    three.register();
    player.end();

    player.begin("the second one dies");
    drop(two);
    player.allocatable(0);
    player.end();

    player.begin("the third one registers again");
    three.register();
    player.allocatable(4);
    player.end();

    player.begin("the pods are deleted");
    ["lone", "other"].iter().for_each(|name| player.delete_pod(name));
    player.end();
    over(player, three);
}

fn a_stream_ends_and_is_back(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("the stream ends");
    one.end_streams();
    player.allocatable(0);
    player.end();

    player.begin("it registers again");
    one.list(&["d0", "d1", "d2", "d3"]);
    one.register();
    player.allocatable(4);
    player.end();

    player.begin("a pod asks for one");
    player.run_pod("after", 1, false);
    player.end();

    player.begin("the pod is deleted");
    player.delete_pod("after");
    player.end();
    over(player, one);
}

fn a_register_fails(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("another version");
    one.register_with("v1alpha1", RESOURCE);
    player.end();

    player.begin("another name");
    one.register_with("v1beta1", "timeline");
    player.end();

    player.begin("another socket without options");
    let broken = player.broken_plugin("broken");
    broken.register();
    player.end();

    player.begin("the first stream ends unnoticed");
    one.end_streams();
    player.allocatable(4);
    player.end();

    player.begin("it registers again");
    one.list(&["d0", "d1", "d2", "d3"]);
    one.register();
    player.end();
    drop(broken);
    over(player, one);
}

fn pod_resources_after_a_start(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("a pod asks for two");
    player.run_pod("kept", 2, false);
    player.end();

    player.begin("the kubelet ends");
    player.rig.stop(Signal::SIGKILL);
    player.end();

    player.begin("the kubelet starts");
    player.rig.hold();
    let asks = player.ask_for_pods();
    player.noted("List", "no answer");
    player.rig.start();
    player.noted("List", "no pods");
    player.rig.release();
    player.noted("List", "kept/main: d0 d1");
    player.noted("GetAllocatableResources", "0 devices");
    one.register();
    player.noted("GetAllocatableResources", "4 devices");
    player.end();
    drop(asks);
    player.figure("empty list to the pods", ("List", "no pods"), ("List", "kept"));

    player.begin("the pod is deleted");
    player.delete_pod("kept");
    player.end();
    over(player, one);
}
