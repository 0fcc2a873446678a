package openapi_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// source has one document, or an error.
type source struct {
	text string
	err  error
}

var _ openapi.Source = source{}

func (s source) Document(context.Context) (*openapi.Document, error) {
	if s.err != nil {
		return nil, s.err
	}
	return openapi.NewDocument([]byte(s.text)), nil
}

// ask sends a request to a port that serves the source's document.
func ask(t *testing.T, from openapi.Source, method, path string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	mux := http.NewServeMux()
	openapi.Mount(mux, from)
	r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, r)
	return w
}

func unpacked(t *testing.T, data []byte) []byte {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestUnchangedDocumentIsSentOnce(t *testing.T) {
	t.Parallel()
	old, changed := source{text: `{"a": 1}`}, source{text: `{"a": 2}`}
	for name, row := range map[string]struct {
		encoding string
		packed   bool
	}{
		"as it is":           {"", false},
		"packed":             {"br, GZIP", true},
		"packed, unless not": {"gzip;q=0", false},
		"any encoding":       {"*", true},
		"any but packed":     {"*, gzip;q=0", false},
		"none at all":        {"*;q=0.0", false},
		"an older name":      {"x-gzip", true},
		"a q behind another": {"gzip;level=1;q=0", false},
		"packed, if at all":  {"gzip; q=0.5, identity", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := ask(t, old, http.MethodGet, openapi.DocumentPath, "Accept-Encoding", row.encoding)
			body := first.Body.Bytes()
			if packed := first.Header().Get("Content-Encoding") == "gzip"; packed != row.packed {
				t.Fatalf("packed: %t", packed)
			} else if packed {
				body = unpacked(t, body)
			}
			if string(body) != old.text || first.Header().Get("Cache-Control") != "no-cache" || first.Header().Get("Vary") != "Accept-Encoding" || first.Header().Get("Content-Type") != "application/json" {
				t.Errorf("got %s, %v", body, first.Header())
			}
			tag := first.Header().Get("ETag")
			for _, has := range []string{tag, `"other", W/` + tag, "*"} {
				if again := ask(t, old, http.MethodGet, openapi.DocumentPath, "Accept-Encoding", row.encoding, "If-None-Match", has); again.Code != http.StatusNotModified || again.Body.Len() > 0 {
					t.Errorf("%s: %d", has, again.Code)
				}
			}
			if later := ask(t, changed, http.MethodGet, openapi.DocumentPath, "Accept-Encoding", row.encoding, "If-None-Match", tag); later.Code != http.StatusOK || later.Header().Get("ETag") == tag {
				t.Errorf("changed: %d", later.Code)
			}
			if head := ask(t, old, http.MethodHead, openapi.DocumentPath, "Accept-Encoding", row.encoding); head.Code != http.StatusOK || head.Body.Len() > 0 || head.Header().Get("Content-Length") != first.Header().Get("Content-Length") {
				t.Errorf("HEAD: %d, %v", head.Code, head.Header())
			}
		})
	}
	if plain, packed := ask(t, old, http.MethodGet, openapi.DocumentPath), ask(t, old, http.MethodGet, openapi.DocumentPath, "Accept-Encoding", "gzip"); plain.Header().Get("ETag") == packed.Header().Get("ETag") {
		t.Error("two encodings have one tag")
	}
}

func TestSourceErrorBecomesResponse(t *testing.T) {
	t.Parallel()
	failing := source{err: fault.New(fault.RegistryUnavailable, "the registry was not heard of")}
	if got := ask(t, failing, http.MethodGet, openapi.DocumentPath); got.Code != http.StatusServiceUnavailable || !strings.Contains(got.Body.String(), "REGISTRY_UNAVAILABLE") {
		t.Errorf("%d %s", got.Code, got.Body)
	}
	if got := ask(t, source{err: errors.New("secret")}, http.MethodGet, openapi.DocumentPath); got.Code != http.StatusInternalServerError || strings.Contains(got.Body.String(), "secret") {
		t.Errorf("%d %s", got.Code, got.Body)
	}
}

func TestOnlyReadMethodsAreServed(t *testing.T) {
	t.Parallel()
	for _, path := range []string{openapi.DocumentPath, openapi.PagePath, openapi.PagePath + "/docs.js"} {
		if got := ask(t, source{}, http.MethodPost, path); got.Code != http.StatusMethodNotAllowed || got.Header().Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d, %v", path, got.Code, got.Header())
		}
	}
	if got := ask(t, source{}, http.MethodGet, "/"); got.Code != http.StatusFound || got.Header().Get("Location") != openapi.PagePath {
		t.Errorf("GET /: %d to %q", got.Code, got.Header().Get("Location"))
	}
	if got := ask(t, source{}, http.MethodGet, openapi.PagePath+"/lock"); got.Code != http.StatusNotFound {
		t.Errorf("unknown file: %d", got.Code)
	}
}

func TestPageLoadsOnlyItsOwnFiles(t *testing.T) {
	t.Parallel()
	page := ask(t, source{}, http.MethodGet, openapi.PagePath)
	names := regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(page.Body.String(), -1)
	if len(names) < 5 || strings.Contains(page.Body.String(), "<script>") || strings.Contains(page.Body.String(), "style=") {
		t.Fatalf("the page is %s", page.Body)
	}
	for _, name := range names {
		if name[1] == "data:," {
			continue
		}
		got := ask(t, source{text: "{}"}, http.MethodGet, "/"+name[1], "Accept-Encoding", "gzip")
		if got.Code != http.StatusOK || got.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d, %v", name[1], got.Code, got.Header())
		}
		policy := got.Header().Get("Content-Security-Policy")
		if "/"+name[1] != openapi.DocumentPath && (!strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") || strings.Contains(policy, "http")) {
			t.Errorf("%s: the policy is %q", name[1], policy)
		}
	}
}

func TestFilesAreDecompressedForClientsWithoutGzip(t *testing.T) {
	t.Parallel()
	path := openapi.PagePath + "/swagger-ui.css"
	plain, packed := ask(t, source{}, http.MethodGet, path), ask(t, source{}, http.MethodGet, path, "Accept-Encoding", "gzip")
	if want := unpacked(t, packed.Body.Bytes()); len(want) < 100<<10 || !bytes.Equal(plain.Body.Bytes(), want) {
		t.Errorf("%d bytes, want %d", plain.Body.Len(), len(want))
	}
}

// lock reads viewer/lock: the digests of the files by their names.
func lock(t *testing.T) map[string]string {
	t.Helper()
	text := testbed.ReadFile(t, "viewer/lock")
	out := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Scan()
	if !regexp.MustCompile(`^swagger-ui-dist \d+\.\d+\.\d+ sha512-[A-Za-z0-9+/]{86}==$`).MatchString(lines.Text()) {
		t.Errorf("the lock begins with %q", lines.Text())
	}
	for lines.Scan() {
		digest, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok {
			t.Fatalf("the lock has %q", lines.Text())
		}
		out[name] = digest
	}
	return out
}

func TestViewerMatchesItsLock(t *testing.T) {
	t.Parallel()
	locked := lock(t)
	entries, err := fs.ReadDir(os.DirFS("viewer"), ".")
	if err != nil || len(entries) != len(locked)+1 {
		t.Fatalf("%d files exist, and the lock has %d; %v", len(entries)-1, len(locked), err)
	}
	for _, e := range entries {
		if e.Name() == "lock" {
			continue
		}
		data := testbed.ReadFile(t, "viewer/"+e.Name())
		name, packed := strings.CutSuffix(e.Name(), ".gz")
		if packed {
			data = unpacked(t, data)
		}
		if digest := sha256.Sum256(data); hex.EncodeToString(digest[:]) != locked[name] {
			t.Errorf("%s differs from the lock; run make docs-viewer", e.Name())
		}
	}
}
