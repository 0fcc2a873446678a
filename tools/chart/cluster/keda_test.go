package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

const (
	// kedaNamespace and kedaFolder are what KEDA calls its namespace, and the folder with its files.
	kedaNamespace = "keda"
	kedaFolder    = folder + "/keda"
	kedaLog       = folder + "/keda-operator.log"
	// kedaPort is the port of KEDA's metrics API server.
	kedaPort = 6444
)

// holdStage is a stage in front of the digits, which needs eight hosts: one passes two requests a second on,
// and twelve come.
const holdStage = `
  hold: {runner: {sleep: {base: 500ms, concurrency: 1}}, batch: {max_size: 1}, min_hosts: 0, max_hosts: 8}
`

// KEDA scales a stage of the digits mesh from one host to eight, to none, and to one, as the gateways' scaler says.
func TestKEDAScalesAStage(t *testing.T) {
	m := &mesh{t: t, release: "scaled"}
	m.ensureBroker()
	shared.startKEDA(t)
	certificates, err := shared.authority.issue("scaled-stagemesh-scaler." + namespace + ".svc")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shared.client.CoreV1().Secrets(namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "scaler"}, Data: certificates}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	before := m.objects()
	m.useDigits()
	m.values["mesh"] = strings.NewReplacer(
		"stages:\n", `gateway:
  scaler: {listen: "0.0.0.0:9081", cert_file: secrets/scaler/tls.crt, key_file: secrets/scaler/tls.key, client_ca_file: secrets/scaler/ca.crt}
stages:`+holdStage,
		"timeout: 5s", "timeout: 2m", // one host has a minute of work when the others come
		"steps:\n", "steps:\n      - {name: hold, stage: hold}\n",
	).Replace(m.values["mesh"].(string))
	maps.Copy(m.values, map[string]any{
		"secrets": map[string]any{"scaler": map[string]any{"name": "scaler", "keys": []any{"ca.crt", "tls.crt", "tls.key"}}},
		"stages":  map[string]any{"hold": map[string]any{"keda": map[string]any{"minReplicas": 0, "maxReplicas": 8}}},
		"keda":    map[string]any{"secret": "scaler", "pollingInterval": 2, "cooldownPeriod": 5},
	})
	m.install()

	r := m.replicasOf("scaled-stagemesh-stage-hold")
	begin := time.Now()
	images := readImages(t)
	stop := m.askSteadily(12, func(ctx context.Context, client *http.Client) error {
		_, err := images[0].ask(ctx, client, m.gateway)
		return err
	})
	r.follow("eight hosts", func(now int32) bool { return now == 8 })
	grown := time.Since(begin)
	m.awaitRollout(r.deployment)
	r.followFor(time.Minute)
	stop()
	begin = time.Now()
	hosts := m.pods("stage-hold")
	r.follow("no host", func(now int32) bool { return now == 0 })
	shrunk := time.Since(begin)
	m.awaitGone(hosts...)
	took := m.wake()
	r.follow("one host again", func(now int32) bool { return now == 1 })
	t.Logf("replicas were %d; eight after %s of load, none %s after its end, and the next request waited %s", r.seen, grown.Round(time.Second), shrunk.Round(time.Second), took)
	if turns := r.turns(); turns > 3 {
		t.Errorf("more than one reversal: replicas were %d", r.seen)
	}
	t.Run("KEDALogsWhatIsWrong", func(t *testing.T) { kedaLogsWhatIsWrong(t, "scaled") })
	m.uninstall(before)
}

// wake asks once while no host runs, and returns how long the answer took.
func (m *mesh) wake() time.Duration {
	m.t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	begin := time.Now()
	got, err := readImages(m.t)[0].ask(m.t.Context(), client, m.gateway)
	if err != nil || got.activating != "hold" {
		m.t.Fatalf("the request waited for %q: %v", got.activating, err)
	}
	return time.Since(begin).Round(100 * time.Millisecond)
}

// kedaLogsWhatIsWrong asks the scaler of a release for what it refuses.
func kedaLogsWhatIsWrong(t *testing.T, release string) {
	for name, row := range map[string]struct{ metadata, want string }{
		"no-stage": {"stage: holt", `desc = stage: there is no stage "holt"; there is classify, decode, hold, label`},
		"no-unit":  {`stage: hold, target: "wait=200"`, `desc = target: "wait=200": 200 has no unit; add ms or s, as in wait=200ms`},
	} {
		err := shared.create(t.Context(), strings.NewReader(fmt.Sprintf(`apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {namespace: %[1]s, name: %[2]s}
spec:
  scaleTargetRef: {name: %[3]s-stagemesh-stage-label}
  minReplicaCount: 1
  maxReplicaCount: 1
  triggers:
    - type: external-push
      metadata: {scalerAddress: "%[3]s-stagemesh-scaler.%[1]s.svc:9081", %[4]s}
      authenticationRef: {name: %[3]s-stagemesh-scaler}
`, namespace, name, release, row.metadata)))
		if err != nil {
			t.Fatal(err)
		}
		m := &mesh{t: t}
		m.await("KEDA logs "+row.want, func() (bool, error) {
			text, err := os.ReadFile(kedaLog)
			return strings.Contains(strings.ReplaceAll(string(text), `\"`, `"`), row.want), err
		})
		client, err := dynamic.NewForConfig(shared.config)
		if err == nil {
			err = client.Resource(schema.GroupVersionResource{Group: "keda.sh", Version: "v1alpha1", Resource: "scaledobjects"}).Namespace(namespace).Delete(t.Context(), name, metav1.DeleteOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// startKEDA starts KEDA's operator and metrics API server with KEDA's own objects and the rights of its own
// service account, and returns once the API server has its metrics.
func (c *cluster) startKEDA(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	manifests, err := filepath.Glob(c.programs["config"] + "/crd/bases/*.yaml")
	if err != nil || len(manifests) == 0 {
		t.Fatalf("%d definitions of KEDA, %v", len(manifests), err)
	}
	for _, name := range []string{"general/namespace", "service_account/service_account", "rbac/role", "rbac/role_binding", "metrics-server/role", "metrics-server/role_binding"} {
		manifests = append(manifests, c.programs["config"]+"/"+name+".yaml")
	}
	for _, path := range manifests {
		if err := c.createFile(ctx, path); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	token, err := c.client.CoreV1().ServiceAccounts(kedaNamespace).CreateToken(ctx, "keda-operator", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own := kedaFolder + "/kubeconfig"
	err = errors.Join(
		c.authority.write(kedaFolder, "keda-metrics-apiserver."+kedaNamespace+".svc", "127.0.0.1"),
		os.WriteFile(own, []byte(strings.Replace(files["kubeconfig"], "token: token", "token: "+token.Status.Token, 1)), 0o600),
		c.start("keda-operator", "env", "KUBECONFIG="+own, "POD_NAMESPACE="+kedaNamespace, "KEDA_CLUSTER_OBJECT_NAMESPACE="+kedaNamespace, "WATCH_NAMESPACE=", c.programs["operator"],
			"--zap-log-level=info", "--zap-encoder=console", "--cert-dir="+kedaFolder, "--metrics-bind-address=0", "--metrics-service-bind-address=127.0.0.1:9666"),
		c.start("keda-metrics-apiserver", "env", "KUBECONFIG="+own, "POD_NAMESPACE="+kedaNamespace, "WATCH_NAMESPACE=", c.programs["adapter"],
			fmt.Sprintf("--secure-port=%d", kedaPort), "--port=0", "--cert-dir="+kedaFolder, "--metrics-service-address=127.0.0.1:9666",
			"--client-ca-file="+kedaFolder+"/ca.crt", "--tls-cert-file="+kedaFolder+"/tls.crt", "--tls-private-key-file="+kedaFolder+"/tls.key",
			"--lister-kubeconfig="+own, "--authentication-kubeconfig="+own, "--authorization-kubeconfig="+own))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.registerMetrics(t, kedaNamespace, "keda-metrics-apiserver", kedaPort))
	if err := c.await(ctx, "KEDA serves metrics", func() bool {
		_, err := c.client.Discovery().ServerPreferredResources() // also once the API server lists them
		return err == nil && c.client.RESTClient().Get().AbsPath("/apis/"+metricsAPI).Do(ctx).Error() == nil
	}); err != nil {
		t.Fatal(err)
	}
}
