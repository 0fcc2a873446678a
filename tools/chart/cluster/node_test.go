package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	containerdSocket = folder + "/containerd.sock"
	containerdState  = folder + "/containerd-state"
	podLogs          = folder + "/pods"
	kubeconfig       = folder + "/kubeconfig"
	// accounts has the key that signs the tokens of service accounts, frontProxy the certificate of the API
	// server as a client of others.
	accounts   = folder + "/accounts"
	frontProxy = folder + "/front-proxy"
)

// node is a running node with its control plane.
type node struct {
	// programs are paths by the programs' names.
	programs map[string]string
	parts    []*part
	config   *rest.Config
	client   *kubernetes.Clientset
	// authority signs the certificates of all servers but the API server.
	authority *authority
	// started is how long the start took.
	started time.Duration
}

// part is a program of the node.
type part struct {
	name, log string
	ended     chan struct{}
	err       error
}

// files are the configuration of the node, by name in its folder.
var files = map[string]string{
	"tokens.csv": `token,admin,admin,"system:masters"` + "\n",
	// The API server makes a certificate of its own, in this network that nobody else reaches.
	"kubeconfig": `{apiVersion: v1, kind: Config, current-context: node,
clusters: [{name: node, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}],
users: [{name: admin, user: {token: token}}],
contexts: [{name: node, context: {cluster: node, user: admin}}]}
`,
	"containerd.toml": `version = 2
root = "` + folder + `/containerd"
state = "` + containerdState + `"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "` + containerdSocket + `"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + imagePause + `"
  # Lowering an OOM score takes rights that root in a container may lack.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "CNI_PLUGINS"
    conf_dir = "` + folder + `/cni"
`,
	"cni/node.conflist": `{"cniVersion": "0.4.0", "name": "node", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "` + folder + `/ipam"}}]}
`,
	"kubelet.yaml": `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://` + containerdSocket + `
# The disk of the node is a tmpfs of the tests.
evictionHard: {memory.available: 50Mi}
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
podLogsDir: ` + podLogs + `
volumePluginDir: ` + folder + `/volume-plugins
`,
	// Settings of connection tracking that are zero stay as they are. Pods of one bridge reach each
	// other through Services where the kernel does not filter bridges, too.
	"kube-proxy.yaml": `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: ` + kubeconfig + `}
mode: iptables
hostnameOverride: node
clusterCIDR: 10.244.0.0/16
iptables: {masqueradeAll: true}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`,
}

// startNode starts the node, and returns once it is ready for pods. With an error it returns what runs.
func startNode(ctx context.Context) (n *node, err error) {
	begin := time.Now()
	n = &node{programs: map[string]string{}}
	for path := range strings.Lines(os.Getenv(programsVariable)) {
		path = strings.TrimSpace(path)
		n.programs[filepath.Base(path)] = path
	}
	if n.authority, err = newAuthority(); err != nil {
		return n, err
	}
	if err := errors.Join(writeFiles(), n.authority.write(accounts, "accounts"), n.authority.write(frontProxy, "front-proxy")); err != nil {
		return n, err
	}
	if err := n.start("containerd", "containerd", "--config", folder+"/containerd.toml"); err != nil {
		return n, err
	}
	if err := n.start("etcd", n.programs["server"], "--data-dir", folder+"/etcd", "--unsafe-no-fsync", "--log-level", "warn"); err != nil {
		return n, err
	}
	if err := n.start("kube-apiserver", n.programs["kube-apiserver"],
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--advertise-address="+nodeAddress, "--cert-dir="+folder+"/apiserver",
		"--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC", "--token-auth-file="+folder+"/tokens.csv",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+accounts+"/tls.key", "--service-account-signing-key-file="+accounts+"/tls.key",
		// The API server passes requests on to servers of more APIs, such as KEDA's.
		"--requestheader-client-ca-file="+frontProxy+"/ca.crt", "--requestheader-allowed-names=front-proxy", "--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+frontProxy+"/tls.crt", "--proxy-client-key-file="+frontProxy+"/tls.key"); err != nil {
		return n, err
	}
	if n.config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return n, err
	}
	n.config.QPS, n.config.Burst = 100, 200
	if n.client, err = kubernetes.NewForConfig(n.config); err != nil {
		return n, err
	}
	if err := n.await(ctx, "the API server is ready", func() bool {
		return n.client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil
	}); err != nil {
		return n, err
	}
	for _, p := range [][]string{
		{"kube-controller-manager", "--kubeconfig=" + kubeconfig, "--leader-elect=false", "--service-account-private-key-file=" + accounts + "/tls.key",
			"--horizontal-pod-autoscaler-sync-period=2s"},
		{"kube-scheduler", "--kubeconfig=" + kubeconfig, "--leader-elect=false"},
	} {
		if err := n.start(p[0], n.programs[p[0]], p[1:]...); err != nil {
			return n, err
		}
	}
	if err := n.await(ctx, "containerd answers", func() bool {
		return exec.CommandContext(ctx, "ctr", "--address", containerdSocket, "version").Run() == nil
	}); err != nil {
		return n, err
	}
	if err := n.loadImages(ctx); err != nil {
		return n, err
	}
	if err := n.start("kubelet", n.programs["kubelet"], "--config="+folder+"/kubelet.yaml", "--kubeconfig="+kubeconfig, "--root-dir="+folder+"/kubelet",
		"--cert-dir="+folder+"/kubelet-certificates", "--hostname-override=node", "--node-ip="+nodeAddress); err != nil {
		return n, err
	}
	if err := n.await(ctx, "the node is ready", func() bool {
		found, err := n.client.CoreV1().Nodes().Get(ctx, "node", metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(found.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
	}); err != nil {
		return n, err
	}
	if err := n.start("kube-proxy", n.programs["kube-proxy"], "--config="+folder+"/kube-proxy.yaml"); err != nil {
		return n, err
	}
	err = n.await(ctx, "kube-proxy is ready", func() bool {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10256/healthz", nil)
		if err != nil {
			return false
		}
		response, err := http.DefaultClient.Do(request)
		return err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusOK
	})
	n.started = time.Since(begin)
	return n, err
}

// writeFiles writes the configuration.
func writeFiles() error {
	plugins := "/usr/lib/cni"
	if _, err := os.Stat(plugins); err != nil {
		plugins = "/opt/cni/bin"
	}
	for name, text := range files {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "CNI_PLUGINS", plugins)), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// start starts a program, whose output is a file.
func (n *node) start(name, program string, args ...string) error {
	p := &part{name: name, log: filepath.Join(folder, name+".log"), ended: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return err
	}
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = folder, log, log
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), log.Close())
	}
	n.parts = append(n.parts, p)
	go func() {
		defer close(p.ended)
		p.err = errors.Join(cmd.Wait(), log.Close())
	}()
	return nil
}

// await waits until the condition holds. It fails after two minutes, or when a program ends.
func (n *node) await(ctx context.Context, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for !holds() {
		for _, p := range n.parts {
			select {
			case <-p.ended:
				return fmt.Errorf("%s: %s ended: %w", what, p.name, p.err)
			default:
			}
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: not within two minutes", what)
		}
	}
	return nil
}

// end prints the ends of logs if the tests failed. The processes end with their namespace.
func (n *node) end(failed bool) {
	if !failed {
		return
	}
	logs, _ := filepath.Glob(podLogs + "/*/*/*.log")
	for _, p := range n.parts {
		logs = append(logs, p.log)
	}
	for _, path := range logs {
		text, err := os.ReadFile(path)
		fmt.Fprintf(os.Stderr, "== %s %v\n%s\n", strings.TrimPrefix(path, folder+"/"), err, text[max(0, len(text)-3000):])
	}
}

// metricsAPI is the API of external metrics, which one server has at a time.
const metricsAPI = "external.metrics.k8s.io/v1beta1"

// registerMetrics registers a server of external metrics, which runs on the node, with the API server.
func (n *node) registerMetrics(t *testing.T, in, name string, port int) (remove func()) {
	t.Helper()
	group, version, _ := strings.Cut(metricsAPI, "/")
	err := n.create(t.Context(), strings.NewReader(fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {namespace: %[1]s, name: %[2]s}
spec: {ports: [{name: https, port: 443}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: %[1]s, name: %[2]s, labels: {kubernetes.io/service-name: %[2]s}}
addressType: IPv4
endpoints: [{addresses: [%[3]s], conditions: {ready: true}}]
ports: [{name: https, port: %[4]d}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: %[6]s.%[5]s}
spec:
  {group: %[5]s, version: %[6]s, groupPriorityMinimum: 100, versionPriority: 100, caBundle: %[7]s, service: {namespace: %[1]s, name: %[2]s, port: 443}}
`, in, name, nodeAddress, port, group, version, base64.StdEncoding.EncodeToString(n.authority.text))))
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		client, err := dynamic.NewForConfig(n.config)
		if err == nil {
			services := client.Resource(schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"})
			err = services.Delete(context.WithoutCancel(t.Context()), version+"."+group, metav1.DeleteOptions{})
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// create creates the objects of a manifest.
func (n *node) create(ctx context.Context, manifest io.Reader) error {
	client, err := dynamic.NewForConfig(n.config)
	if err != nil {
		return err
	}
	for documents := yaml.NewYAMLOrJSONDecoder(manifest, 4096); ; {
		var object unstructured.Unstructured
		switch err := documents.Decode(&object); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case len(object.Object) == 0:
			continue
		}
		resource, _ := meta.UnsafeGuessKindToResource(object.GroupVersionKind())
		if _, err := client.Resource(resource).Namespace(object.GetNamespace()).Create(ctx, &object, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
}

// authority signs certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	text        []byte
	issued      int64
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key, certificate: &x509.Certificate{Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}}
	a.text, err = a.sign(a.certificate, key)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(a.text)
	a.certificate, err = x509.ParseCertificate(block.Bytes)
	return a, err
}

// issue returns a certificate for a server with these names and addresses, and for a client with the first name,
// by the names of files that Kubernetes uses.
func (a *authority) issue(names ...string) (map[string][]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: names[0]}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	certificate, err := a.sign(template, key)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	return map[string][]byte{"ca.crt": a.text, "tls.crt": certificate, "tls.key": pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})}, err
}

func (a *authority) sign(template *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
	a.issued++
	template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(a.issued), time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), err
}

// write writes a certificate and its key into a folder.
func (a *authority) write(folder string, names ...string) error {
	issued, err := a.issue(names...)
	if err != nil {
		return err
	}
	err = os.MkdirAll(folder, 0o755)
	for name, data := range issued {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), data, 0o600))
	}
	return err
}
