//! Where the credentials are, and how they are read.
//!
//! They are read before each connection. So a token that the kubelet has renewed in the pod, and a
//! client certificate that the kubelet has rotated (`kubelet-client-current.pem`), are used without
//! a restart.

use super::error::ClusterError;
use super::kubeconfig;
use super::login::{BYTES_MAX, Bytes, Login};
use crate::domain::ApiCredentials;
use crate::host::read_bounded;
use std::path::{Path, PathBuf};

/// The folder of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The kubeconfig of the kubelet of kubeadm, below the host's root.
const KUBELET_CONF: &str = "etc/kubernetes/kubelet.conf";

/// Where the credentials are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The kubeconfig that was configured, instead of those that are searched.
    kubeconfig: Option<PathBuf>,
    /// The folder of the pod's service account.
    service_account: PathBuf,
    /// The variables `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`, which every pod has.
    service: Option<(String, String)>,
    /// The kubelet's possible kubeconfigs.
    of_kubelet: [PathBuf; 2],
}

/// A [`Login`] whose files are read.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) server: String,
    pub(super) server_name: Option<String>,
    pub(super) authority: Option<Vec<u8>>,
    pub(super) identity: Option<(Vec<u8>, Vec<u8>)>,
    pub(super) token: Option<String>,
}

impl Credentials {
    /// The configured ones. `kubelet` is the kubelet's directory.
    #[must_use]
    pub fn new(configured: &ApiCredentials, kubelet: &Path, host_root: &Path) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let service = variable("KUBERNETES_SERVICE_HOST").zip(variable("KUBERNETES_SERVICE_PORT"));
        Credentials {
            kubeconfig: match configured {
                ApiCredentials::Auto => None,
                ApiCredentials::Kubeconfig(file) => Some(file.clone()),
            },
            service_account: SERVICE_ACCOUNT.into(),
            service,
            of_kubelet: [kubelet.join("kubeconfig"), host_root.join(KUBELET_CONF)],
        }
    }

    /// Reads them. May block on the disk.
    ///
    /// # Errors
    /// When there are none, or a file cannot be read.
    pub(super) fn read(&self) -> Result<Access, ClusterError> {
        let Login { server, server_name, authority, identity, token } =
            self.login().map_err(ClusterError::Credentials)?;
        let read = || {
            let token = token.map(|token| token.read()).transpose()?;
            Ok(Access {
                server,
                server_name,
                authority: authority.map(|bytes| bytes.read()).transpose()?,
                identity: match identity {
                    // The kubelet has both in one file and replaces it: they must be of one time.
                    Some((certificate, key)) if certificate == key => {
                        let both = certificate.read()?;
                        Some((both.clone(), both))
                    }
                    Some((certificate, key)) => Some((certificate.read()?, key.read()?)),
                    None => None,
                },
                token: token.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()),
            })
        };
        read().map_err(ClusterError::Credentials)
    }

    fn login(&self) -> Result<Login, String> {
        if let Some(file) = &self.kubeconfig {
            return of_kubeconfig(file);
        }
        let token = self.service_account.join("token");
        match &self.service {
            Some((host, port)) if token.exists() => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                Ok(Login {
                    server: format!("https://{host}:{port}"),
                    server_name: None,
                    authority: Some(Bytes::In(self.service_account.join("ca.crt"))),
                    identity: None,
                    token: Some(Bytes::In(token)),
                })
            }
            _ => match self.of_kubelet.iter().find(|file| file.exists()) {
                Some(file) => of_kubeconfig(file),
                None => Err(format!(
                    "the pod has no token of a service account in {}, and the kubelet has no \
                     kubeconfig at {} or {}; set `cluster.credentials`",
                    self.service_account.display(),
                    self.of_kubelet[0].display(),
                    self.of_kubelet[1].display()
                )),
            },
        }
    }
}

fn of_kubeconfig(file: &Path) -> Result<Login, String> {
    let problem = |why: String| format!("the kubeconfig `{}`: {why}", file.display());
    let bytes = read_bounded(file, BYTES_MAX)
        .map_err(|error| problem(format!("cannot read it: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|_| problem("it is not UTF-8".into()))?;
    kubeconfig::login(&text, file.parent().unwrap_or(Path::new("/"))).map_err(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Credentials that are searched below `dir`.
    fn below(dir: &Path, service: Option<(&str, &str)>) -> Credentials {
        let at = |path: &str| dir.join(path);
        Credentials {
            kubeconfig: None,
            service_account: at("account"),
            service: service.map(|(host, port)| (host.to_owned(), port.to_owned())),
            of_kubelet: [at("kubeconfig"), at("kubelet.conf")],
        }
    }

    #[test]
    fn a_pod_uses_its_service_account_and_reads_a_renewed_token() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("account")).unwrap();
        fs::write(dir.path().join("account/token"), "one\n").unwrap();
        fs::write(dir.path().join("account/ca.crt"), "CA").unwrap();
        let credentials = below(dir.path(), Some(("fd00::1", "443")));
        let access = credentials.read().unwrap();
        assert_eq!(access.server, "https://[fd00::1]:443");
        assert_eq!(access.token.as_deref(), Some("one"));
        assert_eq!(access.authority.as_deref(), Some("CA".as_bytes()));
        fs::write(dir.path().join("account/token"), "two").unwrap();
        assert_eq!(credentials.read().unwrap().token.as_deref(), Some("two"));
    }

    #[test]
    fn a_certificate_and_a_key_in_one_file_are_of_one_time() {
        let dir = tempfile::tempdir().unwrap();
        let config = "{current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
            clusters: [{name: a, cluster: {server: 'https://x'}}],
            users: [{name: a, user: {client-certificate: current, client-key: current}}]}";
        fs::write(dir.path().join("kubelet.conf"), config).unwrap();
        // As the kubelet does: a link to a file with a date in its name, which it replaces.
        let rotate = |number: usize| {
            fs::write(dir.path().join(format!("{}", number % 2)), number.to_string()).unwrap();
            let link = dir.path().join("next");
            std::os::unix::fs::symlink(format!("{}", number % 2), &link).unwrap();
            fs::rename(link, dir.path().join("current")).unwrap();
        };
        rotate(0);
        let credentials = below(dir.path(), None);
        std::thread::scope(|scope| {
            let rotating = scope.spawn(|| (1..2000).for_each(rotate));
            let mut seen = 0;
            while seen < 20 || !rotating.is_finished() {
                let (certificate, key) = credentials.read().unwrap().identity.unwrap();
                assert_eq!(certificate, key);
                seen += 1;
            }
        });
    }

    #[test]
    fn without_a_service_account_the_kubelets_kubeconfig_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let credentials = below(dir.path(), Some(("192.0.2.1", "443")));
        let error = credentials.read().unwrap_err().to_string();
        assert!(error.contains("set `cluster.credentials`"), "{error}");
        let config = "{current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
            clusters: [{name: a, cluster: {server: 'https://x'}}], users: [{name: a, user: {tokenFile: token}}]}";
        fs::write(dir.path().join("kubelet.conf"), config).unwrap();
        let error = credentials.read().unwrap_err().to_string();
        assert!(error.contains("cannot read `") && error.contains("token"), "{error}");
        fs::write(dir.path().join("token"), "t").unwrap();
        assert_eq!(credentials.read().unwrap().token.as_deref(), Some("t"));
    }
}
