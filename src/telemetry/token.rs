//! The token for pages: `Authorization: Bearer …` (RFC 6750), compared with the content of a file.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a token file. A token of Kubernetes has about 1,500.
const TOKEN_BYTES_MAX: u64 = 4096;

/// A token in a file. Each request reads the file, so a new token counts at once.
#[derive(Debug, Clone)]
pub struct Token(Arc<TokenFile>);

#[derive(Debug)]
struct TokenFile {
    path: PathBuf,
    /// Whether the log already reports that it cannot be read.
    logged: AtomicBool,
}

/// Why a request may not read pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denied {
    /// It has no token, or a wrong one.
    Unknown,
    /// The file cannot be read.
    NoToken,
    /// Its client has shown no certificate of the client authorities.
    NoCertificate,
    /// The user of its token has no right to read pages.
    Forbidden,
    /// The API server has not decided about its token.
    Undecided,
    /// Its peer has sent too many tokens that are not known.
    TooOften,
}

impl Token {
    /// The token of this file. While the file cannot be read, all requests are refused.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let token = Token(Arc::new(TokenFile { path, logged: AtomicBool::new(false) }));
        drop(token.read());
        token
    }

    /// Checks the headers of a request.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), Denied> {
        let token = self.read()?;
        let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        if given.is_some_and(|given| same(given, token.trim_ascii())) {
            Ok(())
        } else {
            Err(Denied::Unknown)
        }
    }

    fn read(&self) -> Result<Vec<u8>, Denied> {
        let TokenFile { path, logged } = &*self.0;
        match read(path) {
            Ok(token) => {
                if logged.swap(false, Ordering::Relaxed) {
                    tracing::info!(path = %path.display(), "the token file can be read again");
                }
                Ok(token)
            }
            Err(error) => {
                if !logged.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        path = %path.display(), %error,
                        "the token file cannot be read, so /metrics and / are refused; check `telemetry.token_file`"
                    );
                }
                Err(Denied::NoToken)
            }
        }
    }
}

fn read(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let problem = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    // Opening a pipe would block.
    if !fs::metadata(path)?.is_file() {
        return problem("it is not a regular file");
    }
    let mut token = Vec::new();
    File::open(path)?.take(TOKEN_BYTES_MAX + 1).read_to_end(&mut token)?;
    match token.trim_ascii().len() as u64 {
        0 => problem("it is empty"),
        1..=TOKEN_BYTES_MAX if token.len() as u64 <= TOKEN_BYTES_MAX => Ok(token),
        _ => problem("it is larger than 4096 bytes"),
    }
}

/// The token of a `Bearer` header.
pub(super) fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token.trim_ascii())
}

/// Compares in a time that depends on the lengths only.
pub(super) fn same(given: &[u8], token: &[u8]) -> bool {
    let differing = given
        .iter()
        .zip(token)
        .fold(0, |differing, (one, other)| black_box(differing | (one ^ other)));
    given.len() == token.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(token: &Token, header: Option<&str>) -> Result<(), Denied> {
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(AUTHORIZATION, header.parse().unwrap());
        }
        token.check(&headers)
    }

    #[test]
    fn only_the_token_of_the_file_is_accepted_and_a_new_one_counts_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "s3cret\n").unwrap();
        let token = Token::new(path.clone());
        for header in ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "] {
            assert_eq!(check(&token, Some(header)), Ok(()), "{header}");
        }
        for header in
            ["Bearer s3cre", "Bearer s3cret7", "Bearer ", "Bearer", "Basic s3cret", "s3cret", ""]
        {
            assert_eq!(check(&token, Some(header)), Err(Denied::Unknown), "{header}");
        }
        assert_eq!(check(&token, None), Err(Denied::Unknown));
        fs::write(&path, "another").unwrap();
        assert_eq!(
            (check(&token, Some("Bearer s3cret")), check(&token, Some("Bearer another"))),
            (Err(Denied::Unknown), Ok(()))
        );
    }

    #[test]
    fn without_a_readable_file_every_request_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = Token::new(path.clone());
        let denied = || assert_eq!(check(&token, Some("Bearer ")), Err(Denied::NoToken));
        denied();
        fs::write(&path, " \n").unwrap();
        denied();
        fs::write(&path, [b'x'; 4097]).unwrap();
        denied();
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        denied();
        fs::remove_file(&path).unwrap();
        fs::write(&path, [b'x'; 4096]).unwrap();
        assert_eq!(check(&token, Some(&format!("Bearer {}", "x".repeat(4096)))), Ok(()));
    }
}
