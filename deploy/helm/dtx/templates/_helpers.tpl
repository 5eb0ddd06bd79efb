{{- define "dtx.name" -}}
{{- if contains "dtx" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-dtx" (.Release.Name | trunc 46 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "dtx.selector" -}}
app.kubernetes.io/name: dtx
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dtx.labels" -}}
{{ include "dtx.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* "true" if PostgreSQL is given, "" if it is embedded */}}
{{- define "dtx.givenDatabase" -}}
{{- if or .Values.database.url .Values.database.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "dtx.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "dtx.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
