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
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
	kubeconfig = folder + "/kubeconfig"
	// accounts has the key that signs the tokens of service accounts, frontProxy the certificate of the API
	// server as a client of others.
	accounts   = folder + "/accounts"
	frontProxy = folder + "/front-proxy"
	// dnsAddress is the address of the Service of CoreDNS.
	dnsAddress = "10.96.0.10"
)

// cluster is a control plane with its nodes.
type cluster struct {
	// programs are paths by the programs' names.
	programs map[string]string
	parts    []*part
	config   *rest.Config
	client   *kubernetes.Clientset
	// authority signs the certificates of all servers but the API server.
	authority *authority
	// started is how long the start took, with one node.
	started time.Duration
}

// part is a program of the cluster.
type part struct {
	name  string
	ended chan struct{}
	err   error
}

// files are the configuration of the cluster, by name in its folder.
var files = map[string]string{
	"tokens.csv": `token,admin,admin,"system:masters"` + "\n",
	// The API server makes a certificate of its own, in this network that nobody else reaches.
	"kubeconfig": `{apiVersion: v1, kind: Config, current-context: node,
clusters: [{name: node, cluster: {server: "https://` + nodeAddress + `:6443", insecure-skip-tls-verify: true}}],
users: [{name: admin, user: {token: token}}],
contexts: [{name: node, context: {cluster: node, user: admin}}]}
`,
}

// startCluster starts the control plane and a node, and returns once they are ready for pods. With an error
// it returns what runs.
func startCluster(ctx context.Context) (c *cluster, err error) {
	begin := time.Now()
	c = &cluster{programs: map[string]string{}}
	for path := range strings.Lines(os.Getenv(programsVariable)) {
		path = strings.TrimSpace(path)
		c.programs[filepath.Base(path)] = path
	}
	if c.authority, err = newAuthority(); err != nil {
		return c, err
	}
	if err := errors.Join(writeFiles(folder, files, nil), c.authority.write(accounts, "accounts"), c.authority.write(frontProxy, "front-proxy")); err != nil {
		return c, err
	}
	if err := c.start("etcd", c.programs["server"], "--data-dir", folder+"/etcd", "--unsafe-no-fsync", "--log-level", "warn"); err != nil {
		return c, err
	}
	if err := c.start("kube-apiserver", c.programs["kube-apiserver"],
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--advertise-address="+nodeAddress, "--cert-dir="+folder+"/apiserver",
		"--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC", "--token-auth-file="+folder+"/tokens.csv",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+accounts+"/tls.key", "--service-account-signing-key-file="+accounts+"/tls.key",
		// The API server passes requests on to servers of more APIs, such as KEDA's.
		"--requestheader-client-ca-file="+frontProxy+"/ca.crt", "--requestheader-allowed-names=front-proxy", "--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+frontProxy+"/tls.crt", "--proxy-client-key-file="+frontProxy+"/tls.key"); err != nil {
		return c, err
	}
	if c.config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return c, err
	}
	c.config.QPS, c.config.Burst = 100, 200
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		return c, err
	}
	if err := c.await(ctx, "the API server is ready", func() bool {
		return c.client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil
	}); err != nil {
		return c, err
	}
	for _, p := range [][]string{
		{
			"kube-controller-manager", "--kubeconfig=" + kubeconfig, "--leader-elect=false", "--service-account-private-key-file=" + accounts + "/tls.key",
			"--root-ca-file=" + folder + "/apiserver/apiserver.crt", // which ends with its issuer's
			"--horizontal-pod-autoscaler-sync-period=2s", "--node-monitor-grace-period=25s",
		},
		{"kube-scheduler", "--kubeconfig=" + kubeconfig, "--leader-elect=false"},
	} {
		if err := c.start(p[0], c.programs[p[0]], p[1:]...); err != nil {
			return c, err
		}
	}
	if err := c.startNode(ctx, &node{name: "first", address: nodeAddress, pods: "10.244.0.0/24", groups: "/"}); err != nil {
		return c, err
	}
	if err := c.createFile(ctx, "testdata/coredns.yaml"); err != nil {
		return c, err
	}
	err = c.await(ctx, "CoreDNS answers", func() bool {
		_, err := net.DefaultResolver.LookupHost(ctx, "kubernetes.default")
		return err == nil
	})
	c.started = time.Since(begin)
	return c, err
}

// writeFiles writes configuration files with these replacements.
func writeFiles(folder string, files map[string]string, replacements []string) error {
	for name, text := range files {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(strings.NewReplacer(replacements...).Replace(text)), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// start starts a program, whose output is a file.
func (c *cluster) start(name, program string, args ...string) error {
	p := &part{name: name, ended: make(chan struct{})}
	log, err := os.Create(filepath.Join(folder, name+".log"))
	if err != nil {
		return err
	}
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = folder, log, log
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), log.Close())
	}
	c.parts = append(c.parts, p)
	go func() {
		defer close(p.ended)
		p.err = errors.Join(cmd.Wait(), log.Close())
	}()
	return nil
}

// await waits until the condition holds. It fails after two minutes, or when a program ends.
func (c *cluster) await(ctx context.Context, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for !holds() {
		for _, p := range c.parts {
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
func (c *cluster) end(failed bool) {
	if !failed {
		return
	}
	logs, _ := filepath.Glob(folder + "/*.log")
	pods, _ := filepath.Glob(folder + "/*/pods/*/*/*.log")
	for _, path := range append(pods, logs...) {
		text, err := os.ReadFile(path)
		fmt.Fprintf(os.Stderr, "== %s %v\n%s\n", strings.TrimPrefix(path, folder+"/"), err, text[max(0, len(text)-3000):])
	}
}

// metricsAPI is the API of external metrics, which one server has at a time.
const metricsAPI = "external.metrics.k8s.io/v1beta1"

// registerMetrics registers a server of external metrics, which runs on the node, with the API server.
func (c *cluster) registerMetrics(t *testing.T, in, name string, port int) (remove func()) {
	t.Helper()
	group, version, _ := strings.Cut(metricsAPI, "/")
	err := c.create(t.Context(), strings.NewReader(fmt.Sprintf(`apiVersion: v1
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
`, in, name, nodeAddress, port, group, version, base64.StdEncoding.EncodeToString(c.authority.text))))
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		client, err := dynamic.NewForConfig(c.config)
		if err == nil {
			services := client.Resource(schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"})
			err = services.Delete(context.WithoutCancel(t.Context()), version+"."+group, metav1.DeleteOptions{})
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// createFile creates the objects of a manifest file.
func (c *cluster) createFile(ctx context.Context, path string) error {
	manifest, err := os.Open(path)
	if err != nil {
		return err
	}
	defer manifest.Close()
	return c.create(ctx, manifest)
}

// create creates the objects of a manifest.
func (c *cluster) create(ctx context.Context, manifest io.Reader) error {
	client, err := dynamic.NewForConfig(c.config)
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
