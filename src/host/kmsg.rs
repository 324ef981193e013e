//! The kernel's log, record by record (Linux `Documentation/ABI/testing/dev-kmsg`).
//!
//! Reading begins at the oldest record in the kernel's ring, which includes events from before the
//! daemon's start. The sequence numbers, which continue until the next boot, show which records a
//! former daemon has already read.
//!
//! Any process that may write to the device can add lines. The kernel marks them as user lines, and
//! they are skipped here. Records that are overwritten before they were read are lost, and the next
//! record is read.

use super::HostRoot;
use nix::fcntl::OFlag;
use nix::sys::stat::{major, minor};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The longest record, with all of its escapes (`CONSOLE_EXT_LOG_MAX`; since 6.4
/// `PRINTK_MESSAGE_MAX`, a quarter of it).
const RECORD_BYTES_MAX: usize = 8192;
/// The device's number (Linux `Documentation/admin-guide/devices.txt`).
const NUMBER: (u64, u64) = (1, 11);
/// Majors of pseudo-terminals: one of them simulates the log of a simulated node.
const SIMULATED_MAJORS: RangeInclusive<u64> = 136..=143;
/// The lowest bits of a record's first number are its level. The bits above are its facility, 0 for
/// the kernel.
const LEVEL_BITS: u32 = 3;

/// One record of the kernel's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRecord {
    /// Its sequence number, which increases until the next boot.
    pub sequence: u64,
    /// When it was written, since boot. The clock of the log stops while the machine is suspended.
    pub since_boot: Duration,
    /// Its text, one line. Unprintable bytes are written as `\x0a`.
    pub text: String,
}

impl KernelRecord {
    /// Parses `priority,sequence,microseconds,flags[,…];text`, without the lines of its dictionary,
    /// which begin with a space. `None` for a record that the kernel itself has not written, and
    /// for an invalid one.
    #[must_use]
    pub fn parse(record: &[u8]) -> Option<Self> {
        let record = String::from_utf8_lossy(record);
        let (prefix, text) = record.split_once(';')?;
        let mut numbers = prefix.split(',').map(|number| number.parse::<u64>().ok());
        let (priority, sequence, microseconds) =
            (numbers.next()??, numbers.next()??, numbers.next()??);
        (priority >> LEVEL_BITS == 0).then(|| KernelRecord {
            sequence,
            since_boot: Duration::from_micros(microseconds),
            text: text.split('\n').next().unwrap_or_default().to_owned(),
        })
    }
}

/// The kernel's log, open for reading.
#[derive(Debug)]
pub struct KernelLog(AsyncFd<File>);

impl KernelLog {
    /// Opens the log of the host, at its oldest record. A tree that is not a running machine has no
    /// log: this machine's kernel log is not about a captured machine.
    ///
    /// # Errors
    /// `NotFound` if the device does not exist, or is another one, as in a container without it.
    /// `PermissionDenied` without `CAP_SYSLOG`, if `kernel.dmesg_restrict` is set.
    pub fn open(root: &HostRoot) -> io::Result<Self> {
        let path = root.path("dev/kmsg");
        let about = path.metadata()?;
        // A plain file with the name in a captured tree is not opened.
        let is_device = about.file_type().is_char_device();
        let (major, minor) = (major(about.rdev()), minor(about.rdev()));
        if !is_device || ((major, minor) != NUMBER && !SIMULATED_MAJORS.contains(&major)) {
            // Containers without access get `/dev/null` or the console there.
            let is =
                if is_device { "not the kernel's log device" } else { "not a character device" };
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("{} is {is}", path.display()),
            ));
        }
        let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; its requirement, an owned descriptor, is met"
        )]
        let log = AsyncFd::with_interest(file, Interest::READABLE)?;
        Ok(KernelLog(log))
    }

    /// The next record of the kernel itself, if there is one already.
    ///
    /// # Errors
    /// If the log cannot be read any longer.
    pub fn waiting(&self) -> io::Result<Option<KernelRecord>> {
        let mut buffer = [0; RECORD_BYTES_MAX];
        loop {
            let mut file = self.0.get_ref();
            match answer(file.read(&mut buffer), &buffer) {
                Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Some(answer) => return answer.map(Some),
                None => {}
            }
        }
    }

    /// Waits for the next record of the kernel itself. Cancel safe: no record is lost.
    ///
    /// # Errors
    /// If the log cannot be read any longer.
    pub async fn next(&self) -> io::Result<KernelRecord> {
        let mut buffer = [0; RECORD_BYTES_MAX];
        loop {
            // One read is one record.
            let read = self.0.async_io(Interest::READABLE, |mut file| file.read(&mut buffer)).await;
            if let Some(answer) = answer(read, &buffer) {
                return answer;
            }
        }
    }
}

/// The result of one read; `None` if the caller must read again.
fn answer(read: io::Result<usize>, buffer: &[u8]) -> Option<io::Result<KernelRecord>> {
    match read {
        Ok(0) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
        Ok(length) => buffer.get(..length).and_then(KernelRecord::parse).map(Ok),
        // Overwritten before it was read: the next read continues with the oldest remaining record.
        Err(error) if error.raw_os_error() == Some(nix::libc::EPIPE) => None,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
        Err(error) => Some(Err(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_record_has_a_number_a_time_and_a_line() {
        let record = b"6,3964,206764307,-;nvidia-nvswitch2: open (major=510)\n";
        let expected = KernelRecord {
            sequence: 3964,
            since_boot: Duration::from_micros(206_764_307),
            text: "nvidia-nvswitch2: open (major=510)".into(),
        };
        assert_eq!(KernelRecord::parse(record), Some(expected));
        let record = b"4,7,140900,-,caller=T1;pci 0000:00:02.0: a; b, c\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00:02.0\n";
        assert_eq!(KernelRecord::parse(record).unwrap().text, "pci 0000:00:02.0: a; b, c");
        assert_eq!(KernelRecord::parse(b"0,0,0,-;\n").unwrap().text, "");
        assert!(KernelRecord::parse(b"6,1,2,c;\xff\xfe\n").is_some());
        assert_eq!(KernelRecord::parse(b"6,1,2,-;x\r\n").unwrap().text, "x\r");
    }

    #[test]
    fn lines_of_user_space_are_skipped() {
        let line = "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.";
        for (priority, is_kernel) in [
            (0, true),
            (6, true),
            (7, true),
            (8, false),
            (12, false),
            (30, false),
            (1_u64 << 40, false),
        ] {
            assert_eq!(
                KernelRecord::parse(format!("{priority},1,2,-;{line}\n").as_bytes()).is_some(),
                is_kernel,
                "{priority}"
            );
        }
        for other in [
            "",
            ";",
            "6,1,2,-",
            "6,1;x",
            "-1,1,2,-;x",
            "6,,2,-;x",
            "6,1,two,-;x",
            " DEVICE=+pci:0000:00:02.0",
        ] {
            assert_eq!(KernelRecord::parse(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn overwritten_records_do_not_end_the_log_and_errors_do() {
        let buffer = *b"6,1,2,-;x\n6,2,3,-;beyond";
        let errno = |number| answer(Err(io::Error::from_raw_os_error(number)), &buffer);
        assert!(errno(nix::libc::EPIPE).is_none() && errno(nix::libc::EINTR).is_none());
        assert!(
            errno(nix::libc::EIO).unwrap().is_err() && answer(Ok(0), &buffer).unwrap().is_err()
        );
        assert_eq!(
            answer(Ok(10), &buffer).unwrap().unwrap().text,
            "x",
            "earlier bytes of the buffer are not read again"
        );
    }

    #[test]
    fn a_file_in_place_of_the_device_is_no_log() {
        let dir = tempfile::tempdir().unwrap();
        let kind = |root: &HostRoot| KernelLog::open(root).unwrap_err().kind();
        let root = HostRoot::new(dir.path());
        assert_eq!(kind(&root), io::ErrorKind::NotFound);
        std::fs::create_dir(dir.path().join("dev")).unwrap();
        let kmsg = dir.path().join("dev/kmsg");
        nix::unistd::mkfifo(&kmsg, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(kind(&root), io::ErrorKind::NotFound);
        std::fs::remove_file(&kmsg).unwrap();
        std::os::unix::fs::symlink("/dev/null", &kmsg).unwrap();
        assert!(
            KernelLog::open(&root).unwrap_err().to_string().contains("not the kernel's log device")
        );
    }

    /// The log of this machine, with lines that this test adds as a user, since a process cannot
    /// write as the kernel.
    #[test]
    fn the_log_is_read_from_its_beginning_and_a_forged_line_is_not_in_it() {
        let writer = OpenOptions::new().write(true).open("/dev/kmsg");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let (Ok(mut writer), Ok(log), Ok(mut raw)) =
            (writer, KernelLog::open(&HostRoot::new("/")), raw())
        else {
            let why = "it needs the right to read and to write /dev/kmsg";
            let _printed = writeln!(
                io::stderr(),
                "SKIPPED: the_log_is_read_from_its_beginning_and_a_forged_line_is_not_in_it: {why}"
            );
            return;
        };
        // The test writes with the kernel's own facility, but the kernel records the line as a
        // user's.
        let forged =
            format!("NVRM: Xid (PCI:ffff:ff:1f): 79, forged by test {}", std::process::id());
        // Without the line feed the record would be incomplete and invisible.
        writer.write_all(format!("<6>{forged}\n").as_bytes()).unwrap();
        // The content of the ring, unfiltered.
        let mut all = Vec::new();
        let mut buffer = [0; RECORD_BYTES_MAX];
        loop {
            match raw.read(&mut buffer) {
                Ok(length) => all.push(buffer[..length].to_vec()),
                Err(error) if error.raw_os_error() == Some(nix::libc::EPIPE) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        if !all.iter().any(|record| String::from_utf8_lossy(record).contains(&forged)) {
            let _printed = writeln!(
                io::stderr(),
                "SKIPPED: the forged line was not tested: this kernel forbids writes (printk.devkmsg)"
            );
            return;
        }
        let expected: Vec<KernelRecord> =
            all.iter().filter_map(|record| KernelRecord::parse(record)).collect();
        assert!(!expected.is_empty(), "the kernel has logged something since its start");
        let read = runtime.block_on(async {
            let mut read = vec![log.next().await.unwrap()];
            while read.last().unwrap().sequence < expected.last().unwrap().sequence {
                read.push(log.next().await.unwrap());
            }
            read
        });
        // The ring may have advanced between the two reads.
        let same = expected.iter().filter(|record| read.contains(record)).count();
        assert!(same > 0 && read.iter().all(|record| !record.text.contains(&forged)));
        assert!(read.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
    }

    fn raw() -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open("/dev/kmsg")
    }
}
