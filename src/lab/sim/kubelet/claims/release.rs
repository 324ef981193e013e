//! Differences between the DRA managers of kubelet releases.

use std::time::Duration;

/// The health of a device that its driver does not time itself.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);

/// A release of the kubelet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    /// The first one with resource.k8s.io/v1.
    V1_34,
    /// Reads the driver's own timeout of a device's health.
    V1_35,
    /// Reads the message of a device's health.
    #[default]
    V1_36,
    /// Replaces the devices of a claim at a second Prepare. Reads health only if the driver offers
    /// it, and prefers v1.
    V1_37,
}

/// A version of the DRA API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// `v1`.
    V1,
    /// `v1beta1`.
    V1Beta1,
}

/// A version of the health API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HealthVersion {
    V1,
    V1Alpha1,
}

impl Release {
    /// Whether a repeated Prepare appends its devices to those of the first (kubernetes#140471).
    #[must_use]
    pub fn appends(self) -> bool {
        self <= Release::V1_36
    }

    /// The first service of the driver that the kubelet knows.
    pub(super) fn choose(self, offered: &[String]) -> Result<Version, String> {
        if offered.is_empty() {
            return Err("empty list of supported gRPC services (aka supported versions)".to_owned());
        }
        let known = |service: &String| match service.as_str() {
            "v1.DRAPlugin" => Some(Version::V1),
            "v1beta1.DRAPlugin" => Some(Version::V1Beta1),
            _ => None,
        };
        offered.iter().find_map(known).ok_or_else(|| {
            format!(
                "none of services supported by the plugin ({offered:?}) are supported by the kubelet \
                 ([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])"
            )
        })
    }

    /// The service whose health stream is opened.
    pub(super) fn health(self, offered: &[String]) -> Option<HealthVersion> {
        let offers = |service: &str| offered.iter().any(|offered| offered == service);
        if self < Release::V1_37 {
            // Opened on every socket, offered or not.
            Some(HealthVersion::V1Alpha1)
        } else if offers("v1.DRAResourceHealth") {
            Some(HealthVersion::V1)
        } else {
            offers("v1alpha1.DRAResourceHealth").then_some(HealthVersion::V1Alpha1)
        }
    }

    /// How long a report about a device counts.
    pub(super) fn health_timeout(self, seconds: i64) -> Duration {
        match u64::try_from(seconds) {
            Ok(seconds @ 1..) if self >= Release::V1_35 => Duration::from_secs(seconds),
            _ => HEALTH_TIMEOUT,
        }
    }

    pub(super) fn reads_messages(self) -> bool {
        self >= Release::V1_36
    }

    /// Whether a device has a share.
    pub(super) fn reads_shares(self) -> bool {
        self >= Release::V1_35
    }
}
