//! `holdfast doctor` on captured machines: healthy hardware gives no finding.

use super::archive::{Capture, captures};
use holdfast::config::Roots;
use holdfast::doctor::{Level, Target, examine, gather};

/// Findings of every tree here, because there is neither a kubelet nor a daemon.
const NOT_HARDWARE: [&str; 3] = ["not-root", "daemon-absent", "kubelet-absent"];

#[test]
fn no_captured_machine_has_a_finding() {
    let Some(captures) = captures() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |rel: &str| dir.path().join(rel);
    std::fs::create_dir_all(path("kubelet/device-plugins")).unwrap();
    std::fs::write(path("config.toml"), "").unwrap();
    let mut problems = Vec::new();
    for Capture { name, root, .. } in &captures {
        let roots = Roots {
            host: root.clone(),
            kubelet: path("kubelet"),
            state: path("state"),
            run: path("run"),
        };
        let report =
            examine(&gather(Target { roots, config: Some(path("config.toml")), own: path("own") }));
        // The disk of the test's folder is not part of the capture either.
        let of_disk = |code: &str| code.starts_with("state-");
        let found = report.findings.iter().filter(|finding| finding.level != Level::Ok);
        let found =
            found.filter(|finding| !NOT_HARDWARE.contains(&finding.code) && !of_disk(finding.code));
        problems.extend(found.map(|finding| format!("{name}: {finding:?}")));
        let made: Vec<&str> = report.findings.iter().map(|finding| finding.code).collect();
        assert!(
            ["resources", "devices", "iommu", "selinux"].iter().all(|check| made.contains(check)),
            "{name}: {made:?}"
        );
    }
    println!("{} captures checked", captures.len());
    assert!(problems.is_empty(), "{} findings:\n{}", problems.len(), problems.join("\n"));
}
