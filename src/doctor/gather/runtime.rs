//! The CDI settings of the container runtime, from its files.

use super::super::{Cdi, ContainerdFile, Facts};
use super::{AddFacts, ReaderInput};
use crate::host::HostRoot;
use std::collections::BTreeSet;
use std::path::PathBuf;
use toml::{Table, Value};

/// The file and the drop-ins of containerd, and the files of k3s and RKE2.
const CONTAINERD: [&str; 4] = [
    "/etc/containerd/config.toml",
    "/etc/containerd/conf.d/*.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
];
const CRIO: [&str; 2] = ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d/*"];

pub(super) fn cdi(input: &ReaderInput) -> AddFacts {
    let Some(config) = &input.config else { return Box::new(|_| ()) };
    let host = HostRoot::new(&input.target.roots.host);
    let read = |patterns: &[&str]| {
        let paths = patterns.iter().flat_map(|pattern| host.glob(pattern));
        let table =
            |path: String| Some((PathBuf::from(&path), host.read(&path)?.parse::<Table>().ok()?));
        paths.filter_map(table).collect::<Vec<_>>()
    };
    let cdi = Cdi {
        exists: config.cdi_directory.is_dir(),
        directory: config.cdi_directory.clone(),
        containerd: read(&CONTAINERD)
            .into_iter()
            .map(|(path, table)| containerd(path, &table))
            .collect(),
        crio_dirs: read(&CRIO)
            .iter()
            .filter_map(|(_, table)| directories(at(table, &["crio", "runtime", "cdi_spec_dirs"])?))
            .next_back(),
    };
    Box::new(|facts: &mut Facts| facts.cdi = Some(cdi))
}

fn containerd(path: PathBuf, table: &Table) -> ContainerdFile {
    // Up to version 2 of the file, CRI is one plugin. Since version 3, its runtime part is a
    // separate plugin.
    let plugins = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"];
    let cri = |key: &str| plugins.iter().find_map(|plugin| at(table, &["plugins", plugin, key]));
    ContainerdFile {
        path,
        version: table.get("version").and_then(Value::as_integer),
        enable_cdi: cri("enable_cdi").and_then(Value::as_bool),
        cdi_spec_dirs: cri("cdi_spec_dirs").and_then(directories),
    }
}

fn at<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Value> {
    let (last, above) = path.split_last()?;
    above.iter().try_fold(table, |table, key| table.get(*key)?.as_table())?.get(*last)
}

fn directories(value: &Value) -> Option<BTreeSet<PathBuf>> {
    Some(value.as_array()?.iter().filter_map(Value::as_str).map(PathBuf::from).collect())
}
