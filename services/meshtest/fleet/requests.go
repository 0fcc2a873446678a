package fleet

import (
	"fmt"
	"io"
	"net/http"
	"sync"
)

// readers ask for stored answers at once.
const readers = 16

// Differing asks the gateway for the stored answer to each of the requests, and
// returns what is not as its caller got it.
func (m *Member) Differing(answers []Answer) []string {
	m.fleet.t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: readers}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	todo := make(chan Answer)
	var mu sync.Mutex
	var out []string
	var reading sync.WaitGroup
	for range readers {
		reading.Go(func() {
			for a := range todo {
				if status, body := m.stored(client, a.Request); status != http.StatusOK || body != a.Body {
					mu.Lock()
					out = append(out, fmt.Sprintf("%s: got %q, stored %d %q", a.Request, a.Body, status, body))
					mu.Unlock()
				}
			}
		})
	}
	for _, a := range answers {
		todo <- a
	}
	close(todo)
	reading.Wait()
	return out
}

// stored returns a request's stored answer, or why there is none.
func (m *Member) stored(client *http.Client, request string) (status int, body string) {
	ask, err := http.NewRequestWithContext(m.fleet.t.Context(), http.MethodGet, "http://"+m.Addr()+"/v1/requests/"+request+"/result", http.NoBody)
	if err != nil {
		return 0, err.Error()
	}
	response, err := client.Do(ask)
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
