//! Certificates of the control plane, and the kubeconfigs of its clients, made with openssl.

use crate::node::{ADDRESS, NODE};
use crate::real::sandbox::output;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The API server, from everywhere in the namespace.
pub(crate) const SERVER: &str = "https://192.0.2.1:6443";

/// The clients with a kubeconfig, and their subjects (Kubernetes: `Authenticating`, X.509 client
/// certificates).
fn clients() -> [(&'static str, String); 4] {
    [
        ("admin", "/O=system:masters/CN=admin".into()),
        ("controller-manager", "/CN=system:kube-controller-manager".into()),
        ("scheduler", "/CN=system:kube-scheduler".into()),
        ("kubelet", format!("/O=system:nodes/CN=system:node:{NODE}")),
    ]
}

/// The kubeconfig of a client.
pub(crate) fn kubeconfig(dir: &Path, client: &str) -> PathBuf {
    dir.join(format!("{client}.kubeconfig"))
}

/// Makes all of them in `dir`.
pub(crate) fn make(dir: &Path) {
    let mut authority = openssl(dir, "req -x509 -nodes -days 2 -subj /CN=ca");
    output(authority.args(["-keyout", "ca.key", "-out", "ca.crt"]).args(KEY));
    output(openssl(dir, "genpkey -algorithm EC -out sa.key").args(&KEY[2..]));
    output(&mut openssl(dir, "pkey -in sa.key -pubout -out sa.pub"));
    let names = format!(
        "subjectAltName=IP:{ADDRESS},IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc\n"
    );
    certificate(dir, "server", "/CN=kube-apiserver", &names);
    for (client, subject) in clients() {
        make_client(dir, client, &subject);
    }
}

/// Makes the certificate and the kubeconfig of a client.
pub(crate) fn make_client(dir: &Path, client: &str, subject: &str) {
    certificate(dir, client, subject, "");
    let user = json!({
        "client-certificate": dir.join(format!("{client}.crt")),
        "client-key": dir.join(format!("{client}.key")),
    });
    write_kubeconfig(dir, client, &user);
}

/// Writes a kubeconfig with this user. A JSON document is a YAML document.
pub(crate) fn write_kubeconfig(dir: &Path, client: &str, user: &serde_json::Value) {
    let cluster = json!({"server": SERVER, "certificate-authority": dir.join("ca.crt")});
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": client, "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": client}}],
        "current-context": "test",
    });
    fs::write(kubeconfig(dir, client), config.to_string()).unwrap();
}

/// A new key: `-newkey ec` of `req`, and the curve.
const KEY: [&str; 4] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"];

fn openssl(dir: &Path, arguments: &str) -> Command {
    let mut openssl = Command::new("openssl");
    openssl.current_dir(dir).args(arguments.split(' '));
    openssl
}

fn certificate(dir: &Path, name: &str, subject: &str, names: &str) {
    let mut request = openssl(dir, "req -new -nodes");
    request.args(["-subj", subject, "-keyout", &format!("{name}.key")]);
    output(request.args(["-out", &format!("{name}.csr")]).args(KEY));
    let usage = format!("{names}extendedKeyUsage=serverAuth,clientAuth\n");
    fs::write(dir.join(format!("{name}.ext")), usage).unwrap();
    let mut sign = openssl(dir, "x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 2");
    sign.args(["-in", &format!("{name}.csr"), "-extfile", &format!("{name}.ext")]);
    output(sign.args(["-out", &format!("{name}.crt")]));
}
