//! Escapes text from outside for SVG and HTML.

use crate::domain::is_unprintable;

/// Longer texts are cut: no shown name is longer, and a page must not grow with foreign text.
const CHARS_MAX: usize = 256;

/// Escapes a text for an element or a quoted attribute. Pods and devices choose their own names.
/// Characters that XML does not allow, and unprintable ones ([`is_unprintable`]), become a
/// replacement character.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for (n, c) in text.chars().enumerate() {
        match c {
            _ if n == CHARS_MAX => {
                escaped.push('…');
                break;
            }
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            _ if is_unprintable(c) || matches!(c, '\u{fffe}' | '\u{ffff}') => {
                escaped.push('\u{fffd}');
            }
            _ => escaped.push(c),
        }
    }
    escaped
}

/// At most `max` characters of a text, with a mark where characters are missing.
#[must_use]
pub fn clip(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    text.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

/// For tests of drawings: checks that every element is closed in its turn, every attribute is
/// quoted, and no special character is bare. Returns the number of elements.
#[cfg(test)]
pub(crate) fn elements(xml: &str) -> usize {
    let (mut open, mut count, mut rest) = (Vec::new(), 0, xml);
    while let Some((text, after)) = rest.split_once('<') {
        assert!(!text.contains('>'), "a bare sign: {text}");
        let entity = |part: &str| {
            ["amp;", "lt;", "gt;", "quot;", "#39;"].iter().any(|known| part.starts_with(known))
        };
        assert!(text.split('&').skip(1).all(entity), "a bare sign: {text}");
        let (tag, after) = after.split_once('>').expect("a tag ends");
        rest = after;
        count += 1;
        match (tag.strip_prefix('/'), tag.strip_suffix('/')) {
            (Some(name), _) => assert_eq!(open.pop(), Some(name), "closed out of turn"),
            (None, Some(_)) => {}
            (None, None) => open.push(tag.split_whitespace().next().expect("a tag has a name")),
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
    }
    assert!(open.is_empty(), "not closed: {open:?}");
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_escaped() {
        assert_eq!(
            escape(r#"<script>alert("1" & '2')</script>"#),
            "&lt;script&gt;alert(&quot;1&quot; &amp; &#39;2&#39;)&lt;/script&gt;"
        );
        assert_eq!(
            escape("a\u{0}\u{1b}[31m\n\u{202e}gpj\u{fffe}"),
            "a\u{fffd}\u{fffd}[31m\u{fffd}\u{fffd}gpj\u{fffd}"
        );
        assert_eq!(escape("Gerät ×64 ✓"), "Gerät ×64 ✓");
        let long = escape(&"<".repeat(10_000));
        assert_eq!((long.matches("&lt;").count(), long.ends_with('…')), (CHARS_MAX, true));
    }

    #[test]
    fn a_text_is_cut_with_a_sign() {
        assert_eq!(
            [clip("train-0", 7), clip("train-0", 6), clip("train-0", 0)],
            ["train-0", "train…", "…"]
        );
    }
}
