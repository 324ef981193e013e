//! Shares of GPUs by time-slicing or MPS.

use super::super::draft::Draft;
use super::super::error::ImportError;
use super::super::field::Field;
use super::super::values::{plain, set_from, text};
use super::settings::Settings;
use super::{GPU, IGNORED};
use crate::config::sharing::SHARES_MAX;
use crate::config::tree::Table;

pub(super) fn share(
    sharing: &Field<'_>,
    settings: &Settings<'_>,
    gpu: &mut Table,
    options: &mut Table,
    draft: &mut Draft,
) {
    let mps = sharing.get("mps");
    let time_slicing = sharing.get("timeSlicing").filter(Field::has_effect);
    if let (Some(mps), Some(time_slicing)) = (&mps, &time_slicing) {
        time_slicing.read_all();
        draft.warn(format!("{} is left out: `{}` overrides it", time_slicing.place(), mps.path));
    }
    let (way, is_mps) = match (mps, time_slicing) {
        (Some(mps), _) => (mps, true),
        (None, Some(time_slicing)) => (time_slicing, false),
        (None, None) => return,
    };
    // The plugin itself looks up the keys below here, in their exact spelling.
    let way = way.exact();
    let renames = draft.setting(way.get("renameByDefault"), Field::truth).unwrap_or(false);
    let one = draft.setting(way.get("failRequestsGreaterThanOne"), Field::truth).unwrap_or(is_mps);
    let Some(entries) = way.get("resources").filter(Field::has_effect) else {
        return draft.wrong(&format!("`{}`", way.path), &way.wrong("a list of `resources`"));
    };
    let Some(entries) = draft.setting(Some(entries), |list| list.items()) else { return };
    for entry in entries {
        match shared(&entry, draft) {
            Err(error) => {
                entry.read_all();
                draft.wrong(&format!("`{}`", entry.path), &error);
            }
            Ok(None) => {}
            Ok(Some(_)) if gpu.get("replicas").is_some() => {
                draft.wrong(
                    &format!("`{}`", entry.path),
                    &entry.wrong("a resource that occurs once"),
                );
            }
            Ok(Some(replicas)) => {
                set_from(gpu, "replicas", plain(replicas), &entry);
                if renames {
                    gpu.set("name", text("nvidia.com/gpu.shared"));
                }
                // A client of MPS has one share unless the file sets otherwise. Of other shares a
                // container gets as many as it requests.
                match (is_mps, one) {
                    (false, true) => gpu.set("per_container", text("one")),
                    (true, false) => gpu.set("per_container", text("any")),
                    _ => {}
                }
            }
        }
    }
    if is_mps && gpu.get("replicas").is_some() {
        let root = draft
            .setting(settings.get("flags.mpsRoot"), |root| root.text().map(str::to_owned))
            .filter(|root| !root.is_empty());
        options.set("mps_root", text(root.as_deref().unwrap_or("/run/nvidia/mps")));
        draft.warn(format!(
            "`{}`: NVIDIA's MPS control daemon is needed as before, and Holdfast does not manage \
             it",
            way.path
        ));
    }
}

/// The number of shares per GPU in an entry; `None` if the entry is about another resource.
fn shared(entry: &Field<'_>, draft: &mut Draft) -> Result<Option<u32>, ImportError> {
    let need = || entry.wrong("a `name` and `replicas`");
    let name = entry.get("name").ok_or_else(need)?;
    let name = name.text()?;
    let field = entry.get("replicas").ok_or_else(need)?;
    let replicas = field.number()?;
    draft.no_equivalent(entry.get("rename"), IGNORED);
    draft
        .no_equivalent(entry.get("devices").filter(|devices| devices.text() != Ok("all")), IGNORED);
    if !matches!(name, GPU | "gpu") {
        draft
            .warn(format!("{} is left out: only {GPU} is imported with its shares", entry.place()));
        return Ok(None);
    }
    if !(2..=SHARES_MAX).contains(&replicas) {
        return Err(field.wrong(&format!(
            "a number from 2 to {SHARES_MAX}, the most that fit into one message to the kubelet,"
        )));
    }
    Ok(Some(replicas))
}
