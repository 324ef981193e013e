//! Tests of the labels of gpu-feature-discovery, against the rules of that program.

use super::*;
use crate::domain::{DeviceClass, GpuDescription, MigPlace, NvidiaInstance, NvidiaOptions, Select};
use std::sync::Arc;

const H100: &str = "NVIDIA H100 80GB HBM3";

fn described(compute: (i32, i32), memory_mib: u64) -> GpuDescription {
    GpuDescription {
        memory_mib: Some(memory_mib),
        compute: Some(compute),
        has_mig_mode: compute == (9, 0),
        cuda: Some((13, 0)),
        ..GpuDescription::default()
    }
}

fn gpu(number: u8, model: &str, description: Option<GpuDescription>) -> NvidiaGpu {
    NvidiaGpu {
        address: format!("0000:{number:02x}:00.0").parse().unwrap(),
        model: Some(model.into()),
        class: Some(CONTROLLER_3D),
        in_mig_mode: false,
        instances: Vec::new(),
        description,
    }
}

fn cut(number: u8, profiles: &[Option<&str>]) -> NvidiaGpu {
    let size = MigAttributes {
        memory_mb: 9984,
        multiprocessors: 16,
        slices: (1, 1),
        engines: [1, 1, 0, 1, 0],
    };
    let instance = |(place, profile): (MigPlace, &Option<&str>)| NvidiaInstance {
        place,
        profile: profile.map(str::to_owned),
        attributes: profile.is_some().then_some(size),
    };
    NvidiaGpu {
        in_mig_mode: true,
        instances: (7..).map(|gi| (gi, 0)).zip(profiles).map(instance).collect(),
        ..gpu(number, H100, Some(described((9, 0), 81_559)))
    }
}

fn node(gpus: Vec<NvidiaGpu>) -> NvidiaNode {
    NvidiaNode { driver: Some("580.82.07".into()), machine: Some("p5.48xlarge".into()), gpus }
}

fn offers(specs: &[(&str, u32, bool)], strategy: MigStrategy) -> GpuOffers {
    let spec = |(name, replicas, by_mps): &(&str, u32, bool)| {
        let mps_root = by_mps.then(|| "/run/nvidia/mps".to_owned());
        let options = NvidiaOptions { mps_root, ..NvidiaOptions::default() };
        Arc::new(ResourceSpec {
            contract: Contract::Nvidia(options),
            sharing: Sharing::replicas(*replicas),
            select: Select { uniform: strategy == MigStrategy::Single, ..Select::default() },
            ..ResourceSpec::new(name.parse().unwrap(), DeviceClass::Gpu)
        })
    };
    let plan = Plan { specs: specs.iter().map(spec).collect(), ..Plan::default() };
    let offers = GpuOffers::of(&plan).unwrap();
    assert_eq!(offers.strategy, strategy);
    offers
}

fn exclusive() -> GpuOffers {
    offers(&[(GPU, 1, false)], MigStrategy::None)
}

fn text(labels: &Labels) -> String {
    labels.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

#[test]
fn a_plain_node_matches_the_golden_text() {
    let gpus = vec![gpu(1, H100, Some(described((9, 0), 81_559))); 8];
    let wanted = "nvidia.com/cuda.driver-version.full=580.82.07\n\
                  nvidia.com/cuda.driver-version.major=580\n\
                  nvidia.com/cuda.driver-version.minor=82\n\
                  nvidia.com/cuda.driver-version.revision=07\n\
                  nvidia.com/cuda.driver.major=580\n\
                  nvidia.com/cuda.driver.minor=82\n\
                  nvidia.com/cuda.driver.rev=07\n\
                  nvidia.com/cuda.runtime-version.full=13.0\n\
                  nvidia.com/cuda.runtime-version.major=13\n\
                  nvidia.com/cuda.runtime-version.minor=0\n\
                  nvidia.com/cuda.runtime.major=13\n\
                  nvidia.com/cuda.runtime.minor=0\n\
                  nvidia.com/gpu.compute.major=9\n\
                  nvidia.com/gpu.compute.minor=0\n\
                  nvidia.com/gpu.count=8\n\
                  nvidia.com/gpu.family=hopper\n\
                  nvidia.com/gpu.machine=p5.48xlarge\n\
                  nvidia.com/gpu.memory=81559\n\
                  nvidia.com/gpu.mode=compute\n\
                  nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3\n\
                  nvidia.com/gpu.replicas=1\n\
                  nvidia.com/gpu.sharing-strategy=none\n\
                  nvidia.com/mig.capable=true\n\
                  nvidia.com/mps.capable=false\n";
    assert_eq!(text(&gpu_labels(&node(gpus), &exclusive())), wanted);
}

#[test]
fn names_are_written_as_that_program_writes_them() {
    for (name, wanted) in [
        (H100, "NVIDIA-H100-80GB-HBM3"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
        ("Tesla V100-SXM2-16GB", "Tesla-V100-SXM2-16GB"),
        ("NVIDIA GH200 480GB", "NVIDIA-GH200-480GB"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA-GeForce-RTX-4090"),
        ("Quadro RTX 6000/8000", "Quadro-RTX-60008000"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        ),
        ("Standard PC (Q35 + ICH9, 2009)", "Standard-PC-Q35-ICH9-2009"),
        ("  two   blanks ", "two-blanks"),
        ("a\tb", "ab"),
        ("Größe_1.0", "Gre_1.0"),
        ("DGX-2H", "DGX-2H"),
        ("™", ""),
    ] {
        assert_eq!(sanitised(name), wanted, "{name}");
    }
}

#[test]
fn every_architecture_has_its_family() {
    for (compute, wanted) in [
        ((3, 7), "kepler"),
        ((5, 2), "maxwell"),
        ((6, 0), "pascal"),
        ((7, 0), "volta"),
        ((7, 2), "volta"),
        ((7, 5), "turing"),
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 7), "ampere"),
        ((8, 9), "ada-lovelace"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((10, 3), "blackwell"),
        ((12, 0), "blackwell"),
        ((12, 1), "blackwell"),
        ((13, 0), "rubin"),
        ((4, 0), "undefined"),
        ((11, 0), "undefined"),
        ((14, 0), "undefined"),
    ] {
        assert_eq!(family(compute.0, compute.1), wanted, "{compute:?}");
    }
}

#[test]
fn shares_are_labelled_by_the_plugins_rules() {
    let node = node(vec![gpu(1, "NVIDIA A10", Some(described((8, 6), 23_028))); 2]);
    for (specs, [product, replicas, strategy, mps]) in [
        (&[(GPU, 4, false)][..], ["NVIDIA-A10-SHARED", "4", "time-slicing", "false"]),
        (&[(GPU, 4, true)], ["NVIDIA-A10-SHARED", "4", "mps", "true"]),
        (&[("nvidia.com/gpu.shared", 4, false)], ["NVIDIA-A10", "4", "time-slicing", "false"]),
        (&[("example.com/a10", 2, false)], ["NVIDIA-A10", "2", "time-slicing", "false"]),
        (&[(GPU, 1, false), ("a.b/c", 2, false)], ["NVIDIA-A10", "1", "none", "false"]),
    ] {
        let labels = gpu_labels(&node, &offers(specs, MigStrategy::None));
        let of = |name: &str| labels[&format!("nvidia.com/{name}")].clone();
        let found =
            [of("gpu.product"), of("gpu.replicas"), of("gpu.sharing-strategy"), of("mps.capable")];
        assert_eq!(found, [product, replicas, strategy, mps], "{specs:?}");
        assert_eq!(of("gpu.count"), "2", "shares do not count");
        assert_eq!(of("mig.capable"), "false");
    }
    let several = offers(&[("a.b/c", 2, false), ("a.b/d", 4, false)], MigStrategy::None);
    assert!(!gpu_labels(&node, &several).contains_key("nvidia.com/gpu.replicas"));
}

#[test]
fn the_single_strategy_has_the_labels_of_the_instances() {
    let single = offers(&[(GPU, 1, false)], MigStrategy::Single);
    let of = |gpus: Vec<NvidiaGpu>| {
        let labels = gpu_labels(&node(gpus), &single);
        let of = |name: &str| labels.get(&format!("{GPU}.{name}")).cloned().unwrap_or("-".into());
        ["product", "count", "replicas", "sharing-strategy", "memory", "family", "slices.gi"]
            .map(of)
    };
    let one = Some("1g.10gb");
    assert_eq!(
        of(vec![cut(1, &[one; 7]), cut(2, &[one; 7])]),
        ["NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "14", "1", "none", "9984", "hopper", "1"]
    );
    let invalid = ["NVIDIA-H100-80GB-HBM3-MIG-INVALID", "0", "0", "", "0", "hopper", "-"];
    assert_eq!(of(vec![cut(1, &[one, Some("2g.20gb")])]), invalid, "two profiles");
    assert_eq!(of(vec![cut(1, &[one]), cut(2, &[])]), invalid, "a GPU without an instance");
    let whole = gpu(2, H100, Some(described((9, 0), 81_559)));
    assert_eq!(of(vec![cut(1, &[one]), whole.clone()]), invalid, "a whole GPU");
    let unknown = ["-", "-", "-", "-", "-", "hopper", "-"];
    assert_eq!(of(vec![cut(1, &[one, None])]), unknown, "until NVML has answered");
    let plain = ["NVIDIA-H100-80GB-HBM3", "1", "1", "none", "81559", "hopper", "-"];
    assert_eq!(of(vec![whole]), plain, "no GPU in MIG mode");
}

#[test]
fn the_mixed_strategy_has_labels_of_each_profile() {
    let specs = [(GPU, 1, false), ("nvidia.com/mig-1g.10gb", 3, false)];
    let mixed = offers(&specs, MigStrategy::Mixed);
    let gpus = vec![cut(1, &[Some("1g.10gb"), Some("1g.10gb"), Some("1g.10gb+me"), None])];
    let labels = gpu_labels(&node(gpus), &mixed);
    let of_mig: Labels = labels
        .iter()
        .filter(|(name, _)| !name.contains("cuda.") && !name.contains(".engines."))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let wanted = "nvidia.com/gpu.compute.major=9\n\
                  nvidia.com/gpu.compute.minor=0\n\
                  nvidia.com/gpu.count=1\n\
                  nvidia.com/gpu.family=hopper\n\
                  nvidia.com/gpu.machine=p5.48xlarge\n\
                  nvidia.com/gpu.memory=81559\n\
                  nvidia.com/gpu.mode=compute\n\
                  nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3\n\
                  nvidia.com/gpu.replicas=0\n\
                  nvidia.com/gpu.sharing-strategy=none\n\
                  nvidia.com/mig-1g.10gb.count=2\n\
                  nvidia.com/mig-1g.10gb.me.count=1\n\
                  nvidia.com/mig-1g.10gb.me.memory=9984\n\
                  nvidia.com/mig-1g.10gb.me.multiprocessors=16\n\
                  nvidia.com/mig-1g.10gb.me.product=NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me\n\
                  nvidia.com/mig-1g.10gb.me.slices.ci=1\n\
                  nvidia.com/mig-1g.10gb.me.slices.gi=1\n\
                  nvidia.com/mig-1g.10gb.memory=9984\n\
                  nvidia.com/mig-1g.10gb.multiprocessors=16\n\
                  nvidia.com/mig-1g.10gb.product=NVIDIA-H100-80GB-HBM3-MIG-1g.10gb-SHARED\n\
                  nvidia.com/mig-1g.10gb.replicas=3\n\
                  nvidia.com/mig-1g.10gb.sharing-strategy=time-slicing\n\
                  nvidia.com/mig-1g.10gb.slices.ci=1\n\
                  nvidia.com/mig-1g.10gb.slices.gi=1\n\
                  nvidia.com/mig.capable=true\n\
                  nvidia.com/mig.strategy=mixed\n\
                  nvidia.com/mps.capable=false\n";
    assert_eq!(text(&of_mig), wanted);
    assert_eq!(labels["nvidia.com/mig-1g.10gb.engines.copy"], "1");
    assert_eq!(labels["nvidia.com/mig-1g.10gb.engines.encoder"], "0");
}

#[test]
fn a_fact_that_is_missing_omits_its_label() {
    let bare = NvidiaNode {
        driver: Some("beta".into()),
        machine: None,
        gpus: vec![NvidiaGpu { model: None, class: None, ..gpu(1, "", None) }],
    };
    let wanted = "nvidia.com/gpu.count=1\nnvidia.com/gpu.replicas=1\n\
                  nvidia.com/gpu.sharing-strategy=none\nnvidia.com/mps.capable=false\n";
    assert_eq!(text(&gpu_labels(&bare, &exclusive())), wanted);
    // The memory of an integrated GPU is not its own; NVML does not know it.
    let shared = GpuDescription { memory_mib: None, ..described((12, 1), 0) };
    let labels = gpu_labels(&node(vec![gpu(1, "NVIDIA GB10", Some(shared))]), &exclusive());
    assert!(!labels.contains_key("nvidia.com/gpu.memory"));
    assert_eq!(labels["nvidia.com/gpu.family"], "blackwell");
    // A value that is too long would be refused.
    let long = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition of another name";
    let labels = gpu_labels(&node(vec![gpu(1, long, None)]), &exclusive());
    assert!(!labels.contains_key("nvidia.com/gpu.product"));
    // A driver without a revision.
    let labels = gpu_labels(
        &NvidiaNode { driver: Some("455.06".into()), ..node(vec![gpu(1, H100, None)]) },
        &exclusive(),
    );
    assert_eq!(labels["nvidia.com/cuda.driver.rev"], "");
    assert_eq!(labels["nvidia.com/cuda.driver-version.full"], "455.06");
    assert!(gpu_labels(&node(Vec::new()), &exclusive()).is_empty());
    assert_eq!(GpuOffers::of(&Plan::default()), None);
}

#[test]
fn of_several_models_the_most_frequent_is_described() {
    let [a, b] = ["NVIDIA A10", "NVIDIA L4"].map(|model| gpu(1, model, None));
    let product = |gpus: &[&NvidiaGpu]| {
        let labels = gpu_labels(&node(gpus.iter().copied().cloned().collect()), &exclusive());
        (labels["nvidia.com/gpu.product"].clone(), labels["nvidia.com/gpu.count"].clone())
    };
    let pair = |product: &str, count: &str| (product.to_owned(), count.to_owned());
    assert_eq!(product(&[&a, &b, &b]), pair("NVIDIA-L4", "2"));
    assert_eq!(product(&[&b, &a]), pair("NVIDIA-A10", "1"), "in the order of their names");
    let display = NvidiaGpu { class: Some(VGA), ..b };
    let mode =
        |gpus: Vec<NvidiaGpu>| gpu_labels(&node(gpus), &exclusive())["nvidia.com/gpu.mode"].clone();
    assert_eq!(mode(vec![display.clone()]), "graphics");
    assert_eq!(mode(vec![display, a]), "unknown");
}
