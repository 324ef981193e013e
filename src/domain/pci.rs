//! PCI functions as sysfs shows them: addresses, and the facts that one scan reads of each.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A PCI address, `domain:bus:device.function`.
///
/// The domain has 32 bits: Intel VMD numbers its domains from `10000` on (Linux
/// `drivers/pci/controller/vmd.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI segment, four to eight hex digits in sysfs.
    pub domain: u32,
    /// Bus number. It may change with a reboot or with other cards.
    pub bus: u8,
    /// Device (slot) number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

/// The text is not a PCI address such as `0000:18:00.0`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a PCI address such as `0000:18:00.0`")]
pub struct ParsePciAddressError(pub String);

impl FromStr for PciAddress {
    type Err = ParsePciAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::of_name(text).ok_or_else(|| ParsePciAddressError(text.to_owned()))
    }
}

impl PciAddress {
    /// The address that this name is; `None` for any other name. A scan asks it of every component
    /// of every path, so it allocates nothing.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let (domain, rest) = name.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let hex = |digits: &str, len: std::ops::RangeInclusive<usize>| {
            let digits = Some(digits).filter(|digits| len.contains(&digits.len()))?;
            let value = |byte: u8| char::from(byte).to_digit(16);
            digits.bytes().try_fold(0, |number, byte| Some(number << 4 | value(byte)?))
        };
        let byte = |digits: &str, len: usize| u8::try_from(hex(digits, len..=len)?).ok();
        let address = PciAddress {
            domain: hex(domain, 4..=8)?,
            bus: byte(bus, 2)?,
            device: byte(device, 2)?,
            function: byte(function, 1)?,
        };
        (address.device < 32 && address.function < 8).then_some(address)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl Serialize for PciAddress {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Whether a name is that of a scalable function on the auxiliary bus: driver, `sf` and a number,
/// as in `mlx5_core.sf.4` (Linux `drivers/base/auxiliary.c`, and `sf/dev/dev.c` of mlx5).
#[must_use]
pub fn is_scalable_name(name: &str) -> bool {
    let mut parts = name.split('.');
    let is_number = |id: &str| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit());
    parts.next().is_some_and(|driver| !driver.is_empty())
        && parts.next() == Some("sf")
        && parts.next().is_some_and(is_number)
        && parts.next().is_none()
}

/// One PCI function: the content of `<sys>/bus/pci/devices/<address>/`.
///
/// `None` and an empty list mean "unknown". A missing or unreadable file is never zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciFunction {
    /// The name of its directory in sysfs.
    pub address: PciAddress,
    /// File `vendor`.
    pub vendor: Option<u16>,
    /// File `device`.
    pub device: Option<u16>,
    /// File `subsystem_vendor`.
    pub subsystem_vendor: Option<u16>,
    /// File `subsystem_device`.
    pub subsystem_device: Option<u16>,
    /// File `class`: base class, sub-class and programming interface, 24 bits.
    pub class: Option<u32>,
    /// Last component of the link `driver`; of a capture without `modalias` that of `uevent`.
    pub driver: Option<String>,
    /// Link `physfn`: the physical function that this virtual function belongs to. The record of a
    /// scalable function has the address of the function that it is on, here and in `address`.
    pub physfn: Option<PciAddress>,
    /// Links `virtfn0`, `virtfn1`, …, in the order of their numbers.
    pub virtfns: Vec<PciAddress>,
    /// Its number among the virtual functions of its physical function: that of the link `virtfnN`.
    /// For a scalable function its file `sfnum`.
    pub vf_index: Option<u32>,
    /// File `sriov_totalvfs`.
    pub sriov_totalvfs: Option<u32>,
    /// Last component of the link `iommu_group`. Changes over boots: never an identity.
    pub iommu_group: Option<u32>,
    /// The bridges from the root port down to the one above this function, read from the path of
    /// its directory.
    pub bridges: Vec<PciAddress>,
    /// Network interfaces below it (`net/`), sorted.
    pub net: Vec<String>,
    /// RDMA devices below it (`infiniband/`), sorted.
    pub rdma: Vec<String>,
    /// NVMe controllers below it (`nvme/`), sorted.
    pub nvme: Vec<String>,
    /// DRM nodes below it (`drm/`: `card0`, `renderD128`), sorted, without connectors.
    pub drm: Vec<String>,
    /// Mediated devices below it, by their UUIDs, sorted.
    pub mdevs: Vec<String>,
    /// vDPA devices below it, by their paths in its folder, sorted: `vdpa0`, or
    /// `mlx5_core.sf.4/vdpa1` of a scalable function.
    pub vdpa: Vec<String>,
    /// Scalable functions on it, by their names on the auxiliary bus (`mlx5_core.sf.4`), sorted.
    pub sfs: Vec<String>,
    /// Nodes of userspace I/O below it (`uio/uio0`), sorted.
    pub uio: Vec<String>,
    /// Its own VFIO node (`vfio-dev/vfio0`), for kernels with iommufd.
    pub vfio_dev: Option<String>,
}

impl PciFunction {
    /// A function with an address and no other known facts.
    #[must_use]
    pub fn at(address: PciAddress) -> Self {
        PciFunction {
            address,
            vendor: None,
            device: None,
            subsystem_vendor: None,
            subsystem_device: None,
            class: None,
            driver: None,
            physfn: None,
            virtfns: Vec::new(),
            vf_index: None,
            sriov_totalvfs: None,
            iommu_group: None,
            bridges: Vec::new(),
            net: Vec::new(),
            rdma: Vec::new(),
            nvme: Vec::new(),
            drm: Vec::new(),
            mdevs: Vec::new(),
            vdpa: Vec::new(),
            sfs: Vec::new(),
            uio: Vec::new(),
            vfio_dev: None,
        }
    }

    /// Whether this is an SR-IOV virtual function.
    #[must_use]
    pub fn is_vf(&self) -> bool {
        self.physfn.is_some_and(|pf| pf != self.address)
    }

    /// Whether this is the record of a scalable function.
    #[must_use]
    pub fn is_scalable(&self) -> bool {
        self.physfn == Some(self.address)
    }

    /// The base class and sub-class, 16 bits (`0x0302` is a 3D controller).
    #[must_use]
    pub fn class16(&self) -> Option<u16> {
        self.class.and_then(|class| u16::try_from(class >> 8).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_the_round_trip_also_with_a_vmd_domain() {
        for text in ["0000:18:00.0", "10000:00:04.0", "0000:08:02.3", "ffffffff:ff:1f.7"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        assert_eq!("00000000:08:00.0".parse::<PciAddress>().unwrap().to_string(), "0000:08:00.0");
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "",
            "0000:18:00",
            "000:18:00.0",
            "0000:18:00.8",
            "0000:18:20.0",
            "0000:1g:00.0",
            "0000:18:00.00",
            "+000:18:00.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_scalable_function_has_a_driver_and_a_number() {
        assert!(is_scalable_name("mlx5_core.sf.4"));
        for other in [
            "mlx5_core.eth.4",
            "mlx5_core.sf",
            "mlx5_core.sf.",
            ".sf.4",
            "mlx5_core.sf.4.1",
            "sf.4",
            "a.sf.x",
        ] {
            assert!(!is_scalable_name(other), "{other}");
        }
    }
}
