//! An unreadable checkpoint: status, doctor and metrics report it, Allocate is answered, and
//! nothing is released.

use crate::common::{
    Node, allocate, dial, http_get, offered, resource, run, soon, telemetry, until,
};
use crate::edges::stage::gpu;
use holdfast::lab::sim::kubelet::{Hook, HookTable, Kubelet, KubeletConfig, Verdict};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;
use std::fs;
use std::path::Path;
use tokio::task::spawn_blocking;

/// More lists than the daemon sends during the test.
const LISTS: usize = 100;

/// The codes of doctor's findings. Doctor asks the kubelet, which runs on this thread.
async fn found_by_doctor(node: &Node) -> Vec<String> {
    let mut command = node.command(&["doctor", "-o", "json"]);
    let output = spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let findings: Value = serde_json::from_slice(&output.stdout).unwrap();
    findings["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["code"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_reported_and_refuses_no_allocate() {
    type Put = fn(&Path);
    let kinds: [(&str, Put); 3] = [
        ("it is truncated", |path| fs::write(path, "{\"Data\":{\"PodDeviceEntries\":[").unwrap()),
        ("it is a FIFO", |path| mkfifo(path, Mode::S_IRUSR).unwrap()),
        ("it is a directory", |path| fs::create_dir(path).unwrap()),
    ];
    run(async {
        let node = Node::with(&[("gpu", kinds.len())]);
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
        let hooks = HookTable::default();
        let kubelet =
            Kubelet::start(KubeletConfig { hooks: hooks.clone(), ..node.kubelet_config() })
                .await
                .unwrap();
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu(), kinds.len()).await;
        // The kubelet replaces the file after each list, unless the write fails.
        for _ in 0..LISTS {
            hooks.gate(Hook::BeforeCheckpoint).open(Verdict::Fail);
        }
        let address = telemetry(&daemon).await;
        let checkpoint = node.path("kubelet/device-plugins/kubelet_internal_checkpoint");
        let readable = |value: u32| format!("\nholdfast_kubelet_checkpoint_readable {value}\n");
        let unread = || node.json(&["status"])["checkpoint_unread"].clone();
        for (index, (why, put)) in kinds.into_iter().enumerate() {
            fs::remove_file(&checkpoint).ok();
            put(&checkpoint);
            let mut api = dial(&kubelet, &node, &gpu()).await;
            soon("an Allocate", allocate(&mut api, &[&format!("dev:gpu{index}")])).await.unwrap();
            let told = until("the status", unread, |told| {
                told["why"].as_str().is_some_and(|text| text.contains(why))
            })
            .await;
            assert!(told["since"].is_string() && told["missing"] == false, "{told}");
            until(
                "the metric",
                || http_get(address, "/metrics").1,
                |page| page.contains(&readable(0)),
            )
            .await;
            let codes = found_by_doctor(&node).await;
            assert!(
                codes.iter().any(|code| code == "kubelet-checkpoint-unreadable"),
                "{why}: {codes:?}"
            );
            let live = node.grants().iter().filter(|grant| grant.is_live()).count();
            assert_eq!(live, index + 1, "{why}: no proof, no release");
        }
        fs::remove_dir(&checkpoint).unwrap();
        fs::write(
            &checkpoint,
            r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#,
        )
        .unwrap();
        until("a status without it", unread, Value::is_null).await;
        until("the metric", || http_get(address, "/metrics").1, |page| page.contains(&readable(1)))
            .await;
        let codes = found_by_doctor(&node).await;
        assert!(codes.iter().all(|code| code != "kubelet-checkpoint-unreadable"), "{codes:?}");
    });
}
