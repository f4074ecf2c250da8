{{- /* What the schema can't say. Each message names the value, what it is, and what it may be. */}}
{{- define "pagoda.validate" -}}
{{- $model := .Values.model -}}
{{- $replica := .Values.replica -}}
{{- if and (eq $model.source "claim") (not $model.claim) }}
{{- fail "model.claim is empty: with model.source claim it names a PersistentVolumeClaim" }}
{{- end }}
{{- if and (eq $model.source "hostPath") (not (hasPrefix "/" $model.hostPath)) }}
{{- fail (printf "model.hostPath %q must be an absolute path with model.source hostPath" $model.hostPath) }}
{{- end }}
{{- if and (eq $model.source "download") (not $model.files) }}
{{- fail "model.files is empty: with model.source download it lists url and sha256 of each file" }}
{{- end }}
{{- if has ".." (splitList "/" $model.subPath) }}
{{- fail (printf "model.subPath %q must be within the claim or host path" $model.subPath) }}
{{- end }}
{{- $ranks := int $replica.tensorParallelSize -}}
{{- $nodes := int $replica.nodes -}}
{{- $gpus := int $replica.gpus -}}
{{- if mod $ranks $nodes }}
{{- fail (printf "replica.tensorParallelSize %d must be a multiple of replica.nodes %d" $ranks $nodes) }}
{{- end }}
{{- if and $gpus (ne $ranks (mul $gpus $nodes | int)) }}
{{- fail (printf "replica.tensorParallelSize %d must be replica.gpus %d times replica.nodes %d: each GPU has one shard" $ranks $gpus $nodes) }}
{{- end }}
{{- range $kind, $amounts := $replica.shard.resources }}
{{- if hasKey (default dict $amounts) $replica.gpuResource }}
{{- fail (printf "replica.shard.resources.%s has %s: replica.gpus requests them, and starts a shard for each" $kind $replica.gpuResource) }}
{{- end }}
{{- end }}
{{- if and $gpus (eq .Values.image.shard "pagoda-shard-cpu") }}
{{- fail (printf "image.shard pagoda-shard-cpu computes on CPUs: with replica.gpus %d, name one that was built for GPUs" $gpus) }}
{{- end }}
{{- if gt (div $ranks $nodes) 64 }}
{{- fail (printf "replica.tensorParallelSize %d is over 64 shards for each of %d pods" $ranks $nodes) }}
{{- end }}
{{- if and .Values.tls.public.enabled (not .Values.apiKeys.enabled) (not .Values.tls.public.clientCertificates) }}
{{- fail "with tls.public.enabled, enable apiKeys or tls.public.clientCertificates: otherwise everybody may call" }}
{{- end }}
{{- if and .Values.router.ingress.enabled (not .Values.router.ingress.host) }}
{{- fail "router.ingress.host is empty: with router.ingress.enabled it names the host" }}
{{- end }}
{{- if and .Values.router.autoscaling.enabled (not (dig "requests" "cpu" "" .Values.router.resources)) }}
{{- fail "router.autoscaling needs router.resources.requests.cpu, of which its CPU is measured" }}
{{- end }}
{{- if gt (int $replica.autoscaling.minReplicas) (int $replica.autoscaling.maxReplicas) }}
{{- fail (printf "replica.autoscaling.minReplicas %d is over maxReplicas %d" (int $replica.autoscaling.minReplicas) (int $replica.autoscaling.maxReplicas)) }}
{{- end }}
{{- if gt (int .Values.router.autoscaling.minReplicas) (int .Values.router.autoscaling.maxReplicas) }}
{{- fail (printf "router.autoscaling.minReplicas %d is over maxReplicas %d" (int .Values.router.autoscaling.minReplicas) (int .Values.router.autoscaling.maxReplicas)) }}
{{- end }}
{{- end }}
