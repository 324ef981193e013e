//! Attacks on telemetry's address, each kind in threads of its own until it is dropped.

use crate::common::HANG;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A request that never ends.
const HALF_A_HEAD: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n";
/// The time limit of a connection attempt: it may wait in the kernel's queue.
const CONNECTS_WITHIN: Duration = Duration::from_secs(5);

/// The kind of attack.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// Opens connections and sends nothing.
    Idle,
    /// Sends a part of a head on each connection.
    Halves,
    /// Sends a head of 400 KB without an end on each connection.
    LargeHeads,
    /// Requests a hundred pages at once on each connection, and reads nothing.
    Unread,
    /// Opens and drops connections without a pause.
    Flood,
    /// Requests `/healthz` on a connection and drops it, without a pause.
    Requests,
    /// Starts HTTP/2 on each connection.
    Http2,
}

impl Kind {
    fn sends(self) -> Vec<u8> {
        match self {
            Kind::Idle | Kind::Flood => Vec::new(),
            Kind::Halves => HALF_A_HEAD.to_vec(),
            Kind::LargeHeads => [HALF_A_HEAD, b"x: ", &[b'a'; 400_000]].concat(),
            Kind::Unread => b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(100),
            Kind::Requests => b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
            Kind::Http2 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec(),
        }
    }

    /// The series that counts it.
    pub(crate) fn counted(self) -> Option<&'static str> {
        match self {
            Kind::Idle | Kind::Halves => {
                Some("holdfast_connections_evicted_total{socket=\"telemetry\"}")
            }
            Kind::LargeHeads => Some(
                "holdfast_requests_refused_total{socket=\"telemetry\",reason=\"head_too_large\"}",
            ),
            Kind::Http2 => Some(
                "holdfast_requests_refused_total{socket=\"telemetry\",reason=\"not_understood\"}",
            ),
            Kind::Unread => {
                Some("holdfast_requests_refused_total{socket=\"telemetry\",reason=\"busy\"}")
            }
            Kind::Flood | Kind::Requests => None,
        }
    }

    fn is_held(self) -> bool {
        !matches!(self, Kind::Flood | Kind::Requests)
    }
}

/// A running attack.
#[derive(Debug)]
pub(crate) struct Attack {
    kind: Kind,
    stop: Arc<AtomicBool>,
    made: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<Vec<TcpStream>>>,
}

impl Attack {
    /// Begins. A kind that holds its connections opens `count`, in all threads together.
    pub(crate) fn begin(kind: Kind, address: SocketAddr, count: usize, threads: usize) -> Attack {
        let (stop, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let together = Arc::new(Barrier::new(threads + 1));
        let begin = |_| {
            let (stop, made, together) =
                (Arc::clone(&stop), Arc::clone(&made), Arc::clone(&together));
            thread::spawn(move || {
                let (bytes, mut held) = (kind.sends(), Vec::new());
                together.wait();
                while !stop.load(Ordering::Relaxed)
                    && (!kind.is_held() || made.load(Ordering::Relaxed) < count)
                {
                    made.fetch_add(1, Ordering::Relaxed);
                    held.extend(connect(kind, address, &bytes).filter(|_| kind.is_held()));
                }
                held
            })
        };
        let threads = (0..threads).map(begin).collect();
        together.wait();
        Attack { kind, stop, made, threads }
    }

    /// Connections that were opened, or are being opened.
    pub(crate) fn made(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }

    /// Waits until all held connections were made, or stops an endless attack. Returns the
    /// connections that this side has open.
    pub(crate) fn end(mut self) -> Vec<TcpStream> {
        if !self.kind.is_held() {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.threads.drain(..).flat_map(|thread| thread.join().unwrap()).collect()
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn connect(kind: Kind, address: SocketAddr, bytes: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECTS_WITHIN).ok()?;
    stream.set_write_timeout(Some(CONNECTS_WITHIN)).unwrap();
    if !kind.is_held() {
        // The port of an ended connection must not stay in TIME_WAIT.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    }
    // The other side may close it meanwhile.
    let sent = stream.write_all(bytes);
    if matches!(kind, Kind::Requests) && sent.is_ok() {
        stream.set_read_timeout(Some(CONNECTS_WITHIN)).unwrap();
        let _closed = stream.read(&mut [0; 256]);
    }
    Some(stream)
}

/// Reads until the other side has closed it, by an end or a reset. Returns whether it has.
pub(crate) fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(HANG)).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// The same without reading: waits for a reset.
pub(crate) fn is_hung_up(stream: &TcpStream) -> bool {
    let mut look = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let within = PollTimeout::try_from(HANG).unwrap();
    poll(&mut look, within).is_ok()
        && look[0]
            .revents()
            .is_some_and(|seen| seen.intersects(PollFlags::POLLHUP | PollFlags::POLLERR))
}
