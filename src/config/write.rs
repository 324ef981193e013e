//! Writes a tree as TOML text, one line for each key.

use super::error::printable;
use super::tree::{Entry, Is, Place, Table, Value};
use crate::domain::is_unprintable;

/// Makes the comment behind a value from its place.
type Origin<'a> = Option<&'a dyn Fn(Option<&Place>) -> String>;

/// A tree as TOML text, one line for each key. `origin` makes a comment behind each value.
pub(super) fn written(table: &Table, origin: Origin<'_>) -> String {
    let mut writer = Writer::default();
    writer.table("", table, origin);
    writer.text
}

#[derive(Debug, Default)]
struct Writer {
    text: String,
}

impl Writer {
    fn table(&mut self, path: &str, Table(entries): &Table, origin: Origin<'_>) {
        let end = |text: &mut String, place: Option<&Place>| {
            if let Some(origin) = origin {
                text.push_str("  # ");
                text.push_str(&printable(&origin(place)));
            }
            text.push('\n');
        };
        let (blocks, lines): (Vec<&Entry>, Vec<&Entry>) =
            entries.iter().partition(|entry| is_block(entry));
        for Entry { key, value, .. } in lines {
            self.text.push_str(&key_text(key));
            self.text.push_str(" = ");
            self.inline(value);
            end(&mut self.text, value.place.as_ref());
        }
        for Entry { key, place, value } in blocks {
            let path =
                if path.is_empty() { key_text(key) } else { format!("{path}.{}", key_text(key)) };
            match &value.is {
                Is::Table(table) => {
                    // A table that contains only blocks needs no header: the headers of the blocks
                    // imply it.
                    if table.0.is_empty() || !table.0.iter().all(is_block) {
                        self.gap();
                        self.text.push_str(&format!("[{path}]"));
                        end(&mut self.text, place.as_ref());
                    }
                    self.table(&path, table, origin);
                }
                Is::List(list) => {
                    for value in list {
                        self.gap();
                        self.text.push_str(&format!("[[{path}]]"));
                        end(&mut self.text, value.place.as_ref());
                        if let Is::Table(table) = &value.is {
                            self.table(&path, table, origin);
                        }
                    }
                }
                Is::Text(_) | Is::Plain(_) => {}
            }
        }
    }

    fn gap(&mut self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
    }

    fn inline(&mut self, value: &Value) {
        match &value.is {
            Is::Text(text) => self.text.push_str(&quoted(text)),
            Is::Plain(plain) => self.text.push_str(plain),
            Is::List(list) => {
                self.text.push('[');
                for (index, value) in list.iter().enumerate() {
                    self.text.push_str(if index == 0 { "" } else { ", " });
                    self.inline(value);
                }
                self.text.push(']');
            }
            Is::Table(Table(entries)) if entries.is_empty() => self.text.push_str("{}"),
            Is::Table(Table(entries)) => {
                self.text.push('{');
                for (index, entry) in entries.iter().enumerate() {
                    self.text.push_str(if index == 0 { " " } else { ", " });
                    self.text.push_str(&key_text(&entry.key));
                    self.text.push_str(" = ");
                    self.inline(&entry.value);
                }
                self.text.push_str(" }");
            }
        }
    }
}

/// Whether an entry has a header of its own. Lists of tables have one where people usually write
/// one.
fn is_block(entry: &Entry) -> bool {
    match &entry.value.is {
        Is::Table(_) => true,
        Is::List(list) => {
            matches!(&*entry.key, "resource" | "node")
                && !list.is_empty()
                && list.iter().all(|value| matches!(value.is, Is::Table(_)))
        }
        Is::Text(_) | Is::Plain(_) => false,
    }
}

fn key_text(key: &str) -> String {
    let is_bare = !key.is_empty()
        && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    if is_bare { key.to_owned() } else { quoted(key) }
}

/// A text in quotes, on one line.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            c if is_unprintable(c) && u32::from(c) > 0xffff => {
                quoted.push_str(&format!("\\U{:08X}", u32::from(c)));
            }
            c if is_unprintable(c) => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_written_tree_equals_the_read_one_and_has_every_place() {
        let text = "a = 0x1F\n\n[b.\"c d\"]\nx = \"\"\"\none\n\"two\\u0007\"\"\"\"\ny = [ {z = 1979-05-27},\n  { w = -1.5e3 } ]\n[[resource]]\n\"ö\" = true\n[[resource]]\n";
        let tree = Table::parse(text, Path::new("f")).unwrap();
        let text = written(&tree, None);
        let expected = "a = 0x1F\n\n[b.\"c d\"]\nx = \"one\\n\\\"two\\u0007\\\"\"\ny = [{ z = 1979-05-27 }, { w = -1.5e3 }]\n\n[[resource]]\n\"ö\" = true\n\n[[resource]]\n";
        assert_eq!(text, expected);
        let again = written(&Table::parse(&text, Path::new("f")).unwrap(), None);
        assert_eq!(again, text);
        let origin = |place: Option<&Place>| {
            place.map_or("default".into(), |place| format!("{}:{}", place.line, place.column))
        };
        let text = written(&tree, Some(&origin));
        for line in [
            "a = 0x1F  # 1:5",
            "y = [{ z = 1979-05-27 }, { w = -1.5e3 }]  # 7:5",
            "\"ö\" = true  # 10:7",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert!(
            text.contains("[[resource]]  # 9:1") && text.contains("[[resource]]  # 11:1"),
            "{text}"
        );
    }

    #[test]
    fn a_column_counts_characters_however_long_the_line_is() {
        let list: Vec<String> = (0..2000).map(|n| format!("\"ä{n}\"")).collect();
        let text = format!("# ü\na = [{}] # ö\nb = 1", list.join(", "));
        let tree = Table::parse(&text, Path::new("f")).unwrap();
        let places = tree
            .get("a")
            .and_then(Value::as_list)
            .unwrap()
            .iter()
            .map(|value| value.place.clone().unwrap());
        let line: Vec<char> = text.lines().nth(1).unwrap().chars().collect();
        for (place, wanted) in places.zip(&list) {
            let found: String =
                line[place.column - 1..].iter().take(wanted.chars().count()).collect();
            assert_eq!((place.line, &found), (2, wanted));
        }
        let b = tree.get("b").unwrap().place.clone().unwrap();
        assert_eq!((b.line, b.column), (3, 5));
    }

    #[test]
    fn a_problem_is_placed_at_the_first_quoted_key_that_exists() {
        let text = "name = \"a.b/c\"\npaths = [\n  { hots = \"fuse\" },\n]\n";
        let tree =
            Value { place: None, is: Is::Table(Table::parse(text, Path::new("f")).unwrap()) };
        let place =
            |sentence: &str| tree.place_of(sentence).map(|place| (place.line, place.column));
        assert_eq!(place("`nothing` but `hots` is wrong"), Some((3, 5)));
        assert_eq!(place("the path `fuse` must be"), Some((3, 12)));
        assert_eq!(place("`resource.paths` is"), Some((2, 1)));
        assert_eq!(place("nothing"), None);
    }
}
