//! The files of a TLS server.

use std::path::PathBuf;

/// The files of TLS at telemetry's address, in PEM. The paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, followed by those of the authorities between it and the root.
    pub cert: PathBuf,
    /// Its private key: PKCS #8, PKCS #1 or SEC 1, not encrypted.
    pub key: PathBuf,
    /// The authorities whose client certificates may read pages. `None` requests no certificate.
    pub client_ca: Option<PathBuf>,
}
