//! `holdfast ledger import`: imports an export into the ledger, all or nothing.

use super::export::{Exported, SCHEMA};
use crate::cli::when;
use crate::config::Config;
use crate::console::exit::{FAILURE, Failed};
use crate::console::progress::Progress;
use crate::console::text::Text;
use crate::console::{Global, eprintln, show};
use crate::domain::{
    AllocId, DeviceId, Durability, Entry, Grant, GrantState, Listed, PendingHook, PendingHooks,
    Retention, Timestamp, Verdicts,
};
use crate::host;
use crate::store::{Recovered, Store, StoreError, keep_private};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Maximum number of conflicts that the error lists. One is enough to know that these are two
/// ledgers.
const CONFLICTS_SHOWN: usize = 3;

#[derive(Debug, Deserialize)]
struct Versioned {
    schema: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(rename = "schema")]
    _schema: u32,
    names: BTreeMap<String, DeviceId>,
    listed: Listed,
    #[serde(default)]
    owed: PendingHooks,
    #[serde(default)]
    verdicts: Verdicts,
    grants: Vec<Exported>,
}

/// A parsed export; every entry is a valid grant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Import {
    names: BTreeMap<String, DeviceId>,
    listed: Listed,
    owed: PendingHooks,
    verdicts: Verdicts,
    grants: BTreeMap<AllocId, Grant>,
}

/// Result of the import (`ledger import -o json`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct Done {
    schema: u32,
    /// Live grants.
    live: usize,
    /// Released grants.
    released: usize,
    /// Device names.
    names: usize,
    /// Device lists of resources.
    listed: usize,
    /// Pending hooks after release.
    owed: usize,
    /// Verdicts on the health of devices.
    verdicts: usize,
    /// Identical grants that the ledger already had.
    already_there: usize,
    /// Grants released before the ledger's retention age.
    forgotten: usize,
}

/// Imports `file`, or standard input for `-`.
///
/// # Errors
/// When the file is no export, conflicts with the ledger, or a daemon uses the ledger. Nothing is
/// imported then.
pub(super) fn run(global: &Global, file: &Path) -> Result<(), Failed> {
    let refused = |why: String| {
        Failed::new(FAILURE, format_args!("cannot import `{}`: {why}", file.display()))
    };
    let progress = Progress::uncounted("reading the export");
    let text = read(file).map_err(|error| refused(error.to_string()))?;
    let import = parse(&text).map_err(refused)?;
    drop(progress);
    let Config { retention, .. } = global.load_config()?;

    let boot_id = host::boot_id(Path::new("/"));
    let (mut store, recovered) = Store::open_keeping(
        &global.state_dir,
        Durability::PowerLoss,
        boot_id.as_deref(),
        retention,
    )?;
    if let Err(error) = keep_private(&global.state_dir) {
        eprintln(format_args!("holdfast: cannot restrict the state directory to root: {error}"));
    }
    if !recovered.report.is_clean() {
        eprintln(format_args!("holdfast: the ledger was damaged: {}", recovered.report));
    }
    let ids: BTreeSet<_> = import.grants.keys().cloned().collect();
    let released = store.history(usize::MAX, |grant| ids.contains(&grant.alloc_id))?;
    let (entries, done) =
        plan(import, &recovered, &released, retention, when::now()).map_err(refused)?;
    let progress = Progress::uncounted("writing the imported entries");
    store.import(&entries).map_err(|error| match error {
        StoreError::TooLarge { .. } => refused(error.to_string()),
        error => error.into(),
    })?;
    drop(progress);
    if let Err(error) = store.close() {
        eprintln(format_args!(
            "holdfast: the journal has all entries, but the query database could not be closed: \
             {error}; the next start completes it"
        ));
    }
    show(global.output, &done, text_of)
}

fn read(file: &Path) -> std::io::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        return std::io::stdin().lock().read_to_string(&mut text).map(|_| text);
    }
    std::fs::read_to_string(file)
}

// Parse JSON from bytes, as everywhere else: a second parser for `str` would duplicate every
// record's reader in the binary (60 KB).
fn parse(text: &str) -> Result<Import, String> {
    match serde_json::from_slice(text.as_bytes()) {
        Ok(Versioned { schema: SCHEMA }) => {}
        Ok(Versioned { schema: 1 }) => {
            return Err("its schema is 1, which lacks what each container got; export the ledger \
                        again with this version"
                .into());
        }
        Ok(Versioned { schema }) => {
            return Err(format!("its schema is {schema}, but this version supports only {SCHEMA}"));
        }
        Err(error) => {
            return Err(format!(
                "it is not an export of a ledger: {error}; name a file that `holdfast ledger \
                 export` has written"
            ));
        }
    }
    let Document { names, listed, owed, verdicts, grants, .. } =
        serde_json::from_slice(text.as_bytes()).map_err(|error| error.to_string())?;
    let mut import = Import { names, listed, owed, verdicts, grants: BTreeMap::new() };
    for exported in grants {
        let id = exported.alloc_id.clone();
        let grant = exported.try_into().map_err(|why| format!("grant {id}: {why}"))?;
        if import.grants.insert(id.clone(), grant).is_some() {
            return Err(format!("it contains grant {id} twice"));
        }
    }
    Ok(import)
}

/// The entries to append to a ledger that contains `recovered` and, of these grants, `released`; or
/// the conflicts.
fn plan(
    import: Import,
    recovered: &Recovered,
    released: &[Grant],
    retention: Retention,
    now: Timestamp,
) -> Result<(Vec<Entry>, Done), String> {
    let Import { names, listed, owed, verdicts, grants } = import;
    let known: BTreeMap<&AllocId, &Grant> =
        recovered.grants.iter().chain(released).map(|grant| (&grant.alloc_id, grant)).collect();
    let (mut entries, mut conflicts, mut done) =
        (Vec::new(), Vec::new(), Done { schema: 1, ..Done::default() });
    for (key, id) in names {
        match recovered.names.get(&key) {
            Some(existing) if *existing == id => {}
            Some(existing) => conflicts.push(format!(
                "`{key}` is named `{existing}` in the ledger and `{id}` in the export"
            )),
            None => {
                done.names += 1;
                entries.push(Entry::Named { key, id });
            }
        }
    }
    // If the ledger has a list for the resource, keep it: the kubelet received it later.
    for (resource, devices) in
        listed.into_iter().filter(|(resource, _)| !recovered.listed.contains_key(resource))
    {
        done.listed += 1;
        entries.push(Entry::Listed { resource, devices });
    }
    // A hook that runs twice does no harm; one that never runs does.
    let is_pending = |hook: &PendingHook| {
        recovered.owed.get(&hook.resource).is_some_and(|devices| devices.contains_key(&hook.device))
    };
    for hook in owed.into_values().flat_map(BTreeMap::into_values).filter(|hook| !is_pending(hook))
    {
        done.owed += 1;
        entries.push(Entry::Hook(Box::new(hook)));
    }
    // If the ledger has a verdict on the device, keep it.
    for (device, verdict) in
        verdicts.into_iter().filter(|(device, _)| !recovered.verdicts.contains_key(device))
    {
        done.verdicts += 1;
        entries.push(Entry::Judged { device, verdict: Some(Box::new(verdict)) });
    }
    let oldest = Timestamp(
        now.0.saturating_sub(u64::try_from(retention.age.as_millis()).unwrap_or(u64::MAX)),
    );
    for (id, grant) in grants {
        match (known.get(&id), &grant.state) {
            (Some(existing), _) if **existing == grant => done.already_there += 1,
            (Some(existing), _) => {
                conflicts.push(format!(
                    "grant {id} is {} in the ledger and {} in the export",
                    existing.state_name(),
                    grant.state_name()
                ));
            }
            (None, GrantState::Released { released_at, .. }) if *released_at < oldest => {
                done.forgotten += 1;
            }
            (None, state) => {
                *if matches!(state, GrantState::Released { .. }) {
                    &mut done.released
                } else {
                    &mut done.live
                } += 1;
                entries.push(Entry::Grant(Arc::new(grant)));
            }
        }
    }
    if conflicts.is_empty() {
        return Ok((entries, done));
    }
    let more = conflicts.len().saturating_sub(CONFLICTS_SHOWN);
    conflicts.truncate(CONFLICTS_SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    Err(format!("it contradicts the ledger: {}{more}", conflicts.join("; ")))
}

fn text_of(done: &Done) -> Text {
    let Done { live, released, names, listed, owed, verdicts, already_there, forgotten, .. } = done;
    let mut text = Text::of_line(format_args!(
        "imported grants: {live} live, {released} released; names: {names}; lists: {listed}"
    ));
    if *owed > 0 {
        text.line(format_args!("pending hooks: {owed}"));
    }
    if *verdicts > 0 {
        text.line(format_args!("verdicts on devices: {verdicts}"));
    }
    if *already_there > 0 {
        text.line(format_args!("already in the ledger: {already_there}"));
    }
    if *forgotten > 0 {
        text.line(format_args!(
            "left out, released longer ago than `ledger.history_age`: {forgotten}"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANT: &str = r#"{"alloc_id":"a-1","resource":"a.b/c","devices":["x"],"state":"granted","pod":null,"container":null,
        "granted_at":"2023-11-14T22:13:20.000Z","bound_at":null,"released_at":null,"released_by":null,"suspect_at":null,
        "granted_devices":[{"id":"x","key":"dev:x"}],
        "edits":{"envs":{},"mounts":[],"devices":[],"annotations":{},"cdi_devices":[]},"boot_id":"b","kubelet":null,"version":"1"}"#;

    fn document(names: &str, grants: &[String]) -> String {
        format!(r#"{{"schema":2,"names":{names},"listed":{{}},"grants":[{}]}}"#, grants.join(","))
    }

    fn given_back(at: &str) -> String {
        let released = format!(r#""released_at":"{at}","released_by":"pod_gone""#);
        GRANT
            .replace(r#""released_at":null,"released_by":null"#, &released)
            .replace("\"granted\"", "\"released\"")
    }

    fn planned(import: &str, recovered: &Recovered, released: &[Grant]) -> Result<Done, String> {
        let now = Timestamp::from_system(humantime::parse_rfc3339("2023-12-01T00:00:00Z").unwrap());
        plan(parse(import).unwrap(), recovered, released, Retention::default(), now)
            .map(|(_, done)| done)
    }

    #[test]
    fn an_invalid_export_is_refused() {
        let bound = |uid: &str| {
            GRANT
                .replace("\"granted\"", "\"bound\"")
                .replace(
                    r#""pod":null,"container":null"#,
                    &format!(
                        r#""pod":{{"uid":"{uid}","namespace":null,"name":null}},"container":"c""#
                    ),
                )
                .replace(r#""bound_at":null"#, r#""bound_at":"2023-11-14T22:13:21.000Z""#)
        };
        assert!(parse(&document("{}", &[GRANT.into()])).is_ok());
        // A grant that was rebuilt has a pod without names.
        assert!(parse(&document("{}", &[bound("u1")])).is_ok());
        // The clock may have been set back between the grant and its release.
        assert!(parse(&document("{}", &[given_back("2023-11-14T22:13:19.000Z")])).is_ok());
        for (text, why) in [
            ("nonsense".to_owned(), "it is not an export of a ledger"),
            (
                r#"{"schema":1,"grants":[]}"#.to_owned(),
                "schema is 1, which lacks what each container got",
            ),
            (
                r#"{"schema":3,"grants":[]}"#.to_owned(),
                "schema is 3, but this version supports only 2",
            ),
            (document("{}", &[GRANT.into(), GRANT.into()]), "it contains grant a-1 twice"),
            (
                document("{}", &[GRANT.replace("\"granted\"", "\"bound\"")]),
                "grant a-1: its `state` contradicts its other fields",
            ),
            (
                document("{}", &[GRANT.replace("[\"x\"]", "[\"y\"]")]),
                "grant a-1: its `devices` and `granted_devices`",
            ),
            (
                document(
                    "{}",
                    &[GRANT
                        .replace("[\"x\"]", "[]")
                        .replace(r#"[{"id":"x","key":"dev:x"}]"#, "[]")],
                ),
                "it has no device",
            ),
            (document("{}", &[GRANT.replace("\"x\"", "\"\"")]), "grant a-1: a device has no id"),
            (
                document(
                    "{}",
                    &[GRANT.replace("[\"x\"]", "[\"x\",\"x\"]").replace(
                        r#"{"id":"x","key":"dev:x"}"#,
                        r#"{"id":"x","key":"dev:x"},{"id":"x","key":"dev:x"}"#,
                    )],
                ),
                "grant a-1: it has device `x` twice",
            ),
            (document("{}", &[GRANT.replace("a-1", "")]), "its `alloc_id` is empty"),
            (document("{}", &[bound("")]), "grant a-1: a pod has no `uid`"),
            (document("{}", &[GRANT.replace("a.b/c", "gpu")]), "`gpu` is not a resource name"),
            (
                document("{}", &[GRANT.replace("\"version\"", "\"unheard\"")]),
                "unknown field `unheard`",
            ),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(why), "{error}\nshould contain: {why}");
        }
    }

    #[test]
    fn identical_entries_are_kept_and_different_ones_conflict() {
        let import = document(r#"{"pci:1":"GPU-1"}"#, &[GRANT.into()]);
        let empty = Recovered::default();
        assert_eq!(
            planned(&import, &empty, &[]),
            Ok(Done { schema: 1, live: 1, names: 1, ..Done::default() })
        );

        let Import { names, grants, .. } = parse(&import).unwrap();
        let grant = grants.into_values().next().unwrap();
        let same =
            Recovered { grants: vec![grant.clone()], names: names.clone(), ..Recovered::default() };
        assert_eq!(
            planned(&import, &same, &[]),
            Ok(Done { schema: 1, already_there: 1, ..Done::default() })
        );
        let other = Grant { version: "2".into(), ..grant.clone() };
        let error = planned(&import, &Recovered { grants: vec![other], ..same }, &[]).unwrap_err();
        assert_eq!(
            error,
            "it contradicts the ledger: grant a-1 is granted in the ledger and granted in the export"
        );
        let released = parse(&document("{}", &[given_back("2023-11-20T00:00:00Z")]))
            .unwrap()
            .grants
            .into_values()
            .next()
            .unwrap();
        assert!(
            planned(&import, &empty, &[released])
                .unwrap_err()
                .contains("grant a-1 is released in the ledger and granted in the export")
        );
        let renamed = Recovered {
            names: BTreeMap::from([("pci:1".into(), DeviceId::new("GPU-2"))]),
            ..Recovered::default()
        };
        assert!(
            planned(&import, &renamed, &[])
                .unwrap_err()
                .contains("`pci:1` is named `GPU-2` in the ledger and `GPU-1` in the export")
        );
    }

    #[test]
    fn a_pending_hook_is_imported() {
        let hook = r#"{"resource":"a.b/c","device":"x","key":"dev:x","alloc_id":"a-0","pod":null,"container":null,
            "released_at":"2023-11-14T22:13:20.000Z","hook":"failed","tries":3,"failed_at":"2023-11-14T22:13:20.000Z","why":"no key"}"#;
        let import = document("{}", &[])
            .replace("\"grants\"", &format!(r#""owed":{{"a.b/c":{{"x":{hook}}}}},"grants""#));
        assert_eq!(
            planned(&import, &Recovered::default(), &[]),
            Ok(Done { schema: 1, owed: 1, ..Done::default() })
        );
        let owed = parse(&import).unwrap().owed;
        assert_eq!(
            planned(&import, &Recovered { owed, ..Recovered::default() }, &[]),
            Ok(Done { schema: 1, ..Done::default() })
        );
    }

    #[test]
    fn expired_releases_are_left_out_and_counted() {
        let import = |at| document("{}", &[given_back(at)]);
        let done = planned(&import("2023-11-20T00:00:00Z"), &Recovered::default(), &[]).unwrap();
        assert_eq!((done.released, done.forgotten), (1, 0));
        let done = planned(&import("2023-01-01T00:00:00Z"), &Recovered::default(), &[]).unwrap();
        assert_eq!((done.released, done.forgotten), (0, 1));
        assert!(text_of(&done).ends_with("`ledger.history_age`: 1\n"));
    }
}
