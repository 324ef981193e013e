//! The output device: its size, and its support for colours and Unicode.

use super::Output;
use crate::domain::clip_middle;
use clap::ValueEnum;
use std::io::{IsTerminal, stdout};
use std::sync::OnceLock;
use terminal_size::{Height, Width, terminal_size_of};

/// Minimum width of a wrapped line, even on a narrower terminal.
const LINE_MIN: usize = 30;

/// Minimum characters of a cut name before the number of the others.
const NAME_MIN: usize = 4;

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

    /// Cuts the content of a cell to at most `max` characters. Names differ at both ends, so a name
    /// is cut in its middle. A list keeps whole names, with the number of the others. A sentence is
    /// cut at its end.
    #[must_use]
    pub fn shorten(self, text: &str, max: usize) -> String {
        if text.chars().count() <= max || text.contains(' ') {
            return self.clip(text, max);
        }
        let all = text.split(',').count();
        let (mut kept, mut left) = (String::new(), all);
        for name in text.split(',').take(all - 1) {
            let comma = if kept.is_empty() { "" } else { "," };
            let width = [&kept, comma, name, &rest(left - 1)].map(|it| it.chars().count());
            if width.iter().sum::<usize>() > max {
                break;
            }
            kept = kept + comma + name;
            left -= 1;
        }
        let others = rest(all - 1);
        match text.split_once(',') {
            _ if left < all => kept + &rest(left),
            Some((first, _)) if max >= others.len() + NAME_MIN => {
                clip_middle(first, max - others.len(), self.cut()) + &others
            }
            _ => clip_middle(text, max, self.cut()),
        }
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

/// The end of a cut list: how many names are left out.
fn rest(names: usize) -> String {
    format!(" +{names}")
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
    }

    #[test]
    fn a_name_is_cut_in_its_middle_and_a_list_between_its_names() {
        let screen = Screen::default();
        let cut = |text: &str, max| {
            let cut = screen.shorten(text, max);
            assert!(cut.chars().count() <= max, "{cut}");
            cut
        };
        assert_eq!(cut("GPU-5a7c1f00-1111", 17), "GPU-5a7c1f00-1111");
        assert_eq!(cut("GPU-5a7c1f00-1111", 12), "GPU-5…0-1111");
        assert_eq!(cut("fan rattles", 8), "fan rat…");
        let list = "0000:18:00.0,0000:19:00.0,0000:1a:00.0";
        assert_eq!(cut(list, 30), "0000:18:00.0,0000:19:00.0 +1");
        assert_eq!(cut(list, 27), "0000:18:00.0 +2");
        assert_eq!(cut(list, 12), "0000…00.0 +2");
        assert_eq!(cut("a,b", 2), "…b");
        assert_eq!(Screen { ascii: true, ..screen }.shorten("train-0", 5), "tr~-0");
        assert_eq!(Screen { colour: true, ..screen }.paint(Tint::Red, "x"), "\x1b[31mx\x1b[0m");
        assert_eq!(screen.paint(Tint::Red, "x"), "x");
    }
}
