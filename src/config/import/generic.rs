//! squat's generic-device-plugin: the YAML of `--config` and of `--device`, as its code parses it.

use super::super::tree::{Is, Table, Value};
use super::doc::{Doc, Scalar};
use super::field::{Decoder, Field};
use super::source::Source;
use super::{Draft, ImportError, plain, resource, set_from, text};

/// The plugin's default permissions of a container for a node.
const PERMISSIONS: &str = "mrw";

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
    let root = source.file.as_ref().map(|file| Field::root(file, Decoder::Viper));
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
    for device in &devices {
        match offer(device, &domain, draft) {
            Ok(Ok(offered)) => draft.offer(offered, device),
            Ok(Err(why)) => {
                device.read_all();
                draft.warn(format!(
                    "{} is left out: {why}",
                    device.place_of(&name_of(device, &domain)?)
                ));
            }
            Err(error) => {
                device.read_all();
                draft.wrong(&device.place(), &error);
            }
        }
    }
    draft.warn(
        "device ids change: drain the node before the change, so that no running pod holds an old \
         id",
    );
    for read in root.iter().chain(&flags) {
        draft.unknown(read, KEYS);
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

/// A group that can be converted: each of its devices is one node.
struct Group {
    path: Table,
    mounts: Vec<Table>,
    /// How many containers may share each node.
    count: u32,
    /// The path in the container, if it is the same for every match.
    one_path: Option<String>,
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
    let mut paths: Vec<&String> =
        offered_groups.iter().filter_map(|group| group.one_path.as_ref()).collect();
    let is_one = offered_groups.iter().any(|group| {
        group.one_path.is_some()
            && group.path.get("host").and_then(Value::as_text).is_some_and(is_glob)
    });
    paths.sort();
    let is_one = is_one || paths.windows(2).any(|pair| pair[0] == pair[1]);
    let list = |tables: Vec<Table>| {
        Is::List(
            tables.into_iter().map(|table| Value { place: None, is: Is::Table(table) }).collect(),
        )
    };
    set_from(
        &mut offered,
        "paths",
        list(offered_groups.into_iter().map(|group| group.path).collect()),
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

fn written(mounts: &[Table]) -> String {
    mounts.iter().map(|mount| super::written(mount, None)).collect()
}

fn group_of(group: &Field<'_>, draft: &mut Draft) -> Result<Result<Group, String>, ImportError> {
    if let Some(usb) = group.get("usb").filter(Field::has_effect) {
        return Ok(Err(format!(
            "{}: devices are not selected by their USB ids; give the node's path, or udev's link to it",
            usb.place()
        )));
    }
    let count = group.get("count").map_or(Ok(1), |count| count.number())?.max(1);
    let paths = group.get("paths").ok_or_else(|| group.wrong("`paths` or `usb`"))?;
    let (mut node, mut mounts): (Option<Node>, Vec<(Table, u32)>) = (None, Vec::new());
    for item in paths.items()? {
        match item.get("type").map(|kind| kind.text()).transpose()?.unwrap_or("Device") {
            "Mount" => match mount(&item, draft)? {
                Ok(mount) => mounts.push(mount),
                Err(why) => return Ok(Err(why)),
            },
            "Device" | "" if node.is_some() => {
                return Ok(Err(format!(
                    "{}: the group has several nodes for each device, and a device has one node \
                     or one folder here",
                    item.place()
                )));
            }
            "Device" | "" => match self::node(&item)? {
                Ok(read) => node = Some(read),
                Err(why) => return Ok(Err(why)),
            },
            _ => return Err(item.wrong("a path of the `type` Device or Mount")),
        }
    }
    let Some(Node { table, host, container, limit }) = node else {
        return Ok(Err(format!("{} has only mounts, and no device", paths.place())));
    };
    // If another path of the group has more matches, a match is used up to `limit` times. A mount
    // has one match.
    match mounts.iter().map(|(_, limit)| *limit).min() {
        Some(least) if is_glob(&host) && least == 1 => {
            return Ok(Err(format!(
                "{}: the plugin gives the mount only to the first match of `{host}`, as its \
                 `limit` is 1; Holdfast has no equivalent",
                paths.place()
            )));
        }
        Some(least) if is_glob(&host) => {
            draft.warn(format!(
                "{}: the plugin offers the first {least} matches of `{host}`, by the `limit` of \
                 the mount; Holdfast offers all",
                paths.place()
            ));
        }
        None if limit > 1 => draft.warn(format!(
            "{}: `limit` has no effect in a group of one path; `count` is the number of \
             containers",
            paths.place()
        )),
        _ => {}
    }
    let one_path = container.filter(|container| !container.ends_with('/'));
    Ok(Ok(Group {
        path: table,
        mounts: mounts.into_iter().map(|(mount, _)| mount).collect(),
        count,
        one_path,
    }))
}

struct Node {
    table: Table,
    host: String,
    container: Option<String>,
    limit: u32,
}

fn node(item: &Field<'_>) -> Result<Result<Node, String>, ImportError> {
    let path = path_of(item)?;
    let container = container_of(item)?;
    // A missing node is one device fewer, `optional` or not. `readOnly` has an effect on mounts
    // only.
    let _optional = item.get("optional").map(|optional| optional.truth()).transpose()?;
    let _read_only = item.get("readOnly").map(|read_only| read_only.truth()).transpose()?;
    let limit = item.get("limit").map_or(Ok(1), |limit| limit.number())?.max(1);
    let permissions = item.get("permissions").map(|permissions| permissions.text()).transpose()?;
    let permissions =
        permissions.filter(|permissions| !permissions.is_empty()).unwrap_or(PERMISSIONS);
    let host = match glob(&path) {
        Ok(host) => host,
        Err(why) => return Ok(Err(format!("{}: `{path}` {why}", item.place()))),
    };
    if !host.starts_with("/dev/") {
        return Ok(Err(format!("{}: `{host}` is not below /dev", item.place())));
    }
    let mut table = Table::default();
    table.set("host", text(&host));
    if let Some(container) = &container {
        table.set("container", text(container));
    }
    table.set("permissions", text(permissions));
    Ok(Ok(Node { table, host, container, limit }))
}

fn mount(item: &Field<'_>, draft: &mut Draft) -> Result<Result<(Table, u32), String>, ImportError> {
    let path = path_of(item)?;
    if is_glob(&path) {
        return Ok(Err(format!(
            "{}: a mount has one path here, and `{path}` may match several",
            item.place()
        )));
    }
    // A folder: the file keeps its name.
    let container = match container_of(item)? {
        None => path.clone(),
        Some(folder) if folder.ends_with('/') => {
            format!("{folder}{}", path.rsplit('/').next().unwrap_or(&path))
        }
        Some(container) => container,
    };
    let read_only = item.get("readOnly").map_or(Ok(false), |read_only| read_only.truth())?;
    let limit = item.get("limit").map_or(Ok(1), |limit| limit.number())?.max(1);
    let _permissions = item.get("permissions").map(|permissions| permissions.text()).transpose()?;
    if !item.get("optional").map_or(Ok(false), |optional| optional.truth())? {
        draft.warn(format!(
            "{}: without `{path}` on the node the plugin offers no device, as it is not \
             `optional`; Holdfast does",
            item.place()
        ));
    }
    let mut mount = Table::default();
    mount.set("host", text(&path));
    mount.set("container", text(&container));
    mount.set("read_only", plain(read_only));
    Ok(Ok((mount, limit)))
}

/// The path, cleaned as Go does.
fn path_of(item: &Field<'_>) -> Result<String, ImportError> {
    let path = item.get("path").ok_or_else(|| item.wrong("a `path`"))?;
    let steps: Vec<&str> =
        path.text()?.trim().split('/').filter(|step| !matches!(*step, "" | ".")).collect();
    Ok(format!("/{}", steps.join("/")))
}

fn container_of(item: &Field<'_>) -> Result<Option<String>, ImportError> {
    let path = item
        .get("mountPath")
        .map(|path| path.text().map(|path| path.trim().to_owned()))
        .transpose()?;
    Ok(path.filter(|path| !path.is_empty()))
}

fn is_glob(path: &str) -> bool {
    path.contains(['*', '?', '['])
}

/// A pattern of Go's path.Match in our syntax, or the reason why that is impossible.
fn glob(pattern: &str) -> Result<String, &'static str> {
    let mut ours = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some(next) = rest.chars().next() {
        rest = &rest[next.len_utf8()..];
        match next {
            // In our syntax two stars also match folders.
            '*' if ours.ends_with('*') => {}
            '\\' => {
                let literal = rest.chars().next().ok_or("is not a pattern")?;
                rest = &rest[literal.len_utf8()..];
                if "*?[".contains(literal) {
                    ours.extend(['[', literal, ']'])
                } else {
                    ours.push(literal)
                }
            }
            '[' => {
                let (class, behind) = rest.split_once(']').ok_or("is not a pattern")?;
                let (not, class) =
                    class.strip_prefix('^').map_or(("", class), |class| ("!", class));
                let is_simple = class.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
                if class.is_empty() || !is_simple || class.starts_with('-') || class.ends_with('-')
                {
                    return Err("is a pattern without an equivalent");
                }
                ours.push_str(&format!("[{not}{class}]"));
                rest = behind;
            }
            other => ours.push(other),
        }
    }
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::{glob, minor_version};

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

    #[test]
    fn a_pattern_of_go_becomes_one_of_ours() {
        for (theirs, ours) in [
            ("/dev/ttyUSB*", Ok("/dev/ttyUSB*")),
            ("/dev/tty**", Ok("/dev/tty*")),
            ("/dev/tty[0-9a-f]?", Ok("/dev/tty[0-9a-f]?")),
            ("/dev/tty[^S]*", Ok("/dev/tty[!S]*")),
            ("/dev/a\\*b\\c", Ok("/dev/a[*]bc")),
            ("/dev/a[", Err(())),
            ("/dev/a[]", Err(())),
            ("/dev/a[b", Err(())),
            ("/dev/a[\\]]", Err(())),
            ("/dev/a\\", Err(())),
        ] {
            assert_eq!(glob(theirs).map_err(|_| ()), ours.map(str::to_owned), "{theirs}");
        }
    }
}
