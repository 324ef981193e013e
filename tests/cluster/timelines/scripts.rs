//! The scripts. Each begins and ends without a driver, pods and claims.

use super::Player;
use super::driver::Driver;

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
    script!(a_pod_with_two_claims),
    script!(two_pods_share_a_claim),
    script!(calls_fail),
    script!(the_kubelet_restarts),
    script!(the_kubelet_dies_in_prepare),
    script!(a_pod_is_deleted_without_a_kubelet),
    script!(a_pod_is_deleted_by_force),
    script!(another_process_takes_over),
    script!(the_driver_is_away),
    script!(the_driver_has_other_versions),
];

/// A driver that is registered and whose health the kubelet watches.
fn registered(player: &mut Player<'_>, name: &'static str) -> Driver {
    player.begin("the driver registers");
    let driver = player.driver(name);
    player.end();
    driver
}

/// The driver leaves.
fn over(player: &mut Player<'_>, driver: Driver) {
    player.begin("the driver leaves");
    driver.leave();
    player.end();
    drop(driver);
}

fn create(player: &mut Player<'_>, pod: &str, claims: &[&str]) {
    player.begin(&format!("{pod} is created"));
    player.rig.create(pod, claims);
    player.runs(pod);
    player.end();
}

fn delete(player: &mut Player<'_>, pod: &str) {
    player.begin(&format!("{pod} is deleted"));
    player.rig.delete(pod, false);
    player.is_gone(pod);
    player.end();
}

fn a_pod_with_two_claims(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "plain", &["a", "b"]);
    delete(player, "plain");
    over(player, one);
}

fn two_pods_share_a_claim(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "first", &["shared"]);
    create(player, "second", &["shared", "own"]);
    delete(player, "first");
    delete(player, "second");
    over(player, one);
}

fn calls_fail(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("Prepare fails once");
    one.fail_prepare();
    player.rig.create("plain", &["a"]);
    player.has_failed("plain");
    player.runs("plain");
    player.end();
    player.begin("Unprepare fails once");
    one.fail_unprepare();
    player.rig.delete("plain", false);
    player.is_gone("plain");
    player.end();
    over(player, one);
}

fn the_kubelet_restarts(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "first", &["shared"]);
    player.begin("the kubelet dies");
    player.rig.stop();
    player.end();
    player.begin("the kubelet is back");
    player.rig.start();
    player.runs("first");
    player.end();
    // The kubelet has forgotten that the claim was prepared.
    create(player, "second", &["shared"]);
    delete(player, "first");
    delete(player, "second");
    over(player, one);
}

fn the_kubelet_dies_in_prepare(player: &mut Player<'_>) {
    let one = registered(player, "one");
    player.begin("the kubelet dies in Prepare");
    one.hold(true);
    player.rig.create("plain", &["a"]);
    player.steps.noted("one", "NodePrepareResources a");
    player.rig.stop();
    player.end();
    player.begin("the kubelet is back");
    one.hold(false);
    player.rig.start();
    player.runs("plain");
    player.end();
    delete(player, "plain");
    over(player, one);
}

fn a_pod_is_deleted_without_a_kubelet(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "plain", &["a"]);
    player.begin("the kubelet dies");
    player.rig.stop();
    player.rig.delete("plain", false);
    player.end();
    player.begin("the kubelet is back");
    player.rig.start();
    player.is_gone("plain");
    player.end();
    over(player, one);
}

fn a_pod_is_deleted_by_force(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "plain", &["a"]);
    player.begin("plain is deleted by force");
    player.rig.delete("plain", true);
    player.is_gone("plain");
    player.steps.noted("one", "NodeUnprepareResources a");
    player.end();
    over(player, one);
}

fn another_process_takes_over(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "first", &["a"]);
    player.begin("another process registers");
    let two = player.driver("two");
    player.end();
    create(player, "second", &["b"]);
    player.begin("the first process leaves");
    one.leave();
    player.end();
    drop(one);
    delete(player, "first");
    delete(player, "second");
    over(player, two);
}

fn the_driver_is_away(player: &mut Player<'_>) {
    let one = registered(player, "one");
    create(player, "first", &["a"]);
    player.begin("the driver goes away");
    one.leave();
    player.end();
    drop(one);
    player.begin("a pod needs the driver");
    player.rig.create("second", &["b"]);
    player.has_failed("second");
    player.end();
    player.begin("the driver is back");
    let one = player.driver("one");
    player.runs("second");
    player.end();
    delete(player, "first");
    delete(player, "second");
    over(player, one);
}

fn the_driver_has_other_versions(player: &mut Player<'_>) {
    // It leaves before the kubelet tries again.
    player.begin("a driver without a known version");
    let none = player.driver_of("none", &["v9.DRAPlugin"]);
    player.end();
    none.leave();
    drop(none);
    player.begin("a driver with v1beta1 only");
    let old = player.driver_of("old", &["v1beta1.DRAPlugin"]);
    player.end();
    create(player, "plain", &["a"]);
    delete(player, "plain");
    over(player, old);
}
