//! A build without the cargo feature `cluster` has no TLS, and its configuration names no files.

use crate::domain::TlsFiles;
use std::io;
use tokio::sync::watch;

/// The stream of a connection after its handshake: there is none.
pub(super) type Secured<S> = S;

/// The certificate of the server: there is none.
#[derive(Debug, Clone)]
pub enum Tls {}

impl Tls {
    /// Always `None`.
    #[must_use]
    pub fn new(_: Option<&TlsFiles>, _: watch::Sender<Option<String>>) -> Option<Self> {
        None
    }

    /// Never called, since there is no value.
    ///
    /// # Errors
    /// Never.
    pub(super) async fn accept<S>(&self, _: S) -> io::Result<(Secured<S>, bool)> {
        match *self {}
    }
}
