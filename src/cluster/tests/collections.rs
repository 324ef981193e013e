//! Watches of whole objects.

use super::*;
use crate::cluster::watch::WHOLE;
use crate::cluster::{Collection, RESOURCE_SLICES, Watch, WatchEvent};
use crate::lab::sim::api_server::{Kind, User};

struct Scene {
    _folder: tempfile::TempDir,
    server: ApiServer,
    client: Client,
    watch: Watch<Value>,
}

/// A watch of the slices of `gpu-7`, and a client next to it, with the rights of the kubelet.
async fn scene() -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    server.add_user(Some("t"), User::Kubelet("gpu-7".into()));
    let kubeconfig = server.kubeconfig(folder.path(), "t").unwrap();
    let own = Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", "gpu-7");
    let times = Times { answer: HANG, quiet: HANG, silence: HANG, watch: HANG };
    let watch = Watch::with(credentials(&kubeconfig), own, WHOLE, times);
    Scene { client: client(&kubeconfig), _folder: folder, server, watch }
}

/// The next event: its type, and `name=model` of its objects.
async fn next(watch: &mut Watch<Value>) -> String {
    let text = |object: &Value| {
        let model = &object["spec"]["devices"][0]["attributes"]["model"]["string"];
        let part = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        format!("{}={}", part(&object["metadata"]["name"]), part(model))
    };
    match soon("an event", watch.next()).await {
        WatchEvent::Listed(items, version) => {
            assert!(version.parse::<u64>().is_ok(), "{version}");
            format!("listed {}", items.iter().map(text).collect::<Vec<_>>().join(" "))
        }
        WatchEvent::Added(object) => format!("added {}", text(&object)),
        WatchEvent::Modified(object) => format!("modified {}", text(&object)),
        WatchEvent::Deleted(object) => format!("deleted {}", text(&object)),
        WatchEvent::Failed { error, .. } => format!("failed {error}"),
    }
}

#[tokio::test]
async fn the_slices_of_a_node_are_listed_and_followed() {
    let Scene { _folder, server, client, mut watch } = scene().await;
    server.put(Kind::ResourceSlice, slice("old", "zero"));
    assert_eq!(next(&mut watch).await, "listed old=zero");
    let mut created: Value = client.create(RESOURCE_SLICES, &slice("a", "one")).await.unwrap();
    assert_eq!(next(&mut watch).await, "added a=one");
    // A slice of another node, and a bookmark, are no events.
    let mut other = slice("other", "x");
    other["spec"]["nodeName"] = "gpu-8".into();
    server.put(Kind::ResourceSlice, other);
    server.bookmark();
    created["spec"]["devices"][0]["attributes"]["model"]["string"] = "two".into();
    let path = Collection::at(RESOURCE_SLICES).object("a");
    let _: Value = client.replace(&path, &created).await.unwrap();
    assert_eq!(next(&mut watch).await, "modified a=two");
    assert_eq!(server.wipe("gpu-7", Some("holdfast.dev")), 2);
    assert_eq!(next(&mut watch).await, "deleted a=two");
    assert_eq!(next(&mut watch).await, "deleted old=zero");
    assert_eq!(*server.served().borrow(), Served { lists: 1, watches: 1, writes: 2, refused: 0 });
}

/// Its reader does other things while the server takes its time for the list.
#[tokio::test]
async fn a_list_goes_on_while_its_reader_does_not_wait_for_it() {
    let Scene { _folder, server, client: _client, mut watch } = scene().await;
    server.put(Kind::ResourceSlice, slice("a", "one"));
    server.on_request(|request| {
        (!request.is_watch()).then_some(Fault::Delay(Duration::from_millis(300)))
    });
    let mut drops = 0;
    let listed = loop {
        tokio::select! {
            event = next(&mut watch) => break event,
            () = tokio::time::sleep(Duration::from_millis(10)) => drops += 1,
        }
    };
    assert_eq!(listed, "listed a=one");
    assert!(drops > 1, "the reader did not wait");
    assert_eq!(server.served().borrow().lists, 1);
    watch.list_again();
    assert_eq!(next(&mut watch).await, "listed a=one");
    assert_eq!(server.served().borrow().lists, 2);
}

#[tokio::test]
async fn a_change_between_the_list_and_the_watch_is_not_lost() {
    let Scene { _folder, server, client: _client, mut watch } = scene().await;
    let puts = std::sync::atomic::AtomicBool::new(false);
    let (sender, mut watches) = tokio::sync::mpsc::unbounded_channel();
    server.on_request(move |request| {
        if request.is_watch() && !puts.swap(true, std::sync::atomic::Ordering::Relaxed) {
            sender.send(()).unwrap();
            // The change is made while the request for the watch waits.
            return Some(Fault::Delay(Duration::from_millis(50)));
        }
        None
    });
    let changing = async {
        watches.recv().await.unwrap();
        server.put(Kind::ResourceSlice, slice("a", "one"));
    };
    let ((), first) = tokio::join!(changing, next(&mut watch));
    assert_eq!(first, "listed ");
    assert_eq!(next(&mut watch).await, "added a=one");
}

#[tokio::test]
async fn a_list_is_made_again_when_it_is_requested_or_the_version_is_too_old() {
    let Scene { _folder, server, client: _client, mut watch } = scene().await;
    assert_eq!(next(&mut watch).await, "listed ");
    server.put(Kind::ResourceSlice, slice("a", "one"));
    watch.list_again();
    assert_eq!(next(&mut watch).await, "listed a=one");
    served(&server, |served| served.watches >= 2).await;
    server.expire();
    assert_eq!(next(&mut watch).await, "listed a=one");
    server.put(Kind::ResourceSlice, slice("a", "two"));
    assert_eq!(next(&mut watch).await, "modified a=two");
}

#[tokio::test]
async fn a_kubelet_may_not_watch_the_slices_of_all_nodes() {
    let Scene { _folder, server, client: _client, watch: _watch } = scene().await;
    let kubeconfig = server.kubeconfig(_folder.path(), "t").unwrap();
    let mut all: Watch<Value> =
        Watch::new(credentials(&kubeconfig), Collection::at(RESOURCE_SLICES));
    let failed = next(&mut all).await;
    assert!(failed.contains("answered 403: resourceslices"), "{failed}");
    assert!(failed.contains("grant list, watch, create, update and delete"), "{failed}");
}
