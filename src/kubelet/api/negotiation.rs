//! Which version of the API to try next with one kubelet; pure.
//!
//! No call returns the versions of a kubelet, but the kubelet refuses a Register of a version that
//! it does not speak. A package that it does not serve is UNIMPLEMENTED. A version that it does not
//! know in a package that it serves is Unknown, with the known versions in the message. Kubelet
//! 1.10 and newer write them as a list, `["v1beta1"]`, 1.9 writes the only one, `"v1alpha2"`, and
//! 1.8 writes none.

use super::{Version, versions};
use crate::domain::KubeletGeneration;
use tonic::{Code, Status};

/// A version that worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NegotiatedVersion {
    /// The version.
    pub version: Version,
    /// The kubelet that accepted it.
    pub kubelet: Option<KubeletGeneration>,
}

impl NegotiatedVersion {
    /// The version to try first with a kubelet. Another kubelet than before may have been upgraded,
    /// so it gets the preferred version.
    #[must_use]
    pub fn with(self, kubelet: Option<KubeletGeneration>) -> Option<Version> {
        (self.kubelet == kubelet).then_some(self.version)
    }
}

/// The versions that are still to be tried.
#[derive(Debug)]
pub struct Negotiation {
    remaining: Vec<Version>,
}

impl Negotiation {
    /// Begins with the version that worked last, if there is one, then the preferred one.
    #[must_use]
    pub fn new(worked: Option<Version>) -> Self {
        let rest = versions().filter(|version| Some(*version) != worked);
        Negotiation { remaining: worked.into_iter().chain(rest).collect() }
    }

    /// The next version to try; `None` when the kubelet speaks none of the remaining ones.
    #[expect(
        clippy::should_implement_trait,
        reason = "the next version depends on the kubelet's answers in between"
    )]
    pub fn next(&mut self) -> Option<Version> {
        (!self.remaining.is_empty()).then(|| self.remaining.remove(0))
    }

    /// Processes the kubelet's answer to a try. Returns whether it is about the version, so that
    /// another one may be accepted.
    pub fn refused(&mut self, tried: Version, status: &Status) -> bool {
        match Answer::of(status) {
            Answer::NoService => self.remaining.retain(|version| !version.shares_package(tried)),
            Answer::NoVersion { known } if known.is_empty() => {}
            Answer::NoVersion { known } => {
                self.remaining.retain(|version| known.contains(&version.name()));
            }
            Answer::Other => return false,
        }
        true
    }
}

/// The reason of a refusal.
#[derive(Debug, PartialEq, Eq)]
enum Answer<'a> {
    /// The kubelet does not serve the package.
    NoService,
    /// It does not know the version; `known` are the versions in its message.
    NoVersion { known: Vec<&'a str> },
    /// Another reason: other versions would be refused too.
    Other,
}

impl<'a> Answer<'a> {
    fn of(status: &'a Status) -> Self {
        let text = status.message();
        match status.code() {
            Code::Unimplemented => Answer::NoService,
            Code::Unknown => {
                match text.split_once("is not supported by kubelet. Supported version") {
                    Some((_, known)) => {
                        Answer::NoVersion { known: known.split('"').skip(1).step_by(2).collect() }
                    }
                    None if text.starts_with("unsupported API version") => {
                        Answer::NoVersion { known: Vec::new() }
                    }
                    None => Answer::Other,
                }
            }
            _ => Answer::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_service() -> Status {
        Status::unimplemented("unknown service v1beta1.Registration")
    }

    fn no_version(tried: &str, known: &str) -> Status {
        Status::unknown(format!(
            "requested API version {tried:?} is not supported by kubelet. Supported version is {known}"
        ))
    }

    /// The versions that are tried with a kubelet that answers so, until one is accepted or no
    /// other can be.
    fn tried(worked: Option<&str>, answer: impl Fn(&str) -> Option<Status>) -> Vec<&'static str> {
        let mut negotiation =
            Negotiation::new(versions().find(|version| Some(version.name()) == worked));
        let mut tried = Vec::new();
        while let Some(version) = negotiation.next() {
            tried.push(version.name());
            if answer(version.name()).is_none_or(|status| !negotiation.refused(version, &status)) {
                break;
            }
        }
        tried
    }

    #[test]
    fn the_preferred_version_is_tried_first_and_the_one_that_worked_before_it() {
        assert_eq!(tried(None, |_| None), ["v1beta1"]);
        assert_eq!(tried(Some("v1alpha1"), |_| None), ["v1alpha1"]);
        assert_eq!(
            tried(Some("v1alpha1"), |_| Some(Status::unimplemented(""))),
            ["v1alpha1", "v1beta1"]
        );
    }

    #[test]
    fn the_negotiated_version_is_used_until_the_kubelet_restarts() {
        let kubelet = |inode| Some(KubeletGeneration { inode, made_ns: 0 });
        let version = versions().last().unwrap();
        let spoken = NegotiatedVersion { version, kubelet: kubelet(1) };
        assert_eq!(
            (spoken.with(kubelet(1)), spoken.with(kubelet(2)), spoken.with(None)),
            (Some(version), None, None)
        );
        // If its socket cannot be seen, each Register shows whether the version still works.
        assert_eq!(NegotiatedVersion { version, kubelet: None }.with(None), Some(version));
    }

    #[test]
    fn a_package_that_is_not_served_is_tried_once() {
        assert_eq!(tried(None, |_| Some(no_service())), ["v1beta1", "v1alpha2"]);
        assert_eq!(
            tried(Some("v1alpha2"), |name| (name != "v1beta1").then(no_service)),
            ["v1alpha2", "v1beta1"]
        );
    }

    #[test]
    fn the_kubelets_own_list_decides_what_is_tried_next() {
        let kubelet = |known: &'static str, speaks: &'static str| {
            move |name: &str| match name {
                "v1beta1" => Some(no_service()),
                name if name == speaks => None,
                name => Some(no_version(name, known)),
            }
        };
        assert_eq!(tried(None, kubelet(r#""v1alpha2""#, "v1alpha2")), ["v1beta1", "v1alpha2"]);
        assert_eq!(
            tried(None, kubelet(r#""v1alpha1""#, "v1alpha1")),
            ["v1beta1", "v1alpha2", "v1alpha1"]
        );
        assert_eq!(
            tried(None, kubelet(r#"["v1alpha1" "v1alpha0"]"#, "v1alpha1")),
            ["v1beta1", "v1alpha2", "v1alpha1"]
        );
        assert_eq!(
            tried(None, kubelet(r#"["v2" "v3"]"#, "")),
            ["v1beta1", "v1alpha2"],
            "no common version remains"
        );
        assert_eq!(
            tried(Some("v1alpha2"), |name| (name != "v1beta1")
                .then(|| no_version(name, r#"["v1beta1"]"#))),
            ["v1alpha2", "v1beta1"]
        );
    }

    #[test]
    fn a_refusal_without_known_versions_leaves_every_version_to_try() {
        let answer = |name: &str| match name {
            "v1beta1" => Some(no_service()),
            "v1alpha1" => None,
            _ => Some(Status::unknown("unsupported API version by the Kubelet registry")),
        };
        assert_eq!(tried(None, answer), ["v1beta1", "v1alpha2", "v1alpha1"]);
    }

    #[test]
    fn a_refusal_for_another_reason_ends_the_negotiation() {
        for status in [
            Status::unknown("the ResourceName \"gpu\" is invalid"),
            Status::unknown("failed to dial device plugin: context deadline exceeded"),
            Status::unavailable(r#"Supported version is ["v1alpha2"]"#),
            Status::deadline_exceeded("no answer in time"),
        ] {
            assert_eq!(tried(None, |_| Some(status.clone())), ["v1beta1"], "{status}");
        }
    }
}
