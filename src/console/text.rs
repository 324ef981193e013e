//! Text for people. Names come from hardware, pods, files and the command line. A [`Text`] escapes
//! unprintable characters, so only this program breaks lines and changes colours.

use super::screen::{Screen, Tint};
use crate::domain::{Printable, is_unprintable, printable, printable_json};
use std::fmt::{self, Write};
use std::ops::{AddAssign, Deref};

/// Lines for a terminal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(String);

impl Text {
    /// One line.
    #[must_use]
    pub fn of_line(line: fmt::Arguments<'_>) -> Text {
        let mut text = Text::default();
        text.line(line);
        text
    }

    /// A text with line breaks: a document whose format escapes its strings, or a text without
    /// foreign names.
    #[must_use]
    pub fn document(document: &str) -> Text {
        let escape = |line: &str| {
            if line.contains(is_unprintable) {
                printable(line).into_owned()
            } else {
                line.to_owned()
            }
        };
        Text(document.split('\n').map(escape).collect::<Vec<_>>().join("\n"))
    }

    /// A JSON document; its values stay exact.
    #[must_use]
    pub fn json(document: &str) -> Text {
        Text(printable_json(document).into_owned())
    }

    /// Appends to the line.
    pub fn put(&mut self, part: fmt::Arguments<'_>) {
        // Writing to memory cannot fail.
        let _infallible = Printable(&mut self.0).write_fmt(part);
    }

    /// Appends to the line in a colour, if the screen has colours.
    pub fn paint(&mut self, screen: Screen, tint: Tint, part: &str) {
        self.0 += &screen.paint(tint, &printable(part));
    }

    /// Appends a sentence that starts at column `indent`, and indents its further lines by the same
    /// width.
    pub fn wrap(&mut self, screen: Screen, indent: usize, sentence: &str) {
        self.0 += &screen.wrap(&printable(sentence), indent);
    }

    /// Ends the line.
    pub fn end_line(&mut self) {
        self.0.push('\n');
    }

    /// Appends a line.
    pub fn line(&mut self, line: fmt::Arguments<'_>) {
        self.put(line);
        self.end_line();
    }
}

impl AddAssign<Text> for Text {
    fn add_assign(&mut self, more: Text) {
        self.0 += &more.0;
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl PartialEq<&str> for Text {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl PartialEq<str> for Text {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_breaks_only_where_it_is_ended() {
        let mut text = Text::of_line(format_args!("{}: {}", "a\nb", "c\u{1b}[2J"));
        text.paint(Screen { colour: true, ..Screen::default() }, Tint::Red, "d\r");
        text.end_line();
        assert_eq!(text, "a\\nb: c\\u{1b}[2J\n\u{1b}[31md\\r\u{1b}[0m\n");
        assert_eq!(Text::document("a\nb\u{9b}\n"), "a\nb\\u{9b}\n");
    }

    proptest! {
        #[test]
        fn a_text_has_no_unprintable_character_except_its_line_breaks(parts in prop::collection::vec(any::<String>(), 4), width in 0..60_usize) {
            let screen = Screen { width: Some(width), ..Screen::default() };
            let mut text = Text::of_line(format_args!("{} {}", parts[0], parts[1]));
            text.paint(screen, Tint::Green, &parts[2]);
            text.end_line();
            prop_assert_eq!(text.matches('\n').count(), 2);
            text.wrap(screen, 2, &parts[3]);
            text += Text::json(&serde_json::to_string(&parts).unwrap());
            text += Text::document(&parts[3]);
            prop_assert!(!text.contains(|c| is_unprintable(c) && c != '\n'), "{text:?}");
        }
    }
}
