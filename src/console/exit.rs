//! Exit codes. They are stable, since service managers and scripts depend on them.

use std::process::ExitCode;

/// Success.
pub const SUCCESS: u8 = 0;
/// A failure without a code of its own.
pub const FAILURE: u8 = 1;
/// Invalid command line.
pub const USAGE: u8 = 2;
/// Invalid configuration. A restart does not help.
pub const CONFIG: u8 = 3;
/// The kubelet directory is not usable. A restart does not help.
pub const KUBELET_DIR: u8 = 4;
/// The state directory cannot be read or written.
pub const STATE: u8 = 5;
/// Another daemon runs on the same state directory.
pub const ALREADY_RUNNING: u8 = 6;
/// An actor died too often; a restart may help.
pub const ESCALATED: u8 = 7;
/// `who`: no container holds a device that matches the filter.
pub const NO_HOLDER: u8 = 8;
/// `config import` printed a configuration, but left out parts with wrong values.
pub const INCOMPLETE: u8 = 9;
/// `doctor` found a warning or an error.
pub const FINDINGS: u8 = 10;
/// The limits of the process are too low: threads, descriptors, memory.
pub const LIMITS: u8 = 11;
/// `kubectl holdfast`: some of the selected nodes did not answer.
pub const PARTIAL: u8 = 12;
/// `explain`: no device, pod or claim has this name.
pub const UNKNOWN: u8 = 13;

/// `migrate check`: a pod needs a drain before the switch. The same as [`FAILURE`].
pub const NEEDS_DRAIN: u8 = 1;
/// `migrate check`: it cannot be determined whether a pod needs a drain. The same as [`USAGE`].
pub const CANNOT_TELL: u8 = 2;

/// The meaning of the exit code of a daemon that does not start; `None` if the code only means
/// failure.
#[must_use]
pub fn meaning(code: i32) -> Option<&'static str> {
    Some(match u8::try_from(code).ok()? {
        USAGE => "it does not accept this command line",
        CONFIG => "the configuration is not valid",
        KUBELET_DIR => "the kubelet directory is not usable",
        STATE => "the state directory is not usable",
        ALREADY_RUNNING => "the state directory is in use",
        LIMITS => "its limits on threads or descriptors are too low",
        _ => return None,
    })
}

/// The failure of a verb: the exit code and the sentence for standard error.
#[derive(Debug)]
pub struct Failed {
    /// One sentence: the failure, its object, the cause, the fix. `None` if the output already
    /// contains it.
    pub sentence: Option<String>,
    /// One of the codes above.
    pub code: u8,
}

impl Failed {
    /// A failure with the given code.
    pub fn new(code: u8, sentence: impl std::fmt::Display) -> Self {
        Failed { sentence: Some(sentence.to_string()), code }
    }

    /// A verb that printed its answer and signals a result by its exit code.
    #[must_use]
    pub fn reported(code: u8) -> Self {
        Failed { sentence: None, code }
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Failed::new(FAILURE, error)
    }
}

impl From<crate::config::ConfigError> for Failed {
    fn from(error: crate::config::ConfigError) -> Self {
        // The next start may read what this one could not.
        Failed::new(if error.is_unread() { FAILURE } else { CONFIG }, error)
    }
}

impl From<crate::store::StoreError> for Failed {
    fn from(error: crate::store::StoreError) -> Self {
        let code = if matches!(error, crate::store::StoreError::InUse { .. }) {
            ALREADY_RUNNING
        } else {
            STATE
        };
        Failed::new(code, error)
    }
}

impl From<crate::app::StartError> for Failed {
    fn from(error: crate::app::StartError) -> Self {
        match error {
            crate::app::StartError::KubeletDir { .. } => Failed::new(KUBELET_DIR, error),
            crate::app::StartError::Store(error) => error.into(),
            crate::app::StartError::NoThread { .. } => Failed::new(LIMITS, error),
            crate::app::StartError::Escalated(_) => Failed::new(ESCALATED, error),
        }
    }
}

impl From<crate::daemon::DaemonError> for Failed {
    fn from(error: crate::daemon::DaemonError) -> Self {
        use crate::daemon::DaemonError;
        match error {
            DaemonError::Limits(_) => Failed::new(LIMITS, error),
            DaemonError::System(_) | DaemonError::TakeOver(_) => Failed::new(FAILURE, error),
            DaemonError::Start(error) => error.into(),
            DaemonError::Escalated(_) | DaemonError::TaskPanicked => Failed::new(ESCALATED, error),
        }
    }
}

/// Ends a verb: prints the sentence to standard error and returns the exit code.
#[must_use]
pub fn end(result: Result<(), Failed>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::from(SUCCESS),
        Err(Failed { sentence, code }) => {
            if let Some(sentence) = sentence {
                super::eprintln(format_args!("holdfast: {sentence}"));
            }
            ExitCode::from(code)
        }
    }
}
