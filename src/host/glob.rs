//! Paths by pattern, as in a shell: `*` matches neither `/` nor a leading dot, `**` matches any
//! number of directories.
//!
//! The crate `glob` matches the names. It does not list the directories: it skips those that cannot
//! be read, and their nodes would seem absent.

use super::root::{HostRoot, Listings};
use glob::{MatchOptions, Pattern};

const MAGIC: [char; 3] = ['*', '?', '['];
const OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};
/// The maximum depth of directories for `**`.
const DEPTH_MAX: usize = 16;

impl HostRoot {
    /// The host paths that match a glob such as `/dev/ttyUSB*`, sorted; empty for an invalid
    /// pattern.
    #[must_use]
    pub fn glob(&self, pattern: &str) -> Vec<String> {
        self.glob_among(&mut Listings::default(), pattern)
    }

    /// The same for many patterns: a directory is listed only once, and a binary search finds the
    /// names with the pattern's prefix. Otherwise 64 resources of one `/dev` with ten thousand
    /// nodes would check 640,000 names.
    #[must_use]
    pub fn glob_among(&self, listings: &mut Listings, pattern: &str) -> Vec<String> {
        let components: Vec<&str> =
            pattern.split('/').filter(|component| !component.is_empty()).collect();
        if components.is_empty() || components.contains(&"..") {
            return Vec::new();
        }
        let Some(patterns) =
            components.iter().map(|name| Name::new(name)).collect::<Option<Vec<_>>>()
        else {
            return Vec::new();
        };
        let mut found = vec![String::new()];
        for (index, name) in patterns.iter().enumerate() {
            let is_last = index + 1 == patterns.len();
            found = found.iter().flat_map(|dir| self.step(listings, dir, name, is_last)).collect();
        }
        if pattern.ends_with('/') {
            found.retain(|path| self.is_dir(path));
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The matches of one component of a pattern in a directory. The path of the root is empty.
    fn step(
        &self,
        listings: &mut Listings,
        dir: &str,
        name: &Name<'_>,
        is_last: bool,
    ) -> Vec<String> {
        match name {
            // One call for the whole path shows at the end whether it exists.
            Name::Plain(name) => {
                let path = format!("{dir}/{name}");
                if is_last && !self.is_listed(&path) { Vec::new() } else { vec![path] }
            }
            Name::Glob { begin, pattern } => {
                let names = self.listing(listings, dir);
                let first = names.partition_point(|name| name.as_str() < *begin);
                let begun = names[first..].iter().take_while(|name| name.starts_with(begin));
                begun
                    .filter(|name| pattern.matches_with(name, OPTIONS))
                    .map(|name| format!("{dir}/{name}"))
                    .collect()
            }
            Name::AnyDepth => {
                let mut dirs = vec![dir.to_owned()];
                let mut level = dirs.clone();
                for _ in 0..DEPTH_MAX {
                    level = level
                        .iter()
                        .flat_map(|dir| self.below(listings, dir))
                        .filter(|path| self.is_real_dir(path))
                        .collect();
                    dirs.extend(level.iter().cloned());
                }
                // At the end it matches all entries of the directories.
                if is_last {
                    dirs.iter().flat_map(|dir| self.below(listings, dir)).collect()
                } else {
                    dirs
                }
            }
        }
    }

    fn listing<'a>(&self, listings: &'a mut Listings, dir: &str) -> &'a [String] {
        if !listings.names.contains_key(dir) {
            // A failed listing is not kept: the next caller must get the failure too.
            let Some(names) = self.try_entries(dir) else { return &[] };
            listings.names.insert(dir.to_owned(), names);
        }
        listings.names.get(dir).map_or(&[], Vec::as_slice)
    }

    fn below(&self, listings: &mut Listings, dir: &str) -> Vec<String> {
        let visible = self.listing(listings, dir).iter().filter(|name| !name.starts_with('.'));
        visible.map(|name| format!("{dir}/{name}")).collect()
    }
}

/// One component of a pattern.
enum Name<'a> {
    Plain(&'a str),
    /// With the text before its first special character.
    Glob {
        begin: &'a str,
        pattern: Box<Pattern>,
    },
    AnyDepth,
}

impl<'a> Name<'a> {
    fn new(name: &'a str) -> Option<Self> {
        match name.find(MAGIC) {
            _ if name == "**" => Some(Name::AnyDepth),
            None => Some(Name::Plain(name)),
            Some(end) => Some(Name::Glob {
                begin: &name[..end],
                pattern: Box::new(Pattern::new(name).ok()?),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_glob_finds_what_a_shell_finds_and_stays_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        for name in [
            "dev/ttyUSB10",
            "dev/ttyUSB2",
            "dev/null",
            "dev/.hidden",
            "dev/bus/usb/001",
            "dev/bus/.x/002",
            "etc/passwd",
        ] {
            fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
            fs::write(dir.path().join(name), "").unwrap();
        }
        std::os::unix::fs::symlink("bus", dir.path().join("dev/alias")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("dev/dangling")).unwrap();
        let mut listings = Listings::default();
        for (pattern, expected) in [
            ("/dev/ttyUSB*", &["/dev/ttyUSB10", "/dev/ttyUSB2"][..]),
            ("/dev/ttyUSB1?", &["/dev/ttyUSB10"]),
            ("/dev/ttyUSB[12]", &["/dev/ttyUSB2"]),
            ("/dev/ttyUSB2", &["/dev/ttyUSB2"]),
            ("/dev/tty*2", &["/dev/ttyUSB2"]),
            (
                "/dev/*",
                &[
                    "/dev/alias",
                    "/dev/bus",
                    "/dev/dangling",
                    "/dev/null",
                    "/dev/ttyUSB10",
                    "/dev/ttyUSB2",
                ],
            ),
            ("/dev/.*", &["/dev/.hidden"]),
            ("/d*/ttyUSB*", &["/dev/ttyUSB10", "/dev/ttyUSB2"]),
            ("dev/null", &["/dev/null"]),
            ("//dev//null", &["/dev/null"]),
            ("/dev/**/001", &["/dev/bus/usb/001"]),
            ("/dev/bus/**", &["/dev/bus/usb", "/dev/bus/usb/001"]),
            ("/dev/alias/usb/*", &["/dev/alias/usb/001"]),
            ("/dev/b*/", &["/dev/bus"]),
            ("/dev/ttyUSB*/", &[]),
            ("/dev/none", &[]),
            ("/dev/none*", &[]),
            ("/none/*", &[]),
            ("/dev/null/*", &[]),
            ("/dev/../etc/*", &[]),
            ("/dev/[broken", &[]),
            ("/", &[]),
            ("", &[]),
        ] {
            assert_eq!(root.glob_among(&mut listings, pattern), expected, "{pattern}");
            assert_eq!(root.glob(pattern), expected, "{pattern}");
        }
        fs::write(dir.path().join("dev/ttyUSB3"), "").unwrap();
        assert_eq!(
            root.glob_among(&mut listings, "/dev/ttyUSB?"),
            ["/dev/ttyUSB2"],
            "a directory is listed once for a scan"
        );
        assert_eq!(
            root.glob_among(&mut Listings::default(), "/dev/ttyUSB?"),
            ["/dev/ttyUSB2", "/dev/ttyUSB3"]
        );
    }

    #[test]
    fn a_directory_that_cannot_be_listed_is_a_failure_and_not_an_empty_one() {
        use super::super::failure::injected::with_faults;
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("dev")).unwrap();
        fs::write(dir.path().join("dev/ttyUSB0"), "").unwrap();
        let root = HostRoot::new(dir.path()).recording();
        for pattern in ["/dev/ttyUSB*", "/dev/ttyUSB0", "/d*/ttyUSB0", "/**/ttyUSB0"] {
            let (found, calls) = with_faults(|_| None, || root.glob(pattern));
            assert_eq!(
                (found, root.take_failures()),
                (vec!["/dev/ttyUSB0".to_owned()], vec![]),
                "{pattern}"
            );
            for failing in 0..calls {
                with_faults(
                    move |call| (call == failing).then_some(nix::libc::EMFILE),
                    || drop(root.glob(pattern)),
                );
                assert_eq!(root.take_failures().len(), 1, "{pattern}, call {failing}");
            }
        }
    }
}
