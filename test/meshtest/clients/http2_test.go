package clients

import (
	"encoding/xml"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
)

// The ports conform to HTTP/2 as the servers of their libraries do by themselves.
func TestPortsConformToHTTP2(t *testing.T) {
	t.Parallel()
	const cases = 145
	tools, mesh := installTools(t), startMesh(t)
	plainHTTP := fronttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "an answer")
	}))
	for name, test := range map[string]struct {
		url, plain string
		// least is how many cases pass beside mayFail: what may fail beyond what the plain server does,
		// as prefixes.
		least   int
		mayFail []string
	}{
		"public": {mesh.URL(), plainHTTP, 138, []string{
			// The answer may have ended before the second update arrives.
			"http2/6.9.1 Sends multiple WINDOW_UPDATE frames increasing the flow control window to above 2^31-1 on a stream",
		}},
		"gRPC": {mesh.GRPCURL(), fronttest.ServeGRPC(t, grpc.NewServer()), 0, []string{
			// Skipped on a plain server, which has no bound. These calls end before the next begins.
			"http2/5.1.2 Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded",
			// grpc-go closes a connection in the middle of a header, which h2spec sees as a reset if
			// what it had sent was not read. So a plain server may fail, too.
			"http2/4.3 ", "http2/5.5 ", "http2/6.2 ", "http2/6.10 ",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var port, plain map[string]bool
			var both errgroup.Group
			both.Go(func() (err error) { port, err = conformance(t, tools.h2spec, test.url); return err })
			both.Go(func() (err error) { plain, err = conformance(t, tools.h2spec, test.plain); return err })
			if err := both.Wait(); err != nil {
				t.Fatal(err)
			}
			passed, passedPlain := 0, 0
			for _, one := range slices.Sorted(maps.Keys(port)) {
				if slices.ContainsFunc(test.mayFail, func(prefix string) bool { return strings.HasPrefix(one, prefix) }) {
					continue
				}
				switch {
				case port[one]:
					passed++
				case plain[one]:
					t.Errorf("a plain server passes, and the port does not: %s", one)
				}
				if plain[one] {
					passedPlain++
				}
			}
			if len(port) != cases || passed < max(test.least, passedPlain) {
				t.Errorf("%d of %d cases pass, %d of a plain server", passed, len(port), passedPlain)
			}
		})
	}
}

// conformance returns h2spec's cases, and whether they pass.
func conformance(t *testing.T, h2spec, url string) (map[string]bool, error) {
	t.Helper()
	// timeout is more than the second that servers take to close a connection.
	const timeout = "3"
	host, port, err := net.SplitHostPort(strings.TrimPrefix(url, "http://"))
	if err != nil {
		return nil, err
	}
	folder := t.TempDir()
	sections := []string{"generic", "hpack", "http2/3", "http2/4", "http2/5", "http2/6", "http2/7", "http2/8"}
	found := make([]map[string]bool, len(sections))
	var all errgroup.Group
	for i, section := range sections {
		all.Go(func() (err error) {
			report := filepath.Join(folder, strings.ReplaceAll(section, "/", "-"))
			out, err := exec.CommandContext(t.Context(), h2spec, section, "--host", host, "--port", port, "--path", "/v1/pipelines/echo:infer", "--timeout", timeout, "--junit-report", report).CombinedOutput()
			if failed, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || failed.ExitCode() != 1) {
				return errors.Join(err, errors.New(string(out)))
			}
			found[i], err = readCases(report)
			return err
		})
	}
	err = all.Wait()
	cases := map[string]bool{}
	for _, some := range found {
		maps.Copy(cases, some)
	}
	return cases, err
}

// readCases reads a report of cases, and whether they pass.
func readCases(file string) (map[string]bool, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	type outcome struct{}
	var report struct {
		Suites []struct {
			Cases []struct {
				Package string   `xml:"package,attr"`
				Name    string   `xml:"classname,attr"`
				Failure *outcome `xml:"failure"`
				Error   *outcome `xml:"error"`
				Skipped *outcome `xml:"skipped"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(data, &report); err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, suite := range report.Suites {
		for _, one := range suite.Cases {
			out[one.Package+" "+one.Name] = one.Failure == nil && one.Error == nil && one.Skipped == nil
		}
	}
	return out, nil
}
