//! What a PCI function is, from its file `modalias` or `uevent` (`pci_uevent` and
//! `modalias_show` of Linux `drivers/pci`).

/// Parses a hexadecimal number, with or without `0x`.
pub(super) fn parse_hex(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    digits
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit())
        .then(|| u32::from_str_radix(digits, 16).ok())
        .flatten()
}

/// What a function is; `None` for values that are empty or missing.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) driver: Option<String>,
    /// Base class, sub-class and programming interface.
    pub(super) class: Option<u32>,
    /// Vendor and device.
    pub(super) id: (Option<u16>, Option<u16>),
    /// The same of the subsystem.
    pub(super) subsystem: (Option<u16>, Option<u16>),
    /// Whether nothing of the file is missing.
    pub(super) is_whole: bool,
}

impl Identity {
    /// Parses `pci:v00008086d00001572sv00008086sd00000001bc02sc00i00`.
    pub(super) fn of_alias(text: &str, driver: Option<String>) -> Option<Self> {
        let mut rest = text.strip_prefix("pci:")?;
        let mut number = |key: &str, digits: usize| {
            let value = rest.strip_prefix(key)?.get(..digits)?;
            rest = rest.get(key.len() + digits..)?;
            parse_hex(value)
        };
        let mut pair = |first, second| {
            let id = [number(first, 8)?, number(second, 8)?];
            Some(id.map(|half| u16::try_from(half).ok()).into())
        };
        let (id, subsystem) = (pair("v", "d")?, pair("sv", "sd")?);
        let [base, sub, interface] = ["bc", "sc", "i"].map(|key| number(key, 2));
        let class = base? << 16 | sub? << 8 | interface?;
        Some(Identity { driver, class: Some(class), id, subsystem, is_whole: true })
    }

    /// Parses the lines `KEY=value` of a `uevent` file. The kernel writes the driver first
    /// (`dev_uevent`) and `MODALIAS` last (`pci_uevent`).
    pub(super) fn of_uevent(text: &str) -> Self {
        let mut identity = Identity::default();
        for (key, value) in text.split('\n').filter_map(|line| line.split_once('=')) {
            let value = Some(value.trim()).filter(|value| !value.is_empty());
            match key {
                "DRIVER" => identity.driver = value.map(str::to_owned),
                "PCI_CLASS" => identity.class = value.and_then(parse_hex),
                "PCI_ID" => identity.id = id_pair(value),
                "PCI_SUBSYS_ID" => identity.subsystem = id_pair(value),
                "MODALIAS" => identity.is_whole = value.is_some(),
                _ => {}
            }
        }
        identity
    }
}

/// Parses `8086:BCCE` of a uevent file.
fn id_pair(text: Option<&str>) -> (Option<u16>, Option<u16>) {
    let part = |digits: &str| u16::try_from(parse_hex(digits)?).ok();
    text.and_then(|text| text.split_once(':'))
        .map_or((None, None), |(vendor, device)| (part(vendor), part(device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_has_what_a_uevent_has() {
        let alias = "pci:v00008086d00001572sv00008086sd00000001bc02sc00i01";
        let uevent = format!(
            "DRIVER=i40e\nPCI_CLASS=20001\nPCI_ID=8086:1572\nPCI_SUBSYS_ID=8086:0001\nMODALIAS={alias}\n"
        );
        let of_uevent = Identity::of_uevent(&uevent);
        assert_eq!(Identity::of_alias(alias, Some("i40e".into())), Some(of_uevent.clone()));
        assert!(of_uevent.is_whole && of_uevent.class == Some(0x02_0001));
        for cut in 0..alias.len() {
            assert_eq!(Identity::of_alias(&alias[..cut], None), None, "{cut}");
        }
        assert_eq!(Identity::of_alias("usb:v1D6Bp0002", None), None);
    }
}
