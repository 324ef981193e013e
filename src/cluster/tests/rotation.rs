//! Credentials that change while a client runs.

use super::*;
use crate::cluster::{Collection, RESOURCE_SLICES};
use crate::lab::sim::api_server::{Fault, Kind, User};

#[tokio::test]
async fn a_renewed_token_is_used_after_the_first_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    let client = client(&server.kubeconfig(folder.path(), "first").unwrap());
    for token in ["first", "second"] {
        server.add_user(Some(token), User::Kubelet("gpu-7".into()));
    }
    server.require_token("first");
    client.node("gpu-7").await.unwrap().unwrap();

    // The file has the former token still: one more connection, and no third attempt.
    server.require_token("second");
    let error = client.node("gpu-7").await.unwrap_err();
    assert_eq!(error.code(), Some(401));
    assert_eq!(server.requests().len(), 3);
    assert_eq!(server.connections().borrow().all, 2);

    // It has the next token before the former one expires.
    std::fs::write(folder.path().join("token"), "second\n").unwrap();
    client.node("gpu-7").await.unwrap().unwrap();
    std::fs::write(folder.path().join("token"), "first\n").unwrap();
    server.require_token("first");
    let created: Value = client.create(RESOURCE_SLICES, &slice("a", "one")).await.unwrap();
    assert_eq!(server.objects(Kind::ResourceSlice), [created]);
}

/// Replaces the link of the kubelet: `kubelet-client-current.pem` points to the newest file.
fn rotate(folder: &Path, number: u32, pem: &str) {
    let file = format!("kubelet-client-{number}.pem");
    std::fs::write(folder.join(&file), pem).unwrap();
    let link = folder.join("next");
    std::os::unix::fs::symlink(file, &link).unwrap();
    std::fs::rename(link, folder.join("current.pem")).unwrap();
}

#[tokio::test]
async fn a_rotated_certificate_is_used_after_a_refusal_and_after_a_lost_connection() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    server.add_user(None, User::Kubelet("gpu-7".into()));
    let address = tls_in_front_of(server.address()).await;
    let kubeconfig = kubelets_kubeconfig(folder.path(), &format!("https://{address}"), AUTHORITY);
    rotate(folder.path(), 1, CLIENT);
    let client = client(&kubeconfig);
    let own = Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", "gpu-7");
    client.list::<Value>(&own).await.unwrap();
    assert_eq!(client.who_am_i().await.unwrap().node(), Some("gpu-7"));

    // The link has a certificate that the server does not accept. The open connection does not see
    // it until a request is refused.
    rotate(folder.path(), 2, OTHER);
    client.list::<Value>(&own).await.unwrap();
    for fault in [Fault::Refuse(401, None), Fault::BreakBefore] {
        let mut fault = Some(fault);
        server.on_request(move |_| fault.take());
        let error = client.list::<Value>(&own).await.unwrap_err();
        let is_refused =
            matches!(error, ClusterError::Connect { .. } | ClusterError::Broken { .. });
        assert!(is_refused, "{error}");
        rotate(folder.path(), 3, CLIENT);
        client.list::<Value>(&own).await.unwrap();
        rotate(folder.path(), 4, OTHER);
    }
    rotate(folder.path(), 5, CLIENT);
    let mut fault = Some(Fault::Refuse(401, None));
    server.on_request(move |_| fault.take());
    let created: Value = client.create(RESOURCE_SLICES, &slice("a", "one")).await.unwrap();
    assert_eq!(server.objects(Kind::ResourceSlice), [created]);
}

#[tokio::test]
async fn a_certificate_without_its_key_is_an_error_and_not_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    let address = tls_in_front_of(server.address()).await;
    let kubeconfig = kubelets_kubeconfig(folder.path(), &format!("https://{address}"), AUTHORITY);
    let (_, key) = OTHER.split_once("-----BEGIN PRIVATE KEY-----").unwrap();
    let (certificate, _) = CLIENT.split_once("-----BEGIN PRIVATE KEY-----").unwrap();
    let mixed = format!("{certificate}-----BEGIN PRIVATE KEY-----{key}");
    rotate(folder.path(), 1, &mixed);
    let client = client(&kubeconfig);
    let error = client.node("gpu-7").await.unwrap_err().to_string();
    assert!(error.contains("the client certificate of"), "{error}");
    rotate(folder.path(), 2, CLIENT);
    client.node("gpu-7").await.unwrap().unwrap();
}
