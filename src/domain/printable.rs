//! Safe text for logs and terminals: control and invisible characters are escaped.
//!
//! Devices, pods, configurations and programs choose their own names. A name may contain a line
//! break that forges a log line, or an escape sequence for the terminal. It may contain a character
//! that changes the direction of the following text. Such characters are written as escapes.
//! Writers do so at the border: the log, the tables and texts of the verbs, error messages, metric
//! labels.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// Whether a character is written as an escape: control characters (C0, DEL, C1), line and
/// paragraph separators, characters that change the direction of text (Unicode Technical Report 36,
/// "Bidirectional Text Spoofing"), and invisible characters.
#[must_use]
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A text on one line: `\n` for a line break, `\u{1b}` for an escape character.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |escaped, c| escaped.extend(c.escape_default()))
}

/// A JSON document with all unprintable characters escaped. Its values do not change: outside of a
/// text JSON has no such character but line breaks and tabs, and inside a text JSON has an escape
/// for each.
#[must_use]
pub fn printable_json(document: &str) -> Cow<'_, str> {
    let is_layout = |c| matches!(c, '\n' | '\r' | '\t');
    escaped(document, |escaped, c| {
        if is_layout(c) {
            return escaped.push(c);
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to memory cannot fail.
            let _infallible = write!(escaped, "\\u{unit:04x}");
        }
    })
}

fn escaped(text: &str, escape: impl Fn(&mut String, char)) -> Cow<'_, str> {
    let Some((clean, _)) = text.char_indices().find(|(_, c)| is_unprintable(*c)) else {
        return Cow::Borrowed(text);
    };
    let mut escaped = String::with_capacity(text.len() + 16);
    escaped.push_str(&text[..clean]);
    for c in text[clean..].chars() {
        if is_unprintable(c) { escape(&mut escaped, c) } else { escaped.push(c) }
    }
    Cow::Owned(escaped)
}

/// Cuts a name to at most `max` characters: `mark` is in the place of its middle. Names of pods and
/// ids differ at both ends.
#[must_use]
pub fn clip_middle(name: &str, max: usize, mark: char) -> String {
    let length = name.chars().count();
    if length <= max {
        return name.to_owned();
    }
    let kept = max.saturating_sub(1);
    let (head, tail) = (kept / 2, kept - kept / 2);
    let chars = name.chars();
    chars.clone().take(head).chain([mark]).chain(chars.skip(length - tail)).collect()
}

/// A writer that forwards its input as printable text.
#[derive(Debug)]
pub struct Printable<W>(pub W);

impl<W: Write> Write for Printable<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write_str(&printable(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_terminal_control_characters_are_escaped() {
        for (text, wanted) in [
            ("Gerät ×64 ✓ 日本 👍", "Gerät ×64 ✓ 日本 👍"),
            ("a\u{1b}[2Jb", "a\\u{1b}[2Jb"),
            ("a\r\nb\tc", "a\\r\\nb\\tc"),
            ("\u{0}\u{7f}\u{85}\u{9b}31m", "\\u{0}\\u{7f}\\u{85}\\u{9b}31m"),
            (
                "\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}",
                "\\u{2028}\\u{2029}\\u{202a}\\u{202e}\\u{2066}\\u{2069}",
            ),
            ("gpu\u{200b}\u{feff}0\u{e0041}", "gpu\\u{200b}\\u{feff}0\\u{e0041}"),
            ("C:\\x", "C:\\x"),
        ] {
            assert_eq!(printable(text), wanted);
        }
        let mut text = Printable(String::new());
        let foreign = "a\nb";
        write!(text, "{foreign}: c").unwrap();
        assert_eq!(text.0, "a\\nb: c");
    }

    proptest! {
        #[test]
        fn nothing_unprintable_is_left_of_any_text(text in any::<String>()) {
            let shown = printable(&text);
            prop_assert!(!shown.contains(is_unprintable), "{shown:?}");
            if !text.contains(is_unprintable) {
                prop_assert_eq!(shown, text.as_str());
            }
        }

        #[test]
        fn a_json_document_keeps_its_values(texts in prop::collection::vec(any::<String>(), 0..4)) {
            for document in [serde_json::to_string(&texts).unwrap(), serde_json::to_string_pretty(&texts).unwrap()] {
                let shown = printable_json(&document);
                prop_assert!(!shown.contains(|c| is_unprintable(c) && c != '\n'), "{shown:?}");
                prop_assert_eq!(serde_json::from_str::<Vec<String>>(&shown).unwrap(), texts.clone());
            }
        }
    }
}
