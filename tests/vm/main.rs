//! Holdfast on a Debian kernel with emulated PCI hardware: virtual functions, slots, errors of PCI
//! Express, NVMe namespaces and their paths, interfaces in other network namespaces, file
//! systems that fail or are full, disks that are slow or have bad sectors, reboots and power cuts.
//!
//! `HOLDFAST_VM_KERNEL` names a folder with an unpacked kernel package. Without it each test is
//! skipped with a message:
//!
//! ```sh
//! apt-get download linux-image-6.12.117+deb12-amd64
//! dpkg -x linux-image-6.12.117+deb12-amd64_*.deb kernel
//! HOLDFAST_VM_KERNEL=kernel cargo test --test vm
//! ```
//!
//! The tests do not need root or KVM: QEMU emulates the processor. It must have the network adapter
//! igb, as version 8 and newer have: on Debian 12 that of bookworm-backports. `hardware::TOOLS` and
//! `image::TOOLS` have the other programs with their Debian packages. `HOLDFAST_BIN` names another
//! binary than the one just built.
//!
//! The tests with the same clock (`hardware::Clock`) share one machine. They run one after the
//! other, about in the order of their names, so that the clock rarely changes. The machine boots
//! an initrd with the daemon, and with this binary: there it is the agent (`guest`), which runs
//! scripts and simulated kubelets. A test starts a node of its own on the machine (`node`), and
//! leaves the hardware as it was. After a test that failed, the next one boots another machine.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod errors;
mod functions;
mod guest;
mod hardware;
mod image;
mod interfaces;
mod machine;
mod namespaces;
mod node;
mod power;
#[path = "../common/real/mod.rs"]
mod real;
mod reboot;
mod sectors;
mod slots;
mod slow;
mod storage;

use hardware::Clock;
use machine::Machine;
use real::{sandbox, say};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The folder of the unpacked kernel package.
const VARIABLE: &str = "HOLDFAST_VM_KERNEL";
/// A limit against hanging for one answer, long enough for an emulated processor on a busy machine.
const SOON: Duration = Duration::from_secs(600);

fn kernel_package() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).map(PathBuf::from)
}

/// Runs the checks on the machine that all tests with this clock share.
fn test(name: &str, clock: Clock, checks: impl FnOnce(&Machine)) {
    static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);
    if kernel_package().is_none() {
        return say(format_args!(
            "SKIPPED: {name}: {VARIABLE} is not set, so nothing was tested on a kernel with emulated hardware; it names a folder that `dpkg -x` unpacked a package linux-image-6.12.…-amd64 into"
        ));
    }
    for (program, package) in image::TOOLS.iter().chain(&hardware::TOOLS) {
        assert!(
            sandbox::find(program).is_some(),
            "{VARIABLE} is set, but `{program}` is missing: apt-get install {package}"
        );
    }
    let mut shared = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    // A test that fails drops the machine.
    let machine = shared.take().filter(|machine| machine.clock() == clock);
    let machine = machine.unwrap_or_else(|| Machine::start(clock));
    let began = Instant::now();
    checks(&machine);
    say(format_args!("{name}: {:.1?}", began.elapsed()));
    *shared = Some(machine);
}

#[test]
#[ignore = "it is the agent in the guest"]
fn agent() {
    if std::env::var_os(guest::VARIABLE).is_some() {
        guest::serve();
    }
}

/// Defines tests by the clock of the machine and the function that checks.
macro_rules! tests {
    ($($name:ident: $clock:ident, $checks:path;)*) => {
        $(
            #[test]
            fn $name() {
                test(stringify!($name), Clock::$clock, $checks);
            }
        )*
    };
}

tests! {
    a_disk_moves_to_another_slot: Leaps, slots::by_the_button;
    a_query_database_has_bad_sectors: Leaps, sectors::of_the_database;
    a_removed_adapter_returns_with_a_rescan: Leaps, slots::by_the_kernel;
    a_fatal_error_of_an_adapter_ends_with_its_reset: Leaps, errors::of_an_adapter;
    a_file_system_fails: Leaps, storage::broken;
    a_file_system_is_full: Leaps, storage::full;
    a_journal_has_bad_sectors: Leaps, sectors::of_the_journal;
    an_interface_is_in_the_namespace_of_its_pod: Leaps, interfaces::of_a_pod;
    a_namespace_of_nvme_comes_and_goes: Leaps, namespaces::come_and_go;
    a_namespace_of_nvme_has_two_paths: Leaps, namespaces::have_two_paths;
    the_node_boots_again: Leaps, reboot::of_the_node;
    virtual_functions_keep_their_ids: Leaps, functions::keep_their_ids;
    virtual_functions_change_their_drivers: Leaps, functions::change_their_drivers;
    with_a_slow_disk_the_daemon_serves: Waits, slow::reads_and_writes;
    with_power_cuts_pods_come_and_go: Waits, power::cuts;
}
