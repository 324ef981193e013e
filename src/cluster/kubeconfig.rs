//! A kubeconfig: the API server of its current context, and the user's credentials (client-go's
//! `clientcmd/api/v1`). Relative paths begin in the folder of the kubeconfig.

use super::login::{Bytes, Login};
use crate::config::import::yaml;
use crate::domain::null_as_empty;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::path::Path;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct File {
    current_context: String,
    #[serde(deserialize_with = "null_as_empty")]
    contexts: Vec<Named>,
    #[serde(deserialize_with = "null_as_empty")]
    clusters: Vec<Named>,
    #[serde(deserialize_with = "null_as_empty")]
    users: Vec<Named>,
}

/// An element of one of the three lists.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Named {
    name: String,
    context: Context,
    cluster: Cluster,
    user: User,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Cluster {
    server: String,
    tls_server_name: Option<String>,
    certificate_authority: Option<String>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: bool,
    proxy_url: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct User {
    client_certificate: Option<String>,
    client_certificate_data: Option<String>,
    client_key: Option<String>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<String>,
    username: Option<String>,
    exec: Option<serde_json::Value>,
    auth_provider: Option<serde_json::Value>,
}

/// The login of the current context. `folder` contains the kubeconfig.
///
/// # Errors
/// One part of a sentence: what is missing or not supported.
pub(super) fn login(text: &str, folder: &Path) -> Result<Login, String> {
    let file: File = serde_json::from_value(yaml(text)?)
        .map_err(|error| format!("it is not a kubeconfig: {error}"))?;
    let File { current_context, contexts, clusters, users } = file;
    let find = |list: Vec<Named>, what: &str, name: &str| {
        list.into_iter()
            .find(|entry| entry.name == name)
            .ok_or_else(|| format!("its {what} `{name}` does not exist"))
    };
    let Context { cluster, user } = find(contexts, "context", &current_context)?.context;
    let cluster = find(clusters, "cluster", &cluster)?.cluster;
    let user = find(users, "user", &user)?.user;
    for (is_used, what) in [
        (cluster.insecure_skip_tls_verify, "`insecure-skip-tls-verify`"),
        (cluster.proxy_url.is_some(), "`proxy-url`"),
        (user.exec.is_some(), "`exec` (a program that makes credentials)"),
        (user.auth_provider.is_some(), "`auth-provider`"),
        (user.username.is_some(), "`username` (basic authentication)"),
    ] {
        if is_used {
            return Err(format!(
                "it uses {what}, which is not supported; use a service account, a token or a \
                 client certificate"
            ));
        }
    }
    let bytes = |data: Option<String>, file: Option<String>, key: &str| match (data, file) {
        (Some(data), _) => STANDARD
            .decode(data.split_ascii_whitespace().collect::<String>())
            .map(|bytes| Some(Bytes::Known(bytes)))
            .map_err(|error| format!("its `{key}-data` is not base64: {error}")),
        (None, file) => Ok(file.map(|file| Bytes::In(folder.join(file)))),
    };
    let certificate =
        bytes(user.client_certificate_data, user.client_certificate, "client-certificate")?;
    let key = bytes(user.client_key_data, user.client_key, "client-key")?;
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err("it needs both a client certificate and a client key".into()),
    };
    let token = user.token_file.map(|file| Bytes::In(folder.join(file)));
    let token = token.or(user.token.map(|token| Bytes::Known(token.into_bytes())));
    Ok(Login {
        server: cluster.server,
        server_name: cluster.tls_server_name,
        authority: bytes(
            cluster.certificate_authority_data,
            cluster.certificate_authority,
            "certificate-authority",
        )?,
        identity,
        token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As kubeadm writes it for the kubelet, with another context next to it.
    const KUBELET: &str = "apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: Q0E=
    server: https://192.0.2.1:6443
  name: default-cluster
contexts:
- context: { cluster: other, user: other }
  name: other
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
preferences: {}
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
";

    fn read(text: &str) -> Result<Login, String> {
        login(text, Path::new("/etc/kubernetes"))
    }

    #[test]
    fn the_kubelets_kubeconfig_is_read() {
        let pem = || Bytes::In("/var/lib/kubelet/pki/kubelet-client-current.pem".into());
        let expected = Login {
            server: "https://192.0.2.1:6443".into(),
            server_name: None,
            authority: Some(Bytes::Known(b"CA".to_vec())),
            identity: Some((pem(), pem())),
            token: None,
        };
        assert_eq!(read(KUBELET), Ok(expected));
    }

    #[test]
    fn paths_are_relative_to_the_kubeconfig_and_a_token_file_overrides_a_token() {
        let text = "{current-context: a, contexts: [{name: a, context: {cluster: b, user: c}}],
            clusters: [{name: b, cluster: {server: 'https://x', certificate-authority: ca.crt, tls-server-name: y}}],
            users: [{name: c, user: {token: 123, tokenFile: token}}]}";
        let login = read(text).unwrap();
        assert_eq!(login.authority, Some(Bytes::In("/etc/kubernetes/ca.crt".into())));
        assert_eq!(login.token, Some(Bytes::In("/etc/kubernetes/token".into())));
        assert_eq!(login.server_name.as_deref(), Some("y"));
        let login = read(&text.replace(", tokenFile: token", "")).unwrap();
        assert_eq!(login.token, Some(Bytes::Known(b"123".to_vec())));
    }

    #[test]
    fn what_is_missing_or_not_supported_is_named() {
        let certificate =
            "    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem\n";
        for (from, to, expected) in [
            ("current-context: default-context\n", "", "its context `` does not exist"),
            ("cluster: default-cluster", "cluster: x", "its cluster `x` does not exist"),
            ("user: default-auth", "user: x", "its user `x` does not exist"),
            (certificate, "", "it needs both a client certificate and a client key"),
            (certificate, "    exec: { command: aws }\n", "it uses `exec`"),
            ("Q0E=", "Q?E=", "its `certificate-authority-data` is not base64"),
            ("    server:", "    insecure-skip-tls-verify: true\n    server:", "not supported"),
            ("clusters:\n", "clusters: [\n", "neither YAML nor JSON"),
            ("current-context: default-context", "current-context: []", "it is not a kubeconfig"),
        ] {
            let text = KUBELET.replacen(from, to, 1);
            assert_ne!(text, KUBELET, "{from}");
            let problem = read(&text).unwrap_err();
            assert!(problem.contains(expected), "{problem}\nshould contain: {expected}");
        }
        // As `kubectl config view` writes an empty one.
        let empty = "{current-context: a, contexts: null, clusters: null, users: null}";
        assert_eq!(read(empty), Err("its context `a` does not exist".into()));
    }

    proptest! {
        #[test]
        fn no_text_panics(cut in 0_usize..KUBELET.len(), piece in "[\\[\\]{}:,\"'\n -]{0,4}") {
            drop(read(&format!("{}{piece}{}", &KUBELET[..cut], &KUBELET[cut..])));
        }
    }
}
