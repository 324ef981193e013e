//! Open files that go to another process over a unix socket (`SCM_RIGHTS`, unix(7)).

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// The kernel takes so many with one message (`SCM_MAX_FD`).
const FILES_MAX: usize = 253;

/// Sends `bytes`, and the files with the first ones: each file is then open here and there. A receiver that reads the bytes alone
/// gets no file, and the kernel closes what it was sent.
///
/// # Errors
/// As writing to the socket; that there are too many files for so few bytes.
pub async fn send(stream: &UnixStream, bytes: &[u8], files: &[impl AsFd]) -> io::Result<()> {
    let (mut rest, mut batches) = (bytes, files.chunks(FILES_MAX));
    while !rest.is_empty() {
        let batch: Vec<BorrowedFd<'_>> = batches.next().unwrap_or_default().iter().map(AsFd::as_fd).collect();
        // One byte is enough to carry a batch.
        let part = if batches.len() > 0 { 1 } else { rest.len() };
        let sent = stream.async_io(Interest::WRITABLE, || send_once(stream, rest.get(..part).unwrap_or(rest), &batch)).await?;
        rest = rest.get(sent..).unwrap_or_default();
    }
    match batches.len() {
        0 => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "there are too many open files to send with so few bytes")),
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

/// Reads up to the end of a line, which nothing follows before it is answered, and adds the files that come with it to `files`. Without its
/// end when the other side has gone, or has sent more than `most` bytes.
///
/// # Errors
/// As reading from the socket.
pub async fn receive_line(stream: &UnixStream, most: usize, files: &mut Vec<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut buffer = [0; 4096];
    while line.last() != Some(&b'\n') && line.len() < most {
        match stream.async_io(Interest::READABLE, || receive_once(stream, &mut buffer, files)).await? {
            0 => break,
            read => line.extend_from_slice(buffer.get(..read).unwrap_or_default()),
        }
    }
    Ok(line)
}

fn receive_once(stream: &UnixStream, buffer: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
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
    use std::os::fd::AsRawFd as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    /// More than go with one message, each known by what is in it; and they are open when the sender has closed them.
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
            send(&here, line.as_bytes(), &files).await.unwrap();
            drop(files);
        };
        let (read, ()) = tokio::join!(receive_line(&there, 1 << 20, &mut arrived), sending);
        assert_eq!(read.unwrap(), line.as_bytes());
        let content = |file: &OwnedFd| {
            let mut bytes = [0; 4];
            nix::sys::uio::pread(file, &mut bytes, 0).unwrap();
            u32::from_le_bytes(bytes)
        };
        assert_eq!(arrived.iter().map(content).collect::<Vec<_>>(), (0..600).collect::<Vec<_>>());
        let flags = nix::fcntl::fcntl(&arrived[0], nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags, 1, "{} is closed in programs that are started from here", arrived[0].as_raw_fd());
    }

    #[tokio::test]
    async fn a_line_ends_with_the_other_side_or_when_it_is_too_long_and_who_reads_bytes_alone_reads_them() {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(b"half a line").await.unwrap();
        drop(here);
        assert_eq!(receive_line(&there, 100, &mut Vec::new()).await.unwrap(), b"half a line");
        let (here, there) = UnixStream::pair().unwrap();
        send(&here, &[b'x'; 5000], &[&there]).await.unwrap();
        let read = receive_line(&there, 4000, &mut Vec::new()).await.unwrap().len();
        assert!((4000..5000).contains(&read), "{read}");
        let (here, mut there) = UnixStream::pair().unwrap();
        send(&here, b"in plain bytes\n", &[&here]).await.unwrap();
        drop(here);
        let mut text = String::new();
        there.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "in plain bytes\n");
        let (here, _there) = UnixStream::pair().unwrap();
        assert_eq!(send(&here, b"", &[&here]).await.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
