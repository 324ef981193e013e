//! The vocabulary: pure values that every layer shares, with no clock, disk, log or actor.
//!
//! A [`Device`] is a piece of hardware; a [`ResourceSpec`] says which devices a resource offers and how; the
//! [`Inventory`] is what the kubelet is told; a [`Grant`] is what a container holds, and an [`Entry`] is one durable
//! fact about it. Ordered maps only: what leaves Holdfast is the same bytes every time.

mod attributes;
mod checkpoint;
mod contract;
mod device;
mod durability;
mod edits;
mod evidence;
mod gather;
mod grant;
mod health;
mod hook;
mod inventory;
pub mod limits;
mod nvlink;
mod nvml;
mod object;
mod observation;
mod pci;
mod plan;
mod policy;
mod printable;
mod refusal;
mod resource;
mod retention;
mod safeguard;
mod select;
mod sharing;
mod signal;
mod time;
pub mod topology;
mod verdict;

pub use attributes::Attributes;
pub use checkpoint::{Checkpoint, CheckpointEntry};
pub use contract::{
    ByPath, CdiAnswer, Contract, ContractKind, DeviceIdStrategy, DeviceListStrategy, FpgaMode, IntelFpgaOptions, IntelGpuOptions,
    NvidiaOptions, SriovOptions, VdpaType, XilinxOptions,
};
pub use device::{Device, DeviceClass, DeviceId, DeviceNode};
pub use durability::{Because, Durability, Kept, Unreadable};
pub use edits::{ContainerEdits, EditDevice, EditMount, Wire};
pub use evidence::{Evidence, Unread};
pub use gather::{Arrange, Gather};
pub use grant::{AllocId, Entry, Gone, Grant, GrantState, GrantedDevice, KubeletGeneration, Listed, PodRef, note_gone, note_list};
pub use health::{Health, Reason, Weight};
pub use hook::{Barred, Check, CheckResult, Due, Former, Hook, HookState, Hooks, Owed, OwedHook, Phase, note_hook, times, without_output};
pub use inventory::{Inventory, Offered, Offering};
pub use nvlink::NvLinks;
pub use nvml::{MigPlace, NvmlAsked, NvmlGpu, NvmlLibrary, NvmlQuestion, NvmlSnapshot, asks_for_names};
pub use object::{DeviceNumber, Object, Objects, is_driver_wide, overlap, share};
pub use observation::{CgroupState, KeptGrant, ListedContainer, ListedPod, Observation, PodName};
pub use pci::{ParsePciAddressError, PciAddress, PciFunction};
pub use plan::Plan;
pub use policy::{AtKubeletStart, HealthPolicy, Policy, Refuse, WhenNotDurable};
pub use printable::{Printable, is_unprintable, printable, printable_json};
pub use refusal::Refusal;
pub use resource::{CharPath, InvalidResourceName, MountSpec, NODE, NodePattern, ResourceName, ResourceSpec, Select};
pub use retention::Retention;
pub use safeguard::Safeguard;
pub use select::{ParsePfError, Pf, PfSelect};
pub use sharing::{PerContainer, Sharing};
pub use signal::{Complaint, Counter, DeviceEvent, EventKind, Signals, Source};
pub use time::{Moment, Timestamp};
pub use verdict::{Cordon, Incident, Instruction, State, Verdict, Verdicts, note_verdict};
