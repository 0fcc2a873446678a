package target

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/services/bench/load"
)

// plain asks by plain HTTP.
type plain struct {
	client    *http.Client
	transport *http.Transport
	url       *url.URL
	requests  []post
	traced    bool
}

// post is a request that is ready to be sent.
type post struct {
	header http.Header
	body   []byte
}

func newPlain(s Settings) (*plain, error) {
	u, err := url.Parse(s.Address)
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	u.Path = strings.TrimRight(u.Path, "/") + "/v1/pipelines/" + s.Pipeline + ":infer"
	out := &plain{transport: s.transport(false), url: u, traced: s.Traced}
	out.client = direct(out.transport)
	for _, inputs := range s.Inputs {
		p, err := s.post(inputs)
		if err != nil {
			return nil, err
		}
		out.requests = append(out.requests, p)
	}
	return out, nil
}

func (s Settings) post(inputs []*inferencev1.Part) (post, error) {
	out := post{header: http.Header{}}
	kind, body, err := bodyOf(inputs)
	if err != nil {
		return post{}, err
	}
	out.body = body
	out.header.Set("Content-Type", kind)
	if s.Timeout > 0 {
		out.header.Set(transport.HeaderTimeout, s.Timeout.String())
	}
	if s.Priority != 0 {
		out.header.Set(transport.HeaderPriority, strconv.Itoa(int(s.Priority)))
	}
	if s.Durability != "" {
		out.header.Set(transport.HeaderDurability, string(s.Durability))
	}
	if s.Token != "" {
		out.header.Set("Authorization", "Bearer "+s.Token)
	}
	return out, nil
}

func (p *plain) close() { p.transport.CloseIdleConnections() }

// maxRefusal bounds what is read of a failure, in bytes.
const maxRefusal = 1 << 20

// headers returns those of one request, which are its own where it is traced.
func (p *plain) headers(of post) http.Header {
	if !p.traced {
		return of.header
	}
	out := maps.Clone(of.header)
	out.Set(transport.HeaderTraceParent, traceParent())
	return out
}

func (p *plain) ask(ctx context.Context, i int, into *load.Answer) error {
	of := p.requests[i]
	request := (&http.Request{
		Method: http.MethodPost, URL: p.url, Header: p.headers(of), Host: p.url.Host,
		ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(of.body)), Body: io.NopCloser(bytes.NewReader(of.body)),
		GetBody: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(of.body)), nil },
	}).WithContext(ctx)
	response, err := p.client.Do(request)
	if err != nil {
		return transportFailure(err)
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	if response.StatusCode != http.StatusOK {
		return refused(response)
	}
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return transportFailure(err)
	}
	parseTiming(response.Header.Get(transport.HeaderServerTiming), into)
	return nil
}

// refused names what the gateway says with another status than 200.
func refused(response *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(response.Body, maxRefusal))
	if err != nil {
		return transportFailure(err)
	}
	var said struct {
		Error struct{ Reason, Message string }
	}
	if json.Unmarshal(text, &said) != nil || said.Error.Reason == "" {
		return failure("HTTP_"+strconv.Itoa(response.StatusCode), errors.New(response.Status+": "+strings.TrimSpace(string(text))))
	}
	return failure(said.Error.Reason, errors.New(said.Error.Reason+": "+said.Error.Message))
}
