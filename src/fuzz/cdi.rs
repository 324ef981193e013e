//! CDI: names of devices, and the files that define them, our own and those of other programs.

use super::Seeds;
use super::input::Input;
use crate::config::import::cdi_names;
use crate::contract::nvidia_cdi::Document;
use crate::contract::{cdi as files, claim};
use crate::domain::{
    CdiAnswer, Device, DeviceClass, DeviceId, DeviceNode, ResourceName, ResourceSpec,
};
use crate::slices::names::{device_name, is_label};

/// Files of other programs, and the names of our own devices. The first byte chooses.
pub fn cdi(data: &[u8]) {
    let mut input = Input::new(data);
    if input.truth() {
        return spec_file(input.rest());
    }
    let text = |input: &mut Input<'_>| input.text(100);
    let (one, two) = (text(&mut input), text(&mut input));
    let names = [&one, &two].map(|id| device_file(id));
    assert!(one == two || names[0] != names[1], "`{one}` and `{two}` have one name");
    claim_names(&one);
    let published = [&one, &two].map(|id| device_name(&DeviceId::new(id)));
    assert!(published.iter().all(|name| is_label(name)), "{published:?}");
    assert!(one == two || published[0] != published[1], "{published:?}");
}

/// The file of a device with this id. Returns its CDI name.
fn device_file(id: &str) -> String {
    let device = Device {
        id: DeviceId::new(id),
        key: format!("dev:{id}"),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: vec![DeviceNode::at("/dev/fuse")],
        attributes: std::iter::empty::<(&'static str, &str)>().collect(),
    };
    let name: ResourceName = "example.com/fuse".parse().expect("a name");
    let spec =
        ResourceSpec { cdi: vec![CdiAnswer::Cri], ..ResourceSpec::new(name, DeviceClass::Char) };
    let made = files::files(&spec, [&device], &|_| true);
    let file = made.first().expect("a device with a node has a file");
    let mut expected = files::file_names_of(&spec, &device);
    assert_eq!(expected.next().as_ref(), Some(&file.name), "the name of an absent device's file");
    assert!(!file.name.contains(['/', '\0']) && file.name.len() < 256, "{}", file.name);
    let defined: Vec<String> = cdi_names(&file.text).into_iter().collect();
    let [qualified] = defined.as_slice() else { panic!("one name: {defined:?}") };
    assert_eq!(files::file_name(qualified), file.name);
    let (_, name) = qualified.split_once('=').expect("a qualified name");
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    assert!(name.chars().all(fits), "CDI forbids `{name}`");
    assert!(is_end(name.chars().next()) && is_end(name.chars().last()), "CDI forbids `{name}`");
    qualified.clone()
}

fn claim_names(uid: &str) {
    match claim::file_name(uid) {
        Some(file) => {
            assert_eq!(claim::uid_of_file(&file), Some(uid), "the claim of its own file");
            assert!(!file.contains(['/', '\0']) && file.len() < 256, "{file}");
            let metadata = claim::metadata_file_name(uid, "a").expect("a UID");
            assert_eq!(claim::uid_of_file(&metadata), Some(uid), "the claim of its metadata");
        }
        None => assert!(!claim::is_uid(uid)),
    }
    // The name of a file of a claim, as the folder may have it.
    if let Some(of) = claim::uid_of_file(uid) {
        let own = claim::file_name(of).expect("a UID");
        let stem = own.trim_end_matches(".json");
        assert!(own == uid || uid.starts_with(&format!("{stem}+")), "{uid}");
    }
}

/// A file of any program.
fn spec_file(data: &[u8]) {
    if let Some(document) = Document::parse(data) {
        let text = document.text().expect("a file that was read can be written");
        assert_eq!(Document::parse(text.as_bytes()).as_ref(), Some(&document), "{text}");
    }
    for (device, qualified) in claim::devices_in(data, "u-1") {
        assert!(qualified.ends_with(&format!("=u-1-{device}")), "{qualified}");
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    drop(cdi_names(text));
    // JSON is YAML: both readers see the same names of a JSON file.
    let Ok(file) = serde_json::from_str::<serde_json::Value>(text) else { return };
    let text = file.to_string();
    // As those of container runtimes, the YAML parser refuses control characters.
    let is_plain = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if text.matches(['[', '{']).count() > 32 || !is_plain {
        return;
    }
    let (names, kind) = (cdi_names(&text), file["kind"].as_str());
    let devices = file["devices"].as_array().into_iter().flatten();
    for name in devices.filter_map(|device| device["name"].as_str()) {
        let qualified = kind.map(|kind| format!("{kind}={name}"));
        let is_known = qualified.as_ref().is_none_or(|qualified| names.contains(qualified));
        assert!(is_known, "{qualified:?} of {text}: {names:?}");
    }
}

/// A file in YAML and in JSON, and names that CDI forbids.
pub(super) fn seeds() -> Seeds {
    let yaml = "1---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n    - name: \"0\"\n      containerEdits:\n        deviceNodes:\n            - path: /dev/nvidia0\n    - name: all\ncontainerEdits:\n    env: [A=b]\n";
    let json = r#"1{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"env":["A=b"],"deviceNodes":[{"path":"/dev/a","hostPath":"/dev/b","permissions":"rw"}],"hooks":[{"hookName":"createContainer","path":"/a","args":["b"],"env":[]}],"mounts":[{"hostPath":"/a","containerPath":"/b","options":["ro"]}]}},{"name":"all","containerEdits":{}}],"containerEdits":{}}"#;
    let claims = r#"1{"cdiVersion":"0.3.0","kind":"k8s.holdfast.dev/claim","devices":[{"name":"u-1-gpu-1","containerEdits":{}}]}"#;
    let ids = |one: &str, two: &str| {
        let text = |text: &str| {
            [&[u8::try_from(text.len()).unwrap_or_default()], text.as_bytes()].concat()
        };
        [vec![b'0'], text(one), text(two)].concat()
    };
    vec![
        ("yaml", yaml.as_bytes().to_vec()),
        ("json", json.as_bytes().to_vec()),
        ("claim", claims.as_bytes().to_vec()),
        ("addresses", ids("0000:3b:00.2", "0000:3b:00.3")),
        ("uuids", ids("GPU-1", "MIG-2/1/0")),
        ("forbidden", ids("-a/b=\u{e4}-", "_a")),
        ("claim-file", ids("holdfast-claim-u-1.json", "067798be-454e-4be4-9047-1aa06aea63f7")),
    ]
}
