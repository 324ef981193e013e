//! The captured trees: unpacked once below the build folder, and again only when the archive
//! changes.

use holdfast::host::free_bytes;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// One captured machine.
pub(crate) struct Capture {
    pub(crate) name: String,
    pub(crate) root: PathBuf,
    pub(crate) truth: Value,
    /// The distances between its devices; empty where none are recorded.
    pub(crate) pairs: Vec<Value>,
}

/// The folders of the unpacked trees and of their truth; `None`, after a SKIPPED line with the
/// reason, without an archive.
fn unpacked() -> Option<&'static (PathBuf, PathBuf)> {
    static UNPACKED: OnceLock<Result<(PathBuf, PathBuf), String>> = OnceLock::new();
    let unpacked = UNPACKED.get_or_init(|| {
        unpack().inspect_err(|why| {
            // Directly to the terminal: the harness hides the output of a passing test.
            let _printed = writeln!(
                std::io::stderr(),
                "SKIPPED: the captured machines were not tested: {why}"
            );
        })
    });
    unpacked.as_ref().ok()
}

/// A file of the archive that belongs to no machine.
pub(crate) fn sample(rel: &str) -> Option<Vec<u8>> {
    Some(fs::read(unpacked()?.0.join(rel)).unwrap())
}

/// Every capture with its truth, sorted by name; `None`, after a SKIPPED line with the reason,
/// without an archive.
pub(crate) fn captures() -> Option<Vec<Capture>> {
    let (trees, truth) = unpacked()?;
    let mut captures: Vec<Capture> = fs::read_dir(truth)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem()?.to_str()?.to_owned();
            let root = trees.join(&name).join("root");
            let json = |path: PathBuf| {
                serde_json::from_str::<Value>(&fs::read_to_string(path).unwrap()).unwrap()
            };
            let of_pairs = truth.join(format!("p2p-{name}.json"));
            let pairs = if of_pairs.is_file() {
                json(of_pairs).as_array().unwrap().clone()
            } else {
                Vec::new()
            };
            root.is_dir().then(|| Capture { name, root, truth: json(path), pairs })
        })
        .collect();
    captures.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(!captures.is_empty(), "{} has no truth for any tree of the archive", truth.display());
    Some(captures)
}

/// Copies the tree. Files are hard links where possible: damage never writes to a file, it puts
/// another one in its place.
pub(crate) fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            copy_tree(&source, &target);
        } else if kind.is_symlink() {
            symlink(fs::read_link(&source).unwrap(), &target).unwrap();
        } else if fs::hard_link(&source, &target).is_err() {
            fs::write(&target, fs::read(&source).unwrap()).unwrap();
        }
    }
}

/// A folder for a copy. It is in memory if all copies fit there (a container may have 64 MiB
/// there): a disk's file system needs twice as long to create this many names as all other work.
pub(crate) fn folder() -> tempfile::TempDir {
    const ROOM: u64 = 2 << 30;
    let memory = Path::new("/dev/shm");
    let in_memory = (memory.is_dir() && free_bytes(memory) >= ROOM)
        .then(|| tempfile::tempdir_in(memory).ok())
        .flatten();
    in_memory.unwrap_or_else(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
}

fn unpack() -> Result<(PathBuf, PathBuf), String> {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/captures/public.tar.xz");
    let archive = std::env::var_os("HOLDFAST_CAPTURES").map_or(default, PathBuf::from);
    let about = fs::metadata(&archive).map_err(|error| {
        format!("{}: {error}; HOLDFAST_CAPTURES names the archive", archive.display())
    })?;
    let truth = archive.with_file_name("truth");
    if !truth.is_dir() {
        return Err(format!("{} is missing", truth.display()));
    }
    let changed = about
        .modified()
        .ok()
        .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
        .map_or(0, |age| age.as_secs());
    let trees =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("captures-{}-{changed}", about.len()));
    if trees.is_dir() {
        return Ok((trees, truth));
    }
    // Renamed when complete, so that an interrupted run leaves no partial tree under the final
    // name.
    let partial =
        tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).map_err(|error| error.to_string())?;
    let output = Command::new("tar")
        .arg("-xJf")
        .arg(&archive)
        .arg("-C")
        .arg(partial.path())
        // The archive holds one folder of trees.
        .args([
            "--strip-components=1",
            "--exclude=*/power",
            "--exclude=*/queue",
            "--exclude=*/system/cpu",
        ])
        .output()
        .map_err(|error| format!("tar does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "tar cannot unpack it (is xz installed?): {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    if fs::rename(partial.path(), &trees).is_ok() {
        // The folder keeps its new name; nothing is left to remove under the old one.
        let _renamed = partial.keep();
    }
    if trees.is_dir() {
        Ok((trees, truth))
    } else {
        Err(format!("{} could not be made", trees.display()))
    }
}
