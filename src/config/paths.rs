//! Validates the paths of a resource: nodes of `/dev` by glob or regular expression, and mounts.

use super::error::hidden;
use super::{fragments, text};
use crate::domain::{CharPath, MountSpec, NodePattern};
use std::collections::{BTreeMap, BTreeSet};

/// The memory limit of a regular expression: thousands of times the size of one for names.
const REGEX_BYTES_MAX: usize = 256 * 1024;

pub(super) fn path(path: &fragments::Path, is_one: bool) -> Result<CharPath, String> {
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
    Ok(CharPath { host: host.clone(), container: path.container.clone(), permissions })
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

/// Two hosts with the same path in the container, and that path. Hosts are compared by name; the
/// matches of a wildcard are not known here.
pub(super) fn duplicate_target(paths: &[CharPath]) -> Option<(String, &str, &str)> {
    let mut taken = BTreeMap::new();
    paths.iter().filter_map(|path| Some((path.host.literal()?, &path.container))).find_map(
        |(host, container)| {
            let target = match container {
                None => host.to_owned(),
                Some(folder) if folder.ends_with('/') => {
                    format!("{folder}{}", host.rsplit('/').next().unwrap_or(host))
                }
                Some(container) => container.clone(),
            };
            let first: &str = taken.entry(target.clone()).or_insert(host);
            (first != host).then_some((target, first, host))
        },
    )
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
