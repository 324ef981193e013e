//! The name of a resource, by the kubelet's own rules.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of an extended resource, such as `nvidia.com/gpu`, valid by the kubelet's own rules.
/// Clones share one text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ResourceName(Arc<str>);

/// An invalid resource name: the kubelet would refuse it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is not a resource name: {why}")]
pub struct InvalidResourceName {
    /// The refused text.
    pub name: String,
    /// The rule that it violates.
    pub why: &'static str,
}

/// Placeholder for the node in a resource name, where each device node is a resource of its own.
pub const NODE: &str = "{node}";
/// Placeholder for the profile in a resource name, where the MIG instances of each profile are a
/// resource of their own.
pub const MIG_PROFILE: &str = "{mig_profile}";

impl ResourceName {
    /// Parses a name pattern with the placeholder for the node: `example.com/{node}`.
    ///
    /// # Errors
    /// If `{node}` is not in the part after `/`, or if the kubelet would refuse the name with a
    /// plain word in place of `{node}`.
    pub fn for_each_node(text: &str) -> Result<Self, InvalidResourceName> {
        Self::pattern(text, NODE, "node", "`{node}` must be in the part after `/`")
    }

    /// Parses a name pattern with the placeholder for a MIG profile, such as
    /// `nvidia.com/mig-{mig_profile}`.
    ///
    /// # Errors
    /// As [`ResourceName::for_each_node`].
    pub fn for_each_profile(text: &str) -> Result<Self, InvalidResourceName> {
        let place = "`{mig_profile}` must be in the part after `/`";
        Self::pattern(text, MIG_PROFILE, "1g.10gb", place)
    }

    /// A name with a placeholder, which must be valid with `example` in its place.
    fn pattern(
        text: &str,
        placeholder: &str,
        example: &str,
        place: &'static str,
    ) -> Result<Self, InvalidResourceName> {
        let refuse = |why| InvalidResourceName { name: text.to_owned(), why };
        if !text.split_once('/').is_some_and(|(prefix, name)| {
            name.contains(placeholder) && !prefix.contains(placeholder)
        }) {
            return Err(refuse(place));
        }
        text.replace(placeholder, example)
            .parse::<ResourceName>()
            .map_err(|error| refuse(error.why))?;
        Ok(ResourceName(text.into()))
    }

    /// Whether it is a pattern of [`ResourceName::for_each_node`].
    #[must_use]
    pub fn is_for_each_node(&self) -> bool {
        self.0.contains(NODE)
    }

    /// Whether it is a pattern of [`ResourceName::for_each_profile`].
    #[must_use]
    pub fn is_for_each_profile(&self) -> bool {
        self.0.contains(MIG_PROFILE)
    }

    /// Whether it is a pattern, which stands for several resources.
    #[must_use]
    pub fn is_pattern(&self) -> bool {
        self.is_for_each_node() || self.is_for_each_profile()
    }

    /// The name for one MIG profile. As NVIDIA's plugin has it, `1g.10gb+me` becomes `1g.10gb.me`.
    ///
    /// # Errors
    /// If the result is not a valid name.
    pub fn of_profile(&self, profile: &str) -> Result<Self, InvalidResourceName> {
        self.0.replace(MIG_PROFILE, &profile.replace('+', ".")).parse()
    }

    /// The profile for which this pattern makes that name, with `.` in place of `+`.
    #[must_use]
    pub fn profile_in<'a>(&self, name: &'a ResourceName) -> Option<&'a str> {
        let (before, after) = self.0.split_once(MIG_PROFILE)?;
        let profile = name.0.strip_prefix(before)?.strip_suffix(after)?;
        profile.starts_with(|c: char| c.is_ascii_digit()).then_some(profile)
    }

    /// The name for one node below `/dev`: `net/tun` becomes `net_tun`. Characters that are not
    /// allowed become `_`.
    ///
    /// # Errors
    /// If the result is not a valid name, for example because it is too long or begins with `_`.
    pub fn of_node(&self, path: &str) -> Result<Self, InvalidResourceName> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let word: String = path.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        self.0.replace(NODE, &word).parse()
    }

    /// The text of the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The domain before the slash.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.0.split('/').next().unwrap_or_default()
    }

    /// The name as a file name: `nvidia.com/gpu` becomes `nvidia.com_gpu`.
    #[must_use]
    pub fn file_stem(&self) -> String {
        self.0.replace('/', "_")
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The rules of Kubernetes' `IsExtendedResourceName` (pkg/apis/core/v1/helper).
impl FromStr for ResourceName {
    type Err = InvalidResourceName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |why| Err(InvalidResourceName { name: text.to_owned(), why });
        let Some((prefix, name)) = text.split_once('/') else {
            return refuse("it needs a domain and a name, as in `example.com/device`");
        };
        if name.contains('/') {
            return refuse("it has more than one `/`");
        }
        if text.contains("kubernetes.io/") {
            return refuse("`kubernetes.io/` belongs to Kubernetes");
        }
        if text.starts_with("requests.") {
            return refuse("it must not start with `requests.`, which quotas use");
        }
        // The kubelet checks "requests." + name, so 9 of the 253 characters are already used.
        let label = |label: &str| {
            !label.is_empty()
                && label.len() <= 63
                && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if prefix.len() > 244 || !prefix.split('.').all(label) {
            return refuse(
                "the part before `/` must be a lower-case DNS name of at most 244 characters",
            );
        }
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = name.as_bytes();
        let inner =
            bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if bytes.len() > 63 || !inner || !edge(bytes.first()) || !edge(bytes.last()) {
            return refuse(
                "the part after `/` must be at most 63 letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
            );
        }
        Ok(ResourceName(text.into()))
    }
}

impl<'de> Deserialize<'de> for ResourceName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_kubelets_rules() {
        for good in ["nvidia.com/gpu", "a/b", "intel.com/My_Pool.1-x", "amd.com/cpx_nps4"] {
            assert!(good.parse::<ResourceName>().is_ok(), "{good}");
        }
        let long = format!("{}/x", vec!["a".repeat(60); 5].join("."));
        for bad in [
            "gpu",
            "nvidia.com/",
            "/gpu",
            "NVIDIA.com/gpu",
            "nvidia.com/gpu/1",
            "kubernetes.io/gpu",
            "x.kubernetes.io/gpu",
            "requests.nvidia.com/gpu",
            "nvidia.com/-gpu",
            "nvidia.com/gpu-",
            "nvidia..com/gpu",
            "nvidia.com/g pu",
            &long,
        ] {
            assert!(bad.parse::<ResourceName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_name_for_each_node_is_a_name_with_the_node_in_it() {
        let name = |text: &str| ResourceName::for_each_node(text);
        let smarter = name("smarter-devices/{node}").unwrap();
        assert!(
            smarter.is_for_each_node() && smarter.as_str().parse::<ResourceName>().is_err(),
            "the kubelet never gets it"
        );
        for (path, of) in [
            ("i2c-13", "i2c-13"),
            ("net/tun", "net_tun"),
            ("vcsm.cma", "vcsm_cma"),
            ("bus/usb/001/002", "bus_usb_001_002"),
        ] {
            assert_eq!(smarter.of_node(path).unwrap().as_str(), format!("smarter-devices/{of}"));
        }
        assert_eq!(
            name("a.b/tty-{node}-x").unwrap().of_node("S0").unwrap().as_str(),
            "a.b/tty-S0-x"
        );
        for path in ["_x", "x_", ".hidden", "", &"x".repeat(64)] {
            assert!(smarter.of_node(path).is_err(), "{path}");
        }
        for bad in ["{node}", "{node}/x", "a.b/x", "a.b/{nod}", "a.b/-{node}", "a.b/{node}/x"] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
