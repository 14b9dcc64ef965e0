{{- define "tunemq.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-tunemq" .Release.Name) (contains "tunemq" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "tunemq.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: tunemq
{{ include "tunemq.selector" . }}
{{- end }}

{{/* Labels that all pods of this farm have, and no others. */}}
{{- define "tunemq.selector" -}}
app.kubernetes.io/name: tunemq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* An image's full name. A registry or a tag in `name` is kept. Takes a dict: root, name. */}}
{{- define "tunemq.image" -}}
{{- $image := .root.Values.image -}}
{{- if and $image.registry (not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" .name)) }}{{ trimSuffix "/" $image.registry }}/{{ end -}}
{{- if or (contains "@" .name) (regexMatch ":[^/]+$" .name) -}}
{{ .name }}
{{- else -}}
{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* For all pods: no root user, and no token for the API of Kubernetes. */}}
{{- define "tunemq.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tunemq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where a pod may run. Takes a dict with nodeSelector, tolerations and the others. */}}
{{- define "tunemq.placement" -}}
{{- range $key := list "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Environment variables; rejects names of secrets. Takes a dict: env, where, secret. */}}
{{- define "tunemq.env" -}}
{{- range $name, $value := .env }}
{{- if and (regexMatch "(?i)(^|_)(secret|password|passwd|token|key)(_|$)|^TUNEMQ_REDIS$" $name) (not (hasSuffix "_FILE" $name)) }}
{{- fail (printf "%s.%s: `helm get values` shows values; put a secret into the file `environment` of the Secret %s" $.where $name $.secret) }}
{{- end }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/*
Kubernetes mounts a Secret for a non-root process as files of root's that a group may read, and
TuneMQ refuses key files that users other than their owner may read. So a side container copies the
Secret to a folder in memory that only the pod's user may enter. It copies changes, too: `tunemq
keys rotate` needs no restart.
Takes a dict: root, image, secret.
*/}}
{{- define "tunemq.files" -}}
- name: files
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  restartPolicy: Always
  command:
    - sh
    - -euc
    - |
      umask 077
      mkdir -p /run/tunemq/copy/files
      trap 'exit 0' TERM INT
      if [ ! -e /run/tunemq/secret/environment ]; then
        echo 'the Secret {{ .secret }} has no file "environment": make it as docs/deploy/kubernetes.md shows' >&2
        exit 1
      fi
      while :; do
        for file in /run/tunemq/secret/*; do
          to=/run/tunemq/copy/files/${file##*/}
          if ! cmp -s "$file" "$to"; then
            install -m 0600 "$file" "$to.new"
            mv "$to.new" "$to"
          fi
        done
        : > /run/tunemq/copy/done
        sleep 5 &
        wait "$!"
      done
  startupProbe:
    exec: {command: [test, -e, /run/tunemq/copy/done]}
    periodSeconds: 1
    failureThreshold: 60
  resources:
    requests: {cpu: 5m, memory: 16Mi}
    limits: {memory: 32Mi}
  securityContext:
    {{- include "tunemq.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: secret, mountPath: /run/tunemq/secret, readOnly: true}
    - {name: etc, mountPath: /run/tunemq/copy}
{{- end }}

{{- define "tunemq.filesMount" -}}
- {name: etc, mountPath: /etc/tunemq, subPath: files, readOnly: true}
{{- end }}

{{- define "tunemq.filesVolumes" -}}
- name: secret
  secret: {secretName: {{ .secret }}, defaultMode: 0400}
- name: etc
  emptyDir: {medium: Memory, sizeLimit: 8Mi}
{{- end }}

{{/*
Alive: the loop runs. Ready: the scheduler serves the farm, or Redis has confirmed the worker's lease.
For a worker only the startup probe asks whether it is ready: no client connects to it, and if a busy
worker were not ready while Redis is away, no disruption budget would protect it just when it cannot
send its results. Takes a dict: start, ready: the commands of the startup and readiness probes.
*/}}
{{- define "tunemq.probes" -}}
startupProbe:
  exec: {command: {{ toJson .start }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  exec: {command: [tunemq, health]}
  periodSeconds: 20
  timeoutSeconds: 10
readinessProbe:
  exec: {command: {{ toJson .ready }}}
  periodSeconds: 20
  timeoutSeconds: 10
{{- end }}

{{/* A pool's values merged into workers.defaults, as JSON. Takes a dict: root, name. */}}
{{- define "tunemq.pool" -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.workers.defaults) (get .root.Values.workers.pools .name | default dict) -}}
{{- if not $pool.image -}}
{{- $_ := set $pool "image" (ternary "tunemq/worker-gpu" "tunemq/worker" (gt (int $pool.gpus) 0)) -}}
{{- end -}}
{{- if not $pool.autoscaling.resource -}}
{{- $_ := set $pool.autoscaling "resource" (ternary "gpu" "cpu" (gt (int $pool.gpus) 0)) -}}
{{- end -}}
{{- toJson $pool -}}
{{- end }}
