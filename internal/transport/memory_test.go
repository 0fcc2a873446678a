package transport_test

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func TestBodiesTogetherStayWithinBudget(t *testing.T) {
	t.Parallel()
	const body = 100 << 10
	pool := budget.NewPool(budget.Settings{Limit: 2*body + (10 << 10)})
	hold, held := make(chan struct{}), make(chan struct{})
	url := fronttest.Serve(t, fronttest.WithMemory(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := transport.ReadBody(r.Body, r.ContentLength, 3*body)
		if err != nil {
			transport.WriteFault(w, err)
			return
		}
		if strings.HasPrefix(string(data), "hold") {
			held <- struct{}{}
			<-hold
		}
		_, _ = io.WriteString(w, strconv.Itoa(len(data)))
	}), pool))
	client := fronttest.Client(t, true)
	first := make(chan string, 1)
	go func() { first <- post(t, client, url, strings.NewReader("hold"+strings.Repeat("x", body-4))) }()
	<-held
	if got := pool.Held(); got < body || got > body+(10<<10) {
		t.Errorf("%d bytes are held by a body of %d", got, body)
	}
	if got := post(t, client, url, strings.NewReader(strings.Repeat("y", body))); !strings.Contains(got, "OVERLOADED") {
		t.Errorf("a body that is too much is answered with %q", got)
	}
	if got := post(t, client, url, strings.NewReader(strings.Repeat("y", body/2))); got != strconv.Itoa(body/2) {
		t.Errorf("one that fits is answered with %q", got)
	}
	close(hold)
	if got := <-first; got != strconv.Itoa(body) {
		t.Errorf("the first is answered with %q", got)
	}
	if got := pool.Held(); got != 0 {
		t.Errorf("%d bytes stay reserved", got)
	}
}
