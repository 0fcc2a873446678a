package cluster

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// node is a machine of the cluster: containerd, kubelet and kube-proxy.
type node struct {
	name, address string
	// pods is the network of its pods, groups the control group of its pods.
	pods, groups string
	// enter runs a program on the node. It is empty for the node that has the control plane and the tests.
	enter []string
}

// folder has the files of the node.
func (n *node) folder() string { return filepath.Join(folder, n.name) }

// nodeFiles are the configuration of a node, by name in its folder.
var nodeFiles = map[string]string{
	"containerd.toml": `version = 2
root = "NODE_FOLDER/containerd"
state = "NODE_FOLDER/containerd-state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "NODE_FOLDER/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + imagePause + `"
  # Lowering an OOM score takes rights that root in a container may lack.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "CNI_PLUGINS"
    conf_dir = "NODE_FOLDER/cni"
`,
	"cni/node.conflist": `{"cniVersion": "0.4.0", "name": "node", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
"ipam": {"type": "host-local", "ranges": [[{"subnet": "NODE_PODS"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "NODE_FOLDER/ipam"}}]}
`,
	"kubelet.yaml": `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: NODE_GROUPS
nodeLeaseDurationSeconds: 10
failCgroupV1: false
failSwapOn: false
clusterDNS: ["` + dnsAddress + `"]
clusterDomain: cluster.local
resolvConf: ""
containerRuntimeEndpoint: unix://NODE_FOLDER/containerd.sock
# The disk of a node is a tmpfs of the tests.
evictionHard: {memory.available: 50Mi}
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
podLogsDir: NODE_FOLDER/pods
volumePluginDir: NODE_FOLDER/volume-plugins
`,
	// Settings of connection tracking that are zero stay as they are. Pods of one bridge reach each
	// other through Services where the kernel does not filter bridges, too.
	"kube-proxy.yaml": `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: ` + kubeconfig + `}
mode: iptables
hostnameOverride: NODE_NAME
clusterCIDR: 10.244.0.0/16
iptables: {masqueradeAll: true}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`,
}

// startNode starts the programs of a node, and returns once it is ready for pods.
func (c *cluster) startNode(ctx context.Context, n *node) error {
	plugins := "/usr/lib/cni"
	if _, err := os.Stat(plugins); err != nil {
		plugins = "/opt/cni/bin"
	}
	if err := writeFiles(n.folder(), nodeFiles, []string{"CNI_PLUGINS", plugins, "NODE_FOLDER", n.folder(), "NODE_NAME", n.name, "NODE_PODS", n.pods, "NODE_GROUPS", n.groups}); err != nil {
		return err
	}
	if err := c.startOn(n, "containerd", "containerd", "--config", n.folder()+"/containerd.toml"); err != nil {
		return err
	}
	if err := c.await(ctx, "containerd answers", func() bool {
		return exec.CommandContext(ctx, "ctr", "--address", n.folder()+"/containerd.sock", "version").Run() == nil
	}); err != nil {
		return err
	}
	if err := c.loadImages(ctx, n); err != nil {
		return err
	}
	if err := c.startOn(n, "kubelet", c.programs["kubelet"], "--config="+n.folder()+"/kubelet.yaml", "--kubeconfig="+kubeconfig, "--root-dir="+n.folder()+"/kubelet",
		"--cert-dir="+n.folder()+"/kubelet-certificates", "--hostname-override="+n.name, "--node-ip="+n.address); err != nil {
		return err
	}
	if err := c.await(ctx, "the node "+n.name+" is ready", func() bool {
		found, err := c.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(found.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
	}); err != nil {
		return err
	}
	if err := c.startOn(n, "kube-proxy", c.programs["kube-proxy"], "--config="+n.folder()+"/kube-proxy.yaml"); err != nil {
		return err
	}
	return c.await(ctx, "kube-proxy is ready", func() bool {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.address+":10256/healthz", nil)
		if err != nil {
			return false
		}
		response, err := http.DefaultClient.Do(request)
		return err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusOK
	})
}

func (c *cluster) startOn(n *node, name, program string, args ...string) error {
	command := append(append(slices.Clone(n.enter), program), args...)
	return c.start(n.name+"-"+name, command[0], command[1:]...)
}

// secondGroups is the control group of the second node.
const secondGroups = "/second-node"

// addNode starts a second node until the end of the test. It is in namespaces of its own, for its network,
// processes and mounts, and routes lead from one node's pods to the other's. kill ends it as a loss of power
// does: the network first, then all processes at once.
func (c *cluster) addNode(t *testing.T) (n *node, kill func()) {
	t.Helper()
	first := exec.Command(c.programs["pause"]) // the others end with it
	first.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET}
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	pid := strconv.Itoa(first.Process.Pid)
	n = &node{name: "second", address: "10.201.0.2", pods: "10.244.1.0/24", groups: secondGroups, enter: []string{"nsenter", "--target", pid, "--mount", "--net", "--pid"}}
	kill = func() {
		_ = exec.Command("ip", "link", "delete", "second0").Run() // the second call finds none
		_ = first.Process.Kill()
		_ = first.Wait()
		c.parts = slices.DeleteFunc(c.parts, func(p *part) bool {
			isOwn := strings.HasPrefix(p.name, n.name+"-")
			if isOwn {
				<-p.ended
			}
			return isOwn
		})
	}
	t.Cleanup(func() {
		kill()
		if err := c.client.CoreV1().Nodes().Delete(context.WithoutCancel(t.Context()), n.name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	commands := []string{
		"ip link add second0 type veth peer name second1 netns " + pid, "ip address add 10.201.0.1/24 dev second0", "ip link set second0 up",
		"ip route add " + n.pods + " via " + n.address,
	}
	for _, line := range append([]string{
		"mount -t proc proc /proc", "mount -t tmpfs tmpfs /var/lib/kubelet",
		"ip link set lo up", "ip address add " + n.address + "/24 dev second1", "ip link set second1 up", "ip route add default via 10.201.0.1",
	}, settingMounts()...) {
		commands = append(commands, strings.Join(n.enter, " ")+" "+line)
	}
	if err := runLines(commands...); err != nil {
		t.Fatal(err)
	}
	// Kubelet makes control groups of pods in one that exists, in each hierarchy.
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/kubepods")
	if err != nil {
		t.Fatal(err)
	}
	for _, pods := range append(hierarchies, "/sys/fs/cgroup/kubepods") {
		if _, err := os.Stat(pods); err == nil {
			if err := os.MkdirAll(filepath.Dir(pods)+secondGroups, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.startNode(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	return n, kill
}
