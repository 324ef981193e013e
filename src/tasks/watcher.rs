//! The host watch: turns events on disk and in the kernel into messages to the actors.
//!
//! Every message only triggers a scan or a read. A slow poll does both without an event.

use super::config_links::{self, DATA_LINK};
use super::label_file::LabelFile;
use super::rescans::Rescans;
use crate::domain::{CharPath, DeviceClass, KubeletGeneration, Plan, Source, Unread};
use crate::hardware;
use crate::health::Judgement;
use crate::host::{self, Change, DirWatch, HostRoot, Uevent, UeventSocket};
use crate::messages::{
    CheckpointWritten, DeviceEventSeen, KubeletSeen, Mailbox, Reconcile, Rescan, SocketLost,
};
use crate::serving::Sockets;
use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// The interval of the poll, which also scans the hardware. Events may be lost; the poll is not.
const POLL: Duration = Duration::from_secs(30);
/// The interval where inotify does not watch every directory: then only the poll notices a new
/// kubelet. The hardware is still scanned each [`POLL`].
const POLL_ALONE: Duration = Duration::from_secs(1);
/// The delay of a reconcile. The kubelet writes its checkpoint once for each container of a pod.
const RECONCILE_AFTER: Duration = Duration::from_millis(50);
/// The delay of a reload. The kubelet replaces the files of one volume at once, and several volumes
/// one after the other.
const RELOAD_AFTER: Duration = Duration::from_millis(200);

/// The directory of udev's records of devices.
const UDEV_DATA: &str = "run/udev/data";
/// The directory of the nodes of USB devices, with a directory for each bus.
const USB_NODES: &str = "dev/bus/usb";

/// The socket where the kubelet accepts registrations.
pub(crate) fn kubelet_socket(device_plugins: &Path) -> PathBuf {
    device_plugins.join("kubelet.sock")
}

#[derive(Debug)]
pub(crate) struct Watcher {
    pub(crate) device_plugins: PathBuf,
    pub(crate) host_root: HostRoot,
    pub(crate) plan: watch::Receiver<Arc<Plan>>,
    /// The directories of the configuration.
    pub(crate) config_dirs: [PathBuf; 2],
    /// Notified when the files were replaced. One waiting message stands for all.
    pub(crate) config_changed: mpsc::Sender<()>,
    /// The labels of the node that the configuration was chosen by.
    pub(crate) labels: LabelFile,
    pub(crate) kubelet: Arc<watch::Sender<Option<KubeletGeneration>>>,
    pub(crate) sockets: Arc<Sockets>,
    pub(crate) rescan: Mailbox<Rescan>,
    /// What the last scan could not read.
    pub(crate) unread: Arc<watch::Sender<Unread>>,
    pub(crate) device_events: Mailbox<DeviceEventSeen>,
    pub(crate) judgement: Arc<watch::Sender<Judgement>>,
    pub(crate) reconcile: Mailbox<Reconcile>,
    pub(crate) kubelet_seen: Mailbox<KubeletSeen>,
    pub(crate) checkpoint_written: Mailbox<CheckpointWritten>,
    pub(crate) socket_lost: Mailbox<SocketLost>,
}

/// The result of one wait.
enum Event {
    Change(std::io::Result<Change>),
    Uevent(std::io::Result<Option<Uevent>>),
    /// A scan has begun or ended.
    Rescan,
    ReconcileDue,
    ReloadDue,
    /// The labels of the node may differ.
    Labels,
    Planned,
    Poll,
}

impl Watcher {
    /// Reads the kubelet's socket; true when it differs from the last one.
    pub(crate) fn read_kubelet_socket(&self) -> bool {
        let socket = kubelet_socket(&self.device_plugins).symlink_metadata().ok();
        let generation =
            socket.filter(|metadata| metadata.file_type().is_socket()).map(|metadata| {
                KubeletGeneration {
                    inode: metadata.ino(),
                    made_ns: metadata
                        .mtime()
                        .saturating_mul(1_000_000_000)
                        .saturating_add(metadata.mtime_nsec()),
                }
            });
        self.kubelet.send_if_modified(|known| std::mem::replace(known, generation) != generation)
    }

    /// The directories to watch: the kubelet's, our sockets', and those of device nodes.
    fn directories(&self) -> BTreeSet<PathBuf> {
        let mut dirs =
            BTreeSet::from([self.device_plugins.clone(), self.sockets.directory().to_owned()]);
        dirs.extend(self.config_dirs.iter().cloned());
        dirs.extend(self.labels.folder());
        let plan = self.plan.borrow();
        // A new node may become a resource of its own.
        for spec in plan.specs.iter().chain(plan.patterns.iter()) {
            if spec.class != DeviceClass::Char {
                dirs.insert(self.host_root.path("dev"));
            }
            if spec.class == DeviceClass::Nvme {
                // udev makes its links after the kernel has made the node.
                dirs.insert(self.host_root.path(hardware::DISK_LINKS));
            }
            let with_devices = spec.nodes.iter().map(|node| &node.path);
            for CharPath { host, .. } in spec.device_paths().chain(with_devices) {
                let folder = host.folder();
                dirs.insert(self.host_root.path(folder.trim_start_matches('/')));
                // If the path is a folder, its entries matter; a node is watched by its folder.
                dirs.extend(
                    host.literal().map(|path| self.host_root.path(path.trim_start_matches('/'))),
                );
            }
            if spec.paths.iter().any(|path| !path.udev.is_empty()) {
                // udev writes its records after the kernel has made the node.
                dirs.insert(self.host_root.path(UDEV_DATA));
            }
            if !spec.usb.is_empty() {
                // Its own nodes, by bus, and those of most drivers.
                let buses = self.host_root.folders(USB_NODES).into_iter();
                let buses = buses.map(|bus| self.host_root.path(&format!("{USB_NODES}/{bus}")));
                dirs.extend(["dev", USB_NODES].map(|folder| self.host_root.path(folder)));
                dirs.extend(buses);
            }
        }
        dirs
    }

    fn watch(&self) -> Option<DirWatch> {
        match DirWatch::new(self.directories()) {
            Ok(watch) => Some(watch),
            Err(error) => {
                tracing::warn!(%error, "inotify is not available (see fs.inotify.max_user_instances); falling back \
                     to polling");
                None
            }
        }
    }

    fn rescans(&self) -> Rescans {
        let (rescan, unread) = (self.rescan.clone(), Arc::clone(&self.unread));
        Rescans::new(rescan, self.host_root.clone(), unread, POLL)
    }

    pub(crate) async fn run(mut self) {
        let mut watch = self.watch();
        let mut uevents = self.uevents();
        let mut poll_at = Instant::now() + host::until_tick(POLL);
        let mut rescans = self.rescans();
        let mut reconcile_at = Some(Instant::now());
        let (mut links, mut reload_at) = (config_links::targets(&self.config_dirs), None);
        // The kubelet may have started between the first read and the watch.
        self.notify_sockets();
        loop {
            let event = tokio::select! {
                change = next(watch.as_mut(), |watch| watch.next()) => Event::Change(change),
                uevent = next(uevents.as_ref(), |socket| socket.next()) => Event::Uevent(uevent),
                () = rescans.step() => Event::Rescan,
                () = at(reconcile_at) => Event::ReconcileDue,
                () = at(reload_at) => Event::ReloadDue,
                () = self.labels.step() => Event::Labels,
                Ok(()) = self.plan.changed() => Event::Planned,
                () = tokio::time::sleep_until(poll_at) => Event::Poll,
            };
            let is_poll = matches!(event, Event::Poll);
            self.check_config_links(&event, &mut links, &mut reload_at);
            self.check_labels(&event, &mut reload_at);
            match event {
                Event::Change(Ok(Change::Entry { dir, name })) if dir == self.device_plugins => {
                    if name == "kubelet.sock" {
                        self.notify_sockets();
                    } else if name == "kubelet_internal_checkpoint" {
                        reconcile_at.get_or_insert_with(|| Instant::now() + RECONCILE_AFTER);
                    }
                }
                Event::Change(Ok(Change::Entry { dir, .. })) if dir == self.sockets.directory() => {
                    self.notify_sockets();
                }
                Event::Change(Ok(Change::Entry { dir, .. })) if self.is_of_configuration(&dir) => {}
                Event::Change(Ok(Change::Entry { .. })) => rescans.request(),
                Event::Change(Ok(Change::Anything)) => {
                    self.notify_sockets();
                    rescans.request();
                    reconcile_at.get_or_insert_with(|| Instant::now() + RECONCILE_AFTER);
                }
                Event::Change(Err(error)) => {
                    tracing::warn!(%error, "inotify failed; falling back to polling");
                    watch = None;
                }
                Event::Uevent(Ok(Some(event))) if !event.may_matter() => {}
                Event::Uevent(Ok(Some(event)))
                    if self.report_device_event(&event) && event.action == "change" => {}
                Event::Uevent(Ok(event)) => {
                    tracing::debug!(?event, "uevent");
                    rescans.request();
                }
                Event::Uevent(Err(error)) => {
                    self.without_uevents(&error);
                    uevents = None;
                }
                Event::Rescan => {}
                Event::ReconcileDue => {
                    reconcile_at = None;
                    self.reconcile.send(Reconcile);
                    self.checkpoint_written.send(CheckpointWritten);
                }
                Event::ReloadDue => self.request_reload(&mut reload_at),
                Event::Labels | Event::Planned => {
                    watch.iter_mut().for_each(|watch| watch.want(self.directories()));
                }
                Event::Poll => {
                    self.watch_again(&mut watch);
                    uevents = uevents.or_else(|| self.uevents());
                    self.notify_sockets();
                    rescans.poll();
                }
            }
            let every =
                if watch.as_ref().is_some_and(DirWatch::is_whole) { POLL } else { POLL_ALONE };
            let next = Instant::now() + host::until_tick(every);
            poll_at = if is_poll { next } else { poll_at.min(next) };
        }
    }

    /// Watches what could not be watched before: inotify watches that others used may be free
    /// again.
    fn watch_again(&self, watch: &mut Option<DirWatch>) {
        if let Some(watch) = watch {
            watch.rearm();
        } else if let Ok(again) = DirWatch::new(self.directories()) {
            tracing::info!("inotify is available again");
            *watch = Some(again);
        }
    }

    /// Schedules a reload when the links to the configuration's files have new targets.
    fn check_config_links(
        &self,
        event: &Event,
        links: &mut Vec<Option<PathBuf>>,
        reload_at: &mut Option<Instant>,
    ) {
        let may_be_exchanged = match event {
            Event::Change(Ok(Change::Entry { dir, name })) => {
                name == DATA_LINK && self.config_dirs.contains(dir)
            }
            Event::Change(Ok(Change::Anything)) | Event::Poll => true,
            _ => false,
        };
        if may_be_exchanged {
            let now = config_links::targets(&self.config_dirs);
            if now != *links && now.iter().any(Option::is_some) {
                reload_at.get_or_insert_with(|| Instant::now() + RELOAD_AFTER);
            }
            *links = now;
        }
    }

    /// Schedules a reload when a label has another value.
    fn check_labels(&mut self, event: &Event, reload_at: &mut Option<Instant>) {
        match event {
            Event::Change(Ok(Change::Entry { dir, .. }))
                if self.labels.folder().as_ref() != Some(dir) => {}
            Event::Change(Ok(_)) | Event::Poll => self.labels.look(),
            Event::Labels if self.labels.differs() => {
                reload_at.get_or_insert_with(|| Instant::now() + RELOAD_AFTER);
            }
            _ => {}
        }
    }

    /// Whether only the configuration follows from this directory.
    fn is_of_configuration(&self, dir: &PathBuf) -> bool {
        self.config_dirs.contains(dir) || self.labels.folder().as_ref() == Some(dir)
    }

    fn request_reload(&self, reload_at: &mut Option<Instant>) {
        *reload_at = None;
        // A message that already waits is enough.
        let _ = self.config_changed.try_send(());
    }

    /// Sends an event about a device's health to the health actor. Returns whether there was one.
    fn report_device_event(&self, uevent: &Uevent) -> bool {
        let event = hardware::event(uevent);
        if let Some(event) = event.clone() {
            self.device_events.send(DeviceEventSeen { event, at: host::now() });
        }
        event.is_some()
    }

    /// Opens the socket of the uevents. At the next poll it is tried again.
    fn uevents(&self) -> Option<UeventSocket> {
        let socket = UeventSocket::open(&self.host_root)
            .inspect_err(|error| self.without_uevents(error))
            .ok()?;
        let off = |judgement: &mut Judgement| judgement.off.remove(&Source::Uevents).is_some();
        if self.judgement.send_if_modified(off) {
            tracing::info!("uevents are received again");
        }
        socket
    }

    fn without_uevents(&self, error: &std::io::Error) {
        if self.judgement.borrow().off.contains_key(&Source::Uevents) {
            return;
        }
        tracing::warn!(%error, "cannot receive uevents; falling back to polling for hardware changes");
        let why = format!(
            "uevents cannot be received ({error}); recoveries and failed drivers are not \
             detected"
        );
        self.judgement.send_modify(|judgement| drop(judgement.off.insert(Source::Uevents, why)));
    }

    /// Notifies registration of another kubelet socket, and of our own sockets that were removed.
    fn notify_sockets(&self) {
        if self.read_kubelet_socket() {
            self.kubelet_seen.send(KubeletSeen(*self.kubelet.borrow()));
        }
        for (resource, registration) in self.sockets.lost() {
            self.socket_lost.send(SocketLost { resource, registration });
        }
    }
}

/// The next item of a source. If the source is missing, this never returns.
async fn next<S, F, T>(source: Option<S>, wait: impl FnOnce(S) -> F) -> T
where
    F: Future<Output = T>,
{
    match source {
        Some(source) => wait(source).await,
        None => std::future::pending().await,
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
