//! The side of a node for `kubectl holdfast`: commands in a container, over WebSocket.

#![allow(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role};

/// The paths of the daemon on each node.
pub(crate) const PATHS: [&str; 4] = [
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
    /// An answer instead of the command: code and message.
    Refuse(u16, &'static str),
    /// Ends the connection in the middle of the answer.
    Cut,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Request {
    head: String,
    pub(crate) path: String,
    pub(crate) query: Vec<(String, String)>,
}

impl Request {
    /// Reads the head of a request; `None` if the client leaves.
    pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Option<Request> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
        }
        let head = String::from_utf8(head).unwrap();
        let target = head.split(' ').nth(1).unwrap();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let query = pairs.map(|(name, value)| (name.to_owned(), decoded(value))).collect();
        Some(Request { path: path.to_owned(), query, head })
    }

    /// The values of a parameter.
    pub(crate) fn values(&self, wanted: &str) -> Vec<String> {
        let of = self.query.iter().filter(|(name, _)| *name == wanted);
        of.map(|(_, value)| value.clone()).collect()
    }

    /// The words of the command after the program and the paths of the daemon.
    pub(crate) fn command(&self) -> Vec<String> {
        let command = self.values("command");
        assert_eq!(command[0], "holdfast");
        assert_eq!(command[1..5], PATHS);
        command[1..].to_vec()
    }

    fn header(&self, wanted: &str) -> &str {
        let line = self.head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case(wanted).then_some(value)
        });
        line.unwrap_or_else(|| panic!("no header {wanted}: {}", self.head))
    }

    /// Does with the command what the node does.
    pub(crate) async fn end(
        self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        behaviour: Behaviour,
    ) {
        if let Behaviour::Refuse(code, message) = behaviour {
            return answer(stream, code, &json!({"kind": "Status", "message": message})).await;
        }
        assert!(self.header("sec-websocket-protocol").contains("v5.channel.k8s.io"));
        let accept = derive_accept_key(self.header("sec-websocket-key").as_bytes());
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
        let parts = [(1, first), (2, stderr.as_bytes()), (1, rest), (3, status.as_bytes())];
        for (channel, data) in parts {
            if socket.send(message(channel, data)).await.is_err() {
                return;
            }
        }
        drop(socket.close(None).await);
    }
}

fn message(channel: u8, data: &[u8]) -> Message {
    Message::Binary([&[channel], data].concat().into())
}

/// An answer of one JSON document, after which the connection ends.
pub(crate) async fn answer(stream: &mut (impl AsyncWrite + Unpin), code: u16, body: &Value) {
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
            bytes.push(if byte == b'+' { b' ' } else { byte });
            rest = after;
        }
    }
    String::from_utf8(bytes).unwrap()
}
