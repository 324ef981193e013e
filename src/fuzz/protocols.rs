//! The protocols between our own processes, and the kubelet's connections that pass between them.

use super::Seeds;
use super::input::Input;
use crate::admin::{Installed, LedgerEnd, Order, ReleaseOrder, Upgrade};
use crate::domain::limits::Use;
use crate::handover::{Label, Message, PassedFds, Peer};
use crate::kubelet::h2::{Calls, refuse_pending_calls};
use crate::store::ExportLine;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::RefCell;
use std::fmt::Debug;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

/// Documents of the control socket: each that is read is written as it was read. The first byte
/// chooses the document.
pub fn control(data: &[u8]) {
    let mut input = Input::new(data);
    match input.small(6) {
        0 => is_read_as_written::<Order>(input.rest()),
        1 => is_read_as_written::<ReleaseOrder>(input.rest()),
        2 => is_read_as_written::<Upgrade>(input.rest()),
        3 => is_read_as_written::<Installed>(input.rest()),
        4 => is_read_as_written::<LedgerEnd>(input.rest()),
        _ => is_read_as_written::<ExportLine>(input.rest()),
    }
}

fn is_read_as_written<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    let Ok(read) = serde_json::from_slice::<T>(bytes) else { return };
    let written = serde_json::to_vec(&read).expect("a document that was read can be written");
    let again = serde_json::from_slice::<T>(&written).expect("what was written is read");
    assert_eq!(again, read, "{}", String::from_utf8_lossy(&written));
}

/// One document of each kind.
pub(super) fn control_seeds() -> Seeds {
    let grant = super::records::grant_of(1, crate::domain::GrantState::Granted);
    let line = serde_json::to_string(&ExportLine::Grant(Box::new(grant))).expect("JSON");
    let notes = r#"{"notes":{"names":{"dev:/dev/a":"a"},"listed":{"a.b/c":[{"id":"a","key":"dev:/dev/a"}]}}}"#;
    [
        ("cordon", 0, r#"{"device":"a","instruction":"cordon","reason":"to be replaced"}"#),
        ("evict", 0, r#"{"device":"a","instruction":"cordon_and_evict","reason":""}"#),
        ("uncordon", 0, r#"{"device":"a","instruction":"uncordon"}"#),
        ("release", 1, r#"{"claim":"team/gpu","force":true}"#),
        ("upgrade", 2, r#"{"executable":"/usr/bin/holdfast"}"#),
        ("installed", 3, r#"{"from":"0.1.0","to":"0.2.0","pid":7}"#),
        ("end", 4, r#"{"problem":"why","forgotten_until":"2023-11-14T22:13:20.001Z"}"#),
        ("grant", 5, line.as_str()),
        ("notes", 5, notes),
    ]
    .map(|(name, tag, text)| (name, [&[tag], text.as_bytes()].concat()))
    .into()
}

thread_local! {
    static RUNTIME: RefCell<Runtime> = RefCell::new(
        Builder::new_current_thread().enable_all().build().expect("a runtime without threads"),
    );
}

/// Bytes from the other instance, in pieces, with descriptors. The messages do not depend on the
/// pieces, and the first wrong line ends the conversation.
pub fn handover(data: &[u8]) {
    let mut input = Input::new(data);
    let cuts: Vec<usize> = (0..input.small(4)).map(|_| input.byte().into()).collect();
    let bytes = input.rest();
    // More than the buffer of a socket would block this thread.
    if bytes.len() > 16 * 1024 {
        return;
    }
    let mut wanted = Vec::new();
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        match serde_json::from_slice::<Message>(line) {
            Ok(message) if line.ends_with(b"\n") => wanted.push(message),
            _ => break,
        }
    }
    let found = RUNTIME.with_borrow_mut(|runtime| runtime.block_on(received(bytes, &cuts)));
    assert_eq!(found, wanted, "the messages of {}", String::from_utf8_lossy(bytes));
    for message in found {
        let line = serde_json::to_vec(&message).expect("a message is JSON");
        let again: Message = serde_json::from_slice(&line).expect("what was written is read");
        assert_eq!(again, message);
        if let Message::Offer { fds, .. } | Message::Yours { fds } = message {
            is_passed(&fds);
        }
    }
}

/// The messages that arrive, when the bytes are written in these pieces.
async fn received(bytes: &[u8], cuts: &[usize]) -> Vec<Message> {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_nonblocking(true).expect("a socket");
    let mut peer = Peer::new(tokio::net::UnixStream::from_std(ours).expect("a runtime"));
    let (mut rest, mut found) = (bytes, Vec::new());
    let mut has_ended = false;
    for cut in cuts {
        let (piece, next) = rest.split_at((*cut).min(rest.len()));
        rest = next;
        theirs.write_all(piece).expect("the buffer has space");
        // Reads what has arrived. Half a message stays for later.
        while let Some(message) = futures_util::FutureExt::now_or_never(peer.recv()) {
            has_ended |= message.is_none();
            let Some(message) = message else { break };
            found.push(message);
        }
        if has_ended {
            return found;
        }
    }
    theirs.write_all(rest).expect("the buffer has space");
    drop(theirs);
    while let Some(message) = peer.recv().await {
        found.push(message);
    }
    found
}

/// A set of descriptors with a missing one is not used.
fn is_passed(labels: &[Label]) {
    if labels.len() > 4 {
        return;
    }
    let open = |_: &Label| OwnedFd::from(UnixStream::pair().expect("a pair of sockets").0);
    let fds: Vec<OwnedFd> = labels.iter().map(open).collect();
    let passed = PassedFds::of(labels.to_vec(), fds).expect("as many labels as descriptors");
    assert_eq!(passed.labels(), labels);
    let connections = labels.iter().filter(|label| label.is_connection()).count();
    assert_eq!(passed.connections(), connections);
    assert!(labels.is_empty() || PassedFds::of(labels.to_vec(), Vec::new()).is_none());
}

/// The messages of a handover, and a broken one.
pub(super) fn handover_seeds() -> Seeds {
    let resource: crate::domain::ResourceName = "example.com/gpu".parse().expect("a name");
    let fds = vec![
        Label::Socket(resource.clone()),
        Label::Connection { resource, lists: 3 },
        Label::DraConnection,
    ];
    let line = |message: &Message| {
        let mut line = serde_json::to_vec(message).expect("a message is JSON");
        line.push(b'\n');
        line
    };
    let offer = line(&Message::Offer {
        protocol: 1,
        version: "0.1.0".into(),
        records: 2,
        fds: fds.clone(),
    });
    let yours = line(&Message::Yours { fds });
    let take = line(&Message::Take { version: "0.2.0".into() });
    let confirmed = line(&Message::Confirmed);
    let dra = b"{\"message\":\"yours\",\"fds\":[{\"dra_socket\":\"service\"}]}\n";
    vec![
        ("old", [&[2, 20, 100][..], &offer, &yours].concat()),
        ("new", [&[1, 3][..], &take, &confirmed].concat()),
        ("dra", [&[0][..], dra].concat()),
        ("broken", [&[0][..], &confirmed, b"nonsense\n", &confirmed].concat()),
    ]
}

/// Both directions of a connection, in pieces. What is known of its calls does not depend on the
/// pieces, and the frames that refuse calls are whole.
pub fn http2(data: &[u8]) {
    let mut input = Input::new(data);
    let (mut whole, mut bytewise) = (Calls::default(), Calls::default());
    while !input.is_empty() {
        let is_received = input.truth();
        let piece = input.bytes(64);
        let (all, single) = if is_received {
            (Calls::received as fn(&mut Calls, &[u8]), Calls::received as fn(&mut Calls, &[u8]))
        } else {
            (Calls::sent as fn(&mut Calls, &[u8]), Calls::sent as fn(&mut Calls, &[u8]))
        };
        all(&mut whole, piece);
        piece.iter().for_each(|byte| single(&mut bytewise, &[*byte]));
        assert_eq!(format!("{whole:?}"), format!("{bytewise:?}"), "the pieces do not matter");
        let lists = whole.lists();
        assert_eq!(lists > 0, whole.usage() == Use::Lists, "{whole:?}");
        assert!(!whole.lacks_lists() || lists == 0, "{whole:?}");
        // The other side reads the frames that follow as answers.
        let mut refused = Calls::default();
        refused.sent(&refuse_pending_calls(lists));
        assert!(!refused.is_pending() && refused.lists() == 0, "{refused:?}");
    }
}

/// A connection with a list, and one without.
pub(super) fn http2_seeds() -> Seeds {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u8::try_from(payload.len()).unwrap_or(u8::MAX);
        [&[0, 0, length, kind, flags, 0, 0, 0, stream][..], payload].concat()
    };
    let piece = |is_received: bool, bytes: &[u8]| {
        let length = u8::try_from(bytes.len()).unwrap_or(u8::MAX);
        [&[u8::from(is_received), length][..], bytes].concat()
    };
    let asks = [frame(1, 4, 3, b"head"), frame(0, 1, 3, b"")].concat();
    let lists = [frame(1, 4, 3, b"head"), frame(0, 0, 3, b"list")].concat();
    let cancels = frame(3, 0, 3, b"\0\0\0\x08");
    let begin = piece(true, PREFACE);
    vec![
        ("list", [&begin[..], &piece(true, &asks), &piece(false, &lists)].concat()),
        (
            "cancelled",
            [&begin[..], &piece(true, &asks), &piece(false, &lists), &piece(true, &cancels)]
                .concat(),
        ),
        ("settings", [&begin[..], &piece(true, &frame(4, 0, 0, b""))].concat()),
    ]
}
