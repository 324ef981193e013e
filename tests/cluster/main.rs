//! Holdfast on a control plane: etcd, the API server, the controller manager, the scheduler, a
//! kubelet and containerd with CDI, all of them real. The subjects are Dynamic Resource Allocation
//! and the DaemonSet.
//!
//! `HOLDFAST_CLUSTER_BIN` names the folder with the binaries (`plane::BINARIES`; Kubernetes 1.34 or
//! newer, containerd 2). Without it each test is skipped with a message. It needs root and the
//! Debian packages `runc busybox-static openssl iproute2`. `HOLDFAST_BIN` names another binary than
//! the one just built, such as a release build: figures are compared with their limits only then.
//! The tests of the DaemonSet also need `containernetworking-plugins python3 dpkg binutils` and the
//! requirements of `packaging/image/build`; that of the chart needs `HOLDFAST_HELM_PYTHON`, a
//! Python with helm-sdkpy. `HOLDFAST_ROLLOUTS`, `HOLDFAST_REBOOTS`, `HOLDFAST_UPGRADES`,
//! `HOLDFAST_PODS` and `HOLDFAST_FLEET` are numbers of rounds.
//!
//! `HOLDFAST_GATES` is the `--feature-gates` of each component of Kubernetes, without which they
//! have the defaults of their version. `AllAlpha=false,AllBeta=false` switches off all features
//! that are not yet generally available. A test of a feature whose gate is off is skipped with a
//! message.
//!
//! The tests of one process share one control plane, which takes half a minute to start. The first
//! one runs this binary again with the same arguments, in mount, network and process namespaces,
//! and there the tests run one after another. The end of the first process there ends all others,
//! and with the namespaces their mounts and addresses end too.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod api;
#[path = "../hardware/captures/archive.rs"]
#[allow(dead_code, reason = "this reads the captures and damages none")]
mod archive;
mod cluster;
mod daemon;
mod daemon_set;
#[path = "../common/exec.rs"]
mod exec;
mod extended;
mod fighting;
mod figures;
mod fleet;
mod hardware;
mod health;
mod holders;
mod many;
mod moving;
mod node;
mod objects;
mod outages;
mod parts;
mod pki;
mod plane;
mod racing;
mod readers;
#[path = "../common/real/mod.rs"]
mod real;
#[path = "../common/recording/mod.rs"]
mod recording;
mod removals;
mod reporting;
mod rights;
mod shares;
mod slices;
mod socket;
mod statuses;
mod timelines;
mod upgrades;
mod vendors;

use cluster::Cluster;
use real::{sandbox, say, shipped, wait_for};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// The folder of the binaries.
const VARIABLE: &str = "HOLDFAST_CLUSTER_BIN";
/// Set inside: the archive of the image, which is built outside, where there is a network.
const IMAGE: &str = "HOLDFAST_IMAGE";
/// Programs that must be on the `PATH` too, and their Debian packages.
const TOOLS: [(&str, &str); 2] = [("openssl", "openssl"), ("ip", "iproute2")];
/// A limit against hanging, long enough for a busy machine and a repeated Prepare.
const SOON: Duration = Duration::from_secs(180);

/// Outside: runs all tests inside, once, and checks the result of this one. Inside: runs it on the
/// control plane.
fn test(name: &str, checks: impl FnOnce(&mut Cluster)) {
    let Some(binaries) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
        return say(format_args!(
            "SKIPPED: {name}: {VARIABLE} is not set, so nothing was tested on a control plane; it names a folder with {}",
            plane::BINARIES.join(", ")
        ));
    };
    match sandbox::work_dir() {
        None => assert!(passed(binaries).contains(name), "it failed inside; its output is above"),
        Some(dir) => {
            checks(&mut Cluster::lend(&dir));
            fs::write(dir.join("passed").join(name), "").unwrap();
        }
    }
}

/// The tests that passed inside.
fn passed(binaries: PathBuf) -> &'static BTreeSet<String> {
    static PASSED: OnceLock<BTreeSet<String>> = OnceLock::new();
    PASSED.get_or_init(|| {
        for binary in plane::BINARIES {
            assert!(
                binaries.join(binary).is_file(),
                "{VARIABLE} names {}, which has no `{binary}`",
                binaries.display()
            );
        }
        let binaries = fs::canonicalize(binaries).unwrap();
        let usual = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(binaries.clone()).chain(std::env::split_paths(&usual));
        let sandbox = sandbox::Sandbox {
            variable: VARIABLE,
            path: std::env::join_paths(path).unwrap(),
            value: binaries,
            tools: &TOOLS,
            has_network: true,
        };
        let built = tempfile::tempdir().unwrap();
        let image = match shipped::missing() {
            None => shipped::image(built.path()),
            Some(_) => None,
        };
        let (dir, has_succeeded) = sandbox.enter(|inside| {
            let same = std::env::args_os().skip(1);
            inside.args(same).envs(image.map(|image| (IMAGE, image)));
            inside.envs([("RUST_TEST_THREADS", "1"), ("RUST_TEST_NOCAPTURE", "1")])
        });
        let names = fs::read_dir(dir.path().join("passed")).into_iter().flatten();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        if !has_succeeded {
            say(format_args!("tests failed; the logs are in {}", dir.keep().display()));
        }
        names
    })
}

/// `HOLDFAST_…`, or the usual number.
fn number(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |text| text.parse().unwrap())
}

/// Defines tests by the function that checks.
macro_rules! tests {
    ($($name:ident: $checks:path,)*) => {
        $(
            #[test]
            fn $name() {
                test(stringify!($name), $checks);
            }
        )*
    };
}

tests! {
    the_slices_of_every_capture_are_accepted_unchanged: slices::are_accepted_unchanged,
    slices_return_after_each_start_of_the_kubelet: slices::return_after_a_wipe,
    a_pod_with_a_claim_sees_its_devices: holders::a_pod_sees_its_devices,
    two_pods_share_a_claim: holders::two_pods_share_a_claim,
    the_next_pod_starts_after_the_end_of_a_forcibly_deleted_one: holders::force_delete,
    a_removed_pod_reads_as_such_at_once: removals::of_both_apis,
    a_pod_deleted_by_force_reads_as_such: removals::by_force,
    a_gpu_and_a_network_function_have_the_same_root: hardware::the_same_root,
    a_claim_has_a_whole_or_other_claims_have_its_parts: parts::a_whole_or_its_parts_run,
    claims_have_parts_of_one_device: shares::parts_of_a_device,
    claims_for_the_drivers_of_vendors_get_devices: vendors::claims_for_their_drivers,
    a_kubelet_may_be_killed_during_prepare: outages::killed_kubelet,
    claims_survive_a_reboot: outages::reboot,
    a_prepare_survives_an_upgrade: upgrades::during_prepare,
    claims_survive_two_minutes_without_the_api_server: outages::no_api_server,
    a_cordoned_device_is_tainted_until_it_is_uncordoned: health::taints,
    a_device_that_is_cordoned_with_eviction_loses_its_pod: health::eviction,
    a_kubelet_may_write_only_slices_of_its_node: rights::kubelet,
    a_service_account_may_write_only_slices_of_its_node: rights::service_account,
    a_failed_device_is_shown_with_the_kubelets_credentials: reporting::kubelet,
    a_failed_device_is_shown_with_the_service_account: reporting::service_account,
    the_status_of_a_claim_has_its_devices: statuses::of_claims,
    pods_of_both_apis_race_for_devices: racing::both_apis,
    a_node_moves_between_the_apis_while_pods_come_and_go: moving::without_policy,
    a_node_moves_between_the_apis_with_aligned_devices: moving::with_policies,
    upgrades_hurt_no_pod_of_either_api: upgrades::under_churn,
    the_daemon_set_of_the_base_gives_pods_their_devices: daemon_set::rollouts::installed,
    rollouts_hurt_no_pod_and_no_device: daemon_set::rollouts::under_churn,
    a_daemon_set_is_deleted_and_made_again: daemon_set::lifecycle::made_again,
    a_config_map_is_edited_in_place: daemon_set::lifecycle::edited,
    a_node_is_drained_and_uncordoned: daemon_set::lifecycle::drained,
    pods_are_evicted: daemon_set::lifecycle::evicted,
    a_node_with_the_daemon_set_reboots: daemon_set::reboots::of_daemon_set,
    a_node_with_the_service_reboots: daemon_set::reboots::of_service,
    the_chart_is_installed_and_upgraded_by_helm: daemon_set::chart::by_helm,
    the_rules_of_pod_security_that_the_pod_does_not_keep_are_documented: daemon_set::security::pod_security,
    each_component_uses_all_its_rights_and_no_others: daemon_set::security::rights_are_used,
    the_api_server_decides_who_reads_metrics: readers::decided,
    a_number_is_served_by_the_plugin_or_by_a_claim: extended::by_plugin_and_by_claim,
    a_number_is_served_by_a_claim_with_aligned_devices: extended::with_policies,
    two_device_plugins_fight_for_one_resource: fighting::two_plugins,
    many_nodes_share_an_api_server: fleet::many_nodes,
    kubectl_holdfast_asks_two_hundred_nodes: many::of_the_plugin,
    the_kubelet_calls_a_driver_as_recorded: timelines::on_the_real,
    prepare_takes_as_long_as_its_parts: figures::prepare,
    the_daemon_stays_small: figures::memory,
}
