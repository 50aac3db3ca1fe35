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

{{/* Prints the setting .name of the role .role: its own, or that of all, or the one of ../base. */}}
{{- define "pdserve.setting" -}}
{{- $value := index ((.root.Files.Get "base/settings.yaml" | fromYaml).data) .name | default "" -}}
{{- if hasKey .root.Values.settings .name }}{{ $value = index .root.Values.settings .name }}{{ end -}}
{{- range .container.env }}{{ if eq .name $.name }}{{ $value = .value }}{{ end }}{{ end -}}
{{- $value -}}
{{- end -}}

{{/* Gives the pod time for its drain: preStop, PDSERVE_DRAIN_S and 15 s, unless it has that already. Prints nothing. */}}
{{- define "pdserve.grace" -}}
{{- $drain := include "pdserve.setting" (dict "root" .root "container" .container "name" "PDSERVE_DRAIN_S") -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?$" $drain) -}}
{{- fail (printf "PDSERVE_DRAIN_S of the %s is %q: a number of seconds is needed" .role $drain) -}}
{{- end -}}
{{- $before := 0 -}}
{{- with .container.lifecycle }}{{ $before = int (index .preStop.exec.command 1) }}{{ end -}}
{{- $needed := add $before (ceil (float64 $drain)) 15 -}}
{{- $_ := set .pod "terminationGracePeriodSeconds" (max (int .pod.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}

{{/* Prints, as a list in YAML, the ports that UCX takes on the nodes, of either role. */}}
{{- define "pdserve.ucxPorts" -}}
{{- $ports := list -}}
{{- range (include "pdserve.read" (dict "root" . "folder" "base") | fromYaml).objects -}}
{{- if eq .kind "StatefulSet" -}}
{{- $role := index .metadata.labels "app.kubernetes.io/component" -}}
{{- $own := (index $.Values $role).settings -}}
{{- $env := list -}}
{{- range $name, $value := $own }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end -}}
{{- $range := include "pdserve.setting" (dict "root" $ "container" (dict "env" $env) "name" "PDSERVE_UCX_TCP_PORTS") -}}
{{- if not (regexMatch "^[0-9]+-[0-9]+$" $range) -}}
{{- fail (printf "PDSERVE_UCX_TCP_PORTS of %s nodes is %q: a range such as 42000-42999 is needed, which the network policy opens; or set networkPolicy.enabled=false" $role $range) -}}
{{- end -}}
{{- $parts := splitList "-" $range -}}
{{- $ports = append $ports (dict "protocol" "TCP" "port" (int (first $parts)) "endPort" (int (last $parts))) -}}
{{- end -}}
{{- end -}}
{{- uniq $ports | toYaml -}}
{{- end -}}

{{/* Lets UCX's ports through the network policy .policy between nodes, in place. Prints nothing. */}}
{{- define "pdserve.openUcxPorts" -}}
{{- $ucx := include "pdserve.ucxPorts" .root | fromYamlArray -}}
{{- range concat .policy.spec.ingress .policy.spec.egress -}}
{{- $ports := list -}}
{{- $opens := false -}}
{{- range .ports }}{{ if hasKey . "endPort" }}{{ $opens = true }}{{ else }}{{ $ports = append $ports . }}{{ end }}{{ end -}}
{{- if $opens }}{{ $_ := set . "ports" (concat $ports $ucx) }}{{ end -}}
{{- end -}}
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
{{- include "pdserve.grace" (dict "root" .root "role" $role "pod" $pod "container" $container) -}}
{{- if eq $role "proxy" }}{{ include "pdserve.proxy" (dict "values" $values "pod" $pod "container" $container) }}
{{- else }}
{{- include "pdserve.node" (dict "values" $values "pod" $pod "container" $container) -}}
{{- include "pdserve.hubModel" (dict "hub" $values.model.hub "spec" .object.spec "pod" $pod "container" $container) -}}
{{- end -}}
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

{{/* Has the node fetch a model by its name, into a volume claim of its own in place of the volume "cache". */}}
{{- define "pdserve.hubModel" -}}
{{- if .hub.name -}}
{{- $home := dict "name" "HF_HOME" "value" "/cache/huggingface" -}}
{{- $entry := dict "name" .hub.existingSecret "key" "token" "optional" true -}}
{{- $token := dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" $entry) -}}
{{- $_ := set .container "env" (concat (list $home $token) .container.env) -}}
{{- $_ := set .container.startupProbe "failureThreshold" 1800 -}}
{{- $_ := set .container.startupProbe.httpGet "path" "/ready" -}}
{{- $kept := list -}}
{{- range .pod.volumes }}{{ if ne .name "cache" }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- $_ := set .pod "volumes" $kept -}}
{{- $claim := dict "accessModes" (list "ReadWriteOnce") "resources" (dict "requests" (dict "storage" .hub.size)) -}}
{{- $template := dict "apiVersion" "v1" "kind" "PersistentVolumeClaim" "metadata" (dict "name" "cache") "spec" $claim -}}
{{- $_ := set .spec "volumeClaimTemplates" (list $template) -}}
{{- end -}}
{{- end -}}
