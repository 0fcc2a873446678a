package cluster

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
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
