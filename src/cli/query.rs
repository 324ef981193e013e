//! Matching of queries: a device by any of its names, a pod, a resource.
//!
//! | query for a device | matches |
//! | --- | --- |
//! | `GPU-5a7c…`, whole, in any case | its id |
//! | the id of a shared device | each of its shares, `id::0`, `id::1`, … |
//! | `0000:18:00.0`, `18:00.0`, `00000000:18:00.0` | its PCI address, where the ledger has one |
//! | `/dev/fuse` | its node, or a node of its grant, from the answer or by a name |
//! | `mlx5_2`, `ens1f0`, `nvme0` | its present name on the host, from the running daemon |
//! | `GPU-5a`, `5a7c`, `fuse` | the only id with this prefix |
//!
//! The first row that matches wins: a whole id is never treated as the prefix of another. A prefix
//! counts from the start of an id, or from behind its first `-` or `:` (`misc:fuse`). A container
//! may also get a node by a name (of a GPU or of CDI) that the answer contains.

use crate::domain::{ClaimRef, DeviceId, Grant, GrantedDevice, PciAddress, PodRef, ResourceName};
use crate::store::ExportLine;
use clap::Args;
use std::collections::{BTreeMap, BTreeSet};

/// Filters by pod and resource.
#[derive(Debug, Clone, Default, Args)]
pub struct GrantFilter {
    /// Show only this pod, in any namespace or in the given one; `uid:…` for a pod without a known
    /// name
    #[arg(long, value_name = "[NAMESPACE/]NAME", value_parser = crate::console::non_empty)]
    pub pod: Option<String>,
    /// Show only this resource, such as nvidia.com/gpu
    #[arg(long, value_name = "NAME")]
    pub resource: Option<ResourceName>,
    /// Show only this claim (ResourceClaim), in any namespace or in the given one; `uid:…` for its
    /// UID
    #[arg(long, value_name = "[NAMESPACE/]NAME", value_parser = crate::console::non_empty)]
    pub claim: Option<String>,
}

impl GrantFilter {
    /// Whether there is no filter.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.pod.is_none() && self.resource.is_none() && self.claim.is_none()
    }

    /// Whether the grant passes the filter.
    #[must_use]
    pub fn fits(&self, grant: &Grant) -> bool {
        let of_pod = |wanted: &String| grant.pods().any(|pod| is_named(pod, wanted));
        let of_claim = |wanted: &String| {
            grant.claim.as_ref().is_some_and(|hold| is_claim(&hold.claim, wanted))
        };
        self.pod.as_ref().is_none_or(of_pod)
            && self.claim.as_ref().is_none_or(of_claim)
            && self.resource.as_ref().is_none_or(|wanted| *wanted == grant.resource)
    }
}

/// The beginnings of the sentences that report an unknown name. `kubectl holdfast` recognizes the
/// nodes that do not have a device by them.
pub const UNKNOWN_NAMES: [&str; 3] = [NO_DEVICE, NO_RESOURCE, NO_NAME];
const NO_DEVICE: &str = "the ledger knows no device `";
pub(super) const NO_NAME: &str = "no device, pod or claim of this node is known as `";
const NO_RESOURCE: &str = "neither the daemon nor the ledger knows the resource `";

/// The resources in the ledger, to distinguish an unused resource from an unknown one.
#[derive(Debug, Clone, Default)]
pub struct KnownResources(BTreeSet<ResourceName>);

impl KnownResources {
    /// Adds the resources of one part of the ledger.
    pub fn add(&mut self, part: &ExportLine) {
        match part {
            ExportLine::Grant(grant) if !self.0.contains(&grant.resource) => {
                self.0.insert(grant.resource.clone());
            }
            ExportLine::Grant(_) => {}
            ExportLine::Notes { listed, owed, .. } => {
                self.0.extend(listed.keys().chain(owed.keys()).cloned());
            }
        }
    }

    /// Checks that the ledger or the daemon (`more`) knows a resource of this name.
    ///
    /// # Errors
    /// One sentence with the most similar name, if neither knows it.
    pub fn check(
        &self,
        wanted: Option<&ResourceName>,
        more: impl FnOnce() -> Vec<ResourceName>,
    ) -> Result<(), String> {
        let Some(wanted) = wanted.filter(|wanted| !self.0.contains(wanted)) else { return Ok(()) };
        let more = more();
        if more.contains(wanted) {
            return Ok(());
        }
        let likeness = |name: &ResourceName| {
            strsim::normalized_damerau_levenshtein(name.as_str(), wanted.as_str())
        };
        let mut near: Vec<&ResourceName> =
            self.0.iter().chain(&more).filter(|name| likeness(name) >= NEAR_MIN).collect();
        near.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
        let near = near.first().map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
        Err(format!("{NO_RESOURCE}{wanted}`; {near}`holdfast status` lists the offered resources"))
    }
}

/// Whether `wanted` names the pod.
pub(super) fn is_named(pod: &PodRef, wanted: &str) -> bool {
    if let Some(uid) = wanted.strip_prefix("uid:") {
        return pod.uid == uid;
    }
    match wanted.split_once('/') {
        Some((namespace, name)) => {
            pod.namespace.as_deref() == Some(namespace) && pod.name.as_deref() == Some(name)
        }
        None => pod.name.as_deref() == Some(wanted),
    }
}

/// Whether `wanted` names the claim, in the same forms as a pod.
pub(super) fn is_claim(claim: &ClaimRef, wanted: &str) -> bool {
    let ClaimRef { uid, namespace, name } = claim.clone();
    is_named(&PodRef { uid, namespace: Some(namespace), name: Some(name) }, wanted)
}

/// How well a device matches; later variants are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    Prefix,
    Location,
    /// The id of the device itself or of one of its shares: grants contain shares, the ledger's
    /// names contain devices.
    Id,
}

/// A device query, and the matches so far.
#[derive(Debug, Clone)]
pub struct DeviceQuery {
    typed: String,
    text: String,
    address: Option<PciAddress>,
    /// Devices that have this name on the host, such as that of an interface.
    named: BTreeSet<DeviceId>,
    fits: BTreeMap<Fit, BTreeSet<DeviceId>>,
    /// Similar ids: similarity and id.
    near: Vec<(f64, String)>,
}

/// Minimum similarity of a suggestion: one letter in four may differ.
pub(super) const NEAR_MIN: f64 = 0.75;
/// Maximum number of suggestions.
const NEAR_MAX: usize = 3;

impl DeviceQuery {
    /// A query for the device that a user calls `text`.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let typed = text.trim().to_owned();
        let text = typed.to_ascii_lowercase();
        let address = text.parse().or_else(|_| format!("0000:{text}").parse()).ok();
        DeviceQuery {
            typed,
            text,
            address,
            named: BTreeSet::new(),
            fits: BTreeMap::new(),
            near: Vec::new(),
        }
    }

    /// The query as the user typed it, trimmed.
    #[must_use]
    pub fn typed(&self) -> &str {
        &self.typed
    }

    /// Matches a device of the ledger.
    pub fn add(&mut self, key: &str, id: &DeviceId) {
        match self.fit(key, id) {
            Some(fit) => self.note(fit, id),
            None => self.note_similar(key, id),
        }
    }

    /// Matches a device that has these names on the host too. Call it before `add`, since the
    /// ledger does not have these names.
    pub fn add_named(&mut self, key: &str, id: &DeviceId, names: &[String]) {
        if names.iter().any(|name| name.eq_ignore_ascii_case(&self.text)) {
            self.named.insert(id.clone());
        }
        self.add(key, id);
    }

    /// Records a device that does not match but has a similar name.
    fn note_similar(&mut self, key: &str, id: &DeviceId) {
        if !self.fits.is_empty() {
            return;
        }
        let whole = id.as_str().to_ascii_lowercase();
        let beginning: String = whole.chars().take(self.text.chars().count()).collect();
        let address =
            key.strip_prefix("pci:").and_then(|key| key.split('/').next()).unwrap_or_default();
        let names = [
            whole.as_str(),
            &beginning,
            address,
            address.strip_prefix("0000:").unwrap_or_default(),
        ];
        let likeness = names
            .into_iter()
            .map(|name| strsim::normalized_damerau_levenshtein(name, &self.text))
            .fold(0.0, f64::max);
        if likeness >= NEAR_MIN && self.near.iter().all(|(_, known)| known != id.as_str()) {
            self.near.push((likeness, id.to_string()));
            self.near.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
            self.near.truncate(NEAR_MAX);
        }
    }

    /// Matches the devices of a grant. Returns whether one of them may be the result.
    pub fn add_grant(&mut self, grant: &Grant) -> bool {
        let fits: Vec<_> = grant
            .devices
            .iter()
            .filter_map(|device| Some((self.fit_in(grant, device)?, &device.id)))
            .collect();
        fits.iter().for_each(|(fit, id)| self.note(*fit, id));
        let unmeant = grant.devices.iter().filter(|_| fits.is_empty());
        unmeant.for_each(|device| self.note_similar(&device.key, &device.id));
        !fits.is_empty()
    }

    /// The most similar ids, if no device matches.
    #[must_use]
    pub fn similar(&self) -> Vec<&str> {
        self.near.iter().map(|(_, id)| id.as_str()).collect()
    }

    /// Whether no device matches.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.fits.is_empty()
    }

    /// The devices that match. There are several only if they share an address or a node.
    ///
    /// # Errors
    /// One sentence, when no device matches, or a prefix matches several.
    pub fn matches(&self) -> Result<&BTreeSet<DeviceId>, String> {
        match self.fits.last_key_value() {
            None => {
                let near: Vec<_> = self.near.iter().map(|(_, id)| format!("`{id}`")).collect();
                let near = if near.is_empty() {
                    String::new()
                } else {
                    format!("did you mean {}? ", near.join(", "))
                };
                Err(format!(
                    "{NO_DEVICE}{}`; {near}`holdfast discover` lists the \
                     devices of this node",
                    self.typed
                ))
            }
            Some((Fit::Prefix, ids)) if ids.len() > 1 => {
                let some: Vec<_> = ids.iter().take(4).map(|id| format!("`{id}`")).collect();
                let more = if ids.len() > some.len() {
                    format!(" and {} more", ids.len() - some.len())
                } else {
                    String::new()
                };
                Err(format!(
                    "`{}` matches {}{more}; use a longer prefix",
                    self.typed,
                    some.join(", ")
                ))
            }
            Some((_, ids)) => Ok(ids),
        }
    }

    /// Whether the grant has a device that matches, as far as is known.
    #[must_use]
    pub fn matches_grant(&self, grant: &Grant) -> bool {
        let best = self.fits.last_key_value().map(|(fit, _)| *fit);
        best.is_some() && grant.devices.iter().any(|device| self.fit_in(grant, device) == best)
    }

    /// Whether the result is final: later devices cannot change it.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        self.fits.last_key_value().is_some_and(|(fit, _)| *fit > Fit::Prefix)
    }

    fn note(&mut self, fit: Fit, id: &DeviceId) {
        let is_this_id = fit == Fit::Location || id.as_str().eq_ignore_ascii_case(&self.text);
        let meant = if is_this_id { None } else { id.shared() };
        self.fits.entry(fit).or_default().insert(meant.unwrap_or_else(|| id.clone()));
    }

    fn fit_in(&self, grant: &Grant, device: &GrantedDevice) -> Option<Fit> {
        let claimed = grant.claim.iter().flat_map(|hold| &hold.devices);
        let of_claim = claimed.filter(|claimed| claimed.id == device.id);
        let edits = of_claim.map(|claimed| &claimed.edits).chain([&grant.edits]);
        let in_answer = edits.flat_map(|edits| &edits.devices).map(|node| &node.host);
        let mut nodes = in_answer.chain(&device.nodes);
        let mut has_node = || {
            self.text.starts_with('/') && nodes.any(|node| node.eq_ignore_ascii_case(&self.text))
        };
        self.fit(&device.key, &device.id).or_else(|| has_node().then_some(Fit::Location))
    }

    fn fit(&self, key: &str, id: &DeviceId) -> Option<Fit> {
        let wanted = self.text.as_str();
        let whole = id.as_str().to_ascii_lowercase();
        if wanted.is_empty() {
            return None;
        }
        if whole == wanted
            || id.shared().is_some_and(|device| device.as_str().eq_ignore_ascii_case(wanted))
        {
            return Some(Fit::Id);
        }
        let address = || key.strip_prefix("pci:")?.split('/').next()?.parse::<PciAddress>().ok();
        let is_node =
            || key.strip_prefix("dev:").is_some_and(|node| node.eq_ignore_ascii_case(wanted));
        let has_host_name = || {
            self.named.contains(id)
                || id.shared().is_some_and(|device| self.named.contains(&device))
        };
        if self.address.is_some() && self.address == address() || is_node() || has_host_name() {
            return Some(Fit::Location);
        }
        let inner = whole.split_once(['-', ':']).map_or("", |(_, inner)| inner);
        (whole.starts_with(wanted) || inner.starts_with(wanted)).then_some(Fit::Prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The devices that match, or the error sentence.
    fn matches(text: &str, devices: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let mut wanted = DeviceQuery::new(text);
        devices.iter().for_each(|(key, id)| wanted.add(key, &DeviceId::new(*id)));
        wanted.matches().map(|ids| ids.iter().map(ToString::to_string).collect())
    }

    const DEVICES: [(&str, &str); 6] = [
        ("pci:0000:18:00.0/10de:2330", "GPU-5a7c1f00-1111"),
        ("pci:0000:3b:00.0/10de:2330", "GPU-5a99"),
        ("pci:0000:3b:00.0/10de:2331", "GPU-5a9"),
        ("pci:10000:04:00.0/8086:0000", "10000:04:00.0"),
        ("dev:/dev/fuse", "fuse::0"),
        ("dev:/dev/fuse", "fuse::1"),
    ];

    #[test]
    fn a_device_is_found_by_any_of_its_names() {
        for (text, wanted) in [
            ("GPU-5a7c1f00-1111", &["GPU-5a7c1f00-1111"][..]),
            ("gpu-5A7C1F00-1111", &["GPU-5a7c1f00-1111"]),
            ("5a7c1f00-1111", &["GPU-5a7c1f00-1111"]),
            ("5a7", &["GPU-5a7c1f00-1111"]),
            // A whole id is not the prefix of another one.
            ("GPU-5a9", &["GPU-5a9"]),
            ("0000:18:00.0", &["GPU-5a7c1f00-1111"]),
            ("18:00.0", &["GPU-5a7c1f00-1111"]),
            ("00000000:18:00.0", &["GPU-5a7c1f00-1111"]),
            // Two cards have had this address.
            ("3B:00.0", &["GPU-5a9", "GPU-5a99"]),
            ("10000:04:00.0", &["10000:04:00.0"]),
            ("fuse", &["fuse"]),
            ("fuse::1", &["fuse::1"]),
            ("/dev/fuse", &["fuse::0", "fuse::1"]),
            ("fu", &["fuse"]),
        ] {
            assert_eq!(matches(text, &DEVICES).unwrap(), wanted, "{text}");
        }
    }

    fn grant(id: &str) -> Grant {
        Grant {
            alloc_id: crate::domain::AllocId::new("a-1"),
            resource: "example.com/fuse".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: DeviceId::new(id),
                key: "dev:/dev/fuse".into(),
                numa_nodes: vec![],
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: crate::domain::ContainerEdits::default(),
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            granted_at: crate::domain::Timestamp(0),
            version: String::new(),
            state: crate::domain::GrantState::Granted,
        }
    }

    #[test]
    fn a_claim_is_found_by_its_name_and_by_each_of_its_pods() {
        let pod = |name: &str| PodRef {
            uid: format!("uid-{name}"),
            namespace: Some("ml".into()),
            name: Some(name.into()),
        };
        let claim = ClaimRef { uid: "c1".into(), namespace: "ml".into(), name: "train".into() };
        let hold = crate::domain::ClaimHold { claim, allocation: "x".into(), devices: Vec::new() };
        let held = Grant {
            claim: Some(std::sync::Arc::new(hold)),
            state: crate::domain::GrantState::Prepared {
                pods: vec![pod("a"), pod("b")],
                prepared_at: crate::domain::Timestamp(0),
                unprepared_at: None,
            },
            ..grant("fuse")
        };
        let of = |claim: Option<&str>, pod: Option<&str>| GrantFilter {
            pod: pod.map(Into::into),
            resource: None,
            claim: claim.map(Into::into),
        };
        for (claim, pod, fits) in [
            (Some("ml/train"), None, true),
            (Some("train"), None, true),
            (Some("uid:c1"), None, true),
            (Some("other/train"), None, false),
            (Some("uid:c2"), None, false),
            (None, Some("ml/b"), true),
            (Some("train"), Some("uid:uid-a"), true),
            (Some("train"), Some("c"), false),
        ] {
            assert_eq!(of(claim, pod).fits(&held), fits, "{claim:?} {pod:?}");
        }
        assert!(!of(Some("train"), None).fits(&grant("fuse")) && !of(Some("x"), None).is_all());
    }

    #[test]
    fn the_holder_of_a_share_holds_the_device() {
        let mut wanted = DeviceQuery::new("fuse");
        wanted.add("dev:/dev/fuse", &DeviceId::new("fuse"));
        assert!(wanted.add_grant(&grant("fuse::1")) && wanted.matches_grant(&grant("fuse::1")));
        assert_eq!(
            wanted.matches().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["fuse"]
        );
        wanted = DeviceQuery::new("fuse::0");
        assert!(
            wanted.add_grant(&grant("fuse::0")) && !wanted.matches_grant(&grant("fuse::1")),
            "one share is not the other"
        );
    }

    /// The daemon reports the host's name of a device before the ledger is read; the ledger has the
    /// device or a share of it.
    #[test]
    fn a_device_is_found_by_its_name_on_the_host() {
        let mut wanted = DeviceQuery::new("MLX5_2");
        wanted.add_named(
            "pci:0000:1a:00.0/15b3:1021",
            &DeviceId::new("0000:1a:00.0"),
            &["ib0".into(), "mlx5_2".into()],
        );
        wanted.add_named(
            "pci:0000:1b:00.0/15b3:1021",
            &DeviceId::new("0000:1b:00.0"),
            &["mlx5_3".into()],
        );
        wanted.add("pci:0000:1b:00.0/15b3:1021", &DeviceId::new("0000:1b:00.0"));
        assert!(wanted.is_certain());
        assert_eq!(
            wanted.matches().unwrap().iter().map(DeviceId::as_str).collect::<Vec<_>>(),
            ["0000:1a:00.0"]
        );
        let share = |id: &str| wanted.fit("pci:0000:1a:00.0/15b3:1021", &DeviceId::new(id));
        assert_eq!(
            (share("0000:1a:00.0::3"), share("0000:1b:00.0::3")),
            (Some(Fit::Location), None)
        );
    }

    #[test]
    fn an_ambiguous_or_unknown_device_is_an_error() {
        assert_eq!(
            matches("GPU-5a", &DEVICES).unwrap_err(),
            "`GPU-5a` matches `GPU-5a7c1f00-1111`, `GPU-5a9`, `GPU-5a99`; use a longer prefix"
        );
        for text in ["", "GPU-6", "19:00.0", "/dev/null"] {
            assert!(
                matches(text, &DEVICES).unwrap_err().starts_with("the ledger knows no device `"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_similar_device_is_suggested() {
        let near = |text: &str| matches(text, &DEVICES).unwrap_err();
        assert!(
            near("GPU-5b7c").contains("`GPU-5b7c`; did you mean `GPU-5a7c1f00-1111`? `"),
            "{}",
            near("GPU-5b7c")
        );
        assert!(
            near("19:00.0").contains("; did you mean `GPU-5a7c1f00-1111`? `"),
            "{}",
            near("19:00.0")
        );
        assert!(near("nothing").contains("`nothing`; "), "{}", near("nothing"));
    }

    #[test]
    fn an_unknown_resource_is_an_error_with_a_suggestion() {
        let name = |text: &str| text.parse::<ResourceName>().unwrap();
        let known = KnownResources([name("nvidia.com/gpu"), name("a/b")].into());
        let check =
            |wanted: &str| known.check(Some(&name(wanted)), || vec![name("example.com/new")]);
        assert!(
            ["nvidia.com/gpu", "example.com/new"].into_iter().all(|wanted| check(wanted).is_ok())
        );
        let sentence = check("nvidia.com/gpus").unwrap_err();
        assert!(
            sentence.starts_with(
                "neither the daemon nor the ledger knows the resource \
                 `nvidia.com/gpus`; did you mean `nvidia.com/gpu`? "
            ),
            "{sentence}"
        );
        assert!(check("x/y").unwrap_err().contains("`x/y`; "));
    }

    #[test]
    fn a_pod_is_named_with_or_without_its_namespace_or_by_uid() {
        let pod = PodRef {
            uid: "u-1".into(),
            namespace: Some("ml".into()),
            name: Some("train-0".into()),
        };
        for (wanted, fits) in [
            ("train-0", true),
            ("ml/train-0", true),
            ("uid:u-1", true),
            ("default/train-0", false),
            ("train", false),
        ] {
            assert_eq!(is_named(&pod, wanted), fits, "{wanted}");
        }
        assert!(!is_named(&PodRef { uid: "u-2".into(), namespace: None, name: None }, "train-0"));
    }
}
