//! Sharing of devices between containers.

use super::device_id::DeviceId;
use super::resource_name::ResourceName;
use serde::Deserialize;

/// How containers share the devices of a resource. This decides which ids the kubelet counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// A device has one container at a time. Only then can another container provably have it (I2).
    Exclusive,
    /// A device has up to this number of containers. An id is one share of a device,
    /// [`DeviceId::share`].
    Replicas(u32),
    /// All devices together have up to this number of containers, and each container gets all
    /// devices. An id is a number without a meaning.
    Pool(u32),
}

impl Sharing {
    /// A device for `n` containers; one means exclusive.
    #[must_use]
    pub fn replicas(n: u32) -> Self {
        if n == 1 { Sharing::Exclusive } else { Sharing::Replicas(n) }
    }

    /// The offered ids of a device, or of the whole pool.
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

    /// The device behind an id. For a pool it is the whole pool, with the resource's name.
    #[must_use]
    pub fn whole(self, resource: &ResourceName, id: &DeviceId) -> DeviceId {
        match self {
            Sharing::Pool(_) => DeviceId::new(resource.as_str()),
            // A share that is still held from a time when the device was shared counts too.
            Sharing::Exclusive | Sharing::Replicas(_) => id.shared().unwrap_or_else(|| id.clone()),
        }
    }
}

/// The limit of a resource for one container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PerContainer {
    /// Any number of ids.
    #[default]
    Any,
    /// One id: a second share of a device gives no additional capacity (NVIDIA's
    /// `failRequestsGreaterThanOne`).
    One,
    /// Any number of ids, each of another device.
    Distinct,
}
