//! Commands in containers: the exec API of Kubernetes over WebSocket.
//!
//! Each message is one channel's data with the channel's number as its first byte: 1 is standard
//! output, 2 standard error, 3 the end of the command as a `Status`
//! (<https://kubernetes.io/docs/reference/using-api/api-concepts/>, protocol `v5.channel.k8s.io`).
//! `v4` differs only in the end of standard input, which is not used here.

use super::bridge::{Bridge, accepted, encoded};
use super::targets::Pod;
use crate::domain::null_as_empty;
use futures_util::StreamExt as _;
use hyper::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

/// The limit of what one node prints. A history of 50,000 grants has about as much.
const PRINTED_BYTES_MAX: usize = 32 << 20;
/// A message's first read. Small, since each node has one.
const BUFFER_BYTES: usize = 16 << 10;

const PROTOCOLS: &str = "v5.channel.k8s.io, v4.channel.k8s.io";
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;

/// A command that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ended {
    /// The exit code.
    pub(super) code: i32,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

/// Runs a command in the container of a daemon.
///
/// # Errors
/// One sentence, when the command was not run, or its end is not known.
pub(super) async fn run(bridge: &Bridge, pod: &Pod, command: &[String]) -> Result<Ended, String> {
    let key = generate_key();
    let request = Request::get(path(pod, command))
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_VERSION, "13")
        .header(SEC_WEBSOCKET_KEY, &key)
        .header(SEC_WEBSOCKET_PROTOCOL, PROTOCOLS);
    let answer = accepted(bridge.send(request).await?, StatusCode::SWITCHING_PROTOCOLS).await?;
    let proof = answer.headers().get(SEC_WEBSOCKET_ACCEPT).map(|proof| proof.as_bytes().to_vec());
    if proof.as_deref() != Some(derive_accept_key(key.as_bytes()).as_bytes()) {
        return Err("the API server does not speak WebSocket (RFC 6455)".into());
    }
    let lost = |error: &dyn std::error::Error| format!("the connection was lost: {error}");
    let stream = hyper::upgrade::on(answer).await.map_err(|error| lost(&error))?;
    let config = WebSocketConfig::default()
        .read_buffer_size(BUFFER_BYTES)
        .max_message_size(Some(PRINTED_BYTES_MAX))
        .max_frame_size(Some(PRINTED_BYTES_MAX));
    let mut socket =
        WebSocketStream::from_raw_socket(TokioIo::new(stream), Role::Client, Some(config)).await;
    let mut ended = Ended::default();
    while let Some(message) = socket.next().await {
        let message = match message.map_err(|error| lost(&error))? {
            Message::Binary(message) => message,
            Message::Close(_) => break,
            _ => continue,
        };
        if let Some(code) = take(&mut ended, &message)? {
            ended.code = code;
            // Without an answer to our close: the command has ended, and nothing else is wanted.
            drop(socket.close(None).await);
            return Ok(ended);
        }
    }
    Err("the connection ended before the command".into())
}

fn path(Pod { namespace, name, container, .. }: &Pod, command: &[String]) -> String {
    let [namespace, name, container] = [namespace, name, container].map(|text| encoded(text));
    let mut path = format!(
        "/api/v1/namespaces/{namespace}/pods/{name}/exec?container={container}&stdout=true&stderr=true"
    );
    for word in command {
        path += "&command=";
        path += &encoded(word);
    }
    path
}

/// Adds one message. Returns the exit code if it is the end.
fn take(ended: &mut Ended, message: &[u8]) -> Result<Option<i32>, String> {
    let Some((channel, data)) = message.split_first() else { return Ok(None) };
    let printed = match *channel {
        STDOUT => &mut ended.stdout,
        STDERR => &mut ended.stderr,
        STATUS => return exit_code(data).map(Some),
        _ => return Ok(None),
    };
    if printed.len() + data.len() > PRINTED_BYTES_MAX {
        return Err(format!(
            "its answer is larger than {} MiB; ask for less, such as one device or `--since`",
            PRINTED_BYTES_MAX >> 20
        ));
    }
    printed.extend_from_slice(data);
    Ok(None)
}

/// The end of a command (API `meta/v1`, `Status`).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    status: String,
    message: String,
    details: Details,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    #[serde(deserialize_with = "null_as_empty")]
    causes: Vec<Cause>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Cause {
    reason: String,
    message: String,
}

fn exit_code(status: &[u8]) -> Result<i32, String> {
    let status: Status = serde_json::from_slice(status)
        .map_err(|error| format!("the end of the command cannot be read: {error}"))?;
    if status.status == "Success" {
        return Ok(0);
    }
    let code = status.details.causes.iter().find(|cause| cause.reason == "ExitCode");
    code.and_then(|cause| cause.message.parse().ok()).ok_or(status.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_channels_are_separate_and_the_status_is_the_end() {
        let mut ended = Ended::default();
        for (message, end) in [
            (&b"\x01{\"a\""[..], None),
            (b"\x02note", None),
            (b"", None),
            (b"\x04?", None),
            (b"\x01:1}", None),
            (b"\x03{\"status\":\"Success\"}", Some(0)),
        ] {
            assert_eq!(take(&mut ended, message), Ok(end));
        }
        assert_eq!((&ended.stdout[..], &ended.stderr[..]), (&b"{\"a\":1}"[..], &b"note"[..]));
    }

    #[test]
    fn a_failed_command_has_its_exit_code_and_any_other_failure_its_message() {
        let failed = br#"{"status":"Failure","reason":"NonZeroExitCode","message":"exit code 8",
            "details":{"causes":[{"reason":"ExitCode","message":"8"}]}}"#;
        assert_eq!(exit_code(failed), Ok(8));
        let refused = br#"{"status":"Failure","message":"container not found (\"holdfast\")"}"#;
        assert_eq!(exit_code(refused), Err("container not found (\"holdfast\")".into()));
        assert!(exit_code(b"?").is_err());
    }

    #[test]
    fn an_answer_without_end_is_refused() {
        let mut ended = Ended { stdout: vec![0; PRINTED_BYTES_MAX], ..Ended::default() };
        let sentence = take(&mut ended, b"\x01x").unwrap_err();
        assert!(sentence.starts_with("its answer is larger than 32 MiB"), "{sentence}");
    }

    #[test]
    fn each_word_of_the_command_is_a_value_of_the_query() {
        let pod = Pod::of("kube-system", "holdfast-x", "holdfast");
        let command = ["holdfast", "who", "--", "a&command=rm b"].map(str::to_owned);
        assert_eq!(
            path(&pod, &command),
            "/api/v1/namespaces/kube-system/pods/holdfast-x/exec?container=holdfast&stdout=true\
             &stderr=true&command=holdfast&command=who&command=--&command=a%26command%3Drm%20b"
        );
    }
}
