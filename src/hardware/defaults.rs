//! The resources without a configuration: known hardware under its vendor's usual name.

use super::{Scan, drm, nvidia, profiles};
use crate::domain::{
    ContractKind, DeviceClass, MigStrategy, PciAddress, PciFunction, ResourceName, ResourceSpec,
    Select,
};
use std::sync::Arc;

/// Name, vendor, driver, and the required value of `vf`: `Some(false)` selects physical functions
/// only.
const KNOWN: [(&str, u16, &str, Option<bool>); 4] = [
    ("nvidia.com/gpu", nvidia::VENDOR, nvidia::DRIVER, Some(false)),
    ("amd.com/gpu", drm::VENDOR_AMD, "amdgpu", None),
    ("gpu.intel.com/i915", drm::VENDOR_INTEL, "i915", None),
    ("gpu.intel.com/xe", drm::VENDOR_INTEL, "xe", None),
];

/// The names of the MIG instances of each profile, as NVIDIA's device plugin has them.
const MIG_NAME: &str = "nvidia.com/mig-{mig_profile}";

/// The configured resources; without any, those for the existing hardware.
#[must_use]
pub fn or_usual(
    configured: &[Arc<ResourceSpec>],
    mig: MigStrategy,
    scan: &Scan,
) -> Vec<Arc<ResourceSpec>> {
    if configured.is_empty() {
        specs(scan, mig).into_iter().map(Arc::new).collect()
    } else {
        configured.to_vec()
    }
}

/// The resources for the existing hardware; empty for a machine without known hardware.
///
/// A card without a driver counts: a container may install the driver long after the start, and
/// then the resource exists already. A card with another driver is meant for another use.
#[must_use]
pub fn specs(scan: &Scan, mig: MigStrategy) -> Vec<ResourceSpec> {
    let mut specs = Vec::new();
    for (name, vendor, driver, vf) in KNOWN {
        let mine = |function: &&PciFunction| {
            function.vendor == Some(vendor)
                && function.driver.as_deref().is_none_or(|bound| bound == driver)
                && match function.class16() {
                    Some(0x0300..=0x03ff) => true,
                    // AMD's Instinct cards; Intel's cards of this class are FPGAs.
                    Some(0x1200) => vendor == drm::VENDOR_AMD,
                    _ => false,
                }
                && vf.is_none_or(|vf| function.is_vf() == vf)
        };
        let (integrated, cards): (Vec<_>, Vec<_>) = scan
            .functions
            .values()
            .filter(mine)
            .partition(|function| is_integrated(function, scan));
        let has_own = scan.is_tegra && vendor == nvidia::VENDOR;
        // Graphics in the processor are offered alone, and left out next to a card: a pod
        // that requests one GPU would get either.
        let has_driver = |function: &&PciFunction| function.driver.is_some();
        let is_there = has_own || !cards.is_empty() || integrated.iter().any(has_driver);
        let named = name.parse().ok().filter(|_| is_there);
        if let Some(spec) = named.and_then(|name| whole(&name, mig)) {
            let integrated: Vec<PciAddress> =
                integrated.iter().map(|function| function.address).collect();
            let exclude = (!cards.is_empty() && !integrated.is_empty())
                .then(|| Select { address: integrated, ..Select::default() });
            let of_each_profile = of_each_profile(&spec, mig);
            specs.push(ResourceSpec { exclude, ..spec });
            specs.extend(of_each_profile);
        }
    }
    specs
}

/// The usual resource of this name, also without its hardware.
#[must_use]
pub fn named(name: &ResourceName, mig: MigStrategy) -> Option<ResourceSpec> {
    let of_each_profile = || {
        let gpus = whole(&KNOWN[0].0.parse().ok()?, mig)?;
        profiles::spec_named(&[Arc::new(of_each_profile(&gpus, mig)?)], name)
    };
    whole(name, mig).or_else(of_each_profile)
}

/// The resource of the MIG instances of each profile, next to that of whole GPUs.
fn of_each_profile(gpus: &ResourceSpec, mig: MigStrategy) -> Option<ResourceSpec> {
    if mig != MigStrategy::Mixed || gpus.name.as_str() != KNOWN[0].0 {
        return None;
    }
    let name = ResourceName::for_each_profile(MIG_NAME).ok()?;
    let select = Select { part: Some(true), ..gpus.select.clone() };
    Some(ResourceSpec { name, select, ..gpus.clone() })
}

/// The resource of this name for whole devices.
fn whole(name: &ResourceName, mig: MigStrategy) -> Option<ResourceSpec> {
    let (_, vendor, driver, vf) = KNOWN.into_iter().find(|(known, ..)| *known == name.as_str())?;
    let is_nvidia = vendor == nvidia::VENDOR;
    let select = Select {
        vendor: vec![vendor],
        driver: vec![driver.to_owned()],
        vf,
        part: (is_nvidia && mig != MigStrategy::Single).then_some(false),
        uniform: is_nvidia && mig == MigStrategy::Single,
        ..Select::default()
    };
    let contract = ContractKind::usual(DeviceClass::Gpu, &select.vendor, &select.driver).into();
    Some(ResourceSpec { contract, select, ..ResourceSpec::new(name.clone(), DeviceClass::Gpu) })
}

/// Intel's integrated graphics is always at 00:02, on the root bus. A virtual machine may have a
/// card there, and a processor has no second device of that kind.
fn is_integrated(function: &PciFunction, scan: &Scan) -> bool {
    // The cards of Linux `include/drm/intel/pciids.h`: PVC, DG1, DG2 and BMG.
    let is_card = |id: u16| matches!(id >> 8, 0x0b | 0x49 | 0x4f | 0x56 | 0xe2);
    let slot = |function: &PciFunction| {
        let PciAddress { domain, bus, device, .. } = function.address;
        (domain, bus, device)
    };
    let is_twin = |other: &PciFunction| {
        (other.vendor, other.device) == (function.vendor, function.device)
            && slot(other) != slot(function)
    };
    function.vendor == Some(drm::VENDOR_INTEL)
        && slot(function) == (0, 0, 2)
        && !function.device.is_some_and(is_card)
        && !(function.device.is_some() && scan.functions.values().any(is_twin))
}

#[cfg(test)]
mod tests {
    use super::super::testing::function;
    use super::*;

    fn gpu(address: &str, vendor: u16, driver: &str) -> PciFunction {
        PciFunction {
            vendor: Some(vendor),
            driver: Some(driver.into()),
            class: Some(0x03_0000),
            ..function(address)
        }
    }

    fn names(functions: Vec<PciFunction>) -> Vec<String> {
        let scan =
            Scan::of(functions.into_iter().map(|function| (function.address, function)).collect());
        specs(&scan, MigStrategy::None).iter().map(|spec| spec.name.to_string()).collect()
    }

    #[test]
    fn only_present_usable_devices_are_offered() {
        assert_eq!(names(vec![]), Vec::<String>::new());
        let unbound = PciFunction { driver: None, ..gpu("0000:00:02.0", 0x8086, "") };
        assert_eq!(
            names(vec![gpu("0000:01:00.0", 0x10de, "nouveau"), unbound]),
            Vec::<String>::new()
        );
        let all = vec![
            gpu("0000:01:00.0", 0x10de, "nvidia"),
            gpu("0000:02:00.0", 0x1002, "amdgpu"),
            gpu("0000:03:00.0", 0x8086, "xe"),
        ];
        assert_eq!(names(all), ["nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe"]);
    }

    #[test]
    fn integrated_graphics_are_offered_alone_and_left_out_next_to_a_card() {
        let alone = gpu("0000:00:02.0", 0x8086, "i915");
        let other = gpu("0000:01:00.0", 0x10de, "nvidia");
        assert_eq!(names(vec![alone.clone()]), ["gpu.intel.com/i915"]);
        assert_eq!(names(vec![alone.clone(), other]), ["nvidia.com/gpu", "gpu.intel.com/i915"]);
        let scan = Scan::of([(alone.address, alone)].into());
        assert_eq!(specs(&scan, MigStrategy::None)[0].exclude, None);
        let functions = [gpu("0000:00:02.0", 0x8086, "i915"), gpu("0000:03:00.0", 0x8086, "i915")];
        let scan = Scan::of(functions.map(|function| (function.address, function)).into());
        let specs = specs(&scan, MigStrategy::None);
        assert_eq!(specs[0].exclude.as_ref().unwrap().address, ["0000:00:02.0".parse().unwrap()]);
    }

    #[test]
    fn a_card_in_the_place_of_integrated_graphics_is_offered() {
        let excluded = |place: &str, ids: [u16; 2]| {
            let of = |address: &str, id| {
                let card = PciFunction { device: Some(id), ..gpu(address, 0x8086, "i915") };
                (card.address, card)
            };
            let scan = Scan::of([of(place, ids[0]), of("0000:00:03.0", ids[1])].into());
            specs(&scan, MigStrategy::None)[0].exclude.is_some()
        };
        assert!(excluded("0000:00:02.0", [0x4680, 0x56c0]), "graphics in the processor");
        assert!(!excluded("0000:00:02.0", [0x56c0, 0x56c1]));
        assert!(!excluded("0000:00:02.0", [0xfff0, 0xfff0]), "two of one later model");
        assert!(!excluded("0001:00:02.0", [0x4680, 0x56c0]), "another domain");
    }
}
