//! Sources of answers: the running daemon, or the files that it left.

use super::query::DeviceQuery;
use crate::admin::{ControlError, DeviceReport, LedgerEnd, Status, control_get, read_ledger};
use crate::console::exit::{FAILURE, Failed, STATE};
use crate::console::{Global, block_on};
use crate::domain::{DeviceId, PendingReleases, ResourceName};
use crate::host::peer::is_root;
use crate::store::{self, ExportLine, StoreError};
use std::io::ErrorKind;

/// Passes the ledger to `take`, as [`store::Export::read`] does, until `take` returns false.
/// Returns the end of the export. If the history is incomplete, the readable part has been passed.
///
/// # Errors
/// When neither the daemon nor the files can be read.
pub fn read(
    global: &Global,
    mut take: impl FnMut(ExportLine) -> bool,
) -> Result<LedgerEnd, Failed> {
    match block_on(read_ledger(&global.run_dir, &mut take))? {
        Ok(end) => Ok(end),
        Err(error @ ControlError::Absent { .. }) => {
            let end = read_files(global, take)?;
            crate::console::eprintln(format_args!(
                "{error}; the answer is from the files in `{}`",
                global.state_dir.display()
            ));
            Ok(end)
        }
        Err(error) => Err(Failed::new(FAILURE, error)),
    }
}

/// A query for the device that a user calls `text`. The running daemon knows the names of devices
/// on the host; the ledger does not.
pub fn device_query(global: &Global, text: &str) -> DeviceQuery {
    let mut wanted = DeviceQuery::new(text);
    let asked = block_on(control_get::<Vec<DeviceReport>>(&global.run_dir, "/v1/devices"))
        .ok()
        .and_then(Result::ok);
    for DeviceReport { id, key, names, .. } in asked.into_iter().flatten() {
        wanted.add_named(&key, &DeviceId::new(id), &names);
    }
    wanted
}

/// The releases that wait for proof, by a look of the running daemon at the pods; empty if no
/// daemon answers.
pub fn pending_releases(global: &Global) -> PendingReleases {
    let asked = block_on(control_get(&global.run_dir, "/v1/releases"));
    asked.ok().and_then(Result::ok).unwrap_or_default()
}

/// The resources that the running daemon offers; empty if no daemon answers.
pub fn offered(global: &Global) -> Vec<ResourceName> {
    let asked =
        block_on(control_get::<Status>(&global.run_dir, "/v1/status")).ok().and_then(Result::ok);
    asked
        .into_iter()
        .flat_map(|status| status.resources)
        .filter_map(|resource| resource.name.parse().ok())
        .collect()
}

/// The ledger as its files contain it. Only root may read them, since grants contain environments.
pub fn files(global: &Global) -> Result<store::Recovered, Failed> {
    store::peek(&global.state_dir).map_err(|error| match &error {
        StoreError::Io { source, .. }
            if source.kind() == ErrorKind::PermissionDenied && !is_root() =>
        {
            Failed::new(
                STATE,
                format_args!(
                    "only root may read the ledger in `{}`, since grants contain environments; run \
                 this as root (`sudo`)",
                    global.state_dir.display()
                ),
            )
        }
        _ => error.into(),
    })
}

/// The ledger's memory of devices, if there is a ledger. Prints a warning if it cannot be read,
/// since devices may then have other ids.
pub fn ledger_if_any(global: &Global) -> Option<store::Recovered> {
    match store::peek(&global.state_dir) {
        Ok(recovered) => Some(recovered),
        Err(StoreError::NoJournal { .. }) => None,
        Err(error) => {
            crate::console::eprintln(format_args!(
                "holdfast: the ids and holders of the ledger are not shown, since it cannot be \
                 read: {error}"
            ));
            None
        }
    }
}

fn read_files(
    global: &Global,
    mut take: impl FnMut(ExportLine) -> bool,
) -> Result<LedgerEnd, Failed> {
    let store::Recovered { grants, names, listed, owed, verdicts, .. } = files(global)?;
    let live = grants.into_iter().map(|grant| ExportLine::Grant(Box::new(grant)));
    if !std::iter::once(ExportLine::Notes { names, listed, owed, verdicts })
        .chain(live)
        .all(&mut take)
    {
        return Ok(LedgerEnd::default());
    }
    let store::History { released, forgotten_until, problem } =
        store::peek_history(&global.state_dir)?;
    // It does not matter here whether `take` stopped early.
    let _all = released.into_iter().map(|grant| ExportLine::Grant(Box::new(grant))).all(take);
    Ok(LedgerEnd { problem: problem.map(|problem| problem.to_string()), forgotten_until })
}
