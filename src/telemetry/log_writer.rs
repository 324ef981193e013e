//! The destination of the log, whose reader may hang without blocking an Allocate.
//!
//! If a journal or a container runtime hangs, its pipe stays full, and a blocking write would wait.
//! So a line that finds no space in the pipe is dropped and counted (also as a metric). When there
//! is space again, a notice reports the number of dropped lines.

use super::log_format::LogFormat;
use super::metrics;
use crate::domain::printable_json;
use crate::host::is_writable_within;
use std::borrow::Cow;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;
use tracing_subscriber::fmt::MakeWriter;

/// How long, in milliseconds, a line waits for a slow reader. After a line was dropped, no further
/// line waits until there is space again.
const TIMEOUT_MS: u8 = 20;

/// The bytes of one write: a page, the unit in which a pipe is filled (pipe(7)). If there is any
/// space, this much fits.
const PIECE: usize = 4096;

/// A writer for [`mod@tracing_subscriber::fmt`] that does not block.
#[derive(Debug)]
pub(super) struct LogWriter<W> {
    to: W,
    format: LogFormat,
    missed: Mutex<Missed>,
}

/// The lines that were dropped since the last complete line.
#[derive(Debug, Default)]
struct Missed {
    lines: u64,
    /// A part of the last line was written.
    is_torn: bool,
}

impl<W> LogWriter<W> {
    /// Writes to a pipe, a socket, a terminal or a file. A file always has space.
    pub(super) fn new(to: W, format: LogFormat) -> LogWriter<W> {
        metrics::log_lines_lost(0);
        LogWriter { to, format, missed: Mutex::default() }
    }
}

impl<'a, W> MakeWriter<'a> for LogWriter<W>
where
    W: AsFd + 'a,
    &'a W: Write,
{
    type Writer = Line<'a, W>;

    fn make_writer(&'a self) -> Line<'a, W> {
        Line(self)
    }
}

/// Writes one line at a time.
#[derive(Debug)]
pub(super) struct Line<'a, W>(&'a LogWriter<W>);

impl<'a, W> Write for Line<'a, W>
where
    W: AsFd,
    &'a W: Write,
{
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let LogWriter { to, format, missed } = self.0;
        // Held for the whole line: no other thread may use the space that this one has found.
        let mut missed = missed.lock().unwrap_or_else(PoisonError::into_inner);
        let timeout = if missed.lines == 0 { TIMEOUT_MS } else { 0 };
        if missed.lines > 0 && is_writable_within(to, timeout)? {
            let notice = notice(*format, missed.lines);
            let mut to = to;
            if missed.is_torn {
                to.write_all(b"\n")?;
            }
            to.write_all(notice.as_bytes())?;
            *missed = Missed::default();
        }
        for (number, piece) in shown(*format, line).chunks(PIECE).enumerate() {
            if !is_writable_within(to, timeout)? {
                missed.lines += 1;
                metrics::log_lines_lost(1);
                missed.is_torn |= number > 0;
                break;
            }
            let mut to = to;
            to.write_all(piece)?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line without terminal control characters. A text line has only the escapes of our own colours,
/// because its fields were written printable.
fn shown(format: LogFormat, line: &[u8]) -> Cow<'_, [u8]> {
    match (format, std::str::from_utf8(line).map(printable_json)) {
        (LogFormat::Json, Ok(Cow::Owned(line))) => Cow::Owned(line.into_bytes()),
        _ => Cow::Borrowed(line),
    }
}

fn notice(format: LogFormat, lines: u64) -> String {
    let (now, message) = (
        humantime::format_rfc3339_micros(SystemTime::now()),
        "the log was not read in time, and lines were lost",
    );
    match format {
        LogFormat::Text => format!("{now}  WARN {message} lines={lines}\n"),
        LogFormat::Json => format!(
            "{{\"timestamp\":\"{now}\",\"level\":\"WARN\",\"message\":\"{message}\",\"lines\":{lines}}}\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::table::Metric;
    use std::io::{PipeReader, Read};

    fn read(reader: &mut PipeReader, bytes: usize) -> String {
        let mut text = vec![0; bytes];
        reader.read_exact(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// Writes lines until there is no space. Returns the bytes that were written, and the lines
    /// that were not.
    fn fill(log: &LogWriter<io::PipeWriter>, line: &str) -> (usize, u64) {
        let mut bytes = 0;
        while log.missed.lock().unwrap().lines == 0 {
            log.make_writer().write_all(line.as_bytes()).unwrap();
            bytes += line.len();
        }
        log.make_writer().write_all(line.as_bytes()).unwrap();
        (bytes - line.len(), log.missed.lock().unwrap().lines)
    }

    #[test]
    fn lines_lost_without_a_reader_are_counted_when_reading_resumes() {
        for (format, wanted) in [
            (LogFormat::Text, "  WARN the log was not read in time, and lines were lost lines=2\n"),
            (LogFormat::Json, ",\"lines\":2}\n"),
        ] {
            let (mut reader, writer) = io::pipe().unwrap();
            let log = LogWriter::new(writer, format);
            let before = metrics::counted(Metric::LogLinesLost, &[]);
            let (bytes, lost) = fill(&log, "one line of many\n");
            assert!(bytes >= 4096 && lost == 2, "{bytes} {lost}");
            assert!(
                metrics::counted(Metric::LogLinesLost, &[]) >= before + lost,
                "it is counted when it happens"
            );
            assert_eq!(read(&mut reader, bytes), "one line of many\n".repeat(bytes / 17));
            log.make_writer().write_all(b"and on\n").unwrap();
            drop(log);
            let mut rest = String::new();
            reader.read_to_string(&mut rest).unwrap();
            let (notice, line) = rest.split_at(rest.len() - "and on\n".len());
            assert!(
                notice.ends_with(wanted) && notice.lines().count() == 1 && line == "and on\n",
                "{rest}"
            );
        }
    }

    #[test]
    fn a_long_line_is_whole_or_cut_at_the_free_space() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = LogWriter::new(writer, LogFormat::Text);
        let long = format!("{}\n", "x".repeat(10_000));
        log.make_writer().write_all(long.as_bytes()).unwrap();
        assert_eq!(read(&mut reader, long.len()), long);
        let (_, lost) = fill(&log, &long);
        assert_eq!(lost, 2);
        // Space for two pages, which the notice and a line need.
        read(&mut reader, 3 * PIECE);
        log.make_writer().write_all(b"and on\n").unwrap();
        drop(log);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        let mut lines = rest.lines().rev();
        assert_eq!(lines.next(), Some("and on"));
        assert!(
            lines
                .next()
                .is_some_and(|notice| notice.ends_with(" lines=2") && !notice.contains('x')),
            "{rest}"
        );
        assert!(lines.all(|line| line.bytes().all(|byte| byte == b'x')));
    }

    #[test]
    fn a_closed_reader_is_an_error_without_a_wait() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let log = LogWriter::new(writer, LogFormat::Text);
        assert_eq!(
            log.make_writer().write_all(b"a line\n").unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }
}
