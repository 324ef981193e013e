//! The routes that read the whole ledger, on threads of their own.

use super::document::{LedgerEnd, Line};
use super::{Failure, Reply, Source, failure, reply};
use crate::store::{Export, Store};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use std::convert::Infallible;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Bytes of the ledger in one chunk of the response. The history is ten times as large as the
/// daemon's memory, so it is streamed in chunks.
const CHUNK_BYTES: usize = 64 * 1024;
/// Chunks that may wait for the reader.
const CHUNKS_MAX: usize = 2;
/// How long a reader may take to receive one chunk.
const READER_TIMEOUT: Duration = Duration::from_secs(30);
/// How often verification is repeated when a ledger in use seems to be damaged.
const VERIFY_TRIES: usize = 2;

/// Streams the ledger, one [`Line`] after the other.
pub(super) async fn stream(State(source): State<Source>) -> Result<impl IntoResponse, Failure> {
    let export = source.with_store(Store::exporter).await?.map_err(failure)?;
    let (pieces, body) = mpsc::channel(CHUNKS_MAX);
    let runtime = Handle::current();
    // A reader that disconnected or that stopped reading gets nothing further.
    let send = move |piece: Vec<u8>| {
        let sent = runtime
            .block_on(async { timeout(READER_TIMEOUT, pieces.send(Bytes::from(piece))).await });
        matches!(sent, Ok(Ok(())))
    };
    source.on_a_thread(move || send_export(export, send))?;
    let body = Body::from_stream(ReceiverStream::new(body).map(Ok::<_, Infallible>));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body))
}

/// Writes an export, line by line.
fn send_export(export: Export, send: impl Fn(Vec<u8>) -> bool) {
    let mut piece = Vec::with_capacity(CHUNK_BYTES);
    let mut is_connected = true;
    let read = export.read(|part| {
        write(&mut piece, &Line::Part(part));
        if piece.len() >= CHUNK_BYTES {
            is_connected = send(std::mem::replace(&mut piece, Vec::with_capacity(CHUNK_BYTES)));
        }
        is_connected
    });
    if is_connected {
        let end = match read {
            Ok(forgotten_until) => LedgerEnd { problem: None, forgotten_until },
            Err(error) => LedgerEnd { problem: Some(error.to_string()), forgotten_until: None },
        };
        write(&mut piece, &Line::End(end));
        send(piece);
    }
}

fn write(piece: &mut Vec<u8>, line: &Line) {
    // Writing to memory cannot fail, and every map of a grant has strings as keys.
    drop(serde_json::to_writer(&mut *piece, line));
    piece.push(b'\n');
}

/// Verifies both copies of the ledger.
pub(super) async fn verify(State(source): State<Source>) -> Reply {
    let mut tries = 0..VERIFY_TRIES;
    // Entries, segments and a checkpoint may be written during a pass. Real damage is found in
    // every pass.
    loop {
        // The check takes long on a long history, and Allocates need the store meanwhile.
        let verifier = source.with_store(Store::verifier).await?;
        let (answer, verified) = oneshot::channel();
        // Sending fails when the verb has disconnected.
        source.on_a_thread(move || drop(answer.send(verifier.verify())))?;
        let found = verified.await.map_err(failure)?.map_err(failure)?;
        if found.sound || tries.next().is_none() {
            return reply(&found);
        }
    }
}
