//! HTTP/2 frames (RFC 9113), as needed to track a connection and to pass it to another process.
//!
//! **GOAWAY and REFUSED_STREAM.** A process that holds a passed connection did not see the calls on
//! it, and has no HTTP/2 state. It can still make the client repeat its unanswered calls. GOAWAY
//! states that the server has not begun any stream after the one that it names, and RST_STREAM with
//! REFUSED_STREAM states so for one stream (6.8 and 8.7). gRPC's client then repeats the call on a
//! new connection to the same socket (gRFC A6, transparent retries). The ListAndWatch stream is the
//! one that GOAWAY names, so it stays open, and the kubelet keeps the devices.
//!
//! **No half frame.** Such frames may only follow a whole frame. A server writes each frame with
//! one system call, and a unix socket accepts up to 32 KiB of one call completely or not at all. So
//! even a killed process leaves no half frame.

use crate::domain::limits::Use;
use std::collections::BTreeMap;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// The flag of the last frame that its sender sends on a stream.
const END_STREAM: u8 = 1;
/// The error code of a stream that the server has not begun.
const REFUSED_STREAM: u32 = 7;
const NO_ERROR: u32 = 0;
/// Highest stream id of a ListAndWatch: the kubelet requests the lists among its first calls.
const LISTS_MAX: u32 = 255;
/// Length of the connection preface that a client sends before its first frame.
const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;

/// The frames that make a client repeat its unanswered calls, except the one on the stream `lists`
/// (0 if there is none).
#[must_use]
pub fn refuse_pending_calls(lists: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A server's first frame is SETTINGS, and the other process may not have sent one. A second one
    // has no effect.
    frame(&mut bytes, SETTINGS, 0, &[]);
    // Before RST_STREAM, so that the client repeats the calls on another connection.
    frame(&mut bytes, GOAWAY, 0, &[lists, NO_ERROR]);
    // The client ignores those of streams that are already answered.
    for stream in (1..lists.min(LISTS_MAX)).step_by(2) {
        frame(&mut bytes, RST_STREAM, stream, &[REFUSED_STREAM]);
    }
    bytes
}

/// Appends a frame: its length, its type, no flags, its stream id and its payload.
fn frame<const WORDS: usize>(bytes: &mut Vec<u8>, kind: u8, stream: u32, payload: &[u32; WORDS]) {
    bytes.extend([0, 0, const { 4 * WORDS as u8 }, kind, 0]);
    bytes.extend(stream.to_be_bytes());
    payload.iter().for_each(|word| bytes.extend(word.to_be_bytes()));
}

/// A parser of the frames in one direction of a connection.
#[derive(Debug, Default)]
struct Frames {
    head: Vec<u8>,
    /// Bytes of the current payload that have not arrived yet.
    payload: usize,
}

impl Frames {
    /// Calls `seen` with the type, the flags and the stream id of each frame that ends in these
    /// bytes.
    fn read(&mut self, mut bytes: &[u8], mut seen: impl FnMut(u8, u8, u32)) {
        while !bytes.is_empty() {
            let missing = if self.head.len() < HEAD_BYTES {
                HEAD_BYTES - self.head.len()
            } else {
                self.payload
            };
            let (taken, rest) = bytes.split_at(missing.min(bytes.len()));
            bytes = rest;
            if self.head.len() < HEAD_BYTES {
                self.head.extend(taken);
                self.payload = match *self.head {
                    [a, b, c, _, _, _, _, _, _] => u32::from_be_bytes([0, a, b, c]) as usize,
                    _ => continue,
                };
            } else {
                self.payload -= taken.len();
            }
            if self.payload == 0
                && let [_, _, _, kind, flags, a, b, c, d] = *std::mem::take(&mut self.head)
            {
                seen(kind, flags, u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1));
            }
        }
    }
}

/// The calls of one connection, derived from its bytes.
#[derive(Debug)]
pub(crate) struct Calls {
    preface: usize,
    asked: Frames,
    answered: Frames,
    /// The streams of unanswered calls. True if a message was sent on the stream, which means
    /// ListAndWatch.
    open: BTreeMap<u32, bool>,
    has_asked: bool,
    /// Whether the client has cancelled a ListAndWatch stream.
    has_listed: bool,
}

impl Default for Calls {
    fn default() -> Self {
        let (asked, answered) = (Frames::default(), Frames::default());
        Calls {
            preface: PREFACE_BYTES,
            asked,
            answered,
            open: BTreeMap::new(),
            has_asked: false,
            has_listed: false,
        }
    }
}

impl Calls {
    /// Handles bytes that the client has sent.
    pub(crate) fn received(&mut self, bytes: &[u8]) {
        let preface = self.preface.min(bytes.len());
        self.preface -= preface;
        let Calls { asked, open, has_asked, has_listed, .. } = self;
        asked.read(bytes.get(preface..).unwrap_or_default(), |kind, flags, stream| match kind {
            DATA | HEADERS if flags & END_STREAM > 0 => {
                *has_asked = true;
                open.insert(stream, false);
            }
            RST_STREAM => *has_listed |= open.remove(&stream).unwrap_or_default(),
            _ => {}
        });
    }

    /// Handles bytes that were sent to the client.
    pub(crate) fn sent(&mut self, bytes: &[u8]) {
        let Calls { answered, open, .. } = self;
        answered.read(bytes, |kind, flags, stream| match kind {
            DATA | HEADERS if flags & END_STREAM > 0 => drop(open.remove(&stream)),
            RST_STREAM => drop(open.remove(&stream)),
            DATA => open.get_mut(&stream).into_iter().for_each(|lists| *lists = true),
            _ => {}
        });
    }

    /// Whether the answer of a call is missing or incomplete.
    pub(crate) fn is_pending(&self) -> bool {
        let lists = self.lists();
        self.open.keys().any(|stream| *stream != lists)
    }

    /// The stream id of ListAndWatch, 0 if there is none.
    pub(crate) fn lists(&self) -> u32 {
        self.open.iter().find(|(_, lists)| **lists).map_or(0, |(stream, _)| *stream)
    }

    /// Whether the client has sent a call, but never ListAndWatch.
    pub(crate) fn lacks_lists(&self) -> bool {
        self.has_asked && !self.has_listed && self.lists() == 0
    }

    /// The calls that the connection is used for.
    pub(crate) fn usage(&self) -> Use {
        match (self.lists(), self.open.len()) {
            (1.., _) => Use::Lists,
            (0, 0) => Use::Idle,
            (0, _) => Use::Request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frames_have_the_layout_of_the_rfc() {
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let go_away = |lists| [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, lists, 0, 0, 0, 0];
        let refuse = |stream| [0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, 7];
        assert_eq!(refuse_pending_calls(0), [&settings[..], &go_away(0)].concat());
        assert_eq!(refuse_pending_calls(1), [&settings[..], &go_away(1)].concat());
        assert_eq!(
            refuse_pending_calls(5),
            [&settings[..], &go_away(5), &refuse(1), &refuse(3)].concat()
        );
    }

    fn frame_of(kind: u8, flags: u8, stream: u8, payload: usize) -> Vec<u8> {
        [
            &[0, 0, u8::try_from(payload).unwrap(), kind, flags, 0, 0, 0, stream][..],
            &vec![b'x'; payload],
        ]
        .concat()
    }

    /// The bytes may arrive in any split.
    #[test]
    fn a_call_is_pending_from_its_last_byte_to_the_last_byte_of_its_answer() {
        let options = [frame_of(HEADERS, 4, 1, 30), frame_of(DATA, END_STREAM, 1, 5)].concat();
        let asked =
            [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame_of(SETTINGS, 0, 0, 12), &options]
                .concat();
        for piece in [1, 7, 1000] {
            let mut calls = Calls::default();
            let (last, before) = asked.split_last().unwrap();
            before.chunks(piece).for_each(|bytes| calls.received(bytes));
            assert_eq!((calls.is_pending(), calls.usage()), (false, Use::Idle));
            calls.received(&[*last]);
            assert_eq!((calls.is_pending(), calls.usage()), (true, Use::Request));
            let answer = [
                frame_of(HEADERS, 4, 1, 9),
                frame_of(DATA, 0, 1, 5),
                frame_of(HEADERS, 4 | END_STREAM, 1, 9),
            ]
            .concat();
            let (last, before) = answer.split_last().unwrap();
            before.chunks(piece).for_each(|bytes| calls.sent(bytes));
            assert_eq!(calls.usage(), Use::Lists, "a message without an end may be a list");
            calls.sent(&[*last]);
            assert_eq!((calls.is_pending(), calls.lists(), calls.usage()), (false, 0, Use::Idle));
            assert!(calls.lacks_lists());

            calls.received(
                &[
                    frame_of(HEADERS, 4, 3, 9),
                    frame_of(DATA, END_STREAM, 3, 5),
                    frame_of(HEADERS, 5, 5, 9),
                ]
                .concat(),
            );
            calls.sent(&[frame_of(HEADERS, 4, 3, 9), frame_of(DATA, 0, 3, 200)].concat());
            assert_eq!((calls.lists(), calls.is_pending(), calls.usage()), (3, true, Use::Lists));
            calls.received(&frame_of(RST_STREAM, 0, 5, 4));
            assert_eq!((calls.lists(), calls.is_pending(), calls.lacks_lists()), (3, false, false));
            calls.sent(&frame_of(RST_STREAM, 0, 3, 4));
            assert_eq!((calls.lists(), calls.usage()), (0, Use::Idle));
        }
    }
}
