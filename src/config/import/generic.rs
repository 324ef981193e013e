//! squat's generic-device-plugin: the YAML of `--config` and of `--device`, as its code parses it.

pub(super) mod glob;
mod group;
mod usb;

pub(super) use self::usb::id_of;

use self::group::{Group, group_of};
use super::super::tree::{Is, Table, Value};
use super::doc::{Doc, Is as Part, Scalar};
use super::draft::Draft;
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, text};
use std::collections::BTreeMap;

/// The plugin's default domain of resources, and the one since version 0.2.
const DOMAIN: &str = "squat.ai";
const NEW_DOMAIN: ((u32, u32), &str) = ((0, 2), "devic.es");

/// Every key that is read.
pub(super) const KEYS: &[&str] = &[
    "domain",
    "devices",
    "devices[].name",
    "devices[].groups",
    "devices[].groups[].count",
    "devices[].groups[].usb",
    "devices[].groups[].usb[].vendor",
    "devices[].groups[].usb[].product",
    "devices[].groups[].usb[].serial",
    "devices[].groups[].paths",
    "devices[].groups[].paths[].path",
    "devices[].groups[].paths[].mountPath",
    "devices[].groups[].paths[].type",
    "devices[].groups[].paths[].permissions",
    "devices[].groups[].paths[].readOnly",
    "devices[].groups[].paths[].limit",
    "devices[].groups[].paths[].optional",
];

pub(super) fn read(
    source: &Source,
    prefix: Option<&str>,
    draft: &mut Draft,
) -> Result<(), ImportError> {
    // The text of a flag, or a list of them, is read as a flag is.
    let decoder = |file: &Doc| match &file.is {
        Part::List(_) => Decoder::JsonOfYaml,
        _ if file.value("groups").is_some() => Decoder::JsonOfYaml,
        _ => Decoder::Viper,
    };
    let root = source.file.as_ref().map(|file| Field::root(file, decoder(file)));
    let flag = source.flags.last(&["domain"], "DOMAIN").map(|flag| flag.field(Decoder::JsonOfYaml));
    let domain = draft.setting(flag, |domain| domain.text().map(str::to_owned));
    let in_file = draft.setting(root.as_ref().and_then(|root| root.get("domain")), |domain| {
        domain.text().map(str::to_owned)
    });
    let given = prefix.map(str::to_owned).or(domain).or(in_file);
    let domain = given.unwrap_or_else(|| match source.image.as_deref().and_then(minor_version) {
        Some(version) if version >= NEW_DOMAIN.0 => NEW_DOMAIN.1.to_owned(),
        Some(_) => DOMAIN.to_owned(),
        None => {
            draft.warn(format!(
                "no domain is given: `{DOMAIN}` is the default before version 0.2, and `{}` since \
                 then; set it with `--prefix`",
                NEW_DOMAIN.1
            ));
            DOMAIN.to_owned()
        }
    });
    for elsewhere in &source.flags.elsewhere {
        if matches!(&*elsewhere.name, "domain" | "DOMAIN") {
            draft.warn(format!(
                "`{}` at {} has no value in the manifest; set it with `--prefix`",
                elsewhere.name, elsewhere.place
            ));
        } else if elsewhere.name == "device" {
            draft.warn(format!(
                "`--device` at {} is left out: its value is not in the manifest",
                elsewhere.place
            ));
        }
    }
    let flags = flags(source, draft);
    let flags: Vec<Field<'_>> =
        flags.iter().map(|(path, doc)| Field::at(doc, Decoder::JsonOfYaml, path)).collect();
    let listed = root.as_ref().map(listed).transpose();
    let devices = match (flags.as_slice(), listed) {
        ([], Ok(Some(devices))) => devices,
        ([], Err(error)) => return Err(error),
        ([], Ok(None)) => {
            return Err(ImportError::new(
                "the container has no `--device` flag, and the input has no file of the plugin; \
                 add its ConfigMap",
            ));
        }
        (flags, listed) => {
            if listed.is_ok_and(|listed| listed.is_some_and(|listed| !listed.is_empty())) {
                draft.warn(
                    "the file's `devices` are left out: the container has `--device` flags, which \
                     override them",
                );
            }
            root.iter().for_each(Field::read_all);
            flags.to_vec()
        }
    };
    offer_all(&devices, &domain, draft)?;
    draft.overlap = Some(("node", may_overlap));
    draft.warn(
        "device ids change: drain the node before the change, so that no running pod holds an old \
         id",
    );
    for read in root.iter().chain(&flags) {
        draft.unknown(read, KEYS);
    }
    Ok(())
}

fn offer_all(devices: &[Field<'_>], domain: &str, draft: &mut Draft) -> Result<(), ImportError> {
    for device in devices {
        match offer(device, domain, draft) {
            Ok(Ok(offered)) => draft.offer(offered, device),
            Ok(Err(why)) => {
                device.read_all();
                draft.warn(format!(
                    "{} is left out: {why}",
                    device.place_of(&name_of(device, domain)?)
                ));
            }
            Err(error) => {
                device.read_all();
                draft.wrong(&device.place(), &error);
            }
        }
    }
    Ok(())
}

/// The version in an image's tag, such as `0.2` of `squat/generic-device-plugin:0.2.0@sha256:…`.
fn minor_version(image: &str) -> Option<(u32, u32)> {
    let (_, tag) = image.split('@').next()?.rsplit('/').next()?.split_once(':')?;
    let mut numbers =
        tag.strip_prefix('v').unwrap_or(tag).split(['.', '-']).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// The contents of the `--device` flags, each parsed as a file of its own.
fn flags(source: &Source, draft: &mut Draft) -> Vec<(String, Doc)> {
    let mut devices = Vec::new();
    for (n, flag) in source.flags.flags.iter().filter(|flag| flag.name == "device").enumerate() {
        let path = format!("--device[{n}]");
        let field = flag.field(Decoder::JsonOfYaml);
        let parsed =
            field.scalar_text().and_then(|Scalar { text, lines, .. }| Doc::parse(text, *lines));
        match parsed.map(|documents| documents.into_iter().next()) {
            Ok(Some(doc)) => devices.push((path, doc)),
            Ok(None) => draft
                .wrong(&format!("`{path}`"), &field.wrong("a device with a `name` and `groups`")),
            Err(error) => draft.wrong(&format!("`{path}`"), &error),
        }
    }
    devices
}

/// The devices of a configuration, or those of one or several flags.
fn listed<'a>(root: &Field<'a>) -> Result<Vec<Field<'a>>, ImportError> {
    if root.is_list() {
        return root.items();
    }
    if let Some(devices) = root.get("devices").or_else(|| root.get("device")) {
        return devices.items();
    }
    if root.get("groups").is_some() {
        Ok(vec![root.clone()])
    } else {
        Err(root.wrong("a configuration with `devices`, or a device with `groups`,"))
    }
}

fn name_of(device: &Field<'_>, domain: &str) -> Result<String, ImportError> {
    let name = device.get("name").ok_or_else(|| device.wrong("a `name` and `groups`"))?;
    Ok(format!("{domain}/{}", name.text()?.trim()))
}

/// The resource, or the reason why it cannot be expressed here.
fn offer(
    device: &Field<'_>,
    domain: &str,
    draft: &mut Draft,
) -> Result<Result<Table, String>, ImportError> {
    let name = name_of(device, domain)?;
    let groups = device.get("groups").ok_or_else(|| device.wrong("a `name` and `groups`"))?;
    let (mut offered_groups, mut left_out): (Vec<Group>, Vec<String>) = (Vec::new(), Vec::new());
    for group in groups.items()? {
        match group_of(&group, draft)? {
            Ok(group) => offered_groups.push(group),
            Err(why) => {
                group.read_all();
                left_out.push(why);
            }
        }
    }
    let Some(first) = offered_groups.first() else {
        return Ok(Err(left_out.into_iter().next().unwrap_or_else(|| "it has no groups".into())));
    };
    if offered_groups.iter().any(|group| group.count != first.count) {
        return Ok(Err(
            "its groups go to different numbers of containers, and a resource has one `replicas`"
                .into(),
        ));
    }
    if offered_groups.iter().any(|group| written(&group.mounts) != written(&first.mounts)) {
        return Ok(Err(
            "its groups have different mounts, and those of a resource go to every container"
                .into(),
        ));
    }
    // A group that is left out does not affect the others: each has its own devices.
    left_out.iter().for_each(|why| draft.warn(format!("a group of {name} is left out: {why}")));
    let mut offered = resource(&name, "char");
    let (count, mounts) = (first.count, first.mounts.clone());
    let mut taken: BTreeMap<&str, &str> = BTreeMap::new();
    let targets = offered_groups.iter().flat_map(|group| &group.targets);
    let is_twice = targets
        .filter(|(target, host)| *taken.entry(target.as_str()).or_insert(host) != host.as_str())
        .count()
        > 0;
    let is_one = is_twice || offered_groups.iter().any(|group| group.is_one);
    let list = |tables: Vec<Table>| {
        Is::List(
            tables.into_iter().map(|table| Value { place: None, is: Is::Table(table) }).collect(),
        )
    };
    set_from(
        &mut offered,
        "paths",
        list(offered_groups.into_iter().flat_map(|group| group.paths).collect()),
        &groups,
    );
    if count > 1 {
        set_from(&mut offered, "replicas", plain(count), &groups);
    }
    if is_one {
        draft.warn(format!(
            "{name}: a container can have only one of these devices here, since all have the same \
             path in it"
        ));
        offered.set("per_container", text("one"));
    }
    if !mounts.is_empty() {
        set_from(&mut offered, "mounts", list(mounts), &groups);
    }
    Ok(Ok(offered))
}

/// Whether a node may match a path of each, by the texts before the first wildcards.
fn may_overlap(one: &Table, other: &Table) -> bool {
    let begins = |short: &str, long: &str| {
        let front = short.split(['*', '?', '[']).next().unwrap_or_default();
        let has_wildcard = front.len() < short.len();
        // A folder is passed with its nodes.
        long.strip_prefix(front)
            .is_some_and(|rest| has_wildcard || rest.is_empty() || rest.starts_with('/'))
    };
    let others = hosts(other);
    hosts(one).iter().any(|one| others.iter().any(|other| begins(one, other) || begins(other, one)))
}

/// The patterns of a resource's nodes.
fn hosts(offered: &Table) -> Vec<&str> {
    let hosts = tables(offered, "paths").flat_map(|path| {
        let nodes = std::iter::once(path).chain(tables(path, "group"));
        nodes.filter_map(|node| node.get("host")?.as_text())
    });
    hosts.collect()
}

fn tables<'a>(table: &'a Table, key: &str) -> impl Iterator<Item = &'a Table> + use<'a> {
    let list = table.get(key).and_then(Value::as_list).unwrap_or_default();
    list.iter().filter_map(Value::as_table)
}

fn written(mounts: &[Table]) -> String {
    mounts.iter().map(|mount| super::written(mount, None)).collect()
}

#[cfg(test)]
mod tests {
    use super::minor_version;

    #[test]
    fn the_version_is_read_from_an_images_tag() {
        for (image, version) in [
            ("squat/generic-device-plugin:0.2.0", Some((0, 2))),
            ("reg.example.org:5000/generic-device-plugin:v0.1-rc1@sha256:0123", Some((0, 1))),
            ("squat/generic-device-plugin:1.12", Some((1, 12))),
            ("squat/generic-device-plugin:latest", None),
            ("squat/generic-device-plugin:36bfc606bba2064de6ede0ff2764cbb52edff70d", None),
            ("reg.example.org:5000/generic-device-plugin", None),
            ("squat/generic-device-plugin@sha256:0123", None),
            ("", None),
        ] {
            assert_eq!(minor_version(image), version, "{image}");
        }
    }
}
