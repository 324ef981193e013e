//! Scalable functions (subfunctions): network functions on the auxiliary bus, below the PCI
//! function whose hardware they use (Linux `Documentation/networking/devlink/devlink-port.rst`, and
//! `sf/dev/dev.c` of mlx5, which has the file `sfnum`).
//!
//! A scalable function has an interface and an RDMA device of its own. As the SR-IOV network device
//! plugin does, it is selected by the ids and the driver of its PCI function.

use super::pci::{folder, is_child_name};
use crate::domain::PciFunction;
use crate::host::HostRoot;

/// The attribute `part` of a scalable function.
pub(super) const KIND: &str = "sf";

/// The record of a scalable function in the folder `dir`: that of the function that it is `on`,
/// with its own number, interfaces, RDMA and vDPA devices.
pub(super) fn function(root: &HostRoot, dir: &str, on: &PciFunction) -> PciFunction {
    let below = |class: &str| -> Vec<String> {
        let names = root.entries(&format!("{dir}/{class}")).into_iter();
        names.filter(|name| is_child_name(class, name)).collect()
    };
    let within = format!("{dir}/");
    let inside = |path: &&String| format!("{}/{path}", folder(on.address)).starts_with(&within);
    PciFunction {
        vendor: on.vendor,
        device: on.device,
        subsystem_vendor: on.subsystem_vendor,
        subsystem_device: on.subsystem_device,
        class: on.class,
        driver: on.driver.clone(),
        physfn: Some(on.address),
        vf_index: root.read(&format!("{dir}/sfnum")).and_then(|number| number.parse().ok()),
        bridges: on.bridges.clone(),
        net: below("net"),
        rdma: below("infiniband"),
        vdpa: on.vdpa.iter().filter(inside).cloned().collect(),
        ..PciFunction::at(on.address)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{spec, write};
    use crate::domain::{
        ContractKind, Device, DeviceClass, Object, ResourceSpec, Scope, Select, Sharing,
    };
    use crate::hardware::{DiscoverInput, Discovery, discover, discover_with, scan_after};
    use crate::host::HostRoot;
    use crate::host::faults::with_faults;
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::Arc;

    const CARD: &str = "sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0";

    /// A made tree: an adapter with two scalable functions. The interface and the RDMA device of
    /// the second one are in a pod. mlx5 has other auxiliary devices too.
    fn tree(root: &Path) {
        let uevent = "DRIVER=mlx5_core\nPCI_CLASS=20000\nPCI_ID=15B3:A2D6\n";
        for (file, text) in [
            ("uevent", uevent),
            ("numa_node", "1\n"),
            ("local_cpulist", "2-3\n"),
            ("net/p0/type", "1\n"),
            ("infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
            ("mlx5_core.eth.0/uevent", ""),
            ("mlx5_core.sf.2/sfnum", "88\n"),
            ("mlx5_core.sf.2/net/enp3s0f0s88/type", "1\n"),
            ("mlx5_core.sf.2/infiniband/mlx5_2/ports/1/link_layer", "Ethernet\n"),
            ("mlx5_core.sf.2/mlx5_core.eth.2/uevent", ""),
            ("mlx5_core.sf.3/sfnum", "89\n"),
        ] {
            write(root, &format!("{CARD}/{file}"), text);
        }
        for (number, cpus) in [(0, "0-1\n"), (1, "2-3\n")] {
            write(root, &format!("sys/devices/system/node/node{number}/cpulist"), cpus);
        }
        for (number, device) in [(0, "mlx5_0"), (2, "mlx5_2")] {
            write(root, &format!("sys/class/infiniband_verbs/uverbs{number}/ibdev"), device);
            write(root, &format!("dev/infiniband/uverbs{number}"), "");
        }
        write(root, "dev/infiniband/rdma_cm", "");
        for (link, below) in [
            ("sys/bus/pci/devices/0000:03:00.0", ""),
            ("sys/class/net/p0", "/net/p0"),
            ("sys/class/infiniband/mlx5_0", "/infiniband/mlx5_0"),
            ("sys/class/net/enp3s0f0s88", "/mlx5_core.sf.2/net/enp3s0f0s88"),
            ("sys/class/infiniband/mlx5_2", "/mlx5_core.sf.2/infiniband/mlx5_2"),
        ] {
            let link = root.join(link);
            std::fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(root.join(format!("{CARD}{below}")), link).unwrap();
        }
    }

    fn network(name: &str, select: Select) -> ResourceSpec {
        ResourceSpec {
            scope: Scope::Network,
            contract: ContractKind::Sriov.into(),
            ..(*spec(name, DeviceClass::Nic, select)).clone()
        }
    }

    fn found(root: &Path, specs: Vec<ResourceSpec>) -> Discovery {
        let specs: Vec<_> = specs.into_iter().map(Arc::new).collect();
        discover(&HostRoot::new(root), &specs, &BTreeMap::new())
    }

    fn ids(found: &Discovery) -> Vec<Vec<&str>> {
        found
            .selection
            .resources
            .values()
            .map(|devices| devices.iter().map(|device| device.id.as_str()).collect())
            .collect()
    }

    fn scalable() -> Select {
        Select { part: Some(true), ..Select::default() }
    }

    #[test]
    fn a_scalable_function_is_a_device_with_its_own_interface_and_rdma_device() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        let found = found(dir.path(), vec![]);
        let [card, first, second] = &found.devices[..] else { panic!("{:?}", found.devices) };
        let (own, pci) = (card.pci.as_ref().unwrap(), first.pci.as_ref().unwrap());
        assert_eq!((own.net.join(" "), own.rdma.join(" ")), ("p0".into(), "mlx5_0".into()));
        assert_eq!(
            (pci.net.join(" "), pci.rdma.join(" ")),
            ("enp3s0f0s88".into(), "mlx5_2".into())
        );
        assert_eq!((pci.vf_index, pci.is_vf(), pci.is_scalable()), (Some(88), false, true));
        assert_eq!((pci.vendor, pci.driver.as_deref()), (Some(0x15b3), Some("mlx5_core")));
        assert_eq!(first.id.as_str(), "mlx5_core.sf.2");
        assert_eq!(first.key, "pci:0000:03:00.0/15b3:a2d6/mlx5_core.sf.2");
        let nodes = |device: &Device| -> Vec<String> {
            device.nodes.iter().map(|node| node.host.clone()).collect()
        };
        assert_eq!(nodes(first), ["/dev/infiniband/uverbs2", "/dev/infiniband/rdma_cm"]);
        assert_eq!(nodes(card), ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]);
        assert_eq!((&first.numa_nodes, first.class), (&vec![1], DeviceClass::Rdma));
        let of = |name: &str| &first.attributes[name];
        assert_eq!((of("part"), of("parent"), of("link_type")), ("sf", "0000:03:00.0", "ether"));
        assert_eq!((second.class, second.id.as_str()), (DeviceClass::Nic, "mlx5_core.sf.3"));
        let objects = first.objects();
        assert!(objects.contains(&Object::of_text("aux:mlx5_core.sf.2")), "{objects:?}");
        assert!(!crate::domain::overlap(&objects, &card.objects()), "as of a virtual function");
    }

    #[test]
    fn scalable_functions_are_offered_only_where_they_are_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        let of = |select: Select| found(dir.path(), vec![network("a.com/x", select)]);
        let vendor = vec![0x15b3];
        let by_vendor = Select { vendor: vendor.clone(), ..Select::default() };
        assert_eq!(ids(&of(by_vendor)), [["0000:03:00.0"]], "as before there were any");
        assert_eq!(
            ids(&of(Select { vendor, ..scalable() })),
            [["mlx5_core.sf.2", "mlx5_core.sf.3"]]
        );
        let pf = |pf: &str| Select { pf: vec![pf.parse().unwrap()], ..scalable() };
        assert_eq!(ids(&of(pf("p0#80-88"))), [["mlx5_core.sf.2"]]);
        assert_eq!(ids(&of(pf("0000:03:00.0#89"))), [["mlx5_core.sf.3"]]);
        // The link type of one in a pod is that of its PCI function.
        let ether = Select { link_type: vec!["ether".into()], ..scalable() };
        assert_eq!(ids(&of(ether))[0].len(), 2);
        let rdma = ResourceSpec {
            scope: Scope::Class,
            class: DeviceClass::Rdma,
            ..network("a.com/x", scalable())
        };
        assert_eq!(ids(&found(dir.path(), vec![rdma])), [["mlx5_core.sf.2"]]);
        let id = Select {
            id: vec![crate::domain::DeviceId::new("mlx5_core.sf.3")],
            ..Select::default()
        };
        assert_eq!(ids(&of(id)), [["mlx5_core.sf.3"]]);
    }

    #[test]
    fn their_pci_function_is_withheld_unless_it_is_named_or_shared() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        let whole = |select| network("a.com/whole", select);
        let with = |whole| found(dir.path(), vec![network("a.com/sf", scalable()), whole]);
        let functions = vec!["mlx5_core.sf.2", "mlx5_core.sf.3"];
        let withheld = with(whole(Select::default()));
        assert_eq!(ids(&withheld), [functions.clone(), vec![]]);
        assert_eq!(
            withheld.selection.warnings[0],
            "a.com/whole: 0000:03:00.0 is not offered, because its scalable functions are offered; \
             to offer it anyway, select it by address or id"
        );
        let address = vec!["0000:03:00.0".parse().unwrap()];
        let named = with(whole(Select { address, ..Select::default() }));
        assert_eq!(ids(&named), [functions.clone(), vec!["0000:03:00.0"]]);
        let pool = ResourceSpec {
            sharing: Sharing::Pool(8),
            contract: ContractKind::RdmaShared.into(),
            ..whole(Select::default())
        };
        assert_eq!(ids(&with(pool)), [functions, vec!["0000:03:00.0"]]);
    }

    #[test]
    fn one_with_the_hosts_route_and_its_pci_function_are_withheld_unless_they_are_named() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        write(
            dir.path(),
            "proc/1/net/route",
            "Iface\tDestination\tGateway\nenp3s0f0s88\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\n",
        );
        let of = |select: Select| found(dir.path(), vec![network("a.com/x", select)]);
        let whole = of(Select { vendor: vec![0x15b3], ..Select::default() });
        assert_eq!(ids(&whole), [Vec::<&str>::new()]);
        assert_eq!(
            whole.selection.warnings[0],
            "a.com/x: 0000:03:00.0 is not offered, because the host's default route uses \
             enp3s0f0s88; to offer it anyway, select it by address or id"
        );
        // The address is that of the PCI function, and names no scalable one.
        let address = vec!["0000:03:00.0".parse().unwrap()];
        let scalable = of(Select { address: address.clone(), ..scalable() });
        assert_eq!(ids(&scalable), [["mlx5_core.sf.3"]]);
        assert!(scalable.selection.warnings[0].ends_with("select it by id"), "{scalable:?}");
        assert_eq!(ids(&of(Select { address, ..Select::default() })), [["0000:03:00.0"]]);
        let id = vec![crate::domain::DeviceId::new("mlx5_core.sf.2")];
        assert_eq!(ids(&of(Select { id, ..Select::default() })), [["mlx5_core.sf.2"]]);
    }

    #[test]
    fn a_failed_read_loses_no_scalable_function() {
        let dir = tempfile::tempdir().unwrap();
        tree(dir.path());
        let specs = [Arc::new(network("a.com/sf", scalable()))];
        let (host, names) = (HostRoot::new(dir.path()), BTreeMap::new());
        let before = discover(&host, &specs, &names);
        let again = || {
            let input = DiscoverInput { former: Some(&before), ..DiscoverInput::first(&names) };
            discover_with(&host, scan_after(&host, &before.devices), &specs, &input)
        };
        let (_, calls) = with_faults(|_| None, again);
        assert!(calls > 20, "{calls}");
        for failing in 0..calls {
            let one = move |call: u64| (call == failing).then_some(24);
            let (after, _) = with_faults(one, again);
            assert_eq!(after.selection.resources, before.selection.resources, "call {failing}");
        }
    }
}
