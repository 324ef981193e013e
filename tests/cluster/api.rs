//! Requests to the API server as an administrator, through `kubectl proxy`, and with kubectl as any
//! client.

use crate::SOON;
use crate::pki::kubeconfig;
use crate::wait_for;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

pub(crate) const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
pub(crate) const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
pub(crate) const PODS: &str = "/api/v1/namespaces/default/pods";
/// The pods of all namespaces.
pub(crate) const ALL_PODS: &str = "/api/v1/pods";
pub(crate) const NODES: &str = "/api/v1/nodes";

/// Each object that the manifests of this repository create has it.
const LABEL: &str = "app.kubernetes.io/name=holdfast";

/// A request of a test is answered at once, or the server is stopped.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Api {
    dir: PathBuf,
    socket: PathBuf,
}

/// One event of a watch, with the time at which it arrived.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) at: Instant,
    pub(crate) kind: String,
    pub(crate) object: Value,
}

impl Api {
    pub(crate) fn new(dir: &Path, socket: PathBuf) -> Self {
        Api { dir: dir.to_owned(), socket }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ask("GET", "/readyz", "", "").is_some_and(|(code, _)| code == 200)
    }

    /// The object; `None` if there is none.
    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        match self.request("GET", path, "", "") {
            (200, text) => Some(serde_json::from_str(&text).unwrap()),
            (404, _) => None,
            (code, text) => panic!("GET {path}: {code} {text}"),
        }
    }

    /// A page that is not JSON.
    pub(crate) fn text(&self, path: &str) -> String {
        let (code, text) = self.request("GET", path, "", "");
        assert_eq!(code, 200, "GET {path}: {text}");
        text
    }

    /// The objects of a collection.
    pub(crate) fn list(&self, path: &str) -> Vec<Value> {
        let mut list = self.get(path).unwrap_or_else(|| panic!("there is no {path}"));
        serde_json::from_value(list["items"].take()).unwrap()
    }

    /// Creates an object in a collection. Returns it as it was accepted.
    pub(crate) fn create(&self, path: &str, object: &Value) -> Value {
        let (code, text) = self.request("POST", path, "application/json", &object.to_string());
        assert_eq!(code, 201, "POST {path}: {text}\n{object}");
        serde_json::from_str(&text).unwrap()
    }

    /// Replaces an object, or the status of it.
    pub(crate) fn replace(&self, path: &str, object: &Value) {
        let (code, text) = self.request("PUT", path, "application/json", &object.to_string());
        assert_eq!(code, 200, "PUT {path}: {text}\n{object}");
    }

    /// Deletes an object; with 0 seconds at once, without a confirmation by the kubelet. An absent
    /// object is deleted.
    pub(crate) fn delete(&self, path: &str, grace: Option<u32>) {
        let grace = grace.map(|it| format!("?gracePeriodSeconds={it}")).unwrap_or_default();
        let (code, text) = self.request("DELETE", &format!("{path}{grace}"), "", "");
        assert!([200, 202, 404].contains(&code), "DELETE {path}: {code} {text}");
    }

    /// Watches a collection from now on.
    pub(crate) fn watch(&self, path: &str) -> Receiver<Event> {
        let list = self.get(path).unwrap();
        let version = list["metadata"]["resourceVersion"].as_str().unwrap();
        let path = format!("{path}?watch=1&resourceVersion={version}");
        let stream = self.send("GET", &path, "", "").unwrap();
        stream.set_read_timeout(None).unwrap();
        let (sender, events) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(stream).lines().map_while(Result::ok);
            for line in lines.skip_while(|line| !line.is_empty()).skip(1) {
                let mut event: Value = serde_json::from_str(&line).unwrap();
                let kind = event["type"].as_str().unwrap().to_owned();
                let event = Event { at: Instant::now(), kind, object: event["object"].take() };
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        events
    }

    /// Runs kubectl as this client, with an object as its input.
    pub(crate) fn kubectl(&self, client: &str, arguments: &[&str], input: &str) -> Output {
        let mut kubectl = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(kubeconfig(&self.dir, client))
            .arg(format!("--cache-dir={}", self.dir.join("kubectl-cache").display()))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        kubectl.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        kubectl.wait_with_output().unwrap()
    }

    /// Creates or changes all objects of a file of this repository, as an administrator.
    pub(crate) fn apply(&self, text: &str) {
        let output = self.kubectl("admin", &["apply", "-f", "-"], text);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Deletes the accounts, roles and policies of this repository, as an administrator. The chart
    /// does not take over an account that exists.
    pub(crate) fn delete_rights(&self) {
        let kinds = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings,\
             serviceaccounts,configmaps";
        let output =
            self.kubectl("admin", &["delete", kinds, "-n", "kube-system", "-l", LABEL], "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Deletes what makes pods, as an administrator.
    pub(crate) fn delete_controllers(&self) {
        let all = ["delete", "daemonsets,replicasets", "--all", "--all-namespaces"];
        let output = self.kubectl("admin", &all, "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The answer of a server that may be busy.
    fn request(&self, method: &str, path: &str, kind: &str, body: &str) -> (u16, String) {
        wait_for(&format!("{method} {path}"), SOON, || self.ask(method, path, kind, body))
    }

    /// Status code and body; `None` without an answer.
    fn ask(&self, method: &str, path: &str, kind: &str, body: &str) -> Option<(u16, String)> {
        let mut answer = String::new();
        self.send(method, path, kind, body)?.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let code = head.split(' ').nth(1)?.parse().ok()?;
        // 502: the proxy does not reach the server.
        (code != 502).then(|| (code, body.to_owned()))
    }

    /// Sends a request. With HTTP/1.0 the answer ends with the connection.
    fn send(&self, method: &str, path: &str, kind: &str, body: &str) -> Option<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket).ok()?;
        stream.set_read_timeout(Some(ANSWER)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + body).as_bytes()).ok()?;
        Some(stream)
    }
}
