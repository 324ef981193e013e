//! The mounts that this process sees: `/proc/self/mountinfo` (proc(5)).

use super::ReaderInput;
use std::fs;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Debug)]
pub(super) struct Mount {
    /// Mount point.
    pub(super) at: PathBuf,
    /// The type of its file system.
    pub(super) kind: String,
    options: String,
    file_system_options: String,
}

impl Mount {
    /// Whether this mount has the option, such as `ro`.
    pub(super) fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|had| had == option)
    }

    /// Whether its file system has the option, and so every mount of it.
    pub(super) fn file_system_has(&self, option: &str) -> bool {
        self.file_system_options.split(',').any(|had| had == option)
    }
}

pub(super) fn mounts(input: &ReaderInput) -> Vec<Mount> {
    parse(&fs::read_to_string(input.target.own.join("mountinfo")).unwrap_or_default())
}

/// The mount of a path without links.
pub(super) fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    // Of several mounts at one place, the last one hides the others.
    mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.at))
        .max_by_key(|mount| mount.at.components().count())
}

/// `36 35 98:0 /root /at rw,relatime master:1 - ext4 /dev/sda1 rw,errors=continue`; a space is
/// written as `\040`.
fn parse(mountinfo: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let (mut mount, mut file_system) = (mount.split(' ').skip(4), file_system.split(' '));
        Some(Mount {
            at: PathBuf::from(mount.next()?.replace("\\040", " ")),
            options: mount.next()?.to_owned(),
            kind: file_system.next()?.to_owned(),
            file_system_options: file_system.nth(1).unwrap_or_default().to_owned(),
        })
    };
    mountinfo.lines().filter_map(mount).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_on_its_nearest_mount_and_the_last_of_several() {
        let text = "21 1 253:0 / / rw - ext4 /dev/vda rw\n\
                    30 21 7:0 / /var/lib/a\\040b rw,relatime shared:4 master:7 - ext4 /dev/loop0 rw,abort,emergency_ro\n\
                    31 30 7:0 / /var/lib/a\\040b ro,nosuid - xfs /dev/loop1 rw\n\
                    nonsense\n";
        let mounts = parse(text);
        let at = |path: &str| mount_of(&mounts, Path::new(path)).unwrap();
        assert_eq!(
            (mounts.len(), at("/var/lib").kind.as_str(), at("/var/lib/a b/journal").kind.as_str()),
            (3, "ext4", "xfs")
        );
        assert!(
            at("/var/lib/a b").has("ro")
                && !at("/var/lib/a b").file_system_has("ro")
                && !at("/var/lib/a").has("ro")
        );
        assert!(
            mounts[1].file_system_has("emergency_ro") && !mounts[1].file_system_has("emergency")
        );
    }
}
