package librarytest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startOpenBroker starts a mesh whose broker listens, with keys of the section nats.
func startOpenBroker(t *testing.T, nats string) *stagemesh.Mesh {
	t.Helper()
	return meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
nats: {listen: "127.0.0.1:0"`+nats+`}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
`), stagemesh.FileSettings{}))
}

// dialBroker connects and reads what the broker says of itself.
func dialBroker(t *testing.T, m *stagemesh.Mesh) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(m.BrokerURL(), "nats://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
		t.Fatal(err)
	}
	return conn, bufio.NewReader(conn)
}

// rest reads until the broker closes the connection.
func rest(t *testing.T, in io.Reader) string {
	t.Helper()
	text, err := io.ReadAll(in)
	if err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the connection stays open: %v", err)
	}
	return string(text)
}

func TestBrokerClosesThoseThatDoNotAuthenticate(t *testing.T) {
	t.Parallel()
	token := ", token_file: " + testbed.SecretFile(t, "open-sesame")
	for name, test := range map[string]struct{ nats, send string }{
		"silent, without a token":     {"", ""},
		"silent, with a token":        {token, ""},
		"half a CONNECT":              {token, `CONNECT {"verbose":`},
		"half a CONNECT, no token":    {"", `CONNECT {"verbose":`},
		"a CONNECT without end":       {"", `CONNECT {"name":"` + strings.Repeat("x", 1<<16)},
		"a CONNECT without end, held": {token, `CONNECT {"name":"` + strings.Repeat("x", 1<<16)},
		"another token":               {token, "CONNECT {\"auth_token\":\"sesame\"}\r\nPING\r\n"},
		"no token":                    {token, "CONNECT {}\r\nPING\r\n"},
		"a token that none is":        {"", "CONNECT {\"auth_token\":\"sesame\"}\r\nPING\r\n"},
		"another message first":       {token, "SUB > 1\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := startOpenBroker(t, test.nats)
			const many = 100
			var readers []io.Reader
			for range many {
				conn, in := dialBroker(t, m)
				_, _ = io.WriteString(conn, test.send) // the broker may close it meanwhile
				readers = append(readers, in)
			}
			expect(t, m, "p", "to", "to")
			for _, in := range readers {
				if text := rest(t, in); strings.Contains(text, "\nPONG") || strings.Contains(text, "\nMSG") { // its ID may have any letters
					t.Fatalf("the broker answers %q", text)
				}
			}
			expect(t, m, "p", "to", "to")
		})
	}
}

func TestBrokerBoundsConnections(t *testing.T) {
	t.Parallel()
	m := startOpenBroker(t, "")
	refused := 0
	for range 1100 {
		conn, in := dialBroker(t, m)
		_, _ = io.WriteString(conn, "CONNECT {}\r\nPING\r\n")
		for line, err := in.ReadString('\n'); err == nil && line != "PONG\r\n"; line, err = in.ReadString('\n') {
			if strings.Contains(line, "maximum connections exceeded") {
				refused++
			}
		}
	}
	if refused < 50 {
		t.Errorf("%d connections were refused", refused)
	}
	expect(t, m, "p", "to", "to")
}

func TestBrokerBoundsSubscriptions(t *testing.T) {
	t.Parallel()
	m := startOpenBroker(t, "")
	conn, in := dialBroker(t, m)
	out := bufio.NewWriter(conn)
	fmt.Fprint(out, "CONNECT {\"verbose\":false}\r\n")
	for i := range 1<<16 + 10 {
		fmt.Fprintf(out, "SUB a.%d %d\r\n", i, i)
	}
	fmt.Fprint(out, "PING\r\n")
	if err := out.Flush(); err != nil {
		t.Fatal(err)
	}
	refused := 0
	for line, err := in.ReadString('\n'); err == nil && line != "PONG\r\n"; line, err = in.ReadString('\n') {
		if strings.Contains(line, "maximum subscriptions exceeded") {
			refused++
		}
	}
	if refused != 10 {
		t.Errorf("%d subscriptions were refused", refused)
	}
	expect(t, m, "p", "to", "to")
}

func TestBrokerBoundsStreamsAndConsumers(t *testing.T) {
	t.Parallel()
	conn, in := dialBroker(t, startOpenBroker(t, ""))
	_, _ = io.WriteString(conn, "CONNECT {\"verbose\":false}\r\nSUB here 1\r\nPUB $JS.API.INFO here 0\r\n\r\n")
	answer := ""
	for !strings.Contains(answer, "max_streams") {
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		answer = line
	}
	if !strings.Contains(answer, `"max_streams":4096`) || !strings.Contains(answer, `"max_consumers":16384`) {
		t.Errorf("the limits are %s", answer)
	}
}
