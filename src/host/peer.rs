//! Unix sockets with access control by the peer's credentials (`SO_PEERCRED`, unix(7)).

use super::private::make_private_folder;
use super::regular::is_missing;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::geteuid;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};

/// The pause after a system error before the next accept.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// The interval at which a [`KeptListener`] looks for its file.
const FILE_CHECK: Duration = Duration::from_secs(10);

/// A socket that accepts connections only from root and from the daemon's own user.
///
/// The file's mode enforces this too, but a mode can be changed, and a descriptor can be passed on.
#[derive(Debug)]
pub struct TrustedListener {
    listener: UnixListener,
    refused: fn(),
}

impl TrustedListener {
    /// Listens at `path`, for this user alone. A missing directory is created. A file of an earlier
    /// process is removed. `refused` is called for each connection that is refused.
    ///
    /// # Errors
    /// If the directory or the socket cannot be made.
    pub fn bind(path: &Path, refused: fn()) -> io::Result<Self> {
        if let Some(dir) = path.parent() {
            make_private_folder(dir)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(TrustedListener { listener, refused })
    }

    /// Listens on a socket that another process has passed on. `refused` as above.
    ///
    /// # Errors
    /// If it is not a listening unix socket.
    pub fn adopt(socket: impl AsFd, refused: fn()) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(socket.as_fd().try_clone_to_owned()?);
        listener.set_nonblocking(true)?;
        Ok(TrustedListener { listener: UnixListener::from_std(listener)?, refused })
    }

    /// The file of the socket.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.listener.local_addr().ok()?.as_pathname().map(Path::to_owned)
    }

    /// All connections, one after the other. Boxed: a server moves the stream through half a dozen
    /// futures, each large enough for all of it.
    pub fn incoming(self: Arc<Self>) -> BoxStream<'static, io::Result<UnixStream>> {
        futures_util::stream::unfold(self, |listener| async move {
            Some((Ok(listener.accept().await), listener))
        })
        .boxed()
    }

    /// The next connection of an allowed peer. After a system error, such as too many open files,
    /// it tries again later.
    pub async fn accept(&self) -> UnixStream {
        loop {
            let (problem, wait) = match self.listener.accept().await {
                Ok((stream, _)) => match is_trusted(&stream) {
                    Ok(()) => return stream,
                    Err(why) => {
                        (self.refused)();
                        (format!("connection refused: {why}"), Duration::ZERO)
                    }
                },
                Err(error) => (format!("failed to accept a connection: {error}"), ACCEPT_AGAIN),
            };
            tracing::warn!(path = %self.path().unwrap_or_else(|| "?".into()).display(), "{problem}");
            tokio::time::sleep(wait).await;
        }
    }
}

impl AsFd for TrustedListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// A [`TrustedListener`] whose file is made again when another process has removed it: systemd
/// removes the run directory at the end of a service, which another daemon may use by then.
#[derive(Debug)]
pub struct KeptListener {
    listener: TrustedListener,
    path: PathBuf,
}

impl KeptListener {
    /// As [`TrustedListener::bind`].
    ///
    /// # Errors
    /// As there.
    pub fn bind(path: &Path, refused: fn()) -> io::Result<Self> {
        Ok(KeptListener { listener: TrustedListener::bind(path, refused)?, path: path.to_owned() })
    }

    /// The next connection of an allowed peer. Cancel safe.
    pub async fn accept(&mut self) -> UnixStream {
        loop {
            tokio::select! {
                stream = self.listener.accept() => return stream,
                () = tokio::time::sleep(FILE_CHECK) => self.keep_file(),
            }
        }
    }

    fn keep_file(&mut self) {
        if !is_missing(&self.path) {
            return;
        }
        let path = self.path.display();
        match TrustedListener::bind(&self.path, self.listener.refused) {
            Ok(listener) => {
                tracing::warn!(%path, "another process removed the socket; it is made again");
                self.listener = listener;
            }
            Err(error) => {
                tracing::warn!(%path, %error, "another process removed the socket; cannot make it again");
            }
        }
    }
}

/// Whether this process is root, which passes all ownership checks.
#[must_use]
pub fn is_root() -> bool {
    geteuid().is_root()
}

/// Whether a path is the socket of a process that has exited: it refuses a connection. Never waits.
///
/// # Errors
/// `NotFound` if there is no file, and if that cannot be determined.
pub fn is_stale(path: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&client, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(true),
        // AGAIN: its queue is full, so a process listens.
        Ok(()) | Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether the other side has closed the connection.
#[must_use]
pub fn is_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    poll(&mut fds, PollTimeout::ZERO).is_ok()
        && fds[0].revents().is_some_and(|seen| seen.contains(PollFlags::POLLHUP))
}

fn is_trusted(stream: &UnixStream) -> Result<(), String> {
    match stream.peer_cred().map(|peer| (peer.uid(), peer.pid())) {
        Ok((uid, _)) if uid == 0 || uid == geteuid().as_raw() => Ok(()),
        // A process in a user namespace of its own has another uid here, also if it is root there.
        Ok((uid, pid)) => Err(format!(
            "the client has uid {uid} (process {}), and only root may connect",
            pid.unwrap_or_default()
        )),
        Err(error) => Err(format!("the kernel does not report the client's uid: {error}")),
    }
}

/// The process at the other side when it connected; `None` if the kernel does not report it, as for
/// another process namespace.
#[must_use]
pub fn pid(stream: &UnixStream) -> Option<u32> {
    stream.peer_cred().ok()?.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_whose_file_was_removed_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/control.sock");
        let mut listener = KeptListener::bind(&path, || {}).unwrap();
        fs::remove_dir_all(dir.path().join("run")).unwrap();
        listener.keep_file();
        for _is_kept in [false, true] {
            let _client = UnixStream::connect(&path).await.unwrap();
            listener.accept().await;
            listener.keep_file();
        }
    }
}
