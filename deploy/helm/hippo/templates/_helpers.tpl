{{- define "hippo.name" -}}
{{- if contains "hippo" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-hippo" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "hippo.labels" -}}
app.kubernetes.io/name: hippo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "hippo.podSecurity" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "hippo.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* A service of a pair: .root, .role (draft, target), .port, .metricsPort */}}
{{- define "hippo.engine" -}}
{{- $values := index .root.Values .role -}}
{{- $prefix := printf "HIPPO_%s_" (upper .role) -}}
name: {{ .role }}
image: {{ .root.Values.image.engine | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [services.{{ .role }}]
ports:
  - {name: {{ .role }}, containerPort: {{ .port }}}
  - {name: {{ .role }}-metrics, containerPort: {{ .metricsPort }}}
env:
  - {name: {{ $prefix }}MODEL, value: {{ $values.model | quote }}}
  - {name: {{ $prefix }}SERVED_NAME, value: {{ eq .role "draft" | ternary (printf "%s-draft" .root.Values.servedName) .root.Values.servedName | quote }}}
  - {name: {{ $prefix }}HOST, value: 0.0.0.0}
  - {name: {{ $prefix }}PORT, value: {{ .port | quote }}}
  - {name: {{ $prefix }}METRICS_PORT, value: {{ .metricsPort | quote }}}
  - {name: {{ $prefix }}DEVICE, value: {{ gt (int $values.gpus) 0 | ternary "cuda" "cpu" }}}
  - {name: {{ $prefix }}SLOTS, value: {{ .root.Values.slots | quote }}}
  - {name: {{ $prefix }}MAX_CONTEXT_LENGTH, value: {{ .root.Values.maxContextLength | quote }}}
  - {name: {{ $prefix }}DRAIN_SECONDS, value: {{ .root.Values.drainSeconds | quote }}}
  - {name: {{ $prefix }}SHARED_FRAMES_DIR, value: /frames}
  - {name: {{ $prefix }}SHARED_FRAMES_MB, value: {{ .root.Values.sharedFramesMb | quote }}}
  - {name: {{ $prefix }}LOG_STYLE, value: json}
  {{- if and (eq .role "target") (gt (int $values.gpus) 1) }}
  - {name: HIPPO_TARGET_TENSOR_PARALLEL, value: {{ $values.gpus | quote }}}
  {{- end }}
  {{- if .root.Values.mediaClaim }}
  - {name: {{ $prefix }}ALLOWED_LOCAL_MEDIA_PATH, value: /media}
  {{- end }}
  - {name: HF_HUB_OFFLINE, value: {{ .root.Values.models.offline | ternary "1" "0" | quote }}}
  {{- with .root.Values.otlpEndpoint }}
  - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
  {{- end }}
  {{- range $name, $value := $values.settings }}
  - {name: {{ $prefix }}{{ $name }}, value: {{ $value | toString | quote }}}
  {{- end }}
resources:
  requests: {{- toYaml $values.resources.requests | nindent 4 }}
  limits:
    {{- toYaml $values.resources.limits | nindent 4 }}
    {{- if gt (int $values.gpus) 0 }}
    {{ .root.Values.gpuResource }}: {{ $values.gpus }}
    {{- end }}
{{ include "hippo.containerSecurity" . }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: frames, mountPath: /frames}
  - {name: {{ .role }}-tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- if .root.Values.mediaClaim }}
  - {name: media, mountPath: /media, readOnly: true}
  {{- end }}
  {{- if .root.Values.hfTokenSecret }}
  - {name: hf-token, mountPath: /run/secrets, readOnly: true}
  {{- end }}
{{- end -}}
