//! Whether this user may still watch files: the kernel bounds how many instances and watches a user has.

use inotify::{Inotify, WatchMask};
use std::io;
use std::path::Path;

/// What came of trying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InotifyRoom {
    /// So many of those instances that were tried could be had at the same time.
    pub instances: usize,
    /// Why there were not more, or why nothing could be watched with one of them; `None` where all is well.
    pub refused: Option<String>,
}

/// Makes up to `wanted` instances that watch `dir`, and lets them go again.
#[must_use]
pub fn inotify_room(wanted: usize, dir: &Path) -> InotifyRoom {
    let mut made = Vec::new();
    let refused = (0..wanted).find_map(|_| watching(dir).map(|instance| made.push(instance)).err());
    InotifyRoom { instances: made.len(), refused: refused.map(|error| error.to_string()) }
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
    fn what_is_refused_is_told_and_what_was_made_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(inotify_room(2, dir.path()), InotifyRoom { instances: 2, refused: None });
        let InotifyRoom { instances, refused } = inotify_room(2, &dir.path().join("nothing"));
        assert!(instances == 0 && refused.is_some_and(|why| why.contains("No such file")));
    }
}
