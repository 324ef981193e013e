//! Kernel uevents: hints that the hardware changed.
//!
//! An event only triggers a rescan of sysfs and is never evidence; the slow poll is authoritative.
//! A pod in a user namespace of its own gets no events at all (kernel `lib/kobject_uevent.c`), so
//! their absence proves nothing.

use super::HostRoot;
use nix::sys::socket::{
    self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, UnixAddr,
};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The fields that are kept: those about a device's health, and those that show that nothing
/// happened to it. An event has at most 2 KiB of fields (`UEVENT_BUFFER_SIZE`), so none of them is
/// long.
const KEPT: [&str; 6] =
    ["DEVICE_ONLINE", "DRIVER", "ERROR_EVENT", "PCI_SLOT_NAME", "SYNTH_UUID", "WEDGED"];

/// One kernel event of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Uevent {
    /// `add`, `remove`, `change`, `bind`, `unbind`, `move`, `online` or `offline`.
    pub action: String,
    /// Path below `/sys`.
    pub devpath: String,
    /// The subsystem, such as `pci` or `drm`.
    pub subsystem: Option<String>,
    /// Its number among all events since boot: a gap shows lost events.
    pub sequence: Option<u64>,
    /// The fields that are kept: `DEVICE_ONLINE`, `DRIVER`, `ERROR_EVENT`, `PCI_SLOT_NAME`,
    /// `SYNTH_UUID`, `WEDGED`.
    pub fields: BTreeMap<&'static str, String>,
}

impl Uevent {
    /// Parses one datagram of the kernel: `ACTION@DEVPATH`, then `KEY=VALUE` fields, each ended by
    /// a NUL.
    ///
    /// `None` for anything else, including udev's own format, which starts with `libudev`.
    #[must_use]
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(datagram).ok()?;
        let mut fields = text.split('\0');
        let (action, devpath) = fields.next()?.split_once('@')?;
        let known = !action.is_empty() && action.bytes().all(|byte| byte.is_ascii_lowercase());
        if !known || !devpath.starts_with('/') {
            return None;
        }
        let mut event =
            Uevent { action: action.into(), devpath: devpath.into(), ..Uevent::default() };
        for (key, value) in fields.filter_map(|field| field.split_once('=')) {
            match key {
                "SUBSYSTEM" => event.subsystem = Some(value.to_owned()),
                "SEQNUM" => event.sequence = value.parse().ok(),
                _ => event.fields.extend(
                    KEPT.iter().find(|kept| **kept == key).map(|kept| (*kept, value.to_owned())),
                ),
            }
        }
        Some(event)
    }

    /// A kept field by its name.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// Whether it can be about hardware that is offered. Every start of a pod causes many events
    /// for its virtual network devices. Every mount of an image causes a few `change` events of a
    /// loop device. These must not cause a scan each. An event with an error always matters.
    #[must_use]
    pub fn may_matter(&self) -> bool {
        if ["ERROR_EVENT", "WEDGED"].iter().any(|name| self.field(name).is_some()) {
            return true;
        }
        let noise = ["bdi", "queues", "net", "workqueue", "memory", "cpu"];
        let is_noise = self.action == "change"
            || self.subsystem.as_deref().is_some_and(|subsystem| noise.contains(&subsystem));
        let is_device = self.devpath.starts_with("/devices/");
        is_device && !(is_noise && self.devpath.starts_with("/devices/virtual/"))
    }
}

/// The socket of a simulated kernel's events, of type `SOCK_SEQPACKET`. Each packet is one datagram
/// of the kernel. Events of this machine are not about a tree.
pub const SIMULATED_EVENTS: &str = "sys/kernel/uevents";

/// The socket of the kernel's events.
#[derive(Debug)]
pub struct UeventSocket {
    fd: AsyncFd<OwnedFd>,
    /// The port of the only trusted sender; a simulated one has none.
    sender: Option<u32>,
}

impl UeventSocket {
    /// Joins the kernel's group (1); group 2 is udev's. For a tree that is not a running machine it
    /// connects to the simulated kernel, if there is one.
    ///
    /// # Errors
    /// If the system refuses the socket; discovery then relies on its poll alone.
    pub fn open(root: &HostRoot) -> io::Result<Option<Self>> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        if root.is_live() {
            let fd = socket::socket(
                AddressFamily::Netlink,
                SockType::Raw,
                flags,
                SockProtocol::NetlinkKObjectUEvent,
            )?;
            socket::bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 1))?;
            // Only the kernel has port 0; any process may send to the group's members.
            return Self::with(fd, Some(0)).map(Some);
        }
        let path = root.path(SIMULATED_EVENTS);
        if !path.exists() {
            return Ok(None);
        }
        let fd = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        socket::connect(fd.as_raw_fd(), &UnixAddr::new(&path)?)?;
        Self::with(fd, None).map(Some)
    }

    fn with(fd: OwnedFd, sender: Option<u32>) -> io::Result<Self> {
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; its requirement, an owned descriptor, is met"
        )]
        let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
        Ok(UeventSocket { fd, sender })
    }

    /// Waits for the next event of the kernel. `None` means that events were lost: the caller must
    /// rescan everything.
    ///
    /// # Errors
    /// If the socket fails permanently.
    pub async fn next(&self) -> io::Result<Option<Uevent>> {
        // A kernel event has at most 2 KiB of environment (UEVENT_BUFFER_SIZE) and its header.
        let mut buffer = [0_u8; 8192];
        loop {
            let received = self
                .fd
                .async_io(Interest::READABLE, |fd| {
                    if self.sender.is_none() {
                        return Ok((
                            socket::recv(fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?,
                            None,
                        ));
                    }
                    let mut parts = [io::IoSliceMut::new(&mut buffer)];
                    let message = socket::recvmsg::<NetlinkAddr>(
                        fd.as_raw_fd(),
                        &mut parts,
                        None,
                        MsgFlags::empty(),
                    )?;
                    Ok((message.bytes, message.address.map(|from| from.pid())))
                })
                .await;
            match received {
                Ok((0, None)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((len, sender)) if sender == self.sender => {
                    if let Some(event) = buffer.get(..len).and_then(Uevent::parse) {
                        return Ok(Some(event));
                    }
                }
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_format_is_read_and_udevs_is_not() {
        let datagram = b"unbind@/devices/pci0000:00/0000:00:04.0\0ACTION=unbind\0DEVPATH=/x\0SUBSYSTEM=pci\0SEQNUM=7\0MODALIAS=pci\0";
        let event = Uevent::parse(datagram).unwrap();
        assert_eq!((event.action.as_str(), event.subsystem.as_deref()), ("unbind", Some("pci")));
        assert_eq!(event.devpath, "/devices/pci0000:00/0000:00:04.0");
        assert_eq!(
            (event.sequence, event.fields.len()),
            (Some(7), 0),
            "unused fields are not kept"
        );
        assert!(event.may_matter());
        let of = |subsystem: &str, action: &str, devpath: &str| Uevent {
            action: action.into(),
            devpath: devpath.into(),
            subsystem: Some(subsystem.into()),
            ..Uevent::default()
        };
        assert!(!of("net", "add", "/devices/virtual/net/veth1").may_matter());
        let disk = |action: &str, devpath: &str| of("block", action, devpath);
        let virtual_disk = "/devices/virtual/block/loop0";
        assert_eq!(
            ["add", "remove", "change"].map(|action| disk(action, virtual_disk).may_matter()),
            [true, true, false]
        );
        assert!(disk("change", "/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1").may_matter());
        for other in [&b"libudev\0\xfe\xed\xca\xfe"[..], b"", b"@/x", b"add@x", b"\xff\xfe@/"] {
            assert_eq!(Uevent::parse(other), None);
        }
    }

    #[test]
    fn an_error_always_matters() {
        let parse = |fields: &str| {
            let text = format!(
                "change@/devices/virtual/drm/card0\0ACTION=change\0SUBSYSTEM=drm\0{fields}\0SEQNUM=many\0"
            );
            Uevent::parse(text.as_bytes()).unwrap()
        };
        assert!(!parse("HOTPLUG=1").may_matter());
        let event = parse("WEDGED=rebind,bus-reset\0PID=7");
        assert!(
            event.may_matter()
                && parse("ERROR_EVENT=FAILED_RECOVERY\0DEVICE_ONLINE=0").may_matter()
        );
        assert_eq!(
            (event.field("WEDGED"), event.field("PID"), event.sequence),
            (Some("rebind,bus-reset"), None, None)
        );
    }
}
