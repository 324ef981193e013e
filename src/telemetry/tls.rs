//! TLS at telemetry's address: version 1.3, with a certificate that is read again when it changes.
//!
//! ```text
//!   a connection ─▶ the last usable certificate and key ─▶ handshake
//!        │ a second after the last read
//!        ▼
//!   a thread of the pool reads the files ─▶ other content that fits together replaces them
//!                                       └▶ else the former ones stay, with a problem
//! ```
//!
//! No handshake waits for the disk. So the first connection after a change still gets the former
//! certificate. A session is never resumed: each connection shows its client certificate, and the
//! server keeps nothing of a connection that has ended.

use crate::domain::TlsFiles;
use crate::host::read_bounded;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

/// The stream of a connection after its handshake. On the heap: most servers have no TLS, and the
/// tasks of their connections stay small.
pub(super) type Secured<S> = Box<tokio_rustls::server::TlsStream<S>>;

/// Bytes of each file. A Secret of Kubernetes has at most a megabyte, and a chain a few KiB.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// The pause between two reads of the files. A certificate is renewed days before its end.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The protocol that clients may choose (ALPN): a client of HTTP/2 alone is refused.
const HTTP1: &[u8] = b"http/1.1";

/// The certificate of the server. Its clones share one.
#[derive(Debug, Clone)]
pub struct Tls(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    files: TlsFiles,
    read_again_after: Duration,
    state: Mutex<State>,
    problem: watch::Sender<Option<String>>,
}

#[derive(Debug)]
struct State {
    /// What the files had at the last read. `None` if one could not be read.
    contents: Option<Contents>,
    /// Those of the last usable content.
    settings: Option<Arc<ServerConfig>>,
    is_being_read: bool,
    read_at: Instant,
}

/// The contents of the files.
#[derive(PartialEq, Eq)]
struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Never the key.
        f.write_str("Contents")
    }
}

impl Tls {
    /// Reads the files. While they are not usable, `problem` has the reason. Without any usable
    /// content so far every connection is refused. `None` without files.
    #[must_use]
    pub fn new(files: Option<&TlsFiles>, problem: watch::Sender<Option<String>>) -> Option<Self> {
        files.map(|files| Self::reading_after(files.clone(), READ_AGAIN_AFTER, problem))
    }

    fn reading_after(
        files: TlsFiles,
        read_again_after: Duration,
        problem: watch::Sender<Option<String>>,
    ) -> Self {
        let state =
            State { contents: None, settings: None, is_being_read: true, read_at: Instant::now() };
        let shared = Shared { files, read_again_after, state: state.into(), problem };
        shared.read();
        Tls(Arc::new(shared))
    }

    /// The handshake of a connection. Also returns whether the client has shown a certificate of
    /// the client authorities. The caller limits the time.
    ///
    /// # Errors
    /// When there is no usable certificate, or the client does not complete the handshake.
    pub(super) async fn accept<S>(&self, stream: S) -> io::Result<(Secured<S>, bool)>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let settings = self.settings().ok_or_else(|| io::Error::other("no certificate"))?;
        let accepting = Box::pin(TlsAcceptor::from(settings).accept(stream).into_fallible());
        match accepting.await {
            Ok(stream) => {
                let is_known = stream.get_ref().1.peer_certificates().is_some();
                Ok((Box::new(stream), is_known))
            }
            Err((error, mut stream)) => {
                // The client gets the alert, which has the reason.
                drop(stream.shutdown().await);
                Err(error)
            }
        }
    }

    /// The last usable settings. Has the files read again if that was not done lately.
    fn settings(&self) -> Option<Arc<ServerConfig>> {
        let mut state = self.0.state();
        if !state.is_being_read && state.read_at.elapsed() >= self.0.read_again_after {
            state.is_being_read = true;
            let shared = Arc::clone(&self.0);
            drop(spawn_blocking(move || shared.read()));
        }
        state.settings.clone()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A reader sets the parts of the state one after the other, and cannot panic in between.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the files, and uses their content if it is another one and usable.
    fn read(&self) {
        let contents = Contents::read(&self.files);
        let mut state = self.state();
        state.is_being_read = false;
        state.read_at = Instant::now();
        let made = match contents {
            Ok(contents) if state.contents.as_ref() == Some(&contents) => return,
            Ok(contents) => {
                let made = settings(&contents, &self.files);
                state.contents = Some(contents);
                made
            }
            Err(why) => {
                state.contents = None;
                Err(why)
            }
        };
        let had_some = state.settings.is_some();
        match made {
            Ok(made) => {
                state.settings = Some(Arc::new(made));
                drop(state);
                self.problem.send_replace(None);
                tracing::info!(cert = %self.files.cert.display(), "using this TLS certificate for /metrics");
            }
            Err(why) => {
                drop(state);
                self.report(had_some, &why);
            }
        }
    }

    fn report(&self, had_some: bool, why: &str) {
        let so = if had_some {
            "the former certificate stays in use"
        } else {
            "every connection is refused"
        };
        let problem = format!("the TLS files of telemetry are not usable, so {so}: {why}");
        if self.problem.send_replace(Some(problem.clone())).as_ref() != Some(&problem) {
            tracing::error!("{problem}; fix the files, which are read again");
        }
    }
}

impl Contents {
    fn read(files: &TlsFiles) -> Result<Self, String> {
        let read = |path: &Path| {
            read_bounded(path, FILE_BYTES_MAX)
                .map_err(|error| format!("cannot read `{}`: {error}", path.display()))
        };
        Ok(Contents {
            cert: read(&files.cert)?,
            key: read(&files.key)?,
            client_ca: files.client_ca.as_deref().map(read).transpose()?,
        })
    }
}

/// The settings of the server.
fn settings(contents: &Contents, files: &TlsFiles) -> Result<ServerConfig, String> {
    let wrong = |path: &Path, why: &dyn std::fmt::Display| format!("`{}`: {why}", path.display());
    let of_cert = |why: &dyn std::fmt::Display| wrong(&files.cert, why);
    let chain = certificates(&contents.cert).map_err(|why| of_cert(&why))?;
    let key = PrivateKeyDer::from_pem_slice(&contents.key)
        .map_err(|error| wrong(&files.key, &format!("no usable private key: {error}")))?;
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?;
    let builder = match files.client_ca.as_deref().zip(contents.client_ca.as_deref()) {
        None => builder.with_no_client_auth(),
        Some((path, authority)) => {
            let verifier = verifier(authority, provider).map_err(|why| wrong(path, &why))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut settings = builder.with_single_cert(chain, key).map_err(|error| {
        of_cert(&format!("not usable with the key `{}`: {error}", files.key.display()))
    })?;
    settings.alpn_protocols = vec![HTTP1.to_vec()];
    settings.session_storage = Arc::new(NoServerSessionStorage {});
    settings.send_tls13_tickets = 0;
    Ok(settings)
}

/// Checks certificates of clients. A client without one is accepted: the kubelet's probes have
/// none, and pages are refused later.
fn verifier(
    authority: &[u8],
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authority)? {
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    builder.allow_unauthenticated().build().map_err(|error| error.to_string())
}

/// The certificates of a file, at least one.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err("it has no certificate".into()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
