//! A group of paths: the nodes of each of its devices, with the mounts that go with them.

use super::super::draft::Draft;
use super::super::error::ImportError;
use super::super::field::Field;
use super::super::values::{plain, text};
use super::glob::{glob, is_glob};
use super::usb;
use crate::config::tree::{Is, Table, Value};

/// The plugin's default permissions of a container for a node.
const PERMISSIONS: &str = "mrw";

/// A group that can be converted: each match of its only path is a device, or its several paths
/// are one. Each of its USB devices is one too.
pub(super) struct Group {
    /// Entries of `paths`.
    pub(super) paths: Vec<Table>,
    pub(super) mounts: Vec<Table>,
    /// How many containers may share each device.
    pub(super) count: u32,
    /// Whether every match has the same path in the container.
    pub(super) is_one: bool,
    /// The path in the container of each path without a wildcard, with the path on the host.
    pub(super) targets: Vec<(String, String)>,
}

pub(super) fn group_of(
    group: &Field<'_>,
    draft: &mut Draft,
) -> Result<Result<Group, String>, ImportError> {
    let count = group.get("count").map_or(Ok(1), |count| count.number())?.max(1);
    let usb = group.get("usb").filter(Field::has_effect);
    let paths = group.get("paths");
    match (usb, paths) {
        // The plugin refuses to start.
        (Some(_), Some(paths)) if paths.has_effect() => {
            Err(group.wrong("one of `paths` and `usb`"))
        }
        (Some(usb), _) => {
            let paths = usb::entries(&usb, draft)?;
            let (mounts, targets) = (Vec::new(), Vec::new());
            Ok(Ok(Group { paths, mounts, count, is_one: false, targets }))
        }
        (None, Some(paths)) => of_paths(&paths, count, draft),
        (None, None) => Err(group.wrong("`paths` or `usb`")),
    }
}

fn of_paths(
    paths: &Field<'_>,
    count: u32,
    draft: &mut Draft,
) -> Result<Result<Group, String>, ImportError> {
    let (mut nodes, mut mounts): (Vec<Node>, Vec<(Table, u32)>) = (Vec::new(), Vec::new());
    for item in paths.items()? {
        match item.get("type").map(|kind| kind.text()).transpose()?.unwrap_or("Device") {
            "Mount" => match mount(&item, draft)? {
                Ok(mount) => mounts.push(mount),
                Err(why) => return Ok(Err(why)),
            },
            "Device" | "" => match node(&item)? {
                Ok(read) => nodes.push(read),
                Err(why) => return Ok(Err(why)),
            },
            _ => return Err(item.wrong("a path of the `type` Device or Mount")),
        }
    }
    if nodes.len() > 1 {
        let of_group = several(nodes, paths.place(), draft);
        return Ok(of_group.map(|(path, targets)| Group {
            paths: vec![path],
            mounts: mounts.into_iter().map(|(mount, _)| mount).collect(),
            count,
            is_one: false,
            targets,
        }));
    }
    let Some(node) = nodes.into_iter().next() else {
        return Ok(Err(format!("{} has only mounts, and no device", paths.place())));
    };
    let (targets, Node { table, host, container, limit, .. }) = (node.target(), node);
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
    let is_fixed = container.is_some_and(|container| !container.ends_with('/'));
    Ok(Ok(Group {
        paths: vec![table],
        mounts: mounts.into_iter().map(|(mount, _)| mount).collect(),
        count,
        is_one: is_fixed && is_glob(&host),
        targets: targets.into_iter().collect(),
    }))
}

/// Several paths that are one device, with their paths in the container.
fn several(
    mut nodes: Vec<Node>,
    place: String,
    draft: &mut Draft,
) -> Result<(Table, Vec<(String, String)>), String> {
    if let Some(pattern) = nodes.iter().find(|node| is_glob(&node.host)) {
        return Err(format!(
            "{place}: the plugin combines the matches of several paths by their order, so a device \
             may get nodes of different hardware; give each device a group of paths without \
             wildcards, in place of `{}`",
            pattern.host
        ));
    }
    // The first path of a group is the device's identity, so it is never optional.
    match nodes.iter().position(|node| !node.is_optional) {
        Some(required) => nodes[..=required].rotate_right(1),
        None => {
            draft.warn(format!(
                "{place}: every path is `optional`, and the plugin offers the device while one of \
                 them exists; Holdfast offers it while `{}` exists",
                nodes[0].host
            ));
        }
    }
    let targets = nodes.iter().filter_map(Node::target).collect();
    let members =
        nodes.into_iter().enumerate().map(|(index, Node { mut table, is_optional, .. })| {
            if is_optional && index > 0 {
                table.set("optional", plain(true));
            }
            Value { place: None, is: Is::Table(table) }
        });
    let mut group = Table::default();
    group.set("group", Is::List(members.collect()));
    Ok((group, targets))
}

struct Node {
    table: Table,
    host: String,
    container: Option<String>,
    limit: u32,
    is_optional: bool,
}

impl Node {
    /// The path in the container, and on the host; `None` for a wildcard.
    fn target(&self) -> Option<(String, String)> {
        let host = Some(&self.host).filter(|host| !is_glob(host))?;
        let container = match &self.container {
            None => host.clone(),
            Some(folder) if folder.ends_with('/') => {
                format!("{folder}{}", host.rsplit('/').next().unwrap_or(host))
            }
            Some(container) => container.clone(),
        };
        Some((container, host.clone()))
    }
}

fn node(item: &Field<'_>) -> Result<Result<Node, String>, ImportError> {
    let path = path_of(item)?;
    let container = container_of(item)?;
    // Without other paths in its group, a missing node is one device fewer, `optional` or not.
    // `readOnly` has an effect on mounts only.
    let is_optional = item.get("optional").map_or(Ok(false), |optional| optional.truth())?;
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
    Ok(Ok(Node { table, host, container, limit, is_optional }))
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
