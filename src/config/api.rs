//! The API that gives the devices of a resource to pods, and what a claim cannot carry.

use super::ConfigError;
use super::error::{hidden, unknown};
use super::fragments::{Class, Hook, Resource};
use super::tree::{Is, Table, Value};
use crate::domain::{Api, Contract, FpgaMode, MIG_PROFILE, NODE, PerContainer, Sharing, template};

/// The values of the key.
const KNOWN: [&str; 3] = ["plugin", "dra", "both"];

pub(super) fn api(resource: &Resource, contract: &Contract) -> Result<Api, String> {
    let api = match resource.api.as_deref() {
        None | Some("plugin") => return Ok(Api::Plugin),
        Some("dra") => Api::Dra,
        Some("both") => Api::Both,
        Some(other) => return Err(unknown("value", other, &KNOWN)),
    };
    let key = format!("`api` = \"{}\"", api.as_str());
    if let Some(word) = [NODE, MIG_PROFILE].iter().find(|word| resource.name.contains(**word)) {
        return Err(format!(
            "{key} needs an ordinary name without `{word}`, because claims select devices by their \
             attributes; name the resource once"
        ));
    }
    if let Class::Other | Class::Pci = resource.class {
        return Err(format!(
            "devices of the classes `other` and `pci` are not published for claims; use the device plugin for \
             them, without {key}"
        ));
    }
    match contract {
        Contract::RdmaShared => {
            return Err(format!(
                "the `contract` \"rdma-shared\" gives all devices to every container, but a claim \
                 names its devices; use \"generic\" for {key}"
            ));
        }
        Contract::Kubevirt => {
            return Err(format!(
                "the `contract` \"kubevirt\" lists all devices of a container in one variable, but \
                 a container may have several claims; use \"generic\" for {key}"
            ));
        }
        Contract::Nvidia(options) if options.mps_root.is_some() => {
            return Err(format!(
                "`mps_root` shares a GPU among the containers of one resource, but a container may \
                 have claims of several; remove it for {key}"
            ));
        }
        Contract::IntelFpga(options) if options.mode == FpgaMode::Region => {
            return Err("the `mode` \"region\" passes an annotation to Intel's hook, but CDI has \
                        none; use \"af\" or \"regiondevel\" for claims"
                .into());
        }
        _ => {}
    }
    let lists = |(name, value): &(&String, &String)| {
        template::has_placeholder(value) || name.contains(template::NUMBER)
    };
    if let Some(name) = resource.env.iter().find(lists) {
        return Err(format!(
            "the variable `{}` of `env` lists devices by its placeholder, but a container may have \
             several claims, and the last one would win; remove it for {key}",
            hidden(name.0)
        ));
    }
    if resource.pool.is_some() {
        return Err(format!(
            "`pool` gives all devices to every container, but a claim names its devices; use \
             `replicas` for {key}"
        ));
    }
    if resource.per_container.is_some_and(|limit| limit != PerContainer::Any) {
        return Err(format!(
            "`per_container` limits the ids of one container, but the kubelet does not name the \
             containers of a claim; remove it for {key}"
        ));
    }
    if !matches!(resource.before_start, None | Some(Hook::None)) {
        return Err(format!(
            "`before_start` cannot run, because the kubelet does not call before a container with a \
             claim starts; use `after_release` for {key}"
        ));
    }
    Ok(api)
}

/// Whether claims ask for parts of a device's capacity.
pub(super) fn capacity(resource: &Resource, api: Api, sharing: Sharing) -> Result<bool, String> {
    if !resource.capacity {
        return Ok(false);
    }
    if api != Api::Dra {
        return Err(format!(
            "`capacity` divides devices among claims, but the kubelet gives shares by number with \
             `api` = \"{}\", and the scheduler does not count those; use `api` = \"dra\"",
            api.as_str()
        ));
    }
    if !matches!(sharing, Sharing::Replicas(_)) {
        return Err("`capacity` divides a device among several claims; set `replicas` to the \
                    largest number of claims that have a part of it"
            .into());
    }
    Ok(true)
}

/// The error of the merged files if a resource is for claims without the table `[dra]`, which any
/// file or section of this node may have.
pub(super) fn claims_without_dra(merged: &Table) -> Option<ConfigError> {
    let enabled = merged.get("dra").and_then(Value::as_table).and_then(|dra| dra.get("enabled"));
    if enabled.is_some_and(|value| matches!(&value.is, Is::Plain(text) if text == "true")) {
        return None;
    }
    let resources = merged.get("resource").and_then(Value::as_list).unwrap_or_default();
    let mut apis = resources.iter().filter_map(|resource| resource.as_table()?.get("api"));
    let (claimed, api) = apis.find_map(|api| {
        let text = api.as_text().filter(|text| ["dra", "both"].contains(text))?;
        Some((api, text))
    })?;
    let problem = format!(
        "`api` = \"{api}\" gives devices to claims, which `dra.enabled` = true permits; add \
         `enabled = true` to the table [dra]"
    );
    Some(ConfigError::new(problem).at(claimed.place.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::super::{Examined, Node};
    use super::*;
    #[cfg(feature = "cluster")]
    use crate::domain::DeviceId;
    use std::path::Path;

    fn examined(text: &str) -> Examined {
        Examined::alone(text.as_bytes(), Path::new("f"), &Node::default())
    }

    fn resource(class: &str, rest: &str) -> String {
        format!("[[resource]]\nname = \"a.b/c\"\nclass = \"{class}\"\n{rest}\n")
    }

    /// The error of a resource, with its line.
    #[cfg(feature = "cluster")]
    fn mistake(text: &str) -> (usize, String) {
        let problems = examined(&format!("[dra]\nenabled = true\n{text}")).problems;
        let problem = problems.first().unwrap_or_else(|| panic!("no error in {text}"));
        (problem.line().unwrap(), problem.problem().to_owned())
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn a_resource_is_for_the_device_plugin_for_claims_or_for_both() {
        let config =
            |text: &str| examined(&format!("[dra]\nenabled = true\n{text}")).config().unwrap();
        for (keys, api) in [
            ("", Api::Plugin),
            ("api = \"plugin\"", Api::Plugin),
            ("api = \"dra\"", Api::Dra),
            ("api = \"both\"", Api::Both),
            ("api = \"both\"\nafter_release = \"reset\"", Api::Both),
            ("api = \"dra\"\nreplicas = 4\nper_container = \"any\"", Api::Dra),
            ("api = \"dra\"\ncdi = [\"cri\"]\nbefore_start = \"none\"", Api::Dra),
            ("api = \"dra\"\nafter_release = \"reset\"", Api::Dra),
        ] {
            assert_eq!(config(&resource("nvme", keys)).resources[0].api, api, "{keys}");
        }
        for (keys, capacity) in
            [("", false), ("capacity = false", false), ("capacity = true", true)]
        {
            let text = resource("gpu", &format!("api = \"dra\"\nreplicas = 4\n{keys}"));
            let spec = &config(&text).resources[0];
            let divided = spec.divided(&DeviceId::new("GPU-1::3"));
            assert_eq!(spec.capacity, capacity, "{keys}");
            assert_eq!(divided, capacity.then(|| DeviceId::new("GPU-1")), "{keys}");
            assert_eq!(spec.divided(&DeviceId::new("GPU-1")), None);
        }
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn what_a_claim_cannot_carry_is_one_sentence_at_its_place() {
        for (class, keys, line, expected) in [
            ("gpu", "api = \"bot\"", 6, "unknown value `bot`; did you mean `both`?"),
            ("rdma", "api = \"both\"\npool = 4", 7, "use `replicas` for `api` = \"both\""),
            ("gpu", "api = \"both\"\nper_container = \"one\"", 7, "remove it for `api` = \"both\""),
            ("gpu", "api = \"drb\"", 6, "unknown value `drb`; did you mean `dra`?"),
            ("rdma", "api = \"dra\"\npool = 4", 7, "`pool` gives all devices"),
            ("rdma", "pool = 4\ncontract = \"rdma-shared\"\napi = \"dra\"", 7, "\"rdma-shared\""),
            ("gpu", "contract = \"kubevirt\"\napi = \"dra\"", 6, "lists all devices"),
            (
                "gpu",
                "api = \"dra\"\ncontract = \"nvidia\"\nreplicas = 2\nnvidia = { mps_root = \"/a\" }",
                9,
                "`mps_root` shares a GPU",
            ),
            (
                "fpga",
                "api = \"dra\"\ncontract = \"intel-fpga\"\nintel-fpga = { mode = \"region\" }",
                8,
                "the `mode` \"region\"",
            ),
            ("gpu", "api = \"dra\"\nper_container = \"one\"", 7, "`per_container` limits"),
            ("gpu", "before_start = \"reset\"\napi = \"dra\"", 6, "use `after_release`"),
            ("gpu", "replicas = 2\ncapacity = true", 7, "with `api` = \"plugin\", and the"),
            ("gpu", "api = \"both\"\nreplicas = 2\ncapacity = true", 8, "use `api` = \"dra\""),
            ("gpu", "api = \"dra\"\ncapacity = true", 7, "set `replicas` to the largest"),
            ("gpu", "api = \"dra\"\nreplicas = 1\ncapacity = true", 8, "set `replicas`"),
        ] {
            let (at, problem) = mistake(&resource(class, keys));
            assert!(problem.contains(expected), "{keys}: {problem}");
            assert_eq!(at, line, "{keys}: {problem}");
            assert!(!problem.contains("  "), "{problem}");
        }
        for name in ["a.b/{node}", "a.b/{mig_profile}"] {
            let class = if name.contains("node") { "char" } else { "gpu" };
            let paths = if class == "char" { "paths = [\"/dev/a\"]" } else { "" };
            let text = format!(
                "[[resource]]\nname = \"{name}\"\nclass = \"{class}\"\n{paths}\napi = \"dra\"\n"
            );
            let (line, problem) = mistake(&text);
            assert!(problem.contains("an ordinary name"), "{problem}");
            assert_eq!(line, 7, "{problem}");
        }
    }

    #[test]
    fn claims_need_the_table_dra_anywhere_for_this_node() {
        let dra = resource("nvme", "api = \"dra\"");
        let problem = |text: &str| {
            let problems = examined(text).problems;
            assert!(problems.len() <= 1, "{problems:?}");
            problems.first().map(|problem| (problem.line(), problem.problem().to_owned()))
        };
        for text in [dra.clone(), format!("{dra}[dra]\nenabled = false\n")] {
            let (line, sentence) = problem(&text).unwrap();
            assert_eq!(line, Some(4));
            assert!(sentence.contains("add `enabled = true` to the table [dra]"), "{sentence}");
        }
        let both = problem(&resource("nvme", "api = \"both\"")).unwrap();
        assert!(both.1.starts_with("`api` = \"both\" gives devices to claims"), "{both:?}");
        let two = format!("{dra}{}", dra.replace("a.b/c", "a.b/d"));
        assert_eq!(problem(&two).unwrap().0, Some(4), "one mistake, once");
        assert_eq!(problem(&resource("nvme", "api = \"plugin\"")), None);
        let on = problem(&format!("{dra}[dra]\nenabled = true\n"));
        if cfg!(feature = "cluster") {
            assert_eq!(on, None);
        } else {
            assert!(on.unwrap().1.contains("the cargo feature `cluster`"));
        }
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn a_section_may_move_the_resources_of_some_nodes_to_claims() {
        let text = format!(
            "{}[[node]]\nmatch = {{ name = \"gpu-*\" }}\ndra.enabled = true\n[[node.resource]]\nname = \"a.b/c\"\nclass = \"nvme\"\napi = \"dra\"\n",
            resource("nvme", "")
        );
        for (name, dra, api) in [("gpu-1", true, Api::Dra), ("cpu-1", false, Api::Plugin)] {
            let node = Node::named(name, Path::new("/"));
            let config = Examined::alone(text.as_bytes(), Path::new("f"), &node).config().unwrap();
            assert_eq!((config.dra, config.resources[0].api), (dra, api), "{name}");
        }
    }
}
