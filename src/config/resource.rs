//! Validates one resource: its name, its class and its selection of devices.

use super::api::api;
use super::contract::contract;
use super::error::{hidden, hidden_in};
use super::fragments::{self, Class, LinkType};
use super::hooks::hooks;
use super::path_entries::PathOrGroup;
use super::paths::Paths;
use super::sharing::sharing;
use super::{paths, text};
use crate::domain::{
    DeviceClass, DeviceId, MIG_PROFILE, NODE, PciAddress, PerContainer, PfSelect, ResourceName,
    ResourceSpec, Select,
};

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
    check_class(resource, class, &select)?;
    // If a container, or a resource, has only one device, several hosts may have the same path in
    // the container.
    let is_one = resource.per_container == Some(PerContainer::One) || is_each;
    let Paths { paths, groups, usb } = paths::paths(resource, is_one)?;
    text::environment(&resource.env)?;
    let contract = contract(resource, class, &select)?;
    let api = api(resource, &contract)?;
    let (sharing, per_container) = sharing(resource, &contract)?;
    let hooks = hooks(resource, class, &select, sharing)?;
    Ok(ResourceSpec {
        name,
        api,
        class,
        contract,
        select,
        exclude: resource.exclude.as_ref().map(self::select).transpose()?,
        paths,
        groups,
        usb,
        nodes: paths::nodes(&resource.nodes)?,
        cdi: resource.cdi.clone(),
        sharing,
        per_container,
        placement: resource.placement.unwrap_or_default(),
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
    if class == DeviceClass::Other && !names_ids && !names_one {
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

fn class(class: Class) -> DeviceClass {
    match class {
        Class::Gpu => DeviceClass::Gpu,
        Class::Fpga => DeviceClass::Fpga,
        Class::Rdma => DeviceClass::Rdma,
        Class::Nic => DeviceClass::Nic,
        Class::Nvme => DeviceClass::Nvme,
        Class::Accelerator => DeviceClass::Accelerator,
        Class::Char => DeviceClass::Char,
        Class::Other => DeviceClass::Other,
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
    })
}
