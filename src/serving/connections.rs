//! The kubelet's connections: those that this instance serves, and those of earlier instances,
//! which it holds open.

use crate::domain::ResourceName;
use crate::domain::limits::{ConnectionTable, Use};
use crate::handover::Label;
use crate::host::peer::is_hung_up;
use crate::kubelet::h2;
use crate::kubelet::tracked_stream::{Tracked, TrackedStream};
use crate::telemetry::metrics;
use rustix::net::{Shutdown, shutdown};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Size of one read from a held connection. The bytes are discarded.
const DISCARD_BYTES: usize = 512;

/// All connections of the kubelet.
#[derive(Debug)]
pub(crate) struct Connections {
    served: Mutex<ConnectionTable<(), Served>>,
    held: Mutex<Held>,
    held_max: usize,
    /// Notified when a call may have been answered.
    pub(crate) changed: Arc<Notify>,
}

#[derive(Debug)]
struct Served {
    /// `None` for the DRA driver.
    resource: Option<ResourceName>,
    connection: Weak<Tracked>,
}

impl Served {
    fn label(&self, connection: &Tracked) -> Label {
        match &self.resource {
            Some(resource) => {
                Label::Connection { resource: resource.clone(), lists: connection.lists() }
            }
            None => Label::DraConnection,
        }
    }
}

#[derive(Debug, Default)]
struct Held {
    connections: Vec<(Label, Weak<UnixStream>)>,
    /// One task per connection, until the kubelet closes it.
    tasks: JoinSet<()>,
}

/// Every change is a single step, so a panic elsewhere cannot leave one half done.
fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connections {
    /// Limits: `served_max` connections without lists, and `held_max` of earlier instances.
    #[must_use]
    pub(super) fn new(served_max: usize, held_max: usize) -> Self {
        Connections {
            served: Mutex::new(ConnectionTable::new(served_max)),
            held: Mutex::default(),
            held_max,
            changed: Arc::default(),
        }
    }

    /// Adds a connection that this instance serves, to the socket of a resource, or of the DRA
    /// driver (`None`). If there are too many, an idle one is closed, or else one with a call in
    /// flight, but never one with a ListAndWatch stream or a stream of health.
    pub(crate) fn serve(&self, resource: Option<&ResourceName>, stream: &TrackedStream) {
        let mut served = lock(&self.served);
        served.retain(|other| other.connection.strong_count() > 0);
        served.set_use(|other| {
            other.connection.upgrade().map_or(Use::Idle, |connection| connection.usage())
        });
        let added =
            Served { resource: resource.cloned(), connection: Arc::downgrade(stream.tracked()) };
        let (_, evicted) = served.add((), added);
        drop(served);
        let evicted = evicted.and_then(|evicted| evicted.connection.upgrade());
        if let Some(fd) = evicted.as_ref().and_then(|evicted| evicted.fd()) {
            metrics::connection_evicted("plugin");
            // Its server sees the end. The connection may have ended already.
            let _ended = shutdown(fd, Shutdown::Both);
        }
    }

    /// Holds the connections of an earlier instance open until the kubelet closes them, and makes
    /// the kubelet send its unanswered calls again.
    pub(crate) fn hold(&self, connections: Vec<(Label, OwnedFd)>) {
        let mut held = lock(&self.held);
        for (label, fd) in connections {
            match stream(fd) {
                Ok(stream) => {
                    let stream = Arc::new(stream);
                    held.connections.push((label.clone(), Arc::downgrade(&stream)));
                    held.tasks.spawn(async move {
                        let ended = hold(&stream, &label).await;
                        tracing::debug!(
                            ?label,
                            ?ended,
                            "a connection of an earlier instance has ended"
                        );
                    });
                }
                Err(error) => {
                    tracing::warn!(?label, %error, "cannot hold a connection of an earlier instance");
                }
            }
        }
    }

    /// Waits until every call is answered. The kubelet may send the next call at any time.
    ///
    /// Calls to the DRA driver do not count if another process continues with its connections: a
    /// Prepare may wait for 35 s, and the kubelet sends it to that process again.
    pub(crate) async fn idle(&self, dra_continues: bool) {
        let counts = |served: &Served| !(dra_continues && served.resource.is_none());
        while !self.connections(counts).iter().all(|connection| connection.is_idle()) {
            self.changed.notified().await;
        }
    }

    /// Stops all reads and writes, and ends the tasks. A connection that another process also holds
    /// stays open.
    pub(super) fn release(&self) {
        self.connections(|_| true).iter().for_each(|connection| connection.release());
        *lock(&self.held) = Held::default();
    }

    fn connections(&self, select: impl Fn(&Served) -> bool) -> Vec<Arc<Tracked>> {
        let served = lock(&self.served);
        served.all().filter(|one| select(one)).filter_map(|one| one.connection.upgrade()).collect()
    }

    /// Copies of the connections that the kubelet has not closed. If there are too many, those of
    /// earlier instances are left out.
    pub(super) fn copies(&self) -> Vec<(Label, OwnedFd)> {
        let mut copies = Vec::new();
        let mut held = lock(&self.held);
        while held.tasks.try_join_next().is_some() {}
        held.connections.retain(|(_, stream)| stream.strong_count() > 0);
        let spare = self.held_max.saturating_sub(lock(&self.served).all().count());
        if held.connections.len() > spare {
            tracing::warn!(
                connections = held.connections.len(),
                "the kubelet has too many connections of earlier instances; it briefly has no devices when this instance ends"
            );
            held.connections.clear();
        }
        let mut copy = |label: Label, fd: BorrowedFd<'_>| match fd.try_clone_to_owned() {
            Ok(copied) if !is_hung_up(fd) => copies.push((label, copied)),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(?label, %error, "cannot copy a connection for the next process");
            }
        };
        for (label, stream) in &held.connections {
            if let Some(stream) = stream.upgrade() {
                copy(label.clone(), stream.as_fd());
            }
        }
        for served in lock(&self.served).all() {
            if let Some(connection) = served.connection.upgrade()
                && let Some(fd) = connection.fd()
            {
                copy(served.label(&connection), fd);
            }
        }
        copies
    }
}

fn stream(fd: OwnedFd) -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Refuses the pending calls, and then reads until the kubelet closes the connection, so that a
/// kubelet that is sending a call does not block.
async fn hold(stream: &UnixStream, label: &Label) -> io::Result<()> {
    let lists = match label {
        Label::Connection { lists, .. } => Some(*lists),
        // The kubelet opens its stream of health again within 5 s. A pod that it synchronises
        // before has devices of unknown health in its status.
        Label::DraConnection => Some(0),
        Label::Socket(_) | Label::DraSocket(_) => None,
    };
    if let Some(lists) = lists {
        let frames = h2::refuse_pending_calls(lists);
        let mut rest = frames.as_slice();
        while !rest.is_empty() {
            stream.writable().await?;
            match stream.try_write(rest) {
                Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
    let mut discarded = [0; DISCARD_BYTES];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut discarded) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream as StdStream;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    const HEADERS: u8 = 1;
    const END: u8 = 1;

    fn frame(kind: u8, flags: u8, stream: u8) -> Vec<u8> {
        vec![0, 0, 1, kind, flags, 0, 0, 0, stream, b'x']
    }

    fn gpu() -> ResourceName {
        "example.com/gpu".parse().unwrap()
    }

    /// A served connection, and the kubelet's end of it.
    fn serve(connections: &Connections) -> (TrackedStream, StdStream) {
        let (ours, kubelet) = StdStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let stream = UnixStream::from_std(ours).unwrap();
        let served = TrackedStream::new(stream, Arc::clone(&connections.changed), Arc::new(|| {}));
        connections.serve(Some(&gpu()), &served);
        (served, kubelet)
    }

    /// The kubelet sends a call on a stream.
    async fn ask(served: &mut TrackedStream, kubelet: &mut StdStream, stream: u8) {
        let preface: &[u8] = if stream == 1 { b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" } else { b"" };
        let asked = [preface, &frame(HEADERS, END, stream)].concat();
        kubelet.write_all(&asked).unwrap();
        served.read_exact(&mut vec![0; asked.len()]).await.unwrap();
    }

    /// The kubelet gets a list on this stream.
    async fn list(served: &mut TrackedStream, stream: u8) {
        served.write_all(&[frame(HEADERS, 0, stream), frame(0, 0, stream)].concat()).await.unwrap();
    }

    fn lists(connections: &Connections) -> Vec<u32> {
        let lists = |(label, _): (Label, OwnedFd)| match label {
            Label::Connection { lists, .. } => lists,
            _ => u32::MAX,
        };
        connections.copies().into_iter().map(lists).collect()
    }

    #[tokio::test]
    async fn a_connection_is_passed_on_until_the_kubelet_closes_it() {
        let connections = Connections::new(100, 100);
        let (mut served, mut kubelet) = serve(&connections);
        assert_eq!(lists(&connections), [0], "a connection without lists is passed on too");
        ask(&mut served, &mut kubelet, 1).await;
        ask(&mut served, &mut kubelet, 3).await;
        list(&mut served, 3).await;
        assert_eq!(lists(&connections), [3]);
        let (former, mut theirs) = StdStream::pair().unwrap();
        connections
            .hold(vec![(Label::Connection { resource: gpu(), lists: 5 }, OwnedFd::from(former))]);
        assert_eq!(lists(&connections), [5, 3]);
        tokio::task::spawn_blocking(move || {
            let mut frames = vec![0; h2::refuse_pending_calls(5).len()];
            theirs.read_exact(&mut frames).unwrap();
            assert_eq!(frames, h2::refuse_pending_calls(5));
            // More than a socket's buffer: the held connection is read.
            theirs.write_all(&vec![b'x'; 1 << 20]).unwrap();
        })
        .await
        .unwrap();
        while lists(&connections) != [3] {
            tokio::task::yield_now().await;
        }
        drop(kubelet);
        assert_eq!(lists(&connections), [0_u32; 0], "the kubelet has closed it");
        drop(served);
    }

    #[tokio::test]
    async fn too_many_connections_of_earlier_instances_are_left_out() {
        let connections = Connections::new(100, 2);
        let hold = || {
            let (former, theirs) = StdStream::pair().unwrap();
            connections.hold(vec![(
                Label::Connection { resource: gpu(), lists: 3 },
                OwnedFd::from(former),
            )]);
            theirs
        };
        let _kept = [hold(), hold()];
        assert_eq!(lists(&connections), [3, 3]);
        let _served = serve(&connections);
        assert_eq!(lists(&connections), [0]);
    }

    #[tokio::test]
    async fn connections_with_lists_are_never_evicted_and_idle_ones_first() {
        let connections = Connections::new(2, 0);
        let (mut with_lists, mut kubelets) = serve(&connections);
        ask(&mut with_lists, &mut kubelets, 1).await;
        list(&mut with_lists, 1).await;
        let (mut busy, mut busys) = serve(&connections);
        ask(&mut busy, &mut busys, 1).await;
        let mut idle = Vec::new();
        for _ in 0..10 {
            idle.push(serve(&connections));
        }
        let ended = |of: &StdStream| is_hung_up(of);
        assert_eq!(idle.iter().filter(|(_, theirs)| !ended(theirs)).count(), 1, "the newest");
        assert!(!ended(&kubelets) && !ended(&busys));
        busy.write_all(&frame(HEADERS, END, 1)).await.unwrap();
        idle.push(serve(&connections));
        assert!(!ended(&kubelets) && ended(&busys));
        with_lists.write_all(&frame(HEADERS, END, 1)).await.unwrap();
        idle.push(serve(&connections));
        assert!(ended(&kubelets), "its lists have ended, and it is the oldest");
        drop((with_lists, busy));
    }

    /// Received calls are answered, including those in the socket's buffer. After that no
    /// connection ends.
    #[tokio::test]
    async fn a_connection_is_idle_when_every_call_is_answered_and_a_release_closes_none() {
        let connections = Connections::new(100, 100);
        let (mut served, mut kubelet) = serve(&connections);
        ask(&mut served, &mut kubelet, 1).await;
        list(&mut served, 1).await;
        ask(&mut served, &mut kubelet, 3).await;
        kubelet.write_all(&frame(HEADERS, END, 5)).unwrap();
        let mut answered = Vec::new();
        let answering = async {
            for stream in [3, 5] {
                tokio::task::yield_now().await;
                if stream == 5 {
                    served.read_exact(&mut [0; 10]).await.unwrap();
                }
                answered.push(stream);
                served.write_all(&frame(HEADERS, END, stream)).await.unwrap();
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = answering => {}
            () = connections.idle(false) => {}
        }
        assert_eq!(answered, [3, 5]);
        kubelet.write_all(&frame(HEADERS, END, 7)).unwrap();
        let copies = connections.copies();
        connections.release();
        assert!(served.write_all(b"x").await.is_err() && served.read(&mut [0]).await.is_err());
        served.shutdown().await.unwrap();
        drop(served);
        assert!(!is_hung_up(&kubelet));
        assert_eq!(
            rustix::io::ioctl_fionread(&copies[0].1).unwrap(),
            10,
            "the last call is left for the next process"
        );
        drop(copies);
        assert!(is_hung_up(&kubelet));
    }
}
