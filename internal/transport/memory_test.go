package transport_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
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
	if got := pool.Held(); got < body || got > body+(30<<10) {
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

func TestAnswersReachClientsThatCloseAfterwards(t *testing.T) {
	t.Parallel()
	url := fronttest.Serve(t, fronttest.WithMemory(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		transport.WriteFault(w, fault.New(fault.Overloaded, "full"))
	}), budget.NewPool(budget.Settings{Limit: 1 << 20})))
	for _, version := range []string{"1.0", "1.1"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		const body = 200 << 10
		_, err = fmt.Fprintf(conn, "POST / HTTP/%s\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", version, body, strings.Repeat("x", body))
		answer, readErr := io.ReadAll(conn)
		if err != nil || readErr != nil || !strings.Contains(string(answer), "OVERLOADED") {
			t.Errorf("HTTP/%s: %v, %v, %.300q", version, err, readErr, answer)
		}
	}
}
