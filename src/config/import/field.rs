//! A node of the other plugin's file with its path, read by the rules of that plugin's decoder.

use super::doc::{Doc, Is, Scalar, State};
use super::error::ImportError;

/// The decoder that a plugin reads its file with. Every decoder ignores unknown keys. If a key
/// occurs twice, the last one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decoder {
    /// Go's encoding/json: keys in any case; a number is no text.
    Json,
    /// sigs.k8s.io/yaml and github.com/ghodss/yaml: YAML 1.1, converted to JSON with sorted keys,
    /// then read as JSON. A number is accepted as a text, and `yes` and `on` are `true`.
    JsonOfYaml,
    /// viper and mapstructure: keys in any case, YAML 1.2.
    Viper,
    /// gopkg.in/yaml.v2: keys in their exact spelling, YAML 1.1.
    Yaml,
}

/// The type that a decoder gives a scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Truth(bool),
    Whole(i64),
    Real,
}

/// A node with its path.
#[derive(Debug, Clone)]
pub(super) struct Field<'a> {
    doc: &'a Doc,
    /// Such as `flags.plugin.deviceListStrategy` or `devices[0].name`.
    pub(super) path: String,
    decoder: Decoder,
    /// Below here the plugin looks keys up itself: in their exact spelling, and without converting
    /// a number to a text.
    is_exact: bool,
}

/// A part of a file that was not read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unread {
    pub(super) path: String,
    pub(super) line: usize,
    /// The line of the same key that counts instead.
    pub(super) overruled_by: Option<usize>,
}

impl<'a> Field<'a> {
    pub(super) fn root(doc: &'a Doc, decoder: Decoder) -> Self {
        Field::at(doc, decoder, "")
    }

    /// A part of a file that is a file of its own, with its path.
    pub(super) fn at(doc: &'a Doc, decoder: Decoder, path: &str) -> Self {
        doc.state.set(State::Read);
        Field { doc, path: path.to_owned(), decoder, is_exact: false }
    }

    /// The same field, where the plugin looks keys up itself.
    pub(super) fn exact(&self) -> Self {
        Field { is_exact: true, ..self.clone() }
    }

    pub(super) fn doc(&self) -> &'a Doc {
        self.doc
    }

    pub(super) fn decoder(&self) -> Decoder {
        self.decoder
    }

    pub(super) fn line(&self) -> usize {
        self.doc.line
    }

    /// The path and the line, for a message.
    pub(super) fn place(&self) -> String {
        let path = if self.path.is_empty() { "the file" } else { &self.path };
        format!("`{path}` (line {})", self.doc.line)
    }

    /// The same, for a part of the resource of this name.
    pub(super) fn place_of(&self, name: &str) -> String {
        format!("`{}` (line {}, {name})", self.path, self.doc.line)
    }

    /// The field below a key; `None` if it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<Field<'a>> {
        #[cfg(test)]
        super::tests::record_lookup(&join(&self.path, key));
        let Is::Map(map) = &self.doc.is else { return None };
        let is_plugin_container =
            |name: &str| if self.folds() { name.eq_ignore_ascii_case(key) } else { name == key };
        let mut found: Option<&'a (String, Doc)> = None;
        for entry in map.iter().filter(|(name, doc)| {
            is_plugin_container(name) && !matches!(doc.state.get(), State::Overruled(_))
        }) {
            entry.1.state.set(State::Read);
            // Null never overrides another value.
            let counts = |earlier: &(String, Doc)| {
                !matches!(entry.1.is, Is::Null) && (!self.sorts() || earlier.0 <= entry.0)
            };
            match found {
                Some(earlier) if matches!(earlier.1.is, Is::Null) || counts(earlier) => {
                    earlier.1.state.set(State::Overruled(entry.1.line));
                    found = Some(entry);
                }
                Some(earlier) => entry.1.state.set(State::Overruled(earlier.1.line)),
                None => found = Some(entry),
            }
        }
        let (name, doc) = found?;
        (!matches!(doc.is, Is::Null)).then(|| self.below(join(&self.path, name), doc))
    }

    fn below(&self, path: String, doc: &'a Doc) -> Field<'a> {
        Field { doc, path, decoder: self.decoder, is_exact: self.is_exact }
    }

    fn folds(&self) -> bool {
        !self.is_exact && self.decoder != Decoder::Yaml
    }

    /// Whether keys are sorted before they are read, so that the alphabetically last one counts.
    fn sorts(&self) -> bool {
        self.decoder == Decoder::JsonOfYaml
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.doc.is, Is::Map(_))
    }

    pub(super) fn is_list(&self) -> bool {
        matches!(self.doc.is, Is::List(_))
    }

    /// The keys of a map and their fields, without null values.
    pub(super) fn entries(&self) -> Result<Vec<(&'a str, Field<'a>)>, ImportError> {
        let Is::Map(map) = &self.doc.is else { return Err(self.wrong("a mapping")) };
        let mut entries = Vec::with_capacity(map.len());
        for (key, doc) in
            map.iter().filter(|(_, doc)| !matches!(doc.state.get(), State::Overruled(_)))
        {
            doc.state.set(State::Read);
            if !matches!(doc.is, Is::Null) {
                entries.push((key.as_str(), self.below(join(&self.path, key), doc)));
            }
        }
        Ok(entries)
    }

    /// The elements of a list.
    pub(super) fn items(&self) -> Result<Vec<Field<'a>>, ImportError> {
        let Is::List(list) = &self.doc.is else { return Err(self.wrong("a list")) };
        let field = |(index, doc): (usize, &'a Doc)| {
            doc.state.set(State::Read);
            self.below(format!("{}[{index}]", self.path), doc)
        };
        Ok(list.iter().enumerate().map(field).collect())
    }

    fn scalar(&self) -> Option<&'a Scalar> {
        if let Is::Scalar(scalar) = &self.doc.is { Some(scalar) } else { None }
    }

    fn kind(&self) -> Option<Kind> {
        let scalar = self.scalar()?;
        Some(if scalar.is_plain {
            kind(&scalar.text, matches!(self.decoder, Decoder::JsonOfYaml | Decoder::Yaml))
        } else {
            Kind::Text
        })
    }

    pub(super) fn text(&self) -> Result<&'a str, ImportError> {
        let coerces = !self.is_exact && matches!(self.decoder, Decoder::JsonOfYaml | Decoder::Yaml);
        match (self.scalar(), self.kind()) {
            (Some(scalar), Some(kind)) if kind == Kind::Text || coerces => Ok(&scalar.text),
            (Some(_), _) => Err(self.wrong("a text in quotes")),
            (None, _) => Err(self.wrong("a text")),
        }
    }

    /// A text that contains a file, with its lines.
    pub(super) fn scalar_text(&self) -> Result<&'a Scalar, ImportError> {
        self.scalar().ok_or_else(|| self.wrong("a text"))
    }

    pub(super) fn truth(&self) -> Result<bool, ImportError> {
        match self.kind() {
            Some(Kind::Truth(truth)) => Ok(truth),
            _ => Err(self.wrong("`true` or `false`")),
        }
    }

    pub(super) fn number(&self) -> Result<u32, ImportError> {
        const WANTED: &str = "a whole number that is not negative";
        let whole = match (self.scalar(), self.kind()) {
            (_, Some(Kind::Whole(whole))) => Some(whole),
            // JSON made from YAML, and Go's conversions, drop a fraction of zero.
            (Some(scalar), Some(Kind::Real)) if self.decoder != Decoder::Json => {
                scalar.text.strip_suffix(".0").and_then(|whole| whole.parse().ok())
            }
            _ => None,
        };
        whole.and_then(|whole| u32::try_from(whole).ok()).ok_or_else(|| self.wrong(WANTED))
    }

    /// A list of texts.
    pub(super) fn texts(&self) -> Result<Vec<String>, ImportError> {
        self.items()?.iter().map(|item| item.text().map(str::to_owned)).collect()
    }

    /// Whether the value has a meaning: it is not an empty text, list or map, and not `false`.
    pub(super) fn has_effect(&self) -> bool {
        match &self.doc.is {
            Is::Null => false,
            Is::Scalar(scalar) => {
                !(scalar.text.is_empty()
                    || scalar.is_plain && matches!(self.kind(), Some(Kind::Truth(false))))
            }
            Is::List(list) => !list.is_empty(),
            Is::Map(map) => !map.is_empty(),
        }
    }

    /// Marks all nodes below as read.
    pub(super) fn read_all(&self) {
        self.doc.read_all();
    }

    /// The first `most` parts that were not read, and the number of further ones. Nodes below an
    /// unread node are not counted.
    pub(super) fn unread(&self, most: usize) -> (Vec<Unread>, usize) {
        fn walk(path: &str, doc: &Doc, report: &mut dyn FnMut(&str, &Doc)) {
            if doc.state.get() != State::Read {
                return report(path, doc);
            }
            match &doc.is {
                Is::Null | Is::Scalar(_) => {}
                Is::List(list) => list
                    .iter()
                    .enumerate()
                    .for_each(|(index, doc)| walk(&format!("{path}[{index}]"), doc, report)),
                Is::Map(map) => {
                    map.iter().for_each(|(key, doc)| walk(&join(path, key), doc, report));
                }
            }
        }
        let (mut unread, mut more) = (Vec::new(), 0);
        walk(&self.path, self.doc, &mut |path, doc| {
            if unread.len() < most {
                let overruled_by =
                    if let State::Overruled(by) = doc.state.get() { Some(by) } else { None };
                unread.push(Unread { path: path.to_owned(), line: doc.line, overruled_by });
            } else {
                more += 1;
            }
        });
        (unread, more)
    }

    pub(super) fn wrong(&self, wanted: &str) -> ImportError {
        let found = match &self.doc.is {
            Is::Null => "nothing".to_owned(),
            Is::Scalar(Scalar { text, .. }) if text.contains('\n') => {
                "a text of several lines".to_owned()
            }
            Is::Scalar(Scalar { text, .. }) if text.chars().count() > 200 => {
                "a long text".to_owned()
            }
            Is::Scalar(Scalar { text, is_plain: true, .. }) => format!("`{text}`"),
            Is::Scalar(Scalar { text, is_plain: false, .. }) => format!("the text `{text}`"),
            Is::List(_) => "a list".to_owned(),
            Is::Map(_) => "a mapping".to_owned(),
        };
        let path = if self.path.is_empty() { "the file" } else { &self.path };
        ImportError::new(format!(
            "line {}: `{path}` is {found}, where {wanted} is expected",
            self.doc.line
        ))
    }
}

/// The type of a scalar without quotes. In YAML 1.1 `yes` and `on` are truth values too, and
/// numbers with a leading 0 are octal.
fn kind(text: &str, is_old: bool) -> Kind {
    match text {
        "true" | "True" | "TRUE" => return Kind::Truth(true),
        "false" | "False" | "FALSE" => return Kind::Truth(false),
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" if is_old => {
            return Kind::Truth(true);
        }
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" if is_old => {
            return Kind::Truth(false);
        }
        _ => {}
    }
    let (sign, digits) = text
        .strip_prefix('-')
        .map_or((1, text.strip_prefix('+').unwrap_or(text)), |digits| (-1, digits));
    let begins = digits.starts_with(|c: char| c.is_ascii_digit());
    let in_radix = |digits: &str, radix| i64::from_str_radix(&digits.replace('_', ""), radix).ok();
    let whole = match digits.split_at_checked(2) {
        Some(("0x", rest)) => in_radix(rest, 16),
        Some(("0o", rest)) => in_radix(rest, 8),
        Some(("0b", rest)) => in_radix(rest, 2),
        _ if begins && is_old && digits.len() > 1 && digits.starts_with('0') => in_radix(digits, 8),
        _ if begins => in_radix(digits, 10),
        _ => None,
    };
    let is_real = || {
        digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
            && digits.parse::<f64>().is_ok()
    };
    match whole {
        Some(whole) => Kind::Whole(sign * whole),
        None if is_real() => Kind::Real,
        None => Kind::Text,
    }
}

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::super::doc::Lines;
    use super::*;

    fn doc(text: &str) -> Doc {
        Doc::parse(text, Lines::From(1)).unwrap().remove(0)
    }

    #[test]
    fn a_key_is_found_by_the_rules_of_the_decoder() {
        use Decoder::{Json, JsonOfYaml, Viper, Yaml};
        for (text, decoder, expected) in [
            ("{\"IsRdma\": true}", Json, Some(true)),
            ("{\"ISRDMA\": true}", Viper, Some(true)),
            ("IsRdma: true", Yaml, None),
            ("isRdma: true", Yaml, Some(true)),
            // The last one counts, in any case.
            ("{\"isRdma\": true, \"IsRdma\": false}", Json, Some(false)),
            ("{\"IsRdma\": false, \"isRdma\": true}", Json, Some(true)),
            ("{\"isRdma\": true, \"isRdma\": false}", Json, Some(false)),
            // YAML that becomes JSON has its keys sorted first.
            ("isRdma: true\nIsRdma: false", JsonOfYaml, Some(true)),
            ("isRdma: true\nisRdma: false", JsonOfYaml, Some(false)),
            ("isRdma: true\nIsRdma: false\n", Yaml, Some(true)),
            // Null has no effect.
            ("{\"isRdma\": true, \"IsRdma\": null}", Json, Some(true)),
            ("{\"isRdma\": null}", Json, None),
            ("{}", Json, None),
        ] {
            let doc = doc(text);
            let root = Field::root(&doc, decoder);
            assert_eq!(root.get("isRdma").map(|field| field.truth().unwrap()), expected, "{text}");
        }
        let exact = doc("IsRdma: true");
        assert!(Field::root(&exact, JsonOfYaml).exact().get("isRdma").is_none());
        let twice = doc("{\n\"isRdma\": true,\n\"IsRdma\": false,\n\"isRdma\": true}");
        let root = Field::root(&twice, Json);
        root.get("isRdma").unwrap();
        let unread =
            |path: &str, line, by| Unread { path: path.to_owned(), line, overruled_by: Some(by) };
        assert_eq!(root.unread(9).0, [unread("isRdma", 2, 4), unread("IsRdma", 3, 4)]);
    }

    #[test]
    fn a_scalar_is_converted_by_the_rules_of_the_decoder() {
        use Decoder::{Json, JsonOfYaml, Viper, Yaml};
        let truth = |text: &str, decoder| Field::root(&doc(text), decoder).truth().ok();
        for decoder in [Json, JsonOfYaml, Viper, Yaml] {
            assert_eq!(
                (truth("true", decoder), truth("false", decoder)),
                (Some(true), Some(false))
            );
            assert_eq!(
                (truth("'true'", decoder), truth("1", decoder), truth("!!str true", decoder)),
                (None, None, None)
            );
        }
        assert_eq!(
            (truth("yes", JsonOfYaml), truth("off", Yaml), truth("yes", Json), truth("on", Viper)),
            (Some(true), Some(false), None, None)
        );
        let number = |text: &str, decoder| Field::root(&doc(text), decoder).number().ok();
        for decoder in [Json, JsonOfYaml, Viper, Yaml] {
            assert_eq!((number("16384", decoder), number("0", decoder)), (Some(16384), Some(0)));
            for text in [
                "-1",
                "'4'",
                "4294967296",
                "99999999999999999999",
                "four",
                "4.5",
                "true",
                "[4]",
                "4e400",
                ".",
            ] {
                assert_eq!(number(text, decoder), None, "{text}");
            }
        }
        assert_eq!(
            (
                number("0x10", Yaml),
                number("010", Yaml),
                number("010", Viper),
                number("1_000", Yaml)
            ),
            (Some(16), Some(8), Some(10), Some(1000))
        );
        assert_eq!((number("4.0", JsonOfYaml), number("4.0", Json)), (Some(4), None));
        let text = |text: &str, decoder| {
            Field::root(&doc(text), decoder)
                .text()
                .map(str::to_owned)
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            (text("8086", JsonOfYaml), text("on", Yaml)),
            (Ok("8086".into()), Ok("on".into()))
        );
        assert_eq!(
            (text("101e", Json), text("'8086'", Json), text("15b3", Viper)),
            (Ok("101e".into()), Ok("8086".into()), Ok("15b3".into()))
        );
        let problem = "line 1: `the file` is `8086`, where a text in quotes is expected";
        assert_eq!(
            (text("8086", Json), text("8086", Viper)),
            (Err(problem.into()), Err(problem.into()))
        );
        let exact = doc("8086");
        assert!(Field::root(&exact, JsonOfYaml).exact().text().is_err());
    }
}
