package cluster

import (
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/cli"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// namespace has the mesh and its broker, and enforces the level restricted of the pod security standards.
const namespace = "ml"

// patience bounds how long a test waits for the cluster.
const patience = 3 * time.Minute

// mesh is a release of the chart.
type mesh struct {
	t       *testing.T
	release string
	helm    *action.Configuration
	values  map[string]any
	// gateway is where callers send requests: the Service, unless a test replaces it.
	gateway string
}

// The subtests share one release, and follow each other.
func TestChartRunsTheDigits(t *testing.T) {
	t.Logf("the cluster was ready after %s", shared.started.Round(100*time.Millisecond))
	m := &mesh{t: t, release: "digits"}
	m.ensureBroker()
	before := m.objects()
	m.useDigits()
	m.install()
	for _, row := range []struct {
		promise string
		test    func(m *mesh)
	}{
		{"ServiceAnswers", func(m *mesh) { m.answers(3) }},
		{"PodsAreRestricted", (*mesh).podsAreRestricted},
		{"UpgradeFailsNoRequest", (*mesh).upgrade},
		{"ChangedMeshFileReplacesPods", (*mesh).changeMesh},
		{"KilledHostFailsNoRequest", (*mesh).killHost},
		{"DeletedPodsFailNoRequest", (*mesh).deletePods},
		{"EvictionKeepsToTheBudget", (*mesh).evict},
		{"UninstallLeavesNothing", func(m *mesh) { m.uninstall(before) }},
	} {
		t.Run(row.promise, func(t *testing.T) {
			within := *m
			within.t = t
			row.test(&within)
		})
	}
}

// useDigits takes the values of the digits example, with its files.
func (m *mesh) useDigits() {
	m.t.Helper()
	if err := yaml.Unmarshal(m.read("deploy/helm/values/digits.yaml"), &m.values); err != nil {
		m.t.Fatal(err)
	}
	m.values["mesh"] = string(m.read("examples/digits/mesh.yaml"))
	m.values["binaryFiles"] = map[string]any{"digits.onnx": base64.StdEncoding.EncodeToString(m.read("examples/digits/digits.onnx"))}
}

// ensureBroker makes the namespace and starts NATS in it, with the configuration of the local stack, unless
// a test before did.
func (m *mesh) ensureBroker() {
	m.t.Helper()
	client, ctx, options := shared.client, m.t.Context(), metav1.CreateOptions{}
	if _, err := client.CoreV1().Services(namespace).Get(ctx, "nats", metav1.GetOptions{}); err == nil {
		return
	}
	var objects struct {
		Namespace  corev1.Namespace
		ConfigMap  corev1.ConfigMap
		Service    corev1.Service
		Deployment appsv1.Deployment
	}
	if err := yaml.UnmarshalStrict(m.read("tools/chart/cluster/testdata/nats.yaml"), &objects); err != nil {
		m.t.Fatal(err)
	}
	objects.ConfigMap.Data = map[string]string{"nats.conf": string(m.read("deploy/nats/nats.conf"))}
	objects.Deployment.Spec.Template.Spec.Containers[0].Image = imageNATS
	_, err := client.CoreV1().Namespaces().Create(ctx, &objects.Namespace, options)
	if err == nil {
		_, err = client.CoreV1().ConfigMaps(namespace).Create(ctx, &objects.ConfigMap, options)
	}
	if err == nil {
		_, err = client.AppsV1().Deployments(namespace).Create(ctx, &objects.Deployment, options)
	}
	if err == nil {
		_, err = client.CoreV1().Services(namespace).Create(ctx, &objects.Service, options)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	m.awaitRollout("nats")
}

func (m *mesh) read(path string) []byte {
	m.t.Helper()
	data, err := os.ReadFile(filepath.Join(repository, path))
	if err != nil {
		m.t.Fatal(err)
	}
	return data
}

// install installs the chart with the values, and the images of this node.
func (m *mesh) install() {
	m.t.Helper()
	maps.Copy(m.values, map[string]any{
		"image": map[string]any{"repository": imageStagemesh, "tag": firstTag, "pullPolicy": "Never"},
	})
	// A node of two cores has room for all pods, and for new ones beside them.
	defaults := map[string]any{"resources": map[string]any{"requests": map[string]any{"cpu": "50m", "memory": "64Mi"}}}
	own, _ := m.values["defaults"].(map[string]any)
	maps.Copy(defaults, own)
	m.values["defaults"] = defaults
	settings := cli.New()
	settings.KubeConfig = kubeconfig
	settings.SetNamespace(namespace)
	m.helm = &action.Configuration{}
	if err := m.helm.Init(settings.RESTClientGetter(), namespace, "secret", func(string, ...any) {}); err != nil {
		m.t.Fatal(err)
	}
	chart, err := loader.Load(filepath.Join(repository, "deploy/helm/stagemesh"))
	if err != nil {
		m.t.Fatal(err)
	}
	begin := time.Now()
	install := action.NewInstall(m.helm)
	install.ReleaseName, install.Namespace, install.Wait, install.Timeout = m.release, namespace, true, patience
	release, err := install.RunWithContext(m.t.Context(), chart, m.values)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Logf("helm install --wait took %s", time.Since(begin).Round(100*time.Millisecond))
	if !strings.Contains(release.Info.Notes, "service/"+m.release+"-stagemesh") {
		m.t.Errorf("the notes are\n%s", release.Info.Notes)
	}
	address := m.release + "-stagemesh:8080"
	m.gateway = "http://" + address
	// Helm waits for the pods, and kube-proxy writes the rules of a new Service a moment after them.
	m.await("the Service leads to the gateways", func() (bool, error) {
		connection, err := (&net.Dialer{Timeout: time.Second}).DialContext(m.t.Context(), "tcp", address)
		if err != nil {
			return false, err
		}
		return true, connection.Close()
	})
}

// change upgrades the release with changed values, and waits until the old pods have ended.
func (m *mesh) change(values map[string]any) {
	m.t.Helper()
	maps.Copy(m.values, values)
	chart, err := loader.Load(filepath.Join(repository, "deploy/helm/stagemesh"))
	if err != nil {
		m.t.Fatal(err)
	}
	old := m.pods("")
	upgrade := action.NewUpgrade(m.helm)
	upgrade.Namespace, upgrade.Wait, upgrade.Timeout = namespace, true, patience
	if _, err := upgrade.RunWithContext(m.t.Context(), m.release, chart, m.values); err != nil {
		m.t.Fatal(err)
	}
	m.awaitGone(old...)
}

// answers asks for all images once; each answer has so many labels.
func (m *mesh) answers(labels int) {
	images := readImages(m.t)
	client, disconnect := newClient(false)
	defer disconnect()
	for _, image := range images {
		if got, err := image.ask(m.t.Context(), client, m.gateway); err != nil || got.labels != labels {
			m.t.Errorf("%s: %d labels, want %d: %v", image.name, got.labels, labels, err)
		}
	}
}

func (m *mesh) podsAreRestricted() {
	privileged := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "privileged"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "pause", Image: imagePause}}},
	}
	if _, err := shared.client.CoreV1().Pods(namespace).Create(m.t.Context(), privileged, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		m.t.Errorf("a pod that is not restricted: %v", err)
	}
	for _, pod := range m.pods("") {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.processOf(pod)))
		if err != nil {
			m.t.Fatal(err)
		}
		for _, want := range []string{"\nUid:\t65532\t65532\t65532\t65532\n", "\nCapEff:\t0000000000000000\n", "\nCapBnd:\t0000000000000000\n", "\nNoNewPrivs:\t1\n", "\nSeccomp:\t2\n"} {
			if !strings.Contains(string(status), want) {
				m.t.Errorf("%s: its process has not %q", pod.Name, want)
			}
		}
	}
}

// upgrade replaces the image of gateways and stages under load.
func (m *mesh) upgrade() {
	m.underLoad(func() {
		m.change(map[string]any{"image": map[string]any{"repository": imageStagemesh, "tag": secondTag, "pullPolicy": "Never"}})
	})
	for _, pod := range m.pods("") {
		if image := pod.Spec.Containers[0].Image; image != imageStagemesh+":"+secondTag {
			m.t.Errorf("%s has the image %s", pod.Name, image)
		}
	}
}

// changeMesh changes a parameter of a stage under load.
func (m *mesh) changeMesh() {
	changed := strings.Replace(m.values["mesh"].(string), "top_k: {k: 3,", "top_k: {k: 2,", 1)
	m.underLoad(func() { m.change(map[string]any{"mesh": changed}) })
	m.answers(2)
}

// killHost kills the process of a host under load. Kubelet starts it again in the same pod.
func (m *mesh) killHost() {
	pod := m.pods("stage-classify")[0]
	m.underLoad(func() {
		if err := syscall.Kill(m.processOf(pod), syscall.SIGKILL); err != nil {
			m.t.Fatal(err)
		}
		m.await("the container runs again", func() (bool, error) {
			now, err := shared.client.CoreV1().Pods(namespace).Get(m.t.Context(), pod.Name, metav1.GetOptions{})
			if err != nil {
				return false, err
			}
			container := now.Status.ContainerStatuses[0]
			return container.RestartCount == 1 && container.Ready, nil
		})
	})
}

// deletePods deletes a gateway and a host, and then a host at once, under load.
func (m *mesh) deletePods() {
	now := int64(0)
	m.underLoad(func() {
		for _, row := range []struct {
			component string
			grace     *int64
		}{{"gateway", nil}, {"stage-classify", nil}, {"stage-classify", &now}} {
			pod := m.pods(row.component)[0]
			if err := shared.client.CoreV1().Pods(namespace).Delete(m.t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: row.grace}); err != nil {
				m.t.Fatal(err)
			}
			m.awaitGone(pod)
			m.awaitRollout(m.release + "-stagemesh-" + row.component)
		}
	})
}

// evict evicts both gateways under load, as a node's drain does. The budget allows one at a time.
func (m *mesh) evict() {
	m.await("the budget allows an eviction", func() (bool, error) {
		budget, err := shared.client.PolicyV1().PodDisruptionBudgets(namespace).Get(m.t.Context(), m.release+"-stagemesh-gateway", metav1.GetOptions{})
		return err == nil && budget.Status.DisruptionsAllowed == 1, err
	})
	evict := func(pod corev1.Pod) error {
		return shared.client.PolicyV1().Evictions(namespace).Evict(m.t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: namespace}})
	}
	gateways := m.pods("gateway")
	m.underLoad(func() {
		if err := evict(gateways[0]); err != nil {
			m.t.Fatal(err)
		}
		if err := evict(gateways[1]); !apierrors.IsTooManyRequests(err) {
			m.t.Errorf("a second eviction at once: %v", err)
		}
		m.await("the budget allows the second eviction", func() (bool, error) {
			err := evict(gateways[1])
			if apierrors.IsTooManyRequests(err) {
				return false, nil
			}
			return err == nil, err
		})
		m.awaitGone(gateways...)
		m.awaitRollout(m.release + "-stagemesh-gateway")
	})
}

// uninstall removes the release. Nothing stays in the namespace that was not there before, and no process.
func (m *mesh) uninstall(before []string) {
	pods := m.pods("")
	var processes []int
	for _, pod := range pods {
		// A scaler may have added a pod just now.
		if containers := pod.Status.ContainerStatuses; len(containers) > 0 && containers[0].ContainerID != "" {
			processes = append(processes, m.processOf(pod))
		}
	}
	if len(processes) == 0 {
		m.t.Error("no pod runs")
	}
	remove := action.NewUninstall(m.helm)
	remove.Wait, remove.Timeout = true, patience
	if _, err := remove.Run(m.release); err != nil {
		m.t.Fatal(err)
	}
	m.awaitGone(pods...)
	m.await("nothing is left", func() (bool, error) {
		left := slices.DeleteFunc(m.objects(), func(object string) bool { return slices.Contains(before, object) })
		return len(left) == 0, fmt.Errorf("left are %q", left)
	})
	for _, pid := range processes {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			m.t.Errorf("process %d is left", pid)
		}
	}
}

// underLoad runs a change while callers ask, from before it until a moment after it. No request may fail.
func (m *mesh) underLoad(change func()) {
	m.t.Helper()
	l := startLoad(m.t, m.gateway)
	m.awaitMore(l, 100)
	begin := time.Now()
	change()
	took := time.Since(begin)
	m.awaitMore(l, 100)
	l.end()
	m.t.Logf("%d answers, %d failed requests, the slowest took %s; the change took %s", l.right, len(l.wrong), l.slowest.Round(time.Millisecond), took.Round(100*time.Millisecond))
	if len(l.wrong) > 0 {
		m.t.Errorf("%d requests failed, the first ones by\n%s", len(l.wrong), strings.Join(l.wrong[:min(5, len(l.wrong))], "\n"))
	}
}

// pods returns the pods of a component that do not end, or of the whole release.
func (m *mesh) pods(component string) []corev1.Pod {
	m.t.Helper()
	selector := "app.kubernetes.io/instance=" + m.release
	if component != "" {
		selector += ",app.kubernetes.io/component=" + component
	}
	list, err := shared.client.CoreV1().Pods(namespace).List(m.t.Context(), metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		m.t.Fatal(err)
	}
	pods := slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil })
	if len(pods) == 0 {
		m.t.Fatalf("no pod has %s", selector)
	}
	return pods
}

// processOf returns the first process of a pod's container.
func (m *mesh) processOf(pod corev1.Pod) int {
	m.t.Helper()
	now, err := shared.client.CoreV1().Pods(namespace).Get(m.t.Context(), pod.Name, metav1.GetOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	id := strings.TrimPrefix(now.Status.ContainerStatuses[0].ContainerID, "containerd://")
	text, err := os.ReadFile(filepath.Join(folder, now.Spec.NodeName, "containerd-state/io.containerd.runtime.v2.task/k8s.io", id, "init.pid"))
	if err != nil {
		m.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// awaitGone waits until the pods do not exist.
func (m *mesh) awaitGone(pods ...corev1.Pod) {
	m.t.Helper()
	for _, pod := range pods {
		m.await(pod.Name+" has ended", func() (bool, error) {
			now, err := shared.client.CoreV1().Pods(namespace).Get(m.t.Context(), pod.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return err == nil && now.UID != pod.UID, err
		})
	}
}

// awaitRollout waits until all replicas of a Deployment are available.
func (m *mesh) awaitRollout(name string) {
	m.t.Helper()
	m.await(name+" is available", func() (bool, error) {
		d, err := shared.client.AppsV1().Deployments(namespace).Get(m.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		s := d.Status
		return s.ObservedGeneration == d.Generation && s.Replicas == *d.Spec.Replicas && s.UpdatedReplicas == s.Replicas && s.AvailableReplicas == s.Replicas, nil
	})
}

func (m *mesh) await(what string, holds func() (bool, error)) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for {
		ok, err := holds()
		if ok {
			return
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			m.t.Fatalf("%s: not within %s: %v", what, patience, err)
		}
	}
}

// objects returns the objects of the namespace by resource and name, without events.
func (m *mesh) objects() []string {
	m.t.Helper()
	client, err := dynamic.NewForConfig(shared.config)
	if err != nil {
		m.t.Fatal(err)
	}
	lists, err := shared.client.ServerPreferredNamespacedResources()
	if err != nil {
		m.t.Fatal(err)
	}
	kinds, err := discovery.GroupVersionResources(discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "create"}}, lists))
	if err != nil {
		m.t.Fatal(err)
	}
	var out []string
	for kind := range kinds {
		if kind.Resource == "events" {
			continue
		}
		list, err := client.Resource(kind).Namespace(namespace).List(m.t.Context(), metav1.ListOptions{})
		if apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) {
			continue
		}
		if err != nil {
			m.t.Fatalf("%s: %v", kind.Resource, err)
		}
		for _, object := range list.Items {
			out = append(out, kind.Resource+" "+object.GetName())
		}
	}
	slices.Sort(out)
	return out
}
