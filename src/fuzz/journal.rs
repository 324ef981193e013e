//! The journal (WAL): a history of entries is written as the store writes it, damaged as a disk or
//! a kill damages it, and read. The state that is read must be one that the history had, and what
//! is missing must be reported.

use super::Seeds;
use super::input::Input;
use super::records::{State, grant_of, lock_line, segment_header, write_frames};
use crate::domain::{
    AllocId, Cordon, DeviceId, Entry, GrantState, GrantedDevice, HookState, PendingHook, PodRef,
    ResourceName, Timestamp, Verdict, VerdictState,
};
use crate::store::{Recovered, StoreError, peek};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

/// A history with more entries teaches nothing more.
const ENTRIES_MAX: usize = 48;
/// Different grants, so that entries often concern the same one.
const GRANTS: u8 = 6;

/// The segments as bytes, with the state after each entry.
#[derive(Default)]
struct History {
    segments: Vec<(u64, Vec<u8>)>,
    /// The state after each entry that was ever readable, by its sequence number.
    states: BTreeMap<u64, State>,
    /// The last entry of each write.
    writes: Vec<u64>,
    /// Every state that each grant ever had.
    grants: BTreeMap<AllocId, Vec<GrantState>>,
    names: BTreeSet<(String, DeviceId)>,
}

/// A history, the damage to its files, and what a start reads of them. The first byte chooses
/// between this and a file with any content.
pub fn journal(data: &[u8]) {
    let mut input = Input::new(data);
    if input.byte() % 8 == 7 {
        return any_file(input.rest());
    }
    let mut history = History::write(&mut input);
    let last = history.states.keys().next_back().copied().unwrap_or_default();
    // The lock file may be older than the journal, and never newer than its last write.
    let confirmed = match input.small(4) {
        0 => None,
        1 => history.writes.last().copied(),
        _ => history.writes.get(input.below(history.writes.len())).copied(),
    };
    let is_damaged = history.damage(&mut input);
    let Some(recovered) = read(&history.segments, confirmed) else { return };
    let found = State::of(&recovered);
    if !is_damaged {
        assert_eq!(found, history.states[&last], "an undamaged journal is read as it was written");
        assert!(recovered.report.is_clean(), "{}", recovered.report);
    }
    for grant in &recovered.grants {
        let written = history.grants.get(&grant.alloc_id);
        assert!(
            written.is_some_and(|states| states.contains(&grant.state)),
            "no entry has {} in the state {:?}",
            grant.alloc_id,
            grant.state
        );
        let number = grant.alloc_id.as_str().bytes().last().unwrap_or_default() - b'0';
        assert_eq!(*grant, grant_of(number, grant.state.clone()), "a grant that was not made");
    }
    for name in &recovered.names {
        assert!(
            history.names.contains(&(name.0.clone(), name.1.clone())),
            "{name:?} was not given"
        );
    }
    if recovered.report.is_clean() {
        let from = confirmed.unwrap_or_default();
        let is_one = history.states.range(from..).any(|(_, state)| *state == found);
        assert!(
            is_one,
            "entries up to {from} were confirmed, the report is clean ({}), and the state is none \
             after them: {found:#?}\nof {:#?}",
            recovered.report,
            history.states.range(from..).next()
        );
    }
}

/// A segment with any content.
fn any_file(data: &[u8]) {
    if let Some(recovered) = read(&[(1, data.to_vec())], None) {
        drop(recovered.report.to_string());
    }
}

/// Reads segments as a start does. `None` if the reader refuses them, as records of a later
/// version.
fn read(segments: &[(u64, Vec<u8>)], confirmed: Option<u64>) -> Option<Recovered> {
    let dir = super::records::state_dir();
    let journal = dir.path().join("journal");
    fs::create_dir(&journal).expect("a temporary folder");
    for (first, bytes) in segments {
        fs::write(journal.join(format!("{first:020}.log")), bytes).expect("a temporary file");
    }
    if let Some(confirmed) = confirmed {
        fs::write(dir.path().join("lock"), lock_line(confirmed)).expect("a temporary file");
    }
    match peek(dir.path()) {
        Ok(recovered) => Some(recovered),
        Err(StoreError::Newer { .. }) => None,
        Err(error) => panic!("the journal cannot be read: {error}"),
    }
}

impl History {
    /// Writes entries, as the input chooses them.
    fn write(input: &mut Input<'_>) -> Self {
        let mut history = History::default();
        let mut state = State::default();
        let mut next = 1;
        history.states.insert(0, state.clone());
        history.begin_segment(&state, &mut next);
        let mut count = 0;
        while count < ENTRIES_MAX && !input.is_empty() {
            let choice = input.small(16);
            if choice == 15 {
                history.begin_segment(&state, &mut next);
                continue;
            }
            if choice == 14 {
                break;
            }
            let size = 1 + usize::from(choice > 11) * usize::from(input.small(3));
            let entries: Vec<Entry> = (0..size).map(|_| entry(input)).collect();
            count += size;
            let (_, bytes) = history.segments.last_mut().expect("a segment was begun");
            write_frames(bytes, next, &entries);
            for entry in &entries {
                state.apply(entry);
                history.note(entry, &state);
                history.states.insert(next, state.clone());
                next += 1;
            }
            history.writes.push(next - 1);
        }
        history
    }

    /// Begins a segment with everything live.
    fn begin_segment(&mut self, state: &State, next: &mut u64) {
        let head = state.entries();
        if self.segments.last().is_some_and(|(first, _)| *first == *next) {
            return;
        }
        let mut bytes = segment_header(head.len());
        write_frames(&mut bytes, *next, &head);
        self.segments.push((*next, bytes));
        for _ in head {
            self.states.insert(*next, state.clone());
            *next += 1;
        }
    }

    fn note(&mut self, entry: &Entry, state: &State) {
        match entry {
            Entry::Grant(grant) => {
                self.grants.entry(grant.alloc_id.clone()).or_default().push(grant.state.clone());
            }
            Entry::Moved { alloc_id, .. } => {
                let of = state.grants.get(alloc_id).map(|grant| grant.state.clone());
                self.grants.entry(alloc_id.clone()).or_default().extend(of);
            }
            Entry::Named { key, id } => drop(self.names.insert((key.clone(), id.clone()))),
            _ => {}
        }
    }

    /// Damages the files. Returns whether anything was damaged.
    fn damage(&mut self, input: &mut Input<'_>) -> bool {
        let mut is_damaged = false;
        for _ in 0..input.small(4) {
            let count = self.segments.len();
            let index = input.below(count);
            let kind = input.small(8);
            let is_only = count < 2;
            let bytes = &mut self.segments[index].1;
            let at = input.below(bytes.len() + 1).min(bytes.len());
            match kind {
                // A power cut, or a kill during a write.
                0 | 1 => bytes.truncate(at),
                2 | 3 => {
                    let bit = 1 << input.small(8);
                    bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= bit);
                }
                // Sectors that were never written.
                4 => {
                    let end = (at + input.below(600)).min(bytes.len());
                    bytes[at..end].fill(0);
                }
                // Sectors of another file.
                5 => {
                    let from = input.below(bytes.len() + 1);
                    let until = (from + input.below(600)).min(bytes.len());
                    let copied = bytes[from.min(until)..until].to_vec();
                    let end = (at + copied.len()).min(bytes.len());
                    bytes.splice(at..end, copied);
                }
                6 if !is_only => drop(self.segments.remove(index)),
                // Zeros ahead, as the store writes them, are no damage.
                _ => {
                    bytes.extend([0; 64]);
                    continue;
                }
            }
            is_damaged = true;
        }
        is_damaged
    }
}

fn entry(input: &mut Input<'_>) -> Entry {
    let number = input.small(GRANTS);
    let grant = grant_of(number, GrantState::Granted);
    let at = Timestamp(1_700_000_000_000 + u64::from(number));
    let pod = || PodRef { uid: format!("uid-{number}"), namespace: None, name: None };
    let moved = |state| Entry::Moved { alloc_id: grant.alloc_id.clone(), state };
    let device = grant.devices[0].id.clone();
    let key = grant.devices[0].key.clone();
    match input.small(13) {
        0..=2 => Entry::Grant(Arc::new(grant)),
        3 => moved(GrantState::Bound { pod: pod(), container: "main".into(), bound_at: at }),
        4 => moved(GrantState::Suspect {
            pod: pod(),
            container: "main".into(),
            bound_at: at,
            suspect_at: at,
        }),
        5 | 6 => moved(GrantState::Released {
            pod: Some(pod()),
            container: Some("main".into()),
            bound_at: Some(at),
            released_at: at,
            released_by: "pod_gone".into(),
            other_pods: Vec::new(),
        }),
        7 => Entry::Named { key, id: device },
        8 => {
            let count = input.small(3);
            let devices: Arc<[GrantedDevice]> = (0..count)
                .flat_map(|of| grant_of(number + of, GrantState::Granted).devices)
                .collect();
            Entry::Listed { resource: grant.resource, devices }
        }
        9 => Entry::Judged { device, verdict: input.option(|_| Box::new(verdict(at))) },
        10 => Entry::Gone { devices: vec![device], since: input.option(|_| at) },
        11 => Entry::Forgotten { devices: vec![device] },
        _ => {
            let state = match input.small(3) {
                0 => HookState::Due,
                1 => HookState::Failed { tries: 1, failed_at: at, why: "exit status: 1".into() },
                _ => HookState::Done,
            };
            Entry::Hook(Box::new(hook(&grant.resource, device, key, grant.alloc_id, at, state)))
        }
    }
}

fn verdict(at: Timestamp) -> Verdict {
    Verdict {
        boot_id: "boot".into(),
        state: VerdictState::Healthy,
        cordon: Some(Cordon { reason: "to be replaced".into(), at, evicts: false }),
        ..Verdict::default()
    }
}

fn hook(
    resource: &ResourceName,
    device: DeviceId,
    key: String,
    alloc_id: AllocId,
    released_at: Timestamp,
    state: HookState,
) -> PendingHook {
    PendingHook {
        resource: resource.clone(),
        device,
        key,
        objects: Vec::new(),
        alloc_id,
        pod: None,
        container: None,
        released_at,
        state,
    }
}

/// Histories with each kind of entry and of damage.
pub(super) fn seeds() -> Seeds {
    let mut whole = vec![0];
    for kind in 0..13 {
        // A write of one entry: its grant, its kind, and the choices of the kind.
        whole.extend([0, kind % GRANTS, kind, 1, 1]);
    }
    let mut rotated = whole.clone();
    rotated.push(15);
    rotated.extend(whole.iter().skip(1));
    let with = |history: &[u8], end: &[u8]| [history, &[14], end].concat();
    vec![
        ("whole", with(&whole, &[1, 0])),
        ("without-lock", with(&whole, &[0, 0])),
        ("rotated", with(&rotated, &[1, 0])),
        ("cut", with(&rotated, &[1, 1, 0, 1, 0, 1, 40])),
        ("flipped", with(&rotated, &[2, 0, 3, 1, 0, 0, 2, 0, 90, 5])),
        ("zeroed", with(&rotated, &[1, 1, 0, 0, 4, 0, 90, 1, 0])),
        ("copied", with(&rotated, &[1, 1, 0, 1, 5, 1, 200, 0, 90, 0, 200])),
        ("deleted", with(&rotated, &[1, 2, 0, 0, 6, 0, 0, 0, 0, 7, 0, 0])),
        ("any-file", [&[7][..], &segment_header(0)].concat()),
    ]
}
