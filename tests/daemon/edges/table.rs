//! All edge cases by number: the tests of each one, or why there is none.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The coverage of an edge case. A test of this folder is named alone, any other with its file.
#[derive(Debug)]
enum Verdict {
    /// These tests cover it.
    Held(&'static [&'static str]),
    /// These tests cover Holdfast's present behaviour; the rest is open.
    Partly(&'static [&'static str], &'static str),
    /// No test: it is open, or it cannot apply to Holdfast today.
    Not(&'static str),
}

use Verdict::{Held, Not, Partly};

const NO_REFUSAL: &str = "the refusal with proof (I2) needs a kubelet that is a minute old, more than a test waits on a real clock: \
                          `src/ledger/core/tests.rs` has its rule, and every run of `src/lab/sim/scenarios` tests it";
const NO_DRA: &str = "there is no DRA front end";
const NO_WATCHER: &str =
    "resources are registered through kubelet.sock only, not through the plugin watcher";

const EDGES: [(u8, &str, Verdict); 44] = [
    (
        1,
        "the late end of the old instance's stream disconnects the new instance",
        Held(&["edge_01_a_new_client_cut_by_the_old_streams_late_end_registers_again"]),
    ),
    (
        2,
        "the late end of a cut stream disconnects its replacement",
        Held(&["edge_02_the_late_end_of_a_cut_stream_disconnects_its_replacement"]),
    ),
    (
        3,
        "a stopped endpoint whose stream is open",
        Held(&["edge_03_an_unreported_stopped_endpoint_is_repaired_by_the_settling_register"]),
    ),
    (
        4,
        "Register succeeds and no stream ever comes",
        Held(&["edge_04_a_register_without_a_stream_is_repeated"]),
    ),
    (
        5,
        "a failing Register makes the kubelet forget the live plugin",
        Held(&[
            "edge_05_a_failed_register_of_our_own_is_followed_by_a_successful_one",
            "edge_05_a_restarted_daemon_replaces_its_dead_client_in_the_kubelet",
        ]),
    ),
    (
        6,
        "Register hangs in the kubelet",
        Partly(
            &["edge_06_a_register_that_hangs_times_out_and_the_next_one_succeeds"],
            "a Register that is given up and fails in the kubelet only after the next one has succeeded takes that one's client from \
             the map of a kubelet up to 1.36; the Register twelve seconds later repairs it; this test does not wait for that, but \
             `src/lab/sim/scenarios`",
        ),
    ),
    (
        7,
        "kubelet.sock exists and no process listens",
        Held(&[
            "edge_07_a_stale_kubelet_socket_is_retried",
            "src/registration/core/tests.rs::an_absent_kubelet_is_tried_quickly_then_slowly",
        ]),
    ),
    (
        8,
        "a starting kubelet removes plugins' sockets",
        Held(&[
            "edge_08_a_starting_kubelet_removes_top_level_sockets_and_not_ours",
            "tests/daemon/lifecycle.rs::a_removed_socket_file_is_replaced",
        ]),
    ),
    (
        9,
        "kubelet.sock mounted into a container as a file goes stale",
        Not(
            "there is no container image yet; on a host the daemon takes the kubelet's directory and refuses a file (tests/daemon/bad_input.rs)",
        ),
    ),
    (
        10,
        "a kubelet in a crash loop",
        Held(&["edge_10_a_kubelet_in_a_crash_loop_has_the_resource_after_its_last_start"]),
    ),
    (
        11,
        "a list without a held device crashes the kubelet",
        Held(&[
            "edge_11_a_held_device_that_is_pulled_stays_listed_and_no_kubelet_crashes",
            "tests/daemon/answers.rs::a_held_device_that_disappears_stays_in_the_list_unhealthy_until_it_is_back",
        ]),
    ),
    (
        12,
        "a device is pulled during its Allocate",
        Held(&["edge_12_a_device_that_is_pulled_during_its_allocate_is_still_listed_after_it"]),
    ),
    (
        13,
        "a listing during an Allocate lets the device be granted twice",
        Partly(
            &[
                "edge_13_both_holders_of_a_device_that_is_granted_twice_are_known",
                "edge_13_no_listing_begins_while_an_allocate_is_under_way",
                "edge_13_no_listing_begins_before_the_kubelet_has_recorded_an_answer",
                "edge_13_a_removed_pod_is_released_without_a_listing",
            ],
            "open: a listing for a pod that has ended and stays may be on its way when the kubelet reserves a device, \
             or begin during an Allocate of another plugin; an id that is granted twice is not refused with proof (I2), both holders are known",
        ),
    ),
    (
        14,
        "a held id is allocated again, rightly",
        Held(&["edge_14_an_init_container_passes_its_devices_to_the_next_container"]),
    ),
    (
        15,
        "several init containers get the same id",
        Held(&["edge_15_several_init_containers_pass_the_same_devices_to_the_next"]),
    ),
    (
        16,
        "a pod is rejected after its Allocate",
        Held(&[
            "edge_16_a_pod_rejected_after_its_allocate_blocks_no_pod_and_is_recorded",
            "src/ledger/core/tests.rs::a_pod_that_is_gone_is_released_at_the_second_listing_five_seconds_on",
        ]),
    ),
    (
        17,
        "the kubelet dies while an Allocate is answered",
        Held(&[
            "edge_17_a_kubelet_that_dies_during_an_allocate_leaves_no_device_blocked",
            "src/ledger/core/tests.rs::a_grant_that_reached_no_checkpoint_was_never_started",
        ]),
    ),
    (
        18,
        "an Allocate that hangs freezes the node",
        Held(&[
            "edge_18_an_allocate_on_a_hanging_disk_ends_with_an_error",
            "edge_18_an_allocate_succeeds_in_spite_of_a_listing_that_hangs",
        ]),
    ),
    (
        19,
        "the kubelet's checkpoint is lost",
        Partly(&["edge_19_a_lost_checkpoint_frees_nothing_in_the_ledger"], NO_REFUSAL),
    ),
    (
        20,
        "after a reboot nothing is allocated",
        Partly(
            &["edge_20_after_a_reboot_pods_are_admitted_with_their_devices"],
            "CDI specs, virtual functions and partitions: Holdfast creates none yet, so nothing has to be recreated",
        ),
    ),
    (
        21,
        "a container starts with the answer of an earlier version",
        Held(&[
            "edge_21_a_container_starts_with_the_answer_of_an_earlier_daemon",
            "src/contract/generic.rs::each_node_comes_once_with_the_configured_environment_and_mounts",
            "src/contract/nvidia.rs::the_gpus_are_named_in_the_order_of_the_request",
        ]),
    ),
    (
        22,
        "a restarted kubelet rejects pods whose devices are not listed in time",
        Held(&[
            "edge_22_the_first_list_after_a_restart_has_every_held_device",
            "tests/daemon/lifecycle.rs::after_a_kubelet_restart_all_devices_are_listed_before_pods_are_admitted",
        ]),
    ),
    (
        23,
        "a young kubelet lists no pods",
        Held(&["edge_23_the_empty_listings_of_a_young_kubelet_release_nothing"]),
    ),
    (
        24,
        "a pod of the same name with another UID",
        Held(&[
            "edge_24_a_pod_of_the_same_name_is_another_pod",
            "src/ledger/core/tests.rs::the_next_pod_of_the_same_name_does_not_keep_the_old_grant",
        ]),
    ),
    (
        25,
        "the devices of a pod that was deleted by force are granted again",
        Partly(
            &["edge_25_a_force_deleted_pod_keeps_its_grant_along_with_the_next_pod"],
            NO_REFUSAL,
        ),
    ),
    (
        26,
        "other clients use up the rate limit of pod-resources",
        Held(&["edge_26_a_refused_listing_is_repeated"]),
    ),
    (
        27,
        "ids that are listed twice, NUMA nodes that do not exist",
        Held(&["edge_27_ids_are_listed_once_and_only_with_existing_numa_nodes"]),
    ),
    (
        28,
        "of several open streams only one is fed",
        Held(&["edge_28_every_open_stream_gets_every_change"]),
    ),
    (
        29,
        "a flapping device makes the kubelet sync its checkpoint for every list",
        Held(&["edge_29_a_flapping_device_makes_few_lists"]),
    ),
    (
        30,
        "a list above 4 MiB ends the stream",
        Held(&["edge_30_a_list_that_is_too_long_for_the_kubelet_is_not_sent"]),
    ),
    (
        31,
        "PreStartContainer is skipped after a restart",
        Held(&["edge_31_nothing_depends_on_pre_start_container"]),
    ),
    (
        32,
        "after five minutes without a plugin containers cannot start again",
        Not(
            "open: nothing warns after three minutes yet; the unit file restarts the daemon after 100 ms, and five minutes of a real clock \
         need virtual time",
        ),
    ),
    (33, "a dip of capacity lets DRA allocate the devices", Not(NO_DRA)),
    (34, "a starting kubelet deletes resource slices", Not(NO_DRA)),
    (35, "one instance prepares a claim, another one unprepares it", Not(NO_DRA)),
    (36, "the end of the old instance's health stream clears the new one's health", Not(NO_DRA)),
    (37, "the plugin watcher's authority is one that h2 refuses", Not(NO_WATCHER)),
    (38, "the plugin watcher takes seconds to notice a socket again", Not(NO_WATCHER)),
    (
        39,
        "inotify does not report the new kubelet",
        Held(&["edge_39_a_kubelet_start_that_inotify_did_not_report_is_found"]),
    ),
    (
        40,
        "the clock jumps, the machine is suspended",
        Held(&[
            "src/ledger/core/tests.rs::a_clock_that_jumps_neither_releases_nor_delays",
            "src/ledger/observe.rs::a_kubelet_settles_a_minute_after_its_start",
            "src/host/clock.rs::boot_time_grows_and_the_boot_has_a_name",
        ]),
    ),
    (
        41,
        "a preferred allocation of another size",
        Held(&[
            "edge_41_the_preferred_allocation_has_the_requested_size_and_the_required_devices",
            "src/serving/placement/tests.rs::the_choice_is_the_best_of_all",
        ]),
    ),
    (42, "many calls at once", Held(&["edge_42_many_calls_at_once_are_all_answered_and_recorded"])),
    (
        43,
        "a socket that is registered twice is refused for ever",
        Held(&["edge_43_no_socket_is_registered_twice"]),
    ),
    (
        44,
        "a kubelet of another version takes over",
        Held(&["edge_44_a_kubelet_of_another_version_may_replace_the_running_one"]),
    ),
];

/// The tests of this folder.
fn tests() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon/edges");
    let texts = fs::read_dir(folder)
        .unwrap()
        .map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let of_text = |text: String| {
        let names = text
            .split("#[test]\nfn ")
            .skip(1)
            .filter_map(|rest| Some(rest.split_once('(')?.0.to_owned()));
        names.filter(|name| name.starts_with("edge_")).collect::<Vec<_>>()
    };
    texts.flat_map(of_text).collect()
}

#[test]
fn every_edge_has_its_tests_or_a_reason_and_every_test_its_edge() {
    let numbers: Vec<u8> = EDGES.iter().map(|(number, ..)| *number).collect();
    assert_eq!(numbers, (1..=44).collect::<Vec<u8>>());
    let (known, mut named) = (tests(), BTreeSet::new());
    for (number, edge, verdict) in &EDGES {
        let (tests, reason) = match verdict {
            Held(tests) => (*tests, None),
            Partly(tests, reason) => (*tests, Some(reason)),
            Not(reason) => (&[][..], Some(reason)),
        };
        assert!(
            !edge.is_empty() && (!tests.is_empty() || matches!(verdict, Not(_))),
            "edge {number} has no test"
        );
        if let Some(reason) = reason {
            println!(
                "{number:>2} {edge}: {}{reason}",
                if tests.is_empty() { "" } else { "in part; " }
            );
        }
        for test in tests {
            if let Some((file, name)) = test.split_once("::") {
                let text =
                    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
                assert!(
                    text.contains(&format!("fn {name}(")),
                    "edge {number}: `{file}` has no test `{name}`"
                );
            } else {
                assert!(
                    test.starts_with(&format!("edge_{number:02}_")) && known.contains(*test),
                    "edge {number}: no test `{test}`"
                );
                assert!(named.insert((*test).to_owned()), "`{test}` is named twice");
            }
        }
    }
    let nameless: Vec<_> = known.difference(&named).collect();
    assert!(nameless.is_empty(), "not in the table: {nameless:?}");
}
