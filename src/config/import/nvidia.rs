//! NVIDIA's k8s-device-plugin: the YAML of `version: v1`, as its code parses it.

use super::super::tree::Table;
use super::doc::Field;
use super::{Draft, ImportError, plain, resource, set_table, text, texts};

const GPU: &str = "nvidia.com/gpu";

pub(super) fn read(root: &Field<'_>, draft: &mut Draft) -> Result<(), ImportError> {
    if !root.is_map() {
        return Err(root.wrong("a configuration of NVIDIA's plugin, which begins with `version: v1`"));
    }
    if let Some(version) = root.get("version")
        && version.text()? != "v1"
    {
        return Err(version.wrong("`v1`"));
    }
    let flags = root.get("flags");
    let plugin = flags.as_ref().and_then(|flags| flags.get("plugin"));
    let mut options = options(flags.as_ref(), plugin.as_ref(), draft)?;
    if let Some(imex) = root.get("imex") {
        if let Some(channels) = imex.get("channelIDs").filter(Field::says_something) {
            let channels = channels.items()?.iter().map(Field::number).collect::<Result<Vec<_>, _>>()?;
            options.set("imex_channels", plain(format!("{channels:?}")));
        }
        draft.no_equal(Some(&imex), &[("required", "a channel whose node is missing fails the container that asks for it")]);
    }
    let mut gpu = resource(GPU, "gpu");
    gpu.set("contract", text("nvidia"));
    let mut select = Table::default();
    select.set("vendor", texts(&["10de"]));
    select.set("driver", texts(&["nvidia"]));
    mig(flags.as_ref(), &mut select, draft)?;
    if let Some(sharing) = root.get("sharing") {
        share(&sharing, flags.as_ref(), &mut gpu, &mut options, draft)?;
    }
    if let Some(policy) = plugin.as_ref().and_then(|plugin| plugin.get("sharedDevicesAllocationPolicy")) {
        let placement = match policy.text()? {
            "distributed" => "spread",
            "packed" => "packed",
            _ => return Err(policy.wrong("`distributed` or `packed`")),
        };
        gpu.set("placement", text(placement));
    }
    set_table(&mut gpu, "select", select);
    set_table(&mut gpu, "nvidia", options);
    draft.resources.push(gpu);
    draft.no_equal(
        Some(root),
        &[("resources", "NVIDIA's plugin reads it and does not use it either; `name` and `select` of a [[resource]] do this here")],
    );
    draft.no_equal(
        flags.as_ref(),
        &[
            ("gfd", "labels are gpu-feature-discovery's, which goes on beside Holdfast"),
            ("failOnInitError", "Holdfast waits for a driver, and `holdfast status` tells what is missing"),
            ("useNodeFeatureAPI", "Holdfast sets no labels"),
        ],
    );
    for (key, usual, why) in [
        ("nvidiaDriverRoot", "/", "the library is found by itself, or by `[nvidia] nvml`"),
        ("nvidiaDevRoot", "/", "the driver's nodes are looked for below /dev only"),
        ("deviceDiscoveryStrategy", "auto", "GPUs are found in the driver's files; Tegra's integrated GPU is not among them"),
    ] {
        let Some(setting) = flags.as_ref().and_then(|flags| flags.get(key)) else { continue };
        if setting.text()? != usual {
            draft.no_equal(flags.as_ref(), &[(key, why)]);
        }
    }
    Ok(())
}

/// The table `nvidia` of the resource.
fn options(flags: Option<&Field<'_>>, plugin: Option<&Field<'_>>, draft: &mut Draft) -> Result<Table, ImportError> {
    let mut options = Table::default();
    let of_plugin = |key: &str| plugin.and_then(|plugin| plugin.get(key));
    if let Some(strategy) = of_plugin("deviceListStrategy").filter(Field::says_something) {
        // One text may be several strategies, as the flag has them.
        let strategies: Vec<String> =
            strategy.texts()?.iter().flat_map(|text| text.split(',')).map(|text| text.trim().to_owned()).collect();
        if strategies.iter().any(|strategy| strategy.starts_with("cdi-")) {
            draft.warn(
                "CDI names are those of `nvidia-ctk cdi generate` here, which has to run on the node; NVIDIA's plugin writes such a file itself",
            );
        }
        options.set("device_list_strategy", texts(&strategies));
    }
    if let Some(strategy) = of_plugin("deviceIDStrategy") {
        options.set("device_id_strategy", text(strategy.text()?));
    }
    if let Some(prefix) = of_plugin("cdiAnnotationPrefix") {
        options.set("cdi_annotation_prefix", text(prefix.text()?));
    }
    if let Some(pass) = of_plugin("passDeviceSpecs") {
        options.set("pass_device_specs", plain(pass.truth()?));
    }
    for (theirs, ours) in [("gdrcopyEnabled", "gdrcopy"), ("gdsEnabled", "gds"), ("mofedEnabled", "mofed")] {
        if let Some(enabled) = flags.and_then(|flags| flags.get(theirs)) {
            options.set(ours, plain(enabled.truth()?));
        }
    }
    let generated = "CDI files are `nvidia-ctk`'s here, and it is not called";
    draft.no_equal(plugin, &[("nvidiaCTKPath", generated), ("containerDriverRoot", generated)]);
    Ok(options)
}

fn mig(flags: Option<&Field<'_>>, select: &mut Table, draft: &mut Draft) -> Result<(), ImportError> {
    let drain = "ids of MIG instances are others here: drain nodes with MIG before the change";
    let Some(strategy) = flags.and_then(|flags| flags.get("migStrategy")) else {
        select.set("part", plain(false));
        return Ok(());
    };
    match strategy.text()? {
        "none" => select.set("part", plain(false)),
        "single" => draft.warn(format!("`{}` is `single`: {drain}", strategy.path)),
        "mixed" => {
            select.set("part", plain(false));
            draft.warn(format!(
                "`{}` is `mixed`, and resources by profile (nvidia.com/mig-1g.10gb) are left out: `select` does not know profiles; name the \
                 instances by `uuid` or `id` in a [[resource]] for each profile, as `holdfast discover` shows them; {drain}",
                strategy.path
            ));
        }
        _ => return Err(strategy.wrong("`none`, `single` or `mixed`")),
    }
    Ok(())
}

fn share(
    sharing: &Field<'_>,
    flags: Option<&Field<'_>>,
    gpu: &mut Table,
    options: &mut Table,
    draft: &mut Draft,
) -> Result<(), ImportError> {
    let root = flags.and_then(|flags| flags.get("mpsRoot"));
    for (kind, is_mps) in [("timeSlicing", false), ("mps", true)] {
        let Some(way) = sharing.get(kind).filter(Field::says_something) else { continue };
        let renames = way.get("renameByDefault").map_or(Ok(false), |rename| rename.truth())?;
        let one = way.get("failRequestsGreaterThanOne").map_or(Ok(false), |one| one.truth())?;
        for entry in way.get("resources").map_or(Ok(Vec::new()), |list| list.items())? {
            let name = entry.get("name").ok_or_else(|| entry.wrong("a `name` and `replicas`"))?;
            let replicas = entry.get("replicas").ok_or_else(|| entry.wrong("a `name` and `replicas`"))?.number()?;
            let ignored = "NVIDIA's plugin reads it and does not use it either";
            draft.no_equal(Some(&entry), &[("rename", ignored), ("devices", ignored)]);
            if !matches!(name.text()?, GPU | "gpu") {
                draft.warn(format!("`{}` is left out: only {GPU} is taken over with its shares", entry.path));
                continue;
            }
            if gpu.get("replicas").is_some() {
                return Err(name.wrong("a resource that is shared in one way"));
            }
            gpu.set("replicas", plain(replicas));
            if renames {
                gpu.set("name", text("nvidia.com/gpu.shared"));
            }
            if one && !is_mps {
                gpu.set("per_container", text("one"));
            }
            if is_mps {
                let root = root.as_ref().map_or(Ok("/run/nvidia/mps"), |root| root.text())?;
                options.set("mps_root", text(root));
                draft.warn(format!("`{}`: NVIDIA's MPS control daemon is needed as before, and Holdfast does not look after it", way.path));
            }
        }
    }
    Ok(())
}
