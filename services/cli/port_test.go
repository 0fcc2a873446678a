package cli_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// guarded runs a mesh whose ports have what is given.
func guarded(t *testing.T, access gateway.Access) *stagemesh.Mesh {
	t.Helper()
	m, err := stagemesh.New(stagemesh.Settings{Gateway: gateway.Settings{
		Config: gateway.Config{Listen: "127.0.0.1:0", Access: access, Admin: gateway.Admin{Listen: "127.0.0.1:0", Access: access}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	echo := func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }
	if err := m.AddStage(stagemesh.Stage{Name: "echo", Runner: inproc.Each(inproc.Settings{}, echo)}); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	return m
}

// port is a port that a command asks.
type port struct {
	url string
	// flag names it, and section is where a mesh's file has it.
	flag, section string
	args          []string
}

// ask returns what the command says.
func (p port) ask(t *testing.T, url string, flags ...string) (string, error) {
	t.Helper()
	args := append([]string{}, p.args...)
	return run(t, append(append(args, p.flag, url), flags...)...)
}

func ports(t *testing.T, m *stagemesh.Mesh) map[string]port {
	t.Helper()
	public, admin := asking(t)[0], asking(t)[1]
	public.url, admin.url = m.URL(), m.AdminURL()
	return map[string]port{"the public port": public, "the admin port": admin}
}

// asking returns a command that asks the public port, and one that asks the admin
// port.
func asking(t *testing.T) []port {
	t.Helper()
	file := testbed.SecretFile(t, "hello")
	return []port{
		{"", "--address", "gateway", []string{"infer", "stage:echo", file, file}},
		{"", "--admin", "gateway.admin", []string{"dead-letters", "list"}},
	}
}

func TestCommandsReachPortsWithTLSAndToken(t *testing.T) {
	t.Parallel()
	authority, stranger := testbed.NewAuthority(t), testbed.NewAuthority(t)
	token, wrong := testbed.SecretFile(t, "open-simsim\nopen-sesame\n"), testbed.SecretFile(t, "sesame-secret")
	cert, key := authority.Certificate("127.0.0.1")
	m := guarded(t, gateway.Access{TokenFile: token, CertFile: cert, KeyFile: key})
	asked := ports(t, m)
	streamed := asked["the public port"]
	streamed.args = []string{"infer", "--stream", "stage:echo", testbed.SecretFile(t, "hello")}
	asked["the public port, for a stream"] = streamed
	for name, p := range asked {
		if out, err := p.ask(t, p.url, "--ca-file", authority.File, "--token-file", token); err != nil {
			t.Errorf("%s: %v, %s", name, err, out)
		}
		named := strings.Replace(p.url, "127.0.0.1", "localhost", 1)
		for what, test := range map[string]struct {
			url   string
			flags []string
			want  []string
		}{
			"no token":        {p.url, []string{"--ca-file", authority.File}, []string{"UNAUTHENTICATED: this port needs a token", "; give it with --token-file"}},
			"another token":   {p.url, []string{"--ca-file", authority.File, "--token-file", wrong}, []string{"UNAUTHENTICATED: this is not a token in the gateway's " + p.section + ".token_file", "--token-file " + wrong + " is another"}},
			"nobody vouches":  {p.url, []string{"--token-file", token}, []string{"certificate signed by unknown authority", "; --ca-file names a file"}},
			"another vouches": {p.url, []string{"--token-file", token, "--ca-file", stranger.File}, []string{"certificate signed by unknown authority", "; --ca-file names a file"}},
			"another name":    {named, []string{"--token-file", token, "--ca-file", authority.File}, []string{"localhost", p.flag + " has to name the port as its certificate does, which is " + p.section + ".cert_file"}},
			"no TLS":          {strings.Replace(p.url, "https", "http", 1), []string{"--token-file", token}, []string{"the port speaks TLS, and was asked without", p.section + ".cert_file", p.flag + " as https://"}},
		} {
			out, err := p.ask(t, test.url, test.flags...)
			if err == nil || strings.Contains(out+err.Error(), "sesame") || strings.Count(out, "\n") > 1 {
				t.Errorf("%s, %s: %v, %s", name, what, err, out)
				continue
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s, %s: %v lacks %q", name, what, err, want)
				}
			}
		}
	}
}

func TestCommandsExplainPortWithoutTLS(t *testing.T) {
	t.Parallel()
	for name, p := range ports(t, guarded(t, gateway.Access{})) {
		_, err := p.ask(t, strings.Replace(p.url, "http", "https", 1))
		if err == nil || !strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") || !strings.HasSuffix(err.Error(), "give "+p.flag+" as https:// then, else as http://") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTokenIsNotSentToRedirects(t *testing.T) {
	t.Parallel()
	reached := make(chan string, 8)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { reached <- r.Header.Get("Authorization") }))
	t.Cleanup(elsewhere.Close)
	pointing := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	t.Cleanup(pointing.Close)
	token := testbed.SecretFile(t, "open-sesame")
	for _, p := range asking(t) {
		if out, err := p.ask(t, pointing.URL, "--token-file", token); err == nil || len(reached) > 0 {
			t.Errorf("%s: %v, %s; %d requests are elsewhere", p.flag, err, out, len(reached))
		}
	}
}

func TestAPasswordInAnAddressIsNotShown(t *testing.T) {
	t.Parallel()
	for _, p := range asking(t) {
		for _, address := range []string{"http://open:sesame@127.0.0.1:1", "http://open:sesame@127.0.0.1:port", "ftp://open:sesame@127.0.0.1"} {
			if out, err := p.ask(t, address); err == nil || strings.Contains(out+err.Error(), "sesame") {
				t.Errorf("%s: %v, %s", p.flag, err, out)
			}
		}
	}
}

// mute listens and says nothing.
func mute(t *testing.T) string {
	t.Helper()
	listener := testbed.Listen(t)
	return listener.Addr().String()
}

func TestSilentPortTimesOut(t *testing.T) {
	t.Parallel()
	address := mute(t)
	var asking sync.WaitGroup
	for want, args := range map[string][]string{
		"http://" + address + ": no answer within 15s": {"status", "--admin", "http://" + address},
		address + ": no answer within 15s":             {"cancel", "01a1fc37-9c70-7089-b8a4-eabc34a6f203", "--address", address},
		"TLS handshake timeout":                        {"infer", "p", testbed.SecretFile(t, "hello"), "--address", "https://" + address},
	} {
		asking.Go(func() {
			if out, err := run(t, args...); err == nil || !strings.Contains(out+err.Error(), want) {
				t.Errorf("%v: %v, %s", args, err, out)
			}
		})
	}
	asking.Wait()
}
