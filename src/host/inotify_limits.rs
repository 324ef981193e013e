//! A check of the inotify limits: the kernel limits instances and watches per user.

use inotify::{Inotify, WatchMask};
use nix::libc::{EMFILE, ENOSPC};
use std::io;
use std::path::Path;

/// The result of the check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InotifyLimits {
    /// The number of instances that could be made at the same time.
    pub instances: usize,
    /// Why there were fewer than wanted, or why one of them could not watch a directory; `None`
    /// without a problem.
    pub refused: Option<InotifyRefusal>,
}

/// Why further instances or watches are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InotifyRefusal {
    /// A limit has been reached. The kernel's error, "No space left on device", does not name it.
    Limit {
        /// Its name for `sysctl`.
        name: &'static str,
        /// Its value; `None` if it cannot be read.
        value: Option<u64>,
    },
    /// Another error, in the system's words.
    Other(String),
}

impl InotifyRefusal {
    fn of(error: &io::Error) -> Self {
        let name = match error.raw_os_error() {
            Some(EMFILE) => "fs.inotify.max_user_instances",
            Some(ENOSPC) => "fs.inotify.max_user_watches",
            _ => return InotifyRefusal::Other(error.to_string()),
        };
        let value =
            std::fs::read_to_string(Path::new("/proc/sys").join(name.replace('.', "/"))).ok();
        InotifyRefusal::Limit { name, value: value.and_then(|value| value.trim().parse().ok()) }
    }
}

/// Makes up to `wanted` instances that watch `dir`, and closes them again.
#[must_use]
pub fn inotify_limits(wanted: usize, dir: &Path) -> InotifyLimits {
    let mut made = Vec::new();
    let refused = (0..wanted).find_map(|_| watching(dir).map(|instance| made.push(instance)).err());
    InotifyLimits { instances: made.len(), refused: refused.as_ref().map(InotifyRefusal::of) }
}

fn watching(dir: &Path) -> io::Result<Inotify> {
    let instance = Inotify::init()?;
    instance.watches().add(dir, WatchMask::CREATE)?;
    Ok(instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_counted_and_a_refusal_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(inotify_limits(2, dir.path()), InotifyLimits { instances: 2, refused: None });
        let InotifyLimits { instances, refused } = inotify_limits(2, &dir.path().join("nothing"));
        assert!(
            instances == 0
                && matches!(refused, Some(InotifyRefusal::Other(why)) if why.contains("No such file"))
        );
    }

    #[test]
    fn a_limit_is_named_by_its_setting() {
        for (number, setting) in
            [(EMFILE, "fs.inotify.max_user_instances"), (ENOSPC, "fs.inotify.max_user_watches")]
        {
            let refused = InotifyRefusal::of(&io::Error::from_raw_os_error(number));
            assert!(
                matches!(refused, InotifyRefusal::Limit { name, value: Some(1..) } if name == setting),
                "{refused:?}"
            );
        }
    }
}
