//! Who may read the pages, where a token is asked for: `Authorization: Bearer …` (RFC 6750), compared with what is in a file.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A token file has no more bytes: tokens of Kubernetes have some 1,500.
const TOKEN_BYTES_MAX: u64 = 4096;

/// The token of a file, which is read at each request: whoever exchanges the file exchanges the token.
#[derive(Debug, Clone)]
pub struct Token(Arc<Kept>);

#[derive(Debug)]
struct Kept {
    path: PathBuf,
    /// Whether the log says that it cannot be read.
    said: AtomicBool,
}

/// Why somebody may not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denied {
    /// There is no token in the request, or another one.
    Unknown,
    /// It cannot be known: the file cannot be read.
    NoToken,
}

impl Token {
    /// The token of this file. One that cannot be read is logged at once, and lets nobody read until it can.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let token = Token(Arc::new(Kept { path, said: AtomicBool::new(false) }));
        drop(token.read());
        token
    }

    /// Whether these headers have the token.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), Denied> {
        let token = self.read()?;
        let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        if given.is_some_and(|given| same(given, token.trim_ascii())) { Ok(()) } else { Err(Denied::Unknown) }
    }

    fn read(&self) -> Result<Vec<u8>, Denied> {
        let Kept { path, said } = &*self.0;
        match read(path) {
            Ok(token) => {
                if said.swap(false, Ordering::Relaxed) {
                    tracing::info!(path = %path.display(), "the token file can be read again");
                }
                Ok(token)
            }
            Err(error) => {
                if !said.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        path = %path.display(), %error,
                        "the token file cannot be read, so /metrics and / are refused; mend `telemetry.token_file`"
                    );
                }
                Err(Denied::NoToken)
            }
        }
    }
}

fn read(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let problem = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    // A pipe would be waited for.
    if !fs::metadata(path)?.is_file() {
        return problem("it is no regular file");
    }
    let mut token = Vec::new();
    File::open(path)?.take(TOKEN_BYTES_MAX + 1).read_to_end(&mut token)?;
    match token.trim_ascii().len() as u64 {
        0 => problem("it is empty"),
        1..=TOKEN_BYTES_MAX if token.len() as u64 <= TOKEN_BYTES_MAX => Ok(token),
        _ => problem("it is larger than 4096 bytes"),
    }
}

/// What is behind `Bearer`, in any case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token.trim_ascii())
}

/// Whether both are the same, in a time that tells their lengths and nothing of what is in them.
fn same(given: &[u8], token: &[u8]) -> bool {
    let differing = given.iter().zip(token).fold(0, |differing, (one, other)| black_box(differing | (one ^ other)));
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
    fn the_token_of_the_file_is_let_in_and_nothing_else_and_a_new_one_counts_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "s3cret\n").unwrap();
        let token = Token::new(path.clone());
        for header in ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "] {
            assert_eq!(check(&token, Some(header)), Ok(()), "{header}");
        }
        for header in ["Bearer s3cre", "Bearer s3cret7", "Bearer ", "Bearer", "Basic s3cret", "s3cret", ""] {
            assert_eq!(check(&token, Some(header)), Err(Denied::Unknown), "{header}");
        }
        assert_eq!(check(&token, None), Err(Denied::Unknown));
        fs::write(&path, "another").unwrap();
        assert_eq!((check(&token, Some("Bearer s3cret")), check(&token, Some("Bearer another"))), (Err(Denied::Unknown), Ok(())));
    }

    #[test]
    fn a_file_that_cannot_be_read_lets_nobody_in() {
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
