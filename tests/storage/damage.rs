//! Ledger files that were damaged at rest: bits flipped, blocks zeroed, ends cut off, files and
//! directories removed; in the journal, in the query database, in both; found in the same boot, and
//! in the next one (I9).
//!
//! What is promised:
//!
//! - The ledger opens, for every damage.
//! - With one undamaged copy, every live grant is there as it was, with its alloc-id, and no
//!   released grant is live.
//! - If both copies are damaged, either that holds too, or the report counts the missing entries.
//! - The damaged files are kept aside, and the next start reports no problem.
//!
//! A killed daemon leaves a database that lags behind the journal. Then the database is no complete
//! copy, and the journal is.
//!
//! `HOLDFAST_STATES` is the number of damaged states; `HOLDFAST_SEED` makes others.

use crate::common::ledger::{Load, Model};
use crate::common::{Random, files_at_rest, files_below};
use holdfast::store::{RecoveryReport, Store};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Repeats the same states every time; another one finds others.
const SEED: u64 = 1_795_282_876_672_860_484;
/// The boot in which the ledgers were written.
const BOOT: &str = "the boot before";

/// A ledger as some life has left it.
#[derive(Debug)]
struct Ledger {
    dir: tempfile::TempDir,
    knows: Model,
    /// The database has everything that the journal has.
    database_is_whole: bool,
}

/// How the last life of a ledger ended.
const ENDINGS: [&str; 3] = ["closed", "killed", "ended without a checkpoint"];

/// Writes a ledger through some lives.
fn write(ending: &str, random: &mut Random) -> Ledger {
    let work = tempfile::tempdir().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (mut knows, mut load) =
        (Model::default(), Load::new(Random::of(random.below(u64::MAX)), 0));
    let lives = 1 + random.below(3);
    for life in 1..=lives {
        let (mut store, _) = crate::storage::open(work.path(), Some(BOOT));
        for _ in 0..10 + random.below(50) {
            if random.below(12) == 0 {
                store.checkpoint().unwrap();
            }
            let entries = load.entries(&knows);
            store.append(&entries).unwrap();
            entries.iter().for_each(|entry| knows.apply(entry));
        }
        match ending {
            _ if life < lives => drop(store),
            "closed" => store.close().unwrap(),
            "killed" => {
                // Once the thread behind the store has answered only sled's own may be at work, at
                // a picture of what it has written; what it has in memory is lost.
                store.history(0, |_| true).unwrap();
                copy(work.path(), dir.path());
                drop(store);
                return Ledger { dir, knows, database_is_whole: false };
            }
            _ => drop(store),
        }
    }
    copy(work.path(), dir.path());
    Ledger { dir, knows, database_is_whole: true }
}

fn copy(from: &Path, to: &Path) {
    for (path, bytes) in files_at_rest(from) {
        let path = to.join(path.strip_prefix(from).unwrap());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Journal,
    Database,
}

/// Damages one file of a copy, or all of it. What was done, in words.
fn damage(state: &Path, target: Target, random: &mut Random) -> String {
    let dir = state.join(if target == Target::Journal { "journal" } else { "db" });
    let files: Vec<PathBuf> = files_below(&dir).into_iter().map(|(path, _)| path).collect();
    if random.below(16) == 0 {
        fs::remove_dir_all(&dir).unwrap();
        return format!("{target:?}: all of it is removed");
    }
    // Most of the time the newest segment of the journal, and sled's log.
    let usual = if target == Target::Journal {
        files.last()
    } else {
        files.iter().find(|path| path.ends_with("db"))
    };
    let path = usual
        .filter(|_| random.below(4) > 0)
        .unwrap_or_else(|| &files[random.index(files.len())])
        .clone();
    let mut bytes = fs::read(&path).unwrap();
    // sled gives its log more room than it uses: nothing there can be damaged.
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let at = random.index(used);
    let (to, how) = match random.below(6) {
        0 if used > 0 => {
            bytes[at] ^= 1 << random.below(8);
            (at + 1, "a bit is flipped")
        }
        1 => {
            let to = (at + 64).min(used);
            bytes[at..to].iter_mut().for_each(|byte| *byte = !*byte);
            (to, "64 bytes are turned over")
        }
        2 => {
            bytes.truncate(at);
            (used, "cut off")
        }
        3 => {
            bytes[at..].fill(0);
            (used, "zeroes to the end")
        }
        4 => {
            let (from, to) = (at / 4096 * 4096, (at / 4096 * 4096 + 4096).min(bytes.len()));
            bytes[from..to].fill(0);
            (to, "a zeroed block")
        }
        _ => {
            fs::remove_file(&path).unwrap();
            return format!(
                "{target:?}: {} is removed",
                path.strip_prefix(state).unwrap().display()
            );
        }
    };
    fs::write(&path, bytes).unwrap();
    format!(
        "{target:?}: {how} in {} at {at} to {to} of {used}",
        path.strip_prefix(state).unwrap().display()
    )
}

/// What is wrong with what was found, if anything is.
fn judge(
    ledger: &Ledger,
    targets: &[Target],
    found: &Model,
    report: &RecoveryReport,
) -> Option<String> {
    let whole_copy_is_left = match targets {
        [Target::Database] => true,
        [Target::Journal] => ledger.database_is_whole,
        _ => false,
    };
    let lost: Vec<_> =
        ledger.knows.live.keys().filter(|id| !found.live.contains_key(*id)).collect();
    let back: Vec<_> =
        found.live.keys().filter(|id| !ledger.knows.live.contains_key(*id)).collect();
    let older = found
        .live
        .iter()
        .filter(|(id, grant)| ledger.knows.live.get(*id).is_some_and(|known| known != *grant))
        .count();
    let names =
        ledger.knows.names.iter().filter(|(key, id)| found.names.get(*key) != Some(*id)).count();
    // sled may restore the small tree of the names automatically and report nothing. If the journal
    // is damaged too, that is not detected yet.
    let wrong =
        !lost.is_empty() || !back.is_empty() || older > 0 || (names > 0 && whole_copy_is_left);
    let text = || {
        format!(
            "lost {lost:?}, came back {back:?}, {older} are older than they were, {names} names are lost"
        )
    };
    if wrong && whole_copy_is_left {
        return Some(format!("with an intact other copy: {}", text()));
    }
    (wrong && report.missing == 0).then(|| format!("in silence: {}", text()))
}

/// What was seen.
#[derive(Debug, Default)]
struct Tally {
    states: BTreeMap<(Vec<Target>, bool), usize>,
    complete: usize,
    partial: usize,
    quarantined: usize,
    starts: Vec<Duration>,
    failures: Vec<String>,
}

/// sled panics on some of this damage, which is caught; a picture of each stack takes half a
/// second.
fn quiet_sled() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.location().is_some_and(|location| location.file().contains("/sled-")) {
            report(panic);
        }
    }));
}

fn open(state: &Path, boot: &str) -> (Store, holdfast::store::Recovered) {
    crate::storage::open(state, Some(boot))
}

fn check(
    ledger: &Ledger,
    targets: &[Target],
    same_boot: bool,
    random: &mut Random,
    tally: &mut Tally,
) {
    let state = tempfile::tempdir().unwrap();
    copy(ledger.dir.path(), state.path());
    let words: Vec<String> =
        targets.iter().map(|target| damage(state.path(), *target, random)).collect();
    let damaged = files_below(state.path());
    let boot = if same_boot { BOOT } else { "the boot after" };
    let clock = Instant::now();
    let (store, recovered) = open(state.path(), boot);
    tally.starts.push(clock.elapsed());
    let found = Model::of(recovered.clone());
    let mut fail = |why: String, report: &RecoveryReport| {
        tally.failures.push(format!(
            "{words:?}, in {} boot: {why}; {report}",
            if same_boot { "the same" } else { "the next" }
        ));
    };
    if let Some(why) = judge(ledger, targets, &found, &recovered.report) {
        fail(why, &recovered.report);
    }

    // The database is checked too, after the start.
    drop(store.history(0, |_| true));
    let report = store.load().report;
    if let Some(gone) = report.quarantined.iter().find(|path| !path.exists()) {
        fail(format!("{} is not there", gone.display()), &report);
    }
    // What was damaged is kept, under another name if it was moved away: the same bytes are still
    // somewhere.
    if !report.quarantined.is_empty() {
        let kept = files_below(state.path());
        let moved = |path: &Path| {
            report
                .quarantined
                .iter()
                .any(|to| to.to_string_lossy().starts_with(&*path.to_string_lossy()))
        };
        for (path, bytes) in damaged.iter().filter(|(path, _)| moved(path)) {
            if !kept.iter().any(|(_, other)| other == bytes) {
                fail(format!("{} is not kept", path.display()), &report);
            }
        }
    }
    let known = Model::of(store.load());
    drop(store);
    let (_store, again) = open(state.path(), boot);
    if Model::of(again.clone()) != known {
        fail("the next start finds something else".into(), &again.report);
    }
    if !again.report.is_clean() {
        fail("the next start is not clean".into(), &again.report);
    }
    *tally.states.entry((targets.to_vec(), same_boot)).or_default() += 1;
    tally.partial += usize::from(recovered.report.missing > 0);
    tally.complete += usize::from(found.live == ledger.knows.live);
    tally.quarantined += usize::from(!report.quarantined.is_empty());
}

#[test]
fn damage_loses_no_live_grant_with_an_intact_copy_and_none_silently() {
    quiet_sled();
    let states = std::env::var("HOLDFAST_STATES").map_or(60, |text| text.parse().unwrap());
    let seed = std::env::var("HOLDFAST_SEED").map_or(SEED, |text| text.parse().unwrap());
    let (mut random, mut tally) = (Random::of(seed), Tally::default());
    let targets: [&[Target]; 3] =
        [&[Target::Journal], &[Target::Database], &[Target::Journal, Target::Database]];
    let mut ledger = None;
    for state in 0..states {
        // A multiple of the number of cases, so that each ending has all of them.
        if state % 18 == 0 {
            ledger = Some(write(ENDINGS[state / 18 % ENDINGS.len()], &mut random));
        }
        check(
            ledger.as_ref().unwrap(),
            targets[state % 3],
            state / 3 % 2 == 0,
            &mut random,
            &mut tally,
        );
    }
    println!(
        "{states} damaged states {:?}: {} complete, {} partial and reported, {} with files moved aside\nopen: {}",
        tally.states,
        tally.complete,
        tally.partial,
        tally.quarantined,
        crate::common::percentiles(tally.starts)
    );
    assert!(tally.quarantined > 0 && tally.complete > 0, "the damage had an effect");
    assert!(
        tally.failures.is_empty(),
        "{} of {states}:\n{}",
        tally.failures.len(),
        tally.failures.join("\n")
    );
}
