//! Names in the DRA API: of devices, pools and slices, and the rules of the API for them
//! (Kubernetes `pkg/apis/resource/validation`, apimachinery `util/validation`).
//!
//! A claim names a device by driver, pool and name. So the name of a device is a function of its
//! id, which is durable (I6), and of nothing else.

use super::DRIVER;
use crate::domain::{DeviceClass, DeviceId, PciAddress, ResourceName};
use std::fmt;

/// The longest DNS label, in bytes.
pub const LABEL_MAX: usize = 63;

/// The longest DNS subdomain, and the longest name of a pool, in bytes.
pub const SUBDOMAIN_MAX: usize = 253;

/// The longest part of a name that shows the id, in front of `-` and the hash.
const SHOWN_MAX: usize = LABEL_MAX - HASH_DIGITS - 1;

/// Hexadecimal digits of the hash in a name.
const HASH_DIGITS: usize = 8;

/// The name of a device: a DNS label. Different ids have different names, unless their hashes are
/// equal.
///
/// | id | name |
/// | --- | --- |
/// | `GPU-5CA1AB1E-0000-4000-8000-000000000000`, `MIG-…` | the same in lower case |
/// | `0000:18:00.1` | `0000-18-00-1` |
/// | `0000:18:00.0-gi3-ci0` | `0000-18-00-0-gi3-ci0` |
/// | any other: `/dev/fuse` | `dev-fuse-` and 8 hexadecimal digits of a hash |
/// | a share: `0000:18:00.1::2` | that of the device, and `-s2` |
///
/// The last word of a name shows its kind: only a share has `s` and digits there, and only a name
/// with a hash has 8 hexadecimal digits.
#[must_use]
pub fn device_name(id: &DeviceId) -> String {
    match share_of(id.as_str()) {
        Some((device, share)) => {
            let suffix = format!("-s{share}");
            format!("{}{suffix}", name_of(device, suffix.len()))
        }
        None => name_of(id.as_str(), 0),
    }
}

/// The name of one share of a pool (`sharing = pool`), whose ids are numbers. Each resource has the
/// same ones, so the name has the resource too.
#[must_use]
pub fn pooled_name(resource: &ResourceName, id: &DeviceId) -> String {
    hashed(&format!("{resource}#{id}"), 0)
}

/// The device and the number of a share, `id::2`. Only in the form that [`DeviceId::share`] writes:
/// `id::02` is no share.
fn share_of(id: &str) -> Option<(&str, u32)> {
    let (device, text) = id.rsplit_once("::")?;
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some((device, number))
}

/// A name with space for a suffix of `reserved` bytes.
fn name_of(id: &str, reserved: usize) -> String {
    readable(id)
        .filter(|name| name.len() + reserved <= LABEL_MAX)
        .unwrap_or_else(|| hashed(id, reserved))
}

/// The name of an id of a known shape.
fn readable(id: &str) -> Option<String> {
    let lower = id.to_ascii_lowercase();
    if ["gpu-", "mig-"].iter().any(|kind| lower.strip_prefix(kind).is_some_and(is_uuid)) {
        return Some(lower);
    }
    let (address, part) = id.split_once('-').map_or((id, None), |(at, part)| (at, Some(part)));
    // Only in the form that sysfs writes: one address has one name.
    address.parse::<PciAddress>().ok().filter(|parsed| parsed.to_string() == address)?;
    let address = address.replace([':', '.'], "-");
    match part {
        None => Some(address),
        Some(part) => is_readable_part(part).then(|| format!("{address}-{part}")),
    }
}

/// Whether the text is `8-4-4-4-12` hexadecimal digits.
fn is_uuid(text: &str) -> bool {
    let lengths = text.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
}

/// Whether the name of a part can stay as it is, and does not end as another kind of name does.
fn is_readable_part(part: &str) -> bool {
    let is_plain = |word: &str| {
        !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    };
    let last = part.rsplit('-').next().unwrap_or_default();
    let is_share = last.strip_prefix('s').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let is_hash = last.len() == HASH_DIGITS && last.bytes().all(|b| b.is_ascii_hexdigit());
    part.split('-').all(is_plain) && !is_share && !is_hash
}

/// The letters and digits of an id in lower case, and its hash.
fn hashed(id: &str, reserved: usize) -> String {
    let mut shown = String::new();
    for c in id.chars().map(|c| c.to_ascii_lowercase()) {
        if c.is_ascii_alphanumeric() {
            shown.push(c);
        } else if !shown.is_empty() && !shown.ends_with('-') {
            shown.push('-');
        }
    }
    shown.truncate(SHOWN_MAX - reserved);
    let shown = shown.trim_end_matches('-');
    let hash = hash(id);
    if shown.is_empty() { format!("{hash:08x}") } else { format!("{shown}-{hash:08x}") }
}

/// FNV-1a with 64 bits, folded to 32. It must never change: names in claims contain it.
pub(super) fn hash(text: &str) -> u32 {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    ((hash >> 32) ^ (hash & 0xffff_ffff)) as u32
}

/// The pools of a node. A change of one pool never makes another one incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// GPUs and their parts.
    Gpu,
    /// Network functions with and without RDMA: a function gets and loses RDMA with its driver, and
    /// must not change its pool then.
    Net,
    /// NVMe controllers and namespaces.
    Nvme,
    /// FPGAs.
    Fpga,
    /// Other accelerators.
    Accelerator,
    /// Nodes of `/dev`.
    Char,
}

impl Family {
    /// The family of a class; `None` for devices that are not published.
    #[must_use]
    pub fn of(class: DeviceClass) -> Option<Self> {
        Some(match class {
            DeviceClass::Gpu => Family::Gpu,
            DeviceClass::Rdma | DeviceClass::Nic => Family::Net,
            DeviceClass::Nvme => Family::Nvme,
            DeviceClass::Fpga => Family::Fpga,
            DeviceClass::Accelerator => Family::Accelerator,
            DeviceClass::Char => Family::Char,
            DeviceClass::Other => return None,
        })
    }

    /// The word in the name of the pool.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Family::Gpu => "gpu",
            Family::Net => "net",
            Family::Nvme => "nvme",
            Family::Fpga => "fpga",
            Family::Accelerator => "accelerator",
            Family::Char => "char",
        }
    }

    /// The longest word.
    const LONGEST: Family = Family::Accelerator;
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The name of a node, as the API server has it (`spec.nodeName` of a slice).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(String);

/// The text is not the name of a node, or is too long for the name of a pool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` cannot be the name of a node with ResourceSlices: {why}")]
pub struct InvalidNodeName {
    /// The text.
    pub name: String,
    /// The rule that it violates.
    pub why: &'static str,
}

impl NodeName {
    /// Checks a name.
    ///
    /// # Errors
    /// If it is no DNS subdomain, or if a pool's name with it would have more than
    /// [`SUBDOMAIN_MAX`] bytes.
    pub fn new(name: &str) -> Result<Self, InvalidNodeName> {
        let refuse = |why| Err(InvalidNodeName { name: name.to_owned(), why });
        if !is_subdomain(name) {
            return refuse(
                "it must be a DNS subdomain: lower case letters, digits, `-` and `.`; name the node as `kubectl get nodes` does",
            );
        }
        if name.len() + 1 + Family::LONGEST.as_str().len() > SUBDOMAIN_MAX {
            return refuse(
                "it is too long: with its family the name of a pool has more than 253 bytes",
            );
        }
        Ok(NodeName(name.to_owned()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of a pool of this node, `<node>/<family>`: DNS subdomains joined by `/`.
    #[must_use]
    pub fn pool(&self, family: Family) -> String {
        format!("{}/{family}", self.0)
    }

    /// Whether a pool is one of this node.
    #[must_use]
    pub fn has_pool(&self, pool: &str) -> bool {
        pool.strip_prefix(self.as_str()).is_some_and(|rest| rest.starts_with('/'))
    }

    /// The name of the object of a slice: the same after each start, so that an instance finds the
    /// slices of the one before it. A DNS subdomain.
    #[must_use]
    pub fn slice(&self, pool: &str, index: u32) -> String {
        format!("{}{index}", self.slice_start(pool))
    }

    /// The number of a slice of the pool by the name of its object. The API server may have added
    /// `-` and a suffix of its choice. `None` for any other name.
    #[must_use]
    pub fn slice_index(&self, pool: &str, object: &str) -> Option<u32> {
        let rest = object.strip_prefix(&self.slice_start(pool))?;
        let number = rest.split('-').next().unwrap_or_default();
        number.parse().ok().filter(|index: &u32| index.to_string() == number)
    }

    /// The name of the object of a slice without the number.
    fn slice_start(&self, pool: &str) -> String {
        /// The number, and what the API server adds to a name of its choice.
        const REST_MAX: usize = 10 + 6;
        let family = pool.strip_prefix(&self.0).unwrap_or(pool).trim_start_matches('/');
        let suffix = format!("-{DRIVER}-{}-", family.replace('/', "-"));
        if self.0.len() + suffix.len() + REST_MAX <= SUBDOMAIN_MAX {
            return format!("{}{suffix}", self.0);
        }
        let hash = format!("-{:08x}", hash(&self.0));
        let room = SUBDOMAIN_MAX.saturating_sub(suffix.len() + hash.len() + REST_MAX);
        let start: String = self.0.chars().take(room).collect();
        format!("{}{hash}{suffix}", start.trim_end_matches(['-', '.']))
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Whether the text is a DNS label (RFC 1123): at most 63 lower case letters, digits and `-`, with
/// a letter or digit at both ends.
#[must_use]
pub fn is_label(text: &str) -> bool {
    text.len() <= LABEL_MAX && is_label_of_any_length(text)
}

/// Whether the text is a DNS subdomain: labels joined by `.`. The API server limits the whole, not
/// each label.
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= SUBDOMAIN_MAX && text.split('.').all(is_label_of_any_length)
}

/// Whether the text can be the name of a pool: DNS subdomains joined by `/`.
#[must_use]
pub fn is_pool_name(text: &str) -> bool {
    text.len() <= SUBDOMAIN_MAX && text.split('/').all(is_subdomain)
}

fn is_label_of_any_length(text: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.bytes().all(|b| is_plain(b) || b == b'-')
        && text.bytes().next().is_some_and(is_plain)
        && text.bytes().next_back().is_some_and(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const UUID: &str = "5ca1ab1e-0000-4000-8000-00000000000F";

    fn name(id: &str) -> String {
        device_name(&DeviceId::new(id))
    }

    /// A change here gives devices in live claims another name.
    #[test]
    fn names_never_change() {
        let long = "x".repeat(300);
        let table = [
            (format!("GPU-{UUID}"), "gpu-5ca1ab1e-0000-4000-8000-00000000000f"),
            (format!("GPU-{UUID}::3"), "gpu-5ca1ab1e-0000-4000-8000-00000000000f-s3"),
            (format!("MIG-{UUID}"), "mig-5ca1ab1e-0000-4000-8000-00000000000f"),
            (
                format!("MIG-GPU-{UUID}/3/0"),
                "mig-gpu-5ca1ab1e-0000-4000-8000-00000000000f-3-0-fc8627ba",
            ),
            ("0000:18:00.1".into(), "0000-18-00-1"),
            ("10000:00:04.0".into(), "10000-00-04-0"),
            ("0000:18:00.1::0".into(), "0000-18-00-1-s0"),
            ("0000:18:00.0-gi3-ci0".into(), "0000-18-00-0-gi3-ci0"),
            (
                "0000:18:00.0-5ca1ab1e-0000-4000-8000-00000000000f".into(),
                "0000-18-00-0-5ca1ab1e-0000-4000-8000-00000000000f",
            ),
            ("/dev/fuse".into(), "dev-fuse-99869b3c"),
            ("dev:/dev/fuse".into(), "dev-dev-fuse-dd57c36f"),
            (
                "/dev/serial/by-id/usb-FTDI_A1-if00-port0".into(),
                "dev-serial-by-id-usb-ftdi-a1-if00-port0-7cdb91dd",
            ),
            ("SN 0123.é".into(), "sn-0123-a8c4854b"),
            ("soc:gpu".into(), "soc-gpu-d52a9088"),
            ("0000:18:00.0-s2".into(), "0000-18-00-0-s2-06b8b3a4"),
            ("0000:1B:00.0".into(), "0000-1b-00-0-cc93a61a"),
            ("a::02".into(), "a-02-ffcf5ad3"),
            ("a::2".into(), "a-296230c0-s2"),
            (long, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-fc258aca"),
            (String::new(), "4fd0bfc1"),
            ("///".into(), "09c12a73"),
        ];
        for (id, expected) in table {
            assert_eq!(name(&id), expected, "{id}");
        }
        let pooled = pooled_name(&"example.com/fuse".parse().unwrap(), &DeviceId::new("7"));
        assert_eq!(pooled, "example-com-fuse-7-9fdf35a9");
    }

    #[test]
    fn dra_md_has_the_names_of_these_ids() {
        let page = include_str!("../../docs/dra.md");
        let (_, rest) = page.split_once("| id | name |\n| --- | --- |\n").unwrap();
        let rows = rest.lines().take_while(|line| line.starts_with('|'));
        let rows: Vec<Vec<&str>> = rows.map(|row| row.split('`').collect()).collect();
        assert!(rows.len() >= 5, "{rows:?}");
        for row in rows {
            assert_eq!(name(row[1]), row[3]);
        }
    }

    #[test]
    fn pools_and_slices_have_names_that_the_api_accepts() {
        let node = NodeName::new("gpu-7.example.org").unwrap();
        assert_eq!(node.pool(Family::Gpu), "gpu-7.example.org/gpu");
        let object = node.slice("gpu-7.example.org/gpu", 12);
        assert_eq!(object, "gpu-7.example.org-holdfast.dev-gpu-12");
        let index = |object: &str| node.slice_index("gpu-7.example.org/gpu", object);
        assert_eq!((index(&object), index(&format!("{object}-x7k2p"))), (Some(12), Some(12)));
        for other in [
            "gpu-7.example.org-holdfast.dev-net-0",
            "x",
            object.trim_end_matches("12"),
            &format!("{object}x"),
        ] {
            assert_eq!(index(other), None, "{other}");
        }
        let long = [&["a"; 63].concat()[..], &["b"; 63].concat(), &["c"; 63].concat(), "dddd"];
        let longest = format!("{}{}", long.join("."), "d".repeat(SUBDOMAIN_MAX - 12 - 196));
        let node = NodeName::new(&longest).unwrap();
        for family in [Family::Gpu, Family::Net, Family::Accelerator, Family::Char] {
            let pool = node.pool(family);
            assert!(is_pool_name(&pool), "{pool}");
            assert!(is_subdomain(&node.slice(&pool, 4_000_000_000)), "{}", node.slice(&pool, 0));
        }
        for name in ["", "GPU-7", "a_b", "-a", "a.", "a/b", &format!("{longest}d")] {
            assert!(NodeName::new(name).is_err(), "{name}");
        }
    }

    /// Ids of the shapes that discovery makes, and texts that resemble them.
    fn ids() -> impl Strategy<Value = String> {
        let word = prop_oneof![
            "[0-9a-f]{8}",
            "s[0-9]{0,3}",
            "gi[0-9]",
            "[a-zA-Z0-9_:./ é-]{0,70}",
            "0000:18:00\\.[0-7]",
            "GPU-[0-9a-f]{8}-0000-4000-8000-[0-9a-f]{12}",
        ];
        let share = prop_oneof![Just(String::new()), "::0?[0-9]{1,10}"];
        (prop::collection::vec(word, 1..3), share)
            .prop_map(|(words, share)| format!("{}{share}", words.join("-")))
    }

    /// The parts of an id that its name shows in another way than by a hash.
    fn hashed_part(id: &str) -> (&str, Option<u32>) {
        share_of(id).map_or((id, None), |(device, share)| (device, Some(share)))
    }

    proptest! {
        #[test]
        fn different_ids_have_different_names(
            ids in prop::collection::btree_set(ids(), 2..40),
            cut in "[a-z/]{50,70}",
        ) {
            let longer = [format!("{cut}1"), format!("{cut}2"), format!("{cut}1::4294967295")];
            let similar = ids.iter().flat_map(|id| {
                [format!("{id}::2"), format!("{id}::02"), id.replace('.', "-"), id.to_uppercase()]
            });
            let similar: BTreeSet<String> = similar.chain(ids.iter().cloned()).collect();
            let mut known: BTreeMap<String, String> = BTreeMap::new();
            for id in similar.into_iter().chain(longer) {
                let name = name(&id);
                prop_assert!(is_label(&name), "{id}: {name}");
                if let Some(other) = known.insert(name.clone(), id.clone()) {
                    let ((a, s), (b, t)) = (hashed_part(&id), hashed_part(&other));
                    let same_uuid = id.eq_ignore_ascii_case(&other);
                    prop_assert!(
                        same_uuid || s == t && hash(a) == hash(b),
                        "{id} and {other} are both {name}"
                    );
                }
            }
        }

        #[test]
        fn a_name_of_any_text_is_a_label(id in ".{0,80}") {
            prop_assert!(is_label(&name(&id)), "{}", name(&id));
        }
    }
}
