//! MIG profiles: the resource that offers the instances of a profile, and whether the devices of a
//! resource are of one kind.

use crate::domain::{Device, DeviceClass, ResourceName, ResourceSpec, Select};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The value of the attribute `part` of a MIG instance.
pub(super) const MIG: &str = "mig";

/// Whether MIG instances of this profile are selected. `+` in the profile also matches `.`, as in
/// the name of its resource.
pub(super) fn is_selected(select: &Select, profile: &str) -> bool {
    let dotted = profile.replace('+', ".");
    let fits = |glob: &String| {
        let glob = glob::Pattern::new(glob);
        glob.is_ok_and(|glob| glob.matches(profile) || glob.matches(&dotted))
    };
    select.mig_profile.is_empty() || select.mig_profile.iter().any(fits)
}

/// The resource of one profile, from a resource with a name for each profile. `None` if that does
/// not select the profile, or if the name would not be valid.
pub(super) fn spec_of(pattern: &ResourceSpec, profile: &str) -> Option<ResourceSpec> {
    let name = pattern.name.of_profile(profile).ok()?;
    let mig_profile = vec![glob::Pattern::escape(&profile.replace('+', "."))];
    is_selected(&pattern.select, profile).then(|| ResourceSpec {
        name,
        select: Select { mig_profile, ..pattern.select.clone() },
        ..pattern.clone()
    })
}

/// The resource of this name, if one of the patterns makes it. The profile is that of the name:
/// NVML need not have returned it.
#[must_use]
pub fn spec_named(patterns: &[Arc<ResourceSpec>], name: &ResourceName) -> Option<ResourceSpec> {
    let spec = |pattern: &Arc<ResourceSpec>| spec_of(pattern, pattern.name.profile_in(name)?);
    patterns.iter().find_map(spec)
}

/// Whether the profile is that of a compute instance that shares its GPU instance with others:
/// `1c.3g.40gb`.
pub(super) fn is_of_a_shared_instance(profile: &str) -> bool {
    profile.split_once('.').is_some_and(|(first, _)| first.ends_with('c'))
}

/// The resources whose devices depend on the profile of a MIG instance that NVML has not returned,
/// each with the reason. Their devices are those of the former scan (I12).
pub(super) fn unknown(
    devices: &[Arc<Device>],
    specs: &[Arc<ResourceSpec>],
) -> BTreeMap<ResourceName, String> {
    let lacks = |device: &&Arc<Device>| {
        device.attribute("part") == Some(MIG) && device.attribute("uuid").is_none()
    };
    let Some(device) = devices.iter().find(lacks) else { return BTreeMap::new() };
    let depends =
        |spec: &&Arc<ResourceSpec>| spec.class == DeviceClass::Gpu && depends(&spec.select);
    let why = format!("NVML has not returned the profile of the MIG instance {}", device.id);
    specs.iter().filter(depends).map(|spec| (spec.name.clone(), why.clone())).collect()
}

fn depends(select: &Select) -> bool {
    !select.mig_profile.is_empty() || select.uniform
}

/// The kind of a MIG instance whose profile NVML has not returned.
const UNKNOWN: &str = "MIG";

/// The kind of a device, for [`Select::uniform`].
fn kind(device: &Device) -> String {
    match (device.attribute("part"), device.attribute("mig_profile")) {
        (None, _) => "whole devices".to_owned(),
        (Some(MIG), Some(profile)) => format!("MIG {profile}"),
        (Some(MIG), None) => UNKNOWN.to_owned(),
        (Some(part), _) => {
            let modes = ["compute_partition", "memory_partition"];
            let modes = modes.iter().filter_map(|mode| device.attribute(mode));
            modes.fold(part.to_owned(), |kind, mode| format!("{kind} {mode}"))
        }
    }
}

/// Why a resource with [`Select::uniform`] offers none of these devices; `None` if they are of one
/// kind.
pub(super) fn mixture<'a>(devices: impl Iterator<Item = &'a Device>) -> Option<String> {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for device in devices {
        *kinds.entry(kind(device)).or_default() += 1;
    }
    let counted = kinds.iter().map(|(kind, count)| format!("{count} × {kind}"));
    let counted = counted.collect::<Vec<_>>().join(", ");
    // A profile that is not known yet may be that of the others.
    if kinds.keys().any(|kind| kind.starts_with("MIG ")) {
        kinds.remove(UNKNOWN);
    }
    (kinds.len() > 1).then_some(counted)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, spec};
    use super::*;

    fn instance(profile: Option<&str>) -> Device {
        let mut device = device("0000:01:00.0", "GPU-1-gi1-ci0");
        device.attributes.insert("part", MIG);
        if let Some(profile) = profile {
            device.attributes.insert("mig_profile", profile);
            device.attributes.insert("uuid", "MIG-1");
        }
        device
    }

    #[test]
    fn a_profile_has_the_resource_name_of_nvidias_plugin() {
        let name = ResourceName::for_each_profile("nvidia.com/mig-{mig_profile}").unwrap();
        let pattern = Arc::new(ResourceSpec::new(name, DeviceClass::Gpu));
        let of = |profile: &str| spec_of(&pattern, profile).unwrap();
        for (profile, expected) in [
            ("1g.10gb", "nvidia.com/mig-1g.10gb"),
            ("1g.10gb+me", "nvidia.com/mig-1g.10gb.me"),
            ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
            ("1g.24gb+gfx", "nvidia.com/mig-1g.24gb.gfx"),
        ] {
            let spec = of(profile);
            assert_eq!(spec.name.as_str(), expected);
            assert!(is_selected(&spec.select, profile));
            assert!(!is_selected(&spec.select, "2g.20gb"), "{profile}");
            // The same resource from its name alone.
            assert_eq!(spec_named(&[Arc::clone(&pattern)], &spec.name), Some(spec), "{profile}");
        }
        assert_eq!(spec_named(&[pattern], &"nvidia.com/gpu".parse().unwrap()), None);
        assert!(is_of_a_shared_instance("1c.3g.40gb") && !is_of_a_shared_instance("3g.40gb"));
    }

    #[test]
    fn devices_of_several_kinds_are_a_mixture() {
        let whole = || device("0000:02:00.0", "GPU-2");
        let mixture = |devices: &[Device]| mixture(devices.iter());
        let (one, other) = (instance(Some("1g.10gb")), instance(Some("1g.10gb+me")));
        assert_eq!(mixture(&[]), None);
        assert_eq!(mixture(&[whole(), whole()]), None);
        assert_eq!(mixture(&[one.clone(), one.clone(), instance(None)]), None);
        let of_two = mixture(&[one.clone(), one.clone(), other]).unwrap();
        assert_eq!(of_two, "2 × MIG 1g.10gb, 1 × MIG 1g.10gb+me");
        assert!(mixture(&[whole(), instance(None)]).is_some());
        assert!(mixture(&[whole(), one]).is_some());
        let partition = |mode| {
            let mut device = device("0000:03:00.0", "GPU-3-partition0");
            device.attributes.extend([("part", "partition"), ("compute_partition", mode)]);
            device
        };
        assert_eq!(mixture(&[partition("cpx"), partition("cpx")]), None);
        let of_two = mixture(&[partition("cpx"), partition("dpx")]).unwrap();
        assert_eq!(of_two, "1 × partition cpx, 1 × partition dpx");
    }

    #[test]
    fn an_unknown_profile_leaves_the_resources_that_depend_on_it_unread() {
        let select = |mig_profile: &[&str], uniform| Select {
            mig_profile: mig_profile.iter().map(ToString::to_string).collect(),
            uniform,
            ..Select::default()
        };
        let specs = [
            spec("a.b/all", DeviceClass::Gpu, select(&[], false)),
            spec("a.b/profile", DeviceClass::Gpu, select(&["1g.10gb"], false)),
            spec("a.b/uniform", DeviceClass::Gpu, select(&[], true)),
        ];
        let unknown = |devices: &[Arc<Device>]| {
            unknown(devices, &specs).into_keys().map(|name| name.to_string()).collect::<Vec<_>>()
        };
        let known = Arc::new(instance(Some("1g.10gb")));
        assert_eq!(unknown(&[Arc::clone(&known)]), Vec::<String>::new());
        assert_eq!(unknown(&[known, Arc::new(instance(None))]), ["a.b/profile", "a.b/uniform"]);
    }
}
