//! Read failures. ENOENT and similar errors mean that a file is absent. Every other error (EMFILE,
//! ENOMEM, EACCES, EIO, a timeout) is no evidence about the host, and must never become evidence of
//! absence (I12).

use nix::libc;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The number of failures that are kept until they are taken. One is enough to know that a scan was
/// incomplete; a few name the cause.
const KEPT_MAX: usize = 8;

/// A failed read. It proves neither that a file is present nor that it is absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadFailure {
    /// The path, without the host root.
    pub path: String,
    /// The error of the system.
    pub error: String,
}

impl fmt::Display for ReadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be read: {}", self.path, self.error)
    }
}

/// The failures of one scan; `None` for a [`super::HostRoot`] that does not record.
#[derive(Debug, Clone, Default)]
pub(super) struct Failures(Option<Arc<Mutex<Log>>>);

#[derive(Debug, Default)]
struct Log {
    kept: Vec<ReadFailure>,
    /// The number of failures since the log was made, including those that are not kept.
    count: usize,
}

impl Failures {
    /// An empty log of its own.
    pub(super) fn recording() -> Self {
        Failures(Some(Arc::default()))
    }

    /// Takes out the kept failures.
    pub(super) fn take(&self) -> Vec<ReadFailure> {
        self.0.as_ref().map_or_else(Vec::new, |log| {
            std::mem::take(&mut log.lock().unwrap_or_else(PoisonError::into_inner).kept)
        })
    }

    /// The number of failures so far.
    pub(super) fn count(&self) -> usize {
        self.0.as_ref().map_or(0, |log| log.lock().unwrap_or_else(PoisonError::into_inner).count)
    }

    pub(super) fn push(&self, failure: ReadFailure) {
        let Some(log) = &self.0 else { return };
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        log.count += 1;
        if log.kept.len() < KEPT_MAX {
            log.kept.push(failure);
        }
    }

    /// The value of a read; `None` if the file is absent. Any other error is recorded.
    pub(super) fn found<T>(
        &self,
        path: impl FnOnce() -> String,
        result: io::Result<T>,
    ) -> Option<T> {
        result.inspect_err(|error| self.note(path, error)).ok()
    }

    /// Records an error unless it proves absence.
    pub(super) fn note(&self, path: impl FnOnce() -> String, error: &io::Error) {
        if self.0.is_some() && !is_absence(error) {
            self.push(ReadFailure { path: path(), error: error.to_string() });
        }
    }
}

/// Whether an error proves that a file is absent, or is of another kind.
///
/// sysfs returns ENODEV and ENXIO for a device that is being removed. It returns EINVAL, EOPNOTSUPP
/// or ENODATA for an attribute without a value now (`carrier` of an interface that is down). ELOOP
/// and ENAMETOOLONG are for names that lead nowhere.
#[must_use]
pub fn is_absence(error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(errno) => matches!(
            errno,
            libc::ENOENT
                | libc::ENOTDIR
                | libc::EISDIR
                | libc::ENODEV
                | libc::ENXIO
                | libc::EINVAL
                | libc::EOPNOTSUPP
                | libc::ENODATA
                | libc::ELOOP
                | libc::ENAMETOOLONG
                | libc::ESRCH
        ),
        // Our own errors: the file with this name is not a regular file.
        None => matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound),
    }
}

/// Whether the path is a directory, or a link to one.
///
/// # Errors
/// If that cannot be determined.
pub(super) fn is_dir(path: &Path) -> io::Result<bool> {
    match call(|| path.metadata()) {
        Ok(metadata) => Ok(metadata.is_dir()),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Runs one system call. Tests can make any call fail.
#[cfg(not(test))]
#[inline]
pub(crate) fn call<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    run()
}

#[cfg(test)]
pub(crate) use injected::call;

/// Fault injection for tests: which calls of this thread fail, and how.
#[cfg(test)]
pub(crate) mod injected {
    use nix::libc;
    use std::cell::{Cell, RefCell};
    use std::io;

    /// Errors that the system may return without proof of absence.
    pub(crate) const ERRORS: [i32; 9] = [
        libc::EMFILE,
        libc::ENFILE,
        libc::ENOMEM,
        libc::EAGAIN,
        libc::EACCES,
        libc::EPERM,
        libc::EIO,
        libc::EBUSY,
        libc::ETIMEDOUT,
    ];

    /// The errno for the call with this number.
    type Fault = Box<dyn FnMut(u64) -> Option<i32>>;

    thread_local! {
        static COUNT: Cell<u64> = const { Cell::new(0) };
        static FAULT: RefCell<Option<Fault>> = const { RefCell::new(None) };
    }

    /// Runs the call, or returns the injected error instead.
    pub(crate) fn call<T>(run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let number = COUNT.get();
        COUNT.set(number + 1);
        let errno = FAULT.with_borrow_mut(|fault| fault.as_mut().and_then(|fault| fault(number)));
        errno.map_or_else(run, |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    /// Runs a function on this thread with faults. `fault` gets the number of each call, from 0,
    /// and returns its errno. Returns the result and the number of calls.
    pub(crate) fn with_faults<T>(
        fault: impl FnMut(u64) -> Option<i32> + 'static,
        run: impl FnOnce() -> T,
    ) -> (T, u64) {
        struct Clear;
        impl Drop for Clear {
            fn drop(&mut self) {
                FAULT.take();
            }
        }
        COUNT.set(0);
        FAULT.set(Some(Box::new(fault)));
        let _clear = Clear;
        let result = run();
        (result, COUNT.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_absence_count_as_absence() {
        for errno in
            [libc::ENOENT, libc::ENOTDIR, libc::ENODEV, libc::ENXIO, libc::EINVAL, libc::ELOOP]
        {
            assert!(is_absence(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        for errno in [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
            libc::EAGAIN,
            libc::EACCES,
            libc::EPERM,
            libc::EIO,
            libc::ETIMEDOUT,
        ] {
            assert!(!is_absence(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        assert!(!is_absence(&io::ErrorKind::FileTooLarge.into()));
    }

    #[test]
    fn failures_are_kept_until_taken_and_bounded() {
        let failures = Failures::recording();
        let read = |errno| {
            failures
                .found(|| "/x".into(), io::Result::<()>::Err(io::Error::from_raw_os_error(errno)))
        };
        assert_eq!(read(libc::ENOENT), None);
        assert_eq!(failures.take(), []);
        for _ in 0..KEPT_MAX + 1 {
            assert_eq!(read(libc::EMFILE), None);
        }
        let taken = failures.take();
        assert_eq!(taken.len(), KEPT_MAX);
        assert_eq!(taken[0].to_string(), "/x cannot be read: Too many open files (os error 24)");
        assert_eq!(failures.take(), []);
        Failures::default().push(taken[0].clone());
    }
}
