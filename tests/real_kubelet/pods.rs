//! Static pods: their manifests, and their state as the kubelet reports it.

use crate::real::image::BUSYBOX;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

/// One pod as the kubelet reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) phase: String,
    pub(crate) reason: String,
    pub(crate) message: String,
    /// The start time of its main container; empty if it does not run.
    pub(crate) started_at: String,
    pub(crate) restarts: u64,
}

impl Pod {
    pub(crate) fn runs(&self) -> bool {
        self.phase == "Running" && !self.started_at.is_empty()
    }
}

/// What the main container prints: its environment, the offered nodes, and the files of a GPU with
/// the result of opening its node.
const SCRIPT: &str = "env; ls -lR /dev/offered /dev/exclusive; ls /dev/nvidia* /usr/lib/*-linux-gnu/*; \
     for node in /dev/nvidia[0-9]*; do echo opened: $( (: < $node) 2>&1); done; exec sleep 1000000";

/// The folder of manifests and the kubelet's read-only port.
#[derive(Debug)]
pub(crate) struct Pods {
    manifests: PathBuf,
    port: u16,
}

impl Pods {
    pub(crate) fn new(manifests: PathBuf, port: u16) -> Self {
        Pods { manifests, port }
    }

    /// Creates a pod whose main container requests `count` of `resource`. With `init`, an init
    /// container requests them first.
    pub(crate) fn create(&self, name: &str, resource: &str, count: u32, init: bool) {
        let container = |name: &str, script: &str| {
            json!({
                "name": name,
                "image": BUSYBOX,
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", script],
                "resources": {"limits": {resource: count.to_string()}, "requests": {resource: count.to_string()}},
            })
        };
        let setup: Vec<Value> = init.then(|| container("setup", "exit 0")).into_iter().collect();
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "hostNetwork": true,
                "terminationGracePeriodSeconds": 1,
                "initContainers": setup,
                "containers": [container("main", SCRIPT)],
            },
        });
        self.put(name, &pod);
    }

    /// Creates a pod from any manifest with this name.
    pub(crate) fn put(&self, name: &str, pod: &Value) {
        // Renamed into place: the kubelet may read at any time. A JSON document is a YAML document.
        let draft = self.manifests.with_extension("draft");
        fs::write(&draft, pod.to_string()).unwrap();
        fs::rename(draft, self.manifest(name)).unwrap();
    }

    pub(crate) fn delete(&self, name: &str) {
        fs::remove_file(self.manifest(name)).unwrap();
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.manifests.join(format!("{name}.json"))
    }

    /// The pod of a manifest; `None` if the kubelet does not know it.
    pub(crate) fn get(&self, name: &str) -> Option<Pod> {
        let pod = self.told(name)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (status, main) = (&pod["status"], &pod["status"]["containerStatuses"][0]);
        Some(Pod {
            uid: text(&pod["metadata"]["uid"]),
            phase: text(&status["phase"]),
            reason: text(&status["reason"]),
            message: text(&status["message"]),
            started_at: text(&main["state"]["running"]["startedAt"]),
            restarts: main["restartCount"].as_u64().unwrap_or_default(),
        })
    }

    /// The kubelet's whole document of a pod.
    pub(crate) fn told(&self, name: &str) -> Option<Value> {
        let list = self.list()?;
        list["items"]
            .as_array()?
            .iter()
            .find(|pod| pod["metadata"]["name"] == format!("{name}-node"))
            .cloned()
    }

    /// The kubelet's pods; `None` while it does not answer.
    pub(crate) fn list(&self) -> Option<Value> {
        serde_json::from_str(&self.ask("/pods")?).ok()
    }

    /// How often each kind of probe of a pod has succeeded so far.
    pub(crate) fn good_probes(&self, name: &str) -> BTreeMap<String, u64> {
        let (metrics, pod) =
            (self.ask("/metrics/probes").unwrap_or_default(), format!("{name}-node"));
        let label = |line: &str, key: &str| {
            Some(line.split_once(&format!("{key}=\""))?.1.split_once('"')?.0.to_owned())
        };
        let of_pod = metrics.lines().filter(|line| {
            line.starts_with("prober_probe_total{") && label(line, "pod").as_ref() == Some(&pod)
        });
        let good = of_pod.filter(|line| label(line, "result").as_deref() == Some("successful"));
        good.filter_map(|line| {
            Some((label(line, "probe_type")?, line.rsplit_once(' ')?.1.parse().ok()?))
        })
        .collect()
    }

    fn ask(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        // With HTTP/1.0 the answer comes in one piece and ends with the connection.
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        head.contains(" 200 ").then(|| body.to_owned())
    }
}

/// The output of the main container of a pod.
pub(crate) fn log(name: &str, uid: &str) -> String {
    fs::read_to_string(format!("/var/log/pods/default_{name}-node_{uid}/main/0.log"))
        .unwrap_or_default()
}
