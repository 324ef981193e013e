//! The values of the `uevent` file of a PCI function (`pci_uevent` of Linux
//! `drivers/pci/pci-driver.c`).

/// Parses a hexadecimal number, with or without `0x`.
pub(super) fn parse_hex(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    digits
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit())
        .then(|| u32::from_str_radix(digits, 16).ok())
        .flatten()
}

/// The values of a function's `uevent` file; `None` for those that are empty or missing.
#[derive(Debug, Default)]
pub(super) struct Uevent<'a> {
    /// `DRIVER`.
    pub(super) driver: Option<&'a str>,
    /// `PCI_CLASS`, hexadecimal.
    class: Option<&'a str>,
    /// `PCI_ID`: vendor and device.
    pub(super) id: Option<&'a str>,
    /// `PCI_SUBSYS_ID`.
    pub(super) subsystem: Option<&'a str>,
    /// `MODALIAS`.
    pub(super) modalias: Option<&'a str>,
}

impl<'a> Uevent<'a> {
    /// Parses the lines `KEY=value`.
    pub(super) fn of(text: &'a str) -> Self {
        let mut uevent = Uevent::default();
        for (key, value) in text.split('\n').filter_map(|line| line.split_once('=')) {
            let known = match key {
                "DRIVER" => &mut uevent.driver,
                "PCI_CLASS" => &mut uevent.class,
                "PCI_ID" => &mut uevent.id,
                "PCI_SUBSYS_ID" => &mut uevent.subsystem,
                "MODALIAS" => &mut uevent.modalias,
                _ => continue,
            };
            *known = Some(value.trim()).filter(|value| !value.is_empty());
        }
        uevent
    }

    /// Base class, sub-class and programming interface.
    pub(super) fn class(&self) -> Option<u32> {
        self.class.and_then(parse_hex)
    }
}

/// Parses `8086:BCCE` of a uevent file.
pub(super) fn id_pair(text: Option<&str>) -> (Option<u16>, Option<u16>) {
    let part = |digits: &str| u16::try_from(parse_hex(digits)?).ok();
    text.and_then(|text| text.split_once(':'))
        .map_or((None, None), |(vendor, device)| (part(vendor), part(device)))
}
