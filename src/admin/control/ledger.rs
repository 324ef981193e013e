//! The routes that read the whole ledger, on threads of their own.

use super::document::{LedgerEnd, Line};
use super::{Failure, Reply, Source, failure, reply};
use crate::store::{Export, Store, Verification};
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
    let (answer, verified) = oneshot::channel();
    let (runtime, of) = (Handle::current(), source.clone());
    source.on_a_thread(move || {
        let verify = || {
            // Only the beginning needs the store: the check takes long on a long history, and
            // Allocates need the store meanwhile.
            let verifier = runtime.block_on(of.with_store(Store::verifier))?;
            verifier.verify().map_err(failure)
        };
        let is_in_doubt =
            |found: &Result<Verification, Failure>| found.as_ref().is_ok_and(|found| !found.sound);
        // Entries, segments and a checkpoint may be written between two passes. Real damage is
        // found in every pass.
        let found = (0..VERIFY_TRIES)
            .map(|_| verify())
            .find(|found| !is_in_doubt(found))
            .unwrap_or_else(verify);
        // Sending fails when the verb has disconnected.
        drop(answer.send(found));
    })?;
    reply(&verified.await.map_err(failure)??)
}
