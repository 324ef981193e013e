//! The tree as a serde deserializer: types are read from values with places, so every error has its
//! place.

use super::ConfigError;
use super::error::{hidden, unknown, wrong_type};
use super::tree::{Entry, Is, Place, Table, Value};
use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, Expected, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};
use serde::{Deserialize, forward_to_deserialize_any};
use std::fmt;

/// Reads a table.
///
/// # Errors
/// The first error, with the place of its key or its value; without a place if a key of the table
/// itself is missing.
pub(super) fn read<'de, T: Deserialize<'de>>(table: &'de Table) -> Result<T, ConfigError> {
    T::deserialize(Whole(table)).map_err(|Mistake(error)| *error)
}

/// A whole number in any of TOML's notations.
pub(super) fn number(text: &str) -> Option<i64> {
    let radix = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find_map(|(prefix, radix)| Some((text.strip_prefix(prefix)?, radix)));
    let (digits, radix) = radix.unwrap_or((text, 10));
    i64::from_str_radix(digits, radix).ok()
}

/// An error that serde finds, in our words.
#[derive(Debug)]
pub(super) struct Mistake(Box<ConfigError>);

impl Mistake {
    fn with_problem(problem: String) -> Self {
        Mistake(Box::new(ConfigError::new(problem)))
    }

    /// Adds a place, unless the error has a nearer one.
    fn at(self, place: Option<&Place>) -> Self {
        if self.0.line().is_some() { self } else { Mistake(Box::new(self.0.at(place))) }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Mistake {}

impl Error for Mistake {
    /// A custom message may quote any value of the file.
    fn custom<T: fmt::Display>(message: T) -> Self {
        Mistake::with_problem(hidden(message))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Mistake::with_problem(wrong_type(&found, &expected.to_string()))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Mistake::with_problem(wrong_type(&found, &expected.to_string()))
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Mistake::with_problem(format!("found {length} values, where {expected} is expected"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Mistake::with_problem(unknown("value", variant, expected))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Mistake::with_problem(unknown("key", field, expected))
    }

    fn missing_field(field: &'static str) -> Self {
        Mistake::with_problem(format!("the key `{field}` is missing"))
    }

    fn duplicate_field(field: &'static str) -> Self {
        Mistake::with_problem(format!("`{field}` occurs twice"))
    }
}

struct Whole<'de>(&'de Table);

impl<'de> Deserializer<'de> for Whole<'de> {
    type Error = Mistake;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        visitor.visit_map(Entries { left: &self.0.0, value: None })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> Deserializer<'de> for &'de Value {
    type Error = Mistake;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        let read = match &self.is {
            Is::Text(text) => visitor.visit_borrowed_str(text),
            Is::Plain(plain) => match (number(plain), plain.as_str()) {
                (Some(number), _) => visitor.visit_i64(number),
                (None, "true") => visitor.visit_bool(true),
                (None, "false") => visitor.visit_bool(false),
                (None, other) => match other.parse() {
                    Ok(fraction) => visitor.visit_f64(fraction),
                    Err(_) => {
                        Err(Mistake::invalid_type(Unexpected::Other("date or time"), &visitor))
                    }
                },
            },
            Is::List(list) => visitor.visit_seq(Items(list)),
            Is::Table(Table(entries)) => visitor.visit_map(Entries { left: entries, value: None }),
        };
        read.map_err(|mistake| mistake.at(self.place.as_ref()))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        let read = match &self.is {
            Is::Text(text) => visitor.visit_enum(TextVariant(text)),
            Is::Plain(plain) => {
                Err(Mistake::invalid_type(Unexpected::Other(plain), &"a text in quotes"))
            }
            Is::List(_) => Err(Mistake::invalid_type(Unexpected::Seq, &"a text in quotes")),
            Is::Table(_) => Err(Mistake::invalid_type(Unexpected::Map, &"a text in quotes")),
        };
        read.map_err(|mistake| mistake.at(self.place.as_ref()))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct
        map struct identifier ignored_any
    }
}

struct Items<'de>(&'de [Value]);

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = Mistake;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Mistake> {
        let Some((first, rest)) = self.0.split_first() else { return Ok(None) };
        self.0 = rest;
        seed.deserialize(first).map(Some)
    }
}

struct Entries<'de> {
    left: &'de [Entry],
    /// The value of the key that was read last.
    value: Option<&'de Value>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Mistake;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Mistake> {
        let Some((first, rest)) = self.left.split_first() else { return Ok(None) };
        (self.left, self.value) = (rest, Some(&first.value));
        seed.deserialize(StrDeserializer::new(&first.key))
            .map(Some)
            .map_err(|mistake: Mistake| mistake.at(first.place.as_ref()))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Mistake> {
        match self.value.take() {
            Some(value) => seed.deserialize(value),
            None => Err(Mistake::with_problem("a value is requested before its key".into())),
        }
    }
}

/// One word of an enumeration.
struct TextVariant<'de>(&'de str);

impl<'de> EnumAccess<'de> for TextVariant<'de> {
    type Error = Mistake;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Mistake> {
        Ok((seed.deserialize(StrDeserializer::new(self.0))?, self))
    }
}

impl<'de> VariantAccess<'de> for TextVariant<'de> {
    type Error = Mistake;

    fn unit_variant(self) -> Result<(), Mistake> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, Mistake> {
        Err(not_a_plain_text(&self))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Mistake> {
        Err(not_a_plain_text(&self))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Mistake> {
        Err(not_a_plain_text(&self))
    }
}

fn not_a_plain_text(word: &TextVariant<'_>) -> Mistake {
    Mistake::with_problem(format!("`{}` cannot be a plain text", hidden(word.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::path::Path;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Part {
        word: Kind,
        #[serde(default)]
        list: Vec<u32>,
        map: Option<BTreeMap<String, bool>>,
        share: Option<f64>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Kind {
        OneOf,
        Other,
    }

    fn part(text: &str) -> Result<Part, String> {
        let table = Table::parse(text, Path::new("f")).unwrap();
        read(&table).map_err(|error| {
            format!(
                "{:?}:{:?} {}",
                error.line().unwrap_or(0),
                error.column().unwrap_or(0),
                error.problem()
            )
        })
    }

    #[test]
    fn every_type_of_a_configuration_is_read() {
        let text = "word = \"one-of\"\nlist = [0x1F, 1_000, 0]\nmap = { a = true, \"b c\" = false }\nshare = 1e-1\n";
        let map = BTreeMap::from([("a".to_owned(), true), ("b c".to_owned(), false)]);
        assert_eq!(
            part(text),
            Ok(Part {
                word: Kind::OneOf,
                list: vec![31, 1000, 0],
                map: Some(map),
                share: Some(0.1)
            })
        );
        assert_eq!(
            part("word = \"other\""),
            Ok(Part { word: Kind::Other, list: vec![], map: None, share: None })
        );
    }

    #[test]
    fn every_mistake_has_its_place_and_is_reported_in_terms_of_toml() {
        let problem = |text: &str| part(text).unwrap_err();
        assert_eq!(
            problem("word = \"other\"\n\nlists = []"),
            "3:1 unknown key `lists`; did you mean `list`?"
        );
        assert_eq!(problem("word = \"othr\""), "1:8 unknown value `othr`; did you mean `other`?");
        assert_eq!(problem("word = [1]"), "1:8 found a list, where a text in quotes is expected");
        assert_eq!(
            problem("word = \"other\"\nlist = [1,\n  \"2\"]"),
            "3:3 found string \"2\", where a whole number that is not negative is expected"
        );
        assert_eq!(
            problem("word = \"other\"\nlist = [-1]"),
            "2:9 found integer `-1`, where a whole number that is not negative is expected"
        );
        assert_eq!(
            problem("word = \"other\"\nmap.a = 1979-05-27"),
            "2:9 found date or time, where `true` or `false` is expected"
        );
        assert_eq!(
            problem("word = \"other\"\nmap.a = 2"),
            "2:9 found integer `2`, where `true` or `false` is expected"
        );
        assert_eq!(problem("list = []"), "0:0 the key `word` is missing");
    }
}
