//! An API server with pods of the daemon: two lists, and exec over WebSocket.

use crate::exec::{Behaviour, PATHS, Request, answer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::spawn_blocking;

type Run = dyn Fn(&str, &[String]) -> Behaviour + Send + Sync;

/// A running server. Its thread ends with the test.
pub(crate) struct Server {
    shared: Arc<Shared>,
    port: u16,
}

struct Shared {
    nodes: usize,
    run: Box<Run>,
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Server {
    /// Serves on a unix socket and on a port of the loopback interface.
    pub(crate) fn start(
        socket: &Path,
        nodes: usize,
        run: impl Fn(&str, &[String]) -> Behaviour + Send + Sync + 'static,
    ) -> Server {
        let (running, most) = Default::default();
        let shared = Arc::new(Shared { nodes, run: Box::new(run), running, most });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (unix, tcp) = runtime.block_on(async {
            (UnixListener::bind(socket).unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap())
        });
        let port = tcp.local_addr().unwrap().port();
        let served = Arc::clone(&shared);
        thread::spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        Ok((stream, _)) = unix.accept() => drop(tokio::spawn(serve(Arc::clone(&served), stream))),
                        Ok((stream, _)) = tcp.accept() => drop(tokio::spawn(serve(Arc::clone(&served), stream))),
                    }
                }
            });
        });
        Server { shared, port }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The most commands that ran at the same time.
    pub(crate) fn most_at_a_time(&self) -> usize {
        self.shared.most.load(Ordering::SeqCst)
    }
}

/// One request of a connection. Clients that want more connect again.
async fn serve(shared: Arc<Shared>, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let Some(request) = Request::read(&mut stream).await else { return };
    let path = request.path.clone();
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        ["", "api", "v1", "nodes"] => {
            let selector = request.values("labelSelector");
            let list = node_list(&shared, selector.first().map(String::as_str));
            answer(&mut stream, 200, &list).await;
        }
        ["", "api", "v1", "namespaces", namespace, "pods"] => {
            let all = if namespace == "kube-system" { shared.nodes } else { 0 };
            assert_eq!(request.values("labelSelector"), ["app.kubernetes.io/name=holdfast"]);
            let pods: Vec<Value> = (0..all).map(|index| pod(namespace, index)).collect();
            answer(&mut stream, 200, &json!({"items": pods})).await;
        }
        ["", "api", "v1", "namespaces", "kube-system", "pods", pod, "exec"] => {
            let running = shared.running.fetch_add(1, Ordering::SeqCst) + 1;
            shared.most.fetch_max(running, Ordering::SeqCst);
            assert_eq!(request.values("container"), ["holdfast"]);
            let name = format!("node-{}", pod.strip_prefix("holdfast-").unwrap());
            let (run, command) = (Arc::clone(&shared), request.command());
            let behaviour = spawn_blocking(move || (run.run)(&name, &command)).await.unwrap();
            request.end(&mut stream, behaviour).await;
            shared.running.fetch_sub(1, Ordering::SeqCst);
        }
        _ => answer(&mut stream, 404, &json!({"message": format!("no path {path}")})).await,
    }
}

fn node_list(shared: &Shared, selector: Option<&str>) -> Value {
    let daemons = (0..shared.nodes).map(|index| format!("node-{index:03}"));
    let bare = (0..2).map(|index| format!("bare-{index}"));
    let names: Vec<String> = match selector {
        None => daemons.chain(bare).collect(),
        Some(selector) => {
            assert_eq!(selector, "parity=odd");
            daemons.skip(1).step_by(2).collect()
        }
    };
    let items = names.iter().map(|name| json!({"metadata": {"name": name}}));
    json!({"items": items.collect::<Vec<_>>()})
}

fn pod(namespace: &str, index: usize) -> Value {
    json!({
        "metadata": {"name": format!("holdfast-{index:03}"), "namespace": namespace},
        "spec": {
            "nodeName": format!("node-{index:03}"),
            "containers": [{"name": "holdfast", "args": (["run"].into_iter().chain(PATHS).collect::<Vec<_>>())}],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "holdfast", "ready": true, "state": {"running": {}}}],
        },
    })
}
