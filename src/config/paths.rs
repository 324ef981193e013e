//! Validates the paths of a resource: nodes of `/dev` by glob or regular expression, and mounts.

use super::error::hidden;
use super::path_entries::{self as entries, PathOrGroup};
use super::{fragments, text};
use crate::domain::{CharPath, MemberPath, MountSpec, NODE, NodePattern, UsbSelect};
use std::collections::{BTreeMap, BTreeSet};

/// The memory limit of a regular expression: thousands of times the size of one for names.
const REGEX_BYTES_MAX: usize = 256 * 1024;

fn path(path: &entries::Path, is_one: bool) -> Result<CharPath, String> {
    let host = &path.host;
    match host {
        NodePattern::Glob(glob) => self::glob(glob)?,
        NodePattern::Regex(regex) => self::regex(regex)?,
    }
    if let Some(container) = &path.container {
        text::path(container, "paths")?;
    }
    if let Some(container) = path
        .container
        .as_ref()
        .filter(|container| host.literal().is_none() && !container.ends_with('/') && !is_one)
    {
        let (host, container) = (hidden(host), hidden(container));
        return Err(format!(
            "every match of `{host}` would be `{container}` in the container; end a folder with \
             `/`, as in `{container}/`, or set per_container = \"one\""
        ));
    }
    let permissions = path.permissions.clone().unwrap_or_else(|| "rw".into());
    let distinct: BTreeSet<char> = permissions.chars().collect();
    if permissions.is_empty()
        || distinct.len() != permissions.len()
        || !distinct.iter().all(|c| "rwm".contains(*c))
    {
        let permissions = hidden(permissions);
        return Err(format!(
            "the permissions `{permissions}` of `{}` must be some of `r`, `w` and `m` (mknod)",
            hidden(host)
        ));
    }
    let (host, container, udev) = (host.clone(), path.container.clone(), udev(path)?);
    Ok(CharPath { host, container, permissions, udev })
}

/// The properties of udev that the nodes of a path must have.
fn udev(path: &entries::Path) -> Result<Vec<(String, String)>, String> {
    let property = |(key, glob): (&String, &String)| {
        let is_key = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_property = !key.is_empty() && key.chars().all(is_key);
        let file = key.strip_prefix("ATTRS{").and_then(|file| file.strip_suffix('}'));
        let is_below = |file: &str| file.split('/').all(|step| !matches!(step, "" | "." | ".."));
        if !is_property && !file.is_some_and(is_below) {
            return Err(format!(
                "`{}` of `udev` must be a property of udev, such as ID_MODEL, or a file of sysfs, \
                 such as ATTRS{{idVendor}}; `udevadm info -a` shows those of a node",
                hidden(key)
            ));
        }
        match glob::Pattern::new(glob) {
            Ok(_) => Ok((key.clone(), glob.clone())),
            Err(error) => Err(format!(
                "`{}` of `udev.{}` is not a valid glob: {error}",
                hidden(glob),
                hidden(key)
            )),
        }
    };
    path.udev.iter().map(property).collect()
}

fn glob(host: &str) -> Result<(), String> {
    let shown = hidden(host);
    if host.contains(char::is_control) {
        return Err(format!("the path `{shown}` of `paths` contains a control character"));
    }
    let parts = host
        .strip_prefix("/dev/")
        .map(|rest| rest.split('/').any(|part| matches!(part, "" | "." | "..")));
    if parts != Some(false) {
        return Err(format!(
            "the path `{shown}` must begin with `/dev/` and must not contain empty parts, `.` or \
             `..`"
        ));
    }
    glob::Pattern::new(host)
        .map(drop)
        .map_err(|error| format!("the path `{shown}` is not a valid glob: {error}"))
}

fn regex(regex: &str) -> Result<(), String> {
    let shown = hidden(regex);
    if regex.is_empty() || regex.contains(char::is_control) {
        return Err(format!(
            "`regex` is `{shown}`, but must be a regular expression for paths below /dev, such as `^video[0-9]+$`"
        ));
    }
    // The beginning of a host path. A regular expression is matched with the part below /dev.
    if regex.trim_start_matches('^').starts_with("/dev/") {
        return Err(format!(
            "`regex` is `{shown}`, but is matched with paths below /dev; leave out `/dev/`"
        ));
    }
    regex_lite::RegexBuilder::new(regex).size_limit(REGEX_BYTES_MAX).build().map(drop).map_err(
        |error| format!("`regex` is `{shown}`, which is not a valid regular expression: {error}"),
    )
}

/// The devices of a `char` resource.
#[derive(Debug, Default)]
pub(super) struct Paths {
    pub(super) paths: Vec<CharPath>,
    pub(super) groups: Vec<Vec<MemberPath>>,
    pub(super) usb: Vec<UsbSelect>,
}

/// The paths of a resource, its groups, and its USB devices.
pub(super) fn paths(resource: &fragments::Resource, is_one: bool) -> Result<Paths, String> {
    let Paths { mut paths, mut groups, mut usb } = Paths::default();
    for entry in &resource.paths {
        match entry {
            PathOrGroup::Path(path) if path.optional.is_some() => {
                return Err(format!(
                    "`optional` of `{}` belongs to the members of a `group` and to `nodes`; a path \
                     without a node is no device anyway",
                    hidden(&path.host)
                ));
            }
            PathOrGroup::Path(path) if !path.udev.is_empty() && resource.name.contains(NODE) => {
                return Err(format!(
                    "`udev` of `{}` selects nodes after the resources have been made, and `{NODE}` in \
                     the name makes a resource of each node; give them a resource with an ordinary \
                     name",
                    hidden(&path.host)
                ));
            }
            PathOrGroup::Path(path) => paths.push(self::path(path, is_one)?),
            PathOrGroup::Group(members) => groups.push(group(members)?),
            PathOrGroup::Usb(select) => usb.push(self::usb(select)?),
        }
    }
    check_targets(&paths, &groups, is_one)?;
    Ok(Paths { paths, groups, usb })
}

fn usb(usb: &entries::Usb) -> Result<UsbSelect, String> {
    if let Some(serial) = &usb.serial
        && (serial.trim().is_empty() || serial.contains(char::is_control))
    {
        return Err(format!(
            "the `serial` `{}` of `usb` must be the serial number that the device reports; leave \
             it out for any device",
            hidden(serial)
        ));
    }
    Ok(UsbSelect {
        vendor: text::hex_id("vendor", &usb.vendor)?,
        product: usb.product.as_ref().map(|id| text::hex_id("product", id)).transpose()?,
        serial: usb.serial.as_ref().map(|serial| serial.trim().to_owned()),
    })
}

/// The members of a group. Its first member is the device's identity.
fn group(members: &[entries::Path]) -> Result<Vec<MemberPath>, String> {
    let Some(first) = members.first() else {
        return Err("a `group` is empty; give the paths of its nodes".into());
    };
    let shown = hidden(&first.host);
    if let Some(regex) = members.iter().find(|path| matches!(path.host, NodePattern::Regex(_))) {
        return Err(format!(
            "`{}` is a regular expression, but the members of a `group` are paths and globs",
            hidden(&regex.host)
        ));
    }
    if first.host.literal().is_none() {
        return Err(format!(
            "the first member `{shown}` of a `group` must have no wildcard, because the device \
             gets its id from it"
        ));
    }
    if first.optional == Some(true) {
        return Err(format!(
            "the first member `{shown}` of a `group` cannot be `optional`, because the device gets \
             its id from it; begin with a node that is always there"
        ));
    }
    members.iter().map(member).collect()
}

fn member(member: &entries::Path) -> Result<MemberPath, String> {
    let optional = member.optional.unwrap_or_default();
    if !member.udev.is_empty() {
        return Err(format!(
            "`udev` of `{}` belongs to the entries of `paths`, and not to a `group` or to `nodes`",
            hidden(&member.host)
        ));
    }
    Ok(MemberPath { path: path(member, false)?, optional })
}

/// The nodes that go with each device of a resource.
pub(super) fn nodes(nodes: &[entries::Path]) -> Result<Vec<MemberPath>, String> {
    let mut taken = BTreeMap::new();
    for node in nodes {
        let shown = hidden(&node.host);
        if node.host.literal().is_none() {
            return Err(format!(
                "`{shown}` of `nodes` must be the path of one node, without a wildcard; it may have \
                 placeholders such as `{{index}}`"
            ));
        }
        for text in [Some(node.host.to_string()), node.container.clone()].iter().flatten() {
            text::placeholders(text, "nodes")?;
        }
        let host = node.host.to_string();
        if let Some(target) = target(&host, node.container.as_deref())
            && taken.insert(target.clone(), host.clone()).is_some()
        {
            return Err(format!(
                "two of `nodes` would be `{}` in the container; give each its own path",
                hidden(target)
            ));
        }
    }
    nodes.iter().map(member).collect()
}

/// The path in the container of a path without wildcards; `None` for a pattern.
fn target(host: &str, container: Option<&str>) -> Option<String> {
    let host = NodePattern::from(host).literal()?.to_owned();
    Some(match container {
        None => host,
        Some(folder) if folder.ends_with('/') => {
            format!("{folder}{}", host.rsplit('/').next().unwrap_or(&host))
        }
        Some(container) => container.to_owned(),
    })
}

/// Checks that no container would get two hosts at one path. Hosts are compared by name; the
/// matches of a wildcard are not known here. With `is_one` a container gets only one device.
fn check_targets(
    paths: &[CharPath],
    groups: &[Vec<MemberPath>],
    is_one: bool,
) -> Result<(), String> {
    let of_paths = paths.iter().map(std::slice::from_ref).map(|path| path.iter().collect());
    let of_groups = groups.iter().map(|group| group.iter().map(|member| &member.path).collect());
    let devices: Vec<Vec<&CharPath>> = of_paths.chain(of_groups).collect();
    let mut taken: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for (number, device) in devices.iter().enumerate() {
        for path in device {
            let Some(host) = path.host.literal() else { continue };
            let Some(target) = target(host, path.container.as_deref()) else { continue };
            let (owner, first) = *taken.entry(target.clone()).or_insert((number, host));
            let shown = (hidden(first), hidden(host), hidden(target));
            if owner == number && first != host {
                return Err(format!(
                    "`{}` and `{}` of one group would both be `{}` in the container; give each its \
                     own path",
                    shown.0, shown.1, shown.2
                ));
            }
            if first != host && !is_one {
                return Err(format!(
                    "`{}` and `{}` would both be `{}` in the container; give each its own path, or \
                     set per_container = \"one\"",
                    shown.0, shown.1, shown.2
                ));
            }
        }
    }
    Ok(())
}

pub(super) fn mounts(mounts: &[fragments::Mount]) -> Result<Vec<MountSpec>, String> {
    let mut taken = BTreeMap::new();
    for fragments::Mount { host, container, .. } in mounts {
        text::path(host, "mounts")?;
        text::path(container, "mounts")?;
        let place = container.trim_matches('/');
        let (shown, at) = (hidden(host), hidden(container));
        if place.is_empty() {
            return Err(format!(
                "the mount of `{shown}` at `{at}` of `mounts` would hide the container's own files"
            ));
        }
        if let Some(first) = taken.insert(place, host) {
            return Err(format!(
                "`{}` and `{shown}` of `mounts` would both be `{at}` in the container",
                hidden(first)
            ));
        }
    }
    let mount = |mount: &fragments::Mount| MountSpec {
        host: mount.host.clone(),
        container: mount.container.clone(),
        read_only: mount.read_only,
    };
    Ok(mounts.iter().map(mount).collect())
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Examined, Node};
    use std::path::Path;

    fn load(text: &str) -> Result<Config, String> {
        let text = format!("[[resource]]\nname = \"a.b/c\"\n{text}\n");
        Examined::alone(text.as_bytes(), Path::new("f"), &Node::default())
            .config()
            .map_err(|error| error.in_full())
    }

    #[test]
    fn a_group_and_the_nodes_of_each_device_are_read() {
        let config = load(
            "class = \"char\"\npaths = [{ host = \"/dev/a\", udev = { ID_MODEL = \"x*\" } }, { group = [\"/dev/b\", { host = \"/dev/c*\", \
             container = \"/x/\", permissions = \"r\", optional = true }] }]\n\
             nodes = [\"/dev/manager\", { host = \"/dev/ctl{index}\", optional = true }]",
        )
        .unwrap();
        let spec = &config.resources[0];
        let group: Vec<(String, bool)> = spec.groups[0]
            .iter()
            .map(|member| (member.path.host.to_string(), member.optional))
            .collect();
        assert_eq!(group, [("/dev/b".to_owned(), false), ("/dev/c*".to_owned(), true)]);
        assert_eq!(spec.groups[0][1].path.permissions, "r");
        assert_eq!((spec.paths.len(), spec.device_paths().count(), spec.nodes.len()), (1, 3, 2));
        assert_eq!(spec.paths[0].udev, [("ID_MODEL".to_owned(), "x*".to_owned())]);
    }

    #[test]
    fn usb_devices_are_read_by_their_ids() {
        let config = load(
            "class = \"char\"\npaths = [\"/dev/a\", { usb = { vendor = \"0x1A6E\", product = \"89a\" } }, \
             { usb = { vendor = \"403\", serial = \" A1 \" } }]",
        )
        .unwrap();
        let usb: Vec<String> = config.resources[0].usb.iter().map(ToString::to_string).collect();
        assert_eq!(usb, ["USB 1a6e:089a", "USB 0403:* with the serial number A1"]);
        assert_eq!(config.resources[0].paths.len(), 1);
    }

    #[test]
    fn every_mistake_in_usb_devices_and_properties_of_udev_is_one_sentence() {
        let group =
            |members: &str| format!("class = \"char\"\npaths = [{{ group = [{members}] }}]");
        let usb = |keys: &str| format!("class = \"char\"\npaths = [{{ usb = {{ {keys} }} }}]");
        for (text, expected) in [
            (
                "class = \"char\"\npaths = [{ host = \"/dev/a*\", udev = { \"ID-X\" = \"1\" } }]"
                    .into(),
                "`ID-X` of `udev` must be a property of udev, such as ID_MODEL, or a file of sysfs",
            ),
            (
                "class = \"char\"\npaths = [{ host = \"/dev/a*\", udev = { \"ATTRS{../x}\" = \"1\" } }]"
                    .into(),
                "`ATTRS{../x}` of `udev` must be a property of udev",
            ),
            (
                "class = \"char\"\npaths = [{ host = \"/dev/a*\", udev = { ID_MODEL = \"[\" } }]"
                    .into(),
                "`[` of `udev.ID_MODEL` is not a valid glob",
            ),
            (
                group("\"/dev/a\", { host = \"/dev/b\", udev = { ID_MODEL = \"x\" } }"),
                "`udev` of `/dev/b` belongs to the entries of `paths`",
            ),
            (usb("product = \"1\""), "the key `vendor` is missing"),
            (usb("vendor = \"usb\""), "the vendor id `usb` must be up to four hex digits"),
            (usb("vendor = \"1\", product = \"12345\""), "the product id `12345` must be"),
            (usb("vendor = \"1\", serial = \"  \""), "the `serial` `  ` of `usb` must be"),
            (usb("vendor = \"1\", name = \"x\""), "unknown key `name`"),
            (
                "class = \"char\"\npaths = [{ usb = { vendor = \"1\" }, permissions = \"r\" }]"
                    .into(),
                "a table with `usb` has no other key",
            ),
            (
                "class = \"char\"\npaths = [\"/dev/a\"]\nnodes = [{ usb = { vendor = \"1\" } }]"
                    .into(),
                "`usb` cannot be here, only in `paths` itself",
            ),
        ] {
            let error = load(&text).unwrap_err();
            assert!(error.contains(expected), "{error}\nshould contain: {expected}\n{text}");
        }
        let each = "class = \"char\"\npaths = [{ group = [\"/dev/a\"] }]";
        let text = format!("[[resource]]\nname = \"a.b/{{node}}\"\n{each}\n");
        let udev = text.replace("group = [\"/dev/a\"]", "host = \"/dev/a\", udev = { A = \"x\" }");
        let examined = Examined::alone(udev.as_bytes(), Path::new("f"), &Node::default());
        let error = examined.config().unwrap_err().in_full();
        assert!(error.contains("`udev` of `/dev/a` selects nodes after"), "{error}");
        let text = text.replace("group = [\"/dev/a\"]", "usb = { vendor = \"1\" }");
        let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
        let error = examined.config().unwrap_err().in_full();
        assert!(error.contains("the node of a `usb` device has another name"), "{error}");
    }

    #[test]
    fn every_mistake_in_groups_nodes_and_placeholders_is_one_sentence() {
        let group =
            |members: &str| format!("class = \"char\"\npaths = [{{ group = [{members}] }}]");
        for (text, expected) in [
            (group(""), "a `group` is empty"),
            (group("\"/dev/a*\""), "the first member `/dev/a*` of a `group` must have no wildcard"),
            (
                group("{ host = \"/dev/a\", optional = true }"),
                "the first member `/dev/a` of a `group` cannot be `optional`",
            ),
            (group("\"/dev/a\", { regex = \"^b$\" }"), "`^b$` is a regular expression"),
            (group("\"/dev/a\", { group = [] }"), "a `group` cannot be here"),
            (
                group("\"/dev/a\", { host = \"/dev/b\", container = \"/dev/a\" }"),
                "`/dev/a` and `/dev/b` of one group would both be `/dev/a`",
            ),
            (
                group("\"/dev/a\"] }, { group = [\"/dev/b\", { host = \"/dev/c\", container = \"/dev/a\" }"),
                "`/dev/a` and `/dev/c` would both be `/dev/a` in the container",
            ),
            (
                "class = \"char\"\npaths = [{ group = [\"/dev/a\"], permissions = \"r\" }]".into(),
                "a table with `group` has no other key",
            ),
            (
                "class = \"char\"\npaths = [{ host = \"/dev/a\", optional = true }]".into(),
                "`optional` of `/dev/a` belongs to the members of a `group`",
            ),
            (
                "class = \"char\"\npaths = [{ group = [\"/dev/a\"] }]\nnodes = [\"/dev/b*\"]".into(),
                "`/dev/b*` of `nodes` must be the path of one node",
            ),
            (
                "class = \"gpu\"\nnodes = [\"/dev/b{no}\"]".into(),
                "`{no}` of `nodes` is not a placeholder; the known ones are `{id}`, `{address}`",
            ),
            (
                "class = \"gpu\"\nnodes = [\"/dev/b\", { host = \"/dev/c\", container = \"/dev/b\" }]"
                    .into(),
                "two of `nodes` would be `/dev/b` in the container",
            ),
            (
                "class = \"other\"\nselect = { vendor = [\"10de\"] }".into(),
                "the class `other` has every other PCI function",
            ),
            (
                "class = \"gpu\"\nenv = { A = \"{what}\" }".into(),
                "`{what}` of `env.A` is not a placeholder",
            ),
        ] {
            let error = load(&text).unwrap_err();
            assert!(error.contains(expected), "{error}\nshould contain: {expected}\n{text}");
        }
        let each = "class = \"char\"\npaths = [{ group = [\"/dev/a\"] }]";
        let text = format!("[[resource]]\nname = \"a.b/{{node}}\"\n{each}\n");
        let examined = Examined::alone(text.as_bytes(), Path::new("f"), &Node::default());
        let error = examined.config().unwrap_err().in_full();
        assert!(error.contains("a `group` is one device, and `{node}`"), "{error}");
        assert!(load("class = \"gpu\"\nenv = { A = '{\"json\": {}} {{what}}' }").is_ok());
    }
}
