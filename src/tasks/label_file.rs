//! Notices other labels of this node, for `watcher`.
//!
//! The file with the labels is read when its folder or its version changes. Only another value of a
//! label that the configuration compares leads to a reload: a reload for any other label would also
//! read files that an operator is still editing.

use crate::config::{ComparedLabels, Labels};
use crate::host::Stamp;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// The delay until the file is read. A program may write it in several steps.
const READ_AFTER: Duration = Duration::from_millis(200);

/// The file with the labels, and what is known of it.
#[derive(Debug)]
pub(crate) struct LabelFile {
    /// The labels that the current configuration was chosen by.
    compared: watch::Receiver<Arc<ComparedLabels>>,
    /// The version of the file that was read last.
    stamp: Option<Stamp>,
    /// The values that the last reload was requested for, or that the configuration was chosen by.
    known: Option<Labels>,
    read_at: Option<Instant>,
    /// Why the file cannot be read.
    not_read: watch::Sender<Option<String>>,
}

impl LabelFile {
    pub(crate) fn new(
        mut compared: watch::Receiver<Arc<ComparedLabels>>,
        not_read: watch::Sender<Option<String>>,
    ) -> Self {
        let known = compared.borrow_and_update().values().cloned();
        LabelFile {
            compared,
            // The file may have changed since it was compared.
            stamp: None,
            known,
            read_at: Some(Instant::now()),
            not_read,
        }
    }

    fn path(&self) -> Option<PathBuf> {
        self.compared.borrow().file().map(Path::to_owned)
    }

    /// The folder to watch; `None` if the configuration compares no label.
    pub(super) fn folder(&self) -> Option<PathBuf> {
        self.path()?.parent().map(Path::to_owned)
    }

    /// Waits until the configuration was chosen again, by the same labels or others, or until the
    /// file is to be read.
    pub(super) async fn step(&mut self) {
        tokio::select! {
            // The sender ends with the daemon.
            Ok(()) = self.compared.changed() => {
                self.known = self.compared.borrow_and_update().values().cloned();
                self.stamp = None;
                self.read_at = Some(Instant::now());
            }
            () = at(self.read_at) => {}
        }
    }

    /// Something has changed in a watched folder, or time has passed.
    pub(super) fn look(&mut self) {
        let now = self.path().and_then(|path| Stamp::at(&path));
        if now != self.stamp {
            self.read_at.get_or_insert_with(|| Instant::now() + READ_AFTER);
        }
    }

    /// Whether a label has another value than the configuration was chosen by. Reads the file if it
    /// is to be read now.
    pub(super) fn differs(&mut self) -> bool {
        self.read_at.is_some_and(|at| at <= Instant::now()) && self.read()
    }

    fn read(&mut self) -> bool {
        self.read_at = None;
        let Some(path) = self.path() else {
            self.not_read.send_replace(None);
            return false;
        };
        let before = Stamp::at(&path);
        let read = self.compared.borrow().now();
        if before != Stamp::at(&path) {
            self.read_at = Some(Instant::now() + READ_AFTER);
            return false;
        }
        self.stamp = before;
        let now = match read {
            Ok(now) => now,
            Err(why) => {
                // Read it again at the next look: the cause may end without a new version.
                self.stamp = None;
                if self.not_read.borrow().is_none() {
                    tracing::warn!(%why, "cannot read the labels of this node; the configuration stays as it is");
                }
                self.not_read.send_replace(Some(why));
                return false;
            }
        };
        self.not_read.send_replace(None);
        // Labels that were known do not become unknown.
        if now.is_none() || now == self.known {
            return false;
        }
        self.known = now;
        true
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, Node, copied_labels, copy_of_labels};
    use std::fs;

    /// A node whose configuration compares the label `role`, from a file or from the API server.
    struct Scene {
        dir: tempfile::TempDir,
        chosen: watch::Sender<Arc<ComparedLabels>>,
        file: LabelFile,
    }

    fn scene(source: impl FnOnce(&Path) -> String, before: impl FnOnce(&Path)) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        before(dir.path());
        let text = format!(
            "[cluster]\nnode_labels = {:?}\n[[node]]\nmatch.label = {{ role = \"a\" }}\n",
            source(dir.path())
        );
        fs::write(dir.path().join("config.toml"), text).unwrap();
        let node = Node::here(Path::new("/"), dir.path());
        let config = config::load(Some(&dir.path().join("config.toml")), &node).unwrap();
        let chosen = watch::Sender::new(Arc::new(config.compared_labels));
        let file = LabelFile::new(chosen.subscribe(), watch::Sender::default());
        Scene { file, dir, chosen }
    }

    fn given(dir: &Path) -> PathBuf {
        dir.join("labels")
    }

    fn of_file(text: &str) -> Scene {
        scene(|dir| given(dir).display().to_string(), |dir| fs::write(given(dir), text).unwrap())
    }

    impl Scene {
        /// Writes the file under another name, and renames it.
        fn write(&self, text: &str) {
            let fresh = self.dir.path().join("fresh");
            fs::write(&fresh, text).unwrap();
            fs::rename(fresh, given(self.dir.path())).unwrap();
        }

        fn differs(&mut self) -> bool {
            self.file.look();
            self.file.read_at.is_some() && self.file.read()
        }
    }

    #[test]
    fn only_another_value_of_a_compared_label_leads_to_a_reload() {
        let mut scene = of_file("role=a\nother=1\n");
        assert_eq!(scene.file.folder().as_deref(), Some(scene.dir.path()));
        assert!(!scene.differs());
        assert_eq!(scene.file.read_at, None);
        scene.write("role=a\nother=2\n");
        assert!(!scene.differs());
        scene.write("other=2\n");
        assert!(scene.differs(), "the label was removed");
        assert!(!scene.differs(), "once for each value");
        // The reload may have failed: the former value leads to another one.
        scene.write("role=a\n");
        assert!(scene.differs());
    }

    #[test]
    fn a_file_that_cannot_be_read_changes_nothing() {
        let mut scene = of_file("role=a\n");
        assert!(!scene.differs());
        fs::remove_file(given(scene.dir.path())).unwrap();
        assert!(!scene.differs());
        scene.write("no label\n");
        assert!(!scene.differs());
        let why = scene.file.not_read.borrow().clone().unwrap();
        assert!(why.contains("has no `key=value` in line 1"), "{why}");
        scene.file.look();
        assert!(scene.file.read_at.is_some(), "the same version is read again");
        scene.write("role=a\n");
        assert!(!scene.differs());
        assert_eq!(*scene.file.not_read.borrow(), None);
        scene.write("role=b\n");
        assert!(scene.differs());
    }

    #[tokio::test]
    async fn a_change_between_the_choice_and_the_watch_is_noticed() {
        let mut scene = of_file("role=a\n");
        scene.write("role=b\n");
        assert!(scene.differs());
        // A reload that compares nothing needs no file.
        scene.chosen.send_replace(Arc::default());
        scene.file.step().await;
        assert_eq!((scene.file.folder(), scene.differs()), (None, false));
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn the_first_labels_of_the_api_server_lead_to_a_reload() {
        let mut scene = scene(|_| "api".to_owned(), |_| ());
        assert!(!scene.differs(), "nothing is known yet");
        let name = Node::here(Path::new("/"), Path::new("/")).api_name().unwrap_or_default();
        let copy = copy_of_labels(scene.dir.path());
        fs::create_dir(copy.parent().unwrap()).unwrap();
        let labels = [("role".to_owned(), "a".to_owned())].into();
        fs::write(copy, copied_labels(&name, &labels)).unwrap();
        assert!(scene.differs());
    }
}
