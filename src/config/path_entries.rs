//! The entries of `paths` and `nodes`, as serde types.

use crate::domain::NodePattern;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor, value::MapAccessDeserializer};
use std::collections::BTreeMap;

/// A path: a glob, or a table with options.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) host: NodePattern,
    pub(super) container: Option<String>,
    pub(super) permissions: Option<String>,
    /// Only for a member of a group, and for a node that goes with a device.
    pub(super) optional: Option<bool>,
    /// Only for an entry of `paths`: properties of udev, with globs.
    pub(super) udev: BTreeMap<String, String>,
}

/// USB devices by their ids, in hexadecimal digits.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Usb {
    pub(super) vendor: String,
    pub(super) product: Option<String>,
    pub(super) serial: Option<String>,
}

/// A path, several that are one device, or USB devices.
#[derive(Debug)]
pub(super) enum PathOrGroup {
    Path(Path),
    Group(Vec<Path>),
    Usb(Usb),
}

impl<'de> Deserialize<'de> for Path {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match PathOrGroup::deserialize(deserializer)? {
            PathOrGroup::Path(path) => Ok(path),
            PathOrGroup::Group(_) => {
                Err(D::Error::custom("a `group` cannot be here, only in `paths` itself"))
            }
            PathOrGroup::Usb(_) => {
                Err(D::Error::custom("`usb` cannot be here, only in `paths` itself"))
            }
        }
    }
}

/// Implemented by hand: serde's `untagged` answers a misspelt key with "did not match any variant".
impl<'de> Deserialize<'de> for PathOrGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            host: Option<String>,
            regex: Option<String>,
            group: Option<Vec<Path>>,
            usb: Option<Usb>,
            container: Option<String>,
            permissions: Option<String>,
            optional: Option<bool>,
            udev: Option<BTreeMap<String, String>>,
        }

        struct TextOrTable;

        impl<'de> Visitor<'de> for TextOrTable {
            type Value = PathOrGroup;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a path, or a table such as { host = \"/dev/fuse\", container = \"/dev/fuse\", permissions = \"rwm\" }")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<PathOrGroup, E> {
                let (container, permissions, optional) = (None, None, None);
                let (host, udev) = (text.into(), BTreeMap::new());
                Ok(PathOrGroup::Path(Path { host, container, permissions, optional, udev }))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PathOrGroup, A::Error> {
                let Table { host, regex, group, usb, container, permissions, optional, udev } =
                    Table::deserialize(MapAccessDeserializer::new(map))?;
                let is_alone = host.is_none()
                    && regex.is_none()
                    && container.is_none()
                    && permissions.is_none()
                    && optional.is_none()
                    && udev.is_none();
                match (group, usb) {
                    (None, None) => {}
                    (Some(group), None) if is_alone => return Ok(PathOrGroup::Group(group)),
                    (None, Some(usb)) if is_alone => return Ok(PathOrGroup::Usb(usb)),
                    (Some(_), _) => {
                        return Err(A::Error::custom(
                            "a table with `group` has no other key: set the others in its members",
                        ));
                    }
                    (None, Some(_)) => {
                        return Err(A::Error::custom("a table with `usb` has no other key"));
                    }
                }
                let host = match (host, regex) {
                    (Some(host), None) => NodePattern::Glob(host),
                    (None, Some(regex)) => NodePattern::Regex(regex),
                    (Some(_), Some(_)) => {
                        return Err(A::Error::custom(
                            "`host` and `regex` exclude each other: give one of them",
                        ));
                    }
                    (None, None) => return Err(A::Error::missing_field("host")),
                };
                let udev = udev.unwrap_or_default();
                Ok(PathOrGroup::Path(Path { host, container, permissions, optional, udev }))
            }
        }

        deserializer.deserialize_any(TextOrTable)
    }
}
