//! A node on the machine: a kubelet, and a daemon with a ledger of its own.

use crate::guest::{Answer, Pod, Request, host_root};
use crate::machine::Machine;
use crate::say;
use holdfast::domain::ResourceName;
use serde_json::Value;

/// The longest time between two scans of the devices, in seconds, and some for the scan itself.
const SCANS_EVERY: f64 = 35.0;

/// A node; the daemon ends with it.
#[derive(Debug)]
pub(crate) struct Node<'m> {
    machine: &'m Machine,
    /// Distinguishes it from other nodes of the machine.
    name: String,
    /// Has the ledger.
    dir: String,
    /// Has the directory of the kubelet.
    kubelet_dir: String,
}

impl<'m> Node<'m> {
    /// A node with these resources, in a directory in memory that was empty.
    pub(crate) fn start(machine: &'m Machine, resources: &str) -> Self {
        machine.run("rm -rf /run/node && mkdir /run/node");
        let node = Node::at(machine, "node", "/run/node", "/run/node", resources);
        node.start_kubelet();
        node.start_daemon();
        node
    }

    /// A node with these directories for its ledger and its kubelet, where nothing is started yet.
    pub(crate) fn at(
        machine: &'m Machine,
        name: &str,
        dir: &str,
        kubelet_dir: &str,
        resources: &str,
    ) -> Self {
        let config = format!("[telemetry]\nlisten = \"off\"\n[health]\npoll = \"2s\"\n{resources}");
        machine.run(&format!("cat > /etc/holdfast/{name}.toml <<'END'\n{config}\nEND"));
        let [name, dir, kubelet_dir] = [name, dir, kubelet_dir].map(str::to_owned);
        Node { machine, name, dir, kubelet_dir }
    }

    pub(crate) fn kubelet(&self) -> String {
        format!("{}/kubelet", self.kubelet_dir)
    }

    /// The directory of the ledger.
    pub(crate) fn state(&self) -> String {
        format!("{}/state", self.dir)
    }

    pub(crate) fn start_kubelet(&self) {
        self.start_kubelet_with(&[]);
    }

    /// Starts a kubelet on a node that has these pods already, and returns its decisions on them.
    pub(crate) fn start_kubelet_with(&self, pods: &[Pod]) -> Vec<Pod> {
        let request = Request::StartKubelet { kubelet: self.kubelet(), pods: pods.to_vec() };
        match self.machine.ask(&request) {
            Answer::AllDecided(pods) => pods,
            other => panic!("the kubelet does not start: {other:?}"),
        }
    }

    /// Ends the daemon and the kubelet, as at a shutdown.
    pub(crate) fn end(&self) {
        self.end_daemon();
        let answer = self.machine.ask(&Request::StopKubelet(self.kubelet()));
        assert!(matches!(answer, Answer::Done), "{answer:?}");
    }

    /// The command line of a verb.
    fn command(&self, verb: &str) -> String {
        let Node { name, .. } = self;
        format!(
            "holdfast {verb} --config /etc/holdfast/{name}.toml --kubelet-dir {} --state-dir {} \
             --run-dir /run/holdfast-{name}",
            self.kubelet(),
            self.state()
        )
    }

    /// Starts the daemon, and waits until the kubelet has all its resources.
    pub(crate) fn start_daemon(&self) {
        self.launch();
        self.wait_until_registered();
    }

    /// Starts the daemon, with the cgroups and log folders of this node alone.
    pub(crate) fn launch(&self) {
        let Node { name, .. } = self;
        let root = host_root(&self.kubelet());
        let mut script = String::new();
        for dir in ["/sys/fs/cgroup", "/var/log/pods"] {
            script += &format!("mkdir -p {root}{dir} {dir} && mount --bind {root}{dir} {dir} && ");
        }
        script += &format!("exec {}", self.command("run"));
        self.machine.run(&format!(
            "HOLDFAST_LOG=info setsid unshare --mount sh -c '{script}' >> /run/{name}.log 2>&1 < /dev/null & \
             echo $! > /run/{name}.pid"
        ));
    }

    /// Waits until the daemon has its ledger and its devices; the kubelet may be absent.
    pub(crate) fn wait_until_ready(&self) {
        self.wait("the daemon is ready", |node| {
            (node.try_json("status")?["ready"] == true).then_some(())
        });
    }

    pub(crate) fn wait_until_registered(&self) {
        self.wait("all resources are registered", |node| {
            let status = node.try_json("status")?;
            let resources = status["resources"].as_array()?;
            let is_registered = |each: &Value| each["registered"] == true;
            (status["ready"] == true && resources.iter().all(is_registered)).then_some(())
        });
    }

    /// Ends the daemon, and waits for its end.
    pub(crate) fn end_daemon(&self) {
        self.signal("TERM");
    }

    /// Kills the daemon, and waits for its end.
    pub(crate) fn kill_daemon(&self) {
        self.signal("KILL");
    }

    fn signal(&self, signal: &str) {
        let pid = format!("$(cat /run/{}.pid)", self.name);
        self.machine.run(&format!("kill -{signal} {pid}"));
        self.wait("the daemon ends", |node| {
            let (code, _, _) = node.machine.try_run(&format!("test -e /proc/{pid}"));
            (code != Some(0)).then_some(())
        });
    }

    /// Runs a verb that must succeed.
    pub(crate) fn run(&self, verb: &str) {
        self.machine.run(&self.command(verb));
    }

    /// The document of a verb; `None` if it fails.
    pub(crate) fn try_json(&self, verb: &str) -> Option<Value> {
        let (code, output, _) = self.machine.try_run(&self.command(&format!("{verb} -o json")));
        (code == Some(0)).then(|| serde_json::from_str(&output).unwrap())
    }

    /// The document of a verb.
    pub(crate) fn json(&self, verb: &str) -> Value {
        let command = self.command(&format!("{verb} -o json"));
        serde_json::from_str(&self.machine.run(&command)).unwrap()
    }

    /// The lines of the daemon's log with these words.
    pub(crate) fn logged(&self, words: &[&str]) -> Vec<String> {
        let log = self.machine.run(&format!("cat /run/{}.log", self.name));
        let has_words = |line: &&str| words.iter().all(|word| line.contains(word));
        log.lines().filter(has_words).map(str::to_owned).collect()
    }

    /// The damaged files that were moved aside in the ledger's directory.
    pub(crate) fn quarantined(&self) -> String {
        self.machine.run(&format!("find {} -name '*quarantine*'", self.state()))
    }

    /// Waits for a value.
    pub(crate) fn wait<T>(&self, what: &str, mut read: impl FnMut(&Self) -> Option<T>) -> T {
        self.machine.wait(what, || read(self))
    }

    /// Waits for as long as the daemon takes to scan and to probe every device again.
    pub(crate) fn wait_for_scan(&self) {
        let end = self.machine.uptime() + SCANS_EVERY;
        self.wait("another scan", |node| (node.machine.uptime() > end).then_some(()));
    }

    /// The report of a device.
    pub(crate) fn device(&self, id: &str) -> Option<Value> {
        let document = self.json("device show");
        document["devices"].as_array().unwrap().iter().find(|device| device["id"] == id).cloned()
    }

    /// The ids of the devices that the daemon lists, each with its reason against it: empty if it
    /// is healthy.
    pub(crate) fn listed(&self) -> Vec<(String, String)> {
        let document = self.json("device show");
        let devices = document["devices"].as_array().unwrap().iter();
        let listed = devices.filter(|device| !device["health"].is_null());
        let reason = |device: &Value| device["reason"].as_str().unwrap_or_default().to_owned();
        let mut listed: Vec<_> = listed
            .map(|device| (device["id"].as_str().unwrap().to_owned(), reason(device)))
            .collect();
        listed.sort();
        listed
    }

    /// Has an operator exclude a device.
    pub(crate) fn cordon(&self, id: &str) {
        self.run(&format!("device cordon {id} --reason test"));
    }

    /// Has an operator return a device to service.
    pub(crate) fn uncordon(&self, id: &str) {
        self.run(&format!("device uncordon {id}"));
    }

    /// The failures of a device, the newest last.
    pub(crate) fn failures(&self, id: &str) -> Vec<Value> {
        let document = self.json(&format!("history --device {id}"));
        document["failures"].as_array().unwrap().clone()
    }

    /// Waits until a device has this reason against it, or none if it is empty, and until the
    /// kubelet has it so.
    pub(crate) fn wait_for_health(&self, resource: &str, id: &str, reason: &str) {
        self.wait(&format!("{id} is `{reason}`"), |node| {
            let device = node.device(id)?;
            let is_healthy = node.healthy(resource).iter().any(|healthy| healthy == id);
            let found = device["reason"].as_str().unwrap_or_default();
            (found == reason && is_healthy == reason.is_empty()).then_some(())
        });
    }

    /// The ids that the kubelet may give to a pod.
    pub(crate) fn healthy(&self, resource: &str) -> Vec<String> {
        let request = Request::Healthy { kubelet: self.kubelet(), resource: name(resource) };
        match self.machine.ask(&request) {
            Answer::Ids(ids) => ids,
            other => panic!("{resource}: {other:?}"),
        }
    }

    /// Waits until the kubelet may give exactly these ids to pods.
    pub(crate) fn wait_for_healthy(&self, resource: &str, ids: &[String]) {
        let mut expected = ids.to_vec();
        expected.sort();
        self.wait(&format!("the kubelet has {ids:?}"), |node| {
            let mut healthy = node.healthy(resource);
            healthy.sort();
            (healthy == expected).then_some(())
        });
    }

    /// Adds a pod that requests one device.
    pub(crate) fn try_pod(&self, name_of_pod: &str, resource: &str) -> Pod {
        self.try_pod_with(name_of_pod, resource, 1)
    }

    /// Adds a pod that requests this many devices.
    pub(crate) fn try_pod_with(&self, name_of_pod: &str, resource: &str, count: u32) -> Pod {
        let request = Request::AddPod {
            kubelet: self.kubelet(),
            name: name_of_pod.to_owned(),
            resource: name(resource),
            count,
        };
        match self.machine.ask(&request) {
            Answer::Decided(pod) => pod,
            other => panic!("{name_of_pod}: {other:?}"),
        }
    }

    /// Adds a pod that gets one device.
    pub(crate) fn pod(&self, name_of_pod: &str, resource: &str) -> Pod {
        let pod = self.try_pod(name_of_pod, resource);
        assert_eq!(pod.rejected, None, "{name_of_pod}");
        assert_eq!(pod.devices.len(), 1, "{pod:?}");
        self.wait_for_holders(&pod.devices[0], &[name_of_pod]);
        pod
    }

    pub(crate) fn delete(&self, pod: &Pod) {
        let request = Request::DeletePod { kubelet: self.kubelet(), uid: pod.uid.clone() };
        let answer = self.machine.ask(&request);
        assert!(matches!(answer, Answer::Done), "{answer:?}");
    }

    /// The live grants.
    pub(crate) fn grants(&self) -> Vec<Value> {
        self.json("who")["grants"].as_array().unwrap().clone()
    }

    /// The grants that the ledger has or had, once all of them can be read.
    pub(crate) fn history(&self) -> Vec<Value> {
        let document = self.wait("the history can be read", |node| {
            node.try_json("history").filter(|document| document["problem"].is_null())
        });
        document["grants"].as_array().unwrap().clone()
    }

    /// The names of the pods that hold a device.
    pub(crate) fn holders(&self, id: &str) -> Vec<String> {
        let grants = self.grants();
        let of = grants
            .iter()
            .filter(|grant| grant["devices"].as_array().unwrap().iter().any(|device| device == id));
        of.map(|grant| grant["pod"]["name"].as_str().unwrap_or("?").to_owned()).collect()
    }

    pub(crate) fn wait_for_holders(&self, id: &str, pods: &[&str]) {
        self.wait(&format!("{id} is held by {pods:?}"), |node| {
            (node.holders(id) == pods).then_some(())
        });
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let log = format!("tail -n 60 /run/{}.log", self.name);
        for script in
            [log, self.command("status"), self.command("who"), "dmesg | tail -n 30".into()]
        {
            say(format_args!("$ {script}\n{}", self.machine.report(&script)));
        }
    }
}

pub(crate) fn name(resource: &str) -> ResourceName {
    resource.parse().unwrap()
}
