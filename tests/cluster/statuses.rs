//! The status of claims: what a user of the cluster sees of the devices, and the rights for it.

use crate::api::{CLAIMS, SLICES};
use crate::cluster::Cluster;
use crate::daemon::{CLAIMED, Daemon};
use crate::node::{DEVICES, NODE, device};
use crate::objects::{LISTS, claim, text_of};
use crate::plane::AUDIT;
use crate::rights::OF_POD;
use crate::{SOON, pki, rights, say, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const RBAC: &str = include_str!("../../packaging/kustomize/components/claim-status/rbac.yaml");
const POLICY: &str = include_str!("../../packaging/kustomize/components/claim-status/policy.yaml");
/// The rights that the document has for the kubelets' credentials.
const DOCUMENT: &str = include_str!("../../docs/dra.md");
const OFF: &str = "enabled = true\nvendor";
const ON: &str = "enabled = true\nclaim_status = true\nvendor";

impl Cluster {
    fn claim_object(&self, name: &str) -> Value {
        self.api.get(&format!("{CLAIMS}/{name}")).unwrap()
    }

    /// The conditions of the devices of a claim: `<type>=<status> <reason>`, sorted by device.
    fn claim_conditions(&self, name: &str) -> Vec<String> {
        let claim = self.claim_object(name);
        let mut entries = claim["status"]["devices"].as_array().cloned().unwrap_or_default();
        entries.sort_by_key(|entry| entry["device"].to_string());
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let shown = |it: &Value| {
            format!("{}={} {}", text(&it["type"]), text(&it["status"]), text(&it["reason"]))
        };
        let conditions = entries.iter().filter_map(|entry| entry["conditions"].as_array());
        conditions.flatten().map(shown).collect()
    }

    fn until_claim_conditions(&self, name: &str, healthy: &[&str]) {
        let conditions =
            |healthy: &&str| ["Ready=True Prepared".into(), format!("Healthy={healthy}")];
        let wanted: Vec<String> = healthy.iter().flat_map(conditions).collect();
        wait_for(&format!("{name}: {wanted:?}"), SOON, || {
            (self.claim_conditions(name) == wanted).then_some(())
        });
    }

    /// The answers to the service account's patches of the status of claims, from the audit log.
    fn status_patches(&self, claim: &str) -> Vec<u64> {
        let log = fs::read_to_string(self.dir.join(AUDIT)).unwrap_or_default();
        let events = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let is_it = |event: &Value| {
            let of = &event["objectRef"];
            event["verb"] == "patch"
                && of["resource"] == "resourceclaims"
                && of["subresource"] == "status"
                && of["name"] == claim
        };
        events.filter(is_it).map(|it| it["responseStatus"]["code"].as_u64().unwrap()).collect()
    }

    /// A write of the service account to the status of a claim with devices of another node and of
    /// another driver.
    fn write_foreign(&self, status: &Value) -> Result<(), String> {
        let patch = format!("--patch={}", json!({ "status": status }));
        let write = ["patch", "resourceclaim", "foreign", "--subresource=status", "--type=merge"];
        let output = self.api.kubectl(OF_POD, &[&write[..], &[&patch]].concat(), "");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(error) }
    }

    /// Only entries of this driver for devices of the own node may be written: Kubernetes 1.36
    /// checks a part of that itself, and the policy all of it.
    fn check_policy(&self) {
        let entry = |driver: &str| {
            let condition = json!({ "type": "Ready", "status": "True", "reason": "Test",
                "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z" });
            json!({ "devices": [{ "driver": driver, "pool": "node-2/char", "device": "d",
                "conditions": [condition] }] })
        };
        wait_for("the policy is in force", SOON, || {
            let refused = self.write_foreign(&entry("holdfast.dev")).err();
            refused.filter(|it| it.contains("a device is not of the node of the pod"))
        });
        // What was written before the policy was in force.
        let mut foreign = self.claim_object("foreign");
        foreign["status"].as_object_mut().unwrap().remove("devices");
        self.api.replace(&format!("{CLAIMS}/foreign/status"), &foreign);
        let reserved = json!({ "reservedFor": [{ "resource": "pods", "name": "p", "uid": "u" }] });
        for (status, of_server, of_policy) in [
            (entry("other.example.com"), "resourceclaims/driver", "only the entries of the driver"),
            (reserved, "resourceclaims/binding", "only the status of devices may be changed"),
        ] {
            let error = self.write_foreign(&status).unwrap_err();
            assert!(error.contains(of_server) || error.contains(of_policy), "{error}");
            say(format_args!("refused: {}", error.trim()));
        }
    }

    /// A claim to which the control plane seems to have allocated a device of another node, on this
    /// node.
    fn create_foreign_claim(&self) {
        let mut foreign = self.api.create(CLAIMS, &claim("foreign", &[0]));
        let results = ["holdfast.dev", "other.example.com"].map(|driver| {
            json!({ "request": "device-0", "driver": driver, "pool": "node-2/char", "device": "d" })
        });
        let field = json!({ "key": "metadata.name", "operator": "In", "values": [NODE] });
        foreign["status"] = json!({ "allocation": {
            "devices": { "results": results },
            "nodeSelector": { "nodeSelectorTerms": [{ "matchFields": [field] }] },
        } });
        self.api.replace(&format!("{CLAIMS}/foreign/status"), &foreign);
    }

    /// Two claims have parts of one device: the entry of each names its share.
    fn check_parts(&mut self, daemon: &Daemon) {
        if self.lacks("DRAConsumableCapacity") {
            return;
        }
        let parts = ["part-1", "part-2"];
        daemon.configure("api = \"dra\"", "api = \"dra\"\nreplicas = 4\ncapacity = true");
        wait_for("the devices have parts", SOON, || {
            let slices = self.api.list(SLICES);
            let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array());
            let mut devices = devices.flatten().peekable();
            devices.peek()?;
            devices.all(|device| device["allowMultipleAllocations"] == true).then_some(())
        });
        let mut shares = BTreeSet::new();
        for part in parts {
            self.create_holder(part, &[0], LISTS);
            self.running(part);
            self.until_claim_conditions(part, &["True Healthy"]);
            let status = self.claim_object(part)["status"].take();
            let of_entry = &status["devices"][0]["shareID"];
            assert!(of_entry.is_string(), "{status}");
            assert_eq!(*of_entry, status["allocation"]["devices"]["results"][0]["shareID"]);
            shares.insert(of_entry.to_string());
        }
        assert_eq!(shares.len(), 2);
        for part in parts {
            self.end(part);
            daemon.wait_until_released(part);
        }
    }

    /// Without the rights the status is not written, and pods run. With those that the document has
    /// for kubelets, it is written.
    fn check_kubelets_credentials(&mut self) {
        let credentials = pki::kubeconfig(&self.dir, "kubelet");
        let mut daemon = Daemon::launch(self, Path::new("/"), &credentials, CLAIMED);
        daemon.wait_until_registered(self);
        daemon.configure(OFF, ON);
        daemon.kill_and_start(|| ());
        daemon.wait_until_registered(self);
        self.published(DEVICES);
        self.create_holder("unreported", &[0], LISTS);
        self.running("unreported");
        let problems = wait_for("the missing right", SOON, || {
            let problems = daemon.problems().to_string();
            problems.contains("resourceclaims/status").then_some(problems)
        });
        assert!(problems.contains("grant patch of resourceclaims/status"), "{problems}");

        let (_, section) = DOCUMENT.split_once("\n## Status of claims\n").unwrap();
        let (_, rights) = section.split_once("```yaml\n").unwrap();
        let (rights, _) = rights.split_once("```").unwrap();
        self.api.apply(rights.replace("\n  ", "\n").trim_start());
        // It tries again after minutes, and at a start.
        daemon.kill_and_start(|| ());
        daemon.wait_until_registered(self);
        self.until_claim_conditions("unreported", &["True Healthy"]);
        self.end("unreported");
        daemon.wait_until_released("unreported");
        let binding = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        self.api.delete(&format!("{binding}/holdfast-claim-status-of-kubelets"), None);
    }
}

pub(crate) fn of_claims(cluster: &mut Cluster) {
    if cluster.lacks("DRAResourceClaimDeviceStatus") {
        return;
    }
    cluster.check_kubelets_credentials();
    let account = cluster.create_account();
    for text in [rights::RBAC, rights::POLICY, RBAC, POLICY] {
        cluster.api.apply(text);
    }
    // `kubectl patch` reads what it patches; the daemon does not.
    let reader = RBAC.replace("verbs: [patch]", "verbs: [get]");
    cluster.api.apply(&reader.replace("holdfast-claim-status", "test-reads-status"));
    cluster.create_foreign_claim();
    cluster.check_policy();

    let credentials = pki::kubeconfig(&cluster.dir, OF_POD);
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, CLAIMED);
    daemon.wait_until_registered(cluster);
    daemon.configure(OFF, ON);
    daemon.kill_and_start(|| ());
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    cluster.create_holder("reported", &[0, 1], LISTS);
    cluster.running("reported");
    cluster.until_claim_conditions("reported", &["True Healthy", "True Healthy"]);
    let shown = cluster.shown("admin", &["describe", "resourceclaim", "reported"]);
    for text in ["Prepared", "Healthy", "example.com/claimed"] {
        assert!(shown.contains(text), "{shown}");
    }
    assert_eq!(daemon.problems(), Value::Null);

    // A start reads the claim, and a failure after it is the next write.
    let before = cluster.claim_object("reported");
    daemon.kill_and_start(|| ());
    daemon.wait_until_registered(cluster);
    let hidden = "/dev/hidden-by-the-test";
    fs::rename(device(1), hidden).unwrap();
    cluster.until_claim_conditions("reported", &["True Healthy", "False DeviceGone"]);
    assert_eq!(cluster.status_patches("reported"), [200, 200]);
    let after = cluster.claim_object("reported");
    assert_eq!(text_of(&after, "uid"), text_of(&before, "uid"));
    let of_first = |claim: &Value| {
        let entries = claim["status"]["devices"].as_array().unwrap().clone();
        entries.into_iter().find(|it| it["conditions"].to_string().contains("claimed0")).unwrap()
    };
    assert_eq!(of_first(&after), of_first(&before));
    fs::rename(hidden, device(1)).unwrap();
    cluster.until_claim_conditions("reported", &["True Healthy", "True Healthy"]);

    // The control plane deallocates the claim after the end of its pod, and the entries go.
    cluster.end("reported");
    daemon.wait_until_released("reported");
    wait_for("the claim is deallocated", SOON, || {
        let status = &cluster.claim_object("reported")["status"];
        (status["allocation"].is_null() && status["devices"].is_null()).then_some(())
    });
    wait_for("the last write", SOON, || {
        (cluster.status_patches("reported").len() == 4).then_some(())
    });
    assert_eq!(cluster.status_patches("reported"), [200; 4], "the last one removes what is left");
    assert_eq!(daemon.problems(), Value::Null);
    cluster.check_parts(&daemon);
    assert_eq!(daemon.problems(), Value::Null);
    drop(daemon);
    cluster.api.delete(&format!("{CLAIMS}/foreign"), None);
    cluster.api.delete(&account, Some(0));
    say("the status of a claim has its devices until the claim is deallocated");
}
