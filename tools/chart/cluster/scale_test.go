package cluster

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	m.ensureBroker()
	serveMetrics(m)
	m.values = map[string]any{
		"mesh": slowMesh, "insecure": true, "nats": map[string]any{"url": "nats://nats:4222"}, "gateway": map[string]any{"replicas": 1},
		"stages": map[string]any{"work": map[string]any{"hpa": map[string]any{"minReplicas": 1, "maxReplicas": 4}}},
	}
	m.install()
	r := m.replicasOf("slow-stagemesh-stage-work")
	begin := time.Now()
	stop := m.askSteadily(30, func(ctx context.Context, client *http.Client) error { return m.work(ctx, client, "") })
	r.follow("four hosts", func(now int32) bool { return now == 4 })
	grown := time.Since(begin)
	m.awaitRollout(r.deployment)
	r.followFor(time.Minute)
	stop()
	begin = time.Now()
	r.follow("one host", func(now int32) bool { return now == 1 })
	t.Logf("replicas were %d; four after %s of load, one %s after its end", r.seen, grown.Round(time.Second), time.Since(begin).Round(time.Second))
	if turns := r.turns(); turns > 1 {
		t.Errorf("replicas grew again after they shrank: %d", r.seen)
	}
}

// replicas are the replicas of a Deployment as they change.
type replicas struct {
	m          *mesh
	deployment string
	seen       []int32
}

func (m *mesh) replicasOf(deployment string) *replicas {
	m.t.Helper()
	r := &replicas{m: m, deployment: deployment}
	r.follow("replicas", func(int32) bool { return true })
	return r
}

// follow waits until the condition holds of the replicas.
func (r *replicas) follow(what string, holds func(now int32) bool) {
	r.m.t.Helper()
	r.m.await(what, func() (bool, error) {
		d, err := shared.client.AppsV1().Deployments(namespace).Get(r.m.t.Context(), r.deployment, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		now := *d.Spec.Replicas
		if len(r.seen) == 0 || now != r.seen[len(r.seen)-1] {
			r.seen = append(r.seen, now)
		}
		return holds(now), fmt.Errorf("replicas were %d", r.seen)
	})
}

// followFor follows the replicas for a time.
func (r *replicas) followFor(d time.Duration) {
	r.m.t.Helper()
	begin := time.Now()
	r.follow("replicas under load", func(int32) bool { return time.Since(begin) > d })
}

// turns returns how often the replicas began to shrink after they grew, or to grow after they shrank.
func (r *replicas) turns() int {
	turns := 0
	for i := 2; i < len(r.seen); i++ {
		if (r.seen[i] > r.seen[i-1]) != (r.seen[i-1] > r.seen[i-2]) {
			turns++
		}
	}
	return turns
}

// askSteadily asks so many times a second, however long it takes, until stop, which waits for the answers.
// No request may fail.
func (m *mesh) askSteadily(rate int, ask func(ctx context.Context, client *http.Client) error) (stop func()) {
	ctx, cancel := context.WithCancel(m.t.Context())
	var requests sync.WaitGroup
	requests.Go(func() {
		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
		defer client.CloseIdleConnections()
		var asked sync.WaitGroup
		defer asked.Wait()
		tick := time.NewTicker(time.Second / time.Duration(rate))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			asked.Go(func() {
				if err := ask(context.WithoutCancel(ctx), client); err != nil {
					m.t.Error(err)
				}
			})
		}
	})
	stop = func() {
		cancel()
		requests.Wait()
	}
	m.t.Cleanup(stop)
	return stop
}

// work asks the pipeline work, with an idempotency key if there is one.
func (m *mesh) work(ctx context.Context, client *http.Client, key string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, m.gateway+"/v1/pipelines/work:infer", strings.NewReader("x"))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "text/plain")
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s %w", response.Status, body, err)
	}
	return nil
}

// serveMetrics serves external metrics until the test ends, as an adapter does. The values come from the
// metrics page of a gateway.
func serveMetrics(m *mesh) {
	m.t.Helper()
	listener, err := net.Listen("tcp", nodeAddress+":0")
	if err != nil {
		m.t.Fatal(err)
	}
	issued, err := shared.authority.issue("metrics." + namespace + ".svc")
	if err != nil {
		m.t.Fatal(err)
	}
	certificate, err := tls.X509KeyPair(issued["tls.crt"], issued["tls.key"])
	if err != nil {
		m.t.Fatal(err)
	}
	const root = "/apis/" + metricsAPI
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, value any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(value) // the API server asks again
	}
	mux.HandleFunc("GET "+root, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": metricsAPI, "resources": []any{}})
	})
	mux.HandleFunc("GET "+root+"/namespaces/{namespace}/{metric}", func(w http.ResponseWriter, r *http.Request) {
		selector := r.URL.Query().Get("labelSelector")
		value, err := m.metric(r.Context(), r.PathValue("metric"), selector)
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		answer(w, map[string]any{"kind": "ExternalMetricValueList", "apiVersion": metricsAPI, "metadata": map[string]any{}, "items": []any{
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
	m.t.Cleanup(shared.registerMetrics(m.t, namespace, "metrics", listener.Addr().(*net.TCPAddr).Port))
}

// metric returns a metric of a gateway, with the label of a selector such as stage=work.
func (m *mesh) metric(ctx context.Context, name, selector string) (string, error) {
	key, value, _ := strings.Cut(selector, "=")
	pods, err := shared.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=gateway,app.kubernetes.io/instance=" + m.release})
	if err != nil {
		return "", err
	}
	for _, pod := range pods.Items {
		page, err := scrape(ctx, pod)
		if err != nil {
			return "", err
		}
		pattern := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + `\{[^}]*` + regexp.QuoteMeta(fmt.Sprintf("%s=%q", key, value)) + `[^}]*\} (\S+)$`)
		if found := pattern.FindStringSubmatch(page); found != nil {
			return found[1], nil
		}
	}
	return "", fmt.Errorf("no gateway has %s with %s", name, selector)
}

// scrape returns the metrics of a pod.
func scrape(ctx context.Context, pod corev1.Pod) (page string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s:9090/metrics", pod.Status.PodIP), nil)
	if err != nil {
		return "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return string(text), err
}
