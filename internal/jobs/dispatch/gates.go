package dispatch

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // images have none

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
)

// What a value means: the part that is used, which leaves 1 less that, or that may be used.
const (
	fullness   = "fullness"
	saturation = "saturation"
	ofBudget   = "budget"
)

func validMeasure(of string) error { return oneOf("of", of, fullness, saturation, ofBudget) }

// roomOf returns the reading of a value. More than full is full, but more than empty is an error: it may
// be percent.
func roomOf(v float64, of string) (d float64, err error) {
	if d = v; of != ofBudget {
		d = 1 - v
	}
	if !(d <= 1+margin) || math.IsInf(d, 0) {
		err = fmt.Errorf("%s: the %s is %v", invalid, of, v)
	}
	return min(1, max(0, d)), err
}

// PrometheusGate asks a Prometheus server.
type PrometheusGate struct {
	// URL is the server's, Query has one sample as its result.
	URL   string `yaml:"url"`
	Query string `yaml:"query"`
	// TimeQuery returns when that was true, as min(timestamp(x)). Else it is ScrapeInterval old.
	TimeQuery      string        `yaml:"time_query"`
	ScrapeInterval time.Duration `yaml:"scrape_interval"`
	// Of says what the sample is: fullness, saturation or budget.
	Of string `yaml:"of"`
}

// DefaultScrapeInterval is the default of PrometheusGate.ScrapeInterval.
const DefaultScrapeInterval = 15 * time.Second

func (c *PrometheusGate) build(p *poolGate, source string) (gate, error) {
	err := errors.Join(validURL(c.URL), validMeasure(c.Of), config.NotNegative("scrape_interval", c.ScrapeInterval))
	if c.Query == "" {
		err = errors.Join(err, errors.New("query: is required"))
	}
	return p.poll(func(ctx context.Context) (reading, error) {
		var seconds float64
		if c.TimeQuery != "" {
			// It goes first: a sample that comes between the two is newer than the time says.
			var err error
			if _, seconds, err = c.ask(ctx, p.client, c.TimeQuery); err != nil {
				return reading{}, fmt.Errorf("time_query: %w", err)
			}
		}
		evaluated, v, err := c.ask(ctx, p.client, c.Query)
		at := evaluated.Add(-cmp.Or(c.ScrapeInterval, DefaultScrapeInterval))
		if c.TimeQuery != "" {
			at = time.UnixMicro(int64(math.Round(seconds * 1e6)))
		}
		d, verr := roomOf(v, c.Of)
		return reading{d: d, at: at, source: source}, cmp.Or(err, verr)
	}), err
}

func validURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("url: %q is not an address such as http://127.0.0.1:9090", text)
	}
	return nil
}

func (c *PrometheusGate) ask(ctx context.Context, client *http.Client, query string) (evaluated time.Time, v float64, err error) {
	page, _, err := fetch(ctx, client, strings.TrimSuffix(c.URL, "/")+"/api/v1/query", url.Values{"query": {query}})
	if err != nil {
		return evaluated, 0, err
	}
	return parseSample(page)
}

func parseSample(page []byte) (evaluated time.Time, v float64, err error) {
	var answer struct {
		Status, Error string
		Data          struct {
			ResultType model.ValueType
			Result     json.RawMessage
		}
	}
	if err = json.Unmarshal(page, &answer); err == nil && answer.Status != "success" {
		return evaluated, 0, fmt.Errorf("status %q: %.200s", answer.Status, answer.Error)
	}
	samples, of := model.Vector{{}}, answer.Data.ResultType
	switch {
	case err != nil:
	case of == model.ValScalar:
		var one model.Scalar
		err = json.Unmarshal(answer.Data.Result, &one)
		samples[0].Value, samples[0].Timestamp = one.Value, one.Timestamp
	case of == model.ValVector:
		err = json.Unmarshal(answer.Data.Result, &samples)
	default:
		return evaluated, 0, fmt.Errorf("the query has a %.20s as its result, not one sample", of)
	}
	switch {
	case err != nil:
		return evaluated, 0, fmt.Errorf("the answer is not from Prometheus: %w", err)
	case len(samples) != 1 || samples[0] == nil:
		return evaluated, 0, fmt.Errorf("the query has %d samples as its result, not one", len(samples))
	}
	v = float64(samples[0].Value)
	return samples[0].Timestamp.Time(), v, finite(v)
}

func finite(v float64) error {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return fmt.Errorf("the value is %v", v)
	}
	return nil
}

// maxGatePage bounds what a source of a gate answers.
const maxGatePage = 16 << 20

// fetch returns a page, and when it was true: by Age and Last-Modified, or now. A form is posted.
func fetch(ctx context.Context, client *http.Client, address string, form url.Values) (page []byte, at time.Time, err error) {
	method, at := http.MethodGet, time.Now()
	if form != nil {
		method = http.MethodPost
	}
	request, err := http.NewRequestWithContext(ctx, method, address, strings.NewReader(form.Encode()))
	if err != nil {
		return nil, at, err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := client.Do(request)
	if err != nil {
		return nil, at, err
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	if response.StatusCode == http.StatusSwitchingProtocols {
		// Its body ignores the context.
		return nil, at, fmt.Errorf("status %d", response.StatusCode)
	}
	page, err = io.ReadAll(io.LimitReader(response.Body, maxGatePage+1))
	switch {
	case err != nil:
		return nil, at, err
	case response.StatusCode != http.StatusOK:
		return nil, at, fmt.Errorf("status %d: %.200s", response.StatusCode, bytes.TrimSpace(page))
	case len(page) > maxGatePage:
		return nil, at, fmt.Errorf("the answer is larger than %s", config.Bytes(maxGatePage))
	}
	if age, err := strconv.ParseUint(response.Header.Get("Age"), 10, 31); err == nil {
		at = at.Add(-time.Duration(age) * time.Second)
	}
	if modified, err := http.ParseTime(response.Header.Get("Last-Modified")); err == nil && modified.Before(at) {
		at = modified
	}
	return page, at, nil
}

// ScrapeGate reads a page of metrics in the text format of Prometheus.
type ScrapeGate struct {
	URL string `yaml:"url"`
	// Metric is summed over its series, in the unit of the budget. What ready servers take less that is free.
	Metric string `yaml:"metric"`
}

func (c *ScrapeGate) build(p *poolGate, source string) (gate, error) {
	err := validURL(c.URL)
	if c.Metric == "" {
		err = errors.Join(err, errors.New("metric: is required"))
	}
	sum := p.poll(func(ctx context.Context) (reading, error) {
		page, at, err := fetch(ctx, p.client, c.URL, nil)
		if err != nil {
			return reading{}, err
		}
		sum, err := sumOf(page, c.Metric)
		return reading{d: sum, at: at, source: source}, err
	})
	return func(now time.Time) (reading, error) {
		out, err := sum(now)
		out.d = max(0, 1-out.d/p.credit.capacity())
		return out, err
	}, err
}

func sumOf(page []byte, metric string) (sum float64, err error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err == nil && families[metric] == nil {
		err = fmt.Errorf("the page has no %s", metric)
	}
	for _, m := range families[metric].GetMetric() {
		sum += m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetUntyped().GetValue()
	}
	return sum, cmp.Or(err, finite(sum))
}

// ValueGate reads a number from a page, or from the broker's key-value store.
type ValueGate struct {
	URL string `yaml:"url"`
	// KV is a bucket, / and a key in it. The number is as old as the entry.
	KV string `yaml:"kv"`
	// Of says what the number is: budget, the default, fullness or saturation.
	Of string `yaml:"of"`
}

var keyValueName = regexp.MustCompile(`^[A-Za-z0-9_-]+/[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*$`)

func (c *ValueGate) build(p *poolGate, source string) (gate, error) {
	of := cmp.Or(c.Of, ofBudget)
	err := validMeasure(of)
	switch {
	case (c.URL == "") == (c.KV == ""):
		err = errors.Join(err, errors.New("url: a value is at a url or in kv"))
	case c.URL != "":
		err = errors.Join(err, validURL(c.URL))
	case !keyValueName.MatchString(c.KV):
		err = errors.Join(err, fmt.Errorf("kv: %q; use a bucket and a key, such as gates/gpu", c.KV))
	}
	return p.poll(func(ctx context.Context) (reading, error) {
		var page []byte
		var at time.Time
		var err error
		if c.URL != "" {
			page, at, err = fetch(ctx, p.client, c.URL, nil)
		} else {
			page, at, err = p.settings.entry(ctx, c.KV)
		}
		if err != nil {
			return reading{}, err
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(string(page)), 64)
		d, verr := roomOf(v, of)
		return reading{d: d, at: at, source: source}, cmp.Or(err, verr)
	}), err
}

func (s *Settings) entry(ctx context.Context, name string) (value []byte, at time.Time, err error) {
	bucket, key, _ := strings.Cut(name, "/")
	msg, err := s.keyValue(ctx, bucket, key)
	if errors.Is(err, bus.ErrNoQueue) || err == nil && msg == nil {
		return nil, at, fmt.Errorf("there is no key %s", name)
	} else if err != nil {
		return nil, at, err
	}
	return msg.Data, msg.At, nil
}

// OwnGate is a function of the program, see Settings.Gates.
type OwnGate struct {
	Name string `yaml:"name"`
}

// GateFunc returns how much room a target has, in [0, 1], and when that was true; zero means now. It is called at the
// interval of its gate, and has two seconds. A gate is closed after an error.
type GateFunc func(ctx context.Context) (room float64, at time.Time, err error)

func (c *OwnGate) build(p *poolGate, source string) (gate, error) {
	var err error
	if c.Name == "" {
		err = errors.New("name: is required; name a gate of the program")
	}
	return p.poll(func(ctx context.Context) (reading, error) {
		asked := time.Now()
		room, at, err := p.settings.Gates[c.Name](ctx) // newSetup has checked that it is there
		if at.IsZero() {
			at = asked
		}
		d, invalid := roomOf(room, ofBudget)
		return reading{d: d, at: at, source: source}, cmp.Or(err, invalid)
	}), err
}

// checkOwn returns an error for a gate of a name that the program does not have.
func (g Gate) checkOwn(has map[string]GateFunc) error {
	if g.Own != nil && has[g.Own.Name] == nil {
		return fmt.Errorf("own: this program has no gate %q; it has %s. A Go program adds gates in Settings.Gates", g.Own.Name, cmp.Or(strings.Join(slices.Sorted(maps.Keys(has)), ", "), "none"))
	}
	var errs []error
	for _, of := range slices.Concat(g.First, g.Min, g.Product) {
		errs = append(errs, of.checkOwn(has))
	}
	return errors.Join(errs...)
}

// ConstantGate always says the same.
type ConstantGate struct {
	// Value is in [0, 1]; nil means 1.
	Value *float64 `yaml:"value"`
}

func (c *ConstantGate) build(_ *poolGate, source string) (gate, error) {
	d := *cmp.Or(c.Value, new(1.))
	if !(d >= 0 && d <= 1) {
		return nil, fmt.Errorf("value: %v is not within 0 and 1", d)
	}
	return timeless(source, func(time.Time) float64 { return d }), nil
}

// timeless returns a gate without a source.
func timeless(name string, d func(now time.Time) float64) gate {
	began := time.Now()
	return func(now time.Time) (reading, error) {
		return reading{d: d(now), at: began, source: name, timeless: true}, nil
	}
}

// ScheduleGate is open at some hours of some days.
type ScheduleGate struct {
	// Days are mon to sun; none means all.
	Days []string `yaml:"days"`
	// Hours are "22:00-06:00"; empty means all day. Those over midnight belong to the day they begin on.
	Hours string `yaml:"hours"`
	// Zone is Europe/Berlin or such; empty means UTC.
	Zone string `yaml:"zone"`
}

var weekdays = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

func (c *ScheduleGate) build(_ *poolGate, source string) (gate, error) {
	var errs []error
	for i, day := range c.Days {
		if !slices.Contains(weekdays, day) {
			errs = append(errs, fmt.Errorf("days[%d]: %q; use %s", i, day, strings.Join(weekdays, ", ")))
		}
	}
	begin, end, ok := strings.Cut(cmp.Or(c.Hours, "00:00-24:00"), "-")
	from, to := minutesOf(begin), minutesOf(end)
	if !ok || from < 0 || to < 0 || from == to || from == wholeDay {
		errs = append(errs, fmt.Errorf("hours: %q; use such as 22:00-06:00", c.Hours))
	}
	zone, err := time.LoadLocation(c.Zone)
	if err != nil {
		errs = append(errs, fmt.Errorf("zone: %w", err))
	}
	return timeless(source, func(now time.Time) float64 {
		now = now.In(zone)
		minute, day := now.Hour()*60+now.Minute(), now.Weekday()
		if minute < from { // it is of the hours that began yesterday
			minute, day = minute+wholeDay, (day+6)%7
		}
		isOpen := minute < to || to < from && minute < to+wholeDay
		return oneIf(isOpen && (len(c.Days) == 0 || slices.Contains(c.Days, weekdays[day])))
	}), errors.Join(errs...)
}

const wholeDay = 24 * 60

// minutesOf returns the minutes of a day until a time such as 06:30, or -1.
func minutesOf(text string) int {
	if text == "24:00" {
		return wholeDay
	}
	t, err := time.Parse("15:04", text)
	if err != nil {
		return -1
	}
	return t.Hour()*60 + t.Minute()
}

// AdaptiveGate has one job more after each window of successes, half as many after a refusal or timeout.
type AdaptiveGate struct {
	// Window is the first window; 0 means 4.
	Window int `yaml:"window"`
}

const (
	defaultWindow = 4
	maxWindow     = 256
)

func (c *AdaptiveGate) build(p *poolGate, source string) (gate, error) {
	window, successes := cmp.Or(c.Window, defaultWindow), 0
	var halved time.Time
	p.notes = append(p.notes, func(out outcome, isLate bool, began, now time.Time) {
		switch {
		case out == latched || out != succeeded && isLate:
			// The attempts that began before are of the same flight.
			if began.After(halved) {
				window, halved, successes = max(1, window/2), now, 0
			}
		case out == succeeded:
			if successes++; successes >= window {
				window, successes = min(maxWindow, window+1), 0
			}
		}
	})
	return timeless(source, func(time.Time) float64 { // the budget is the window
		return min(1, *p.credit.Baseline+float64(window)/p.credit.capacity())
	}), within("window", c.Window, maxWindow)
}

// MeshGate looks at the stages of the pool's pipelines. The one that is busiest counts.
type MeshGate struct {
	// MaxWait is the estimated wait before a stage at which it is full; 0 means DefaultGateMaxWait.
	MaxWait time.Duration `yaml:"max_wait"`
}

// DefaultGateMaxWait is the default of MeshGate.MaxWait.
const DefaultGateMaxWait = 5 * time.Second

// StageLoad is what a stage has to do.
type StageLoad struct {
	Name string
	// Items wait in its queues, or are in flight. MaxInFlight is what its ready hosts hold.
	Items, MaxInFlight int
	Wait               time.Duration // in its queues, estimated; 0 where that is not known
}

func (c *MeshGate) build(p *poolGate, source string) (gate, error) {
	most := cmp.Or(c.MaxWait, DefaultGateMaxWait)
	return p.poll(func(ctx context.Context) (reading, error) {
		out := reading{d: 1, at: time.Now(), source: source, counts: true}
		stages, err := p.settings.Stages(ctx, p.pipelines)
		if err == nil && len(stages) == 0 {
			err = errors.New("the pipelines have no stages")
		}
		for i, s := range stages {
			if s.MaxInFlight <= 0 {
				return reading{}, fmt.Errorf("stage %s has no ready host", s.Name)
			}
			capacity := float64(s.MaxInFlight)
			out.d = min(out.d, max(0, 1-max(float64(s.Items)/capacity, s.Wait.Seconds()/most.Seconds())))
			if i == 0 || capacity < out.capacity {
				out.capacity = capacity
			}
		}
		return out, err
	}), config.NotNegative("max_wait", c.MaxWait)
}
