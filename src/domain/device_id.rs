//! The id of a device, as the kubelet knows it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The id of a device, or of one share of it, in the kubelet's list.
///
/// Clones share one text: on a node of ten thousand devices each id is in a dozen lists.
///
/// An id is chosen once and remembered (I6). It comes from a UUID, serial number or address, never
/// from an enumeration order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// Takes the text as it is.
    pub fn new(text: impl Into<String>) -> Self {
        DeviceId(Arc::from(text.into()))
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of the device that this is a share of; `None` when it is not a share.
    #[must_use]
    pub fn shared(&self) -> Option<Self> {
        let (device, n) = self.0.rsplit_once("::")?;
        n.parse::<u32>().is_ok().then(|| DeviceId(Arc::from(device)))
    }

    /// Whether this may be an id of a pool, which is a plain number.
    #[must_use]
    pub fn is_number(&self) -> bool {
        self.0.parse::<u32>().is_ok()
    }

    /// The id of the `n`-th share of this device, `id::n`, as NVIDIA's plugin names its replicas.
    #[must_use]
    pub fn share(&self, n: u32) -> Self {
        DeviceId(Arc::from(format!("{}::{n}", self.0)))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
