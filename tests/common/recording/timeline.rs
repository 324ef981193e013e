//! The recording of a kubelet, and the comparison of two kubelets.
//!
//! A script has steps, one after the other. Within a step every observation is in a lane: the calls
//! of one connection, one file, one pod. Observations in one lane are ordered. Between lanes only
//! the `order` lines define an order. So a text like this one is a partial order, and a kubelet may
//! do concurrent things in any order:
//!
//! ```text
//! [the plugin registers]
//! Register(one): ok
//! one#1: GetDevicePluginOptions | ListAndWatch
//! order: one#1: GetDevicePluginOptions < Register(one): ok
//! ```

use super::directory::Directory;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The prefixes of lanes that are read at the end of a step.
pub(crate) const READ_AT_END: &str = "the ";

/// One observation.
#[derive(Debug, Clone)]
pub(crate) struct Note {
    pub(crate) at: Instant,
    pub(crate) step: String,
    pub(crate) lane: String,
    pub(crate) text: String,
}

impl Note {
    fn is(&self, lane: &str, text: &str) -> bool {
        self.lane == lane && self.text.starts_with(text)
    }
}

/// Records observations of every thread in one order.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    notes: Arc<Mutex<Notes>>,
    /// The number of times that `kubelet.sock` was created.
    kubelet_made: watch::Sender<u64>,
}

#[derive(Debug)]
struct Notes {
    directory: Directory,
    step: String,
    notes: Vec<Note>,
}

impl Recorder {
    pub(crate) fn new(directory: Directory) -> Self {
        let notes = Notes { directory, step: String::new(), notes: Vec::new() };
        Recorder { notes: Arc::new(Mutex::new(notes)), kubelet_made: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        // Earlier changes of files are already in the kernel's queue.
        for (lane, text) in notes.directory.events() {
            let made = lane == "kubelet.sock" && text == "created";
            notes.push(lane, text.to_owned());
            if made {
                self.kubelet_made.send_modify(|count| *count += 1);
            }
        }
        notes
    }

    pub(crate) fn note(&self, lane: impl Into<String>, text: impl Into<String>) {
        self.lock().push(lane.into(), text.into());
    }

    /// Reads the events of the directory.
    pub(crate) fn read_directory(&self) {
        drop(self.lock());
    }

    pub(crate) fn kubelet_made(&self) -> watch::Receiver<u64> {
        self.kubelet_made.subscribe()
    }

    /// Starts a step: later observations belong to it.
    pub(crate) fn begin(&self, step: &str) {
        step.clone_into(&mut self.lock().step);
    }

    /// Clears the recording for a new script.
    pub(crate) fn take(&self) -> Vec<Note> {
        let mut notes = self.lock();
        notes.step.clear();
        std::mem::take(&mut notes.notes)
    }

    pub(crate) fn notes(&self) -> Vec<Note> {
        self.lock().notes.clone()
    }

    /// The time since the last observation.
    pub(crate) fn quiet_for(&self) -> Duration {
        self.lock().notes.last().map_or(Duration::MAX, |note| note.at.elapsed())
    }
}

impl Notes {
    fn push(&mut self, lane: String, text: String) {
        let (at, step) = (Instant::now(), self.step.clone());
        self.notes.push(Note { at, step, lane, text });
    }
}

/// Milliseconds from the first observation of a step with this beginning to the first one of
/// another lane after it.
pub(crate) fn gap_ms(
    notes: &[Note],
    step: &str,
    from: (&str, &str),
    to: (&str, &str),
) -> Option<f64> {
    let mut of_step = notes.iter().filter(|note| note.step == step);
    let from = of_step.find(|note| note.is(from.0, from.1))?.at;
    let to = of_step.find(|note| note.is(to.0, to.1))?.at;
    Some(to.duration_since(from).as_secs_f64() * 1000.0)
}

/// One step of a script: its lanes, and the order between them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) lanes: BTreeMap<String, Vec<String>>,
    pub(crate) orders: Vec<(String, String)>,
}

/// The expected recording of a script.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Timeline {
    pub(crate) steps: Vec<Step>,
}

impl Timeline {
    /// Parses a recorded timeline. Panics on an invalid line.
    pub(crate) fn parse(text: &str) -> Self {
        let mut steps: Vec<Step> = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                steps.push(Step { name: name.to_owned(), ..Step::default() });
                continue;
            }
            let step =
                steps.last_mut().unwrap_or_else(|| panic!("a line before the first step: {line}"));
            let (lane, texts) =
                line.split_once(": ").unwrap_or_else(|| panic!("neither step nor lane: {line}"));
            if lane == "order" {
                let (first, second) =
                    texts.split_once(" < ").unwrap_or_else(|| panic!("not an order: {line}"));
                step.orders.push((first.to_owned(), second.to_owned()));
            } else {
                step.lanes.insert(lane.to_owned(), texts.split(" | ").map(str::to_owned).collect());
            }
        }
        // As in a recording, which has no step without an observation.
        steps.retain(|step| !step.lanes.is_empty());
        Timeline { steps }
    }

    /// The lanes of a recording, without the `order` lines.
    pub(crate) fn of(notes: &[Note]) -> Self {
        let mut steps: Vec<Step> = Vec::new();
        for note in notes {
            if steps.last().is_none_or(|step| step.name != note.step) {
                steps.push(Step { name: note.step.clone(), ..Step::default() });
            }
            let step = steps.last_mut().unwrap_or_else(|| unreachable!("it was just pushed"));
            step.lanes.entry(note.lane.clone()).or_default().push(note.text.clone());
        }
        Timeline { steps }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for step in &self.steps {
            text += &format!("[{}]\n", step.name);
            step.lanes
                .iter()
                .for_each(|(lane, texts)| text += &format!("{lane}: {}\n", texts.join(" | ")));
            step.orders
                .iter()
                .for_each(|(first, second)| text += &format!("order: {first} < {second}\n"));
        }
        text
    }

    /// Whether a step has every observation of this timeline, except those that are read only at
    /// its end ([`READ_AT_END`]).
    pub(crate) fn is_complete(&self, step: &str, notes: &[Note]) -> bool {
        let wanted = self.steps.iter().filter(|wanted| wanted.name == step);
        wanted
            .flat_map(|wanted| &wanted.lanes)
            .filter(|(lane, _)| !lane.starts_with(READ_AT_END))
            .all(|(lane, texts)| {
                let seen =
                    notes.iter().filter(|note| note.step == step && note.lane == *lane).count();
                seen >= texts.len()
            })
    }

    /// The differences between the recording and this timeline, one in each line.
    pub(crate) fn differences(&self, notes: &[Note]) -> Vec<String> {
        let seen = Timeline::of(notes);
        let mut found = Vec::new();
        let names = |timeline: &Timeline| {
            timeline.steps.iter().map(|step| step.name.clone()).collect::<Vec<_>>()
        };
        if names(self) != names(&seen) {
            found.push(format!("the steps are {:?}, expected {:?}", names(&seen), names(self)));
        }
        for (wanted, seen) in self.steps.iter().zip(&seen.steps) {
            let lanes = wanted
                .lanes
                .keys()
                .chain(seen.lanes.keys().filter(|lane| !wanted.lanes.contains_key(*lane)));
            for lane in lanes {
                let of = |step: &Step| {
                    step.lanes.get(lane).map_or("nothing".to_owned(), |texts| texts.join(" | "))
                };
                if wanted.lanes.get(lane) != seen.lanes.get(lane) {
                    found.push(format!(
                        "[{}] {lane}: {}, expected {}",
                        wanted.name,
                        of(seen),
                        of(wanted)
                    ));
                }
            }
            let index = |what: &String| {
                let mut of_step = notes.iter().filter(|note| note.step == wanted.name);
                of_step.position(|note| format!("{}: {}", note.lane, note.text) == *what)
            };
            for (first, second) in &wanted.orders {
                if index(first).zip(index(second)).is_none_or(|(first, second)| first > second) {
                    found.push(format!("[{}] not in this order: {first} < {second}", wanted.name));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = "# what is seen\n[it registers]\nfile: deleted | created\none: options\norder: file: created < one: options\n[end]\none: cut\n";

    fn notes(of: &[(&str, &str, &str)]) -> Vec<Note> {
        let note = |(step, lane, text): &(&str, &str, &str)| Note {
            at: Instant::now(),
            step: (*step).to_owned(),
            lane: (*lane).to_owned(),
            text: (*text).to_owned(),
        };
        of.iter().map(note).collect()
    }

    #[test]
    fn a_timeline_is_read_and_written() {
        let timeline = Timeline::parse(RECORDED);
        assert_eq!(format!("# what is seen\n{}", timeline.text()), RECORDED);
    }

    #[test]
    fn events_are_ordered_within_a_lane_and_across_lanes_only_where_stated() {
        let timeline = Timeline::parse(RECORDED);
        let (deleted, created) =
            (("it registers", "file", "deleted"), ("it registers", "file", "created"));
        let (options, cut) = (("it registers", "one", "options"), ("end", "one", "cut"));
        assert_eq!(
            timeline.differences(&notes(&[deleted, created, options, cut])),
            Vec::<String>::new()
        );

        let differs = |of: &[(&str, &str, &str)], with: &str| {
            let differences = timeline.differences(&notes(of));
            assert!(
                differences.iter().any(|difference| difference.contains(with)),
                "{differences:?}"
            );
        };
        differs(
            &[created, deleted, options, cut],
            "file: created | deleted, expected deleted | created",
        );
        differs(
            &[deleted, options, created, cut],
            "not in this order: file: created < one: options",
        );
        differs(
            &[deleted, created, options, options, cut],
            "one: options | options, expected options",
        );
        differs(&[deleted, created, options], "the steps are");
        differs(&[deleted, created, cut], "one: nothing, expected options");
        differs(
            &[deleted, created, options, ("it registers", "two", "options"), cut],
            "two: options, expected nothing",
        );
    }

    #[test]
    fn a_step_is_complete_when_everything_of_it_was_seen() {
        let timeline = Timeline::parse(RECORDED);
        let seen =
            notes(&[("it registers", "file", "deleted"), ("it registers", "file", "created")]);
        assert!(!timeline.is_complete("it registers", &seen));
        assert!(timeline.is_complete("unknown", &seen));
        let seen = [seen, notes(&[("it registers", "one", "options")])].concat();
        assert!(timeline.is_complete("it registers", &seen));
        let timeline = Timeline::parse("[end]\nthe file says: over\n");
        assert!(timeline.is_complete("end", &[]), "nobody has looked yet");
    }
}
