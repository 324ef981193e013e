//! Reads the PCI functions of `<sys>/bus/pci/devices` (Linux
//! `Documentation/ABI/testing/sysfs-bus-pci`).
//!
//! Only the names of links are read, never their targets. In a capture most targets may be missing,
//! and on a live machine a device can be removed between two calls. One bad function never fails
//! the scan.

use super::tegra;
use super::uevent::{Identity, parse_hex};
use super::virtual_functions::{Numbered, keep_vfs, number_vfs, virtfns};
use crate::domain::{Device, PciAddress, PciFunction, Unread, is_scalable_name};
use crate::host::{Folder, HostRoot};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const DEVICES: &str = "sys/bus/pci/devices";
const VDPA_DEVICES: &str = "sys/bus/vdpa/devices";

/// The result of one scan of the PCI bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// Every function, by address.
    pub functions: BTreeMap<PciAddress, PciFunction>,
    /// Whether it is a Tegra system, whose own GPU may be no PCI function.
    pub is_tegra: bool,
    /// What could not be read. These functions are taken from the former scan.
    pub unread: Unread,
}

impl Scan {
    /// A scan without read failures.
    #[must_use]
    pub fn of(functions: BTreeMap<PciAddress, PciFunction>) -> Self {
        Scan { functions, ..Scan::default() }
    }

    /// Whether `address` has a virtual function.
    #[must_use]
    pub fn has_vfs(&self, address: PciAddress) -> bool {
        self.functions.get(&address).is_some_and(|function| !function.virtfns.is_empty())
    }
}

/// The folder of a function, relative to the root.
pub(super) fn folder(address: PciAddress) -> String {
    format!("{DEVICES}/{address}")
}

/// [`scan_after`] without a former scan.
#[must_use]
pub fn scan(root: &HostRoot) -> Scan {
    scan_after(root, &[])
}

/// Reads every PCI function. A physical function is read before its virtual ones, whose addresses
/// are higher.
///
/// The order matters while virtual functions are added: the links of a physical function to them
/// exist first. While they are removed, both links of one are deleted before the function itself
/// (`pci_iov_remove_virtfn` of `drivers/pci/iov.c`). Such a function is still a virtual one.
///
/// If a read of a function fails, the function is taken from the `former` devices (I12). Without
/// one there it is left out.
#[must_use]
pub fn scan_after(root: &HostRoot, former: &[Arc<Device>]) -> Scan {
    let root = &root.recording();
    let mut is_tegra = tegra::is_system(root);
    let integrated = root.take_failures().first().map(ToString::to_string);
    if integrated.is_some() {
        is_tegra = former.iter().any(|device| device.attribute(tegra::ATTRIBUTE).is_some());
    }
    let scan = functions_after(root, former);
    Scan { is_tegra, unread: Unread { integrated, ..scan.unread }, functions: scan.functions }
}

fn functions_after(root: &HostRoot, former: &[Arc<Device>]) -> Scan {
    let children = ClassChildren::read(root);
    let Some(bus) = root.folder(DEVICES) else { return failed(root, former) };
    let names: Vec<(&str, PciAddress)> =
        bus.names().filter_map(|name| Some((name, PciAddress::of_name(name)?))).collect();
    // If the listing failed, no function is known completely.
    let failures = root.take_failures();
    if !failures.is_empty() {
        root.repeat_failures(&failures);
        return failed(root, former);
    }
    let mut known: Option<BTreeMap<PciAddress, &PciFunction>> = None;
    let mut scan = Scan::default();
    let mut claims = Vec::new();
    for (name, address) in names {
        let read = |folder: Option<&Folder>, first: &FirstReads<'_>| {
            read(folder, first, address, &children)
        };
        let whole = read_whole(&bus, name, root.is_live(), read);
        if let Some(failure) = root.take_failures().first() {
            scan.unread.of_function.insert(address, failure.to_string());
            let known = known.get_or_insert_with(|| functions_of(former));
            if let Some(function) = known.get(&address) {
                let numbers = function
                    .virtfns
                    .iter()
                    .filter_map(|vf| Some((address, known.get(vf)?.vf_index?, *vf)));
                claims.extend(numbers);
                scan.functions.insert(address, (*function).clone());
            }
        } else if let Some((mut function, numbered)) = whole {
            function.virtfns = numbered.iter().map(|(_, vf)| *vf).collect();
            claims.extend(numbered.into_iter().map(|(index, vf)| (address, index, vf)));
            scan.functions.insert(address, function);
        }
    }
    number_vfs(&mut scan.functions, claims);
    keep_vfs(&mut scan.functions, former);
    scan
}

/// The result when the bus cannot be listed: everything as in the former scan. Without any bus, an
/// empty scan.
fn failed(root: &HostRoot, former: &[Arc<Device>]) -> Scan {
    match root.take_failures().first() {
        None => Scan::default(),
        Some(failure) => {
            let functions = functions_of(former)
                .into_iter()
                .map(|(address, function)| (address, function.clone()))
                .collect();
            Scan {
                functions,
                is_tegra: false,
                unread: Unread { functions: Some(failure.to_string()), ..Unread::default() },
            }
        }
    }
}

/// The PCI functions of devices.
fn functions_of(devices: &[Arc<Device>]) -> BTreeMap<PciAddress, &PciFunction> {
    devices
        .iter()
        .filter_map(|device| device.pci.as_deref())
        .filter(|function| !function.is_scalable())
        .map(|function| (function.address, function))
        .collect()
}

/// Reads a function, and once more if its folder was removed during the read. The result is never
/// half of a function.
fn read_whole<T>(
    bus: &Folder,
    name: &str,
    is_live: bool,
    mut read: impl FnMut(Option<&Folder>, &FirstReads<'_>) -> T,
) -> Option<T> {
    for _ in 0..2 {
        // A dangling link is still a function, without facts. A removed link is none.
        let target = bus.link_target(name);
        let folder = bus.folder(name);
        if target.is_none() && folder.is_none() {
            return None;
        }
        // On removal the kernel deletes `uevent` and `modalias` before the group. If one of them is
        // still readable after the group was read, no group was lost.
        let group = folder.as_ref().and_then(|folder| folder.link_name("iommu_group"));
        let identity = folder.as_ref().and_then(|folder| identity(folder, is_live));
        let is_identified = identity.is_some();
        let first = FirstReads {
            target: target.as_deref(),
            identity: identity.unwrap_or_default(),
            group: group.as_deref(),
        };
        let function = read(folder.as_ref(), &first);
        // A file that is not found may also mean that the link dangles.
        let may_be_half =
            |folder: Folder| folder.has_lost() || !is_identified && folder.lacks("uevent");
        if !folder.is_some_and(may_be_half) || bus.has_folder_now(name) {
            return Some(function);
        }
    }
    None
}

/// What a function is. Some kernels hold the device's lock while they answer a read of `uevent`
/// (6.10 to 6.14, and stable releases before). A driver that waits in its `probe` or `remove` has
/// that lock, and one such device would stop the scan of all. `modalias` needs no lock, and only a
/// capture may lack it.
fn identity(folder: &Folder, is_live: bool) -> Option<Identity> {
    if is_live {
        let alias = folder.read("modalias")?;
        return Identity::of_alias(&alias, folder.link_name("driver"));
    }
    Some(Identity::of_uevent(&folder.read("uevent")?))
}

/// The values of a function that are read first.
struct FirstReads<'a> {
    /// The target of the link to its folder.
    target: Option<&'a str>,
    identity: Identity,
    group: Option<&'a str>,
}

/// Reads the rest of a function from its folder, where there is one.
fn read(
    folder: Option<&Folder>,
    first: &FirstReads<'_>,
    address: PciAddress,
    children: &ClassChildren,
) -> (PciFunction, Numbered) {
    let text = |name: &str| folder?.read(name);
    let hex16 = |name: &str| u16::try_from(parse_hex(&text(name)?)?).ok();
    // Other files are read only for what the first one lacks: most of a scan's time is opening
    // files.
    let identity = &first.identity;
    let (vendor, device) = identity.id;
    let (subsystem_vendor, subsystem_device) = identity.subsystem;

    // What only drivers and SR-IOV create is read only where these exist: most functions of a
    // server have neither.
    let busy = folder.filter(|folder| !is_bare(folder, identity));
    let entries = || busy.into_iter().flat_map(Folder::names);
    let link = |name: &str| busy?.link_name(name);
    let count = |name: &str| busy?.read(name)?.parse().ok();
    let numbered = virtfns(entries(), &link);
    let inside = |name: &str, prefix: &str| -> Vec<String> {
        let inner = busy.filter(|busy| busy.has(name)).and_then(|busy| busy.folder(name));
        let names = inner.iter().flat_map(Folder::names);
        names.filter(|name| is_numbered(name, prefix)).map(str::to_owned).collect()
    };
    let children = children.of(address, busy);
    let function = PciFunction {
        address,
        vendor: vendor.or_else(|| hex16("vendor")),
        device: device.or_else(|| hex16("device")),
        subsystem_vendor: subsystem_vendor.or_else(|| hex16("subsystem_vendor")),
        subsystem_device: subsystem_device.or_else(|| hex16("subsystem_device")),
        class: identity.class.or_else(|| parse_hex(&text("class")?)),
        driver: identity.driver.clone().or_else(|| link("driver")),
        physfn: link("physfn").and_then(|name| PciAddress::of_name(&name)),
        virtfns: Vec::new(),
        vf_index: None,
        sriov_totalvfs: count("sriov_totalvfs"),
        iommu_group: first.group.and_then(|group| group.parse().ok()),
        bridges: bridges(first.target.unwrap_or_default(), address),
        net: children("net"),
        rdma: children("infiniband"),
        nvme: children("nvme"),
        drm: children("drm"),
        mdevs: entries().filter(|entry| is_uuid(entry)).map(str::to_owned).collect(),
        vdpa: children("vdpa"),
        sfs: entries().filter(|entry| is_scalable_name(entry)).map(str::to_owned).collect(),
        uio: inside("uio", "uio"),
        vfio_dev: inside("vfio-dev", "vfio").into_iter().next(),
    };
    (function, numbered)
}

/// Whether a function has no entries that a driver or SR-IOV creates. The answer needs no listing
/// of its folder, which would cost as much as all other reads.
///
/// A bridge has neither interfaces nor virtual functions, with any driver. A capture may have the
/// `driver` link and a truncated uevent.
fn is_bare(folder: &Folder, identity: &Identity) -> bool {
    const BRIDGE: u32 = 0x0604;
    let is_bridge = identity.class.is_some_and(|class| class >> 8 == BRIDGE);
    let is_driven = identity.driver.is_some();
    let driver_is_known = is_driven || identity.is_whole || folder.lacks("driver");
    let has_nothing = is_bridge
        || !is_driven && ["physfn", "sriov_totalvfs"].iter().all(|name| folder.lacks(name));
    identity.id.0.is_some() && driver_is_known && has_nothing
}

/// The addresses in the path of a function's folder, from the root port down. They are taken from
/// the text of the link, since the folders between may be missing. Where the entry is no link, the
/// bridges are unknown.
fn bridges(target: &str, address: PciAddress) -> Vec<PciAddress> {
    target.split('/').filter_map(PciAddress::of_name).filter(|bridge| *bridge != address).collect()
}

/// The function that a class device with this path belongs to. That is the last address: behind VMD
/// the path has two domains. What is below a scalable function belongs to that one alone.
pub(super) fn nearest(path: &str) -> Option<PciAddress> {
    let mut names = path.rsplit('/').take_while(|name| !is_scalable_name(name));
    names.find_map(PciAddress::of_name)
}

/// The class devices by the function above them, for those that are not direct children of it. The
/// interface of a virtio function is below `virtio0/`, and a capture may have `class/` only.
struct ClassChildren(BTreeMap<PciAddress, Vec<(&'static str, String)>>);

impl ClassChildren {
    fn read(root: &HostRoot) -> Self {
        let mut children: BTreeMap<PciAddress, Vec<(&'static str, String)>> = BTreeMap::new();
        for (address, path) in vdpa_devices(root) {
            children.entry(address).or_default().push(("vdpa", path));
        }
        for class in ["net", "infiniband", "nvme", "drm"] {
            for name in root.entries(&format!("sys/class/{class}")) {
                let entry = format!("sys/class/{class}/{name}");
                let target = root
                    .link_target(&entry)
                    .or_else(|| root.link_target(&format!("{entry}/device")));
                let above = nearest(target.as_deref().unwrap_or_default());
                if let Some(address) = above.filter(|_| is_child_name(class, &name)) {
                    children.entry(address).or_default().push((class, name));
                }
            }
        }
        ClassChildren(children)
    }

    /// Those of a function, also from its folder where it may have some.
    fn of(&self, address: PciAddress, folder: Option<&Folder>) -> impl Fn(&str) -> Vec<String> {
        let known = self.0.get(&address).map(Vec::as_slice).unwrap_or_default();
        move |class| Self::with_class(known, folder, class)
    }

    fn with_class(
        known: &[(&'static str, String)],
        folder: Option<&Folder>,
        class: &str,
    ) -> Vec<String> {
        let of_class = known.iter().filter(|(known, _)| *known == class);
        let mut names: BTreeSet<String> = of_class.map(|(_, name)| name.clone()).collect();
        for entry in folder.into_iter().flat_map(Folder::names) {
            // A capture may lack the folder of its bus. Its usual name is enough there.
            if class == "vdpa" && is_numbered(entry, "vdpa") {
                names.insert(entry.to_owned());
            }
            let is_virtio = class == "net" && is_numbered(entry, "virtio");
            if entry != class && !is_virtio {
                continue;
            }
            let below = folder.and_then(|folder| folder.folder(entry));
            let below =
                if is_virtio { below.and_then(|virtio| virtio.folder("net")) } else { below };
            let found = below.iter().flat_map(Folder::names);
            names.extend(found.filter(|name| is_child_name(class, name)).map(str::to_owned));
        }
        names.into_iter().collect()
    }
}

/// The vDPA devices below PCI functions, each with its path in the folder of the function. Only
/// their bus shows what they are: `vdpa dev add` gives them any name.
fn vdpa_devices(root: &HostRoot) -> Vec<(PciAddress, String)> {
    let device = |name: String| {
        let target = root.link_target(&format!("{VDPA_DEVICES}/{name}"))?;
        // The name of the device itself may be an address.
        let names: Vec<&str> = target.split('/').collect();
        let above = names.split_last()?.1.iter().enumerate().rev();
        let (at, address) =
            above.into_iter().find_map(|(at, name)| Some((at, PciAddress::of_name(name)?)))?;
        Some((address, names[at + 1..].join("/")))
    };
    root.entries(VDPA_DEVICES).into_iter().filter_map(device).collect()
}

/// Whether an entry of a class folder is a device. `class/drm` also has connectors (`card0-DP-1`)
/// and `version`; `class/net` has the file `bonding_masters`.
pub(super) fn is_child_name(class: &str, name: &str) -> bool {
    match class {
        "drm" => ["card", "renderD", "controlD"].iter().any(|prefix| is_numbered(name, prefix)),
        "nvme" => is_numbered(name, "nvme"),
        "net" => name != "bonding_masters",
        _ => true,
    }
}

/// Whether `name` is `prefix` followed by a number.
pub(super) fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|digits| {
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Whether `name` has the form `f715f63c-0d00-4007-9c5a-b07b0c6c05de`: the folder of a mediated
/// device.
fn is_uuid(name: &str) -> bool {
    if name.len() != 36 {
        return false;
    }
    let parts: Vec<&str> = name.split('-').collect();
    parts.iter().map(|part| part.len()).eq([8, 4, 4, 4, 12])
        && parts.iter().all(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::super::testing::write;
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// A function's real folder and the link to it, as in a real sysfs.
    fn place(root: &Path, path: &str, files: &[(&str, &str)]) {
        let address = path.rsplit('/').next().unwrap();
        for (name, text) in files {
            write(root, &format!("sys/devices/{path}/{name}"), text);
        }
        fs::create_dir_all(root.join(format!("sys/devices/{path}"))).unwrap();
        fs::create_dir_all(root.join(DEVICES)).unwrap();
        symlink(format!("../../../devices/{path}"), root.join(DEVICES).join(address)).unwrap();
    }

    fn scanned(dir: &tempfile::TempDir, address: &str) -> PciFunction {
        scan(&HostRoot::new(dir.path())).functions[&address.parse().unwrap()].clone()
    }

    #[test]
    fn a_function_behind_vmd_has_a_long_domain_and_its_whole_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = "pci0000:6f/0000:6f:00.5/pci10001:80/10001:80:07.0/10001:84:00.0";
        place(
            dir.path(),
            path,
            &[("vendor", "0x8086\n"), ("class", "0x010802"), ("nvme/nvme3/state", "live")],
        );
        let function = scanned(&dir, "10001:84:00.0");
        assert_eq!(
            function.bridges,
            ["0000:6f:00.5".parse().unwrap(), "10001:80:07.0".parse().unwrap()]
        );
        assert_eq!((function.vendor, function.class), (Some(0x8086), Some(0x01_0802)));
        assert_eq!(function.nvme, ["nvme3"]);
    }

    #[test]
    fn a_function_removed_during_a_read_is_not_half_read() {
        let dir = tempfile::tempdir().unwrap();
        let (root, path, name) = (dir.path(), "pci0000:00/0000:18:00.0", "0000:18:00.0");
        let whole = [("uevent", "DRIVER=vfio-pci\n"), ("numa_node", "1\n")];
        let (folder, link) = (root.join("sys/devices").join(path), root.join(DEVICES).join(name));
        let remove = || {
            fs::remove_dir_all(&folder).unwrap();
            fs::remove_file(&link).unwrap();
        };
        // The result of a read while `meanwhile` runs, and how many times the function was read.
        let read_while = |mut meanwhile: Box<dyn FnMut() + '_>| {
            let mut times = 0;
            let bus = HostRoot::new(root).folder(DEVICES).unwrap();
            let read = read_whole(&bus, name, false, |opened, first| {
                times += 1;
                let opened = opened?;
                assert!(opened.has("numa_node") && first.identity.driver.is_some());
                meanwhile();
                opened.read("numa_node")
            });
            (read, times)
        };
        place(root, path, &whole);
        assert_eq!(read_while(Box::new(|| ())), (Some(Some("1".into())), 1));
        assert_eq!(read_while(Box::new(remove)), (None, 1), "half of a function was believed");

        // The kernel deletes `uevent` first: a folder without it is being removed.
        place(root, path, &whole[1..]);
        let bus = HostRoot::new(root).folder(DEVICES).unwrap();
        assert_eq!(
            read_whole(&bus, name, false, |_, first| (remove(), first.identity.driver.is_some()).1),
            None
        );

        // If only one file is removed, as a driver does, the function is still there.
        place(root, path, &whole);
        let unbound = || fs::remove_file(folder.join("numa_node")).unwrap();
        assert_eq!(read_while(Box::new(unbound)), (Some(None), 1));
        remove();

        // A link whose target was removed is still a function, without facts.
        place(root, path, &whole);
        assert_eq!(read_while(Box::new(|| fs::remove_dir_all(&folder).unwrap())), (Some(None), 2));
    }

    #[test]
    fn virtual_functions_reach_into_the_next_device_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let pf = "pci0000:00/0000:00:03.0/0000:08:00.0";
        place(root, pf, &[("sriov_totalvfs", "16")]);
        let vf = |index: u32| format!("0000:08:{:02x}.{}", (4 + index) / 8, (4 + index) % 8);
        for index in 0..12 {
            place(root, &format!("pci0000:00/0000:00:03.0/{}", vf(index)), &[("vendor", "0x10de")]);
            symlink(
                format!("../{}", vf(index)),
                root.join(format!("sys/devices/{pf}/virtfn{index}")),
            )
            .unwrap();
        }
        symlink(
            "../0000:08:00.0",
            root.join("sys/devices/pci0000:00/0000:00:03.0/0000:08:00.4/physfn"),
        )
        .unwrap();
        let scan = scan(&HostRoot::new(root));
        let pf: PciAddress = "0000:08:00.0".parse().unwrap();
        let expected: Vec<PciAddress> = (0..12).map(|index| vf(index).parse().unwrap()).collect();
        assert_eq!(scan.functions[&pf].virtfns, expected, "virtfn10 comes after virtfn9");
        assert!(scan.has_vfs(pf));
        // All but one lack the `physfn` link. They are virtual functions nevertheless.
        assert!(expected.iter().all(|vf| scan.functions[vf].physfn == Some(pf)));
        let numbers: Vec<_> =
            expected.iter().map(|vf| scan.functions[vf].vf_index.unwrap()).collect();
        assert_eq!(numbers, (0..12).collect::<Vec<_>>());
        assert!(!scan.functions[&pf].is_vf());
    }

    /// The kernel deletes the links of a virtual function, then it takes away its driver.
    #[test]
    fn a_virtual_function_that_is_being_removed_is_no_whole_function() {
        let dir = tempfile::tempdir().unwrap();
        let (pf, vf) = ("0000:08:00.0", "0000:08:02.0");
        let folder = |at: &str| dir.path().join("sys/devices/pci0000:00").join(at);
        for at in [pf, vf] {
            place(dir.path(), &format!("pci0000:00/{at}"), &[("uevent", "DRIVER=ice\n")]);
        }
        symlink(format!("../{vf}"), folder(pf).join("virtfn0")).unwrap();
        symlink(format!("../{pf}"), folder(vf).join("physfn")).unwrap();
        let root = HostRoot::new(dir.path());
        let device = |function: PciFunction| {
            Arc::new(Device {
                id: crate::domain::DeviceId::new(function.address.to_string()),
                key: String::new(),
                class: crate::domain::DeviceClass::Nic,
                pci: Some(Box::new(function)),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: crate::domain::Attributes::default(),
            })
        };
        let former: Vec<_> = scan(&root).functions.into_values().map(device).collect();
        fs::remove_file(folder(pf).join("virtfn0")).unwrap();
        fs::remove_file(folder(vf).join("physfn")).unwrap();
        let [pf, vf] = [pf, vf].map(|address| address.parse().unwrap());
        let known = scan_after(&root, &former).functions[&vf].clone();
        assert_eq!((known.physfn, known.vf_index), (Some(pf), Some(0)));
        assert!(!scan_after(&root, &[]).functions[&vf].is_vf());
        fs::remove_file(dir.path().join(DEVICES).join(pf.to_string())).unwrap();
        assert!(!scan_after(&root, &former).functions[&vf].is_vf(), "it is another machine");
    }

    #[test]
    fn files_and_links_supplement_the_uevent() {
        let dir = tempfile::tempdir().unwrap();
        let uevent = "DRIVER=dfl-pci\nPCI_CLASS=30200\nPCI_ID=8086:none\nPCI_SUBSYS_ID=8086:1771\n";
        place(dir.path(), "pci0000:b0/0000:b1:00.0", &[("uevent", uevent), ("device", "0xbccf")]);
        let function = scanned(&dir, "0000:b1:00.0");
        assert_eq!(
            (function.vendor, function.device, function.class),
            (Some(0x8086), Some(0xbccf), Some(0x03_0200))
        );
        assert_eq!(
            (function.subsystem_device, function.driver.as_deref()),
            (Some(0x1771), Some("dfl-pci"))
        );
    }

    #[test]
    fn a_function_without_a_driver_has_its_group_pf_and_vfs() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let path = |address: &str| format!("pci0000:00/0000:00:03.0/{address}");
        let uevent = ("uevent", "PCI_CLASS=20000\nPCI_ID=8086:1572\nPCI_SUBSYS_ID=8086:0001\n");
        place(root, &path("0000:08:00.0"), &[uevent, ("sriov_totalvfs", "16")]);
        place(root, &path("0000:08:02.0"), &[uevent]);
        place(root, &path("0000:09:00.0"), &[uevent, ("net/eth0/mtu", "1500")]);
        let link = |target: &str, at: &str| {
            symlink(target, root.join("sys/devices").join(path(at))).unwrap();
        };
        link("../0000:08:02.0", "0000:08:00.0/virtfn0");
        link("../0000:08:00.0", "0000:08:02.0/physfn");
        ["0000:08:02.0", "0000:09:00.0"]
            .iter()
            .for_each(|at| link("../../kernel/iommu_groups/7", &format!("{at}/iommu_group")));
        let [pf, vf, bare] =
            ["0000:08:00.0", "0000:08:02.0", "0000:09:00.0"].map(|address| scanned(&dir, address));
        assert_eq!((pf.sriov_totalvfs, &pf.virtfns), (Some(16), &vec![vf.address]));
        assert_eq!((vf.physfn, vf.vf_index, vf.iommu_group), (Some(pf.address), Some(0), Some(7)));
        assert_eq!((bare.subsystem_device, bare.iommu_group), (Some(1), Some(7)));
        assert!(
            bare.net.is_empty(),
            "without a driver there is no interface: the folder is not listed"
        );
    }

    #[test]
    fn a_scan_of_a_machine_reads_no_file_that_waits_for_a_driver() {
        let dir = tempfile::tempdir().unwrap();
        let name = "0000:00:01.0";
        let alias = "pci:v000015B3d0000101Esv000015B3sd00000018bc02sc00i00";
        let files = [("modalias", alias), ("sriov_totalvfs", "8"), ("net/ens1/mtu", "1500")];
        place(dir.path(), &format!("pci0000:00/{name}"), &files);
        let folder = dir.path().join("sys/devices/pci0000:00").join(name);
        symlink("../../../bus/pci/drivers/mlx5_core", folder.join("driver")).unwrap();
        for file in ["uevent", "sriov_numvfs"] {
            // To read it is an error.
            fs::create_dir(folder.join(file)).unwrap();
        }
        let root = HostRoot::new(dir.path()).recording();
        let (bus, children) = (root.folder(DEVICES).unwrap(), ClassChildren::read(&root));
        let address = name.parse().unwrap();
        let found =
            read_whole(&bus, name, true, |folder, first| read(folder, first, address, &children).0);
        assert_eq!(root.take_failures(), []);
        let function = found.unwrap();
        assert_eq!((function.vendor, function.device), (Some(0x15b3), Some(0x101e)));
        assert_eq!((function.class, function.subsystem_device), (Some(0x02_0000), Some(0x18)));
        assert_eq!(function.driver.as_deref(), Some("mlx5_core"));
        assert_eq!(function.net, ["ens1"]);
    }

    #[test]
    fn a_truncated_uevent_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let cut = "PCI_CLASS=20000\nPCI_ID=8086:1572\nPCI_SLOT_NAME=0000:00:01.0";
        let whole =
            format!("{cut}\nMODALIAS=pci:v00008086d00001572sv00000000sd00000000bc02sc00i00");
        let bridge = whole
            .replace("PCI_CLASS=2", "DRIVER=pcieport\nPCI_CLASS=6")
            .replace("=60000", "=60400");
        let texts = [
            ("0000:00:01.0", cut),
            ("0000:00:02.0", &whole),
            ("0000:00:03.0", &bridge),
            ("0000:00:04.0", "PCI_CLASS=60400\nPCI_ID=8086:1"),
        ];
        let functions = texts.map(|(address, uevent)| {
            place(
                dir.path(),
                &format!("pci0000:00/{address}"),
                &[("uevent", uevent), ("net/eth0/mtu", "1500")],
            );
            symlink(
                "../../bus/pci/drivers/ice",
                dir.path().join(format!("sys/devices/pci0000:00/{address}/driver")),
            )
            .unwrap();
            let function = scanned(&dir, address);
            (function.driver.unwrap_or_default(), function.net.len())
        });
        // No kernel produces the second one (its uevent omits the driver) or a bridge with an
        // interface. These are not searched for.
        let expected = [("ice", 1), ("", 0), ("pcieport", 0), ("ice", 1)]
            .map(|(driver, net)| (driver.to_owned(), net));
        assert_eq!(functions, expected);
    }

    #[test]
    fn dangling_links_pipes_and_folders_do_not_stop_a_scan() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        place(
            root,
            "pci0000:00/0000:00:01.0",
            &[("iommu_group/type", "DMA"), ("device", "garbage")],
        );
        symlink(
            "../../../bus/pci/drivers/nvidia",
            root.join("sys/devices/pci0000:00/0000:00:01.0/driver"),
        )
        .unwrap();
        let pipe = root.join("sys/devices/pci0000:00/0000:00:01.0/vendor");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        symlink(
            "../../../devices/pci0000:00/0000:00:02.0",
            root.join(DEVICES).join("0000:00:02.0"),
        )
        .unwrap();
        write(root, "sys/bus/pci/devices/0000:00:03.0/vendor", "0x10de");
        write(root, "sys/bus/pci/devices/no-address/vendor", "0x10de");
        let scan = scan(&HostRoot::new(root));
        assert_eq!(scan.functions.len(), 3);
        let first = scanned(&dir, "0000:00:01.0");
        assert_eq!((first.vendor, first.device, first.iommu_group), (None, None, None));
        assert_eq!(first.driver.as_deref(), Some("nvidia"));
        assert_eq!(scanned(&dir, "0000:00:03.0").vendor, Some(0x10de));
    }

    #[test]
    fn class_links_and_virtio_children_belong_to_the_function_above() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        place(
            root,
            "pci0000:00/0000:00:03.0",
            &[("virtio0/net/ens3/mtu", "1500"), ("drm/card0/card0-DP-1/status", "x")],
        );
        place(root, "pci0000:80/0000:82:00.0", &[("drm/version", "x"), ("net/ib1/mtu", "1500")]);
        fs::create_dir_all(root.join("sys/class/net")).unwrap();
        symlink("../../devices/pci0000:80/0000:82:00.0/net/ib0", root.join("sys/class/net/ib0"))
            .unwrap();
        symlink("../../devices/virtual/net/lo", root.join("sys/class/net/lo")).unwrap();
        write(root, "sys/class/net/bonding_masters", "");
        assert_eq!(scanned(&dir, "0000:00:03.0").net, ["ens3"]);
        assert_eq!(scanned(&dir, "0000:00:03.0").drm, ["card0"]);
        assert_eq!(scanned(&dir, "0000:82:00.0").net, ["ib0", "ib1"]);
        assert!(scanned(&dir, "0000:82:00.0").drm.is_empty());
    }
}
