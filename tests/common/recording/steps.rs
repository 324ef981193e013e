//! The steps of a script, and when each is over.

use super::directory::Directory;
use super::timeline::{Note, Recorder, Timeline};
use crate::{SOON, wait_for};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Unexpected observations are recorded for this time after the last step.
const EXCESS: Duration = Duration::from_millis(500);

/// Records changes of files as they happen, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    pub(crate) recorder: Recorder,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watching {
    pub(crate) fn start(directory: Directory) -> Self {
        let readable = directory.readable();
        let recorder = Recorder::new(directory);
        let (watcher, is_over) = (recorder.clone(), Arc::new(AtomicBool::new(false)));
        let ends = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let mut fds = [PollFd::new(readable.as_fd(), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::from(50_u8)).unwrap();
                watcher.read_directory();
            }
        });
        Watching { recorder, is_over, thread: Some(thread) }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// The present step of a script.
#[derive(Debug)]
pub(crate) struct Steps<'a> {
    pub(crate) recorder: Recorder,
    /// It defines the end of each step.
    golden: Option<&'a Timeline>,
    /// Without a golden timeline, a step is over when nothing was observed for this time.
    quiet: Duration,
    pub(crate) step: String,
    begun: Instant,
}

impl<'a> Steps<'a> {
    /// Starts a new recording.
    pub(crate) fn new(recorder: Recorder, golden: Option<&'a Timeline>, quiet: Duration) -> Self {
        drop(recorder.take());
        Steps { recorder, golden, quiet, step: String::new(), begun: Instant::now() }
    }

    /// Starts a step: all later observations belong to it.
    pub(crate) fn begin(&mut self, step: &str) {
        self.recorder.begin(step);
        step.clone_into(&mut self.step);
        self.begun = Instant::now();
    }

    /// Waits until every expected observation of this step was recorded.
    pub(crate) fn end(&self) {
        let Some(golden) = self.golden else { return self.wait_for_quiet(self.quiet) };
        // Missing observations are reported later with all other differences.
        while !golden.is_complete(&self.step, &self.recorder.notes()) && self.begun.elapsed() < SOON
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_for_quiet(&self, time: Duration) {
        let quiet = || (self.recorder.quiet_for().min(self.begun.elapsed()) > time).then_some(());
        wait_for("it is quiet", Duration::from_secs(60), quiet);
    }

    /// The recording of the script. Waits for a limited time for unexpected observations.
    pub(crate) fn finish(&self) -> Vec<Note> {
        self.wait_for_quiet(EXCESS);
        self.recorder.take()
    }

    /// Waits until this was recorded in the present step.
    pub(crate) fn noted(&self, lane: &str, text: &str) {
        wait_for(&format!("{lane}: {text}"), SOON, || {
            let notes = self.recorder.notes();
            notes
                .iter()
                .any(|note| note.step == self.step && note.lane == lane && note.text == text)
                .then_some(())
        });
    }
}
