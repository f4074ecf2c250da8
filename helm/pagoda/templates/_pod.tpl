{{- /* What containers of all kinds have in common. */}}

{{- /* A map of flags without dashes, as arguments. */}}
{{- define "pagoda.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary "--" "--no-" $value }}{{ $name }}
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) }}
- {{ printf "--%s=%d" $name (int64 $value) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* (list port seconds): probes of a process at its metrics port; a start may take as many seconds. */}}
{{- define "pagoda.probes" -}}
{{- $port := index . 0 -}}
startupProbe:
  httpGet: {path: /startupz, port: {{ $port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ divf (index . 1) 2 | ceil | int }}
livenessProbe:
  httpGet: {path: /livez, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ $port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- define "pagoda.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "pagoda.podSecurity" -}}
{{- /* A Service named pagoda would set PAGODA_PORT and its like. */ -}}
enableServiceLinks: false
automountServiceAccountToken: false
serviceAccountName: {{ include "pagoda.serviceAccount" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* (list $ "router"): labels and annotations of the pods of a component. */}}
{{- define "pagoda.podMetadata" -}}
{{- $pods := index (index . 0).Values (index . 1) -}}
metadata:
  labels:
    {{- include "pagoda.selector" . | nindent 4 }}
    {{- with $pods.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pods.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* (list $ "router"): where the pods of a component run. */}}
{{- define "pagoda.placement" -}}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "pagoda.selector" . | fromYaml)) -}}
{{- with index (index . 0).Values (index . 1) }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ merge (deepCopy .) $own | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A container's values: variables from elsewhere. */}}
{{- define "pagoda.envFrom" -}}
{{- with .envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "pagoda.modelPath" -}}
/model{{ if and .Values.model.subPath (ne .Values.model.source "download") }}/{{ trimAll "/" .Values.model.subPath }}{{ end }}
{{- end }}

{{- define "pagoda.modelVolume" -}}
- name: model
  {{- if eq .Values.model.source "claim" }}
  persistentVolumeClaim: {claimName: {{ .Values.model.claim | quote }}, readOnly: true}
  {{- else if eq .Values.model.source "hostPath" }}
  hostPath: {path: {{ .Values.model.hostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.downloadSize }}}
  {{- end }}
{{- end }}

{{- /* (list $ weights): downloads the model, with or without its weights. */}}
{{- define "pagoda.download" -}}
{{- $root := index . 0 -}}
{{- if eq $root.Values.model.source "download" }}
initContainers:
  - name: download
    image: {{ include "pagoda.image" (list $root $root.Values.image.router) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [python, -m, common.download]
    args:
      - --folder=/model
      {{- range $root.Values.model.files }}
      {{- if or (index $ 1) (not (hasSuffix ".safetensors" .url)) }}
      - {{ printf "%s:%s" .sha256 .url | quote }}
      {{- end }}
      {{- end }}
    {{- with $root.Values.model.env }}
    env:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- include "pagoda.containerSecurity" $root | nindent 4 }}
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - {name: model, mountPath: /model}
{{- end }}
{{- end }}

{{- /* (list name Secret): its files, readable by the pod's group alone. */}}
{{- define "pagoda.secretVolume" -}}
- name: {{ index . 0 }}
  secret: {secretName: {{ index . 1 | quote }}, defaultMode: 0440}
{{- end }}

{{- /* (list "tls" "/tls/clients"): flags of a certificate and its key. */}}
{{- define "pagoda.tlsFlags" -}}
- --{{ index . 0 }}-cert-file={{ index . 1 }}/tls.crt
- --{{ index . 0 }}-key-file={{ index . 1 }}/tls.key
{{- end }}
