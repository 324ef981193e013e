//! Open files that go to another process over a unix socket (`SCM_RIGHTS`, unix(7)).

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// The kernel's limit of files in one message (`SCM_MAX_FD`).
pub const FILES_MAX: usize = 253;
/// What is read at once.
const READ_MAX: usize = 4096;

/// Sends the bytes, and the files with the first of them. `rest` keeps the bytes that were not sent
/// yet. Each file is then open in both processes. A receiver that reads only the bytes gets no
/// file, and the kernel closes the sent ones.
///
/// # Errors
/// As writing to the socket; that there are too many files for so few bytes.
pub async fn send(
    stream: &UnixStream,
    rest: &mut &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut batches = files.chunks(FILES_MAX);
    while !rest.is_empty() {
        let batch = batches.next().unwrap_or_default();
        // One byte is enough to carry a batch.
        let part = if batches.len() > 0 { 1 } else { rest.len() };
        let sent = stream
            .async_io(Interest::WRITABLE, || {
                send_once(stream, rest.get(..part).unwrap_or(*rest), batch)
            })
            .await?;
        *rest = rest.get(sent..).unwrap_or_default();
    }
    match batches.len() {
        0 => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "there are too many open files to send with so few bytes",
        )),
    }
}

fn send_once(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Reads once, at most `most` bytes. Adds them to `bytes`, and the files that come with them to
/// `files`. Returns the number of bytes: 0 when the peer has closed the connection.
///
/// # Errors
/// As reading from the socket.
pub async fn receive(
    stream: &UnixStream,
    most: usize,
    bytes: &mut Vec<u8>,
    files: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut buffer = vec![0; most.min(READ_MAX)];
    let read =
        stream.async_io(Interest::READABLE, || receive_once(stream, &mut buffer, files)).await?;
    bytes.extend_from_slice(buffer.get(..read).unwrap_or_default());
    Ok(read)
}

fn receive_once(
    stream: &UnixStream,
    buffer: &mut [u8],
    files: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            files.extend(sent);
        }
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::fd::{AsFd, AsRawFd as _};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    /// Sends more files than fit into one message. Each is recognised by its content, and stays
    /// open after the sender has closed it.
    #[tokio::test]
    async fn files_arrive_in_their_order_with_the_line_and_stay_open() {
        let (here, there) = UnixStream::pair().unwrap();
        let files: Vec<std::fs::File> = (0..600_u32)
            .map(|number| {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&number.to_le_bytes()).unwrap();
                file
            })
            .collect();
        let line = format!("{}\n", "x".repeat(10_000));
        let mut arrived = Vec::new();
        let sending = async {
            send(&here, &mut line.as_bytes(), &files.iter().map(AsFd::as_fd).collect::<Vec<_>>())
                .await
                .unwrap();
            drop(files);
        };
        let mut read = Vec::new();
        let receiving = async {
            while read.len() < line.len() {
                receive(&there, usize::MAX, &mut read, &mut arrived).await.unwrap();
            }
        };
        tokio::join!(receiving, sending);
        assert_eq!(read, line.as_bytes());
        let content = |file: &OwnedFd| {
            let mut bytes = [0; 4];
            nix::sys::uio::pread(file, &mut bytes, 0).unwrap();
            u32::from_le_bytes(bytes)
        };
        assert_eq!(arrived.iter().map(content).collect::<Vec<_>>(), (0..600).collect::<Vec<_>>());
        let flags = nix::fcntl::fcntl(&arrived[0], nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(
            flags,
            1,
            "{} is closed in programs that are started from here",
            arrived[0].as_raw_fd()
        );
    }

    #[tokio::test]
    async fn no_more_is_read_than_is_wanted_and_the_others_end_is_nothing_and_who_reads_bytes_alone_reads_them()
     {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(b"a line").await.unwrap();
        drop(here);
        let mut bytes = Vec::new();
        for read in [2, 4, 0] {
            assert_eq!(
                receive(&there, read.max(2), &mut bytes, &mut Vec::new()).await.unwrap(),
                read
            );
        }
        assert_eq!(bytes, b"a line");
        let (here, mut there) = UnixStream::pair().unwrap();
        send(&here, &mut &b"in plain bytes\n"[..], &[here.as_fd()]).await.unwrap();
        drop(here);
        let mut text = String::new();
        there.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "in plain bytes\n");
        let (here, _there) = UnixStream::pair().unwrap();
        assert_eq!(
            send(&here, &mut &b""[..], &[here.as_fd()]).await.unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
}
