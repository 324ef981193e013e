//! HTTP/1.1, as far as the simulated API server needs it.

use super::refusal::Refusal;
use super::target::percent_decoded;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// The limit of a request's body (apiserver's `MaxRequestBodyBytes`).
pub(super) const BODY_BYTES_MAX: usize = 3 << 20;

/// A request.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// `GET`, `POST`, …
    pub method: String,
    /// The path.
    pub path: String,
    /// The parameters, decoded.
    pub query: BTreeMap<String, String>,
    /// The bearer token.
    pub token: Option<String>,
    /// The header `Accept`.
    pub accept: String,
    /// The header `Content-Type`.
    pub content_type: String,
    /// The body; empty if it is too long.
    pub body: Vec<u8>,
    /// The header `Content-Length`.
    pub length: usize,
}

impl Request {
    /// Whether it opens a watch.
    #[must_use]
    pub fn is_watch(&self) -> bool {
        let value = self.query.get("watch").map(String::as_str);
        self.method == "GET" && matches!(value, Some("true" | "1"))
    }

    /// Reads a request; `None` at the end of the connection.
    pub(super) async fn read(stream: &mut BufReader<TcpStream>) -> io::Result<Option<Request>> {
        let mut request = Request::default();
        let mut line = String::new();
        loop {
            line.clear();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(None);
            }
            let text = line.trim_end();
            if text.is_empty() {
                break;
            }
            if request.method.is_empty() {
                request.first_line(text);
            } else if let Some((name, value)) = text.split_once(": ") {
                request.header(&name.to_ascii_lowercase(), value);
            }
        }
        if request.length <= BODY_BYTES_MAX {
            request.body = vec![0; request.length];
            stream.read_exact(&mut request.body).await?;
        }
        Ok(Some(request))
    }

    fn first_line(&mut self, text: &str) {
        let mut words = text.split(' ');
        words.next().unwrap_or_default().clone_into(&mut self.method);
        let target = words.next().unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        path.clone_into(&mut self.path);
        let pair = |pair: &str| {
            pair.split_once('=').map(|(key, value)| (key.to_owned(), percent_decoded(value)))
        };
        self.query = query.split('&').filter_map(pair).collect();
    }

    fn header(&mut self, name: &str, value: &str) {
        match name {
            "authorization" => self.token = value.strip_prefix("Bearer ").map(str::to_owned),
            "accept" => value.clone_into(&mut self.accept),
            "content-type" => value.clone_into(&mut self.content_type),
            "content-length" => self.length = value.parse().unwrap_or(0),
            _ => {}
        }
    }
}

/// Writes a whole answer. `header` is further lines of the head.
pub(super) async fn answer(
    stream: &mut BufReader<TcpStream>,
    code: u16,
    header: &str,
    body: &str,
) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {code} Code\r\nContent-Type: application/json\r\n{header}Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).await
}

/// Begins an answer whose length is not known.
pub(super) async fn begin(stream: &mut BufReader<TcpStream>) -> io::Result<()> {
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await
}

/// Writes a line of such an answer.
pub(super) async fn chunk(stream: &mut BufReader<TcpStream>, line: &str) -> io::Result<()> {
    let mut text = String::new();
    // The end of the line is part of the chunk.
    let _ = write!(text, "{:x}\r\n{line}\n\r\n", line.len() + 1);
    stream.write_all(text.as_bytes()).await
}

/// Ends such an answer.
pub(super) async fn end(stream: &mut BufReader<TcpStream>) -> io::Result<()> {
    stream.write_all(b"0\r\n\r\n").await
}

/// The body of a request.
pub(super) fn body(request: &Request) -> Result<Value, Refusal> {
    body_as(request, "application/json")
}

/// The body of a request with this type.
pub(super) fn body_as(request: &Request, content_type: &str) -> Result<Value, Refusal> {
    if !request.content_type.starts_with(content_type) {
        let message =
            format!("the body of the request was in an unknown format, not {content_type}");
        return Err(Refusal::new(415, message));
    }
    let read: Result<Value, _> = serde_json::from_slice(&request.body);
    match read {
        Ok(object) if object.is_object() => Ok(object),
        Ok(_) => Err(Refusal::new(400, "the body of the request is not an object")),
        Err(error) => Err(Refusal::new(400, error.to_string())),
    }
}
