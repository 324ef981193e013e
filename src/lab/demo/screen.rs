//! The output of the demo: headings, facts and claims on standard output, with colours only on a
//! terminal.

use super::{FailedClaim, Step, Stop, ms};
use crate::console::screen::Tint;
use crate::console::table::Table;
use crate::console::text::Text;
use crate::console::{print, screen};
use std::fmt;
use std::time::Duration;

/// Width of the column of names in a step's facts.
const LABEL_WIDTH: usize = 20;
/// The maximum width of explanations, also on a wider terminal.
const LINE_MAX: usize = 100;

/// The output, with the present step.
#[derive(Debug)]
pub(super) struct Screen {
    on: screen::Screen,
    step: Option<Step>,
    claims: usize,
}

impl Screen {
    pub(super) fn new() -> Self {
        Screen { on: screen::Screen::get(), step: None, claims: 0 }
    }

    /// The present step.
    pub(super) fn current(&self) -> Option<Step> {
        self.step
    }

    fn line(&self, text: impl fmt::Display) -> Result<(), Stop> {
        Ok(print(&Text::of_line(format_args!("{text}")))?)
    }

    fn painted(&self, tint: Tint, text: impl fmt::Display) -> Result<(), Stop> {
        let mut line = Text::default();
        line.paint(self.on, tint, &text.to_string());
        line.end_line();
        Ok(print(&line)?)
    }

    /// Writes `text` after `line`; wrapped lines are indented by `indent` columns.
    fn append_wrapped(
        &self,
        mut line: Text,
        indent: usize,
        text: impl fmt::Display,
    ) -> Result<(), Stop> {
        line.wrap(self.on, indent, &text.to_string());
        line.end_line();
        Ok(print(&line)?)
    }

    pub(super) fn title(&self, broken_step: Option<Step>) -> Result<(), Stop> {
        self.painted(Tint::Bold, "Holdfast, on a simulated node")?;
        self.line("")?;
        for text in [
            "The node's hardware and the kubelet are simulated, in a temporary directory and in this process.",
            "The daemon is the real one, and so is the gRPC between the two, over unix sockets.",
            "Every line marked `ok` was checked: with the kubelet, the daemon's views, or the \
             files on disk.",
        ] {
            print(&self.paragraph(text, 0, Tint::Plain))?;
        }
        match broken_step {
            Some(step) => {
                self.line(format_args!("The step `{}` is broken deliberately.", step.name()))
            }
            None => Ok(()),
        }
    }

    pub(super) fn step(&mut self, step: Step) -> Result<(), Stop> {
        self.step = Some(step);
        let (number, heading) = step.heading();
        self.line("")?;
        self.painted(Tint::Bold, format_args!("{number}  {heading}"))
    }

    /// A sentence or two of explanation.
    pub(super) fn explain(&self, text: impl fmt::Display) -> Result<(), Stop> {
        Ok(print(&self.paragraph(text, 3, Tint::Dim))?)
    }

    fn paragraph(&self, text: impl fmt::Display, indent: usize, tint: Tint) -> Text {
        let width = Some(self.on.width.map_or(LINE_MAX, |width| width.min(LINE_MAX)));
        let mut wrapped = Text::default();
        wrapped.wrap(screen::Screen { width, ..self.on }, indent, &text.to_string());
        let mut lines = Text::default();
        for (number, line) in wrapped.lines().enumerate() {
            let indent = if number == 0 { indent } else { 0 };
            lines.paint(self.on, tint, &format!("{:indent$}{line}", ""));
            lines.end_line();
        }
        lines
    }

    /// A measurement or an observation.
    pub(super) fn fact(&self, label: &str, text: impl fmt::Display) -> Result<(), Stop> {
        let mut line = Text::default();
        line.put(format_args!("   {label:LABEL_WIDTH$}  "));
        self.append_wrapped(line, LABEL_WIDTH + 5, text)
    }

    /// Checks and prints a claim. If it does not hold, the compared texts are printed line by line.
    pub(super) fn claim(
        &mut self,
        claim: impl fmt::Display,
        expected: impl fmt::Display,
        seen: impl fmt::Display,
    ) -> Result<(), Stop> {
        let (expected, seen) = (expected.to_string(), seen.to_string());
        if expected != seen {
            return Err(Stop::ClaimFailed(FailedClaim {
                claim: claim.to_string(),
                expected,
                seen,
            }));
        }
        self.claims += 1;
        self.append_wrapped(self.verdict(Tint::Green, "ok"), 7, claim)
    }

    fn verdict(&self, tint: Tint, word: &str) -> Text {
        let mut line = Text::default();
        line.put(format_args!("   "));
        line.paint(self.on, tint, word);
        line.put(format_args!("  "));
        line
    }

    /// Prints a claim that does not hold: of each side, the lines that the other one lacks.
    pub(super) fn failed_claim(&self, failed_claim: &FailedClaim) -> Result<(), Stop> {
        let FailedClaim { claim, expected, seen } = failed_claim;
        self.append_wrapped(self.verdict(Tint::Red, "FAILED"), 11, claim)?;
        for (label, these, others) in [("expected", expected, seen), ("seen", seen, expected)] {
            let others: Vec<&str> = others.lines().collect();
            let only: Vec<&str> = these.lines().filter(|line| !others.contains(line)).collect();
            if only.is_empty() {
                self.fact(label, if these.is_empty() { "nothing" } else { "nothing else" })?;
            }
            for (index, line) in only.into_iter().enumerate() {
                self.fact(if index == 0 { label } else { "" }, line)?;
            }
        }
        Ok(())
    }

    /// The heading of the part after the last step.
    pub(super) fn section(&self, heading: &str) -> Result<(), Stop> {
        self.line("")?;
        self.painted(Tint::Bold, heading)?;
        self.line("")
    }

    /// A table, and an empty line.
    pub(super) fn table(&self, table: &Table) -> Result<(), Stop> {
        print(&table.on(self.on))?;
        self.line("")
    }

    pub(super) fn end(&self, took: Duration) -> Result<(), Stop> {
        self.line("")?;
        self.line(format_args!(
            "{} claims were checked, and all of them hold. It took {}.",
            self.claims,
            ms(took)
        ))
    }
}
