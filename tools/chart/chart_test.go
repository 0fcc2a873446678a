// Package chart_test renders the Helm chart and checks what comes out.
package chart_test

import (
	"encoding/base64"
	"flag"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write deploy/kubernetes/stagemesh.yaml")

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // the loader tells of each link
	m.Run()
}

// manifest is one rendered object.
type manifest struct {
	kind, name, text string
}

// render renders the chart with values in YAML, as Helm does, in a cluster with those APIs.
func render(t *testing.T, values string, apis ...string) ([]manifest, error) {
	t.Helper()
	chart, err := loader.Load("../../deploy/helm/stagemesh")
	if err != nil {
		t.Fatal(err)
	}
	given := chartutil.Values{}
	if err := yaml.Unmarshal([]byte(values), &given); err != nil {
		t.Fatal(err)
	}
	cluster := chartutil.DefaultCapabilities.Copy()
	cluster.APIVersions = append(cluster.APIVersions, apis...)
	all, err := chartutil.ToRenderValues(chart, given, chartutil.ReleaseOptions{Name: "digits", Namespace: "ml", IsInstall: true}, cluster)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	var out []manifest
	for _, path := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(path, "NOTES.txt") {
			out = append(out, manifest{kind: "notes", text: files[path]})
			continue
		}
		for text := range strings.SplitSeq("\n"+files[path], "\n---") {
			var head struct {
				Kind     string
				Metadata struct{ Name string }
			}
			if err := yaml.Unmarshal([]byte(text), &head); err != nil {
				t.Fatalf("%s: %v in\n%s", path, err, text)
			}
			if head.Kind != "" {
				out = append(out, manifest{head.Kind, head.Metadata.Name, strings.TrimSpace(text) + "\n"})
			}
		}
	}
	return out, nil
}

// objectOf returns an object of a kind; nil for a kind that is not of Kubernetes.
func objectOf(kind string) any {
	return map[string]any{
		"ConfigMap": &corev1.ConfigMap{}, "Service": &corev1.Service{}, "ServiceAccount": &corev1.ServiceAccount{}, "Deployment": &appsv1.Deployment{},
		"PodDisruptionBudget": &policyv1.PodDisruptionBudget{}, "HorizontalPodAutoscaler": &autoscalingv2.HorizontalPodAutoscaler{},
		"NetworkPolicy": &networkingv1.NetworkPolicy{}, "Ingress": &networkingv1.Ingress{},
	}[kind]
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// digits are the values of the digits example.
func digits(t *testing.T) string {
	t.Helper()
	mesh := map[string]any{
		"mesh":        read(t, "../../examples/digits/mesh.yaml"),
		"binaryFiles": map[string]string{"digits.onnx": base64.StdEncoding.EncodeToString([]byte(read(t, "../../examples/digits/digits.onnx")))},
	}
	more, err := yaml.Marshal(mesh)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, "../../deploy/helm/values/digits.yaml") + string(more)
}

const (
	stages = "mesh: |\n  mesh: m\n  gateway: {scaler: {listen: \"0.0.0.0:9081\"}, grpc_listen: \"0.0.0.0:8081\"}\n  jobs: {queues: {q: {}}}\n" +
		"  stages: {a: {runner: {echo: {}}}, b: {runner: {echo: {}}, drain_timeout: 1m30s}}\n  pipelines: {p: {steps: [{name: a, stage: a}]}}\n"
	models   = "mesh: |\n  mesh: m\n  gateway: {scaler: {listen: \"0.0.0.0:9081\"}}\n  stages: {network: {runner: {onnx_models: {}}}}\n"
	trusting = "insecure: true\ndefaults: {terminationGracePeriodSeconds: 120}\n"
	keda     = "keda.sh/v1alpha1"
)

// All that the chart can render has no field that Kubernetes does not know.
func TestObjectsAreValid(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		values string
		want   []string
	}{
		"digits": {digits(t), []string{
			"ConfigMap digits-stagemesh", "Deployment digits-stagemesh-gateway", "Deployment digits-stagemesh-stage-classify", "Deployment digits-stagemesh-stage-decode",
			"Deployment digits-stagemesh-stage-label", "NetworkPolicy digits-stagemesh", "NetworkPolicy digits-stagemesh-gateway", "PodDisruptionBudget digits-stagemesh-gateway",
			"PodDisruptionBudget digits-stagemesh-stage-classify", "Service digits-stagemesh", "Service digits-stagemesh-admin", "ServiceAccount digits-stagemesh", "notes ",
		}},
		"everything": {stages + trusting + read(t, "../../deploy/helm/values/all.yaml"), []string{
			"ConfigMap digits-stagemesh", "ConfigMap digits-stagemesh-dashboard-jobs", "ConfigMap digits-stagemesh-dashboard-mesh", "ConfigMap digits-stagemesh-dashboard-models",
			"ConfigMap digits-stagemesh-dashboard-operations", "ConfigMap digits-stagemesh-dashboard-stage", "Deployment digits-stagemesh-dispatcher", "Deployment digits-stagemesh-gateway",
			"Deployment digits-stagemesh-stage-a", "Deployment digits-stagemesh-stage-b", "GRPCRoute digits-stagemesh", "HTTPRoute digits-stagemesh",
			"HorizontalPodAutoscaler digits-stagemesh-stage-b", "Ingress digits-stagemesh", "NetworkPolicy digits-stagemesh", "NetworkPolicy digits-stagemesh-gateway",
			"PodDisruptionBudget digits-stagemesh-dispatcher", "PodDisruptionBudget digits-stagemesh-gateway", "PodDisruptionBudget digits-stagemesh-stage-a",
			"PodDisruptionBudget digits-stagemesh-stage-b", "PodMonitor digits-stagemesh", "PrometheusRule digits-stagemesh", "ScaledObject digits-stagemesh-stage-a",
			"Service digits-stagemesh", "Service digits-stagemesh-admin", "Service digits-stagemesh-scaler", "ServiceAccount digits-stagemesh", "TriggerAuthentication digits-stagemesh-scaler", "notes ",
		}},
		"models": {models + trusting + read(t, "../../deploy/helm/values/models.yaml"), []string{
			"ConfigMap digits-stagemesh", "ConfigMap digits-stagemesh-dashboard-jobs", "ConfigMap digits-stagemesh-dashboard-mesh", "ConfigMap digits-stagemesh-dashboard-models",
			"ConfigMap digits-stagemesh-dashboard-operations", "ConfigMap digits-stagemesh-dashboard-stage", "Deployment digits-stagemesh-gateway", "Deployment digits-stagemesh-stage-network",
			"NetworkPolicy digits-stagemesh", "NetworkPolicy digits-stagemesh-gateway", "PodDisruptionBudget digits-stagemesh-gateway",
			"PodDisruptionBudget digits-stagemesh-stage-network", "PodMonitor digits-stagemesh", "PrometheusRule digits-stagemesh", "ScaledObject digits-stagemesh-stage-network",
			"Service digits-stagemesh", "Service digits-stagemesh-admin", "Service digits-stagemesh-scaler", "ServiceAccount digits-stagemesh", "TriggerAuthentication digits-stagemesh-scaler", "notes ",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all, err := render(t, row.values, keda)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, m := range all {
				got = append(got, m.kind+" "+m.name)
				if into := objectOf(m.kind); into != nil {
					if err := yaml.UnmarshalStrict([]byte(m.text), into); err != nil {
						t.Errorf("%s %s: %v in\n%s", m.kind, m.name, err, m.text)
					}
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, row.want) {
				t.Errorf("got %q", got)
			}
		})
	}
}

// Pods keep to the level restricted of the pod security standards, end after their drain, and are
// replaced where the mesh file changes.
func TestPodsAreRestricted(t *testing.T) {
	t.Parallel()
	checksums := map[string]bool{}
	for _, values := range []string{stages + trusting, strings.Replace(stages, "mesh: m", "mesh: n", 1) + trusting} {
		all, err := render(t, values)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range all {
			if m.kind != "Deployment" {
				continue
			}
			var d appsv1.Deployment
			if err := yaml.UnmarshalStrict([]byte(m.text), &d); err != nil {
				t.Fatal(err)
			}
			pod := d.Spec.Template.Spec
			c := pod.Containers[0]
			switch security := c.SecurityContext; {
			case !*pod.SecurityContext.RunAsNonRoot, *pod.SecurityContext.RunAsUser == 0, pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault,
				*security.AllowPrivilegeEscalation, !*security.ReadOnlyRootFilesystem, !slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}), *pod.AutomountServiceAccountToken:
				t.Errorf("%s is not restricted", m.name)
			case d.Spec.Strategy.RollingUpdate.MaxUnavailable.IntValue() != 0, *pod.TerminationGracePeriodSeconds != 120:
				t.Errorf("%s: strategy %v, %d s to end", m.name, d.Spec.Strategy, *pod.TerminationGracePeriodSeconds)
			}
			env := map[string]string{}
			for _, e := range c.Env {
				env[e.Name] = e.Value
			}
			if env["GOMEMLIMIT"] != fmt.Sprint(1<<30/10*9) && env["GOMEMLIMIT"] != "966367642" {
				t.Errorf("%s has GOMEMLIMIT %s of 1Gi", m.name, env["GOMEMLIMIT"])
			}
			checksums[d.Spec.Template.Annotations["checksum/mesh"]] = true
		}
	}
	if len(checksums) != 2 {
		t.Errorf("two mesh files have the checksums %v", checksums)
	}
}

func TestExampleOfSecretsIsMounted(t *testing.T) {
	t.Parallel()
	const example, path = "{tokens: {name: mesh-tokens, keys: [callers]}}", "secrets/tokens/callers"
	for _, file := range []string{"../../deploy/helm/stagemesh/values.yaml", "../../docs/kubernetes.md"} {
		if text := read(t, file); !strings.Contains(text, example) || !strings.Contains(text, "gateway.token_file: "+path) {
			t.Errorf("%s does not show %s for %s", file, example, path)
		}
	}
	all, err := render(t, stages+trusting+"secrets: "+example)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.kind == "Deployment" && !strings.Contains(m.text, fmt.Sprintf(`{key: "callers", path: %q}`, path)) {
			t.Errorf("%s lacks the secret", m.name)
		}
	}
}

// Numbers of values arrive as floats.
func TestMemoryMayBeANumber(t *testing.T) {
	t.Parallel()
	all, err := render(t, stages+trusting+"stages: {a: {resources: {limits: {memory: 1073741824}}}}")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.kind == "Deployment" && strings.HasSuffix(m.name, "-stage-a") && !strings.Contains(m.text, `{name: GOMEMLIMIT, value: "966367642"}`) {
			t.Errorf("%s has no nine tenths of 1 GiB:\n%s", m.name, m.text)
		}
	}
}

func TestMistakesNameTheirValue(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct{ values, want string }{
		"no mesh":                      {"", "mesh is empty: give the mesh file, as --set-file mesh=mesh.yaml"},
		"mesh that is not YAML":        {"mesh: '{'", "mesh is not YAML"},
		"unknown stage":                {stages + trusting + "stages: {c: {replicas: 2}}", "stages.c: the mesh file has no such stage, only a, b"},
		"two scalers":                  {stages + trusting + "stages: {a: {keda: {maxReplicas: 2}, hpa: {maxReplicas: 2}}}", "stages.a has both keda and hpa"},
		"KEDA without its API":         {stages + trusting + "stages: {a: {keda: {maxReplicas: 2}}}", "stages.a.keda: the cluster has no keda.sh/v1alpha1"},
		"grace period below the drain": {stages + "insecure: true", "stages.b.terminationGracePeriodSeconds is 75, and a stop takes up to 105 s by the mesh file"},
		"grace period below the delay": {strings.NewReplacer("gateway: {", "gateway: {drain_delay: 40s, ", "1m30s", "10s").Replace(stages) + "insecure: true", "gateway.terminationGracePeriodSeconds is 75, and a stop takes up to 85 s by the mesh file"},
		"grace period of models":       {models + "insecure: true\ndefaults: {terminationGracePeriodSeconds: 59}", "stages.network.terminationGracePeriodSeconds is 59, and a stop takes up to 60 s by the mesh file"},
		"autoscaler without numbers":   {strings.Replace(stages, "scaler: {listen: \"0.0.0.0:9081\"}, ", "", 1) + trusting + "stages: {a: {hpa: {maxReplicas: 2}}}", "stages.a.hpa: gateways want hosts only with gateway.scaler"},
		"gateways that scale":          {stages + trusting + "gateway: {hpa: {maxReplicas: 2}}", "at '/gateway/hpa'"},
		"memory in powers":             {stages + trusting + "stages: {a: {resources: {limits: {memory: \"1e9\"}}}}", "limits.memory: 1e9 is no quantity"},
		"no tokens":                    {stages, "mesh: gateway.token_file is required, or insecure: true in the values"},
		"unknown value":                {stages + trusting + "replicas: 2", "additional properties 'replicas' not allowed"},
		"target without unit":          {stages + trusting + "stages: {a: {keda: {maxReplicas: 2, target: 200ms}}}", "at '/stages/a/keda/target': '200ms' does not match pattern"},
		"memory of another unit":       {stages + trusting + "stages: {a: {resources: {limits: {memory: 1Zi}}}}", "limits.memory: 1Zi is no quantity with Ki, Mi, Gi, Ti, k, M, G or T"},
		"route without parent":         {stages + trusting + "httpRoute: {enabled: true}", "httpRoute.parentRefs is required"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := render(t, row.values); err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// kubectl apply -k deploy/kubernetes is the digits example without Helm.
func TestKustomizationIsTheChart(t *testing.T) {
	t.Parallel()
	all, err := render(t, digits(t))
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	want.WriteString("# The chart deploy/helm/stagemesh with deploy/helm/values/digits.yaml. Written by\n# GOWORK=off go -C tools/chart test . -update\n")
	for _, m := range all {
		if m.kind != "notes" {
			want.WriteString("---\n" + m.text)
		}
	}
	path := "../../deploy/kubernetes/stagemesh.yaml"
	if *update {
		if err := os.WriteFile(path, []byte(want.String()), 0o644); err != nil { //nolint:gosec // it is committed
			t.Fatal(err)
		}
	}
	if read(t, path) != want.String() {
		t.Errorf("%s is not what the chart renders: GOWORK=off go -C tools/chart test . -update", path)
	}
}
