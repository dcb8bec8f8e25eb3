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

{{/* Variables of a container: .root, .prefix, .own, and .settings, which have precedence (Kubernetes
     merges a list that has a name twice wrongly). Helm reads numbers as floats: 1e+06. */}}
{{- define "hippo.variables" -}}
{{- range $name, $value := .settings }}{{ $_ := set $.own $name $value }}{{ end }}
{{- range $name, $value := .own }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $value = int64 $value }}{{ end }}
- {name: {{ $.prefix }}{{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- with .root.Values.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A service of a pair: .root, .role (draft, target), .port, .metricsPort */}}
{{- define "hippo.engine" -}}
{{- $all := .root.Values -}}
{{- $values := index $all .role -}}
{{- $own := dict
  "MODEL" $values.model
  "SERVED_NAME" (eq .role "draft" | ternary (printf "%s-draft" $all.servedName) $all.servedName)
  "HOST" "0.0.0.0"
  "PORT" .port
  "METRICS_PORT" .metricsPort
  "DEVICE" (gt (int $values.gpus) 0 | ternary "cuda" "cpu")
  "SLOTS" $all.slots
  "MAX_CONTEXT_LENGTH" $all.maxContextLength
  "DRAIN_SECONDS" $all.drainSeconds
  "SHARED_FRAMES_DIR" "/frames"
  "SHARED_FRAMES_MB" $all.sharedFramesMb
  "LOG_STYLE" "json"
-}}
{{- if gt (int $values.gpus) 1 }}{{ $_ := set $own "TENSOR_PARALLEL" $values.gpus }}{{ end -}}
{{- if $all.mediaClaim }}{{ $_ := set $own "ALLOWED_LOCAL_MEDIA_PATH" "/media" }}{{ end -}}
name: {{ .role }}
image: {{ $all.image.engine | quote }}
imagePullPolicy: {{ $all.image.pullPolicy }}
args: [services.{{ .role }}]
ports:
  - {name: {{ .role }}, containerPort: {{ .port }}}
  - {name: {{ .role }}-metrics, containerPort: {{ .metricsPort }}}
env:
  - {name: HF_HUB_OFFLINE, value: {{ $all.models.offline | ternary "1" "0" | quote }}}
  {{- include "hippo.variables" (dict "root" .root "prefix" (printf "HIPPO_%s_" (upper .role)) "own" $own "settings" $values.settings) | trim | nindent 2 }}
resources:
  requests: {{- toYaml $values.resources.requests | nindent 4 }}
  limits:
    {{- toYaml $values.resources.limits | nindent 4 }}
    {{- if gt (int $values.gpus) 0 }}
    {{ $all.gpuResource }}: {{ $values.gpus }}
    {{- end }}
{{ include "hippo.containerSecurity" . }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: frames, mountPath: /frames}
  - {name: {{ .role }}-tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- if $all.mediaClaim }}
  - {name: media, mountPath: /media, readOnly: true}
  {{- end }}
  {{- if $all.hfTokenSecret }}
  - {name: hf-token, mountPath: /run/secrets, readOnly: true}
  {{- end }}
{{- end -}}
