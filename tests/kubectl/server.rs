//! An API server with pods of the daemon: two lists, and exec over WebSocket.

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::spawn_blocking;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role};

/// The paths of the daemon on each node.
const PATHS: [&str; 4] = [
    "--host-root=/node/host",
    "--kubelet-dir=/node/kubelet",
    "--state-dir=/node/state",
    "--run-dir=/node/run",
];

/// What a node does with a command.
pub(crate) enum Behaviour {
    /// Exit code, standard output, standard error.
    Print(i32, String, String),
    /// Accepts the command and never ends it.
    Hang,
    /// The API server's answer instead of the command: code and message.
    Refuse(u16, &'static str),
    /// Ends the connection in the middle of the answer.
    Cut,
}

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
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8(head).unwrap();
    let target = head.split(' ').nth(1).unwrap();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let query: Vec<(&str, String)> = query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name, decoded(value)))
        .collect();
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        ["", "api", "v1", "nodes"] => {
            let selector = query.iter().find(|(name, _)| *name == "labelSelector");
            answer(
                &mut stream,
                200,
                &node_list(&shared, selector.map(|(_, value)| value.as_str())),
            )
            .await;
        }
        ["", "api", "v1", "namespaces", namespace, "pods"] => {
            let all = if namespace == "kube-system" { shared.nodes } else { 0 };
            assert!(query.contains(&("labelSelector", "app.kubernetes.io/name=holdfast".into())));
            let pods: Vec<Value> = (0..all).map(|index| pod(namespace, index)).collect();
            answer(&mut stream, 200, &json!({"items": pods})).await;
        }
        ["", "api", "v1", "namespaces", "kube-system", "pods", pod, "exec"] => {
            let running = shared.running.fetch_add(1, Ordering::SeqCst) + 1;
            shared.most.fetch_max(running, Ordering::SeqCst);
            exec(&shared, &mut stream, &head, pod, query).await;
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

async fn exec(
    shared: &Arc<Shared>,
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    head: &str,
    pod: &str,
    query: Vec<(&str, String)>,
) {
    let values = |wanted: &str| {
        let of = query.iter().filter(|(name, _)| *name == wanted);
        of.map(|(_, value)| value.clone()).collect::<Vec<String>>()
    };
    assert_eq!(values("container"), ["holdfast"]);
    let header = |wanted: &str| {
        let line = head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case(wanted).then_some(value)
        });
        line.unwrap_or_else(|| panic!("no header {wanted}: {head}"))
    };
    assert!(header("sec-websocket-protocol").contains("v5.channel.k8s.io"));
    let name = format!("node-{}", pod.strip_prefix("holdfast-").unwrap());
    let command = values("command");
    assert_eq!(command[0], "holdfast");
    assert_eq!(command[1..5], PATHS);
    let run = Arc::clone(shared);
    let behaviour = spawn_blocking(move || (run.run)(&name, &command[1..])).await.unwrap();
    if let Behaviour::Refuse(code, message) = behaviour {
        return answer(stream, code, &json!({"kind": "Status", "message": message})).await;
    }
    let accept = derive_accept_key(header("sec-websocket-key").as_bytes());
    let upgraded = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"
    );
    if stream.write_all(upgraded.as_bytes()).await.is_err() {
        return;
    }
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
    let (code, stdout, stderr) = match behaviour {
        Behaviour::Print(code, stdout, stderr) => (code, stdout, stderr),
        Behaviour::Cut => {
            drop(socket.send(message(1, b"{\"grants\": [")).await);
            return;
        }
        // Until the client leaves.
        _ => return while let Some(Ok(_)) = socket.next().await {},
    };
    let (first, rest) = stdout.as_bytes().split_at(stdout.len() / 2);
    let status = if code == 0 {
        json!({"status": "Success"})
    } else {
        json!({"status": "Failure", "reason": "NonZeroExitCode",
               "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]}})
    };
    let status = status.to_string();
    for (channel, data) in [(1, first), (2, stderr.as_bytes()), (1, rest), (3, status.as_bytes())] {
        if socket.send(message(channel, data)).await.is_err() {
            return;
        }
    }
    drop(socket.close(None).await);
}

fn message(channel: u8, data: &[u8]) -> Message {
    Message::Binary([&[channel], data].concat().into())
}

async fn answer(stream: &mut (impl AsyncWrite + Unpin), code: u16, body: &Value) {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {code} Code\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    drop(stream.write_all((head + &body).as_bytes()).await);
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%' {
            let digits = std::str::from_utf8(&after[..2]).unwrap();
            bytes.push(u8::from_str_radix(digits, 16).unwrap());
            rest = &after[2..];
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).unwrap()
}
