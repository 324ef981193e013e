//! Who may read pages. A request needs everything that the configuration requires: a client
//! certificate, a token of a file, or a token whose user has the right in the API server.

use super::connections::Connection;
use super::reviews::{Reviews, Undecided, Verdict};
use super::token::{Denied, Token, bearer};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

/// What a request for a page must have. By default nothing.
#[derive(Debug, Clone, Default)]
pub struct Readers {
    /// The token of a file.
    pub token: Option<Token>,
    /// A token that the API server permits.
    pub reviews: Option<Reviews>,
    /// A certificate of the client authorities.
    pub certificate: bool,
}

impl Readers {
    /// Checks a request with these headers on this connection.
    pub(super) async fn check(
        &self,
        connection: &Connection,
        headers: &HeaderMap,
    ) -> Result<(), Denied> {
        if self.certificate && !connection.is_certified() {
            return Err(Denied::NoCertificate);
        }
        if let Some(token) = &self.token {
            token.check(headers)?;
        }
        if let Some(reviews) = &self.reviews {
            let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
            let given = given.ok_or(Denied::Unknown)?;
            match reviews.verdict(given, connection.peer()).await {
                Ok(Verdict::Permitted) => {}
                Ok(Verdict::Unknown) => return Err(Denied::Unknown),
                Ok(Verdict::Forbidden) => return Err(Denied::Forbidden),
                Err(Undecided::TooOften) => return Err(Denied::TooOften),
                Err(Undecided::NoAnswer) => return Err(Denied::Undecided),
            }
        }
        Ok(())
    }
}
