//! What a container gets in an answer, by kind, and how two answers differ. Pure.

use crate::domain::{AllocId, ContainerEdits};
use std::collections::BTreeSet;

/// The variable from which NVIDIA's container runtime takes the GPUs.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Mounts below this path name the GPUs instead (NVIDIA's container toolkit, `volume-mounts`).
const DEVICE_MOUNTS: &str = "/var/run/nvidia-container-devices";
/// The beginning of the keys of CDI annotations.
const CDI_ANNOTATION: &str = "cdi.k8s.io/";
/// The variables of NVIDIA's MPS begin so.
const MPS: &str = "CUDA_MPS_";

/// A way in which an answer passes devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// The variable `NVIDIA_VISIBLE_DEVICES`.
    VisibleDevices,
    /// Mounts that name the devices.
    DeviceMounts,
    /// CDI names in the field of the API.
    CdiField,
    /// CDI names in an annotation.
    CdiAnnotation,
    /// Device nodes.
    Nodes,
}

impl Way {
    fn as_str(self) -> &'static str {
        match self {
            Way::VisibleDevices => "the variable NVIDIA_VISIBLE_DEVICES",
            Way::DeviceMounts => "mounts below /var/run/nvidia-container-devices",
            Way::CdiField => "CDI names in the API's field",
            Way::CdiAnnotation => "CDI names in an annotation",
            Way::Nodes => "device nodes",
        }
    }

    fn needs_nvidia_runtime(self) -> bool {
        matches!(self, Way::VisibleDevices | Way::DeviceMounts)
    }

    fn needs_cdi(self) -> bool {
        matches!(self, Way::CdiField | Way::CdiAnnotation)
    }
}

/// The content of an answer, without its values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answer {
    ways: BTreeSet<Way>,
    variables: BTreeSet<String>,
    /// Paths in the container.
    mounts: BTreeSet<String>,
}

impl Answer {
    /// Of these edits.
    #[must_use]
    pub(super) fn of(edits: &ContainerEdits) -> Self {
        let names_devices = |path: &str| path.starts_with(DEVICE_MOUNTS);
        let is_cdi = |key: &str| key.starts_with(CDI_ANNOTATION);
        let annotations = || edits.annotations.keys().filter(|key| *key != AllocId::ANNOTATION);
        let ways = [
            (Way::VisibleDevices, edits.envs.contains_key(VISIBLE_DEVICES)),
            (Way::DeviceMounts, edits.mounts.iter().any(|mount| names_devices(&mount.container))),
            (Way::CdiField, !edits.cdi_devices.is_empty()),
            (Way::CdiAnnotation, annotations().any(|key| is_cdi(key))),
            (Way::Nodes, !edits.devices.is_empty()),
        ];
        let mounts = edits.mounts.iter().map(|mount| mount.container.clone());
        Answer {
            ways: ways.into_iter().filter(|(_, is_used)| *is_used).map(|(way, _)| way).collect(),
            variables: edits.envs.keys().filter(|name| *name != VISIBLE_DEVICES).cloned().collect(),
            mounts: mounts.filter(|path| !names_devices(path)).collect(),
        }
    }

    /// The content of either answer.
    #[must_use]
    pub(super) fn or(mut self, other: Answer) -> Answer {
        self.ways.extend(other.ways);
        self.variables.extend(other.variables);
        self.mounts.extend(other.mounts);
        self
    }

    /// What a container that gets `then` has more or less than one with `self`, one sentence each.
    #[must_use]
    pub(super) fn changes(&self, then: &Answer) -> Vec<String> {
        let mut changes = Vec::new();
        let ways =
            |of: &Answer| of.ways.iter().map(|way| way.as_str()).collect::<Vec<_>>().join(", ");
        if self.ways != then.ways {
            let or_none = |ways: String| if ways.is_empty() { "nothing".into() } else { ways };
            changes.push(format!(
                "devices are passed by {} instead of {}",
                or_none(ways(then)),
                or_none(ways(self))
            ));
        }
        let is_new = |needs: fn(Way) -> bool| {
            then.ways.iter().any(|way| needs(*way)) && !self.ways.iter().any(|way| needs(*way))
        };
        if is_new(Way::needs_nvidia_runtime) {
            changes.push(
                "pods need NVIDIA's container runtime, as the default or by a RuntimeClass".into(),
            );
        }
        if is_new(Way::needs_cdi) {
            changes.push("the container runtime must have CDI enabled".into());
        }
        for (what, now, then) in [
            ("variables", &self.variables, &then.variables),
            ("mounts", &self.mounts, &then.mounts),
        ] {
            for (word, more, less) in [("no longer", now, then), ("new", then, now)] {
                let only: Vec<&str> = more.difference(less).map(String::as_str).collect();
                if !only.is_empty() {
                    changes.push(format!("{word}: {what} {}", only.join(", ")));
                }
            }
        }
        let has_mps = |of: &Answer| of.variables.iter().any(|name| name.starts_with(MPS));
        match (has_mps(self), has_mps(then)) {
            (true, false) => {
                changes.push("containers no longer use MPS; `mps_root` sets it".into());
            }
            (_, true) => changes.push(
                "containers use MPS: its control daemon must run after the switch too".into(),
            ),
            (false, false) => {}
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{EditDevice, EditMount};

    fn envs(names: &[&str]) -> ContainerEdits {
        let envs = names.iter().map(|name| ((*name).to_owned(), "1".to_owned())).collect();
        ContainerEdits { envs, ..ContainerEdits::default() }
    }

    fn with_mount(path: &str, edits: ContainerEdits) -> ContainerEdits {
        let mount = EditMount { host: "/dev/null".into(), container: path.into(), read_only: true };
        ContainerEdits { mounts: vec![mount], ..edits }
    }

    fn changes(now: &ContainerEdits, then: &ContainerEdits) -> Vec<String> {
        Answer::of(now).changes(&Answer::of(then))
    }

    #[test]
    fn equal_answers_have_no_change_for_other_values_and_our_annotation() {
        let mut ours = envs(&[VISIBLE_DEVICES]);
        ours.envs.insert(VISIBLE_DEVICES.into(), "GPU-2".into());
        ours.annotations.insert(AllocId::ANNOTATION.into(), "a-1".into());
        assert_eq!(changes(&envs(&[VISIBLE_DEVICES]), &ours), Vec::<String>::new());
        let one = with_mount("/var/run/nvidia-container-devices/GPU-1", envs(&[]));
        let two = with_mount("/var/run/nvidia-container-devices/GPU-2", envs(&[]));
        assert_eq!(changes(&one, &two), Vec::<String>::new());
    }

    #[test]
    fn another_way_names_what_it_needs() {
        let node = EditDevice {
            host: "/dev/nvidia0".into(),
            container: "/dev/nvidia0".into(),
            permissions: "mrw".into(),
        };
        let nodes = ContainerEdits { devices: vec![node], ..ContainerEdits::default() };
        let gke = with_mount("/usr/local/nvidia", nodes);
        assert_eq!(
            changes(&gke, &envs(&[VISIBLE_DEVICES])),
            [
                "devices are passed by the variable NVIDIA_VISIBLE_DEVICES instead of device nodes",
                "pods need NVIDIA's container runtime, as the default or by a RuntimeClass",
                "no longer: mounts /usr/local/nvidia",
            ]
        );
        let cdi = ContainerEdits {
            cdi_devices: vec!["nvidia.com/gpu=0".into()],
            ..ContainerEdits::default()
        };
        assert_eq!(
            changes(&envs(&[VISIBLE_DEVICES, "A"]), &cdi),
            [
                "devices are passed by CDI names in the API's field instead of the variable \
                 NVIDIA_VISIBLE_DEVICES",
                "the container runtime must have CDI enabled",
                "no longer: variables A",
            ]
        );
    }

    #[test]
    fn mps_is_named_when_it_ends_and_while_it_is_used() {
        let mps = envs(&[VISIBLE_DEVICES, "CUDA_MPS_PIPE_DIRECTORY"]);
        let plain = envs(&[VISIBLE_DEVICES]);
        let last = |now, then| changes(now, then).pop();
        assert!(last(&mps, &plain).unwrap().contains("no longer use MPS"));
        assert!(last(&mps, &mps).unwrap().contains("must run after the switch too"));
        assert_eq!(last(&plain, &plain), None);
    }
}
