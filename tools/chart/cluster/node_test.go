package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	containerdSocket = folder + "/containerd.sock"
	containerdState  = folder + "/containerd-state"
	podLogs          = folder + "/pods"
	kubeconfig       = folder + "/kubeconfig"
)

// node is a running node with its control plane.
type node struct {
	// programs are paths by the programs' names.
	programs map[string]string
	parts    []*part
	config   *rest.Config
	client   *kubernetes.Clientset
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
	"resolv.conf": "",
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
resolvConf: ` + folder + `/resolv.conf
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
	if err := errors.Join(writeFiles(), writeKey(folder+"/accounts.key")); err != nil {
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
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+folder+"/accounts.key", "--service-account-signing-key-file="+folder+"/accounts.key"); err != nil {
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
		{"kube-controller-manager", "--kubeconfig=" + kubeconfig, "--leader-elect=false", "--service-account-private-key-file=" + folder + "/accounts.key",
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

// writeKey writes the key that signs the tokens of service accounts.
func writeKey(path string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
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
