//! TLS to the API server: version 1.3, which every supported API server has, with the cluster's own
//! authority.

use super::credentials::Access;
use super::error::ClusterError;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::sync::Arc;

/// The settings of a connection.
///
/// # Errors
/// When a certificate or the key cannot be read, or the authority is missing.
pub(super) fn settings(access: &Access) -> Result<ClientConfig, ClusterError> {
    let problem = |what: &str, why: String| {
        ClusterError::Credentials(format!("{what} of `{}` cannot be used: {why}", access.server))
    };
    let authority = access.authority.as_deref().ok_or_else(|| {
        ClusterError::Credentials(format!(
            "the certificate of the authority of `{}` is missing; the system's authorities are \
             not used",
            access.server
        ))
    })?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority) {
        let certificate =
            certificate.map_err(|error| problem("the authority", error.to_string()))?;
        roots
            .add(certificate)
            .map_err(|error| problem("a certificate of the authority", error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(problem("the authority", "it has no certificate".into()));
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| problem("TLS", error.to_string()))?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &access.identity else {
        return Ok(builder.with_no_client_auth());
    };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificate)
        .collect::<Result<_, _>>()
        .map_err(|error| problem("the client certificate", error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(key)
        .map_err(|error| problem("the client key", error.to_string()))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| problem("the client certificate", error.to_string()))
}

/// The name that the server's certificate must have.
///
/// # Errors
/// When it is neither a DNS name nor an address.
pub(super) fn server_name(name: &str) -> Result<ServerName<'static>, ClusterError> {
    let plain = name.trim_start_matches('[').trim_end_matches(']').to_owned();
    ServerName::try_from(plain).map_err(|_| {
        ClusterError::Credentials(format!("`{name}` is neither a host name nor an address"))
    })
}
