package body_test

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/gateway/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// purse is a budget of 100 bytes.
type purse struct{ taken atomic.Int64 }

func (p *purse) Take(n int64) *fault.Fault {
	if p.taken.Add(n) > 100 {
		p.taken.Add(-n)
		return fault.New(fault.Overloaded, "no more")
	}
	return nil
}

func (p *purse) Give(n int64) { p.taken.Add(-n) }

func TestBodiesTogetherStayWithinTheirBudget(t *testing.T) {
	t.Parallel()
	budget := &purse{}
	hold, held := make(chan struct{}), make(chan struct{})
	url := fronttest.Serve(t, body.Budgeted(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := body.Read(r.Body, r.ContentLength, 1000)
		if err != nil {
			failure.Write(w, err)
			return
		}
		if strings.HasPrefix(string(data), "hold") {
			held <- struct{}{}
			<-hold
		}
		_, _ = io.WriteString(w, strconv.Itoa(len(data)))
	}), budget))
	client := fronttest.Client(t, true)
	first := make(chan string, 1)
	go func() { first <- post(t, client, url, strings.NewReader("hold"+strings.Repeat("x", 56))) }()
	<-held
	if got := budget.taken.Load(); got != 60 {
		t.Errorf("%d bytes are taken by a body of 60", got)
	}
	if got := post(t, client, url, strings.NewReader(strings.Repeat("y", 41))); !strings.Contains(got, "OVERLOADED") {
		t.Errorf("a body that is too much is answered with %q", got)
	}
	if got := post(t, client, url, strings.NewReader(strings.Repeat("y", 40))); got != "40" {
		t.Errorf("one that fits is answered with %q", got)
	}
	close(hold)
	if got := <-first; got != "60" {
		t.Errorf("the first is answered with %q", got)
	}
	if got := budget.taken.Load(); got != 0 {
		t.Errorf("%d bytes are taken by nobody", got)
	}
}
