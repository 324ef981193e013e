//! Xid errors by NVML's events: one watch for all GPUs.
//!
//! NVML stays initialised during the watch. So the watch ends when no GPU is to be watched: then a
//! GPU can be reset, its MIG mode can be changed and the driver can be unloaded.
//!
//! Only critical Xid errors are registered. NVIDIA's device plugin also registers ECC errors, and
//! skips these events: each uncorrectable error is an Xid too.
//!
//! nvml-wrapper does not return the MIG instance of an event, which NVML has. So an event of a GPU
//! in MIG mode is one of the whole GPU.

use crate::domain::{DeviceEvent, PciAddress};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// The longest wait for an event, and the period of polls: the process wakes up when the machine
/// wakes up anyway. An event ends the wait at once.
pub const EVENT_WAIT_MAX: Duration = Duration::from_secs(30);

/// What a watch reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NvmlReport {
    /// From now on no error is missed. If some GPUs cannot be watched, the reason for the first.
    Watching(Option<String>),
    /// A wait has ended without an event.
    Idle,
    /// A GPU has reported an error.
    Seen(DeviceEvent),
    /// The watch ends, and NVML is closed: the reason, unless the GPUs to watch have changed.
    Ended(Option<String>),
}

#[cfg(not(feature = "nvml"))]
pub(super) fn watch_events(
    _: &[PathBuf],
    _: watch::Receiver<BTreeSet<PciAddress>>,
    _: &mut dyn FnMut(NvmlReport),
) -> Option<String> {
    Some(super::NOT_BUILT.to_owned())
}

#[cfg(feature = "nvml")]
pub(super) use with_nvml::watch_events;

#[cfg(feature = "nvml")]
mod with_nvml {
    use super::*;
    use crate::domain::EventKind;
    use crate::host::until_tick;
    use nvml_wrapper::bitmasks::event::EventTypes;
    use nvml_wrapper::enums::device::SampleValue;
    use nvml_wrapper::enums::event::XidError;
    use nvml_wrapper::error::NvmlError;
    use nvml_wrapper::struct_wrappers::event::EventData;
    use nvml_wrapper::structs::device::FieldId;
    use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
    use nvml_wrapper::{Device, EventSet, Nvml};
    use std::collections::BTreeMap;

    /// The code for the recovery action that a GPU needs after any error, in drivers since 565.
    const RECOVERY_ACTION: u32 = 154;

    /// The first wait after a registration. It is doubled with each further one: when the daemon
    /// starts, MIG instances are listed a little later than other GPUs.
    const FIRST_WAIT: Duration = Duration::from_secs(1);

    /// Watches the GPUs of `gpus` with the first library that can be initialised, until none is to
    /// be watched, or until the end of a wait without an event after another set was sent. May
    /// hang in NVML, for ever. Returns why it has ended, unless the GPUs have changed.
    pub(in crate::host::nvml) fn watch_events(
        libraries: &[PathBuf],
        mut gpus: watch::Receiver<BTreeSet<PciAddress>>,
        report: &mut dyn FnMut(NvmlReport),
    ) -> Option<String> {
        let mut why = Vec::new();
        for library in libraries {
            match Nvml::builder().lib_path(library.as_os_str()).init() {
                Ok(nvml) => return watch(&nvml, &mut gpus, report).err(),
                Err(error) => why.push(format!("{}: {error}", library.display())),
            }
        }
        Some(if why.is_empty() { crate::host::nvml::not_found() } else { why.join("; ") })
    }

    fn watch(
        nvml: &Nvml,
        gpus: &mut watch::Receiver<BTreeSet<PciAddress>>,
        report: &mut dyn FnMut(NvmlReport),
    ) -> Result<(), String> {
        let wanted = gpus.borrow_and_update().clone();
        if wanted.is_empty() {
            return Ok(());
        }
        let Registered { set, devices, incomplete } = register(nvml, &wanted)?;
        report(NvmlReport::Watching(incomplete));
        let mut longest = FIRST_WAIT;
        loop {
            let is_idle = match set.wait(wait_ms(longest)) {
                Ok(data) => {
                    events(&data, &devices)
                        .into_iter()
                        .map(NvmlReport::Seen)
                        .for_each(&mut *report);
                    false
                }
                Err(NvmlError::Timeout) => true,
                Err(error) => return Err(format!("waiting for events failed: {error}")),
            };
            // Errors often come in groups, from several GPUs. Those that come while the GPUs are
            // registered again would be lost, so another set of GPUs waits for a quiet moment.
            let is_over = gpus.has_changed().map_or(true, |changed| changed && is_idle);
            if is_over || gpus.borrow().is_empty() {
                return Ok(());
            }
            if is_idle {
                report(NvmlReport::Idle);
                longest = (longest * 2).min(EVENT_WAIT_MAX);
            }
        }
    }

    /// The time until the next moment of a poll, a little later rather than earlier; `longest` at
    /// most.
    fn wait_ms(longest: Duration) -> u32 {
        let wait = until_tick(EVENT_WAIT_MAX).min(longest);
        u32::try_from(wait.as_millis()).unwrap_or(u32::MAX).saturating_add(1)
    }

    struct Registered<'nvml> {
        set: EventSet<'nvml>,
        devices: BTreeMap<PciAddress, Device<'nvml>>,
        incomplete: Option<String>,
    }

    /// Registers every GPU that reports Xid errors.
    fn register<'nvml>(
        nvml: &'nvml Nvml,
        gpus: &BTreeSet<PciAddress>,
    ) -> Result<Registered<'nvml>, String> {
        let (mut devices, mut incomplete) = (BTreeMap::new(), None);
        for gpu in gpus {
            let device = nvml.device_by_pci_bus_id(gpu.to_string());
            match device.and_then(|device| Ok((device.supported_event_types()?, device))) {
                Ok((types, device)) if types.contains(EventTypes::CRITICAL_XID_ERROR) => {
                    devices.insert(*gpu, device);
                }
                Ok(_) => note(&mut incomplete, *gpu, &"it reports no Xid errors"),
                Err(error) => note(&mut incomplete, *gpu, &error),
            }
        }
        // A failed registration also frees the set.
        while !devices.is_empty() {
            let set = nvml.create_event_set().map_err(|error| format!("no events: {error}"))?;
            match register_all(set, &devices) {
                Ok(set) => return Ok(Registered { set, devices, incomplete }),
                Err((gpu, error)) => {
                    note(&mut incomplete, gpu, &error);
                    devices.remove(&gpu);
                }
            }
        }
        Err(incomplete.unwrap_or_default())
    }

    fn note(incomplete: &mut Option<String>, gpu: PciAddress, why: &dyn std::fmt::Display) {
        incomplete.get_or_insert_with(|| format!("the GPU {gpu}: {why}"));
    }

    fn register_all<'nvml>(
        mut set: EventSet<'nvml>,
        devices: &BTreeMap<PciAddress, Device<'nvml>>,
    ) -> Result<EventSet<'nvml>, (PciAddress, NvmlError)> {
        for (gpu, device) in devices {
            set = device
                .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                .map_err(|failed| (*gpu, failed.error))?;
        }
        Ok(set)
    }

    /// The error of an event, for each GPU that it may be of.
    fn events(
        data: &EventData<'_>,
        devices: &BTreeMap<PciAddress, Device<'_>>,
    ) -> Vec<DeviceEvent> {
        let Some(XidError::Value(code)) = data.event_data else { return Vec::new() };
        let Ok(code) = u32::try_from(code) else { return Vec::new() };
        let kind = action(code, &data.device).unwrap_or(EventKind::Xid(code));
        let gpus = match address(&data.device) {
            Some(gpu) => vec![gpu],
            // The GPU no longer answers. Then it does not answer to its registered handle either.
            None => {
                let lost = devices.iter().filter(|(_, device)| address(device).is_none());
                lost.map(|(gpu, _)| *gpu).collect()
            }
        };
        let event = |at| DeviceEvent { at, whole_slot: true, instance: None, kind: kind.clone() };
        gpus.into_iter().map(event).collect()
    }

    fn address(device: &Device<'_>) -> Option<PciAddress> {
        device.pci_info().ok()?.bus_id.parse().ok()
    }

    /// The recovery action that the GPU needs now, if the event is about it: the event has no text.
    fn action(code: u32, device: &Device<'_>) -> Option<EventKind> {
        let field = FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
        let values = (code == RECOVERY_ACTION).then(|| device.field_values_for(&[field]))?;
        let number = match values.ok()?.pop()?.ok()?.value.ok()? {
            SampleValue::U32(number) => number.into(),
            SampleValue::U64(number) => number,
            SampleValue::I64(number) => u64::try_from(number).ok()?,
            SampleValue::F64(_) => return None,
        };
        // The names are those of the lines in the kernel's log.
        Some(EventKind::RecoveryAction(match number {
            0 => None,
            1 => Some("GPU Reset Required".to_owned()),
            2 => Some("Node Reboot Required".to_owned()),
            3 => Some("Drain P2P".to_owned()),
            4 => Some("Drain and Reset".to_owned()),
            other => Some(format!("recovery action {other}")),
        }))
    }
}
