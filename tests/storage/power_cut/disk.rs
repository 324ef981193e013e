//! A disk that remembers in which order it was written and flushed.
//!
//! The disk is one file that this process serves to the kernel (FUSE, protocol 7.31), so that a
//! loop device can be placed on it. The kernel gets no write-back cache: every request that the
//! loop device completes has been seen here, and a flush of the loop device arrives as an fsync.
//!
//! No thread of this process may touch files on the disk. If the process is killed, a thread that
//! waits for the disk could never end, and the disk could not end before the thread.

use crate::common::Random;
use crate::common::inside::command;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// What a power cut can divide.
const SECTOR: usize = 512;

/// One request to the disk.
#[derive(Debug)]
enum Step {
    Write { at: usize, bytes: Vec<u8> },
    Flush,
}

/// All requests to a disk, and its content before them.
#[derive(Debug)]
pub(crate) struct Recording {
    base: Vec<u8>,
    now: Vec<u8>,
    steps: Vec<Step>,
}

/// What becomes of writes that no flush followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cache {
    /// The disk has no volatile cache: they are there.
    None,
    /// It forgets all of them.
    Lost,
    /// It had written some of them, in any order, and some in part.
    Scattered,
}

impl Recording {
    /// How much there is to cut.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Flushes among it.
    pub(crate) fn flushes(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Flush)).count()
    }

    /// What is found on the disk when the power went away behind the first `steps` steps.
    pub(crate) fn cut(&self, steps: usize, cache: Cache, random: &mut Random) -> Vec<u8> {
        let told = &self.steps[..steps];
        let flushed = told.iter().rposition(|step| matches!(step, Step::Flush)).unwrap_or(0);
        let mut image = self.base.clone();
        for (index, step) in told.iter().enumerate() {
            let Step::Write { at, bytes } = step else { continue };
            let kept = match cache {
                _ if index < flushed => bytes.len(),
                Cache::None => bytes.len(),
                Cache::Lost => 0,
                Cache::Scattered => match random.below(4) {
                    0 => 0,
                    1 => SECTOR * random.index(1 + bytes.len() / SECTOR),
                    _ => bytes.len(),
                },
            };
            image[*at..*at + kept].copy_from_slice(&bytes[..kept]);
        }
        image
    }
}

/// The disk, while it is served.
#[derive(Debug)]
pub(crate) struct Disk {
    path: PathBuf,
    recording: Arc<Mutex<Recording>>,
    server: JoinHandle<()>,
}

impl Disk {
    /// Serves a disk that holds `image` as the file `path`.
    pub(crate) fn serve(image: Vec<u8>, path: &Path) -> Disk {
        File::create(path).unwrap();
        let channel = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = "fd=0,rootmode=100600,user_id=0,group_id=0";
        let mut mount = Command::new("mount");
        command(
            mount
                .args(["-i", "-t", "fuse", "-o", options, "recorded-disk"])
                .arg(path)
                .stdin(channel.try_clone().unwrap()),
        );
        let recording =
            Arc::new(Mutex::new(Recording { base: image.clone(), now: image, steps: Vec::new() }));
        let shared = Arc::clone(&recording);
        let server = std::thread::spawn(move || serve(channel, &shared));
        Disk { path: path.to_owned(), recording, server }
    }

    /// The number of requests so far.
    pub(crate) fn steps(&self) -> usize {
        self.recording.lock().unwrap().steps.len()
    }

    /// All requests, once no process uses the disk any longer.
    pub(crate) fn finish(self) -> Recording {
        command(Command::new("umount").arg("--lazy").arg(&self.path).stdin(Stdio::null()));
        self.server.join().unwrap();
        Arc::into_inner(self.recording).unwrap().into_inner().unwrap()
    }
}

/// Requests of the kernel: number, and what is answered.
mod request {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
}

const ENOSYS: i32 = 38;
const HEADER_BYTES: usize = 40;
const WRITE_BYTES_MAX: usize = 128 * 1024;
/// The kernel keeps its cache of the file when it is opened again.
const KEEP_CACHE: u32 = 2;
const BIG_WRITES: u32 = 1 << 5;

fn serve(mut channel: File, recording: &Mutex<Recording>) {
    let mut buffer = vec![0; WRITE_BYTES_MAX + 4096];
    // The kernel returns "no such device" when the file system was unmounted.
    while let Ok(length @ HEADER_BYTES..) = channel.read(&mut buffer) {
        let message = &buffer[..length];
        let (opcode, body) = (number(message, 4), &message[HEADER_BYTES..]);
        if matches!(opcode, request::FORGET | request::BATCH_FORGET | request::INTERRUPT) {
            continue;
        }
        let answer = answer(opcode, body, &mut recording.lock().unwrap());
        let (error, payload) = answer.map_or((-ENOSYS, Vec::new()), |payload| (0, payload));
        let mut reply = u32::try_from(16 + payload.len()).unwrap().to_le_bytes().to_vec();
        reply.extend(error.to_le_bytes());
        reply.extend(&message[8..16]);
        reply.extend(payload);
        // Who asked may have gone.
        drop(channel.write(&reply));
    }
}

/// The answer; `None` to what a disk need not know.
fn answer(opcode: u32, body: &[u8], disk: &mut Recording) -> Option<Vec<u8>> {
    Some(match opcode {
        request::INIT => {
            let mut reply = words(&[7, 31, number(body, 8), BIG_WRITES]);
            // Requests in the background and where that is too many, bytes of a write, granularity
            // of times.
            reply.extend(words(&[0, u32::try_from(WRITE_BYTES_MAX).unwrap(), 1]));
            reply.resize(64, 0);
            reply
        }
        request::GETATTR | request::SETATTR => attributes(disk.now.len()),
        request::OPEN => words(&[0, 0, KEEP_CACHE, 0]),
        request::READ => {
            let (at, length) = (place(body), number(body, 16) as usize);
            disk.now[at.min(disk.now.len())..(at + length).min(disk.now.len())].to_vec()
        }
        request::WRITE => {
            let (at, length) = (place(body), number(body, 16) as usize);
            let bytes = body[40..40 + length].to_vec();
            disk.now[at..at + length].copy_from_slice(&bytes);
            disk.steps.push(Step::Write { at, bytes });
            words(&[u32::try_from(length).unwrap(), 0])
        }
        request::FSYNC => {
            disk.steps.push(Step::Flush);
            Vec::new()
        }
        request::FLUSH | request::RELEASE | request::DESTROY => Vec::new(),
        _ => return None,
    })
}

/// Valid for ever: a regular file of this size.
fn attributes(size: usize) -> Vec<u8> {
    let mut reply = u64::from(u32::MAX).to_le_bytes().to_vec();
    reply.extend(words(&[0, 0]));
    for number in [1, size as u64, (size / SECTOR) as u64, 0, 0, 0] {
        reply.extend(number.to_le_bytes());
    }
    // Fractions of the three times, mode, links, owner, group, device, block size, flags.
    reply.extend(words(&[0, 0, 0, 0o100_600, 1, 0, 0, 0, 4096, 0]));
    reply
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The offset of a read or a write.
fn place(body: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(body[8..16].try_into().unwrap())).unwrap()
}
