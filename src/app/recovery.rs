//! Opens the ledger, and completes a damaged one from the kubelet's checkpoint.

use super::{Settings, StartError};
use crate::domain::{AllocId, Timestamp};
use crate::host::{self, HostRoot};
use crate::kubelet::checkpoint;
use crate::ledger::core::rebuild;
use crate::ledger::in_present_boot;
use crate::store::{Recovered, Store, StoreError};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// An open ledger.
pub(super) struct Opened {
    pub(super) store: Store,
    pub(super) recovered: Recovered,
    /// The damage that was found, and its repair. `None` if the ledger was intact.
    pub(super) damage: Option<Arc<str>>,
}

/// Opens the ledger and recovers its content.
///
/// # Errors
/// When it cannot be opened, or another process uses it.
pub(super) fn open(settings: &Settings, host_root: &HostRoot) -> Result<Opened, StartError> {
    let (roots, config) = (&settings.roots, &settings.config);
    tracing::debug!("opening the ledger");
    // The running kernel's boot id, not the host root's: written pages survive until it ends.
    let boot_id = host::boot_id(Path::new("/"));
    let (mut store, mut recovered) =
        Store::open_keeping(&roots.state, config.durability, boot_id.as_deref(), config.retention)?;
    // Only now: a start that the user can fix ends in one sentence, without log lines around it.
    tracing::info!(version = env!("CARGO_PKG_VERSION"), kubelet_dir = %roots.kubelet.display(), "starting");
    settings.close_folders();
    let boot_of_grants = host::boot_id(&roots.host).unwrap_or_default();
    complete(&mut store, &mut recovered, &settings.device_plugins(), host_root, &boot_of_grants);
    tracing::info!(grants = recovered.grants.len(), state_dir = %roots.state.display(), "ledger recovered");
    let damage =
        (!recovered.report.is_clean()).then(|| Arc::<str>::from(recovered.report.to_string()));
    if let Some(report) = &damage {
        tracing::warn!(%report, "the ledger was damaged");
    }
    Ok(Opened { store, recovered, damage })
}

/// Adds grants that only the kubelet's checkpoint has. Grants from there have no objects; they get
/// those of their present nodes (I13). Grants of a former boot get the present device numbers.
fn complete(
    store: &mut Store,
    recovered: &mut Recovered,
    device_plugins: &Path,
    host_root: &HostRoot,
    boot_id: &str,
) {
    from_kubelet(store, recovered, device_plugins);
    let grants = std::mem::take(&mut recovered.grants);
    recovered.grants = in_present_boot(grants, boot_id, host_root);
}

/// Adds the grants of the kubelet's checkpoint to a ledger that may lack grants. Grants that
/// neither of them has are lost; the report counts them.
fn from_kubelet(store: &mut Store, recovered: &mut Recovered, device_plugins: &Path) {
    if !recovered.report.may_lack_grants() {
        return;
    }
    match restore(store, recovered, device_plugins) {
        Ok(0) => {}
        Ok(grants) => tracing::warn!(
            grants,
            "the ledger lacked grants that the kubelet's checkpoint has; restored them"
        ),
        Err(error) => {
            tracing::error!(%error, "cannot restore lost grants from the kubelet's checkpoint");
        }
    }
}

fn restore(
    store: &mut Store,
    recovered: &mut Recovered,
    device_plugins: &Path,
) -> Result<usize, StoreError> {
    let stored = match checkpoint::read_kept(device_plugins) {
        Ok(stored) => stored,
        Err(error) => {
            // A new node has none. With a damaged ledger it matters.
            tracing::info!(%error, "no grant can be restored from the kubelet's checkpoint");
            return Ok(0);
        }
    };
    let ids: BTreeSet<AllocId> = stored.iter().map(|stored| stored.alloc_id.clone()).collect();
    let known = store.known_among(ids)();
    let grants =
        rebuild(stored, &known, &recovered.names, Timestamp::from_system(SystemTime::now()));
    store.adopt(&grants)?;
    let adopted = grants.len();
    recovered.grants.extend(grants);
    recovered.report.from_kubelet += adopted;
    Ok(adopted)
}
