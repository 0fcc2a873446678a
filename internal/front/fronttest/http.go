package fronttest

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// Serve serves h with HTTP/1 and cleartext HTTP/2 on one port until the test
// ends, and returns its URL.
func Serve(t testing.TB, h http.Handler) string {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return server.URL
}

// ServeGRPC serves with a server of gRPC until the test ends, and returns its URL.
func ServeGRPC(t testing.TB, server *grpc.Server) string {
	t.Helper()
	listener := testbed.Listen(t)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return "http://" + listener.Addr().String()
}

// WithMemory returns the handler behind a port whose callers share the pool.
func WithMemory(h http.Handler, pool *budget.Pool) http.Handler {
	anybody := func(transport.Head) (transport.Caller, error) { return transport.Caller{}, nil }
	return transport.WithMemory(h, transport.NewMemory(pool), anybody, func(w http.ResponseWriter, _ *http.Request, err error) { transport.WriteFault(w, err) })
}

// ServeService serves a service with a server of gRPC that admits every call, and returns the
// address.
func ServeService(t testing.TB, service *transport.Service, s transport.Settings, pool *budget.Pool) string {
	t.Helper()
	server := transport.NewGRPC(transport.GRPCSettings{Settings: s, Memory: transport.NewMemory(pool), Logger: slog.New(slog.DiscardHandler)}, service)
	return strings.TrimPrefix(ServeGRPC(t, server), "http://")
}

// Client returns a client of cleartext HTTP/2 where h2c is true, and of HTTP/1
// otherwise.
func Client(t testing.TB, h2c bool) *http.Client {
	t.Helper()
	transport := &http.Transport{
		Protocols:          new(http.Protocols),
		DialContext:        new(net.Dialer).DialContext,
		DisableCompression: true,
	}
	transport.Protocols.SetHTTP1(!h2c)
	transport.Protocols.SetUnencryptedHTTP2(h2c)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// EncodeMessage returns a message with its length prefix.
func EncodeMessage(t testing.TB, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(data))), data...)
}

// Event is a server-sent event as its reader receives it.
type Event struct {
	// ID is the last id so far.
	ID   string
	Name string
	Data string
	// Pings is how many comments came before the event.
	Pings int
}

// Events reads server-sent events.
type Events struct {
	lines *bufio.Scanner
	id    string
}

// ReadEvents returns a reader of the events of a response body.
func ReadEvents(from io.Reader) *Events {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 64<<20)
	return &Events{lines: lines}
}

// errTorn means that a body ends within an event.
var errTorn = errors.New("the answer ends within an event")

// Next returns the next event, or io.EOF after the last.
func (r *Events) Next() (Event, error) {
	var out Event
	open := false
	for r.lines.Scan() {
		line := r.lines.Text()
		field, value, _ := strings.Cut(line, ": ")
		switch {
		case line == "" && open:
			out.ID = r.id
			return out, nil
		case strings.HasPrefix(line, ":"):
			out.Pings++
		case field == "id":
			r.id, open = value, true
		case field == "event":
			out.Name, open = value, true
		case field == "data" && out.Data == "":
			out.Data, open = value, true
		case line != "":
			return out, errors.New("no field of an event: " + line)
		}
	}
	if err := r.lines.Err(); err != nil {
		return out, err
	}
	if open {
		return out, errTorn
	}
	return out, io.EOF
}

// All returns the events up to the end of the body.
func (r *Events) All() ([]Event, error) {
	var out []Event
	for {
		e, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, e)
	}
}
