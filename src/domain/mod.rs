//! The shared vocabulary of all layers: pure values without a clock, disk, log or actor.
//!
//! A [`Device`] is a piece of hardware. A [`ResourceSpec`] defines which devices a resource offers,
//! and how. The [`Inventory`] is the list of devices published to the kubelet. A [`Grant`] is a
//! device given to a container, and an [`Entry`] is one durable fact about it. All maps are
//! ordered, so that the output of Holdfast is the same bytes every time.

mod api;
mod attributes;
mod checkpoint;
mod checkpoint_claim;
mod claim;
mod claim_evidence;
mod cluster;
mod contract;
mod device;
mod device_id;
mod durability;
mod edits;
mod entry;
mod evidence;
mod grant;
mod health;
mod hook;
mod inventory;
pub mod limits;
mod mps;
mod not_released;
mod null;
mod nvidia_driver;
mod nvidia_feature;
mod nvidia_node;
mod nvidia_roots;
mod nvlink;
mod nvml;
mod object;
mod observation;
mod pace;
mod pci;
mod pending_release;
mod plan;
mod pod;
mod policy;
mod printable;
mod refusal;
mod resource;
mod resource_name;
mod retention;
mod safeguard;
mod select;
mod sharing;
mod signal;
pub mod template;
mod time;
mod tls;
pub mod topology;
mod verdict;

pub use api::{Api, HeldBy, InSlice};
pub use attributes::Attributes;
pub use checkpoint::{Checkpoint, CheckpointEntry};
pub use checkpoint_claim::{CheckpointClaim, CheckpointClaimDevice};
pub use claim::{
    Allocated, AllocatedClaim, ClaimHealth, ClaimHold, ClaimRef, ClaimedDevice, ConfigSource,
    DRA_DRIVER, DraName, OpaqueConfig, PreparedDevice, own_name,
};
pub use claim_evidence::{
    CLAIM_PODS_MAX, ClaimEvidence, ClaimLook, KubeletClaim, KubeletClaims, NamedDevice,
    NamedDevices,
};
pub use cluster::{ApiCredentials, NodeLabels, Reported};
pub use contract::{
    ByPath, CdiAnswer, Contract, ContractKind, DeviceIdStrategy, DeviceListStrategy, FpgaMode,
    IntelFpgaOptions, IntelGpuOptions, MpsControl, NvidiaOptions, SriovOptions, VdpaType,
    XilinxOptions,
};
pub use device::{Device, DeviceClass, DeviceNode, INTEGRATED_KEY};
pub use device_id::DeviceId;
pub use durability::{Durability, LedgerHealth, Unreadable, UnreadableReason};
pub use edits::{ApiCapabilities, ContainerEdits, EditDevice, EditMount};
pub use entry::{Entry, Gone, Listed, note_gone, note_list};
pub use evidence::{Evidence, Unread};
pub use grant::{AllocId, Grant, GrantState, GrantedDevice, KubeletGeneration};
pub use health::{Health, HealthTimings, Reason};
pub use hook::{
    Check, CheckResult, DueHooks, FormerHolder, Hook, HookState, Hooks, PendingHook, PendingHooks,
    Phase, StartBlocked, note_hook, times, without_output,
};
pub use inventory::{Inventory, Offered, Offering};
pub use mps::{MPS_CLIENTS_MAX, MpsSetup, MpsState, MpsStates, mps_run_here};
pub use not_released::NotReleased;
pub use null::null_as_empty;
#[cfg(test)]
pub(crate) use null::with_one_null;
pub use nvidia_driver::{CdiHookProgram, DriverFile, DriverLibrary, DriverLink, NvidiaDriver};
pub use nvidia_feature::{NvidiaFeature, NvidiaFeatures, Switch};
pub use nvidia_node::{NvidiaGpu, NvidiaInstance, NvidiaNode};
pub use nvidia_roots::NvidiaRoots;
pub use nvlink::NvLinks;
pub use nvml::{
    GpuDescription, MigAttributes, MigInstance, MigPlace, MigStrategy, NvmlGpu, NvmlGpuQuery,
    NvmlLibrary, NvmlQuery, NvmlSnapshot, requests_names,
};
pub use object::{DeviceNumber, Object, Objects, is_driver_wide, overlap, share, share_with_claim};
pub use observation::{
    CgroupState, CheckpointGrant, ListedContainer, ListedPod, Observation, PodReport,
};
pub use pace::Pace;
pub use pci::{ParsePciAddressError, PciAddress, PciFunction, is_scalable_name};
pub use pending_release::{MissingProof, PendingRelease, PendingReleases, PodSight};
pub use plan::Plan;
pub use pod::{PodName, PodRef, is_of_static_pod};
pub use policy::{AtKubeletStart, HealthPolicy, Policy, Refuse, WhenNotDurable};
pub use printable::{Printable, clip_middle, is_unprintable, printable, printable_json};
pub use refusal::Refusal;
pub use resource::{
    CharPath, MemberPath, MountSpec, NodePattern, ResourceSpec, SELECTABLE, Scope, Select,
};
pub use resource_name::{InvalidResourceName, MIG_PROFILE, NODE, ResourceName};
pub use retention::Retention;
pub use safeguard::Safeguard;
pub use select::{ParsePfError, Pf, PfSelect, UsbSelect};
pub use sharing::{PerContainer, Sharing};
pub use signal::{Counter, DeviceEvent, EventKind, GpuInstance, Signals, Source, Symptom};
pub use time::{Moment, Timestamp};
pub use tls::TlsFiles;
pub use verdict::{
    Cordon, Incident, OperatorRequest, Verdict, VerdictState, Verdicts, note_verdict,
};
