//! `--watch`: repeats a query until Ctrl-C. On a terminal, each output overwrites the one before.
//! In a pipe, JSON documents are one a line, and tables are separated by an empty line.
//!
//! Only the text on the terminal changes, not its modes, so no exit path has to restore anything.

use crate::console::exit::{FAILURE, Failed};
use crate::console::screen::Screen;
use crate::console::text::Text;
use crate::console::{Output, eprintln, format_document, not_printed};
use clap::Args;
use serde::Serialize;
use std::io::{self, Write};
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

/// The option of verbs that can repeat their query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Args)]
pub struct Watch {
    /// Repeat every SECONDS seconds (2 if omitted), until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = parse_interval)]
    watch: Option<Duration>,
}

impl Watch {
    /// Formats a document; with `--watch`, JSON is one line.
    ///
    /// # Errors
    /// When the document cannot be serialized.
    pub fn format_document<T: Serialize>(
        self,
        output: Output,
        document: &T,
        table: impl FnOnce(&T) -> Text,
    ) -> Result<Text, Failed> {
        match (output, self.watch) {
            (Output::Json, Some(_)) => serde_json::to_string(document)
                .map(|line| Text::json(&(line + "\n")))
                .map_err(|error| Failed::new(FAILURE, error)),
            _ => format_document(output, document, table),
        }
    }
}

/// Bounds of the interval in seconds. A shorter one would load the daemon, and no user can read
/// faster.
const INTERVAL_SECONDS: std::ops::RangeInclusive<f64> = 0.1..=86_400.0;

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| INTERVAL_SECONDS.contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        "expected a number of seconds, 0.1 or more; put the device before `--watch`".into()
    })
}

/// The result of one query.
#[derive(Debug)]
pub struct QueryResult {
    /// The output.
    pub text: Text,
    /// Remarks for standard error.
    pub remarks: Vec<String>,
    /// The result of the verb if it does not repeat.
    pub end: Result<(), Failed>,
}

impl From<Text> for QueryResult {
    fn from(text: Text) -> Self {
        QueryResult { text, remarks: Vec::new(), end: Ok(()) }
    }
}

/// Runs the query once, or repeatedly until SIGINT. A repeated query that fails is reported and
/// tried again.
///
/// # Errors
/// When a query that does not repeat fails, or when the output cannot be printed.
pub fn repeat(
    watch: Watch,
    output: Output,
    mut query: impl FnMut() -> Result<QueryResult, Failed>,
) -> Result<(), Failed> {
    let Some(every) = watch.watch else {
        let QueryResult { text, remarks, end } = query()?;
        crate::console::print(&text)?;
        remarks.iter().for_each(|remark| eprintln(format_args!("{remark}")));
        return end;
    };
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut interrupt = {
        let _inside = runtime.enter();
        signal(SignalKind::interrupt())?
    };
    let mut out = io::stdout();
    let mut last_output = LastOutput::default();
    loop {
        let (text, remarks) = match query() {
            Ok(QueryResult { text, remarks, .. }) => (text, remarks),
            Err(Failed { sentence, .. }) => {
                (Text::default(), vec![format!("holdfast: {}", sentence.unwrap_or_default())])
            }
        };
        let screen = Screen::get();
        let written = if screen.width.is_some() && output != Output::Json {
            let mut text = text;
            remarks.iter().for_each(|remark| text.line(format_args!("{remark}")));
            out.write_all(last_output.overwrite(&text, screen).as_bytes())
        } else {
            remarks.iter().for_each(|remark| eprintln(format_args!("{remark}")));
            let between = if output == Output::Json || text.is_empty() { "" } else { "\n" };
            out.write_all(format!("{text}{between}").as_bytes())
        };
        written.and_then(|()| out.flush()).map_err(|error| not_printed(&error))?;
        let is_over = runtime.block_on(async {
            tokio::select! {
                () = tokio::time::sleep(every) => false,
                _ = interrupt.recv() => true,
            }
        });
        if is_over {
            return Ok(());
        }
    }
}

/// The text that is on the terminal now.
#[derive(Debug, Default)]
struct LastOutput {
    rows: usize,
    size: Option<(usize, usize)>,
}

impl LastOutput {
    /// The escape sequence and the text that overwrite the last output.
    fn overwrite(&mut self, text: &str, screen: Screen) -> String {
        let (width, height) =
            (screen.width.unwrap_or(80).max(1), screen.height.unwrap_or(24).max(2));
        let mut lines: Vec<&str> = text.lines().collect();
        let rows = |line: &str| visible_chars(line).max(1).div_ceil(width);
        let mut total: usize = lines.iter().map(|line| rows(line)).sum();
        let mut left_out = 0;
        // The cursor is below the text, and rows that scrolled off the top cannot be overwritten:
        // leave out lines.
        while total + usize::from(left_out > 0) >= height && lines.len() > 1 {
            total -= lines.pop().map_or(0, rows);
            left_out += 1;
        }
        // After a resize, the terminal has wrapped the text again, so clear the whole screen.
        let begin = match self.size.replace((width, height)) {
            Some(size) if size != (width, height) => "\x1b[H\x1b[2J".to_owned(),
            _ if self.rows > 0 => format!("\x1b[{}A\r\x1b[J", self.rows),
            _ => String::new(),
        };
        let more = if left_out > 0 { format!("{left_out} more lines\n") } else { String::new() };
        self.rows = total + usize::from(left_out > 0);
        format!("{begin}{}{more}", lines.iter().map(|line| format!("{line}\n")).collect::<String>())
    }
}

/// Number of visible characters of a line; colour codes do not count.
fn visible_chars(line: &str) -> usize {
    let mut parts = line.split("\x1b[");
    let first = parts.next().map_or(0, |text| text.chars().count());
    first
        + parts
            .map(|part| part.split_once('m').map_or(0, |(_, text)| text.chars().count()))
            .sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_output_overwrites_the_last_one() {
        let screen = Screen { width: Some(10), height: Some(6), colour: true, ..Screen::default() };
        let mut last_output = LastOutput::default();
        assert_eq!(
            last_output.overwrite("\x1b[31m0123456789\x1b[0m\nabcdefghijk\n", screen),
            "\x1b[31m0123456789\x1b[0m\nabcdefghijk\n"
        );
        assert_eq!(
            last_output.overwrite("a\n", screen),
            "\x1b[3A\r\x1b[Ja\n",
            "one row, and two of the wrapped line"
        );
        assert_eq!(
            last_output.overwrite("a\nb\nc\nd\ne\nf\n", screen),
            "\x1b[1A\r\x1b[Ja\nb\nc\nd\n2 more lines\n"
        );
        assert_eq!(last_output.rows, 5);
        assert_eq!(
            last_output.overwrite("a\n", Screen { width: Some(12), ..screen }),
            "\x1b[H\x1b[2Ja\n"
        );
    }

    #[test]
    fn the_interval_is_bounded() {
        assert_eq!(
            [parse_interval("2"), parse_interval("0.5")],
            [Ok(Duration::from_secs(2)), Ok(Duration::from_millis(500))]
        );
        for text in ["0", "-1", "GPU-5a", "NaN", "inf", "1e9"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
