package fleet

import (
	"fmt"
	"io"
	"net/http"
	"sync"
)

// callers ask at once.
const callers = 16

// each has the callers ask about all of them over one client.
func each[T any](all []T, ask func(*http.Client, T)) {
	transport := &http.Transport{MaxIdleConnsPerHost: callers}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	todo := make(chan T)
	var asking sync.WaitGroup
	for range callers {
		asking.Go(func() {
			for one := range todo {
				ask(client, one)
			}
		})
	}
	for _, one := range all {
		todo <- one
	}
	close(todo)
	asking.Wait()
}

// Differing asks the gateway for the stored answer to each of the requests, and
// returns what is not as its caller got it.
func (m *Member) Differing(answers []Answer) []string {
	var mu sync.Mutex
	var out []string
	each(answers, func(client *http.Client, a Answer) {
		if status, body := m.request(client, http.MethodGet, a.Request+"/result"); status != http.StatusOK || body != a.Body {
			mu.Lock()
			defer mu.Unlock()
			out = append(out, fmt.Sprintf("%s: got %q, stored %d %q", a.Request, a.Body, status, body))
		}
	})
	return out
}

// Cancel calls the requests off by their ids, through the gateway.
func (m *Member) Cancel(requests []string) {
	m.fleet.t.Helper()
	each(requests, func(client *http.Client, id string) {
		if status, body := m.request(client, http.MethodDelete, id); status != http.StatusNoContent {
			m.fleet.t.Errorf("request %s: %d %s", id, status, body)
		}
	})
}

// request asks something about a request. No answer is status 0.
func (m *Member) request(client *http.Client, method, what string) (status int, body string) {
	ask, err := http.NewRequestWithContext(m.fleet.t.Context(), method, "http://"+m.Addr()+"/v1/requests/"+what, http.NoBody)
	if err != nil {
		return 0, err.Error()
	}
	return answerTo(client, ask)
}

// answerTo sends a request and reads its answer. No answer is status 0.
func answerTo(client *http.Client, request *http.Request) (status int, body string) {
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(data)
}
