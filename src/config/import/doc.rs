//! The other plugin's file as a tree: YAML, with JSON as a subset of it.
//!
//! Every value knows its line and whether it was read.

use super::error::ImportError;
use granit_parser::{Event, Parser, ScalarStyle, StrInput, Tag};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The nesting limit: more than any plugin's configuration needs. Each level is one recursive call.
const DEPTH_MAX: usize = 32;
/// The limit of nodes. Aliases may repeat a part of the file many times.
const NODES_MAX: usize = 50_000;
/// The limit of text that aliases copy, in bytes.
const COPIED_MAX: usize = 4 << 20;

/// A node of the file.
#[derive(Debug, Clone)]
pub(super) struct Doc {
    pub(super) line: usize,
    pub(super) is: Is,
    pub(super) state: Cell<State>,
}

/// Whether a node was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Unread,
    Read,
    /// The same key is in this line too, and that one counts.
    Overruled(usize),
}

#[derive(Debug, Clone)]
pub(super) enum Is {
    Null,
    Scalar(Scalar),
    List(Vec<Doc>),
    Map(Vec<(String, Doc)>),
}

/// A text, a number or a truth value.
#[derive(Debug, Clone)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Without quotes, so it may be a number or a truth value.
    pub(super) is_plain: bool,
    /// The lines of the text in the file.
    pub(super) lines: Lines,
}

/// The lines of a text that contains a file of its own. They give errors in it a line of the outer
/// file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lines {
    /// Consecutive lines; this is the first.
    From(usize),
    /// All in this line, as in JSON.
    In(usize),
}

impl Lines {
    fn of(self, line: usize) -> usize {
        match self {
            Lines::From(first) => first + line.saturating_sub(1),
            Lines::In(line) => line,
        }
    }
}

impl Doc {
    /// Parses every document of a text. `lines` are the lines of the text in the user's file.
    ///
    /// # Errors
    /// Text that is neither YAML nor JSON, with its line.
    pub(super) fn parse(text: &str, lines: Lines) -> Result<Vec<Doc>, ImportError> {
        // A file may contain many short texts; none of them may expand into a long one.
        let nodes_max = NODES_MAX.min(2 * text.len());
        let mut builder = Builder {
            events: Parser::new_from_str(text),
            lines,
            anchors: BTreeMap::new(),
            nodes: 0,
            nodes_max,
            copied: 0,
        };
        let mut documents = Vec::new();
        while let Some((event, line)) = builder.next()? {
            match event {
                Event::Scalar(..)
                | Event::SequenceStart(..)
                | Event::MappingStart(..)
                | Event::Alias(_) => {
                    documents.push(builder.node(event, line, 0)?);
                }
                // An anchor is valid in its own document only.
                Event::DocumentStart(..) => builder.anchors.clear(),
                _ => {}
            }
        }
        Ok(documents)
    }

    pub(super) fn new(line: usize, is: Is) -> Self {
        Doc { line, is, state: Cell::new(State::Unread) }
    }

    /// The value of a key of a map; the spelling must be equal.
    pub(super) fn value(&self, key: &str) -> Option<&Doc> {
        let Is::Map(map) = &self.is else { return None };
        map.iter().find(|(known, _)| known == key).map(|(_, doc)| doc)
    }

    /// The same as JSON, without the places. Every scalar is a text, except `true` and `false`
    /// without quotes. Of equal keys the last one counts. Null values are left out.
    pub(super) fn into_json(self) -> serde_json::Value {
        match self.is {
            Is::Null => serde_json::Value::Null,
            Is::Scalar(scalar) => match (scalar.is_plain, scalar.text.as_str()) {
                (true, "true") => true.into(),
                (true, "false") => false.into(),
                _ => scalar.text.into(),
            },
            Is::List(list) => list.into_iter().map(Doc::into_json).collect(),
            Is::Map(map) => {
                let given = map.into_iter().filter(|(_, doc)| !matches!(doc.is, Is::Null));
                given.map(|(key, doc)| (key, doc.into_json())).collect()
            }
        }
    }

    /// The number of nodes, and of bytes of text.
    fn size(&self) -> (usize, usize) {
        let (nodes, bytes) = match &self.is {
            Is::Null => (0, 0),
            Is::Scalar(scalar) => (0, scalar.text.len()),
            Is::List(list) => list.iter().map(Doc::size).fold((0, 0), sum),
            Is::Map(map) => {
                map.iter().map(|(key, doc)| sum((0, key.len()), doc.size())).fold((0, 0), sum)
            }
        };
        (nodes + 1, bytes)
    }

    /// Marks this node and all nodes below it as read.
    pub(super) fn read_all(&self) {
        if self.state.get() == State::Unread {
            self.state.set(State::Read);
        }
        match &self.is {
            Is::Null | Is::Scalar(_) => {}
            Is::List(list) => list.iter().for_each(Doc::read_all),
            Is::Map(map) => map.iter().for_each(|(_, doc)| doc.read_all()),
        }
    }
}

fn too_large(line: usize) -> ImportError {
    ImportError::new(format!("line {line}: larger or deeper than a configuration can be"))
}

fn sum(a: (usize, usize), b: (usize, usize)) -> (usize, usize) {
    (a.0 + b.0, a.1 + b.1)
}

struct Builder<'a> {
    events: Parser<'a, StrInput<'a>>,
    lines: Lines,
    /// The node of each anchor, by the anchor's number.
    anchors: BTreeMap<usize, Doc>,
    nodes: usize,
    nodes_max: usize,
    /// The bytes of text that were copied.
    copied: usize,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Result<Option<(Event<'a>, usize)>, ImportError> {
        match self.events.next() {
            None => Ok(None),
            Some(Ok((event, span))) => Ok(Some((event, self.lines.of(span.start.line())))),
            Some(Err(error)) => {
                let why = error.info();
                let why = why.lines().next().unwrap_or("not YAML");
                Err(ImportError::new(format!(
                    "line {}: neither YAML nor JSON: {why}",
                    self.lines.of(error.marker().line())
                )))
            }
        }
    }

    /// The next event that is part of the data.
    fn expect(&mut self) -> Result<(Event<'a>, usize), ImportError> {
        loop {
            match self.next()? {
                Some((
                    event @ (Event::Scalar(..)
                    | Event::SequenceStart(..)
                    | Event::SequenceEnd
                    | Event::MappingStart(..)
                    | Event::MappingEnd
                    | Event::Alias(_)),
                    line,
                )) => return Ok((event, line)),
                Some(_) => {}
                None => return Err(ImportError::new("the file ends in the middle of a value")),
            }
        }
    }

    fn node(&mut self, event: Event<'a>, line: usize, depth: usize) -> Result<Doc, ImportError> {
        self.nodes += 1;
        if self.nodes > self.nodes_max || depth > DEPTH_MAX {
            return Err(too_large(line));
        }
        let (doc, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => (
                Doc::new(line, self.scalar(text.into_owned(), style, tag.as_deref(), line)),
                anchor,
            ),
            Event::SequenceStart(_, anchor, _) => {
                let mut list = Vec::new();
                loop {
                    match self.expect()? {
                        (Event::SequenceEnd, _) => break,
                        (event, line) => list.push(self.node(event, line, depth + 1)?),
                    }
                }
                (Doc::new(line, Is::List(list)), anchor)
            }
            Event::MappingStart(_, anchor, _) => {
                (Doc::new(line, Is::Map(self.map(depth)?)), anchor)
            }
            Event::Alias(anchor) => {
                let meant = self.anchors.get(&anchor);
                let meant = meant.ok_or_else(|| {
                    ImportError::new(format!(
                        "line {line}: an alias refers to a node that contains it"
                    ))
                })?;
                let (nodes, bytes) = meant.size();
                self.nodes += nodes;
                self.copied += bytes;
                if self.copied > COPIED_MAX {
                    return Err(too_large(line));
                }
                let meant = meant.clone();
                (Doc { line, ..meant }, 0)
            }
            _ => return Err(ImportError::new(format!("line {line}: a value is missing"))),
        };
        if anchor > 0 {
            self.copied += doc.size().1;
            if self.copied > COPIED_MAX {
                return Err(too_large(line));
            }
            self.anchors.insert(anchor, doc.clone());
        }
        Ok(doc)
    }

    fn scalar(&self, text: String, style: ScalarStyle, tag: Option<&Tag>, line: usize) -> Is {
        let is_text = tag.is_some_and(|tag| tag.is_yaml_core_schema() && tag.suffix() == "str");
        let is_plain = style == ScalarStyle::Plain && !is_text;
        if is_plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL") {
            return Is::Null;
        }
        // A folded text no longer shows where its lines began. For a literal block the parser
        // reports the first line that is not empty.
        let empty = text.chars().take_while(|c| *c == '\n').count();
        let lines = match self.lines {
            Lines::From(_) if style == ScalarStyle::Literal => {
                Lines::From(line.saturating_sub(empty))
            }
            _ => Lines::In(line),
        };
        Is::Scalar(Scalar { text, is_plain, lines })
    }

    fn map(&mut self, depth: usize) -> Result<Vec<(String, Doc)>, ImportError> {
        let mut map: Vec<(String, Doc)> = Vec::new();
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        let mut merged = Vec::new();
        loop {
            let (event, line) = self.expect()?;
            let (key, is_merge) = match event {
                Event::MappingEnd => break,
                Event::Scalar(key, style, ..) => {
                    let is_merge = &*key == "<<" && style == ScalarStyle::Plain;
                    (key.into_owned(), is_merge)
                }
                _ => return Err(ImportError::new(format!("line {line}: a key must be a text"))),
            };
            let (event, value_line) = self.expect()?;
            let mut value = self.node(event, value_line, depth + 1)?;
            // An error names the line of the key, which may be above the value.
            value.line = line;
            if is_merge {
                merged.push(value);
                continue;
            }
            if let Some((_, earlier)) =
                places.insert(key.clone(), map.len()).and_then(|place| map.get(place))
            {
                earlier.state.set(State::Overruled(line));
            }
            map.push((key, value));
        }
        // YAML's merge key: the keys of another map that this map does not have.
        let maps = merged.into_iter().flat_map(|value| match value.is {
            Is::List(list) => list,
            is => vec![Doc::new(value.line, is)],
        });
        for (key, value) in maps
            .filter_map(|doc| if let Is::Map(map) = doc.is { Some(map) } else { None })
            .flatten()
        {
            if let std::collections::btree_map::Entry::Vacant(place) = places.entry(key.clone()) {
                place.insert(map.len());
                map.push((key, value));
            }
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::super::field::{Decoder, Field, Unread};
    use super::*;

    fn read(text: &str) -> Result<Doc, String> {
        let mut documents = Doc::parse(text, Lines::From(1)).map_err(|error| error.to_string())?;
        Ok(documents.remove(0))
    }

    fn unread(root: &Field<'_>) -> Vec<(String, usize)> {
        root.unread(100).0.into_iter().map(|Unread { path, line, .. }| (path, line)).collect()
    }

    #[test]
    fn yaml_and_json_are_read_alike_and_unread_parts_are_reported() {
        let yaml = "# a comment\na: &it { b: [1, 'x'], c: ~ }\nd: *it\ne: |\n  text\n";
        let json = "{\n\t\"a\": {\"b\": [1, \"x\"], \"c\": null},\n\t\"d\": {\"b\": [1, \"x\"], \"c\": null},\n\t\"e\": \"text\\n\"\n}\n";
        for text in [yaml, json] {
            let doc = read(text).unwrap();
            let root = Field::root(&doc, Decoder::JsonOfYaml);
            let b = root.get("a").unwrap().get("b").unwrap().items().unwrap();
            assert_eq!((b[0].number().unwrap(), b[1].text().unwrap()), (1, "x"));
            assert!(root.get("a").unwrap().get("c").is_none());
            assert_eq!(root.get("e").unwrap().text().unwrap(), "text\n");
            assert_eq!(unread(&root), [("d".to_owned(), 3)]);
            root.get("d").unwrap().read_all();
            assert_eq!(unread(&root), []);
        }
    }

    #[test]
    fn a_map_may_be_merged_into_another_one() {
        let doc = read("a: &a { x: 1, y: 2 }\nb: &b { y: 3, <<: *a }\nc: { <<: [*b, { z: 4 }], x: 5 }\n\"<<\": { w: 6 }\n").unwrap();
        let root = Field::root(&doc, Decoder::JsonOfYaml);
        let number = |of: &str, key: &str| {
            root.get(of).and_then(|of| of.get(key)).map(|value| value.number().unwrap())
        };
        assert_eq!((number("b", "x"), number("b", "y")), (Some(1), Some(3)));
        assert_eq!(
            (number("c", "x"), number("c", "y"), number("c", "z")),
            (Some(5), Some(3), Some(4))
        );
        assert_eq!(
            root.get("w").map(|field| field.path),
            None,
            "in quotes it is a key as any other"
        );
    }

    #[test]
    fn every_mistake_has_its_line() {
        for (text, expected) in [
            ("a: [1\nb: 2", "line 2: neither YAML nor JSON: "),
            ("? [a]\n: 1", "line 1: a key must be a text"),
            ("a: &x [*x]", "line 1: an alias refers to a node that contains it"),
            (&["[".repeat(40), "]".repeat(40)].concat(), "line 1: larger or deeper"),
            ("a: &x 1\n---\nb: *x", "line 3: neither YAML nor JSON"),
        ] {
            let problem = read(text).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
        let bomb: String = (0..9)
            .map(|n| {
                format!(
                    "a{n}: &a{n} [{}]\n",
                    if n == 0 { "x, x".into() } else { vec![format!("*a{}", n - 1); 9].join(", ") }
                )
            })
            .collect();
        assert!(read(&bomb).unwrap_err().contains("larger or deeper"));
        // Few nodes, but gigabytes of text.
        for text in [
            format!("a: &a {}\nb:\n", "x".repeat(1 << 20)) + &"- *a\n".repeat(4000),
            format!("a: &a {{ ? {} : 1 }}\nb:\n", "x".repeat(1 << 20)) + &"- *a\n".repeat(4000),
        ] {
            assert!(read(&text).unwrap_err().contains("larger or deeper"));
        }
        assert!(read("a: &a { b: c }\nd: [*a, *a, *a]").is_ok());
        // Many such texts in one file cost at most the file's length.
        let short = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\n";
        assert!(read(short).unwrap_err().contains("line 3: larger or deeper"));
        let doc = read("a: [b]").unwrap();
        let problem =
            Field::root(&doc, Decoder::Json).get("a").unwrap().text().unwrap_err().to_string();
        assert_eq!(problem, "line 1: `a` is a list, where a text is expected");
        let doc = read("\"a\\n\\e\": |\n  b: 1\n  c: 2\n").unwrap();
        let Is::Map(entries) = &doc.is else { panic!("{doc:?}") };
        let problem = Field::root(&doc, Decoder::Json)
            .get(&entries[0].0)
            .unwrap()
            .items()
            .unwrap_err()
            .to_string();
        assert_eq!(
            problem,
            "line 1: `a\\n\\u{1b}` is a text of several lines, where a list is expected"
        );
    }

    #[test]
    fn a_text_in_a_file_has_the_lines_of_the_file() {
        let file = "data:\n  a: |-\n    x: 1\n\n    y: [\n      2 ]\n  b: \"x: 1\\ny: 2\"\n  c: >\n    x: 1\n\n    y: 2\n  d: |2\n\n    x: 1\n";
        let doc = read(file).unwrap();
        let data = Field::root(&doc, Decoder::Yaml).get("data").unwrap();
        let lines = |key: &str, of: &str| {
            let text = data.get(key).unwrap().scalar_text().unwrap();
            let inner = Doc::parse(&text.text, text.lines).unwrap();
            let field = Field::root(&inner[0], Decoder::Yaml).get(of).unwrap();
            field.items().map_or(field.line(), |items| items[0].line())
        };
        assert_eq!((lines("a", "x"), lines("a", "y")), (3, 6));
        assert_eq!((lines("b", "x"), lines("b", "y")), (7, 7));
        assert_eq!(lines("d", "x"), 14);
        let folded = data.get("c").unwrap().scalar_text().unwrap();
        assert!(matches!(folded.lines, Lines::In(8 | 9)), "{:?}", folded.lines);
    }

    #[test]
    fn a_hundred_thousand_keys_are_too_many_and_fifty_thousand_are_read_quickly() {
        let keys =
            |count: usize| (0..count).map(|n| format!("k{n}: &x{n} 1\n")).collect::<String>();
        assert!(read(&keys(100_000)).unwrap_err().contains("larger or deeper"));
        let doc = read(&keys(49_000)).unwrap();
        let root = Field::root(&doc, Decoder::Json);
        let (unread, more) = root.unread(100);
        assert_eq!((unread.len(), more), (100, 48_900));
        assert_eq!(root.entries().unwrap().len(), 49_000);
        assert_eq!(root.unread(100), (vec![], 0));
    }
}
