package meshtest_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// mayRead has each method of the admin port, and whether the role read may call it.
var mayRead = map[string]bool{
	"DeadLetterService/ListDeadLetters":  true,
	"DeadLetterService/GetDeadLetter":    true,
	"DeadLetterService/ReplayDeadLetter": false,
	"DeadLetterService/DeleteDeadLetter": false,
	"JobAdminService/ListGates":          true,
	"JobAdminService/ListQueues":         true,
	"JobAdminService/PauseQueue":         false,
	"JobAdminService/ResumeQueue":        false,
	"MeshService/ListHosts":              true,
	"MeshService/WatchHosts":             true,
	"MeshService/ListStages":             true,
	"MeshService/WatchStages":            true,
	"MeshService/ListRequests":           true,
	"MeshService/ListMetrics":            true,
	"MeshService/WatchFigures":           true,
	"MeshService/ListEndedRequests":      true,
	"MeshService/ExplainRequest":         true,
	"PipelineService/ListPipelines":      true,
	"PipelineService/WatchPipelines":     true,
	"PipelineService/GetPipeline":        true,
	"PipelineService/PlanPipelines":      true,
	"PipelineService/ApplyPipeline":      false,
	"PipelineService/DeletePipeline":     false,
	"ModelService/RegisterModel":         false,
	"ModelService/UnregisterModel":       false,
	"ModelService/EnsureLoaded":          false,
	"ModelService/EvictModel":            false,
	"ModelService/GetModel":              true,
	"ModelService/ListModels":            true,
	"ModelService/SetAlias":              false,
	"ModelService/DeleteAlias":           false,
	"ModelService/GetAlias":              true,
	"ModelService/ListAliases":           true,
	"ModelService/GetSettings":           true,
	"ModelService/SetSettings":           false,
	// It shows payloads.
	"ModelService/TapModel": false,
}

// callAdmin calls a method with a token, and returns the code of its error, "" for none. Of a
// stream it reads the first message.
func callAdmin(t *testing.T, url string, method protoreflect.MethodDescriptor, token, message string) string {
	t.Helper()
	body, contentType := []byte(message), "application/json"
	if method.IsStreamingServer() {
		body, contentType = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...), "application/connect+json"
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, fmt.Sprintf("%s/%s/%s", url, method.Parent().FullName(), method.Name()), bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", contentType)
	r.Header.Set("Authorization", "Bearer "+token)
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	response, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct {
		Code  string
		Error struct{ Code string }
	}
	head := make([]byte, 5)
	if method.IsStreamingServer() {
		if _, err := io.ReadFull(response.Body, head); err != nil {
			t.Fatalf("%s: %s, %v", method.Name(), response.Status, err)
		}
		if head[0] == 0 {
			return ""
		}
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatalf("%s: %s, %v", method.Name(), response.Status, err)
	}
	return answer.Code + answer.Error.Code
}

func TestRoleReadLooksAndChangesNothing(t *testing.T) {
	t.Parallel()
	tokens := testbed.SecretFile(t, "all\nlook role=read\n")
	g := meshtest.New(t).Gateway(nil, withAdmin, func(s *gateway.Settings) { s.Admin.TokenFile = tokens })
	const denied = "permission_denied"
	found := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("stagemesh.admin.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			for j := range file.Services().Get(i).Methods().Len() {
				method := file.Services().Get(i).Methods().Get(j)
				name := fmt.Sprintf("%s/%s", method.Parent().Name(), method.Name())
				may, isListed := mayRead[name]
				if found++; !isListed {
					t.Errorf("%s is not in the table", name)
				}
				if code := callAdmin(t, g.AdminURL(), method, "look", "{}"); (code == denied) == may {
					t.Errorf("%s with the role read: %q", name, code)
				}
				if code := callAdmin(t, g.AdminURL(), method, "all", "{}"); code == denied || code == "unauthenticated" {
					t.Errorf("%s without a role: %q", name, code)
				}
				if name == "DeadLetterService/GetDeadLetter" {
					for token, want := range map[string]string{"look": denied, "all": "not_found"} {
						for _, payload := range []string{"messageBytes", "bodyBytes"} {
							if code := callAdmin(t, g.AdminURL(), method, token, `{"seq": 1, "`+payload+`": 1}`); code != want {
								t.Errorf("%s with %s: %q", payload, token, code)
							}
						}
					}
				}
			}
		}
		return true
	})
	if found != len(mayRead) {
		t.Errorf("%d methods of %d are there", found, len(mayRead))
	}
}
