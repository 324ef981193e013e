//! To how many containers a device goes.

use super::device::DeviceId;
use super::resource::ResourceName;
use serde::Deserialize;

/// How the devices of a resource are shared, and so which ids the kubelet counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Each device has one container at a time. Only then can somebody else provably have it (I2).
    Exclusive,
    /// Each device has so many containers; an id is a share of a device, [`DeviceId::share`].
    Replicas(u32),
    /// All devices together have so many containers, and each of them gets all. An id is a number that means nothing.
    Pool(u32),
}

impl Sharing {
    /// Each device for `n` containers; one is exclusive.
    #[must_use]
    pub fn replicas(n: u32) -> Self {
        if n == 1 { Sharing::Exclusive } else { Sharing::Replicas(n) }
    }

    /// The ids by which a device is offered, or the whole pool.
    pub fn ids(self, device: &DeviceId) -> impl Iterator<Item = DeviceId> {
        let shares = match self {
            Sharing::Exclusive => 1,
            Sharing::Replicas(shares) | Sharing::Pool(shares) => shares,
        };
        (0..shares).map(move |n| match self {
            Sharing::Exclusive => device.clone(),
            Sharing::Replicas(_) => device.share(n),
            Sharing::Pool(_) => DeviceId::new(n.to_string()),
        })
    }

    /// The device behind an id, or the whole pool, which has the resource's name.
    #[must_use]
    pub fn whole(self, resource: &ResourceName, id: &DeviceId) -> DeviceId {
        match self {
            Sharing::Pool(_) => DeviceId::new(resource.as_str()),
            // A share that is held from a time when the device was shared counts too.
            Sharing::Exclusive | Sharing::Replicas(_) => id.shared().unwrap_or_else(|| id.clone()),
        }
    }
}

/// How much of a resource one container may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PerContainer {
    /// As much as it asks for.
    #[default]
    Any,
    /// One id: two shares of a device are no more of it (NVIDIA's `failRequestsGreaterThanOne`).
    One,
    /// As many as it asks for, each of another device.
    Distinct,
}
