//! What the reader sees: headings, facts and claims on standard output; colours on a terminal only.

use super::{Chapter, Refuted, Stop, ms};
use crate::cli::{print, screen};
use std::fmt;
use std::time::Duration;

/// Width of the column of names in a chapter's facts.
const LABEL_WIDTH: usize = 20;
/// What is explained is in lines of no more, however wide the terminal is.
const LINE_MOST: usize = 100;

/// How text stands out.
#[derive(Debug, Clone, Copy)]
enum Style {
    Bold = 1,
    Dim = 2,
    Red = 31,
    Green = 32,
}

/// Where the story is told.
#[derive(Debug)]
pub(super) struct Screen {
    on: screen::Screen,
    chapter: Option<Chapter>,
    claims: usize,
}

impl Screen {
    pub(super) fn new() -> Self {
        Screen { on: screen::Screen::get(), chapter: None, claims: 0 }
    }

    /// The chapter that is being told.
    pub(super) fn current(&self) -> Option<Chapter> {
        self.chapter
    }

    fn paint(&self, style: Style, text: impl fmt::Display) -> String {
        if self.on.colour { format!("\x1b[{}m{text}\x1b[0m", style as u8) } else { text.to_string() }
    }

    fn line(&self, text: impl fmt::Display) -> Result<(), Stop> {
        Ok(print(format_args!("{text}\n"))?)
    }

    pub(super) fn title(&self, spoilt: Option<Chapter>) -> Result<(), Stop> {
        self.line(self.paint(Style::Bold, "Holdfast, on a simulated node"))?;
        self.line("")?;
        for text in [
            "The node's hardware and the kubelet are simulated, in a temporary directory and in this process.",
            "The daemon is the real one, and so is the gRPC between the two, over unix sockets.",
            "Every line marked `ok` was checked: with the kubelet, the daemon's views, or what is on disk.",
        ] {
            self.line(self.prose(text, 0))?;
        }
        match spoilt {
            Some(chapter) => self.line(format_args!("The chapter `{}` is spoilt on purpose.", chapter.name())),
            None => Ok(()),
        }
    }

    pub(super) fn chapter(&mut self, chapter: Chapter) -> Result<(), Stop> {
        self.chapter = Some(chapter);
        let (number, heading) = chapter.heading();
        self.line("")?;
        self.line(self.paint(Style::Bold, format_args!("{number}  {heading}")))
    }

    /// A sentence or two of explanation.
    pub(super) fn say(&self, text: impl fmt::Display) -> Result<(), Stop> {
        self.line(self.paint(Style::Dim, format_args!("   {}", self.prose(text, 3))))
    }

    fn prose(&self, text: impl fmt::Display, indent: usize) -> String {
        let width = Some(self.on.width.map_or(LINE_MOST, |width| width.min(LINE_MOST)));
        screen::Screen { width, ..self.on }.wrap(&text.to_string(), indent)
    }

    /// Something measured or seen.
    pub(super) fn fact(&self, label: &str, text: impl fmt::Display) -> Result<(), Stop> {
        self.line(format_args!("   {label:LABEL_WIDTH$}  {}", self.on.wrap(&text.to_string(), LABEL_WIDTH + 5)))
    }

    /// States a claim. What is compared is what is shown when it does not hold, line by line.
    pub(super) fn claim(&mut self, claim: impl fmt::Display, expected: impl fmt::Display, seen: impl fmt::Display) -> Result<(), Stop> {
        let (expected, seen) = (expected.to_string(), seen.to_string());
        if expected != seen {
            return Err(Stop::Refuted(Refuted { claim: claim.to_string(), expected, seen }));
        }
        self.claims += 1;
        self.line(format_args!("   {}  {}", self.paint(Style::Green, "ok"), self.on.wrap(&claim.to_string(), 7)))
    }

    /// Shows a claim that does not hold: of both sides, the lines that the other one lacks.
    pub(super) fn refuted(&self, refuted: &Refuted) -> Result<(), Stop> {
        let Refuted { claim, expected, seen } = refuted;
        self.line(format_args!("   {}  {}", self.paint(Style::Red, "FAILED"), self.on.wrap(claim, 11)))?;
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

    /// The heading of what follows the last chapter.
    pub(super) fn epilogue(&self, heading: &str) -> Result<(), Stop> {
        self.line("")?;
        self.line(self.paint(Style::Bold, heading))?;
        self.line("")
    }

    /// Text as it is.
    pub(super) fn text(&self, text: impl fmt::Display) -> Result<(), Stop> {
        Ok(print(format_args!("{text}"))?)
    }

    pub(super) fn end(&self, took: Duration) -> Result<(), Stop> {
        self.line("")?;
        self.line(format_args!("{} claims were checked, and all of them hold. It took {}.", self.claims, ms(took)))
    }
}
