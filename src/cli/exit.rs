//! Exit codes. Stable: service managers and scripts decide by them.

use std::process::ExitCode;

/// Done.
pub const SUCCESS: u8 = 0;
/// Something failed that has no code of its own.
pub const FAILURE: u8 = 1;
/// The command line is not understood.
pub const USAGE: u8 = 2;
/// The configuration is not valid. Starting again does not help.
pub const CONFIG: u8 = 3;
/// The kubelet's directory cannot be one. Starting again does not help.
pub const KUBELET_DIR: u8 = 4;
/// The state directory cannot be read or written.
pub const STATE: u8 = 5;
/// Another daemon runs on the same state directory.
pub const ALREADY_RUNNING: u8 = 6;
/// An actor died too often; a fresh start may help.
pub const ESCALATED: u8 = 7;
/// Nobody holds what `who` was asked for.
pub const NOBODY: u8 = 8;
/// `config import` printed a configuration without what has a wrong value in the source.
pub const INCOMPLETE: u8 = 9;
/// `doctor` found something that somebody should mend: a warning or an error.
pub const FINDINGS: u8 = 10;
/// The limits of the process leave no room for it: threads, descriptors, memory.
pub const LIMITS: u8 = 11;

/// What a code says to whoever reads it of a daemon that does not start, where it says more than that it failed.
#[must_use]
pub fn meaning(code: i32) -> Option<&'static str> {
    Some(match u8::try_from(code).ok()? {
        USAGE => "it does not know this command line",
        CONFIG => "the configuration is not valid",
        KUBELET_DIR => "the kubelet's directory cannot be one",
        STATE => "the state directory cannot be used",
        ALREADY_RUNNING => "the state directory is in use",
        LIMITS => "its limits leave it too few threads or descriptors",
        _ => return None,
    })
}

/// Why a verb ends without success: the sentence for standard error, and the code.
#[derive(Debug)]
pub struct Failed {
    /// One sentence: what failed, on what, why, what to do. `None` where the answer itself says it.
    pub sentence: Option<String>,
    /// One of the codes above.
    pub code: u8,
}

impl Failed {
    /// A failure with a code of its own.
    pub fn new(code: u8, sentence: impl std::fmt::Display) -> Self {
        Failed { sentence: Some(sentence.to_string()), code }
    }

    /// An answer that was given, and that callers are told by a code of its own.
    #[must_use]
    pub fn answered(code: u8) -> Self {
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
        Failed::new(CONFIG, error)
    }
}

impl From<crate::store::StoreError> for Failed {
    fn from(error: crate::store::StoreError) -> Self {
        let code = if matches!(error, crate::store::StoreError::InUse { .. }) { ALREADY_RUNNING } else { STATE };
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
            DaemonError::Escalated(_) => Failed::new(ESCALATED, error),
        }
    }
}

/// Ends a verb: the sentence goes to standard error, the code to the caller.
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
