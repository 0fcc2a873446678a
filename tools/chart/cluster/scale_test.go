package cluster

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// slowMesh needs four hosts: one answers ten requests a second, and thirty come.
const slowMesh = `mesh: slow
gateway: {scaler: {}}
stages:
  work: {runner: {sleep: {base: 100ms, concurrency: 1}}, batch: {max_size: 1}, min_hosts: 1, max_hosts: 4}
pipelines:
  work: {timeout: 60s, steps: [{name: work, stage: work}]}
`

// The HorizontalPodAutoscaler of the chart follows hosts wanted, up in a jump and down once.
func TestAutoscalerFollowsHostsWanted(t *testing.T) {
	m := &mesh{t: t, release: "slow"}
	broker := m.ensureBroker()
	serveMetrics(m)
	m.values = map[string]any{
		"mesh": slowMesh, "insecure": true, "gateway": map[string]any{"replicas": 1},
		"stages": map[string]any{"work": map[string]any{"hpa": map[string]any{"minReplicas": 1, "maxReplicas": 4}}},
	}
	m.install(broker)
	replicas := func() int32 {
		d, err := shared.client.AppsV1().Deployments(namespace).Get(t.Context(), "slow-stagemesh-stage-work", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return *d.Spec.Replicas
	}
	changes := []int32{replicas()}
	follow := func(what string, holds func(now int32) bool) {
		t.Helper()
		m.await(what, func() (bool, error) {
			now := replicas()
			if now != changes[len(changes)-1] {
				changes = append(changes, now)
			}
			return holds(now), fmt.Errorf("replicas were %d", changes)
		})
	}
	begin := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	callers.Go(func() { m.askSteadily(ctx) })
	follow("four hosts", func(now int32) bool { return now == 4 })
	grown := time.Since(begin)
	m.awaitRollout("slow-stagemesh-stage-work")
	followed := time.Now()
	follow("a minute under load", func(int32) bool { return time.Since(followed) > time.Minute })
	stop()
	callers.Wait()
	begin = time.Now()
	follow("one host", func(now int32) bool { return now == 1 })
	t.Logf("replicas were %d; four after %s of load, one %s after its end", changes, grown.Round(time.Second), time.Since(begin).Round(time.Second))
	for i := 2; i < len(changes); i++ {
		if changes[i] > changes[i-1] && changes[i-1] < changes[i-2] {
			t.Errorf("replicas grew again after they shrank: %d", changes)
		}
	}
}

// askSteadily sends thirty requests a second, however long they take. None may fail.
func (m *mesh) askSteadily(ctx context.Context) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	defer client.CloseIdleConnections()
	var requests sync.WaitGroup
	defer requests.Wait()
	tick := time.NewTicker(time.Second / 30)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		requests.Go(func() {
			request, err := http.NewRequestWithContext(context.WithoutCancel(ctx), http.MethodPost, m.gateway+"/v1/pipelines/work:infer", strings.NewReader("x"))
			if err != nil {
				m.t.Error(err)
				return
			}
			request.Header.Set("Content-Type", "text/plain")
			response, err := client.Do(request)
			if err != nil {
				m.t.Error(err)
				return
			}
			defer response.Body.Close()
			if body, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK {
				m.t.Errorf("%s %s %v", response.Status, body, err)
			}
		})
	}
}

// serveMetrics serves external metrics until the test ends, as an adapter does. The values come from the
// metrics page of a gateway.
func serveMetrics(m *mesh) {
	m.t.Helper()
	listener, err := net.Listen("tcp", nodeAddress+":0")
	if err != nil {
		m.t.Fatal(err)
	}
	certificate, err := newCertificate()
	if err != nil {
		m.t.Fatal(err)
	}
	const root = "/apis/external.metrics.k8s.io/v1beta1"
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, value any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(value) // the API server asks again
	}
	mux.HandleFunc("GET "+root, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "external.metrics.k8s.io/v1beta1", "resources": []any{}})
	})
	mux.HandleFunc("GET "+root+"/namespaces/{namespace}/{metric}", func(w http.ResponseWriter, r *http.Request) {
		selector := r.URL.Query().Get("labelSelector")
		value, err := m.metric(r.Context(), r.PathValue("metric"), selector)
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		answer(w, map[string]any{"kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": map[string]any{}, "items": []any{
			map[string]any{"metricName": r.PathValue("metric"), "metricLabels": map[string]any{}, "timestamp": time.Now().UTC().Format(time.RFC3339), "value": value},
		}})
	})
	server := &http.Server{Handler: mux, TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}}, ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.ServeTLS(listener, "", "") // it is closed
	}()
	m.t.Cleanup(func() {
		_ = server.Close() // nobody asks any more
		<-served
	})
	m.registerMetrics(int32(listener.Addr().(*net.TCPAddr).Port)) //nolint:gosec // a port fits
}

// registerMetrics registers the adapter with the API server.
func (m *mesh) registerMetrics(port int32) {
	m.t.Helper()
	ctx, name, yes := m.t.Context(), "metrics", true
	_, err := shared.client.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "https", Port: 443}}},
	}, metav1.CreateOptions{})
	if err == nil {
		portName := "https"
		_, err = shared.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{nodeAddress}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}},
			Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		m.t.Fatal(err)
	}
	var service unstructured.Unstructured
	if err := yaml.Unmarshal([]byte(`{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1beta1.external.metrics.k8s.io},
spec: {group: external.metrics.k8s.io, version: v1beta1, groupPriorityMinimum: 100, versionPriority: 100, insecureSkipTLSVerify: true,
service: {namespace: `+namespace+`, name: metrics, port: 443}}}`), &service); err != nil {
		m.t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(shared.config)
	if err == nil {
		_, err = client.Resource(schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"}).Create(ctx, &service, metav1.CreateOptions{})
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

// metric returns a metric of a gateway, with the label of a selector such as stage=work.
func (m *mesh) metric(ctx context.Context, name, selector string) (string, error) {
	key, value, _ := strings.Cut(selector, "=")
	pods, err := shared.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=gateway,app.kubernetes.io/instance=" + m.release})
	if err != nil {
		return "", err
	}
	for _, pod := range pods.Items {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s:9090/metrics", pod.Status.PodIP), nil)
		if err != nil {
			return "", err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return "", err
		}
		page, err := io.ReadAll(response.Body)
		if err := response.Body.Close(); err != nil {
			return "", err
		}
		if err != nil {
			return "", err
		}
		pattern := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + `\{[^}]*` + regexp.QuoteMeta(fmt.Sprintf("%s=%q", key, value)) + `[^}]*\} (\S+)$`)
		if found := pattern.FindSubmatch(bytes.TrimSpace(page)); found != nil {
			return string(found[1]), nil
		}
	}
	return "", fmt.Errorf("no gateway has %s with %s", name, selector)
}

// newCertificate returns a certificate that signs itself.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.ParseIP(nodeAddress)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}
