//! NVIDIA's driver: which root is used, and what containers lack of it.

use super::super::codes::{
    DRIVER_HOOK_MISSING, DRIVER_LIBRARIES_MISSING, DRIVER_NODES_ELSEWHERE, DRIVER_ROOT,
    DRIVER_ROOT_MISSING,
};
use super::super::{Facts, Finding, NvidiaFacts};

pub(super) fn driver(facts: &Facts) -> Option<Vec<Finding>> {
    let is_used = facts.resources.as_ref()?.iter().any(|resource| resource.is_nvidia);
    let driver = facts.nvidia.as_ref()?;
    if !is_used {
        return Some(Vec::new());
    }
    let mut found: Vec<Finding> = driver.missing_roots.iter().map(missing).collect();
    found.extend(files(driver));
    found.extend(used(driver));
    Some(found)
}

fn missing((key, root): &(&str, String)) -> Finding {
    let what = format!("`nvidia.{key}` names this folder, and it does not exist on the host");
    let todo = "start the container that installs the driver there, or correct the key; in a \
                container, mount the folder from the host at the same path below `--host-root`";
    Finding::new(&DRIVER_ROOT_MISSING, root, what, todo)
}

/// What a container with a CDI name of Holdfast lacks.
fn files(driver: &NvidiaFacts) -> Option<Finding> {
    if !driver.needs_files {
        return None;
    }
    if let Some(why) = &driver.no_libraries {
        let todo = "install the driver's libraries, or set `[nvidia] driver_root` to the folder \
                    that has them; in a container, mount the host (`components/driver-root`)";
        return Some(Finding::new(&DRIVER_LIBRARIES_MISSING, "NVIDIA's driver", why, todo));
    }
    (!driver.has_hook).then(|| {
        let what = "neither nvidia-cdi-hook nor nvidia-ctk is in /usr/bin, /usr/local/bin or \
                    /usr/local/nvidia/toolkit of the host";
        let todo = "install NVIDIA's container toolkit on the host; Holdfast finds it within 30 s";
        Finding::new(&DRIVER_HOOK_MISSING, "nvidia-cdi-hook", what, todo)
    })
}

/// The roots in use that are not the host's own, each with the reason.
fn used(driver: &NvidiaFacts) -> impl Iterator<Item = Finding> {
    let todo = "no action is needed; `[nvidia] driver_root` and `dev_root` choose other roots";
    let nodes = driver.nodes_root.as_ref().filter(|root| !root.is_empty()).map(|root| {
        let why = match (driver.is_dev_configured, driver.is_configured) {
            (true, _) => "`nvidia.dev_root` names this root",
            (false, true) => "`nvidia.driver_root` names this root",
            (false, false) => "/dev of the host has none",
        };
        let what = format!("the nodes of NVIDIA's driver are used from here: {why}");
        Finding::new(&DRIVER_NODES_ELSEWHERE, format!("{root}/dev"), what, todo)
    });
    let libraries = driver.libraries.as_ref().filter(|(root, _)| !root.is_empty());
    let libraries = libraries.map(|(root, release)| {
        let why = if driver.is_configured {
            "`nvidia.driver_root` names this root"
        } else {
            "the host itself has none of the release that is loaded"
        };
        let what = format!("the libraries of NVIDIA's driver {release} are used from here: {why}");
        Finding::new(&DRIVER_ROOT, root, what, todo)
    });
    nodes.into_iter().chain(libraries)
}
