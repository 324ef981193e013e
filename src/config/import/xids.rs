//! The Xids that NVIDIA's plugin ignores, by the variables `DP_DISABLE_HEALTHCHECKS` and
//! `DP_ENABLE_HEALTHCHECKS` of its container, as `[health]`.
//!
//! The plugin has a list of Xids that do not count, and Holdfast one of those that count
//! ([`HealthPolicy`]). So the first variable removes numbers from our list, and the second adds
//! some. In both, `all`, `xids` and 0 stand for every number.

use super::super::tree::{Is, Table, Value};
use super::draft::Draft;
use super::field::Decoder;
use super::source::Source;
use super::values::{plain, texts};
use crate::domain::{HealthPolicy, Reason};
use std::collections::BTreeSet;

const DISABLED: &str = "DP_DISABLE_HEALTHCHECKS";
const ENABLED: &str = "DP_ENABLE_HEALTHCHECKS";

/// The numbers of a variable.
#[derive(Default)]
struct Xids {
    all: bool,
    numbers: BTreeSet<u32>,
}

pub(super) fn read(source: &Source, draft: &mut Draft) {
    for elsewhere in &source.flags.elsewhere {
        if [DISABLED, ENABLED].contains(&&*elsewhere.name) {
            draft.warn(format!(
                "`{}` at {} is left out: its value is not in the manifest; set `[health] \
                 fatal_xids`",
                elsewhere.name, elsewhere.place
            ));
        }
    }
    let (disabled, enabled) = (xids(source, DISABLED, draft), xids(source, ENABLED, draft));
    if enabled.all {
        draft.warn(format!(
            "`{ENABLED}` is left out: every Xid counts for the plugin, errors of applications \
             too; list the numbers that you want in `[health] fatal_xids`"
        ));
        return;
    }
    if disabled.all && enabled.numbers.is_empty() {
        let mut health = Table::default();
        health.set("ignore", texts(&[Reason::Xid.as_str()]));
        draft.tables.set("health", Is::Table(health));
        return;
    }
    if disabled.all {
        draft.warn(format!(
            "the numbers of `{ENABLED}` count here; the plugin checks nothing while \
             `{DISABLED}` has `all`"
        ));
    }
    let usual = HealthPolicy::default().fatal_xids;
    let remaining = usual.iter().filter(|xid| !disabled.all && !disabled.numbers.contains(xid));
    let fatal: BTreeSet<u32> = remaining.copied().chain(enabled.numbers).collect();
    if fatal != usual {
        let fatal = fatal.into_iter().map(|xid| Value { place: None, is: plain(xid) });
        let mut health = Table::default();
        health.set("fatal_xids", Is::List(fatal.collect()));
        draft.tables.set("health", Is::Table(health));
    }
}

/// The numbers of a variable. The plugin skips a word that is no number.
fn xids(source: &Source, variable: &str, draft: &mut Draft) -> Xids {
    #[cfg(test)]
    super::tests::record_lookup(variable);
    let mut xids = Xids::default();
    let Some(flag) = source.flags.last(&[], variable) else { return xids };
    let field = flag.field(Decoder::JsonOfYaml);
    field.read_all();
    let Ok(scalar) = field.scalar_text() else { return xids };
    for word in scalar.text.to_lowercase().split(',').map(str::trim) {
        match (word, word.parse::<u64>()) {
            ("", _) => {}
            ("all" | "xids", _) | (_, Ok(0)) => xids.all = true,
            (_, Ok(number)) => xids.numbers.extend(u32::try_from(number)),
            (_, Err(_)) => draft.warn(format!(
                "`{word}` in `{variable}` at {} is left out: it is no number, and the plugin \
                 skips it",
                field.place()
            )),
        }
    }
    xids
}
