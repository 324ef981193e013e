//! squat's generic-device-plugin: the YAML of `--config`, as its code parses it.

use super::super::tree::{Is, Table, Value};
use super::doc::Field;
use super::{Draft, ImportError, plain, resource, text};

/// What the plugin lets a container do with a node unless the file says otherwise.
const PERMISSIONS: &str = "mrw";

pub(super) fn read(root: &Field<'_>, prefix: Option<&str>, draft: &mut Draft) -> Result<(), ImportError> {
    let said = root.get("domain").map(|domain| domain.text()).transpose()?;
    let domain = prefix.or(said).unwrap_or("squat.ai");
    let devices = root.get("devices").ok_or_else(|| root.wrong("a configuration with `devices`"))?;
    for device in devices.items()? {
        let name = device.get("name").ok_or_else(|| device.wrong("a `name` and `groups`"))?.text()?;
        let groups = device.get("groups").ok_or_else(|| device.wrong("a `name` and `groups`"))?;
        match groups_of(&groups)? {
            Ok(groups) => draft.resources.push(offer(&format!("{domain}/{name}"), groups)),
            Err(why) => {
                device.read_all();
                draft.warn(format!("`{}` ({domain}/{name}) is left out: {why}", device.path));
            }
        }
    }
    draft.warn("ids are others here: drain the node before the change, so that no running pod holds one that is gone");
    Ok(())
}

struct Group {
    path: Table,
    mounts: Vec<Value>,
    /// How many containers may have each node.
    count: u32,
}

/// The groups of a device, or why they cannot be said here.
fn groups_of(groups: &Field<'_>) -> Result<Result<Vec<Group>, String>, ImportError> {
    let mut told = Vec::new();
    for group in groups.items()? {
        if group.get("usb").filter(Field::says_something).is_some() {
            return Ok(Err(format!(
                "`{}.usb`: devices are not selected by their USB ids; give the node's path, or udev's link to it",
                group.path
            )));
        }
        let count = group.get("count").map_or(Ok(1), |count| count.number())?;
        let paths = group.get("paths").ok_or_else(|| group.wrong("`paths` or `usb`"))?;
        match group_of(&paths, count)? {
            Ok(group) => told.push(group),
            Err(why) => return Ok(Err(why)),
        }
    }
    if told.is_empty() {
        return Ok(Err("it has no groups".into()));
    }
    if told.iter().any(|group| group.count != told[0].count) {
        return Ok(Err("its groups go to different numbers of containers, and a resource has one `replicas`".into()));
    }
    Ok(Ok(told))
}

fn group_of(paths: &Field<'_>, count: u32) -> Result<Result<Group, String>, ImportError> {
    let (mut node, mut mounts, mut limit) = (None, Vec::new(), 1);
    for item in paths.items()? {
        let path = item.get("path").ok_or_else(|| item.wrong("a `path`"))?.text()?;
        let container = item.get("mountPath").map(|path| path.text()).transpose()?.filter(|path| !path.is_empty());
        // A node that is missing is a device less here, whatever the file says of it.
        let _optional = item.get("optional").map(|optional| optional.truth()).transpose()?;
        let times = item.get("limit").map_or(Ok(1), |limit| limit.number())?.max(1);
        let read_only = item.get("readOnly").map_or(Ok(false), |read_only| read_only.truth())?;
        let permissions = item.get("permissions").map(|permissions| permissions.text()).transpose()?.unwrap_or(PERMISSIONS);
        let is_glob = path.contains(['*', '?', '[']);
        match item.get("type").map(|kind| kind.text()).transpose()?.unwrap_or("Device") {
            "Mount" if is_glob => return Ok(Err(format!("`{}`: a mount is one path here, and `{path}` may be several", item.path))),
            "Mount" => {
                let mut mount = Table::default();
                mount.set("host", text(path));
                mount.set("container", text(container.unwrap_or(path)));
                mount.set("read_only", plain(read_only));
                mounts.push(Value { place: None, is: Is::Table(mount) });
            }
            "Device" if node.is_some() => {
                return Ok(Err(format!("`{}`: one device is one node here, and a group of it has several", paths.path)));
            }
            "Device" if !path.starts_with("/dev/") => return Ok(Err(format!("`{}`: `{path}` is not below /dev", item.path))),
            "Device" => {
                if is_glob && container.is_some_and(|container| !container.ends_with('/')) {
                    return Ok(Err(format!("`{}`: all that `{path}` matches would be one path in the container", item.path)));
                }
                let mut table = Table::default();
                table.set("host", text(path));
                if let Some(container) = container {
                    table.set("container", text(container));
                }
                table.set("permissions", text(permissions));
                (node, limit) = (Some(table), times);
            }
            _ => return Err(item.wrong("a path of the `type` Device or Mount")),
        }
    }
    let Some(path) = node else { return Ok(Err(format!("`{}` has mounts alone, and no device", paths.path))) };
    Ok(Ok(Group { path, mounts, count: count.saturating_mul(limit).max(1) }))
}

fn offer(name: &str, groups: Vec<Group>) -> Table {
    let mut offered = resource(name, "char");
    let count = groups.first().map_or(1, |group| group.count);
    let (mut paths, mut mounts) = (Vec::new(), Vec::new());
    for group in groups {
        paths.push(Value { place: None, is: Is::Table(group.path) });
        mounts.extend(group.mounts);
    }
    offered.set("paths", Is::List(paths));
    if count > 1 {
        offered.set("replicas", plain(count));
    }
    if !mounts.is_empty() {
        offered.set("mounts", Is::List(mounts));
    }
    offered
}
