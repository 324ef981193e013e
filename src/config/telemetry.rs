//! `[telemetry]`: the address of `/metrics`, its TLS, and who may read pages.

use super::error::hidden;
use super::tree::{Table, Value};
use super::{ConfigError, fragments, text};
use crate::domain::TlsFiles;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The default address of telemetry.
const DEFAULT_LISTEN: &str = "127.0.0.1:9477";

/// The validated keys.
pub(super) struct Telemetry {
    pub(super) listen: Option<SocketAddr>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) tls: Option<TlsFiles>,
    pub(super) authorize: bool,
}

/// Each key alone: a table may be a part of several files. [`contradiction`] checks the whole.
pub(super) fn telemetry(fragment: &fragments::Telemetry) -> Result<Telemetry, ConfigError> {
    let cert = tls_file(fragment.tls_cert.as_ref(), "telemetry.tls_cert")?;
    let key = tls_file(fragment.tls_key.as_ref(), "telemetry.tls_key")?;
    let client_ca = tls_file(fragment.tls_client_ca.as_ref(), "telemetry.tls_client_ca")?;
    Ok(Telemetry {
        listen: listen(fragment.listen.as_deref().unwrap_or(DEFAULT_LISTEN))?,
        token_file: file(fragment.token_file.as_ref(), "telemetry.token_file")?,
        tls: cert.zip(key).map(|(cert, key)| TlsFiles { cert, key, client_ca }),
        authorize: authorize(fragment.authorize.as_deref().unwrap_or("off"))?,
    })
}

fn listen(text: &str) -> Result<Option<SocketAddr>, ConfigError> {
    let problem = || {
        let text = hidden(text);
        ConfigError::new(format!(
            "`telemetry.listen` is `{text}`, but must be an address and port such as `{DEFAULT_LISTEN}`, or `off`"
        ))
    };
    if text == "off" { Ok(None) } else { text.parse().map(Some).map_err(|_| problem()) }
}

fn file(path: Option<&PathBuf>, key: &str) -> Result<Option<PathBuf>, ConfigError> {
    let Some(path) = path else { return Ok(None) };
    if !path.is_absolute() {
        return Err(ConfigError::new(format!("`{key}` must be an absolute path")));
    }
    text::path(&path.to_string_lossy(), key).map_err(ConfigError::new)?;
    Ok(Some(path.clone()))
}

fn tls_file(path: Option<&PathBuf>, key: &str) -> Result<Option<PathBuf>, ConfigError> {
    if path.is_some() && !cfg!(feature = "cluster") {
        return Err(ConfigError::new(format!(
            "`{key}` is set, but this build of Holdfast has no TLS (the cargo feature `cluster`)"
        )));
    }
    file(path, key)
}

fn authorize(text: &str) -> Result<bool, ConfigError> {
    match text {
        "off" => Ok(false),
        "kubernetes" if cfg!(feature = "cluster") => Ok(true),
        "kubernetes" => Err(ConfigError::new(
            "`telemetry.authorize` is `kubernetes`, but this build of Holdfast cannot connect to \
             the API server (the cargo feature `cluster`)",
        )),
        other => Err(ConfigError::new(format!(
            "`telemetry.authorize` is `{}`, but must be `kubernetes` or `off`",
            hidden(other)
        ))),
    }
}

/// The error of the merged files if their keys do not fit together: TLS without one of its files,
/// two ways to decide about a token, or tokens of the cluster on a network without TLS.
pub(super) fn contradiction(merged: &Table) -> Option<ConfigError> {
    let table = merged.get("telemetry").and_then(Value::as_table)?;
    let get = |key| table.get(key).filter(|value| value.as_text().is_some());
    let wrong = |at: &Value, problem: String| Some(ConfigError::new(problem).at(at.place.as_ref()));
    let tls = ["tls_cert", "tls_key", "tls_client_ca"];
    for key in tls {
        let Some(there) = get(key) else { continue };
        let missing = tls[..2].iter().find(|other| get(other).is_none());
        if let Some(missing) = missing {
            let problem = format!(
                "`telemetry.{key}` needs `telemetry.{missing}`; TLS has a certificate and its key"
            );
            return wrong(there, problem);
        }
    }
    let authorize = get("authorize").filter(|value| value.as_text() == Some("kubernetes"))?;
    if get("token_file").is_some() {
        return wrong(
            authorize,
            "`telemetry.authorize` and `telemetry.token_file` both decide about the token of a \
             request; remove one of them"
                .into(),
        );
    }
    let listen = get("listen").and_then(Value::as_text).unwrap_or(DEFAULT_LISTEN);
    let is_local = listen.parse::<SocketAddr>().map_or(true, |address| address.ip().is_loopback());
    if get("tls_cert").is_none() && !is_local {
        return wrong(
            authorize,
            "with `telemetry.authorize`, clients send tokens of the cluster, which need TLS outside \
             of this node; set `telemetry.tls_cert` and `telemetry.tls_key`"
                .into(),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::{Examined, Node};
    use super::*;
    use std::path::Path;

    fn examined(text: &str) -> Examined {
        let text = format!("[telemetry]\n{text}");
        Examined::alone(text.as_bytes(), Path::new("f"), &Node::default())
    }

    #[cfg(feature = "cluster")]
    const TLS: &str = "tls_cert = \"/c\"\ntls_key = \"/k\"\n";

    #[test]
    fn without_a_key_there_is_neither_tls_nor_authorization() {
        let config = examined("").config().unwrap();
        assert_eq!((config.tls, config.authorize), (None, false));
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn the_files_of_tls_and_the_authorization_are_read() {
        let config = examined(&format!(
            "listen = \"[::]:9477\"\n{TLS}tls_client_ca = \"/ca\"\nauthorize = \"kubernetes\""
        ));
        let config = config.config().unwrap();
        let (cert, key, client_ca) = ("/c".into(), "/k".into(), Some("/ca".into()));
        assert_eq!(config.tls, Some(TlsFiles { cert, key, client_ca }));
        assert!(config.authorize);
        let local = "listen = \"127.0.0.1:1\"\nauthorize = \"kubernetes\"";
        assert!(examined(local).config().unwrap().authorize, "no packet leaves this node");
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn keys_that_do_not_fit_together_are_one_sentence_with_their_line() {
        let open = "listen = \"0.0.0.0:9477\"\n";
        let both = format!("{TLS}token_file = \"/t\"\nauthorize = \"kubernetes\"");
        for (text, line, expected) in [
            ("tls_cert = \"/c\"".to_owned(), 2, "`telemetry.tls_cert` needs `telemetry.tls_key`"),
            ("tls_key = \"/k\"".into(), 2, "`telemetry.tls_key` needs `telemetry.tls_cert`"),
            (
                "tls_client_ca = \"/a\"".into(),
                2,
                "`telemetry.tls_client_ca` needs `telemetry.tls_cert`",
            ),
            (both, 5, "both decide about the token"),
            (format!("{open}authorize = \"kubernetes\""), 3, "which need TLS outside of this node"),
            ("authorize = \"yes\"".into(), 2, "must be `kubernetes` or `off`"),
            (
                format!("{open}tls_cert = \"c\"\ntls_key = \"/k\""),
                3,
                "`telemetry.tls_cert` must be an absolute path",
            ),
        ] {
            let problems = examined(&text).problems;
            let [problem] = problems.as_slice() else { panic!("{text}: {problems:?}") };
            assert!(problem.problem().contains(expected), "{problem}\nshould contain: {expected}");
            assert_eq!(problem.line(), Some(line), "{problem}");
        }
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn the_example_of_the_documentation_is_valid() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
        let page = std::fs::read_to_string(page).unwrap();
        let (_, rest) = page.split_once("```toml\n[telemetry]\n").unwrap();
        let config = examined(rest.split("```").next().unwrap()).config().unwrap();
        assert!(config.tls.is_some() && config.authorize);
    }

    /// As the DaemonSet has them: the address in a drop-in, the rest in the main file.
    #[cfg(feature = "cluster")]
    #[test]
    fn the_keys_may_be_in_different_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        let file = dir.path().join("config.toml");
        let drop_in = dir.path().join("config.d/telemetry.toml");
        std::fs::write(&file, "[telemetry]\ntls_key = \"/k\"\nauthorize = \"kubernetes\"").unwrap();
        let load = || super::super::load(Some(&file), &Node::default());
        std::fs::write(&drop_in, "[telemetry]\nlisten = \"0.0.0.0:1\"\ntls_cert = \"/c\"").unwrap();
        assert!(load().unwrap().tls.is_some());
        std::fs::write(&drop_in, "[telemetry]\nlisten = \"0.0.0.0:1\"").unwrap();
        assert!(load().unwrap_err().to_string().contains("needs `telemetry.tls_cert`"));
    }

    #[cfg(not(feature = "cluster"))]
    #[test]
    fn a_build_without_tls_refuses_its_keys() {
        for (text, expected) in [
            ("tls_cert = \"/c\"\ntls_key = \"/k\"", "`telemetry.tls_cert` is set, but this build"),
            ("authorize = \"kubernetes\"", "this build of Holdfast cannot connect"),
        ] {
            let problems = examined(text).problems;
            assert!(problems[0].problem().contains(expected), "{problems:?}");
        }
    }
}
