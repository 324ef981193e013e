//! `generic`: only the device's nodes; environment and mounts come from the configuration.

use super::{Request, nodes};
use crate::domain::ContainerEdits;

pub(super) fn edits(request: &Request<'_>) -> ContainerEdits {
    ContainerEdits { devices: nodes::of(request.devices), ..ContainerEdits::default() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, edits_of, golden, spec, with_extras};
    use crate::domain::ContractKind;

    #[test]
    fn each_node_comes_once_with_the_configured_environment_and_mounts() {
        let (a, b) = (
            device("a", &["/dev/a", "/dev/shared"], &[]),
            device("b", &["/dev/b", "/dev/shared"], &[]),
        );
        let spec = with_extras(spec("example.com/device", ContractKind::Generic));
        assert_eq!(
            golden(&edits_of(&spec, &[&b, &a, &b])),
            include_str!("golden/generic.json").trim_end()
        );
    }
}
