//! The two sockets of the driver, below the kubelet's directory.

use crate::domain::DRA_DRIVER;
use crate::host::peer::{TrustedListener, is_stale};
use crate::host::private::make_open_folder;
use crate::kubelet::uds::SOCKET_PATH_MAX;
use crate::telemetry::metrics;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The path of the socket that serves the driver, below the kubelet's directory.
///
/// # Errors
/// If the path is too long for a socket, or is no UTF-8.
pub fn service_socket(root: &Path) -> io::Result<PathBuf> {
    checked(root, &format!("plugins/{DRA_DRIVER}/dra.sock"))
}

/// The path of the registration socket, below the kubelet's directory.
///
/// The kubelet sends the path as the HTTP/2 authority, with `/` as `%2F`. `http`'s parser refuses
/// `%` in a host and accepts it in the user information before an `@`; so the name has an `@`.
///
/// # Errors
/// As [`service_socket`].
pub fn registration_socket(root: &Path) -> io::Result<PathBuf> {
    checked(root, &format!("plugins_registry/{DRA_DRIVER}@reg.sock"))
}

/// The absolute path: the kubelet dials it from another directory.
fn checked(root: &Path, name: &str) -> io::Result<PathBuf> {
    let path = std::path::absolute(root.join(name))?;
    let bytes = path.as_os_str().len();
    if bytes > SOCKET_PATH_MAX {
        return Err(invalid(format!(
            "the path of the DRA socket `{}` has {bytes} bytes, more than the {SOCKET_PATH_MAX} of a \
             unix socket; use a shorter --kubelet-dir",
            path.display()
        )));
    }
    match path.to_str() {
        Some(_) => Ok(path),
        None => {
            Err(invalid(format!("the path of the DRA socket `{}` is no UTF-8", path.display())))
        }
    }
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

/// One of the driver's two sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraSocket {
    /// Prepare, Unprepare and health.
    Service,
    /// The kubelet finds the driver by it.
    Registration,
}

impl DraSocket {
    /// The path of the socket below the kubelet's directory.
    ///
    /// # Errors
    /// As [`service_socket`].
    pub(super) fn path(self, root: &Path) -> io::Result<PathBuf> {
        match self {
            DraSocket::Service => service_socket(root),
            DraSocket::Registration => registration_socket(root),
        }
    }
}

/// Both sockets, open. Dropping them leaves their files.
#[derive(Debug)]
pub struct Listeners {
    pub(super) service: Listening,
    pub(super) registration: Listening,
}

impl Listeners {
    /// Opens both sockets below the kubelet's directory, and makes the missing directories. The
    /// registration socket is last: the kubelet dials both as soon as it sees it. The socket of a
    /// process that has exited is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if another process serves one of them, and if one cannot be made.
    pub fn open(root: &Path) -> io::Result<Self> {
        let service = Listening::open(DraSocket::Service.path(root)?)?;
        match DraSocket::Registration.path(root).and_then(Listening::open) {
            Ok(registration) => Ok(Listeners { service, registration }),
            Err(error) => {
                service.remove();
                Err(error)
            }
        }
    }

    /// Continues with the sockets of an earlier instance. The kubelet notices nothing: the files
    /// stay.
    ///
    /// # Errors
    /// If one is missing, is below another directory, or has no file.
    pub fn adopt(root: &Path, passed: &[(DraSocket, OwnedFd)]) -> io::Result<Self> {
        let adopt = |socket: DraSocket| {
            let path = socket.path(root)?;
            let (_, fd) = passed.iter().find(|(of, _)| *of == socket).ok_or_else(|| {
                invalid(format!("the DRA socket `{}` was not passed on", path.display()))
            })?;
            Listening::adopt(path, fd)
        };
        let (service, registration) = (adopt(DraSocket::Service)?, adopt(DraSocket::Registration)?);
        Ok(Listeners { service, registration })
    }
}

/// Removes the files of sockets that no instance serves. The kubelet forgets the driver.
pub fn remove_passed(passed: &[(DraSocket, OwnedFd)]) {
    // The registration socket first, so that no new call comes.
    let newest_last = [DraSocket::Registration, DraSocket::Service];
    for (_, fd) in newest_last.iter().flat_map(|of| passed.iter().filter(move |(it, _)| it == of)) {
        let path = TrustedListener::adopt(fd, || metrics::refused("plugin"))
            .map(|listener| listener.path());
        if let Ok(Some(path)) = path
            && let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove a DRA socket");
        }
    }
}

/// An open socket and its file.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) listener: Arc<TrustedListener>,
    pub(super) path: PathBuf,
    /// Device and inode of the file. No other file gets them while the socket is open.
    file: (u64, u64),
}

impl Listening {
    fn open(path: PathBuf) -> io::Result<Self> {
        let with_path = |error: io::Error| {
            let problem = format!("cannot open the DRA socket `{}`: {error}", path.display());
            io::Error::new(error.kind(), problem)
        };
        // The kubelet makes `plugins` and `plugins_registry` too; the folder of the driver is ours.
        let ours = path.parent().filter(|folder| folder.ends_with(DRA_DRIVER));
        let kubelets = ours.and(path.ancestors().nth(2)).or(path.parent());
        kubelets.map_or(Ok(()), make_open_folder).map_err(with_path)?;
        is_free(&path).map_err(with_path)?;
        let listener =
            TrustedListener::bind(&path, || metrics::refused("plugin")).map_err(with_path)?;
        let file = file(&path).map_err(with_path)?;
        Ok(Listening { listener: Arc::new(listener), path, file })
    }

    fn adopt(path: PathBuf, socket: &OwnedFd) -> io::Result<Self> {
        let listener = TrustedListener::adopt(socket, || metrics::refused("plugin"))?;
        if listener.path().as_ref() != Some(&path) {
            return Err(invalid(format!(
                "a DRA socket that was passed on is not `{}`",
                path.display()
            )));
        }
        let file = file(&path)?;
        Ok(Listening { listener: Arc::new(listener), path, file })
    }

    /// Whether the file is there, and no other process has replaced it.
    pub(super) fn has_file(&self) -> bool {
        file(&self.path).is_ok_and(|file| file == self.file)
    }

    /// Removes the file, unless another process has replaced it. Call it before the socket is
    /// closed.
    pub(super) fn remove(&self) {
        if self.has_file()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a DRA socket");
        }
    }
}

fn file(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|about| (about.dev(), about.ino()))
}

/// Whether a socket can be made at this path: there is none, or its process has exited.
fn is_free(path: &Path) -> io::Result<()> {
    match is_stale(path) {
        Ok(true) => Ok(()),
        Ok(false) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process serves it, or it is no socket; stop the other driver or remove the file",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_names_are_those_of_the_driver_with_an_at_for_the_kubelets_authority() {
        let root = Path::new("/var/lib/kubelet");
        assert_eq!(
            service_socket(root).unwrap(),
            Path::new("/var/lib/kubelet/plugins/holdfast.dev/dra.sock")
        );
        assert_eq!(
            registration_socket(root).unwrap(),
            Path::new("/var/lib/kubelet/plugins_registry/holdfast.dev@reg.sock")
        );
        assert!(service_socket(Path::new("kubelet")).unwrap().is_absolute());
        let microk8s = Path::new("/var/snap/microk8s/common/var/lib/kubelet");
        assert!(service_socket(microk8s).is_ok() && registration_socket(microk8s).is_ok());
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_an_error_with_the_remedy() {
        let fixed = "/plugins_registry/holdfast.dev@reg.sock".len();
        let root = |bytes| PathBuf::from(format!("/{}", "x".repeat(bytes - 1)));
        let longest = SOCKET_PATH_MAX - fixed;
        let path = registration_socket(&root(longest)).unwrap();
        assert_eq!(path.as_os_str().len(), SOCKET_PATH_MAX);
        let error = registration_socket(&root(longest + 1)).unwrap_err().to_string();
        assert!(error.contains("108 bytes") && error.contains("--kubelet-dir"), "{error}");
        let error = Listeners::open(&root(SOCKET_PATH_MAX)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[tokio::test]
    async fn the_sockets_are_made_for_root_alone_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("kubelet");
        let open = Listeners::open(&root).unwrap();
        let mode = |rel: &str| fs::metadata(root.join(rel)).unwrap().permissions().mode() & 0o777;
        let (service, registration) =
            ("plugins/holdfast.dev/dra.sock", "plugins_registry/holdfast.dev@reg.sock");
        assert_eq!([service, registration].map(mode), [0o600; 2]);
        assert_eq!(
            ["plugins", "plugins_registry", "plugins/holdfast.dev"].map(mode),
            [0o755, 0o755, 0o700]
        );
        open.registration.remove();
        open.service.remove();
        assert!(!root.join(service).exists() && !root.join(registration).exists());
    }

    #[tokio::test]
    async fn the_socket_of_an_exited_process_is_replaced_and_any_other_file_kept() {
        let dir = tempfile::tempdir().unwrap();
        let at = registration_socket(dir.path()).unwrap();
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        drop(UnixListener::bind(&at).unwrap());
        let stale = file(&at).unwrap();
        let open = Listeners::open(dir.path()).unwrap();
        assert!(fs::symlink_metadata(&at).unwrap().file_type().is_socket());
        let ours = file(&at).unwrap();
        // The inode may be used again, so the open socket is what shows the replacement.
        assert!(!is_stale(&at).unwrap(), "{stale:?} {ours:?}");

        // A second one finds them in use, and takes no file away.
        let error = Listeners::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
        assert_eq!(file(&at).unwrap(), ours);
        assert!(service_socket(dir.path()).unwrap().exists());
        drop(open);

        // What is not a socket stays, and the service socket of the failed try goes.
        fs::remove_file(&at).unwrap();
        symlink("/dev/null", &at).unwrap();
        assert_eq!(Listeners::open(dir.path()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(at.is_symlink() && !service_socket(dir.path()).unwrap().exists());
    }

    #[tokio::test]
    async fn a_socket_whose_queue_is_full_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("full.sock");
        // Its queue has room for one.
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&at).unwrap()).unwrap();
        listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        // tokio connects without waiting, so a full queue is an error.
        while let Ok(stream) = tokio::net::UnixStream::connect(&at).await {
            waiting.push(stream);
        }
        assert_eq!(waiting.len(), 1);
        assert!(!is_stale(&at).unwrap());
    }

    #[tokio::test]
    async fn a_socket_that_another_process_has_replaced_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let open = Listeners::open(dir.path()).unwrap();
        fs::remove_file(&open.service.path).unwrap();
        let _other = UnixListener::bind(&open.service.path).unwrap();
        open.service.remove();
        assert!(open.service.path.exists());
    }
}
