//! What the machine consists of, as QEMU's command line.

use crate::image;
use crate::kernel_package;
use std::fs::File;
use std::process::Command;

/// The programs that run the machine and make its disks, and their Debian packages.
pub(crate) const TOOLS: [(&str, &str); 5] = [
    ("mkfs.btrfs", "btrfs-progs"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("qemu-system-x86_64", "-t bookworm-backports qemu-system-x86"),
    ("setpriv", "util-linux"),
];

/// The slot of a network adapter with virtual functions, by the number of its root port.
pub(crate) const ADAPTER: u8 = 4;
/// Slots that are empty until a device is plugged in, with the names of their buses.
pub(crate) const EMPTY: [(u8, &str); 2] = [(5, "empty-5"), (6, "empty-6")];
/// The slot of an NVMe controller with two namespaces.
pub(crate) const CONTROLLER: u8 = 7;
/// The slot of an NVMe controller whose namespace other controllers may share.
pub(crate) const PATHS: u8 = 8;

/// Disks with a file system: name, size in MiB, and the program that makes the file system.
pub(crate) const DISKS: [(&str, u64, &[&str]); 5] = [
    ("ext4", 128, &["mkfs.ext4", "-q"]),
    ("xfs", 320, &["mkfs.xfs", "-q"]),
    ("btrfs", 128, &["mkfs.btrfs", "-q"]),
    // For errors of the file system itself, which a later mount would report too.
    ("broken", 64, &["mkfs.ext4", "-q"]),
    ("small", 16, &["mkfs.ext4", "-q"]),
];
/// Disks without a file system, of the NVMe controllers.
pub(crate) const NAMESPACES: [&str; 4] = ["first", "second", "shared", "plugged"];

/// The guest's clock. It counts instructions while the guest works, so on a busy host the guest's
/// time passes as slowly as its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// While the guest waits, its clock leaps to its next event: a minute of waiting takes no time.
    /// A slow disk would take very long by this clock.
    Leaps,
    /// While the guest waits, its clock is the host's.
    Waits,
}

/// The first descriptor that QEMU gets: the agent's port. Those of the monitor, the console, the
/// initrd and the disks follow.
pub(crate) const FIRST: i32 = 20;

/// Options that are always the same.
const CONSTANT: [&str; 8] = [
    "-nodefaults -no-user-config -display none -no-reboot",
    // Hot-plug by the slots themselves, as in a server, and not by ACPI.
    "-machine q35 -global ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
    "-accel tcg",
    "-cpu qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+rdrand,+x2apic -smp 1 -m 1536M",
    // Before all devices, which are then below it.
    "-device intel-iommu",
    "-mon chardev=monitor,mode=control -serial chardev:console",
    "-device virtio-serial-pci,bus=pcie.0,addr=0x1d",
    "-netdev user,id=net0,restrict=on",
];
/// What is in the slots, and the port of the agent.
const DEVICES: [&str; 8] = [
    "virtserialport,chardev=agent,name=holdfast.agent",
    "igb,id=igb0,bus=adapter,netdev=net0,mac=52:54:00:00:00:04",
    "nvme,id=nvme0,serial=SLOT7,bus=controller",
    "nvme-ns,drive=first,bus=nvme0,nsid=1",
    "nvme-ns,drive=second,bus=nvme0,nsid=2",
    "nvme-subsys,id=subsystem,nqn=subsystem",
    "nvme,id=nvme1,serial=SLOT8,bus=paths,subsys=subsystem",
    "nvme-ns,drive=shared,bus=nvme1,nsid=1,shared=on",
];
/// The guest's clock counts instructions, each for a nanosecond or two (`-icount`), so its time
/// stamp counter has 1 GHz.
const KERNEL_OPTIONS: &str = "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic intel_iommu=on \
    pcie_ports=native random.trust_cpu=on mitigations=off nokaslr nowatchdog no_timer_check \
    tsc=reliable tsc_early_khz=1000000 rcupdate.rcu_cpu_stall_suppress=1";

/// The command line for a machine with these disks.
pub(crate) fn command(disks: &[(&str, File)], clock: Clock) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    command.args(CONSTANT.iter().flat_map(|line| line.split(' ')));
    let sleep = if clock == Clock::Leaps { "off" } else { "on" };
    command.args(["-icount", &format!("shift=1,sleep={sleep}")]);
    let kernel = image::kernel(&kernel_package().unwrap());
    command.arg("-kernel").arg(kernel).args(["-append", KERNEL_OPTIONS]);
    let fd = |index: usize| format!("/proc/self/fd/{}", FIRST + i32::try_from(index).unwrap());
    command.args(["-chardev", &format!("socket,id=agent,fd={FIRST}")]);
    command.args(["-chardev", &format!("socket,id=monitor,fd={}", FIRST + 1)]);
    command.args(["-chardev", &format!("file,id=console,path={}", fd(2))]);
    command.args(["-initrd", &fd(3)]);
    let mut devices = Vec::new();
    for (index, (name, _)) in disks.iter().enumerate() {
        let drive = format!("file={},if=none,id={name},format=raw,cache=unsafe", fd(4 + index));
        command.args(["-drive", &drive]);
        if !NAMESPACES.contains(name) {
            devices.push(format!(
                "virtio-blk-pci,bus=pcie.0,addr={:#x},drive={name},id=disk-{name},serial={name}",
                0x10 + index
            ));
        }
    }
    let slots =
        [(ADAPTER, "adapter"), EMPTY[0], EMPTY[1], (CONTROLLER, "controller"), (PATHS, "paths")];
    devices.extend(slots.map(|(slot, bus)| {
        format!("pcie-root-port,id={bus},bus=pcie.0,chassis={slot},slot={slot},addr={slot}")
    }));
    devices.extend(DEVICES.map(str::to_owned));
    for device in devices {
        command.args(["-device", &device]);
    }
    command
}
