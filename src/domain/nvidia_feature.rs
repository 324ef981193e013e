//! Parts of NVIDIA's driver that not every node has, and whether a container gets them.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt;

/// A part of NVIDIA's driver that not every node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NvidiaFeature {
    /// GDRCopy: copies to a GPU's memory by the processor.
    GdrCopy,
    /// GPUDirect Storage: transfers between disks and GPUs.
    Gds,
    /// The RDMA devices of the node, with NVIDIA's (Mellanox') OFED drivers or the kernel's own.
    Mofed,
}

/// The features that a node has.
pub type NvidiaFeatures = BTreeSet<NvidiaFeature>;

impl NvidiaFeature {
    /// All of them, in the order of an answer.
    pub const ALL: [NvidiaFeature; 3] =
        [NvidiaFeature::GdrCopy, NvidiaFeature::Gds, NvidiaFeature::Mofed];

    /// Its name in the configuration, and the class of its CDI name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            NvidiaFeature::GdrCopy => "gdrcopy",
            NvidiaFeature::Gds => "gds",
            NvidiaFeature::Mofed => "mofed",
        }
    }

    /// The variable of NVIDIA's container toolkit.
    #[must_use]
    pub fn variable(self) -> &'static str {
        match self {
            NvidiaFeature::GdrCopy => "NVIDIA_GDRCOPY",
            NvidiaFeature::Gds => "NVIDIA_GDS",
            NvidiaFeature::Mofed => "NVIDIA_MOFED",
        }
    }

    /// The kernel module whose presence switches it on. The GPU operator starts NVIDIA's plugin
    /// with the same rule (`assets/state-device-plugin/0400_configmap.yaml`): RDMA devices are of
    /// use for GPUDirect Storage.
    #[must_use]
    pub fn module(self) -> &'static str {
        match self {
            NvidiaFeature::GdrCopy => "gdrdrv",
            NvidiaFeature::Gds | NvidiaFeature::Mofed => "nvidia_fs",
        }
    }
}

/// Whether containers get a [`NvidiaFeature`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Switch {
    /// Never: `false`.
    Off,
    /// Always: `true`.
    On,
    /// Where its kernel module is loaded and its nodes exist: `"auto"`.
    #[default]
    Auto,
}

/// Implemented by hand: serde's `untagged` names no accepted value.
impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TruthOrAuto;

        impl Visitor<'_> for TruthOrAuto {
            type Value = Switch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false or \"auto\"")
            }

            fn visit_bool<E: Error>(self, is_on: bool) -> Result<Switch, E> {
                Ok(if is_on { Switch::On } else { Switch::Off })
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Switch, E> {
                if text == "auto" {
                    Ok(Switch::Auto)
                } else {
                    Err(E::unknown_variant(text, &["auto"]))
                }
            }
        }

        deserializer.deserialize_any(TruthOrAuto)
    }
}
