//! Validates one resource: its name, its class and its selection of devices.

use super::api::{api, capacity};
use super::contract::contract;
use super::error::{hidden, hidden_in, unknown};
use super::fragments::{self, Class, LinkType};
use super::hooks::hooks;
use super::path_entries::PathOrGroup;
use super::paths::Paths;
use super::sharing::sharing;
use super::{paths, text};
use crate::domain::{
    DeviceClass, DeviceId, MIG_PROFILE, NODE, PciAddress, PerContainer, PfSelect, ResourceName,
    ResourceSpec, SELECTABLE, Scope, Select,
};
use std::collections::BTreeMap;

pub(super) fn spec(resource: &fragments::Resource) -> Result<ResourceSpec, String> {
    let is_each = resource.name.contains(NODE);
    let name = if is_each {
        ResourceName::for_each_node(&resource.name)
    } else if resource.name.contains(MIG_PROFILE) {
        ResourceName::for_each_profile(&resource.name)
    } else {
        resource.name.parse()
    };
    let name = name.map_err(|error| hidden_in(&error.to_string(), &resource.name))?;
    let class = class(resource.class);
    let select = select(&resource.select)?;
    let or = resource.or.iter().map(self::select).collect::<Result<Vec<_>, _>>()?;
    for each in std::iter::once(&select).chain(&or) {
        check_class(resource, class, each)?;
    }
    check_or(class, &select, &or)?;
    // If a container, or a resource, has only one device, several hosts may have the same path in
    // the container.
    let is_one = resource.per_container == Some(PerContainer::One) || is_each;
    let Paths { paths, groups, usb } = paths::paths(resource, is_one)?;
    text::environment(&resource.env)?;
    let contract = contract(resource, class, &select, &or)?;
    let api = api(resource, &contract)?;
    let (sharing, per_container) = sharing(resource, &contract)?;
    let capacity = capacity(resource, api, sharing)?;
    let hooks = hooks(resource, class, &select, sharing)?;
    Ok(ResourceSpec {
        name,
        api,
        class,
        scope: match resource.class {
            Class::Network => Scope::Network,
            Class::Pci => Scope::Pci,
            _ => Scope::Class,
        },
        contract,
        select,
        or,
        exclude: resource.exclude.as_ref().map(self::select).transpose()?,
        paths,
        groups,
        usb,
        nodes: paths::nodes(&resource.nodes)?,
        cdi: resource.cdi.clone(),
        sharing,
        capacity,
        per_container,
        placement: resource.placement.unwrap_or_default(),
        topology: resource.topology.unwrap_or(true),
        env: resource.env.clone(),
        mounts: paths::mounts(&resource.mounts)?,
        hooks,
    })
}

/// Checks that the class `char` has paths, that only it has them, and that `other` names its
/// devices.
fn check_class(
    resource: &fragments::Resource,
    class: DeviceClass,
    select: &Select,
) -> Result<(), String> {
    let is_char = class == DeviceClass::Char;
    if resource.name.contains(NODE) && !is_char {
        return Err(format!("`{NODE}` in the name is for the class `char`, not for `{class}`"));
    }
    if resource.name.contains(MIG_PROFILE) && class != DeviceClass::Gpu {
        return Err(format!(
            "`{MIG_PROFILE}` in the name is for the class `gpu`, not for `{class}`"
        ));
    }
    if is_char && resource.paths.is_empty() {
        return Err("the class `char` needs `paths`, such as paths = [\"/dev/fuse\"]".into());
    }
    let is_usb = |entry: &PathOrGroup| matches!(entry, PathOrGroup::Usb(_));
    if resource.name.contains(NODE) && resource.paths.iter().any(is_usb) {
        return Err(format!(
            "the node of a `usb` device has another name each time it is plugged in, and `{NODE}` \
             in the name makes a resource of each node; give the devices a resource with an \
             ordinary name"
        ));
    }
    let is_group = |entry: &PathOrGroup| matches!(entry, PathOrGroup::Group(_));
    if resource.name.contains(NODE) && resource.paths.iter().any(is_group) {
        return Err(format!(
            "a `group` is one device, and `{NODE}` in the name makes a resource of each node; give \
             the group a resource with an ordinary name"
        ));
    }
    if !is_char && !resource.paths.is_empty() {
        return Err(format!("`paths` belongs to the class `char`, not to `{class}`; use `select`"));
    }
    let names_ids = !select.vendor.is_empty() && !select.device.is_empty();
    let names_one = !select.address.is_empty() || !select.id.is_empty();
    let names_type = !select.mdev_type.is_empty();
    if resource.class == Class::Pci && !names_ids && !names_one && !names_type {
        return Err(
            "the class `pci` has every PCI function; select some by `vendor` and `device`, \
                    by `address`, by `id` or by `mdev_type`"
                .into(),
        );
    }
    if resource.class == Class::Other && !names_ids && !names_one {
        return Err("the class `other` has every other PCI function, such as bridges and host \
                    controllers; select some by `vendor` and `device`, by `address` or by `id`"
            .into());
    }
    if is_char && *select != (Select { id: select.id.clone(), ..Select::default() }) {
        return Err(
            "the class `char` is selected by `paths`; its `select` supports only `id`".into()
        );
    }
    Ok(())
}

/// Each selection must limit the devices. MIG's keys decide about all devices of the resource, so
/// only `select` has them.
fn check_or(class: DeviceClass, select: &Select, or: &[Select]) -> Result<(), String> {
    if or.is_empty() {
        return Ok(());
    }
    if class == DeviceClass::Char {
        return Err("`or` is not for the class `char`; list the nodes in `paths`".into());
    }
    if std::iter::once(select).chain(or).any(|each| *each == Select::default()) {
        return Err("`or` adds to the devices of `select`, but one of them is empty and selects \
                    every device; remove `or`, or name devices in each"
            .into());
    }
    let decides = |select: &&Select| select.uniform || !select.mig_profile.is_empty();
    if or.iter().any(|select| decides(&select)) {
        return Err("`uniform` and `mig_profile` are for `select`, not for `or`".into());
    }
    Ok(())
}

fn class(class: Class) -> DeviceClass {
    match class {
        Class::Gpu => DeviceClass::Gpu,
        Class::Fpga => DeviceClass::Fpga,
        Class::Rdma => DeviceClass::Rdma,
        Class::Nic | Class::Network => DeviceClass::Nic,
        Class::Nvme => DeviceClass::Nvme,
        Class::Accelerator => DeviceClass::Accelerator,
        Class::Char => DeviceClass::Char,
        Class::Other | Class::Pci => DeviceClass::Other,
    }
}

fn select(fragment: &fragments::Select) -> Result<Select, String> {
    let hex = |what: &'static str| move |text: &String| text::hex_id(what, text);
    let address = |text: &String| {
        let text = text.to_ascii_lowercase();
        text.parse::<PciAddress>().map_err(|error| hidden_in(&error.to_string(), &text))
    };
    let pf = |text: &String| {
        text.parse::<PfSelect>().map_err(|error| hidden_in(&error.to_string(), text))
    };
    let link_type = |kind: &LinkType| match kind {
        LinkType::Ether => "ether".to_owned(),
        LinkType::Infiniband => "infiniband".to_owned(),
    };
    let glob = |what: &'static str| {
        move |text: &String| match glob::Pattern::new(text) {
            Ok(_) => Ok(text.clone()),
            Err(error) => {
                Err(format!("the {what} `{}` is not a valid glob: {error}", hidden(text)))
            }
        }
    };
    Ok(Select {
        vendor: fragment.vendor.iter().map(hex("vendor")).collect::<Result<_, _>>()?,
        device: fragment.device.iter().map(hex("device")).collect::<Result<_, _>>()?,
        driver: fragment.driver.clone(),
        address: fragment.address.iter().map(address).collect::<Result<_, _>>()?,
        vf: fragment.vf,
        id: fragment.id.iter().map(DeviceId::new).collect(),
        pf: fragment.pf.iter().map(pf).collect::<Result<_, _>>()?,
        link_type: fragment.link_type.iter().map(link_type).collect(),
        model: fragment.model.iter().map(glob("model")).collect::<Result<_, _>>()?,
        uuid: fragment.uuid.clone(),
        numa_node: fragment.numa_node.clone(),
        iommu_group: fragment.iommu_group.clone(),
        mdev_type: fragment.mdev_type.clone(),
        mig_profile: fragment
            .mig_profile
            .iter()
            .map(glob("MIG profile"))
            .collect::<Result<_, _>>()?,
        uniform: fragment.uniform,
        part: fragment.part,
        interface: fragment.interface.clone(),
        attribute: attribute(&fragment.attribute)?,
    })
}

/// The globs over attributes, whose names must be known.
fn attribute(
    globs: &BTreeMap<String, Vec<String>>,
) -> Result<BTreeMap<String, Vec<String>>, String> {
    for (name, globs) in globs {
        if !SELECTABLE.contains(&name.as_str()) {
            return Err(unknown("attribute", name, &SELECTABLE));
        }
        if let Some(glob) = globs.iter().find(|glob| glob::Pattern::new(glob).is_err()) {
            return Err(format!("the {name} `{}` is not a valid glob", hidden(glob)));
        }
    }
    Ok(globs.clone())
}
