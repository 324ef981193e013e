"""Renders the chart without a cluster: Helm's own code installs it on an API server that only records requests."""
import asyncio
import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# The kinds of the chart, and Helm's own record of a release.
GROUPS = {
    "v1": {"ServiceAccount": "serviceaccounts", "ConfigMap": "configmaps", "Service": "services", "Secret": "secrets"},
    "apps/v1": {"DaemonSet": "daemonsets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "rbac.authorization.k8s.io/v1": {"ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings", "RoleBinding": "rolebindings"},
    "admissionregistration.k8s.io/v1": {"ValidatingAdmissionPolicy": "validatingadmissionpolicies",
                                        "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings"},
    "resource.k8s.io/v1": {"DeviceClass": "deviceclasses"},
    "security.openshift.io/v1": {"SecurityContextConstraints": "securitycontextconstraints"},
    "monitoring.coreos.com/v1": {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
}


# Kinds without a namespace.
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "SecurityContextConstraints", "DeviceClass",
                "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}


def discovery(path):
    """The discovery document of an API server for this path; None for any other path."""
    named = [group for group in GROUPS if "/" in group]
    version = {group: {"groupVersion": group, "version": group.split("/")[1]} for group in named}
    known = {
        "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
            {"name": group.split("/")[0], "versions": [version[group]], "preferredVersion": version[group]} for group in named]},
    }
    for group, kinds in GROUPS.items():
        known[f"/apis/{group}" if "/" in group else f"/api/{group}"] = {
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [
                {"name": plural, "singularName": "", "namespaced": kind not in CLUSTER_WIDE, "kind": kind, "verbs": ["create", "get", "list", "patch"]}
                for kind, plural in kinds.items()]}
    return known.get(path)


class Recorder(BaseHTTPRequestHandler):
    """Answers discovery, has no objects at first, and accepts every object; `server.made` lists them."""

    def answer(self, code, document):
        self.send(code, "application/json", json.dumps(document).encode())

    def send(self, code, form, body):
        self.send_response(code)
        self.send_header("Content-Type", form)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0].rstrip("/")
        document = discovery(path)
        if document is None and path.rsplit("/", 1)[-1] in {plural for kinds in GROUPS.values() for plural in kinds.values()}:
            document = {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []}
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.answer(200 if document else 404, document or missing)

    def take(self):
        body, form = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Content-Type"]
        # Helm's own record is a Secret, in another format.
        if form.startswith("application/json") and json.loads(body)["kind"] != "Secret":
            self.server.made.append(json.loads(body))
        self.send(201, form, body)

    do_POST = do_PUT = do_PATCH = take

    def log_message(self, *_):
        pass


def render(chart, values):
    """The objects of the chart with these values. Raises Helm's error if it refuses them."""
    import helm_sdkpy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.made = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "notes",
            "clusters": [{"name": "notes", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "notes", "context": {"cluster": "notes", "user": "anonymous"}}],
            "users": [{"name": "anonymous", "user": {}}],
        }))
        os.environ["HOME"] = folder
        configuration = helm_sdkpy.Configuration(namespace="kube-system", kubeconfig=str(kubeconfig))
        try:
            asyncio.run(helm_sdkpy.Install(configuration).run("holdfast", str(chart), values=values, wait=False, timeout=20))
        finally:
            server.shutdown()
    return server.made


def lint(chart):
    """The warnings and errors of Helm's linter."""
    import helm_sdkpy

    found = asyncio.run(helm_sdkpy.Lint(helm_sdkpy.Configuration(kubeconfig=os.devnull)).run(str(chart)))
    return [message for message in found["Messages"] or [] if message["Severity"] > 1]
