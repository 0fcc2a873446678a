{{/* The mesh file, read. */}}
{{- define "stagemesh.mesh" -}}
{{- $mesh := .Values.mesh | fromYaml -}}
{{- if not .Values.mesh -}}{{- fail "mesh is empty: give the mesh file, as --set-file mesh=mesh.yaml" -}}{{- end -}}
{{- if hasKey $mesh "Error" -}}{{- fail (printf "mesh is not YAML: %s" $mesh.Error) -}}{{- end -}}
{{- if not $mesh.stages -}}{{- fail "mesh has no stages" -}}{{- end -}}
{{- if not .Values.insecure -}}
{{- if not (or ($mesh.gateway).token_file ($mesh.gateway).insecure) -}}{{- fail "mesh: gateway.token_file is required, or insecure: true in the values" -}}{{- end -}}
{{- if not ($mesh.ops).insecure -}}{{- fail "mesh: ops.insecure must be true, as probes have no token, or insecure: true in the values" -}}{{- end -}}
{{- end -}}
{{- toYaml $mesh -}}
{{- end -}}

{{- define "stagemesh.name" -}}
{{- $full := ternary .Release.Name (printf "%s-stagemesh" .Release.Name) (contains "stagemesh" .Release.Name) -}}
{{- $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "stagemesh.labels" -}}
app.kubernetes.io/name: stagemesh
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What selects the pods of a part: a dictionary of root and part. */}}
{{- define "stagemesh.selector" -}}
app.kubernetes.io/name: stagemesh
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{/* The settings of a part over the defaults. */}}
{{- define "stagemesh.settings" -}}
{{- mergeOverwrite (deepCopy .root.Values.defaults) (deepCopy (.own | default dict)) | toYaml -}}
{{- end -}}

{{/* The port of an address. */}}
{{- define "stagemesh.port" -}}
{{- regexFind "[0-9]+$" (toString (default "" .)) -}}
{{- end -}}

{{/* Seconds of a duration such as 1m30s. */}}
{{- define "stagemesh.seconds" -}}
{{- $s := 0.0 -}}
{{- range regexFindAll "[0-9.]+(h|ms|us|m|s)" (toString .) -1 -}}
{{- $n := regexFind "[0-9.]+" . | float64 -}}
{{- $unit := regexFind "[a-z]+" . -}}
{{- $s = addf $s (mulf $n (get (dict "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001 "us" 0.000001) $unit)) -}}
{{- end -}}
{{- ceil $s -}}
{{- end -}}

{{/* The memory limit as Go reads it, less a tenth for what Go does not count. */}}
{{- define "stagemesh.gomemlimit" -}}
{{- $quantity := ternary . (printf "%.0f" (float64 .)) (kindIs "string" .) -}}
{{- $n := regexFind "^[0-9.]+" $quantity | float64 -}}
{{- $unit := regexReplaceAll "^[0-9.]+" $quantity "" -}}
{{- $factors := dict "" 1.0 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "k" 1000.0 "M" 1000000.0 "G" 1000000000.0 "T" 1000000000000.0 -}}
{{- if not (hasKey $factors $unit) -}}{{- fail (printf "limits.memory: %s is no quantity with Ki, Mi, Gi, Ti, k, M, G or T" $quantity) -}}{{- end -}}
{{- printf "%.0f" (mulf $n (get $factors $unit) 0.9) -}}
{{- end -}}

{{/* A Deployment and its PodDisruptionBudget: root, part, own values, command, ports, replicas unless a scaler has them. */}}
{{- define "stagemesh.deployment" -}}
{{- $root := .root -}}
{{- $s := include "stagemesh.settings" . | fromYaml -}}
{{- $image := mergeOverwrite (deepCopy $root.Values.image) (deepCopy $s.image) -}}
{{- $drain := include "stagemesh.seconds" (.drain | default "30s") | int -}}
{{- /* Models move to other hosts before; stop_limit of a worker and what comes after take the rest. */ -}}
{{- $stop := add (ternary (ceil (mulf $drain 1.5)) $drain (default false .movesModels) | int) 15 -}}
{{- if lt (int $s.terminationGracePeriodSeconds) $stop -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, and a stop takes up to %d s by the mesh file: give that" .where (int $s.terminationGracePeriodSeconds) $stop) -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "stagemesh.name" $root }}-{{ .part }}
  labels:
    {{- include "stagemesh.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .part }}
spec:
  {{- if not .isScaled }}
  replicas: {{ $s.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  progressDeadlineSeconds: {{ add (int $s.startupSeconds) 300 }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  selector:
    matchLabels:
      {{- include "stagemesh.selector" . | nindent 6 }}
  template:
    metadata:
      annotations:
        checksum/mesh: {{ printf "%s%s%s" $root.Values.mesh (toJson $root.Values.files) (toJson $root.Values.binaryFiles) | sha256sum }}
        {{- with $s.annotations }}{{ toYaml . | nindent 8 }}{{ end }}
      labels:
        {{- include "stagemesh.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .part }}
        {{- with $s.labels }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: {{ include "stagemesh.name" $root }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ $s.terminationGracePeriodSeconds }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        seccompProfile: {type: RuntimeDefault}
      {{- with $image.pullSecrets }}
      imagePullSecrets: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $s.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $s.nodeSelector }}
      nodeSelector: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.tolerations }}
      tolerations: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.affinity }}
      affinity: {{ toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "stagemesh.selector" . | nindent 14 }}
      containers:
        - name: stagemesh
          image: {{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) }}
          imagePullPolicy: {{ $image.pullPolicy }}
          args: {{ toJson .args }}
          env:
            - {name: STAGEMESH_CONFIG, value: /etc/stagemesh/mesh.yaml}
            - {name: STAGEMESH_OPS, value: "0.0.0.0:9090"}
            - {name: STAGEMESH_LOG_FORMAT, value: json}
            {{- with $root.Values.nats.url }}
            - {name: STAGEMESH_NATS, value: {{ . | quote }}}
            {{- end }}
            {{- with $root.Values.registry.consul }}
            - {name: STAGEMESH_CONSUL, value: {{ . | quote }}}
            {{- end }}
            {{- if $root.Values.insecure }}
            - {name: STAGEMESH_INSECURE, value: "true"}
            {{- end }}
            {{- with $root.Values.tracing.endpoint }}
            - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
            {{- end }}
            {{- with (($s.resources).limits).memory }}
            - {name: GOMEMLIMIT, value: {{ include "stagemesh.gomemlimit" . | quote }}}
            {{- end }}
            {{- range .env }}
            - {{ toJson . }}
            {{- end }}
            {{- range $s.env }}
            - {{ toJson . }}
            {{- end }}
          ports:
            - {name: ops, containerPort: 9090}
            {{- range $name, $port := .ports }}
            - {name: {{ $name }}, containerPort: {{ $port }}}
            {{- end }}
          startupProbe:
            httpGet: {path: /readyz, port: ops}
            periodSeconds: 1
            failureThreshold: {{ $s.startupSeconds }}
          readinessProbe:
            httpGet: {path: /readyz, port: ops}
            periodSeconds: 2
            failureThreshold: 2
          livenessProbe:
            httpGet: {path: /livez, port: ops}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          resources:
            {{- $resources := deepCopy $s.resources }}
            {{- if $s.gpus }}
            {{- $_ := set $resources "limits" (mergeOverwrite (deepCopy ($resources.limits | default dict)) (dict $s.gpuResource $s.gpus)) }}
            {{- end }}
            {{- toYaml $resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            - {name: mesh, mountPath: /etc/stagemesh, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            {{- if $s.sharedMemory }}
            - {name: shared-memory, mountPath: /dev/shm}
            {{- end }}
            {{- range $s.volumeMounts }}
            - {{ toJson . }}
            {{- end }}
      volumes:
        - name: mesh
          projected:
            sources:
              - configMap: {name: {{ include "stagemesh.name" $root }}}
              {{- range $folder, $secret := $root.Values.secrets }}
              - secret:
                  name: {{ $secret.name }}
                  items:
                    {{- range $secret.keys }}
                    - {key: {{ . | quote }}, path: {{ printf "secrets/%s/%s" $folder . | quote }}}
                    {{- end }}
              {{- end }}
        - name: tmp
          emptyDir: {}
        {{- with $s.sharedMemory }}
        - name: shared-memory
          emptyDir: {medium: Memory, sizeLimit: {{ . }}}
        {{- end }}
        {{- range $s.volumes }}
        - {{ toJson . }}
        {{- end }}
{{- if and $s.podDisruptionBudget (or .isScaled (gt (int $s.replicas) 1)) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "stagemesh.name" $root }}-{{ .part }}
  labels:
    {{- include "stagemesh.labels" $root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "stagemesh.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
