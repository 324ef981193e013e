//! The CDI files of claims: one for each prepared claim, in the folder of the other CDI files. The
//! folder also has the files with the metadata of devices, which a runtime does not read as CDI.

use crate::contract::claim;
use crate::domain::{ClaimHold, ClaimRef};
use crate::host::{HostRoot, SpecFolder, read_bounded};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The largest file of a claim that is read: of 32 devices with hundreds of nodes each.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The files.
#[derive(Debug, Clone)]
pub struct ClaimFiles {
    folder: Arc<SpecFolder>,
    /// Where the links to disks are followed.
    host_root: HostRoot,
    /// The claims whose file was written since a snapshot of the ledger had them. A snapshot is
    /// published after the record, so an older one may lack them. Also the claims that are
    /// spared.
    fresh: Arc<Mutex<BTreeSet<String>>>,
}

impl ClaimFiles {
    /// The files in the folder of CDI files.
    #[must_use]
    pub fn new(folder: Arc<SpecFolder>, host_root: HostRoot) -> Self {
        ClaimFiles { folder, host_root, fresh: Arc::default() }
    }

    /// Spares the files that exist from [`ClaimFiles::keep`], because the ledger may have lost
    /// their claims. To be called at the start.
    pub fn spare_all(&self) {
        let own = self.folder.own();
        let uids = own.iter().filter_map(|name| claim::uid_of_file(name));
        self.fresh().extend(uids.map(str::to_owned));
    }

    /// Spares only the files of these claims from now on.
    pub fn spare_only(&self, uids: &BTreeSet<String>) {
        self.fresh().retain(|uid| uids.contains(uid));
    }

    /// The claims that have a file and are not among the known ones: the UID, and the names of the
    /// devices, each with its qualified CDI name. A file that cannot be read has no device.
    #[must_use]
    pub fn unknown(&self, known: &BTreeSet<String>) -> BTreeMap<String, Vec<(String, String)>> {
        let own = self.folder.own();
        let uids = own.iter().filter_map(|name| Some((name, claim::uid_of_file(name)?)));
        let is_cdi = |name: &String, uid: &str| claim::file_name(uid).as_ref() == Some(name);
        let unknown = uids.filter(|(name, uid)| !known.contains(*uid) && is_cdi(name, uid));
        let devices = |(name, uid): (&String, &str)| {
            let text = read_bounded(&self.folder.file(name), FILE_BYTES_MAX).unwrap_or_default();
            (uid.to_owned(), claim::devices_in(&text, uid))
        };
        unknown.map(devices).collect()
    }

    /// Ensures that the file of a claim is as the record has it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn ensure(&self, of: &ClaimRef, holds: &[ClaimHold]) -> io::Result<()> {
        let mut fresh = self.fresh();
        fresh.insert(of.uid.clone());
        self.write(of, &holds.iter().collect::<Vec<_>>())
    }

    /// Removes the files of a released claim.
    ///
    /// # Errors
    /// The first file that cannot be removed. The others are.
    pub fn remove(&self, of: &ClaimRef) -> io::Result<()> {
        let mut fresh = self.fresh();
        fresh.remove(&of.uid);
        // By its name, also where the folder cannot be listed.
        let mut result = claim::file_name(&of.uid).map_or(Ok(()), |name| self.folder.remove(&name));
        for name in self.folder.own() {
            if claim::uid_of_file(&name) == Some(of.uid.as_str()) {
                result = result.and(self.folder.remove(&name));
            }
        }
        result
    }

    /// Writes the missing files of the claims of a snapshot of the ledger, and removes those of
    /// claims that it does not have. To be called before the first Prepare, because the folder is
    /// empty after a boot, and with each later snapshot, because a claim may end without Unprepare.
    ///
    /// # Errors
    /// The first file that cannot be written or removed. The others are.
    pub fn keep<'a>(&self, holds: impl IntoIterator<Item = &'a ClaimHold>) -> io::Result<()> {
        let mut claims: BTreeMap<&str, Vec<&ClaimHold>> = BTreeMap::new();
        for hold in holds {
            claims.entry(&hold.claim.uid).or_default().push(hold);
        }
        let mut fresh = self.fresh();
        fresh.retain(|uid| !claims.contains_key(uid.as_str()));
        let mut result = Ok(());
        for holds in claims.values() {
            let Some(of) = holds.first().map(|hold| &hold.claim) else { continue };
            result = result.and(self.write(of, holds));
        }
        let own = self.folder.own();
        let stale = own.iter().filter(|name| {
            let uid = claim::uid_of_file(name);
            uid.is_some_and(|uid| !claims.contains_key(uid) && !fresh.contains(uid))
        });
        for name in stale {
            result = result.and(self.folder.remove(name));
        }
        result
    }

    /// A claim without content has no file. Of a claim whose content is not known, an earlier
    /// process may have left the file.
    fn write(&self, of: &ClaimRef, holds: &[&ClaimHold]) -> io::Result<()> {
        for file in claim::metadata_files(holds.iter().copied()) {
            self.folder.ensure(&file.name, &file.text)?;
        }
        if !claim::is_whole(holds.iter().copied()) {
            return Ok(());
        }
        let real_path = |path: &str| self.host_root.canonical_node(path);
        match claim::file(of, holds.iter().copied(), &real_path) {
            Some(file) => self.folder.ensure(&file.name, &file.text),
            None => claim::file_name(&of.uid).map_or(Ok(()), |name| self.folder.remove(&name)),
        }
    }

    fn fresh(&self) -> MutexGuard<'_, BTreeSet<String>> {
        // Every change is a single step on the set.
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::cdi::FILE_PREFIX;
    use crate::domain::{Allocated, ClaimedDevice, ContainerEdits, DeviceId, DraName, EditDevice};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    fn hold(uid: &str) -> ClaimHold {
        let name = DraName { pool: "n1/char".into(), device: "fuse".into() };
        let node = EditDevice {
            host: "/dev/fuse".into(),
            container: "/dev/fuse".into(),
            permissions: "rw".into(),
        };
        let device = ClaimedDevice {
            allocated: Allocated { request: "r".into(), name, share_id: None, admin: false },
            id: DeviceId::new("misc:fuse"),
            cdi_devices: Vec::new(),
            edits: ContainerEdits { devices: vec![node], ..ContainerEdits::default() },
            metadata: String::new(),
        };
        let claim = ClaimRef { uid: uid.into(), namespace: "ml".into(), name: uid.into() };
        ClaimHold { claim, allocation: "a".into(), devices: vec![device] }
    }

    fn files(path: &Path) -> ClaimFiles {
        ClaimFiles::new(Arc::new(SpecFolder::new(path, FILE_PREFIX)), HostRoot::new("/"))
    }

    fn there(path: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(path)
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn every_live_claim_has_its_file_and_no_other_claim_has_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cdi");
        // An earlier process left the file of a claim. The folder has files of others too.
        files(&path).ensure(&hold("old").claim, &[hold("old")]).unwrap();
        for other in ["holdfast-nvidia.com+gpu.json", "vendor.json"] {
            std::fs::write(path.join(other), "{}").unwrap();
        }
        let now = files(&path);
        now.keep(&[hold("a"), hold("b")]).unwrap();
        let all = [
            "holdfast-claim-a.json",
            "holdfast-claim-b.json",
            "holdfast-nvidia.com+gpu.json",
            "vendor.json",
        ];
        assert_eq!(there(&path), all);
        let mode = std::fs::metadata(path.join(all[0])).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "as the other files");
        now.keep(&[hold("b")]).unwrap();
        assert_eq!(there(&path), all[1..]);
        now.keep(&[]).unwrap();
        assert_eq!(there(&path), all[2..]);
    }

    #[test]
    fn an_older_snapshot_of_the_ledger_does_not_remove_a_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.ensure(&hold("a").claim, &[hold("a")]).unwrap();
        files.keep(&[]).unwrap();
        assert_eq!(there(dir.path()), ["holdfast-claim-a.json"]);
        files.keep(&[hold("a")]).unwrap();
        // Now the ledger has released it, without Unprepare.
        files.keep(&[]).unwrap();
        assert!(there(dir.path()).is_empty());
        // After Unprepare nothing is left to protect.
        files.ensure(&hold("a").claim, &[hold("a")]).unwrap();
        files.remove(&hold("a").claim).unwrap();
        files.remove(&hold("a").claim).unwrap();
        assert!(there(dir.path()).is_empty());
    }

    #[test]
    fn the_files_of_claims_that_the_ledger_may_have_lost_are_spared_and_name_their_devices() {
        let dir = tempfile::tempdir().unwrap();
        let before = files(dir.path());
        before.keep(&[hold("a"), hold("b"), hold("c")]).unwrap();
        std::fs::write(dir.path().join("holdfast-claim-d.json"), "no JSON").unwrap();
        // A file with metadata names no devices to restore.
        std::fs::write(dir.path().join("holdfast-claim-b+fuse.metadata"), "{}").unwrap();
        std::fs::write(dir.path().join("holdfast-claim-e+fuse.metadata"), "{}").unwrap();
        let now = files(dir.path());
        now.spare_all();
        now.keep(&[hold("a")]).unwrap();
        assert_eq!(there(dir.path()).len(), 6);
        let known = BTreeSet::from(["a".to_owned()]);
        let fuse = |uid| vec![("fuse".to_owned(), format!("{}={uid}-fuse", claim::KIND))];
        let unknown = [("b", fuse("b")), ("c", fuse("c")), ("d", Vec::new())];
        let unknown = unknown.map(|(uid, devices)| (uid.to_owned(), devices));
        assert_eq!(now.unknown(&known), BTreeMap::from(unknown));
        now.spare_only(&BTreeSet::from(["b".to_owned()]));
        now.keep(&[hold("a")]).unwrap();
        let of_b = ["holdfast-claim-b+fuse.metadata", "holdfast-claim-b.json"];
        assert_eq!(there(dir.path()), ["holdfast-claim-a.json", of_b[0], of_b[1]]);
        // The ledger has it again, and it ends later.
        now.keep(&[hold("a"), hold("b")]).unwrap();
        now.keep(&[hold("a")]).unwrap();
        assert_eq!(there(dir.path()), ["holdfast-claim-a.json"]);
    }

    #[test]
    fn the_file_of_a_claim_with_unknown_content_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        files(dir.path()).keep(&[hold("a")]).unwrap();
        let text = || std::fs::read(dir.path().join("holdfast-claim-a.json")).unwrap();
        let before = text();
        let mut restored = hold("a");
        restored.devices[0].edits = ContainerEdits::default();
        restored.devices[0].cdi_devices = vec![format!("{}=a-fuse", claim::KIND)];
        let now = files(dir.path());
        now.keep(&[restored.clone()]).unwrap();
        now.ensure(&restored.claim, &[restored.clone()]).unwrap();
        assert_eq!(text(), before);
        // A device without content has no name in the file.
        restored.devices[0].cdi_devices.clear();
        now.keep(&[restored]).unwrap();
        assert!(there(dir.path()).is_empty());
    }

    #[test]
    fn the_metadata_of_a_claim_has_a_file_for_as_long_as_the_claim_lives() {
        let dir = tempfile::tempdir().unwrap();
        let now = files(dir.path());
        let with_metadata = |uid| {
            let mut hold = hold(uid);
            hold.devices[0].metadata = format!("{{\"of\": \"{uid}\"}}\n");
            hold
        };
        let own = |uid: &str| {
            [format!("holdfast-claim-{uid}+fuse.metadata"), format!("holdfast-claim-{uid}.json")]
        };
        // The UID of one begins as that of the other.
        let all = [own("a"), own("a-b")].concat();
        now.ensure(&hold("a-b").claim, &[with_metadata("a-b")]).unwrap();
        now.keep(&[with_metadata("a")]).unwrap();
        let mut expected = all.clone();
        expected.sort();
        assert_eq!(there(dir.path()), expected, "one is new, and one is in the ledger");
        let text = || std::fs::read_to_string(dir.path().join(&all[0])).unwrap();
        assert_eq!(text(), "{\"of\": \"a\"}\n");
        std::fs::remove_file(dir.path().join(&all[0])).unwrap();
        let after_a_boot = files(dir.path());
        after_a_boot.spare_all();
        after_a_boot.keep(&[with_metadata("a")]).unwrap();
        assert_eq!(there(dir.path()), expected, "the other one is spared");
        after_a_boot.spare_only(&BTreeSet::new());
        after_a_boot.keep(&[with_metadata("a")]).unwrap();
        assert_eq!(there(dir.path()), own("a"));
        after_a_boot.remove(&hold("a").claim).unwrap();
        assert!(there(dir.path()).is_empty());
    }

    #[test]
    fn a_hostile_uid_never_leaves_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cdi");
        let files = files(&path);
        std::fs::write(dir.path().join("victim.json"), "x").unwrap();
        for uid in ["../victim", "..", "", "a/../../victim", "-a"] {
            files.ensure(&hold(uid).claim, &[hold(uid)]).unwrap();
            files.keep(&[hold(uid)]).unwrap();
            files.remove(&hold(uid).claim).unwrap();
        }
        assert!(there(&path).is_empty());
        assert_eq!(std::fs::read(dir.path().join("victim.json")).unwrap(), b"x");
    }
}
