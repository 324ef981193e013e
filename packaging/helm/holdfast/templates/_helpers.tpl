{{- define "holdfast.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* The labels of a selector, which can never change. */ -}}
{{- define "holdfast.selector" -}}
{{- if .Values.selectorLabelsOverride -}}
{{ toYaml .Values.selectorLabelsOverride }}
{{- else -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "holdfast.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "holdfast.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- /* An IPv6 address before a port is in brackets. */ -}}
{{- define "holdfast.listen" -}}
{{- $address := .Values.telemetry.address -}}
{{ ternary (printf "[%s]" $address) $address (contains ":" $address) }}:{{ .Values.telemetry.port }}
{{- end -}}

{{- /* The container's rights, before `securityContext` overrides some. */ -}}
{{- define "holdfast.securityContext" -}}
# Root, since the kubelet's sockets and sysfs belong to root. No capability is needed.
runAsUser: 0
runAsGroup: 0
runAsNonRoot: false
{{- if or .Values.features.kernelLog .Values.features.mps }}
# Only a privileged container may open /dev/kmsg, set the compute mode of a GPU, and mount.
privileged: true
{{- else }}
privileged: false
allowPrivilegeEscalation: false
capabilities: { drop: [ALL] }
{{- end }}
readOnlyRootFilesystem: true
seccompProfile: { type: RuntimeDefault }
{{- /* On OpenShift the constraints set them. */}}
{{- if and .Values.seLinuxOptions (not .Values.features.openshift) }}
seLinuxOptions: {{- toYaml .Values.seLinuxOptions | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Nodes with a GPU of NVIDIA, by the labels of Node Feature Discovery or of NVIDIA's GPU operator. */ -}}
{{- define "holdfast.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if .Values.onlyNvidiaNodes -}}
{{- if .Values.affinity.nodeAffinity -}}
{{- fail "onlyNvidiaNodes sets affinity.nodeAffinity: set one of the two" -}}
{{- end -}}
{{- $terms := list -}}
{{- range list "feature.node.kubernetes.io/pci-10de.present" "nvidia.com/gpu.present" -}}
{{- $terms = append $terms (dict "matchExpressions" (list (dict "key" . "operator" "In" "values" (list "true")))) -}}
{{- end -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{- /* How Prometheus connects, for a ServiceMonitor and a PodMonitor: part of an endpoint. */ -}}
{{- define "holdfast.scrape" -}}
# The labels namespace, pod and container identify the holder of the devices, not Holdfast.
honorLabels: true
{{- if .Values.telemetry.tls.secret }}
scheme: https
{{- with .Values.telemetry.scrape.tlsConfig }}
tlsConfig: {{- toYaml . | nindent 2 }}
{{- else }}
# Targets are addresses of pods: the name in the certificate is that of a Service.
tlsConfig:
  ca: { secret: { name: {{ .Values.telemetry.tls.secret }}, key: ca.crt } }
  serverName: {{ include "holdfast.fullname" . }}.{{ .Values.namespaceOverride | default .Release.Namespace }}.svc
{{- end }}
{{- end }}
{{- if .Values.telemetry.scrape.authorization }}
authorization: {{- toYaml .Values.telemetry.scrape.authorization | nindent 2 }}
{{- else if .Values.telemetry.tokenSecret }}
authorization: { credentials: { name: {{ .Values.telemetry.tokenSecret }}, key: token } }
{{- end }}
# The name of the node. The dashboard and the alerts identify a node by its instance, for any address of the pod.
relabelings:
  - { sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance }
  - { sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: node }
{{- end -}}

{{- /* The files of the configuration. */ -}}
{{- define "holdfast.configData" -}}
config.toml: |
  {{- .Values.config | default "# Nothing: GPUs are offered under their vendors' usual names." | nindent 2 }}
telemetry.toml: |
  [telemetry]
  listen = {{ include "holdfast.listen" . | quote }}
  {{- if .Values.telemetry.tokenSecret }}
  token_file = "/etc/holdfast-telemetry/token"
  {{- end }}
  {{- if .Values.telemetry.tls.secret }}
  tls_cert = "/etc/holdfast-tls/tls.crt"
  tls_key = "/etc/holdfast-tls/tls.key"
  {{- if .Values.telemetry.tls.clientCertificates }}
  tls_client_ca = "/etc/holdfast-tls/ca.crt"
  {{- end }}
  {{- end }}
  {{- if .Values.telemetry.authorize }}
  {{- if not .Values.telemetry.tls.secret }}
  {{- fail "telemetry.authorize needs telemetry.tls.secret: clients send tokens of the cluster" }}
  {{- end }}
  {{- if .Values.telemetry.tokenSecret }}
  {{- fail "telemetry.authorize and telemetry.tokenSecret both decide about a token: set one of the two" }}
  {{- end }}
  authorize = {{ .Values.telemetry.authorize | quote }}
  {{- end }}
  {{- if and .Values.telemetry.tls.clientCertificates (not .Values.telemetry.tls.secret) }}
  {{- fail "telemetry.tls.clientCertificates needs telemetry.tls.secret" }}
  {{- end }}
{{- end -}}

{{- /* Other content has another name. So a change reaches a running pod only when the rollout replaces the pod. */ -}}
{{- define "holdfast.configName" -}}
{{ include "holdfast.fullname" . | trunc 54 | trimSuffix "-" }}-{{ include "holdfast.configData" . | sha256sum | trunc 8 }}
{{- end -}}
