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

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// options sets the options of headers and query.
func options(out *call.Request, r *http.Request) error {
	for _, o := range []struct {
		name string
		take func(*call.Request, string) error
	}{
		{transport.HeaderTimeout, takeTimeout},
		{transport.HeaderPriority, takePriority},
		{transport.HeaderDurability, takeDurability},
		{transport.HeaderIdempotencyKey, takeIdempotencyKey},
		{transport.HeaderWaitForCapacity, takeWaitForCapacity},
	} {
		value := strings.TrimSpace(r.Header.Get(o.name))
		if value == "" {
			continue
		}
		if err := o.take(out, value); err != nil {
			return invalid(o.name, err)
		}
	}
	return query(out, r.URL.RawQuery)
}

func takeTimeout(out *call.Request, value string) error {
	d, err := duration(value)
	if err != nil {
		return err
	}
	if d <= 0 {
		return fmt.Errorf("%.*q is no time at all", maxQuoted, value)
	}
	out.Timeout = d
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
		return 0, fmt.Errorf("%.*q is neither a duration such as 250ms nor whole milliseconds", maxQuoted, value)
	}
	return d, nil
}

func takePriority(out *call.Request, value string) error {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil {
		return fmt.Errorf("%.*q is no whole number of 32 bits", maxQuoted, value)
	}
	out.Priority = int32(n)
	return nil
}

func takeDurability(out *call.Request, value string) error {
	d, err := pipeline.ParseDurability(value)
	if err != nil {
		return fmt.Errorf("%.*q: use memory or file", maxQuoted, value)
	}
	out.Durability = d
	return nil
}

func takeIdempotencyKey(out *call.Request, value string) error {
	if len(value) > call.MaxIdempotencyKey || !utf8.ValidString(value) {
		return fmt.Errorf("a key is UTF-8 of at most %d bytes", call.MaxIdempotencyKey)
	}
	out.IdempotencyKey = value
	return nil
}

func takeWaitForCapacity(out *call.Request, value string) error {
	waits, err := strconv.ParseBool(value)
	if err != nil {
		return fmt.Errorf("%.*q: use true or false", maxQuoted, value)
	}
	out.WaitForCapacity = &waits
	return nil
}

// query sets the options of the query. Every key may come once.
func query(out *call.Request, raw string) error {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return fault.Newf(fault.InvalidRequest, "the query cannot be read: %w", err)
	}
	if len(values) > payload.MaxParameters {
		return fault.Newf(fault.InvalidRequest, "%d query parameters, at most %d are taken", len(values), payload.MaxParameters)
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if err := takeQuery(out, key, values[key]); err != nil {
			return invalid(key, err)
		}
	}
	if err := out.Parameters.Validate(); err != nil {
		return invalid("parameters", err)
	}
	for step, options := range out.Steps {
		if err := options.Parameters.Validate(); err != nil {
			return invalid("steps."+step, err)
		}
	}
	return nil
}

func takeQuery(out *call.Request, key string, values []string) error {
	if len(values) > 1 {
		return fmt.Errorf("is there %d times", len(values))
	}
	value := values[0]
	if !utf8.ValidString(key) || !utf8.ValidString(value) {
		return errors.New("is not UTF-8")
	}
	if key == "outputs" {
		return takeOutputs(out, value)
	}
	if name, ok := strings.CutPrefix(key, "parameters."); ok && name != "" {
		out.Parameters = with(out.Parameters, name, value)
		return nil
	}
	if rest, ok := strings.CutPrefix(key, "steps."); ok {
		if step, name, ok := strings.Cut(rest, "."); ok && step != "" && name != "" {
			takeStep(out, step, name, value)
			return nil
		}
	}
	return errors.New("is no key; there are parameters.<name>, steps.<step>.<name> and outputs")
}

func takeOutputs(out *call.Request, value string) error {
	for name := range strings.SplitSeq(value, ",") {
		if name = strings.TrimSpace(name); name == "" {
			return fmt.Errorf("%.*q names an output without a name", maxQuoted, value)
		}
		out.Outputs = append(out.Outputs, name)
	}
	return nil
}

func takeStep(out *call.Request, step, name, value string) {
	if out.Steps == nil {
		out.Steps = map[string]call.StepOptions{}
	}
	options := out.Steps[step]
	options.Parameters = with(options.Parameters, name, value)
	out.Steps[step] = options
}

func with(p payload.Parameters, name, value string) payload.Parameters {
	if p == nil {
		p = payload.Parameters{}
	}
	p[name] = payload.ParseValue(value)
	return p
}

// maxQuoted bounds how much of a caller's own text messages repeat, in runes.
const maxQuoted = 80

func invalid(field string, err error) error {
	field = fmt.Sprintf("%.*s", maxQuoted, strings.ToValidUTF8(field, "\uFFFD"))
	return fault.Newf(fault.InvalidRequest, "%s: %s", field, err).WithViolation(field, "%s", err)
}
