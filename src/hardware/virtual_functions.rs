//! Virtual functions, and the physical functions that they belong to (Linux `drivers/pci/iov.c`).

use crate::domain::{Device, PciAddress, PciFunction};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The virtual functions that a physical function names, with their numbers.
pub(super) type Numbered = Vec<(u32, PciAddress)>;

/// The links `virtfn0`, `virtfn1`, … sorted by number, which is not the order of their names.
pub(super) fn virtfns<'a>(
    entries: impl Iterator<Item = &'a str>,
    link: &dyn Fn(&str) -> Option<String>,
) -> Numbered {
    let mut numbered: Numbered = entries
        .filter_map(|entry| {
            Some((entry.strip_prefix("virtfn")?.parse().ok()?, link(entry)?.parse().ok()?))
        })
        .collect();
    numbered.sort();
    numbered
}

/// Numbers the virtual functions by the links of their physical function. While they are created,
/// its `virtfn` links exist before their own `physfn` links, so its links are enough.
pub(super) fn number_vfs(
    functions: &mut BTreeMap<PciAddress, PciFunction>,
    claims: Vec<(PciAddress, u32, PciAddress)>,
) {
    for (pf, index, vf) in claims {
        let function = functions
            .get_mut(&vf)
            .filter(|function| vf != pf && function.physfn.is_none_or(|known| known == pf));
        if let Some(function) = function {
            function.physfn = Some(pf);
            function.vf_index = Some(index);
        }
    }
}

/// Keeps as virtual what was a virtual function of a physical one that is still present.
pub(super) fn keep_vfs(functions: &mut BTreeMap<PciAddress, PciFunction>, former: &[Arc<Device>]) {
    let known = former.iter().filter_map(|device| device.pci.as_deref());
    for known in known.filter(|function| function.is_vf()) {
        let Some(pf) = known.physfn.filter(|pf| functions.contains_key(pf)) else { continue };
        if let Some(function) = functions.get_mut(&known.address)
            && function.physfn.is_none()
        {
            (function.physfn, function.vf_index) = (Some(pf), known.vf_index);
        }
    }
}
