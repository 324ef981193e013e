//! Claims while one instance hands over to another: the kubelet sees one driver, whose calls all
//! succeed.

use crate::common::{Daemon, run, soon, until};
use crate::dra::{NODE, World, stop};
use holdfast::domain::DRA_DRIVER;
use holdfast::lab::sim::api_server::Kind;
use nix::sys::signal::Signal;
use serde_json::Value;

/// Handovers under load.
const ROUNDS: usize = 4;

impl World {
    fn take_over(&self) -> Daemon {
        Daemon::spawn(self.node.command(&["run", "--take-over"]).env("NODE_NAME", NODE))
    }

    /// Each slice with the version of its latest write.
    fn versions(&self) -> Vec<Value> {
        let slices = self.server.objects(Kind::ResourceSlice);
        slices.iter().map(|slice| slice["metadata"]["resourceVersion"].clone()).collect()
    }

    /// The kubelet's numbers of the driver's instances: one for each registration.
    fn registrations(&self) -> Vec<u64> {
        self.manager.instances(DRA_DRIVER).iter().map(|instance| instance.number).collect()
    }
}

async fn until_taken_over(new: &Daemon, mut old: Daemon) {
    new.logged("took over from another instance").await;
    old.signal(Signal::SIGTERM);
    assert_eq!(old.ended().await.code(), Some(0));
}

#[test]
fn a_prepare_that_waits_is_answered_by_the_next_instance() {
    run(async {
        let world = World::new(1).await;
        let _kubelet = world.node.start_kubelet().await;
        let old = world.start();
        let names = world.until_published(1).await;
        world.until_registered().await;
        let (registrations, versions) = (world.registrations(), world.versions());
        let first = world.allocate("first", "pod-1", &names);
        world.manager.prepare("pod-1", &[first]).await.unwrap();
        let second = [world.allocate("second", "pod-2", &names)];
        let waiting = world.manager.prepare("pod-2", &second);
        let handed_over = async {
            old.logged("claim waits for its devices").await;
            let new = world.take_over();
            until_taken_over(&new, old).await;
            world.manager.unprepare("pod-1").await.unwrap();
            new
        };
        let (prepared, new) =
            soon("the second claim", async { tokio::join!(waiting, handed_over) }).await;
        prepared.unwrap();
        assert_eq!(world.holders("second").len(), 1);
        assert_eq!(world.registrations(), registrations, "the kubelet has noticed nothing");
        assert_eq!(world.versions(), versions, "no slice was written");
        stop(new).await;
        // The files of its sockets are gone.
        until("no driver", || world.registrations(), |instances| instances.is_empty()).await;
    });
}

#[test]
fn claims_are_prepared_and_unprepared_while_instances_follow_each_other_or_die() {
    run(async {
        let world = World::new(2).await;
        let _kubelet = world.node.start_kubelet().await;
        let mut serving = world.start();
        let names = world.until_published(2).await;
        world.until_registered().await;
        let registrations = world.registrations();
        let (stop_load, stopped) = tokio::sync::watch::channel(false);
        let load = async {
            let mut calls = 0;
            while !*stopped.borrow() {
                let (claim, pod) = (format!("claim-{calls}"), format!("pod-{calls}"));
                let claim = world.allocate(&claim, &pod, &names[calls % 2..][..1]);
                world.manager.prepare(&pod, &[claim]).await.unwrap();
                world.manager.unprepare(&pod).await.unwrap();
                calls += 1;
            }
            calls
        };
        let handovers = async {
            for round in 0..ROUNDS {
                let new = world.take_over();
                new.logged("took over from another instance").await;
                // The former one is on standby, and ends one way or the other.
                match round % 2 {
                    0 => serving.signal(Signal::SIGTERM),
                    _ => serving.kill(),
                }
                serving = new;
            }
            stop_load.send_replace(true);
        };
        let (calls, ()) = soon("the load", async { tokio::join!(load, handovers) }).await;
        assert!(calls > 0);
        assert_eq!(world.registrations(), registrations);
        stop(serving).await;
    });
}

#[test]
fn the_kubelet_forgets_the_driver_if_the_next_instance_has_none() {
    run(async {
        let world = World::new(1).await;
        let _kubelet = world.node.start_kubelet().await;
        let old = world.start();
        world.until_published(1).await;
        world.until_registered().await;
        let config = std::fs::read_to_string(world.node.config_file()).unwrap();
        let (before, after) = config.split_once("[dra]\nenabled = true\n").unwrap();
        world.node.write_config(&format!("{before}{}", after.replace("api = \"dra\"\n", "")));
        let new = world.take_over();
        until_taken_over(&new, old).await;
        let registrations = || world.registrations();
        until("no driver", registrations, |instances| instances.is_empty()).await;
        stop(new).await;
    });
}
