//! An instance that ends in the midst of an HTTP/2 frame of either side: what NEW writes behind it
//! is still understood.

use super::{DEVICES, take_over};
use crate::common::{HANG, Node, allocate, offered, resource, run, soon, until};
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::kubelet::uds;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Of each device: the list is several times as long as what a socket takes.
const REPLICAS: usize = 800;
/// The size of a full socket that no process reads is at least this.
const FULL: u64 = 60_000;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const LISTS: u8 = 1;
const OPTIONS: u8 = 3;

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// The frames of a call without a message.
fn call(method: &str, stream: u8) -> Vec<u8> {
    let path = format!("/v1beta1.DevicePlugin/{method}");
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", &path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let mut block = Vec::new();
    for (name, value) in headers {
        // A literal that is not indexed (RFC 7541, 6.2.2).
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend(text.as_bytes());
        }
    }
    [frame(HEADERS, END_HEADERS, stream, &block), frame(DATA, END_STREAM, stream, &[0; 5])].concat()
}

/// A client that takes any number of bytes, and has asked for the lists.
fn asks_for_lists(socket: &Path) -> UnixStream {
    let window = i32::MAX.to_be_bytes();
    let settings = frame(SETTINGS, 0, 0, &[&[0, 4][..], &window].concat());
    let room = frame(WINDOW_UPDATE, 0, 0, &(i32::MAX - 65_535).to_be_bytes());
    let mut client = UnixStream::connect(socket).unwrap();
    client.set_read_timeout(Some(HANG)).unwrap();
    client
        .write_all(
            &[
                &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
                &settings,
                &room,
                &call("ListAndWatch", LISTS),
            ]
            .concat(),
        )
        .unwrap();
    client
}

/// Reads frames to GOAWAY: how many bytes of lists came, and the last stream that was begun.
fn read_to_goaway(client: &mut UnixStream) -> (usize, u32) {
    let mut listed = 0;
    loop {
        let mut head = [0; 9];
        client.read_exact(&mut head).unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        client.read_exact(&mut payload).unwrap();
        assert!(
            [DATA, HEADERS, SETTINGS, GOAWAY, WINDOW_UPDATE].contains(&head[3]),
            "no frame: {head:?}"
        );
        assert!(head[8] != OPTIONS, "the half call is not answered");
        match head[3] {
            DATA => listed += payload.len(),
            GOAWAY => return (listed, u32::from_be_bytes(payload[..4].try_into().unwrap())),
            _ => {}
        }
    }
}

fn socket_of(node: &Node) -> PathBuf {
    let mut files: Vec<_> =
        std::fs::read_dir(node.sockets()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.pop().unwrap()
}

fn ended_within_a_frame(is_killed: bool) {
    run(async {
        let node = Node::with(&[("gpu", DEVICES)]);
        node.write_config(&format!(
            "[telemetry]\nlisten = \"off\"\n{}replicas = {REPLICAS}\n",
            resource("gpu")
        ));
        let kubelet = node.start_kubelet().await;
        let mut old = node.start_daemon();
        offered(&kubelet, &super::gpu(), DEVICES * REPLICAS).await;
        let socket = socket_of(&node);

        let mut client = asks_for_lists(&socket);
        // Nothing is read: the list stops within one of its frames, if frames can be cut.
        until(
            "a full socket",
            || rustix::io::ioctl_fionread(&client).unwrap(),
            |bytes| *bytes > FULL,
        )
        .await;
        let half = call("GetDevicePluginOptions", OPTIONS);
        let (first, rest) = half.split_at(half.len() / 2);
        client.write_all(first).unwrap();

        let new = take_over(&node);
        if is_killed {
            new.logged("requesting a handover from another instance").await;
            old.kill();
        }
        new.logged("INFO ready").await;
        client.write_all(rest).unwrap();
        let (listed, last) =
            soon("GOAWAY", tokio::task::spawn_blocking(move || read_to_goaway(&mut client)))
                .await
                .unwrap();
        assert!(
            listed > 0 && last == u32::from(LISTS),
            "{listed} bytes of lists, then GOAWAY {last}"
        );
        if is_killed {
            let mut plugin = DevicePluginClient::new(uds::connect(socket_of(&node)).await.unwrap());
            allocate(&mut plugin, &["dev:gpu0::0"]).await.unwrap();
        }
    });
}

#[test]
fn an_instance_that_is_killed_within_a_frame_leaves_whole_frames() {
    ended_within_a_frame(true);
}

#[test]
fn an_instance_that_hands_over_within_a_frame_leaves_whole_frames() {
    ended_within_a_frame(false);
}
