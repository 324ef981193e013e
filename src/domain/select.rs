//! The selection of virtual functions and of USB devices in a configuration.

use super::pci::PciAddress;
use std::fmt;
use std::str::FromStr;

/// Some USB devices, by the ids that they report (USB 2.0, 9.6.1; sysfs `idVendor`, `idProduct` and
/// `serial`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsbSelect {
    /// The vendor id.
    pub vendor: u16,
    /// The product id; `None` selects every product of the vendor.
    pub product: Option<u16>,
    /// The serial number; `None` selects devices with any one, or without one.
    pub serial: Option<String>,
}

impl fmt::Display for UsbSelect {
    /// Writes for example `USB 0403:6001 with the serial number A1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.product {
            Some(product) => write!(f, "USB {:04x}:{product:04x}", self.vendor)?,
            None => write!(f, "USB {:04x}:*", self.vendor)?,
        }
        match &self.serial {
            Some(serial) => write!(f, " with the serial number {serial}"),
            None => Ok(()),
        }
    }
}

/// Some virtual functions of a physical function: `ens1f0#0-3,7`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PfSelect {
    /// The physical function.
    pub pf: Pf,
    /// The ranges of its virtual functions, first and last number; empty means all of them.
    pub vfs: Vec<(u32, u32)>,
}

/// The name of a physical function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pf {
    /// One of its network interfaces.
    Interface(String),
    /// Its PCI address.
    Address(PciAddress),
}

/// The text names no virtual functions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` must be the interface or the PCI address of a physical function, and may name its virtual functions, as in \"ens1f0#0-3,7\""
)]
pub struct ParsePfError(pub String);

impl FromStr for PfSelect {
    type Err = ParsePfError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let problem = || ParsePfError(text.to_owned());
        let (pf, vfs) = text.split_once('#').map_or((text, None), |(pf, vfs)| (pf, Some(vfs)));
        let is_interface = !pf.is_empty()
            && !pf.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '#' | ','));
        let address = pf.to_ascii_lowercase().parse().ok();
        let pf = match address {
            Some(address) => Pf::Address(address),
            None if is_interface => Pf::Interface(pf.to_owned()),
            None => return Err(problem()),
        };
        let range = |part: &str| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let range = (from.trim().parse().ok()?, to.trim().parse().ok()?);
            (range.0 <= range.1).then_some(range)
        };
        let ranges = vfs.map(|vfs| vfs.split(',').map(range).collect::<Option<Vec<_>>>());
        match ranges {
            None => Ok(PfSelect { pf, vfs: Vec::new() }),
            Some(Some(vfs)) => Ok(PfSelect { pf, vfs }),
            Some(None) => Err(problem()),
        }
    }
}

impl PfSelect {
    /// Whether the virtual function with this number is selected. An unknown number is selected
    /// only if all are.
    #[must_use]
    pub fn has(&self, vf_index: Option<u32>) -> bool {
        self.vfs.is_empty()
            || vf_index.is_some_and(|index| {
                self.vfs.iter().any(|(from, to)| (*from..=*to).contains(&index))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_functions_are_named_by_the_physical_one_and_their_numbers() {
        let parse = |text: &str| text.parse::<PfSelect>();
        let some = parse("ens1f0#0-3,7").unwrap();
        assert_eq!(some.pf, Pf::Interface("ens1f0".into()));
        let chosen: Vec<u32> = (0..10).filter(|index| some.has(Some(*index))).collect();
        assert_eq!(chosen, [0, 1, 2, 3, 7]);
        assert!(!some.has(None), "a number that is not known is none of these");
        let all = parse("0000:3B:00.0").unwrap();
        assert_eq!(all.pf, Pf::Address("0000:3b:00.0".parse().unwrap()));
        assert!(all.has(Some(400)) && all.has(None));
        for bad in [
            "",
            "#1",
            "ens1f0#",
            "ens1f0#a",
            "ens1f0#3-1",
            "ens1f0#1-",
            "a/b",
            "ens1f0, ens1f1",
            "ens1f0#-1",
            "a#1#2",
        ] {
            assert_eq!(parse(bad), Err(ParsePfError(bad.into())), "{bad}");
        }
    }
}
