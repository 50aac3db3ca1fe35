{{/* Returns all objects of the chart's folder .folder as a YAML list under "objects". */}}
{{- define "pdserve.read" -}}
{{- $objects := list -}}
{{- $root := .root -}}
{{- range $path, $_ := $root.Files.Glob (printf "%s/*.yaml" .folder) -}}
{{- if not (hasSuffix "kustomization.yaml" $path) -}}
{{- range splitList "\n---\n" ($root.Files.Get $path) -}}
{{- $objects = append $objects (fromYaml .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "objects" $objects | toYaml -}}
{{- end -}}

{{/* Prints .object in the release's namespace. */}}
{{- define "pdserve.print" -}}
{{- $_ := set .object.metadata "namespace" .root.Release.Namespace }}
---
{{ toYaml .object }}
{{- end -}}

{{/* Applies the values to the Deployment or StatefulSet .object, in place. Prints nothing. */}}
{{- define "pdserve.workload" -}}
{{- $values := .root.Values -}}
{{- $role := index .object.metadata.labels "app.kubernetes.io/component" -}}
{{- $own := index $values $role -}}
{{- $pod := .object.spec.template.spec -}}
{{- $container := index $pod.containers 0 -}}
{{- $_ := set .object.spec "replicas" (int $own.replicas) -}}
{{- if and $values.autoscaling.enabled (ne $role "proxy") }}{{ $_ := unset .object.spec "replicas" }}{{ end -}}
{{- $tag := $values.image.tag | default .root.Chart.AppVersion -}}
{{- $_ := set $container "image" (printf "%s:%s" $values.image.repository $tag) -}}
{{- $_ := set $container "imagePullPolicy" $values.image.pullPolicy -}}
{{- range $name, $value := $own.settings -}}
{{- $kept := list -}}
{{- range $container.env }}{{ if ne .name $name }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- $_ := set $container "env" (append $kept (dict "name" $name "value" (toString $value))) -}}
{{- end -}}
{{- if $own.resources }}{{ $_ := set $container "resources" $own.resources }}{{ end -}}
{{- if $own.nodeSelector }}{{ $_ := set $pod "nodeSelector" $own.nodeSelector }}{{ end -}}
{{- if $own.tolerations }}{{ $_ := set $pod "tolerations" $own.tolerations }}{{ end -}}
{{- with $values.image.pullSecrets -}}
{{- $names := list -}}
{{- range . }}{{ $names = append $names (dict "name" .) }}{{ end -}}
{{- $_ := set $pod "imagePullSecrets" $names -}}
{{- end -}}
{{- range $pod.volumes -}}
{{- if .secret }}{{ $_ := set .secret "secretName" $values.secret.existingSecret }}{{ end -}}
{{- end -}}
{{- if eq $role "proxy" }}{{ include "pdserve.proxy" (dict "values" $values "pod" $pod "container" $container) }}
{{- else }}{{ include "pdserve.node" (dict "values" $values "pod" $pod "container" $container) }}{{ end -}}
{{- end -}}

{{/* Applies to the pod what concerns proxies alone. */}}
{{- define "pdserve.proxy" -}}
{{- with .values.apiKeys.existingSecret -}}
{{- $variable := dict "name" "PDSERVE_API_KEY_FILE" "value" "/etc/pdserve-keys/keys" -}}
{{- $mount := dict "name" "api-keys" "mountPath" "/etc/pdserve-keys" "readOnly" true -}}
{{- $volume := dict "name" "api-keys" "secret" (dict "secretName" . "defaultMode" 288) -}}
{{- $_ := set $.container "env" (prepend $.container.env $variable) -}}
{{- $_ := set $.container "volumeMounts" (prepend $.container.volumeMounts $mount) -}}
{{- $_ := set $.pod "volumes" (prepend $.pod.volumes $volume) -}}
{{- end -}}
{{- end -}}

{{/* Applies to the pod what concerns prefill and decode nodes alone. */}}
{{- define "pdserve.node" -}}
{{- with .values.model.existingClaim -}}
{{- $mount := dict "name" "model" "mountPath" "/models/model" "readOnly" true -}}
{{- $volume := dict "name" "model" "persistentVolumeClaim" (dict "claimName" . "readOnly" true) -}}
{{- $_ := set $.container "volumeMounts" (prepend $.container.volumeMounts $mount) -}}
{{- $_ := set $.pod "volumes" (prepend $.pod.volumes $volume) -}}
{{- end -}}
{{- with .values.sharedMemory.sizeLimit -}}
{{- $mount := dict "name" "shared-memory" "mountPath" "/dev/shm" -}}
{{- $volume := dict "name" "shared-memory" "emptyDir" (dict "medium" "Memory" "sizeLimit" .) -}}
{{- $_ := set $.container "volumeMounts" (prepend $.container.volumeMounts $mount) -}}
{{- $_ := set $.pod "volumes" (prepend $.pod.volumes $volume) -}}
{{- end -}}
{{- with .values.model.initContainers }}{{ $_ := set $.pod "initContainers" . }}{{ end -}}
{{- if .values.rdma.rootWithIpcLock -}}
{{- $_ := set .pod.securityContext "runAsNonRoot" false -}}
{{- $_ := set .pod.securityContext "runAsUser" 0 -}}
{{- $_ := set .container.securityContext.capabilities "add" (list "IPC_LOCK") -}}
{{- end -}}
{{- end -}}
