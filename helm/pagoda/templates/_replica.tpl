{{- /* Pods of a replica: a scheduler, and one container that has all GPUs of the pod and starts its shards. */}}

{{- define "pagoda.localRanks" -}}
{{ div (int .Values.replica.tensorParallelSize) (int .Values.replica.nodes) }}
{{- end }}

{{- /* Where the scheduler finds the shards, by rank: those of its own pod, then those of its group's other pods. */}}
{{- define "pagoda.shardAddresses" -}}
{{- $addresses := list -}}
{{- range $node := until (int .Values.replica.nodes) }}
{{- $host := "127.0.0.1" -}}
{{- if $node }}
{{- $host = printf "$(POD_NAME)-%d.%s-replica.%s.svc" $node (include "pagoda.name" $) $.Release.Namespace -}}
{{- end }}
{{- range $rank := until (include "pagoda.localRanks" $ | int) }}
{{- $addresses = append $addresses (printf "%s:%d" $host (add 50053 $rank)) -}}
{{- end }}
{{- end }}
{{- join "," $addresses }}
{{- end }}

{{- define "pagoda.schedulerContainer" -}}
{{- $replica := .Values.replica -}}
{{- $tls := .Values.tls.internal -}}
{{- $across := gt (int $replica.nodes) 1 -}}
- name: scheduler
  image: {{ include "pagoda.image" (list . .Values.image.router) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, -m, scheduler]
  args:
    - --shard-addresses={{ include "pagoda.shardAddresses" . }}
    - --listen-address=0.0.0.0:50052
    - --metrics-address=0.0.0.0:9102
    - --shutdown-grace={{ $replica.shutdownGraceSeconds }}
    {{- if $tls.enabled }}
    {{- include "pagoda.tlsFlags" (list "tls" "/tls/replica") | nindent 4 }}
    - --tls-client-ca-file=/tls/replica/ca.crt
    {{- if $across }}
    - --shard-tls-ca-file=/tls/replica/ca.crt
    {{- include "pagoda.tlsFlags" (list "shard-tls" "/tls/replica") | nindent 4 }}
    - --shard-tls-server-name={{ include "pagoda.schedulerHost" . }}
    {{- end }}
    {{- else }}
    - --insecure
    {{- end }}
    {{- with include "pagoda.flags" $replica.scheduler.options | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- if or $across $replica.scheduler.env }}
  env:
    {{- if $across }}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- end }}
    {{- with $replica.scheduler.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with include "pagoda.envFrom" $replica.scheduler | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  ports:
    - {name: scheduler, containerPort: 50052}
    - {name: metrics, containerPort: 9102}
  {{- include "pagoda.probes" (list "metrics" (int .Values.model.loadTimeoutSeconds)) | nindent 2 }}
  {{- include "pagoda.containerSecurity" . | nindent 2 }}
  resources:
    {{- toYaml $replica.scheduler.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if $tls.enabled }}
    - {name: tls-replica, mountPath: /tls/replica, readOnly: true}
    {{- end }}
    {{- with $replica.scheduler.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "pagoda.shardContainer" -}}
{{- $replica := .Values.replica -}}
{{- $tls := .Values.tls.internal -}}
{{- $across := gt (int $replica.nodes) 1 -}}
- name: shard
  image: {{ include "pagoda.image" (list . .Values.image.shard) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, -m, launcher, ranks]
  args:
    - --tensor-parallel-size={{ $replica.tensorParallelSize }}
    {{- if $across }}
    - --nnodes={{ $replica.nodes }}
    - --node-rank=$(LWS_WORKER_INDEX)
    {{- end }}
    - --listen-address={{ ternary "0.0.0.0" "127.0.0.1" $across }}:50053
    - --metrics-address=0.0.0.0:9103
    # The scheduler needs its shards until its own grace ends.
    - --shutdown-grace={{ add $replica.shutdownGraceSeconds 10 }}
    - --
    - --model={{ include "pagoda.modelPath" . }}
    {{- if $across }}
    - --rendezvous-host=$(POD_IP)
    {{- if $tls.enabled }}
    {{- include "pagoda.tlsFlags" (list "tls" "/tls/replica") | nindent 4 }}
    - --tls-client-ca-file=/tls/replica/ca.crt
    {{- else }}
    - --insecure
    {{- end }}
    {{- end }}
    {{- if and $replica.gpus (not $replica.shard.options.device) }}
    - --device=cuda
    {{- end }}
    {{- with include "pagoda.flags" $replica.shard.options | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  env:
    {{- if $across }}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    {{- end }}
    # Where models are converted to and kernels compiled to.
    - {name: XDG_CACHE_HOME, value: /cache}
    - {name: TRITON_CACHE_DIR, value: /cache/triton}
    {{- with $replica.shard.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "pagoda.envFrom" $replica.shard | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  ports:
    {{- if $across }}
    {{- range $rank := until (include "pagoda.localRanks" . | int) }}
    - {name: shard-{{ $rank }}, containerPort: {{ add 50053 $rank }}}
    {{- end }}
    {{- end }}
    - {name: probes, containerPort: 9103}
    {{- range $rank := until (include "pagoda.localRanks" . | int) }}
    - {name: rank-{{ $rank }}-metrics, containerPort: {{ add 9104 $rank }}}
    {{- end }}
  {{- include "pagoda.probes" (list "probes" (int .Values.model.loadTimeoutSeconds)) | nindent 2 }}
  {{- include "pagoda.containerSecurity" . | nindent 2 }}
  resources:
    {{- $resources := deepCopy $replica.shard.resources }}
    {{- if $replica.gpus }}
    {{- $_ := set $resources "limits" (merge (dict $replica.gpuResource $replica.gpus) (default dict $resources.limits)) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    - {name: shm, mountPath: /dev/shm}
    {{- if and $across $tls.enabled }}
    - {name: tls-replica, mountPath: /tls/replica, readOnly: true}
    {{- end }}
    {{- with $replica.shard.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* (list $ leads): a pod template; without a scheduler where it doesn't lead. */}}
{{- define "pagoda.replicaPod" -}}
{{- $root := index . 0 -}}
{{- $leads := index . 1 -}}
{{- $replica := $root.Values.replica -}}
{{- $tls := $root.Values.tls.internal -}}
{{- include "pagoda.podMetadata" (list $root "replica") }}
spec:
  {{- include "pagoda.podSecurity" $root | nindent 2 }}
  # The scheduler's grace, the shards' 10 s more, and what closing takes.
  terminationGracePeriodSeconds: {{ add $replica.shutdownGraceSeconds 30 }}
  {{- with $replica.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with include "pagoda.placement" (list $root "replica") | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "pagoda.download" (list $root true) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    {{- if $leads }}
    {{- include "pagoda.schedulerContainer" $root | nindent 4 }}
    {{- end }}
    {{- include "pagoda.shardContainer" $root | nindent 4 }}
  volumes:
    {{- include "pagoda.modelVolume" $root | nindent 4 }}
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: cache
      emptyDir: {sizeLimit: {{ $replica.shard.cacheSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $replica.shard.sharedMemorySize }}}
    {{- if $tls.enabled }}
    {{- include "pagoda.secretVolume" (list "tls-replica" (include "pagoda.internalSecret" (list $root "replica"))) | nindent 4 }}
    {{- end }}
    {{- with $replica.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
