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

{{/* What all pods of this farm have, and no others. */}}
{{- define "tunemq.selector" -}}
app.kubernetes.io/name: tunemq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* An image's whole name; one that names its registry, or its version, stays so. Takes a dict: root, name. */}}
{{- define "tunemq.image" -}}
{{- $image := .root.Values.image -}}
{{- if and $image.registry (not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" .name)) }}{{ trimSuffix "/" $image.registry }}/{{ end -}}
{{- if or (contains "@" .name) (regexMatch ":[^/]+$" .name) -}}
{{ .name }}
{{- else -}}
{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* What no pod of the farm has: root, and a token for Kubernetes. */}}
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

{{/*
Where a pod may run. Takes what has nodeSelector, tolerations and the others.
*/}}
{{- define "tunemq.placement" -}}
{{- range $key := list "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables that are no secrets. Takes a dict: env, where, secret. */}}
{{- define "tunemq.env" -}}
{{- range $name, $value := .env }}
{{- if and (regexMatch "(?i)(^|_)(secret|password|passwd|token|key)(_|$)|^TUNEMQ_REDIS$" $name) (not (hasSuffix "_FILE" $name)) }}
{{- fail (printf "%s.%s: values are shown by `helm get values`; a secret belongs in the file `environment` of the Secret %s" $.where $name $.secret) }}
{{- end }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/*
Kubernetes shows a Secret to a process that is not root as a file of root's that a group may read,
and TuneMQ takes no key file that others than its owner may read. So a side container copies the
Secret to a folder in memory that only the pod's user may enter, and again when it changes: `tunemq
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
        echo 'the Secret {{ .secret }} has no "environment": docs/deploy/kubernetes.md says how to make it' >&2
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
Alive: its loop goes round. Ready: the scheduler serves; of a worker Redis has confirmed the lease. Of
that a worker is asked at its start alone: nobody connects to it, and a busy one that is not ready
while Redis is away would be protected by no disruption budget, just when it cannot send its results.
Takes a dict: start, ready: what is asked at the start and later on.
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

{{/* What a pool says, and what holds for all where it says nothing. Takes a dict: root, name. JSON. */}}
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
