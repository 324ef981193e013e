//! What the guest boots: an initrd with busybox, the drivers, the binary under test, this binary as
//! the guest's agent, and the libraries of all of them.

use crate::real::sandbox::{find, output};
use crate::real::{binary::binary, say};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The kernel's modules that the guest loads, after those that they depend on.
const MODULES: [&str; 15] = [
    "crc32c_generic",
    "blake2b_generic",
    "xxhash_generic",
    "virtio_blk",
    "ext4",
    "xfs",
    "btrfs",
    "igb",
    "igbvf",
    "nvme",
    "vfio_iommu_type1",
    "vfio_pci",
    "uio_pci_generic",
    "aer_inject",
    "null_blk",
];
/// Programs of the guest besides those of busybox.
const PROGRAMS: [&str; 6] = ["setpci", "e2fsck", "filefrag", "mkfs.ext4", "nvme", "unshare"];
/// Directories that mounts need.
const DIRS: [&str; 16] = [
    "bin",
    "dev",
    "etc",
    "etc/holdfast",
    "lib",
    "lib64",
    "modules",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr",
    "usr/lib",
    "var",
    "var/lib",
];
/// The first process of the guest.
const INIT: &str = include_str!("init.sh");

/// The programs that the image is made with, and their Debian packages.
pub(crate) const TOOLS: [(&str, &str); 10] = [
    ("busybox", "busybox-static"),
    ("e2fsck", "e2fsprogs"),
    ("filefrag", "e2fsprogs"),
    ("ldd", "libc-bin"),
    ("modinfo", "kmod"),
    ("nvme", "nvme-cli"),
    ("setpci", "pciutils"),
    ("strip", "binutils"),
    ("unshare", "util-linux"),
    ("xz", "xz-utils"),
];

/// The kernel of an unpacked package `linux-image-…`.
pub(crate) fn kernel(package: &Path) -> PathBuf {
    let boot = package.join("boot");
    let files = fs::read_dir(&boot).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut kernels =
        files.filter(|path| path.file_name().unwrap().as_bytes().starts_with(b"vmlinuz-"));
    kernels.next().unwrap_or_else(|| panic!("no kernel in {}", boot.display()))
}

/// Makes the initrd in a file without a name.
pub(crate) fn initrd(package: &Path) -> File {
    let began = Instant::now();
    let dir = tempfile::tempdir().unwrap();
    let mut archive = Archive::new();
    for path in DIRS {
        archive.directory(path);
    }
    archive.file("init", INIT.as_bytes(), true);
    archive.file("bin/busybox", &fs::read(find("busybox").unwrap()).unwrap(), true);
    archive.link("bin/sh", "busybox");
    let mut list = String::new();
    for (name, file) in modules(package) {
        let unpacked = match file.extension() {
            Some(xz) if xz == "xz" => {
                Command::new("xz").arg("-dc").arg(&file).output().unwrap().stdout
            }
            _ => fs::read(&file).unwrap(),
        };
        archive.file(&format!("modules/{name}.ko"), &unpacked, false);
        // Disks of null_blk are made by a test.
        let parameters = if name == "null_blk" { " nr_devices=0" } else { "" };
        list += &format!("{name}{parameters}\n");
    }
    archive.file("modules/list", list.as_bytes(), false);
    let agent = std::env::current_exe().unwrap();
    let programs = PROGRAMS.map(|name| (name, find(name).unwrap()));
    let of_ours = [("holdfast", binary()), ("agent", agent)];
    let mut libraries = BTreeMap::new();
    for (name, path) in programs.into_iter().chain(of_ours) {
        let stripped = dir.path().join(name);
        output(Command::new("strip").arg("-o").arg(&stripped).arg(&path));
        archive.file(&format!("bin/{name}"), &fs::read(stripped).unwrap(), true);
        libraries.extend(libraries_of(&path));
    }
    for (path, content) in libraries {
        archive.file_below(path.trim_start_matches('/'), &content);
    }
    let file = archive.end();
    let size = file.metadata().unwrap().len() >> 20;
    say(format_args!("an initrd of {size} MiB, made in {:.1?}", began.elapsed()));
    file
}

/// The libraries of a program, with the loader.
fn libraries_of(program: &Path) -> Vec<(String, Vec<u8>)> {
    let listed = output(Command::new("ldd").arg(program));
    let paths = listed.split_whitespace().filter(|word| word.starts_with('/'));
    paths.map(|path| (path.to_owned(), fs::read(path).unwrap())).collect()
}

/// The modules with those that they need, in the order of their loading: by name and file.
fn modules(package: &Path) -> Vec<(String, PathBuf)> {
    let mut files = BTreeMap::new();
    let mut dirs = vec![package.join("lib/modules")];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let name = entry.file_name().to_string_lossy().replace('-', "_");
            if kind.is_dir() {
                dirs.push(path);
            } else if let Some((name, _)) = name.split_once(".ko") {
                files.insert(name.to_owned(), path);
            }
        }
    }
    let mut loaded = Vec::new();
    for name in MODULES {
        load(name, &files, &mut loaded);
    }
    loaded
}

fn load(name: &str, files: &BTreeMap<String, PathBuf>, loaded: &mut Vec<(String, PathBuf)>) {
    // What has no file is a part of the kernel.
    let Some(file) = files.get(name) else { return };
    if loaded.iter().any(|(other, _)| other == name) {
        return;
    }
    let needed = output(Command::new("modinfo").args(["-F", "depends"]).arg(file));
    for other in needed.trim().split(',').filter(|other| !other.is_empty()) {
        load(&other.replace('-', "_"), files, loaded);
    }
    loaded.push((name.to_owned(), file.clone()));
}

/// An archive in the kernel's format of an initrd (`cpio -H newc`; the kernel's
/// `Documentation/driver-api/early-userspace/buffer-format.rst`).
#[derive(Debug)]
struct Archive {
    file: BufWriter<File>,
    entries: u32,
    directories: Vec<String>,
}

impl Archive {
    fn new() -> Self {
        let file = BufWriter::new(tempfile::tempfile().unwrap());
        Archive { file, entries: 0, directories: Vec::new() }
    }

    fn directory(&mut self, path: &str) {
        if !self.directories.iter().any(|known| known == path) {
            self.entry(path, 0o040_755, &[]);
            self.directories.push(path.to_owned());
        }
    }

    fn file(&mut self, path: &str, content: &[u8], is_program: bool) {
        self.entry(path, if is_program { 0o100_755 } else { 0o100_644 }, content);
    }

    /// A program's part, with the directories above it.
    fn file_below(&mut self, path: &str, content: &[u8]) {
        for (end, _) in path.match_indices('/') {
            self.directory(&path[..end]);
        }
        self.file(path, content, true);
    }

    fn link(&mut self, path: &str, target: &str) {
        self.entry(path, 0o120_777, target.as_bytes());
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let (size, name) = (u32::try_from(content.len()).unwrap(), path.len() + 1);
        let (inode, links) = (self.entries, 1);
        // Inode, mode, user, group, links, time, size, four numbers of devices, length of the name
        // with its zero, checksum.
        write!(
            self.file,
            "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{links:08x}{0:08x}{size:08x}\
             {0:08x}{0:08x}{0:08x}{0:08x}{name:08x}{0:08x}",
            0
        )
        .unwrap();
        self.padded(&[path.as_bytes(), b"\0"].concat(), 110);
        self.padded(content, 0);
    }

    /// Writes bytes, and zeros up to a multiple of four of all since `before` bytes ago.
    fn padded(&mut self, bytes: &[u8], before: usize) {
        self.file.write_all(bytes).unwrap();
        let zeros = (before + bytes.len()).next_multiple_of(4) - before - bytes.len();
        self.file.write_all(&[0; 4][..zeros]).unwrap();
    }

    fn end(mut self) -> File {
        self.entry("TRAILER!!!", 0, &[]);
        self.file.into_inner().unwrap()
    }
}
