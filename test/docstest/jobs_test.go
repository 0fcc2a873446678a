package docstest

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestNightlyExampleRunsJobs(t *testing.T) {
	t.Parallel()
	url := startExample(t, "nightly")
	image := testbed.ReadFile(t, "../../examples/digits/images/01-7.png")
	call := func(method, path string, body io.Reader) (status int, answer []byte) {
		r := testbed.Request(t, method, url+path, body)
		r.Header.Set("Content-Type", "image/png")
		answered, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answered.Body.Close()
		if answer, err = io.ReadAll(answered.Body); err != nil {
			t.Fatal(err)
		}
		return answered.StatusCode, answer
	}
	for _, queue := range []string{"nightly", "spare"} {
		var job struct{ ID string }
		status, answer := call(http.MethodPost, "/v1/queues/"+queue+"/jobs", bytes.NewReader(image))
		if err := json.Unmarshal(answer, &job); err != nil || status != http.StatusAccepted {
			t.Fatalf("%s: %d %s", queue, status, answer)
		}
		if queue == "nightly" {
			continue // it may be day
		}
		if status, answer := call(http.MethodGet, "/v1/jobs/"+job.ID+"/result?wait=30s", http.NoBody); status != http.StatusOK || !strings.Contains(string(answer), `"7"`) {
			t.Errorf("%d %s", status, answer)
		}
	}
}
