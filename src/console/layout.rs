//! The JSON that a person reads.

/// `line`, one JSON document as `serde_json` writes it, over lines, two spaces in for each level: byte for byte what
/// `serde_json::to_string_pretty` gives. That would write every document by code of its own, made of all its types; so each is
/// written in one way (`Serializer<&mut Vec<u8>, CompactFormatter>`), and laid out here.
pub(super) fn laid_out(line: &str) -> String {
    let mut text = String::with_capacity(line.len() * 2);
    let mut depth = 0usize;
    let mut chars = line.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '"' => {
                text.push(char);
                let mut is_escaped = false;
                for char in chars.by_ref() {
                    text.push(char);
                    match char {
                        '"' if !is_escaped => break,
                        _ => is_escaped = char == '\\' && !is_escaped,
                    }
                }
            }
            '{' | '[' => {
                text.push(char);
                // What is empty stays together.
                if let Some(end) = chars.next_if(|char| matches!(char, '}' | ']')) {
                    text.push(end);
                } else {
                    depth += 1;
                    break_line(&mut text, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                break_line(&mut text, depth);
                text.push(char);
            }
            ',' => {
                text.push(char);
                break_line(&mut text, depth);
            }
            ':' => text.push_str(": "),
            _ => text.push(char),
        }
    }
    text
}

fn break_line(text: &mut String, depth: usize) {
    text.push('\n');
    text.extend(std::iter::repeat_n("  ", depth));
}

#[cfg(test)]
mod tests {
    use super::laid_out;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    fn documents() -> impl Strategy<Value = Value> {
        // Text has what could be taken for the document's own marks.
        let text = || "([a\"\\\\{}\\[\\],: \n\u{e9}]{0,6})";
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e9..1e9).prop_map(Value::from),
            text().prop_map(Value::from)
        ];
        leaf.prop_recursive(5, 40, 5, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map(text(), inner, 0..5).prop_map(|map| Value::Object(map.into_iter().collect::<Map<_, _>>()))
            ]
        })
    }

    proptest! {
        #[test]
        fn it_is_what_the_library_would_lay_out(document in documents()) {
            prop_assert_eq!(laid_out(&document.to_string()), serde_json::to_string_pretty(&document).unwrap());
        }
    }
}
