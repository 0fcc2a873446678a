package rest

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// options sets the options of headers and query.
func options(out *request.Request, r *http.Request) error {
	for _, name := range []string{
		transport.HeaderTimeout, transport.HeaderPriority, transport.HeaderDurability, transport.HeaderIdempotencyKey, transport.HeaderWaitForCapacity, transport.HeaderComplete,
	} {
		if value := strings.TrimSpace(r.Header.Get(name)); value != "" {
			if err := takeHeader(out, name, value); err != nil {
				return invalid(name, err)
			}
		}
	}
	if r.URL.RawQuery == "" {
		return nil
	}
	return query(out, r.URL.RawQuery)
}

func takeHeader(out *request.Request, name, value string) (err error) {
	switch name {
	case transport.HeaderTimeout:
		if out.Timeout, err = duration(value); err == nil && out.Timeout <= 0 {
			err = fmt.Errorf("must be more than 0, got %.*q", fault.MaxQuoted, value)
		}
		return err
	case transport.HeaderPriority:
		n, err := strconv.ParseInt(value, 10, 32)
		if err != nil {
			return fmt.Errorf("%.*q is not a whole number of 32 bits", fault.MaxQuoted, value)
		}
		out.Priority = int32(n)
	case transport.HeaderDurability:
		if out.Durability, err = pipeline.ParseDurability(value); err != nil {
			return fmt.Errorf("%.*q: use memory or file", fault.MaxQuoted, value)
		}
	case transport.HeaderIdempotencyKey:
		if len(value) > request.MaxIdempotencyKey || !utf8.ValidString(value) {
			return fmt.Errorf("a key is UTF-8 of at most %d bytes", request.MaxIdempotencyKey)
		}
		out.IdempotencyKey = value
	case transport.HeaderWaitForCapacity, transport.HeaderComplete:
		is := value == "true"
		if !is && value != "false" {
			return fmt.Errorf("%.*q: use true or false", fault.MaxQuoted, value)
		}
		if name == transport.HeaderComplete {
			out.IsComplete = is
		} else {
			out.WaitForCapacity = &is
		}
	}
	return nil
}

// duration reads a Go duration, or a whole number of milliseconds.
func duration(value string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if ms, notWhole := strconv.ParseInt(value, 10, 64); notWhole == nil {
		if ms > math.MaxInt64/int64(time.Millisecond) || ms < math.MinInt64/int64(time.Millisecond) {
			return 0, fmt.Errorf("%d milliseconds are too many", ms)
		}
		d, err = time.Duration(ms)*time.Millisecond, nil
	}
	if err != nil {
		return 0, fmt.Errorf("%.*q is neither a duration such as 250ms nor whole milliseconds", fault.MaxQuoted, value)
	}
	return d, nil
}

// eachQuery calls take with each key of the query, in order. Every key may come once.
func eachQuery(raw string, take func(key, value string) error) error {
	if n := 1 + strings.Count(raw, "&"); n > payload.MaxParameters {
		return fault.Newf(fault.InvalidRequest, "%d query parameters, at most %d are allowed", n, payload.MaxParameters)
	}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return fault.Newf(fault.InvalidRequest, "the query cannot be read: %w", err)
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if n := len(values[key]); n > 1 {
			err = fmt.Errorf("is there %d times", n)
		} else {
			err = take(key, values[key][0])
		}
		if err != nil {
			return invalid(key, err)
		}
	}
	return nil
}

// query sets the options of the query.
func query(out *request.Request, raw string) error {
	if err := eachQuery(raw, func(key, value string) error { return takeQuery(out, key, value) }); err != nil {
		return err
	}
	if err := out.Parameters.Validate(); err != nil {
		return invalid("parameters", err)
	}
	for step, options := range out.Steps {
		if err := options.Parameters.Validate(); err != nil {
			return invalid("steps."+string(step), err)
		}
	}
	return nil
}

func takeQuery(out *request.Request, key, value string) error {
	if !utf8.ValidString(key) || !utf8.ValidString(value) {
		return errors.New("is not UTF-8")
	}
	if key == "outputs" {
		if n := 1 + strings.Count(value, ","); n > payload.MaxParts {
			return fmt.Errorf("%d names, at most %d are allowed", n, payload.MaxParts)
		}
		for name := range strings.SplitSeq(value, ",") {
			if name = strings.TrimSpace(name); name == "" {
				return fmt.Errorf("%.*q names an output without a name", fault.MaxQuoted, value)
			}
			out.Outputs = append(out.Outputs, name)
		}
		return nil
	}
	if name, ok := strings.CutPrefix(key, "parameters."); ok && name != "" {
		out.Parameters = with(out.Parameters, name, value)
		return nil
	}
	rest, ok := strings.CutPrefix(key, "steps.")
	stepName, name, named := strings.Cut(rest, ".")
	if !ok || !named || stepName == "" || name == "" {
		return errors.New("unknown key; expected parameters.<name>, steps.<step>.<name> and outputs")
	}
	if out.Steps == nil {
		out.Steps = map[pipeline.StepName]pipeline.StepOptions{}
	}
	step := pipeline.StepName(stepName)
	options := out.Steps[step]
	options.Parameters = with(options.Parameters, name, value)
	out.Steps[step] = options
	return nil
}

// waitOf parses the query of a result, whose only key is wait.
func waitOf(raw string) (wait time.Duration, err error) {
	err = eachQuery(raw, func(key, value string) (err error) {
		if key != "wait" {
			return errors.New("unknown key; expected wait")
		}
		wait, err = duration(value)
		return err
	})
	return wait, err
}

func with(p payload.Parameters, name, value string) payload.Parameters {
	if p == nil {
		p = payload.Parameters{}
	}
	p[name] = payload.ParseValue(value)
	return p
}

func invalid(field string, err error) error {
	field = fmt.Sprintf("%.*s", fault.MaxQuoted, strings.ToValidUTF8(field, "\uFFFD"))
	return fault.InField(fault.InvalidRequest, field, "%s", err)
}
