//! The API that gives the devices of a resource to pods: what the kubelet's list and the slice have
//! of a device, by its holder.
//!
//! | | `plugin` | `dra` | `both` | on the way to `plugin` |
//! | --- | --- | --- | --- | --- |
//! | free | list | slice | list, slice | slice with a taint; list as before |
//! | held by a container | list | list, slice with a taint | the same | the same |
//! | held by a claim | slice with a taint | slice | slice | slice with a taint |
//!
//! A device that is not given by number is unhealthy in the list, as long as there is a list. The
//! ledger decides who gets a device: a list and a slice are always a little late.

use std::time::Duration;

/// The API of Kubernetes that gives the devices of a resource to new pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Api {
    /// The kubelet's device-plugin API: a pod requests a number of devices.
    #[default]
    Plugin,
    /// Dynamic Resource Allocation: a pod has a claim, and the scheduler allocates devices to it.
    Dra,
    /// Both: the first that asks for a device gets it.
    Both,
    /// The device-plugin API from now on. The schedulers do not know yet that no new claim gets a
    /// device: each slice has a taint.
    Returning {
        /// Whether pods could also request a number until now.
        by_number: bool,
    },
}

/// Who holds a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldBy {
    /// It is free.
    Nothing,
    /// A container that got it through the device plugin.
    Container,
    /// A claim.
    Claim,
}

/// What a slice has of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InSlice {
    /// Nothing: the device is not in it.
    Absent,
    /// The device, for new claims if it is not allocated.
    Offered,
    /// The device, with a taint: a container holds it.
    Held,
    /// The device, with a taint: its resource gives no device to new claims.
    Ending,
}

impl Api {
    /// How long the schedulers have to learn of the taints of [`Api::Returning`]. A slice is
    /// written within a second, and their watches deliver it within milliseconds; a busy control
    /// plane takes some seconds.
    pub const KNOWN_WITHIN: Duration = Duration::from_secs(10);

    /// The value of the key `api`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Api::Plugin | Api::Returning { .. } => "plugin",
            Api::Dra => "dra",
            Api::Both => "both",
        }
    }

    /// Whether claims may be prepared with its devices.
    #[must_use]
    pub fn serves_claims(self) -> bool {
        self != Api::Plugin
    }

    /// Whether a free device is given by number.
    #[must_use]
    pub fn gives_by_number(self) -> bool {
        self.is_in_list(HeldBy::Nothing)
    }

    /// Whether the kubelet's list shows the device with its own health. If not, it is unhealthy
    /// there: the kubelet gives it to no container. A held id stays as it is for its container,
    /// which the kubelet starts again with it (I3).
    #[must_use]
    pub fn is_in_list(self, held: HeldBy) -> bool {
        match (self, held) {
            (_, HeldBy::Container) => true,
            (_, HeldBy::Claim) | (Api::Dra, HeldBy::Nothing) => false,
            (Api::Plugin | Api::Both, HeldBy::Nothing) => true,
            (Api::Returning { by_number }, HeldBy::Nothing) => by_number,
        }
    }

    /// What the slice has of a device.
    #[must_use]
    pub fn in_slice(self, held: HeldBy) -> InSlice {
        match (self, held) {
            // The claim lives on.
            (Api::Plugin | Api::Returning { .. }, HeldBy::Claim)
            | (Api::Returning { .. }, HeldBy::Nothing) => InSlice::Ending,
            (Api::Plugin, _) => InSlice::Absent,
            (_, HeldBy::Container) => InSlice::Held,
            (Api::Dra | Api::Both, _) => InSlice::Offered,
        }
    }

    /// The API after a reload, until the schedulers know of the change. `before` is the API until
    /// now.
    #[must_use]
    pub fn after(self, before: Api) -> Api {
        match (before, self) {
            (Api::Returning { .. }, Api::Plugin) => before,
            (Api::Dra | Api::Both, Api::Plugin) => {
                Api::Returning { by_number: before.gives_by_number() }
            }
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDERS: [HeldBy; 3] = [HeldBy::Nothing, HeldBy::Container, HeldBy::Claim];

    #[test]
    fn each_mode_says_this_of_a_free_and_of_a_held_device() {
        use InSlice::{Absent, Ending, Held, Offered};
        let of_dra = Api::Returning { by_number: false };
        let of_both = Api::Returning { by_number: true };
        for (api, list, slice) in [
            (Api::Plugin, [true, true, false], [Absent, Absent, Ending]),
            (Api::Dra, [false, true, false], [Offered, Held, Offered]),
            (Api::Both, [true, true, false], [Offered, Held, Offered]),
            (of_dra, [false, true, false], [Ending, Held, Ending]),
            (of_both, [true, true, false], [Ending, Held, Ending]),
        ] {
            assert_eq!(HOLDERS.map(|held| api.is_in_list(held)), list, "{api:?}");
            assert_eq!(HOLDERS.map(|held| api.in_slice(held)), slice, "{api:?}");
        }
    }

    #[test]
    fn only_the_way_back_to_the_device_plugin_waits_for_the_schedulers() {
        let returning = |by_number| Api::Returning { by_number };
        for (before, configured, now) in [
            (Api::Plugin, Api::Dra, Api::Dra),
            (Api::Plugin, Api::Both, Api::Both),
            (Api::Dra, Api::Both, Api::Both),
            (Api::Both, Api::Dra, Api::Dra),
            (Api::Dra, Api::Plugin, returning(false)),
            (Api::Both, Api::Plugin, returning(true)),
            (returning(false), Api::Plugin, returning(false)),
            (returning(false), Api::Dra, Api::Dra),
            (returning(true), Api::Both, Api::Both),
            (Api::Plugin, Api::Plugin, Api::Plugin),
        ] {
            assert_eq!(configured.after(before), now, "{before:?} to {configured:?}");
            assert_eq!(now.as_str(), configured.as_str());
        }
    }

    /// A claim is allocated only to an untainted device, and a number only to a listed one. Where
    /// both are possible, the ledger decides.
    #[test]
    fn only_both_offers_a_free_device_twice() {
        for api in [Api::Plugin, Api::Dra, Api::Both, Api::Returning { by_number: true }] {
            let twice = api.gives_by_number() && api.in_slice(HeldBy::Nothing) == InSlice::Offered;
            assert_eq!(twice, api == Api::Both, "{api:?}");
        }
    }
}
