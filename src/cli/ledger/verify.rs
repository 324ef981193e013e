//! `holdfast ledger verify`: checks that both copies of the ledger are intact and agree.

use crate::admin::{ControlError, verify_ledger};
use crate::console::exit::{FAILURE, Failed};
use crate::console::progress::Progress;
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{Global, block_on, eprintln, show};
use crate::store::{self, DatabaseCheck, JournalCheck, LiveCheck, Verification};

/// Requests the check from the running daemon, or checks the files if none runs.
///
/// # Errors
/// When the ledger cannot be read, or is not sound.
pub(super) fn run(global: &Global) -> Result<(), Failed> {
    let progress = Progress::uncounted("checking both copies of the ledger");
    let (found, remark) = match block_on(verify_ledger(&global.run_dir))? {
        Ok(found) => (found, None),
        Err(error @ ControlError::Absent { .. }) => (
            store::verify(&global.state_dir)?,
            Some(format!("{error}; checked the files in `{}` instead", global.state_dir.display())),
        ),
        Err(error) => return Err(Failed::new(FAILURE, error)),
    };
    drop(progress);
    remark.iter().for_each(|remark| eprintln(format_args!("{remark}")));
    show(global.output, &found, text)?;
    if found.sound { Ok(()) } else { Err(Failed::reported(FAILURE)) }
}

fn text(found: &Verification) -> Text {
    let Verification { sound, journal, database, live, moved_aside, problems, remarks, .. } = found;
    let JournalCheck { entries, from, to, live: held, names, hooks, missing, damaged, .. } =
        journal;
    let mut table =
        Table::new(&["COPY", "LIVE", "RELEASED", "NAMES", "HOOKS", "DAMAGED", "ENTRIES"]);
    let range = if *entries > 0 {
        format!("{entries}, {from} to {to}")
    } else {
        format!("none since {to}")
    };
    let in_words = if *missing > 0 { format!("{range}, {missing} missing") } else { range };
    table.row([
        "journal".into(),
        held.to_string(),
        String::new(),
        names.to_string(),
        hooks.to_string(),
        damaged.len().to_string(),
        in_words,
    ]);
    if let Some(DatabaseCheck { live, released, names, hooks, applied, damaged }) = database {
        let applied = format!("{applied} at its last checkpoint");
        table.row([
            "database".into(),
            live.to_string(),
            released.to_string(),
            names.to_string(),
            hooks.to_string(),
            damaged.to_string(),
            applied,
        ]);
    } else {
        table.row([
            "database".into(),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
        ]);
    }
    let LiveCheck { in_both, following, .. } = live;
    let verdict = match (sound, following) {
        // As after a kill: nothing is lost; the next start or checkpoint copies the rest to the
        // database.
        (true, 1..) => format!(
            "sound: the journal has all {held} live grants; {in_both} of them are in the database, \
             which is {following} behind the journal"
        ),
        (true, 0) => format!("sound: {in_both} of {held} live grants are the same in both copies"),
        (false, _) => {
            format!("NOT sound: {in_both} of {held} live grants are the same in both copies")
        }
    };
    let mut text = Text::of_line(format_args!("the ledger is {verdict}"));
    text.end_line();
    text += table.into();
    let aside: Vec<_> =
        moved_aside.iter().map(|path| format!("moved aside: `{}`", path.display())).collect();
    let lists = [("problem: ", problems), ("", remarks), ("", &aside)];
    let mut lines = lists
        .iter()
        .flat_map(|(word, lines)| lines.iter().map(move |line| (word, line)))
        .peekable();
    if lines.peek().is_some() {
        text.end_line();
    }
    lines.for_each(|(word, line)| text.line(format_args!("{word}{line}")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_is_first_and_every_problem_has_a_line() {
        let found = Verification {
            schema: 1,
            sound: false,
            journal: JournalCheck {
                segments: 1,
                entries: 7,
                from: 1,
                to: 8,
                live: 2,
                names: 1,
                missing: 1,
                ..JournalCheck::default()
            },
            database: Some(DatabaseCheck {
                live: 2,
                released: 12,
                names: 1,
                hooks: 0,
                applied: 6,
                damaged: 0,
            }),
            live: LiveCheck { in_both: 2, ..LiveCheck::default() },
            moved_aside: vec!["/s/db.quarantine-1".into()],
            problems: vec!["entries missing from the journal: 1".into()],
            remarks: vec![],
        };
        let wanted = "\
the ledger is NOT sound: 2 of 2 live grants are the same in both copies

COPY      LIVE  RELEASED  NAMES  HOOKS  DAMAGED  ENTRIES
journal   2     -         1      0      0        7, 1 to 8, 1 missing
database  2     12        1      0      0        6 at its last checkpoint

problem: entries missing from the journal: 1
moved aside: `/s/db.quarantine-1`
";
        assert_eq!(text(&found), wanted);
        let wanted = concat!(
            r#"{"schema":1,"sound":false,"journal":{"segments":1,"entries":7,"from":1,"to":8,"live":2,"names":1,"hooks":0,"missing":1,"#,
            r#""damaged":[],"cut_off_bytes":0},"database":{"live":2,"released":12,"names":1,"hooks":0,"applied":6,"damaged":0},"live":{"in_both":2,"following":0,"#,
            r#""only_in_journal":[],"only_in_database":[],"different":[]},"moved_aside":["/s/db.quarantine-1"],"#,
            r#""problems":["entries missing from the journal: 1"],"remarks":[]}"#,
        );
        assert_eq!(serde_json::to_string(&found).unwrap(), wanted);
    }

    #[test]
    fn a_database_behind_the_journal_is_not_damage() {
        let live = LiveCheck { in_both: 1, following: 1, ..LiveCheck::default() };
        let journal = JournalCheck { live: 2, ..JournalCheck::default() };
        let found =
            Verification { schema: 1, sound: true, journal, live, ..Verification::default() };
        let wanted = "the ledger is sound: the journal has all 2 live grants; 1 of them are in the \
                      database, which is 1 behind the journal\n";
        assert!(text(&found).starts_with(wanted), "{}", text(&found));
    }
}
