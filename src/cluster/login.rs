//! How to log in to an API server, before the files are read.

use crate::host::read_bounded;
use std::path::PathBuf;

/// The limit of a kubeconfig, a certificate, a key or a token.
pub(super) const BYTES_MAX: u64 = 1024 * 1024;

/// The address of the API server, and how to log in there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Login {
    /// `https://192.0.2.1:6443`.
    pub(super) server: String,
    /// The name in the server's certificate, if it is not that of the address.
    pub(super) server_name: Option<String>,
    /// The certificates of the authorities, as PEM.
    pub(super) authority: Option<Bytes>,
    /// The client's certificate and key, as PEM.
    pub(super) identity: Option<(Bytes, Bytes)>,
    pub(super) token: Option<Bytes>,
}

/// Bytes that are known, or in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Bytes {
    Known(Vec<u8>),
    In(PathBuf),
}

impl Bytes {
    /// The bytes; those of a file are read now.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn read(self) -> Result<Vec<u8>, String> {
        match self {
            Bytes::Known(bytes) => Ok(bytes),
            Bytes::In(file) => read_bounded(&file, BYTES_MAX)
                .map_err(|error| format!("cannot read `{}`: {error}", file.display())),
        }
    }
}
