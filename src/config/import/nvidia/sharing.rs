//! Shares of GPUs by time-slicing or MPS.

use super::super::draft::Draft;
use super::super::error::ImportError;
use super::super::field::Field;
use super::super::values::{plain, text};
use super::settings::Settings;
use super::{GPU, IGNORED};
use crate::config::sharing::SHARES_MAX;
use crate::config::tree::{Table, Value};
use crate::domain::MigStrategy;

/// How a resource is shared.
pub(super) struct Share {
    /// The profile of MIG instances; `None` for GPUs.
    pub(super) profile: Option<String>,
    replicas: u32,
    /// Whether the name ends in `.shared`.
    is_renamed: bool,
    per_container: Option<&'static str>,
    /// The folder of the MPS control daemon.
    mps_root: Option<String>,
}

impl Share {
    pub(super) fn apply(&self, offer: &mut Table, options: &mut Table) {
        offer.set("replicas", plain(self.replicas));
        if self.is_renamed
            && let Some(name) = offer.get("name").and_then(Value::as_text)
        {
            let name = format!("{name}.shared");
            offer.set("name", text(&name));
        }
        if let Some(per_container) = self.per_container {
            offer.set("per_container", text(per_container));
        }
        if let Some(root) = &self.mps_root {
            options.set("mps_root", text(root));
        }
    }
}

/// The shares of the file.
pub(super) fn share(
    sharing: &Field<'_>,
    settings: &Settings<'_>,
    strategy: MigStrategy,
    draft: &mut Draft,
) -> Vec<Share> {
    let mut shares: Vec<Share> = Vec::new();
    let mps = sharing.get("mps");
    let time_slicing = sharing.get("timeSlicing").filter(Field::has_effect);
    if let (Some(mps), Some(time_slicing)) = (&mps, &time_slicing) {
        time_slicing.read_all();
        draft.warn(format!("{} is left out: `{}` overrides it", time_slicing.place(), mps.path));
    }
    let (way, is_mps) = match (mps, time_slicing) {
        (Some(mps), _) => (mps, true),
        (None, Some(time_slicing)) => (time_slicing, false),
        (None, None) => return shares,
    };
    // The plugin itself looks up the keys below here, in their exact spelling.
    let way = way.exact();
    let is_renamed = draft.setting(way.get("renameByDefault"), Field::truth).unwrap_or(false);
    let one = draft.setting(way.get("failRequestsGreaterThanOne"), Field::truth).unwrap_or(is_mps);
    let Some(entries) = way.get("resources").filter(Field::has_effect) else {
        draft.wrong(&format!("`{}`", way.path), &way.wrong("a list of `resources`"));
        return shares;
    };
    // A client of MPS has one share unless the file sets otherwise. Of other shares a container
    // gets as many as it requests.
    let per_container = match (is_mps, one) {
        (false, true) => Some("one"),
        (true, false) => Some("any"),
        _ => None,
    };
    let entries = draft.setting(Some(entries), |list| list.items()).unwrap_or_default();
    for entry in entries {
        match shared(&entry, !is_mps && strategy == MigStrategy::Mixed, draft) {
            Err(error) => {
                entry.read_all();
                draft.wrong(&format!("`{}`", entry.path), &error);
            }
            Ok(None) => {}
            Ok(Some((profile, _))) if shares.iter().any(|share| share.profile == profile) => {
                draft.wrong(
                    &format!("`{}`", entry.path),
                    &entry.wrong("a resource that occurs once"),
                );
            }
            Ok(Some((profile, replicas))) => {
                let mps_root = is_mps.then(|| mps_root(settings, draft));
                shares.push(Share { profile, replicas, is_renamed, per_container, mps_root });
            }
        }
    }
    if is_mps && !shares.is_empty() {
        draft.warn(format!(
            "`{}`: Holdfast runs the MPS control daemon; give it the rights for that (the drop-in \
             mps.conf, or the component mps), and remove NVIDIA's DaemonSet of it",
            way.path
        ));
    }
    shares
}

/// The folder of the MPS control daemon.
fn mps_root(settings: &Settings<'_>, draft: &mut Draft) -> String {
    let root = draft.setting(settings.get("flags.mpsRoot"), |root| root.text().map(str::to_owned));
    root.filter(|root| !root.is_empty()).unwrap_or_else(|| "/run/nvidia/mps".to_owned())
}

/// The MIG profile in the name of an entry, if it has one, and the number of shares per device.
/// `None` if the entry is about another resource.
fn shared(
    entry: &Field<'_>,
    has_profiles: bool,
    draft: &mut Draft,
) -> Result<Option<(Option<String>, u32)>, ImportError> {
    let need = || entry.wrong("a `name` and `replicas`");
    let name = entry.get("name").ok_or_else(need)?;
    let name = name.text()?;
    let field = entry.get("replicas").ok_or_else(need)?;
    let replicas = field.number()?;
    draft.no_equivalent(entry.get("rename"), IGNORED);
    draft
        .no_equivalent(entry.get("devices").filter(|devices| devices.text() != Ok("all")), IGNORED);
    let profile = name
        .strip_prefix("nvidia.com/")
        .unwrap_or(name)
        .strip_prefix("mig-")
        .filter(|profile| has_profiles && profile.starts_with(|c: char| c.is_ascii_digit()));
    if !matches!(name, GPU | "gpu") && profile.is_none() {
        draft.warn(format!(
            "{} is left out: only {GPU} is imported with its shares, and time slices of MIG \
             profiles with the strategy `mixed`",
            entry.place()
        ));
        return Ok(None);
    }
    if !(2..=SHARES_MAX).contains(&replicas) {
        return Err(field.wrong(&format!(
            "a number from 2 to {SHARES_MAX}, the most that fit into one message to the kubelet,"
        )));
    }
    Ok(Some((profile.map(str::to_owned), replicas)))
}
