//! Devices that the API server refuses. It refuses a slice as a whole, so the slice is written
//! without them.
//!
//! The server mostly names the device. If it does not, the device is found by halves: the answer to
//! a write with one half of the candidates shows which half has it.

use super::super::api;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A slice: its pool and its number.
pub(super) type Place = (String, u32);

/// Devices that were refused, by pool and name, as they were refused. A device that has changed is
/// tried again, and any other one after a time: the reason may have been temporary.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    refused: BTreeMap<(String, String), Refused>,
    search: Option<Search>,
    /// Slices that are refused for no device, until they are accepted or the devices change.
    hopeless: BTreeSet<Place>,
}

/// A refused device.
#[derive(Debug)]
struct Refused {
    device: api::Device,
    since: Duration,
}

/// How long a refused device that does not change is left out, at least.
const REFUSED_FOR: Duration = Duration::from_secs(1800);

/// A search by halves.
#[derive(Debug, Default)]
struct Search {
    place: Place,
    /// One of these is refused, if any device is.
    candidates: Vec<String>,
    /// The next write has this number of them.
    tried: usize,
    /// Devices that no accepted write had, and that are left out meanwhile: they may be refused
    /// too.
    untried: Vec<String>,
    /// Whether a write without all of the candidates was accepted: then a device is the cause.
    is_proven: bool,
}

/// What follows from the answer to a write of a search.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The next write continues the search, or there is none.
    Nothing,
    /// This device is refused from now on.
    Device(String),
    /// No device is the cause.
    NoDevice,
}

impl Refusals {
    /// Refuses a device.
    pub(super) fn refuse(&mut self, pool: &str, device: api::Device, since: Duration) {
        let is_in = |search: &mut Search| search.candidates.contains(&device.name);
        drop(self.search.take_if(is_in));
        self.refused.insert((pool.to_owned(), device.name.clone()), Refused { device, since });
    }

    /// Tries devices again that were refused long ago.
    pub(super) fn expire(&mut self, now: Duration) {
        self.refused.retain(|_, refused| now.saturating_sub(refused.since) < REFUSED_FOR);
    }

    /// Whether the device is left out of a write: it was refused, or it is not in the part that is
    /// tried.
    pub(super) fn leaves_out(&self, pool: &str, index: u32, device: &api::Device) -> bool {
        let key = (pool.to_owned(), device.name.clone());
        let is_refused =
            self.refused.get(&key).is_some_and(|refused| refused.device.is_like(device));
        is_refused
            || self.search.as_ref().is_some_and(|search| {
                search.place.0 == pool && search.place.1 == index && !search.tries(&device.name)
            })
    }

    /// The slice of the search.
    pub(super) fn searched(&self) -> Option<&Place> {
        self.search.as_ref().map(|search| &search.place)
    }

    /// The API server has accepted the slice, or has it already in the tried form.
    pub(super) fn accept(&mut self, place: &Place) -> Found {
        self.hopeless.remove(place);
        let Some(mut search) = self.search.take_if(|search| search.place == *place) else {
            return Found::Nothing;
        };
        search.candidates.drain(..search.tried);
        search.is_proven = true;
        self.narrow(search)
    }

    /// The API server has refused the slice and named no device. `sent` are the names of the
    /// devices that may be left out.
    pub(super) fn search(&mut self, place: &Place, sent: Vec<String>) -> Found {
        let search = match self.search.take_if(|search| search.place == *place) {
            Some(search) if search.tried == 0 => None,
            Some(mut search) => {
                search.untried.extend(search.candidates.drain(search.tried..));
                Some(search)
            }
            None if sent.is_empty() || self.hopeless.contains(place) => None,
            None => {
                let place = place.clone();
                Some(Search { place, candidates: sent, ..Search::default() })
            }
        };
        match search {
            Some(search) => self.narrow(search),
            None => {
                self.hopeless.insert(place.clone());
                Found::NoDevice
            }
        }
    }

    fn narrow(&mut self, mut search: Search) -> Found {
        if let ([device], true) = (&search.candidates[..], search.is_proven) {
            return Found::Device(device.clone());
        }
        // With one candidate none is tried: if that is refused too, no device is the cause.
        search.tried = search.candidates.len() / 2;
        self.search = Some(search);
        Found::Nothing
    }

    /// Forgets devices and slices that are no longer wanted.
    pub(super) fn keep(&mut self, is_wanted: impl Fn(&str, &str) -> bool) {
        self.refused.retain(|(pool, device), _| is_wanted(pool, device));
        self.hopeless.clear();
        let is_over = |search: &mut Search| {
            let mut devices = search.candidates.iter().chain(&search.untried);
            devices.any(|device| !is_wanted(&search.place.0, device))
        };
        drop(self.search.take_if(is_over));
    }

    /// Ends every search, and tries refused devices again.
    pub(super) fn forget(&mut self) {
        *self = Refusals::default();
    }
}

impl Search {
    /// Whether the device is in the next write.
    fn tries(&self, device: &str) -> bool {
        let at = self.candidates.iter().position(|it| it == device);
        at.is_none_or(|at| at < self.tried) && !self.untried.iter().any(|it| it == device)
    }
}
