package consultest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// askTime bounds a question to an agent.
const askTime = 5 * time.Second

// ask asks the agent and reads its answer; status is 0 where there is none.
func (a *Agent) ask(method, path string) (status int, answer []byte, err error) {
	request, err := http.NewRequest(method, "http://"+a.addr+path, http.NoBody) //nolint:noctx // the client has a timeout
	if err != nil {
		return 0, nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: askTime}
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	if answer, err = io.ReadAll(response.Body); err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %.200s", method, path, response.Status, answer)
	}
	return response.StatusCode, answer, err
}

// led reports whether the agent has a leader: one that answers, or says that there
// are no keys.
func (a *Agent) led() bool {
	status, _, err := a.ask(http.MethodGet, "/v1/kv/?keys")
	return err == nil || status == http.StatusNotFound
}

// Leads reports whether the agent is its cluster's leader.
func (a *Agent) Leads() bool {
	_, answer, err := a.ask(http.MethodGet, "/v1/agent/self")
	var self struct {
		Stats struct {
			Consul struct{ Leader string }
		}
	}
	return err == nil && json.Unmarshal(answer, &self) == nil && self.Stats.Consul.Leader == "true"
}

// Clear deletes all keys, and has the agent forget all services, by its API.
func (a *Agent) Clear() error {
	_, answer, err := a.ask(http.MethodGet, "/v1/agent/services")
	if err != nil {
		return err
	}
	var services map[string]struct{}
	if err := json.Unmarshal(answer, &services); err != nil {
		return err
	}
	_, _, err = a.ask(http.MethodDelete, "/v1/kv/?recurse")
	for id := range services {
		_, _, gone := a.ask(http.MethodPut, "/v1/agent/service/deregister/"+url.PathEscape(id))
		err = errors.Join(err, gone)
	}
	return err
}
