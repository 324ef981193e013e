//! The output device: its size, and its support for colours and Unicode.

use super::Output;
use clap::ValueEnum;
use std::io::{IsTerminal, stdout};
use std::sync::OnceLock;
use terminal_size::{Height, Width, terminal_size_of};

/// Minimum width of a wrapped line, even on a narrower terminal.
const LINE_MIN: usize = 30;

/// When results have colours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Colour {
    /// On a terminal, unless the variable NO_COLOR is set
    #[default]
    Auto,
    /// Always, even into a pipe or a file
    Always,
    /// Never
    Never,
}

/// The output device. The default is a file: any width, no colours, UTF-8.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Screen {
    /// Columns of the terminal. `None` if it is not a terminal; text is then printed in full.
    pub width: Option<usize>,
    /// Lines of the terminal.
    pub height: Option<usize>,
    /// Whether it has colours.
    pub colour: bool,
    /// Whether it is limited to ASCII.
    pub ascii: bool,
}

/// The options of the command line, set once for the whole process.
static OPTIONS: OnceLock<(Colour, Output)> = OnceLock::new();

/// Sets the options of the command line, once. Without this call every screen is a file.
pub(crate) fn init(colour: Colour, output: Output) {
    // A second call has the same values.
    let _known = OPTIONS.get_or_init(|| (colour, output));
}

impl Screen {
    /// Standard output with its present size.
    #[must_use]
    pub fn get() -> Screen {
        let Some((colour, output)) = OPTIONS.get() else { return Screen::default() };
        let is_terminal = stdout().is_terminal();
        let size = is_terminal.then(|| terminal_size_of(stdout())).flatten();
        // A terminal that reports the size 0 × 0 has an unknown size.
        let size = size.filter(|(Width(width), _)| *width > 0);
        Screen {
            width: size.map(|(Width(width), _)| width.into()),
            height: size.map(|(_, Height(height))| height.into()),
            colour: has_colour(*colour, is_terminal, |name| std::env::var(name).ok()),
            ascii: *output == Output::Ascii || !is_utf8(|name| std::env::var(name).ok()),
        }
    }

    /// Colours a text, if the screen has colours.
    #[must_use]
    pub fn paint(self, tint: Tint, text: &str) -> String {
        if self.colour && tint != Tint::Plain {
            format!("\x1b[{}m{text}\x1b[0m", tint as u8)
        } else {
            text.to_owned()
        }
    }

    /// The character that marks a cut text.
    #[must_use]
    pub fn cut(self) -> char {
        if self.ascii { '~' } else { '…' }
    }

    /// Cuts a text to at most `max` characters.
    #[must_use]
    pub fn clip(self, text: &str, max: usize) -> String {
        if text.chars().count() <= max {
            return text.to_owned();
        }
        text.chars().take(max.saturating_sub(1)).chain([self.cut()]).collect()
    }

    /// Wraps a text that starts at column `indent`. Lines break between words and stay within the
    /// width. Repeated spaces are kept.
    #[must_use]
    pub fn wrap(self, text: &str, indent: usize) -> String {
        let available =
            self.width.map_or(usize::MAX, |width| width.saturating_sub(indent).max(LINE_MIN));
        let mut wrapped = String::new();
        let mut used = 0;
        for word in text.split(' ') {
            let width = word.chars().count();
            if used > 0 && used + 1 + width > available {
                wrapped.push('\n');
                wrapped.extend(std::iter::repeat_n(' ', indent));
                used = 0;
            } else if !wrapped.is_empty() {
                wrapped.push(' ');
                used += 1;
            }
            wrapped += word;
            used += width;
        }
        wrapped
    }
}

/// The style of a text, by its number in ECMA-48 (SGR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tint {
    /// No style.
    Plain = 0,
    /// A heading.
    Bold = 1,
    /// Less important.
    Dim = 2,
    /// A problem.
    Red = 31,
    /// Healthy.
    Green = 32,
    /// A possible problem.
    Yellow = 33,
}

/// <https://no-color.org>: any value that is not empty disables colours.
fn has_colour(
    wanted: Colour,
    is_terminal: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> bool {
    match wanted {
        Colour::Always => true,
        Colour::Never => false,
        Colour::Auto => {
            is_terminal
                && variable("NO_COLOR").is_none_or(|value| value.is_empty())
                && variable("TERM").is_none_or(|term| term != "dumb")
        }
    }
}

/// The first variable that is not empty decides (POSIX, "Environment Variables"). Without one the
/// locale is C.
fn is_utf8(variable: impl Fn(&str) -> Option<String>) -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(|name| variable(name).filter(|value| !value.is_empty()));
    locale.is_some_and(|locale| {
        ["utf-8", "utf8"].iter().any(|word| locale.to_ascii_lowercase().contains(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn auto_colours_only_terminals_and_options_override() {
        assert!(
            has_colour(Colour::Auto, true, of(&[]))
                && has_colour(Colour::Auto, true, of(&[("NO_COLOR", "")]))
        );
        assert!(
            !has_colour(Colour::Auto, false, of(&[]))
                && !has_colour(Colour::Auto, true, of(&[("NO_COLOR", "1")]))
        );
        assert!(!has_colour(Colour::Auto, true, of(&[("TERM", "dumb")])));
        assert!(
            has_colour(Colour::Always, false, of(&[("NO_COLOR", "1")]))
                && !has_colour(Colour::Never, true, of(&[]))
        );
    }

    #[test]
    fn the_first_variable_that_is_not_empty_sets_the_locale() {
        assert!(
            is_utf8(of(&[("LANG", "C.UTF-8")]))
                && is_utf8(of(&[("LC_ALL", ""), ("LC_CTYPE", "de_DE.utf8")]))
        );
        assert!(!is_utf8(of(&[])) && !is_utf8(of(&[("LC_ALL", "C"), ("LANG", "C.UTF-8")])));
    }

    #[test]
    fn a_wrapped_line_is_indented() {
        let text = "stop one of them; a package and a DaemonSet are two";
        let narrow = Screen { width: Some(40), ..Screen::default() };
        assert_eq!(
            narrow.wrap(text, 9),
            "stop one of them; a package and\n         a DaemonSet are two"
        );
        assert_eq!(
            narrow.wrap("a/path/that/is/longer/than/all/of/the/line and more", 2),
            "a/path/that/is/longer/than/all/of/the/line\n  and more"
        );
        assert_eq!(Screen::default().wrap(text, 9), text);
    }

    #[test]
    fn a_cut_text_ends_with_a_marker() {
        let screen = Screen::default();
        assert_eq!([screen.clip("train", 5), screen.clip("train", 4)], ["train", "tra…"]);
        assert_eq!(Screen { ascii: true, ..screen }.clip("train", 4), "tra~");
        assert_eq!(Screen { colour: true, ..screen }.paint(Tint::Red, "x"), "\x1b[31mx\x1b[0m");
        assert_eq!(screen.paint(Tint::Red, "x"), "x");
    }
}
