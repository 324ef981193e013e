//! GKE's own plugin for NVIDIA's GPUs: `gpu_config.json` and the flags of its container, as its
//! code reads them (GoogleCloudPlatform/container-engine-accelerators:
//! `cmd/nvidia_gpu/nvidia_gpu.go`, `pkg/gpu/nvidia/manager.go`).
//!
//! GKE has no NVIDIA container runtime: the plugin passes nodes, and mounts the folder of the
//! driver's files. The contract `generic` does the same.

use super::super::tree::{Is, Table, Value};
use super::draft::{Draft, Offer};
use super::error::ImportError;
use super::field::{Decoder, Field};
use super::source::Source;
use super::values::{plain, resource, set_from, set_table, text, texts};
use std::collections::BTreeSet;

/// Every key that is read.
pub(super) const KEYS: &[&str] = &[
    "GPUPartitionSize",
    "GPUSharingConfig.GPUSharingStrategy",
    "GPUSharingConfig.MaxSharedClientsPerGPU",
    "MaxTimeSharedClientsPerGPU",
    "HealthCriticalXid",
    "GPUFractionDivisor",
    "XID_CONFIG",
];

/// A variable with Xids, which overrides `HealthCriticalXid`.
const XIDS: &str = "XID_CONFIG";
/// The Xid that counts in addition to the listed ones (`health_check/health_checker.go`).
const ALWAYS: u32 = 48;
/// The folder of the pipes of GKE's MPS control daemon, on the host and in a container.
const MPS_FOLDER: &str = "/tmp/nvidia-mps";

/// The mounts of every container: the flags with the paths on the host and in the container, and
/// their defaults.
const MOUNTS: [[(&str, &str); 2]; 2] = [
    [("host-path", "/home/kubernetes/bin/nvidia"), ("container-path", "/usr/local/nvidia")],
    [
        ("host-vulkan-icd-path", "/home/kubernetes/bin/nvidia/vulkan/icd.d"),
        ("container-vulkan-icd-path", "/etc/vulkan/icd.d"),
    ],
];

pub(super) fn read(source: &Source, draft: &mut Draft) -> Result<(), ImportError> {
    let root = source.file.as_ref().map(|file| Field::root(file, Decoder::Json));
    if let Some(root) = root.as_ref().filter(|root| !root.is_map()) {
        return Err(root.wrong("a configuration of GKE's plugin, which is a mapping,"));
    }
    if root.is_none() {
        draft.warn(
            "the manifest has no `gpu_config.json`: it is in /etc/nvidia on each node; without it \
             the plugin offers whole GPUs",
        );
    }
    let get = |key: &str| root.as_ref().and_then(|root| root.get(key));
    let mut gpus = resource("nvidia.com/gpu", "gpu");
    gpus.set("contract", text("generic"));
    let mut select = Table::default();
    select.set("vendor", texts(&["10de"]));
    select.set("driver", texts(&["nvidia"]));
    let size = draft.setting(get("GPUPartitionSize").filter(Field::has_effect), Field::text);
    select.set("part", plain(size.is_some()));
    if let Some(size) = size {
        draft.warn(format!(
            "`GPUPartitionSize` is `{size}`: every MIG instance is offered; the plugin requires \
             that all GPUs are divided in this way, and Holdfast does not check it"
        ));
    }
    let mut mounts: Vec<Value> = MOUNTS
        .iter()
        .map(|[host, container]| mount(at(source, *host), at(source, *container), true))
        .collect();
    share(&get, &mut gpus, &mut mounts, draft);
    set_table(&mut gpus, "select", select);
    gpus.set("mounts", Is::List(mounts));
    xids(source, &get, draft);
    draft.no_equivalent(
        get("GPUFractionDivisor"),
        "the plugin takes it from /etc/nvidia/gpu-fraction-divisor.txt only",
    );
    if let Some(root) = &root {
        draft.unknown(root, KEYS);
    }
    let place = root.map_or_else(|| "the container".to_owned(), |root| root.place());
    draft.offers.push(Offer { table: gpus, place });
    draft.warn(
        "device ids change: drain the node before the change, so that no running pod holds an old \
         id",
    );
    Ok(())
}

/// A path by its flag, or its default.
fn at(source: &Source, (flag, usual): (&str, &str)) -> String {
    let given = source.flags.last(&[flag], "").map(|given| given.field(Decoder::JsonOfYaml));
    given.and_then(|given| given.text().ok().map(str::to_owned)).unwrap_or_else(|| usual.to_owned())
}

fn mount(host: impl AsRef<str>, container: impl AsRef<str>, read_only: bool) -> Value {
    let mut mount = Table::default();
    mount.set("host", text(host.as_ref()));
    mount.set("container", text(container.as_ref()));
    mount.set("read_only", plain(read_only));
    Value { place: None, is: Is::Table(mount) }
}

/// Time sharing and MPS. The former key of time sharing overrides both.
fn share<'a>(
    get: &impl Fn(&str) -> Option<Field<'a>>,
    gpus: &mut Table,
    mounts: &mut Vec<Value>,
    draft: &mut Draft,
) {
    let keys = |config: &Field<'a>| {
        if config.is_map() { Ok(config.clone()) } else { Err(config.wrong("a mapping")) }
    };
    let config = draft.setting(get("GPUSharingConfig"), keys);
    let of = |key: &str| config.as_ref().and_then(|config| config.get(key));
    let strategy = draft.setting(of("GPUSharingStrategy"), |field| match field.text()? {
        known @ ("" | "time-sharing" | "mps") => Ok(known),
        _ => Err(field.wrong("`time-sharing` or `mps`")),
    });
    let (clients, former) = (of("MaxSharedClientsPerGPU"), get("MaxTimeSharedClientsPerGPU"));
    let count = |field: &Option<Field<'a>>, draft: &mut Draft| {
        draft.setting(field.clone(), Field::number).filter(|number| *number > 0)
    };
    let (now, by_former) = (count(&clients, draft), count(&former, draft));
    let (is_mps, number, field) = match (by_former, strategy.unwrap_or_default(), now) {
        (Some(number), _, _) => {
            if config.as_ref().is_some_and(Field::has_effect) {
                draft.warn(
                    "`GPUSharingConfig` is left out: `MaxTimeSharedClientsPerGPU` overrides it",
                );
            }
            (false, number, former)
        }
        (None, "", None) => return,
        (None, "", Some(_)) => {
            draft.warn("the GPUs are not shared: `GPUSharingStrategy` is missing");
            return;
        }
        (None, _, None) => {
            draft.warn("the GPUs are not shared: `MaxSharedClientsPerGPU` is missing or 0");
            return;
        }
        (None, strategy, Some(number)) => (strategy == "mps", number, clients),
    };
    if let Some(field) = field {
        set_from(gpus, "replicas", plain(number), &field);
    }
    gpus.set("per_container", text("one"));
    if is_mps {
        mounts.push(mount(MPS_FOLDER, MPS_FOLDER, false));
        let mut env = Table::default();
        env.set("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", text(&(100 / number).to_string()));
        set_table(gpus, "env", env);
        draft.warn(
            "`mps`: GKE's MPS control daemon is needed as before; a container may have one share, \
             and has no limit of memory unless `env` sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        );
    }
}

/// The Xids that make a GPU unhealthy: those of the variable, else those of the file, and 48.
/// Without a list, the defaults of Holdfast stay.
fn xids<'a>(source: &Source, get: &impl Fn(&str) -> Option<Field<'a>>, draft: &mut Draft) {
    #[cfg(test)]
    super::tests::record_lookup(XIDS);
    for elsewhere in source.flags.elsewhere.iter().filter(|known| known.name == XIDS) {
        draft.warn(format!(
            "`{XIDS}` at {} is left out: its value is not in the manifest; set `[health] \
             fatal_xids`",
            elsewhere.place
        ));
    }
    let variable = source.flags.last(&[], XIDS).map(|flag| flag.field(Decoder::JsonOfYaml));
    let listed = draft.setting(get("HealthCriticalXid"), |field| {
        field.items()?.iter().map(Field::number).collect::<Result<BTreeSet<u32>, _>>()
    });
    let given = draft.setting(variable, |field| {
        let text = &field.scalar_text()?.text;
        let numbers = text.split(',').map(|word| word.trim().parse::<u32>());
        numbers.collect::<Result<BTreeSet<u32>, _>>().map_err(|_| field.wrong("numbers"))
    });
    let Some(mut fatal) = given.or(listed).filter(|numbers| !numbers.is_empty()) else { return };
    fatal.insert(ALWAYS);
    let fatal = fatal.into_iter().map(|xid| Value { place: None, is: plain(xid) });
    let mut health = Table::default();
    health.set("fatal_xids", Is::List(fatal.collect()));
    draft.tables.set("health", Is::Table(health));
}
