//! A connection whose server has died, and which another process holds open: what was asked last on it is asked again.
//!
//! The kubelet's client sends a call once more, as if it had never been, when it learns that the server has not begun it (gRPC's A6,
//! transparent retries). That is what GOAWAY says of every stream after the one that it names, and RST_STREAM with REFUSED_STREAM of
//! one (RFC 9113, 6.8 and 8.7). The lists' stream is the last one that was begun, so that it stays open: with it the kubelet keeps the
//! devices. The client then dials the socket anew, where somebody else has to listen by now.

use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// Types of frames.
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
/// The error of a stream that was not begun.
const REFUSED_STREAM: u32 = 7;
const NO_ERROR: u32 = 0;
/// The kubelet asks for the lists among its first calls: their stream has no higher number.
const LISTS_MAX: u32 = 255;

/// Has the kubelet ask again what it has asked on this connection, and has got no answer to, but for the lists, on the stream `lists`.
///
/// # Errors
/// When the connection has ended, or takes no more bytes.
pub fn ask_again(connection: impl AsFd, lists: u32) -> io::Result<()> {
    UnixStream::from(connection.as_fd().try_clone_to_owned()?).write_all(&frames(lists))
}

fn frames(lists: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    // First, so that what is asked again is asked on another connection.
    frame(&mut bytes, GOAWAY, 0, &[lists, NO_ERROR]);
    // Most of them were answered long ago, and are not known any more.
    for stream in (1..lists.min(LISTS_MAX)).step_by(2) {
        frame(&mut bytes, RST_STREAM, stream, &[REFUSED_STREAM]);
    }
    bytes
}

/// Adds one: its length, its type, no flags, its stream, and what it says.
fn frame<const WORDS: usize>(bytes: &mut Vec<u8>, kind: u8, stream: u32, says: &[u32; WORDS]) {
    bytes.extend([0, 0, const { 4 * WORDS as u8 }, kind, 0]);
    bytes.extend(stream.to_be_bytes());
    says.iter().for_each(|word| bytes.extend(word.to_be_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frames_are_as_the_protocol_has_them() {
        let go_away = |lists| [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, lists, 0, 0, 0, 0];
        let refuse = |stream| [0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, 7];
        assert_eq!(frames(1), go_away(1));
        assert_eq!(frames(5), [&go_away(5)[..], &refuse(1), &refuse(3)].concat());
    }
}
