//! Requests for objects.

use super::*;
use crate::cluster::{Collection, Node, RESOURCE_SLICES, ResourceClaim};
use crate::domain::Allocated;
use crate::lab::sim::api_server::{Fault, Kind, User};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Notify;

struct Scene {
    folder: tempfile::TempDir,
    server: ApiServer,
    client: Client,
}

async fn scene() -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    let kubeconfig = server.kubeconfig(folder.path(), "first").unwrap();
    Scene { client: client(&kubeconfig), folder, server }
}

fn path(name: &str) -> String {
    Collection::at(RESOURCE_SLICES).object(name)
}

async fn create(client: &Client, object: &Value) -> Result<Value, ClusterError> {
    soon("a creation", client.create(RESOURCE_SLICES, object)).await
}

/// The code and the reason of a refusal.
fn refusal<T: std::fmt::Debug>(result: Result<T, ClusterError>) -> (u16, String) {
    let error = result.unwrap_err();
    (error.code().unwrap_or_else(|| panic!("{error}")), error.details().unwrap().reason.clone())
}

/// Faults for the first requests.
fn faults(server: &ApiServer, faults: Vec<Fault>) {
    let mut faults = faults.into_iter();
    server.on_request(move |_| faults.next());
}

fn count(server: &ApiServer, method: &str) -> usize {
    server.requests().iter().filter(|request| request.starts_with(method)).count()
}

#[tokio::test]
async fn objects_are_created_replaced_and_deleted_over_one_connection() {
    let Scene { folder: _folder, server, client } = scene().await;
    let created = create(&client, &slice("a", "one")).await.unwrap();
    let (uid, version) = (&created["metadata"]["uid"], &created["metadata"]["resourceVersion"]);
    assert!(uid.is_string() && version.is_string(), "{created}");
    assert_eq!(created["metadata"]["generation"], 1);
    let again = create(&client, &slice("a", "one")).await;
    assert_eq!(refusal(again), (409, "AlreadyExists".into()));

    let mut changed = created.clone();
    changed["spec"]["devices"][0]["attributes"]["model"]["string"] = "two".into();
    let replaced: Value = client.replace(&path("a"), &changed).await.unwrap();
    assert_eq!(replaced["metadata"]["generation"], 2);
    assert_eq!(server.object(Kind::ResourceSlice, "", "a"), Some(replaced.clone()));
    // The version that it had before.
    let stale = client.replace::<Value>(&path("a"), &changed).await;
    assert_eq!(refusal(stale), (409, "Conflict".into()));

    let own = Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", "gpu-7");
    let list = client.list::<Value>(&own).await.unwrap();
    assert_eq!(list.items, std::slice::from_ref(&replaced));
    let others = Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", "gpu-8");
    assert_eq!(client.list::<Value>(&others).await.unwrap().items, [] as [Value; 0]);

    let wrong = client.delete(&path("a"), "another", None).await;
    assert_eq!(refusal(wrong), (409, "Conflict".into()));
    let uid = uid.as_str().unwrap();
    let stale = client.delete(&path("a"), uid, version.as_str()).await;
    assert_eq!(refusal(stale), (409, "Conflict".into()));
    assert_eq!(client.delete(&path("a"), uid, None).await, Ok(true));
    assert_eq!(client.delete(&path("a"), uid, None).await, Ok(false));
    assert!(server.objects(Kind::ResourceSlice).is_empty());
    assert_eq!(client.find::<Value>(&path("a")).await, Ok(None));
    assert_eq!(server.connections().borrow().all, 1);
}

#[tokio::test]
async fn an_invalid_object_is_refused_with_the_fields_that_cause_it() {
    let Scene { folder: _folder, server, client } = scene().await;
    let mut wrong = slice("a", &"x".repeat(65));
    wrong["spec"]["devices"][0]["name"] = "GPU".into();
    let error = create(&client, &wrong).await.unwrap_err();
    assert_eq!(error.code(), Some(422));
    let causes = &error.details().unwrap().causes;
    let found: Vec<(&str, &str)> =
        causes.iter().map(|cause| (&*cause.reason, &*cause.field)).collect();
    let expected = [
        ("FieldValueInvalid", "spec.devices[0].name"),
        ("FieldValueTooLong", "spec.devices[0].attributes[model].string"),
    ];
    assert_eq!(found, expected);
    assert!(error.to_string().contains("may not be more than 64 bytes"), "{error}");
    assert!(server.objects(Kind::ResourceSlice).is_empty());
}

#[tokio::test]
async fn an_answer_404_that_is_not_about_the_object_is_no_absence() {
    let Scene { folder: _folder, server: _server, client } = scene().await;
    let path = "/apis/resource.k8s.io/v1beta3/resourceslices/a";
    let error = client.find::<Value>(path).await.unwrap_err();
    assert_eq!(error.to_string(), "the API server answered 404: 404 page not found\n");
    assert_eq!(client.node("gpu-8").await, Ok(None));
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_an_old_one_is_not_used() {
    let Scene { folder, server, client: _client } = scene().await;
    let credentials = credentials(&folder.path().join("kubeconfig"));
    let idle = Duration::from_millis(50);
    let limits = Limits { answer: HANG, idle, age: HANG };
    let client = Client::with_limits(credentials.clone(), limits);
    for number in 1..=2 {
        client.node("gpu-7").await.unwrap().unwrap();
        let mut connections = server.connections();
        let closed = connections.wait_for(|count| count.all == number && count.open == 0);
        soon("the end of the connection", closed).await.unwrap();
    }
    let limits = Limits { answer: HANG, idle: HANG, age: Duration::ZERO };
    let client = Client::with_limits(credentials, limits);
    for _ in 0..2 {
        client.node("gpu-7").await.unwrap().unwrap();
    }
    assert_eq!(server.connections().borrow().all, 4);
}

#[tokio::test]
async fn a_lost_answer_is_requested_again_unless_that_could_create_twice() {
    let Scene { folder: _folder, server, client } = scene().await;
    faults(&server, vec![Fault::BreakAfter]);
    client.node("gpu-7").await.unwrap().unwrap();
    assert_eq!(count(&server, "GET"), 2);

    faults(&server, vec![Fault::BreakAfter]);
    let error = create(&client, &slice("a", "one")).await.unwrap_err();
    assert!(matches!(error, ClusterError::Broken { .. }), "{error}");
    assert_eq!(count(&server, "POST"), 1);
    let created = server.object(Kind::ResourceSlice, "", "a").unwrap();

    faults(&server, vec![Fault::BreakAfter]);
    let uid = created["metadata"]["uid"].as_str().unwrap();
    assert_eq!(client.delete(&path("a"), uid, None).await, Ok(false), "the first has deleted it");
    assert_eq!(count(&server, "DELETE"), 2);

    faults(&server, vec![Fault::BreakBefore, Fault::BreakBefore]);
    let error = client.node("gpu-7").await.unwrap_err();
    assert!(matches!(error, ClusterError::Broken { .. }), "{error}");
    assert_eq!(count(&server, "GET"), 4, "it is repeated once");
}

#[tokio::test]
async fn a_server_that_was_started_again_is_found_again() {
    let Scene { folder: _folder, server, client } = scene().await;
    client.node("gpu-7").await.unwrap().unwrap();
    let (address, mut connections) = (server.address(), server.connections());
    drop(server);
    // The connections end after the listener. Then there is no sender either.
    drop(soon("the end of the server", connections.wait_for(|count| count.open == 0)).await);
    let server = ApiServer::start_at(address, "gpu-8", &[]).await.unwrap();
    client.node("gpu-8").await.unwrap().unwrap();
    assert_eq!(server.connections().borrow().all, 1);
}

#[tokio::test]
async fn a_refusal_states_how_long_to_wait_and_is_not_repeated() {
    let Scene { folder: _folder, server, client } = scene().await;
    for (code, reason) in [(429, "TooManyRequests"), (503, "ServiceUnavailable")] {
        let before = count(&server, "GET");
        faults(&server, vec![Fault::Refuse(code, Some(3))]);
        let error = client.node("gpu-7").await.unwrap_err();
        assert_eq!(error.retry_after(), Some(Duration::from_secs(3)));
        assert_eq!(refusal::<()>(Err(error)), (code, reason.into()));
        assert_eq!(count(&server, "GET"), before + 1);
    }
    client.node("gpu-7").await.unwrap().unwrap();
    assert_eq!(server.connections().borrow().all, 1, "a refusal is an answer");
}

#[tokio::test]
async fn an_answer_that_does_not_come_ends_the_connection() {
    let Scene { folder, server, client: _client } = scene().await;
    let answer = Duration::from_millis(200);
    let client = client_within(&folder.path().join("kubeconfig"), answer);
    faults(&server, vec![Fault::Delay(HANG)]);
    let error = client.node("gpu-7").await.unwrap_err();
    assert!(matches!(error, ClusterError::Silent { .. }), "{error}");
    assert_eq!(count(&server, "GET"), 1);
    client.node("gpu-7").await.unwrap().unwrap();
    assert_eq!(server.connections().borrow().all, 2);
}

#[tokio::test]
async fn the_answer_to_a_request_that_was_given_up_is_not_that_of_the_next() {
    let Scene { folder: _folder, server, client } = scene().await;
    create(&client, &slice("a", "one")).await.unwrap();
    let arrived = Arc::new(Notify::new());
    let (seen, requests) = (Arc::clone(&arrived), AtomicUsize::new(0));
    server.on_request(move |_| {
        seen.notify_one();
        let is_first = requests.fetch_add(1, Ordering::Relaxed) == 0;
        is_first.then_some(Fault::Delay(Duration::from_millis(20)))
    });
    tokio::select! {
        answer = client.get::<Value>("/api/v1/nodes/gpu-7") => panic!("{answer:?}"),
        () = arrived.notified() => {}
    }
    let found: Value = soon("a slice", client.get(&path("a"))).await.unwrap();
    assert_eq!(found["metadata"]["name"], "a");
    assert_eq!(server.connections().borrow().all, 2);
}

#[tokio::test]
async fn requests_at_the_same_time_get_their_own_answers() {
    let Scene { folder: _folder, server, client } = scene().await;
    let names: Vec<String> = (0..20).map(|number| format!("s-{number}")).collect();
    let creating = names.iter().map(|name| {
        let (client, object) = (client.clone(), slice(name, name));
        async move { create(&client, &object).await.unwrap() }
    });
    let created = futures_util::future::join_all(creating).await;
    for (name, object) in names.iter().zip(created) {
        assert_eq!(object["metadata"]["name"], name.as_str());
    }
    assert_eq!(server.connections().borrow().all, 1);
}

#[tokio::test]
async fn a_node_has_what_its_kubelet_has_read() {
    let Scene { folder: _folder, server, client } = scene().await;
    server.set_node_info("boot", "machine");
    let Node { metadata, status } = client.node("gpu-7").await.unwrap().unwrap();
    assert_eq!(metadata.name, "gpu-7");
    assert!(!metadata.uid.is_empty());
    let info = status.node_info;
    assert_eq!((info.boot_id.as_str(), info.machine_id.as_str()), ("boot", "machine"));
}

#[tokio::test]
async fn who_we_are_is_what_the_server_takes_us_for() {
    let Scene { folder: _folder, server, client } = scene().await;
    for (user, name, node) in [
        (User::Kubelet("gpu-7".into()), "system:node:gpu-7", Some("gpu-7")),
        (User::Pod(Some("gpu-8".into())), "system:serviceaccount:holdfast:holdfast", Some("gpu-8")),
        (User::Pod(None), "system:serviceaccount:holdfast:holdfast", None),
    ] {
        server.add_user(Some("first"), user);
        let found = client.who_am_i().await.unwrap();
        assert_eq!((found.username.as_str(), found.node()), (name, node));
    }
}

fn claim(device: &str) -> Value {
    let result = json!({
        "request": "gpu", "driver": "holdfast.dev", "pool": "gpu-7/gpu", "device": device,
    });
    json!({
        "metadata": { "namespace": "team", "name": "c" },
        "spec": { "devices": { "requests": [{ "name": "gpu" }] } },
        "status": {
            "allocation": { "devices": { "results": [result] } },
            "reservedFor": [{ "resource": "pods", "name": "p", "uid": "pu" }],
        },
    })
}

#[tokio::test]
async fn a_claim_is_read_with_the_rights_of_a_kubelet() {
    let Scene { folder: _folder, server, client } = scene().await;
    server.add_user(Some("first"), User::Kubelet("gpu-7".into()));
    server.put(Kind::ResourceClaim, claim("gpu-0"));
    let error = client.claim("team", "c").await.unwrap_err();
    assert_eq!(error.code(), Some(403));
    assert!(error.to_string().contains("grant get of resourceclaims"), "{error}");
    server.bind_claim("gpu-7", "team", "c");
    let ResourceClaim { metadata, status } = client.claim("team", "c").await.unwrap().unwrap();
    assert_eq!((metadata.namespace.as_str(), metadata.name.as_str()), ("team", "c"));
    assert_eq!(status.reserved_for[0].name, "p");
    let allocation = status.allocation.unwrap();
    let device = Allocated::from(&allocation.devices.results[0]);
    assert_eq!(device.name.to_string(), "gpu-7/gpu/gpu-0");
    // The kubelet's authorizer does not know a claim that was deleted.
    server.remove(Kind::ResourceClaim, "team", "c");
    assert_eq!(client.claim("team", "c").await.unwrap_err().code(), Some(403));
}

#[tokio::test]
async fn a_kubelet_may_list_the_pods_of_its_node_and_a_service_account_may_not() {
    let Scene { folder: _folder, server, client } = scene().await;
    for (name, node) in [("a", "gpu-7"), ("b", "gpu-7"), ("c", "gpu-8")] {
        let metadata = json!({ "namespace": "team", "name": name, "uid": format!("uid-{name}") });
        server.put(Kind::Pod, json!({ "metadata": metadata, "spec": { "nodeName": node } }));
    }
    server.add_user(Some("first"), User::Kubelet("gpu-7".into()));
    let pods = client.pods_of("gpu-7").await.unwrap();
    assert_eq!(pods.into_iter().collect::<Vec<_>>(), ["uid-a", "uid-b"]);
    assert_eq!(client.pods_of("gpu-8").await.unwrap_err().code(), Some(403));
    server.add_user(Some("first"), User::Pod(Some("gpu-7".into())));
    assert_eq!(client.pods_of("gpu-7").await.unwrap_err().code(), Some(403));
}

#[tokio::test]
async fn a_claim_that_does_not_exist_is_none_and_a_list_is_no_claim() {
    let Scene { folder: _folder, server, client } = scene().await;
    server.add_user(Some("first"), User::Pod(Some("gpu-7".into())));
    assert_eq!(client.claim("team", "c").await, Ok(None));
    server.add_user(Some("first"), User::Admin);
    server.put(Kind::ResourceClaim, claim("gpu-0"));
    for (namespace, name) in [("team", ""), ("", "c")] {
        let error = client.claim(namespace, name).await.unwrap_err();
        let is_no_claim = matches!(error, ClusterError::Unreadable(_)) || error.code() == Some(404);
        assert!(is_no_claim, "{error}");
    }
}
