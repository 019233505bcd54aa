{{- define "quire.name" -}}
{{ printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "quire.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "quire.name" .) }}
{{- end }}

{{- define "quire.selector" -}}
app.kubernetes.io/name: quire-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
{{ include "quire.release" . }}
{{- end }}

{{- /* What all objects of a release have in common. */ -}}
{{- define "quire.release" -}}
app.kubernetes.io/part-of: quire
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* Its rights are the cluster's, so it is not there for an operator that has rights in some namespaces only. */ -}}
{{- define "quire.metricsAdapter.enabled" -}}
{{- if and .Values.metricsAdapter.enabled (not .Values.watchNamespaces) }}true{{ end -}}
{{- end }}

{{- define "quire.metricsAdapter.name" -}}
{{ printf "%s-metrics-adapter" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "quire.metricsAdapter.serviceAccount" -}}
{{ .Values.metricsAdapter.serviceAccount.name | default (include "quire.metricsAdapter.name" .) }}
{{- end }}

{{- define "quire.metricsAdapter.selector" -}}
app.kubernetes.io/name: quire-metrics-adapter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.metricsAdapter.labels" -}}
{{ include "quire.metricsAdapter.selector" . }}
{{ include "quire.release" . }}
{{- end }}

{{- define "quire.gateway.name" -}}
{{ printf "%s-gateway" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "quire.gateway.serviceAccount" -}}
{{ .Values.gateway.serviceAccount.name | default (include "quire.gateway.name" .) }}
{{- end }}

{{- define "quire.gateway.selector" -}}
app.kubernetes.io/name: quire-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.gateway.labels" -}}
{{ include "quire.gateway.selector" . }}
{{ include "quire.release" . }}
{{- end }}

{{- define "quire.batch.name" -}}
{{ printf "%s-batch" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "quire.batch.selector" -}}
app.kubernetes.io/name: quire-batch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.batch.labels" -}}
{{ include "quire.batch.selector" . }}
{{ include "quire.release" . }}
{{- end }}

{{- /* Whose models it serves, as JSON. Never all: a model is asked for by its name alone, and a tenant could take it. */ -}}
{{- define "quire.gateway.namespaces" -}}
{{- $namespaces := .Values.gateway.namespaces | default .Values.watchNamespaces -}}
{{- if not $namespaces -}}
{{- fail "set gateway.namespaces to the namespaces whose models the gateway serves, such as --set gateway.namespaces={team-a}" -}}
{{- end -}}
{{ toJson $namespaces }}
{{- end }}

{{- /* What the gateway may do in each of these namespaces. */ -}}
{{- define "quire.gateway.rules" -}}
# Which pods of a model are ready.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# What clients may ask for; status says what was applied.
- apiGroups: [serving.quire.dev]
  resources: [llmroutes, llmclients, llmexternalbackends, llmdeployments]
  verbs: [list, watch]
- apiGroups: [serving.quire.dev]
  resources: [llmroutes/status, llmclients/status, llmexternalbackends/status]
  verbs: [patch]
# What its users have to notice.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{- /* repository@digest, or repository:tag; called with (list root "image", "engineImage" or "gateway.image") */ -}}
{{- define "quire.image" -}}
{{- $root := first . -}}
{{- $image := ternary $root.Values.gateway.image (index $root.Values (last .)) (eq (last .) "gateway.image") -}}
{{- if not $image.repository -}}
{{- $name := index (dict "image" "quire-operator" "engineImage" "quire-server" "gateway.image" "quire-gateway") (last .) -}}
{{- fail (printf "set %s.repository to the image in your registry, such as --set %s.repository=registry.example.com/team/%s (make images builds it and pushes it to QUIRE_REGISTRY)" (last .) (last .) $name) -}}
{{- end -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{- /* [{name: a}, {name: b}] as a,b */ -}}
{{- define "quire.names" -}}
{{- $names := list -}}
{{- range . }}{{ $names = append $names .name }}{{ end -}}
{{ join "," $names }}
{{- end }}

{{- /* What the operator may do in the namespaces that it watches: no wildcard, nothing on nodes, and no Secrets unless
references to them are restricted by their labels. */ -}}
{{- define "quire.rules" -}}
- apiGroups: [serving.quire.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [serving.quire.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need it where OwnerReferencesPermissionEnforcement is on (OpenShift).
- apiGroups: [serving.quire.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
# Models are downloaded by Jobs.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Those of others are read as well, so that two autoscalers of one Deployment are reported.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
# Where KEDA is installed, and an LLMDeployment asks for it.
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, create, patch, delete]
# Where LeaderWorkerSet is installed, and an LLMDeployment asks for several nodes.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, create, patch, delete]
# Where the Gateway API and its inference extension are installed, and an LLMDeployment asks for a route.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# What was rendered for each spec is kept, so that another release of the operator restarts no pod.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
# patch: takes the annotations off a pod that protect it from being moved while it loads, and says which is idle
# before an autoscaler takes one away. delete: one that downloads for itself and found its model corrupt.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
# list: why a volume does not mount is only in the kubelet's Events.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, list]
{{- if eq .Values.secretReferences "Labelled" }}
# Their labels only: no request asks for data.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- end }}

{{- /* Of the whole cluster: read by the name that an LLMDeployment gives. */ -}}
{{- define "quire.profileRules" -}}
- apiGroups: [serving.quire.dev]
  resources: [acceleratorprofiles]
  verbs: [get]
{{- end }}

{{- /* {a: x, b: y} as a=x,b=y */ -}}
{{- define "quire.labelList" -}}
{{- $pairs := list -}}
{{- range $key, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end -}}
{{ join "," $pairs }}
{{- end }}

{{- /*
Egress to a trace collector, as narrow as its address allows, and as the operator has it for model servers: one address,
the namespace of a Service or, since a policy cannot contain DNS names, its port at any address but those at which nodes
get credentials.
*/ -}}
{{- define "quire.gateway.toCollector" -}}
{{- $url := urlParse . -}}
{{- $host := $url.hostname -}}
{{- $port := trimPrefix ":" (trimPrefix $host $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- $labels := splitList "." $host -}}
# The collector of traces.
- to:
    {{- if regexMatch "^[0-9]+([.][0-9]+){3}$" $host }}
    - ipBlock: {cidr: {{ $host }}/32}
    {{- else if eq (len $labels) 1 }}
    - podSelector: {}
    {{- else if or (eq (len $labels) 2) (eq (index $labels 2) "svc") }}
    - namespaceSelector:
        matchLabels: {kubernetes.io/metadata.name: {{ index $labels 1 }}}
    {{- else }}
    - namespaceSelector: {}
    - ipBlock: {cidr: 0.0.0.0/0, except: [169.254.0.0/16]}
    - ipBlock: {cidr: "::/0", except: ["fd00:ec2::/32", "fe80::/10"]}
    {{- end }}
  ports:
    - {port: {{ $port }}, protocol: TCP}
{{- end }}
