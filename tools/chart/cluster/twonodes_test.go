package cluster

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// durableMesh keeps its requests on three brokers.
const durableMesh = `mesh: durable
nats: {url: "nats://brokers:4222"}
registry: {nats: {replicas: 3}}
results: {replicas: 3}
idempotency: {replicas: 3}
dead_letters: {replicas: 3}
stages:
  work: {runner: {sleep: {base: 50ms, concurrency: 2}}, queue: {replicas: 3}}
pipelines:
  work: {timeout: 60s, durability: file, steps: [{name: work, stage: work}]}
`

// unreachable lets Kubernetes replace pods two seconds after their node is unreachable.
var unreachable = map[string]any{"tolerations": []any{
	map[string]any{"key": corev1.TaintNodeUnreachable, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2},
}}

// Two meshes are spread over two nodes, and so are the three brokers of one of them. A node dies under load.
// Gateways on the other one fail no request, and through the Service only connections to the dead gateway fail,
// until Kubernetes notices. Pods come back on the other node.
func TestNodeDies(t *testing.T) {
	m := &mesh{t: t, release: "spread"}
	m.ensureBroker() // on the first node, as DNS is
	if err := shared.createFile(t.Context(), "testdata/brokers.yaml"); err != nil {
		t.Fatal(err)
	}
	m.awaitBrokers(2)
	second, kill := shared.addNode(t)
	sets := shared.client.AppsV1().StatefulSets(namespace)
	if _, err := sets.Patch(t.Context(), "brokers", types.MergePatchType, []byte(`{"spec": {"replicas": 3}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	m.awaitBrokers(3)
	m.useDigits()
	two := map[string]any{"replicas": 2}
	m.values["stages"], m.values["defaults"] = map[string]any{"decode": two, "classify": two, "label": two}, unreachable
	m.install()
	durable := &mesh{t: t, release: "durable", values: map[string]any{
		"mesh": durableMesh, "insecure": true, "nats": map[string]any{"url": "nats://brokers:4222"}, "stages": map[string]any{"work": two}, "defaults": unreachable,
	}}
	durable.install()
	other := m.checkSpread("gateway")
	for _, part := range []string{"stage-decode", "stage-classify", "stage-label"} {
		m.checkSpread(part)
	}
	durable.checkSpread("stage-work")
	durable.gateway = durable.checkSpread("gateway")
	if broker, err := shared.client.CoreV1().Pods(namespace).Get(t.Context(), "brokers-2", metav1.GetOptions{}); err != nil || broker.Spec.NodeName != second.name {
		t.Fatalf("the third broker is on the node %q: %v", broker.Spec.NodeName, err)
	}
	m.underLoad(func() {})
	for _, pod := range m.pods("") {
		m.checkTraffic(pod)
	}

	service, survivor := startLoad(t, m.gateway), startLoad(t, other)
	var asked, refused atomic.Int64
	stop := durable.askSteadily(10, func(ctx context.Context, client *http.Client) error {
		return durable.askDurably(ctx, client, fmt.Sprintf("key-%d", asked.Add(1)), &refused)
	})
	m.awaitMore(service, 100)
	begin := time.Now()
	kill()
	m.await("Kubernetes notices", func() (bool, error) {
		node, err := shared.client.CoreV1().Nodes().Get(t.Context(), second.name, metav1.GetOptions{})
		return err == nil && len(node.Spec.Taints) > 0, err
	})
	noticed := time.Now()
	for _, release := range []*mesh{m, durable} {
		m.await("the pods are on the other node", func() (bool, error) {
			for _, pod := range release.pods("") {
				if pod.Spec.NodeName == second.name {
					return false, fmt.Errorf("%s is not", pod.Name)
				}
			}
			return true, nil
		})
		for _, pod := range release.pods("") {
			release.awaitRollout(release.release + "-stagemesh-" + pod.Labels["app.kubernetes.io/component"])
		}
	}
	back := time.Now()
	// A StatefulSet replaces a pod on a dead node once somebody who knows that it is dead deletes it.
	now := int64(0)
	if err := shared.client.CoreV1().Pods(namespace).DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + second.name}); err != nil {
		t.Fatal(err)
	}
	m.awaitBrokers(3)
	m.awaitMore(service, 100)
	stop()
	service.end()
	survivor.end()
	t.Logf("Kubernetes noticed after %s, all pods were back after %s", noticed.Sub(begin).Round(time.Second), back.Sub(begin).Round(time.Second))
	t.Logf("through the Service: %d answers, %d failed, the slowest took %s", service.right, len(service.wrong), service.slowest.Round(time.Millisecond))
	t.Logf("through the other gateway: %d answers, %d failed, the slowest took %s", survivor.right, len(survivor.wrong), survivor.slowest.Round(time.Millisecond))
	t.Logf("durable requests: %d; the gateway refused %d attempts with BROKER_UNAVAILABLE, which were retried", asked.Load(), refused.Load())
	for _, wrong := range survivor.wrong {
		t.Errorf("through the other gateway: %s", wrong)
	}
	if i := slices.IndexFunc(service.failedAt, func(at time.Time) bool { return at.Before(begin.Add(-callerPatience)) }); i >= 0 {
		t.Errorf("through the Service, before the node died: %s", service.wrong[i])
	}
	if n := len(service.wrong); n > 40 {
		t.Errorf("%d requests through the Service failed", n)
	}
	for _, wrong := range service.wrong {
		if !strings.Contains(wrong, "no route to host") && !strings.Contains(wrong, "Client.Timeout") {
			t.Errorf("through the Service: %s", wrong)
		}
	}
	// Conntrack keeps an unanswered connection for two minutes. A new connection with the same source port follows
	// it to the dead gateway.
	late := slices.DeleteFunc(service.failedAt, func(at time.Time) bool { return at.Before(noticed.Add(5 * time.Second)) })
	if len(late) > 5 {
		t.Errorf("%d requests through the Service failed that began 5s or more after Kubernetes noticed", len(late))
	}
}

// checkSpread fails the test unless a part has a pod on each node. It returns the URL of the pod on the first node.
func (m *mesh) checkSpread(part string) string {
	m.t.Helper()
	on := map[string]string{}
	for _, pod := range m.pods(part) {
		on[pod.Spec.NodeName] = "http://" + pod.Status.PodIP + ":8080"
	}
	if len(on) != 2 {
		m.t.Fatalf("the pods of %s-%s are on the nodes %v", m.release, part, on)
	}
	return on["first"]
}

// checkTraffic fails the test unless a pod's metrics count a request.
func (m *mesh) checkTraffic(pod corev1.Pod) {
	m.t.Helper()
	page, err := scrape(m.t.Context(), pod)
	if err != nil {
		m.t.Fatal(err)
	}
	for line := range strings.Lines(page) {
		name, _, _ := strings.Cut(line, "{")
		if (name == "stagemesh_stage_items_total" || name == "stagemesh_gateway_requests_total") && !strings.HasSuffix(line, " 0\n") {
			return
		}
	}
	m.t.Errorf("no request went through %s on the node %s", pod.Name, pod.Spec.NodeName)
}

// awaitBrokers waits until so many brokers of the cluster are ready.
func (m *mesh) awaitBrokers(want int32) {
	m.t.Helper()
	m.await(fmt.Sprintf("%d brokers are ready", want), func() (bool, error) {
		set, err := shared.client.AppsV1().StatefulSets(namespace).Get(m.t.Context(), "brokers", metav1.GetOptions{})
		return err == nil && set.Status.ReadyReplicas == want, err
	})
}

// askDurably asks until the gateway takes the request, which it refuses while it is disconnected from the brokers.
func (m *mesh) askDurably(ctx context.Context, client *http.Client, key string, refused *atomic.Int64) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := m.work(ctx, client, key)
		if err == nil || !strings.Contains(err.Error(), "BROKER_UNAVAILABLE") {
			return err
		}
		refused.Add(1)
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}
