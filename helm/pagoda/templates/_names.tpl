{{- define "pagoda.name" -}}
{{- $name := ternary .Release.Name (printf "%s-pagoda" .Release.Name) (contains "pagoda" .Release.Name) -}}
{{ default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Schedulers are found, and named in certificates, by this. */}}
{{- define "pagoda.schedulerHost" -}}
{{ include "pagoda.name" . }}-scheduler.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* (list $ "router"): the Secret with its certificate between pods. Each release has its own. */}}
{{- define "pagoda.internalSecret" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{ default (printf "%s-%s-tls" (include "pagoda.name" $root) $part) (index $root.Values.tls.internal (printf "%sSecret" $part)) }}
{{- end }}

{{- define "pagoda.serviceAccount" -}}
{{ default (include "pagoda.name" .) .Values.serviceAccount.name }}
{{- end }}

{{- /* Of a component: (list $ "router"). The chart gives pods no others, so that a new one restarts none. */}}
{{- define "pagoda.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: pagoda
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "pagoda.labels" -}}
{{- $root := index . 0 -}}
{{ include "pagoda.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{- /* (list $ "router" "router"): name, namespace and labels of an object of a component. */}}
{{- define "pagoda.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "pagoda.name" $root }}-{{ index . 2 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "pagoda.labels" . | nindent 2 }}
{{- end }}

{{- define "pagoda.image" -}}
{{- $root := index . 0 -}}
{{ $root.Values.image.prefix }}{{ index . 1 }}
{{- if not (contains "@" (index . 1)) }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}{{ end }}
{{- end }}

{{- /* What the replica of a release is: an object with a scale. */}}
{{- define "pagoda.replicaReference" -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (gt (int .Values.replica.nodes) 1) }}
kind: {{ ternary "LeaderWorkerSet" "StatefulSet" (gt (int .Values.replica.nodes) 1) }}
name: {{ include "pagoda.name" . }}-replica
{{- end }}
