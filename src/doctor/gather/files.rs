//! The configuration files, the state directory, and the contents of the journal.

use super::super::{Clock, Facts, Ledger, Requirements, State, WriteAccess};
use super::mounts::{Mount, mount_of, mounts};
use super::{AddFacts, ReaderInput, Target};
use crate::config::{Config, ConfigError, DEFAULT_PATH};
use crate::contract::nvidia_cdi;
use crate::domain::{Contract, Grant, GrantState, ResourceSpec, Timestamp, mps_run_here};
use crate::host;
use crate::store::{self, StoreError};
use std::path::{Path, PathBuf};

/// Requirements of the configuration, or its error.
pub(super) fn wants(
    loaded: &Result<Config, ConfigError>,
    target: &Target,
) -> Result<Requirements, String> {
    let config = loaded.as_ref().map_err(ToString::to_string)?;
    let main = target.config.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
    // Removing a drop-in changes only its directory.
    let sources = config.files.iter().cloned().chain([main.with_file_name("config.d")]);
    let changed_at = sources
        .filter_map(|path| Some(Timestamp::from_system(path.metadata().ok()?.modified().ok()?)))
        .max();
    let writes_cdi = config
        .resources
        .iter()
        .any(|spec| uses_cdi(spec) || !spec.cdi.is_empty() || nvidia_cdi::kind(spec).is_some());
    let hash = format!("{:08x}", config.hash);
    let cdi =
        config.resources.iter().filter(|spec| uses_cdi(spec)).map(|spec| spec.name.to_string());
    Ok(Requirements {
        files: config.files.clone(),
        hash,
        changed_at,
        has_resources: !config.resources.is_empty(),
        writes_cdi,
        cdi: cdi.collect(),
        mps: config
            .resources
            .iter()
            .filter(|spec| mps_run_here(spec).is_some())
            .map(|spec| spec.name.to_string())
            .collect(),
        dra: config.dra,
        authorize: config.authorize,
    })
}

/// Whether its containers get devices by CDI names only.
fn uses_cdi(spec: &ResourceSpec) -> bool {
    if spec.api.serves_claims() {
        return true;
    }
    match &spec.contract {
        Contract::Nvidia(options) => {
            options.device_list_strategy.iter().all(|strategy| strategy.is_cdi())
        }
        _ => !spec.cdi.is_empty(),
    }
}

pub(super) fn state(input: &ReaderInput) -> AddFacts {
    let wanted = &input.target.roots.state;
    // A directory that does not exist yet will be on the file system of its nearest parent.
    let Some(dir) = wanted.ancestors().find(|dir| dir.is_dir()).map(Path::to_path_buf) else {
        return Box::new(|_| ());
    };
    let inside =
        |dir: PathBuf| dir.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let mut moved_aside: Vec<PathBuf> = inside(wanted.clone())
        .chain(inside(wanted.join("journal")))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains(".quarantine"))
        })
        .collect();
    moved_aside.sort();
    let at = dir.canonicalize().unwrap_or_else(|_| dir.clone());
    let state = State {
        medium: host::medium(&dir),
        free_bytes: host::free_bytes(&dir),
        free_inodes: host::files_left(&dir),
        root_reserve_bytes: host::free_bytes_of_root(&dir),
        writes: writes(&dir, mount_of(&mounts(input), &at)),
        moved_aside,
        dir,
    };
    Box::new(|facts: &mut Facts| facts.state = Some(state))
}

/// The effect of a write to `dir` on `mount`.
pub(super) fn writes(dir: &Path, mount: Option<&Mount>) -> WriteAccess {
    // The flags of the file system do not show a failed disk; a read and the mount options do.
    let file_system_has = |option: &str| mount.is_some_and(|mount| mount.file_system_has(option));
    match host::disk_error(dir) {
        Some(error) => WriteAccess::DiskFailed(error),
        _ if file_system_has("shutdown") => {
            WriteAccess::DiskFailed("the kernel has shut down the file system".into())
        }
        _ if file_system_has("emergency_ro") => WriteAccess::StoppedByError,
        _ if !host::is_read_only(dir) => WriteAccess::Allowed,
        _ if mount.is_some_and(|mount| mount.has("ro")) && !file_system_has("ro") => {
            WriteAccess::MountReadOnly
        }
        _ => WriteAccess::ReadOnly,
    }
}

pub(super) fn ledger(input: &ReaderInput) -> AddFacts {
    let roots = &input.target.roots;
    let boot_id = host::boot_id(&roots.host);
    let ledger = match store::peek(&roots.state) {
        Ok(recovered) => Ledger {
            unreadable: None,
            findings: recovered.report.findings,
            clock: clock(&recovered.grants, boot_id.as_deref()),
        },
        // No daemon has run on this node yet.
        Err(StoreError::NoJournal { .. }) => return Box::new(|_| ()),
        Err(_) if !input.may_read_all => return Box::new(|_| ()),
        Err(error) => Ledger { unreadable: Some(error.to_string()), ..Ledger::default() },
    };
    Box::new(|facts: &mut Facts| facts.ledger = Some(ledger))
}

fn clock(grants: &[Grant], boot_id: Option<&str>) -> Clock {
    let of_boot = grants.iter().filter(|grant| boot_id == Some(grant.boot_id.as_str()));
    Clock {
        newest: grants.iter().map(latest).max(),
        oldest_of_boot: of_boot.map(|grant| grant.granted_at).min(),
    }
}

/// The latest time in a grant.
fn latest(grant: &Grant) -> Timestamp {
    let moved = match &grant.state {
        GrantState::Granted => grant.granted_at,
        GrantState::Bound { bound_at, .. } => *bound_at,
        GrantState::Prepared { prepared_at, .. } => *prepared_at,
        GrantState::Suspect { suspect_at, .. } => *suspect_at,
        GrantState::Released { released_at, .. } => *released_at,
    };
    moved.max(grant.granted_at)
}
