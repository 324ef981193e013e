//! The other plugin's file: YAML, of which JSON is a part, that remembers what of it was read.

use super::ImportError;
use granit_parser::{Event, Parser, ScalarStyle, StrInput};
use std::cell::Cell;
use std::collections::BTreeMap;

/// Deeper than any plugin's configuration; each step is a call within a call.
const DEPTH_MAX: usize = 32;
/// A file may name a part of itself again and again: what comes of it has an end.
const NODES_MAX: usize = 50_000;

/// A node of the file.
#[derive(Debug, Clone)]
pub(super) struct Doc {
    line: usize,
    is: Is,
    read: Cell<bool>,
}

#[derive(Debug, Clone)]
enum Is {
    Null,
    Text(String),
    List(Vec<Doc>),
    Map(Vec<(String, Doc)>),
}

impl Doc {
    /// Every document of a file.
    ///
    /// # Errors
    /// What is neither YAML nor JSON, with its line.
    pub(super) fn parse(text: &str) -> Result<Vec<Doc>, ImportError> {
        let mut builder = Builder { events: Parser::new_from_str(text), anchors: BTreeMap::new(), nodes: 0 };
        let mut documents = Vec::new();
        while let Some((event, line)) = builder.next()? {
            if matches!(event, Event::Scalar(..) | Event::SequenceStart(..) | Event::MappingStart(..) | Event::Alias(_)) {
                documents.push(builder.node(event, line, 0)?);
            }
        }
        Ok(documents)
    }

    fn new(line: usize, is: Is) -> Self {
        Doc { line, is, read: Cell::new(false) }
    }

    fn count(&self) -> usize {
        1 + match &self.is {
            Is::Null | Is::Text(_) => 0,
            Is::List(list) => list.iter().map(Doc::count).sum(),
            Is::Map(map) => map.iter().map(|(_, doc)| doc.count()).sum(),
        }
    }
}

struct Builder<'a> {
    events: Parser<'a, StrInput<'a>>,
    /// What an alias stands for, by the anchor's number.
    anchors: BTreeMap<usize, Doc>,
    nodes: usize,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Result<Option<(Event<'a>, usize)>, ImportError> {
        match self.events.next() {
            None => Ok(None),
            Some(Ok((event, span))) => Ok(Some((event, span.start.line()))),
            Some(Err(error)) => {
                let why = error.info();
                let why = why.lines().next().unwrap_or("not YAML");
                Err(ImportError::new(format!("line {}: neither YAML nor JSON: {why}", error.marker().line())))
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
        if self.nodes > NODES_MAX || depth > DEPTH_MAX {
            return Err(ImportError::new(format!("line {line}: larger or deeper than a configuration can be")));
        }
        let (doc, anchor) = match event {
            Event::Scalar(text, style, anchor, _) => {
                let is_null = style == ScalarStyle::Plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
                (Doc::new(line, if is_null { Is::Null } else { Is::Text(text.into_owned()) }), anchor)
            }
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
            Event::MappingStart(_, anchor, _) => (Doc::new(line, Is::Map(self.map(depth)?)), anchor),
            Event::Alias(anchor) => {
                let meant = self.anchors.get(&anchor).cloned();
                let meant = meant.ok_or_else(|| ImportError::new(format!("line {line}: an alias of something that holds it")))?;
                self.nodes += meant.count();
                (Doc { line, ..meant }, 0)
            }
            _ => return Err(ImportError::new(format!("line {line}: a value is missing"))),
        };
        if anchor > 0 {
            self.anchors.insert(anchor, doc.clone());
        }
        Ok(doc)
    }

    fn map(&mut self, depth: usize) -> Result<Vec<(String, Doc)>, ImportError> {
        let mut map: Vec<(String, Doc)> = Vec::new();
        loop {
            let (event, line) = self.expect()?;
            let key = match event {
                Event::MappingEnd => return Ok(map),
                Event::Scalar(key, ..) => key.into_owned(),
                _ => return Err(ImportError::new(format!("line {line}: a key is a text"))),
            };
            if map.iter().any(|(there, _)| *there == key) {
                return Err(ImportError::new(format!("line {line}: the key `{key}` is there twice")));
            }
            let (event, line) = self.expect()?;
            map.push((key, self.node(event, line, depth + 1)?));
        }
    }
}

/// A node of the file and the way to it, for whoever reads it.
#[derive(Debug, Clone)]
pub(super) struct Field<'a> {
    doc: &'a Doc,
    /// Such as `flags.plugin.deviceListStrategy` or `devices[0].name`.
    pub(super) path: String,
}

impl<'a> Field<'a> {
    pub(super) fn root(doc: &'a Doc) -> Self {
        doc.read.set(true);
        Field { doc, path: String::new() }
    }

    /// What is below a key; `None` when it is not there, or null.
    pub(super) fn get(&self, key: &str) -> Option<Field<'a>> {
        let Is::Map(map) = &self.doc.is else { return None };
        let doc = map.iter().find(|(name, _)| name == key).map(|(_, doc)| doc)?;
        doc.read.set(true);
        (!matches!(doc.is, Is::Null)).then(|| Field { doc, path: join(&self.path, key) })
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.doc.is, Is::Map(_))
    }

    pub(super) fn is_list(&self) -> bool {
        matches!(self.doc.is, Is::List(_))
    }

    /// The keys of a map with what is below them.
    pub(super) fn entries(&self) -> Result<Vec<(&'a str, Field<'a>)>, ImportError> {
        let Is::Map(map) = &self.doc.is else { return Err(self.wrong("keys and values")) };
        Ok(map.iter().filter_map(|(key, _)| Some((key.as_str(), self.get(key)?))).collect())
    }

    /// The elements of a list.
    pub(super) fn items(&self) -> Result<Vec<Field<'a>>, ImportError> {
        let Is::List(list) = &self.doc.is else { return Err(self.wrong("a list")) };
        let field = |(index, doc): (usize, &'a Doc)| {
            doc.read.set(true);
            Field { doc, path: format!("{}[{index}]", self.path) }
        };
        Ok(list.iter().enumerate().map(field).collect())
    }

    pub(super) fn text(&self) -> Result<&'a str, ImportError> {
        match &self.doc.is {
            Is::Text(text) => Ok(text),
            _ => Err(self.wrong("a text")),
        }
    }

    pub(super) fn truth(&self) -> Result<bool, ImportError> {
        match self.text()?.to_ascii_lowercase().as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.wrong("`true` or `false`")),
        }
    }

    pub(super) fn number(&self) -> Result<u32, ImportError> {
        self.text()?.parse().map_err(|_| self.wrong("a whole number that is not negative"))
    }

    /// A list of texts, or one text alone.
    pub(super) fn texts(&self) -> Result<Vec<String>, ImportError> {
        if !self.is_list() {
            return Ok(vec![self.text()?.to_owned()]);
        }
        self.items()?.iter().map(|item| item.text().map(str::to_owned)).collect()
    }

    /// Whether anything is said: not an empty text, list or map, not `false`.
    pub(super) fn says_something(&self) -> bool {
        match &self.doc.is {
            Is::Null => false,
            Is::Text(text) => !matches!(text.as_str(), "" | "false"),
            Is::List(list) => !list.is_empty(),
            Is::Map(map) => !map.is_empty(),
        }
    }

    /// Everything below counts as read.
    pub(super) fn read_all(&self) {
        fn all(doc: &Doc) {
            doc.read.set(true);
            match &doc.is {
                Is::Null | Is::Text(_) => {}
                Is::List(list) => list.iter().for_each(all),
                Is::Map(map) => map.iter().for_each(|(_, doc)| all(doc)),
            }
        }
        all(self.doc);
    }

    /// The way to everything that nobody read, with its line; not to what lies below that.
    pub(super) fn unread(&self) -> Vec<(String, usize)> {
        fn walk(path: &str, doc: &Doc, unread: &mut Vec<(String, usize)>) {
            if !doc.read.get() {
                return unread.push((path.to_owned(), doc.line));
            }
            match &doc.is {
                Is::Null | Is::Text(_) => {}
                Is::List(list) => list.iter().enumerate().for_each(|(index, doc)| walk(&format!("{path}[{index}]"), doc, unread)),
                Is::Map(map) => map.iter().for_each(|(key, doc)| walk(&join(path, key), doc, unread)),
            }
        }
        let mut unread = Vec::new();
        walk(&self.path, self.doc, &mut unread);
        unread
    }

    pub(super) fn wrong(&self, wanted: &str) -> ImportError {
        let found = match &self.doc.is {
            Is::Null => "nothing".to_owned(),
            Is::Text(text) if text.contains('\n') => "a text of several lines".to_owned(),
            Is::Text(text) => format!("`{text}`"),
            Is::List(_) => "a list".to_owned(),
            Is::Map(_) => "keys and values".to_owned(),
        };
        let path = if self.path.is_empty() { "the file" } else { &self.path };
        ImportError::new(format!("line {}: `{path}` is {found}, where {wanted} is expected", self.doc.line))
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Doc, String> {
        let mut documents = Doc::parse(text).map_err(|error| error.to_string())?;
        Ok(documents.remove(0))
    }

    #[test]
    fn yaml_and_json_are_read_alike_and_what_nobody_read_is_told() {
        let yaml = "# a comment\na: &it { b: [1, 'x'], c: ~ }\nd: *it\ne: |\n  text\n";
        let json = "{\n\t\"a\": {\"b\": [1, \"x\"], \"c\": null},\n\t\"d\": {\"b\": [1, \"x\"], \"c\": null},\n\t\"e\": \"text\\n\"\n}\n";
        for text in [yaml, json] {
            let doc = read(text).unwrap();
            let root = Field::root(&doc);
            let b = root.get("a").unwrap().get("b").unwrap();
            assert_eq!((b.texts().unwrap(), b.items().unwrap()[0].number().unwrap()), (vec!["1".to_owned(), "x".into()], 1));
            assert!(root.get("a").unwrap().get("c").is_none());
            assert_eq!(root.get("e").unwrap().text().unwrap(), "text\n");
            assert_eq!(root.unread(), [("d".to_owned(), 3)]);
            root.get("d").unwrap().read_all();
            assert_eq!(root.unread(), []);
        }
    }

    #[test]
    fn every_mistake_has_its_line() {
        for (text, expected) in [
            ("a: [1\nb: 2", "line 2: neither YAML nor JSON: "),
            ("a: 1\na: 2", "line 2: the key `a` is there twice"),
            ("? [a]\n: 1", "line 1: a key is a text"),
            ("a: &x [*x]", "line 1: an alias of something that holds it"),
            (&["[".repeat(40), "]".repeat(40)].concat(), "line 1: larger or deeper"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
        let bomb: String = (0..9)
            .map(|n| format!("a{n}: &a{n} [{}]\n", if n == 0 { "x, x".into() } else { vec![format!("*a{}", n - 1); 9].join(", ") }))
            .collect();
        assert!(read(&bomb).unwrap_err().contains("larger or deeper"));
        let doc = read("a: [b]").unwrap();
        let said = Field::root(&doc).get("a").unwrap().text().unwrap_err().to_string();
        assert_eq!(said, "line 1: `a` is a list, where a text is expected");
        let doc = read("\"a\\n\\e\": |\n  b: 1\n  c: 2\n").unwrap();
        let Is::Map(entries) = &doc.is else { panic!("{doc:?}") };
        let said = Field::root(&doc).get(&entries[0].0).unwrap().items().unwrap_err().to_string();
        assert_eq!(said, "line 2: `a\\n\\u{1b}` is a text of several lines, where a list is expected");
    }
}
