//! The kubelet's connections, so that they can be handed on: as long as somebody holds one open, the kubelet does not see its end.

use crate::domain::limits::ConnectionTable;
use crate::host::peer::is_hung_up;
use crate::kubelet::conversation::{Conversation, Followed};
use crate::telemetry::metrics;
use rustix::net::{Shutdown, shutdown};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// One of them.
#[derive(Debug, Clone)]
pub struct Connection {
    /// It, as an open file.
    pub file: Arc<OwnedFd>,
    /// The HTTP/2 stream of its lists.
    pub lists: u32,
}

/// Those that are served here, and those of former instances, which nobody serves any more.
#[derive(Debug)]
pub struct Connections {
    served: Mutex<ConnectionTable<(), Served>>,
    held: Mutex<Vec<Connection>>,
}

/// A connection that is served here.
#[derive(Debug)]
struct Served {
    file: Weak<OwnedFd>,
    conversation: Conversation,
}

/// Every change is a single step: a panic elsewhere cannot leave one half done.
fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connections {
    /// With room for `max` connections without lists.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Connections { served: Mutex::new(ConnectionTable::new(max)), held: Mutex::default() }
    }

    /// Adds a connection that is served. When there are too many, an idle one is closed, or else one with a call in flight; never one on
    /// which lists are read.
    pub(super) fn serve(&self, followed: &mut Followed) {
        match followed.take_down() {
            Ok((file, conversation)) => {
                let mut served = lock(&self.served);
                served.retain(|other| other.file.strong_count() > 0);
                served.set_use(|other| other.conversation.usage());
                let (_, evicted) = served.add((), Served { file, conversation });
                drop(served);
                if let Some(file) = evicted.and_then(|evicted| evicted.file.upgrade()) {
                    metrics::connection_evicted("plugin");
                    // Its server sees the end. It may have ended already.
                    let _ended = shutdown(&file, Shutdown::Both);
                }
                self.forget_ended();
            }
            Err(error) => tracing::warn!(%error, "a connection of the kubelet could not be handed on to another instance"),
        }
    }

    /// Holds open what a former instance has served, until this one ends.
    pub fn hold(&self, connections: impl IntoIterator<Item = Connection>) {
        lock(&self.held).extend(connections);
    }

    /// Holds nothing open any more.
    pub(super) fn let_go(&self) {
        lock(&self.held).clear();
    }

    /// Those that have lists and whose other side is there, with those of former instances; these are held no longer than that.
    #[must_use]
    pub fn open(&self) -> Vec<Connection> {
        let served = lock(&self.served);
        let served = served.all().filter_map(|of| Some(Connection { file: of.file.upgrade()?, lists: of.conversation.lists()? }));
        let mut open: Vec<_> = served.filter(|served| !is_hung_up(&served.file)).collect();
        self.forget_ended();
        open.extend(lock(&self.held).iter().cloned());
        open
    }

    /// Of those that nobody serves: a kubelet that was restarted has left them, and comes anew.
    fn forget_ended(&self) {
        lock(&self.held).retain(|connection| !is_hung_up(&connection.file));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;
    use tonic::transport::server::Connected as _;

    #[tokio::test]
    async fn a_connection_is_open_while_it_is_served_or_held_and_the_other_side_is_there() {
        let connections = Connections::new(100);
        let count = || connections.open().len();
        let serve = || {
            let (ours, kubelet) = UnixStream::pair().unwrap();
            let mut served = Followed::from(ours);
            connections.serve(&mut served);
            (served, kubelet)
        };
        let asked = |served: &Followed| {
            for method in ["GetDevicePluginOptions", "Allocate", "ListAndWatch", "Allocate"] {
                served.connect_info().called(method);
            }
        };
        let (served, _kubelet) = serve();
        assert_eq!(count(), 0, "whoever asks for no list is not the kubelet");
        asked(&served);
        assert_eq!(connections.open().first().unwrap().lists, 5);
        let (former, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        connections.hold([Connection { file: Arc::new(OwnedFd::from(former)), lists: 3 }]);
        assert_eq!(count(), 2);
        drop(theirs);
        assert_eq!((count(), lock(&connections.held).len()), (1, 0), "the kubelet has closed the held one");
        drop(served);
        assert_eq!(count(), 0);
        let (served, kubelet) = serve();
        asked(&served);
        assert_eq!(lock(&connections.served).all().count(), 1, "the ended one is forgotten");
        assert_eq!(count(), 1);
        drop(kubelet);
        assert_eq!(count(), 0);
    }

    #[tokio::test]
    async fn connections_with_lists_are_never_evicted_and_idle_ones_first() {
        let connections = Connections::new(2);
        let serve = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut served = Followed::from(ours);
            connections.serve(&mut served);
            (served, theirs)
        };
        let (kubelet, kubelets) = serve();
        let lists = kubelet.connect_info().list_stream();
        let (busy, busys) = serve();
        let call = busy.connect_info().call_in_flight();
        let mut idle = Vec::new();
        for _ in 0..10 {
            idle.push(serve());
        }
        let ended = |of: &UnixStream| is_hung_up(of);
        assert_eq!(idle.iter().filter(|(_, theirs)| !ended(theirs)).count(), 1, "the newest");
        assert!(!ended(&kubelets) && !ended(&busys));
        drop(call);
        idle.push(serve());
        assert!(!ended(&kubelets) && ended(&busys));
        drop(lists);
        idle.push(serve());
        assert!(ended(&kubelets), "its lists have ended, and it is the oldest");
        drop((kubelet, busy));
    }
}
