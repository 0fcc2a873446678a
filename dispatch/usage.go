package dispatch

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// RatesConfig is what work costs, in a currency that the mesh does not interpret.
type RatesConfig struct {
	Currency string `yaml:"currency"`
	// Stages are those of the mesh, Pools those with an HTTP target.
	Stages map[string]StageRate `yaml:"stages"`
	Pools  map[string]TokenRate `yaml:"pools"`
}

// StageRate is what a runner of a stage costs while it runs: the price of a second, and power.
type StageRate struct {
	Price float64 `yaml:"price"`
	Watts float64 `yaml:"watts"`
}

// TokenRate is what a million tokens cost.
type TokenRate struct {
	Prompt     float64 `yaml:"prompt_tokens"`
	Completion float64 `yaml:"completion_tokens"`
}

const (
	// perTokens is how many tokens a TokenRate is for.
	perTokens = 1_000_000
	// maxPrice bounds rates, so that a sum of them is a number.
	maxPrice = 1e12
)

func validRate(key string, rate float64) error {
	if rate > maxPrice {
		return fmt.Errorf("%s: %g, at most %g is possible", key, rate, maxPrice)
	}
	return config.NotNegative(key, rate)
}

func (r RatesConfig) validate(pools map[string]PoolConfig) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(r.Stages)) {
		if err := pipeline.ValidName("stage", name); err != nil {
			errs = append(errs, fmt.Errorf("stages.%s: %w", name, err))
		}
		errs = append(errs, config.InSection("stages."+name, errors.Join(validRate("price", r.Stages[name].Price), validRate("watts", r.Stages[name].Watts))))
	}
	for _, name := range slices.Sorted(maps.Keys(r.Pools)) {
		if pools[name].Target.HTTP == nil {
			errs = append(errs, fmt.Errorf("pools.%s: there is no such pool with an HTTP target, which counts tokens", name))
		}
		errs = append(errs, config.InSection("pools."+name, errors.Join(validRate("prompt_tokens", r.Pools[name].Prompt), validRate("completion_tokens", r.Pools[name].Completion))))
	}
	return errors.Join(errs...)
}

// usageOf returns what an attempt took of a job in a pool, but for time.
func (r RatesConfig) usageOf(pool string, a Answer, out outcome) *inferencev1.JobUsage {
	u := &inferencev1.JobUsage{Attempts: 1}
	if out != latched {
		u.BytesIn, u.BytesOut = a.sent, bytesOf(a.Infer.GetOutputs())+uint64(len(a.HTTP.GetBody()))
	}
	for _, step := range a.Steps {
		took := step.GetRun().AsDuration().Seconds() / float64(max(1, step.GetBatchSize()))
		if rows := step.GetBatchRows(); rows > 0 && step.GetRows() > 0 { // older hosts do not say
			took = step.GetRun().AsDuration().Seconds() * float64(step.GetRows()) / float64(rows)
		}
		rate := r.Stages[step.GetStage()]
		u.RunnerSeconds += took
		u.Cost += took * rate.Price
		u.Joules += took * rate.Watts
	}
	u.PromptTokens, u.CompletionTokens = tokensOf(a.HTTP.GetBody())
	rate := r.Pools[pool]
	u.Cost += (float64(u.GetPromptTokens())*rate.Prompt + float64(u.GetCompletionTokens())*rate.Completion) / perTokens
	return u
}

// addUsage adds what an attempt took to the usage of its job.
func (r RatesConfig) addUsage(to, of *inferencev1.JobUsage) {
	to.Attempts += of.GetAttempts()
	to.RunnerSeconds += of.GetRunnerSeconds()
	to.BytesIn += of.GetBytesIn()
	to.BytesOut += of.GetBytesOut()
	to.PromptTokens += of.GetPromptTokens()
	to.CompletionTokens += of.GetCompletionTokens()
	to.Cost += of.GetCost()
	to.Joules += of.GetJoules()
	to.Currency = r.Currency
}

// tokensOf returns the tokens that an OpenAI-compatible answer has used; 0 if it does not say.
func tokensOf(answer []byte) (prompt, completion uint64) {
	if len(answer) == 0 || answer[0] != '{' {
		return 0, 0
	}
	var of struct {
		Usage struct {
			Prompt     int64 `json:"prompt_tokens"`
			Completion int64 `json:"completion_tokens"`
		} `json:"usage"`
	}
	_ = json.Unmarshal(answer, &of) // what is not of that form says nothing
	count := func(n int64) uint64 { return uint64(min(max(0, n), math.MaxInt32)) }
	return count(of.Usage.Prompt), count(of.Usage.Completion)
}

// sizeOf returns the bytes of a job's payload.
func sizeOf(job *meshv1.QueuedJob) uint64 {
	return bytesOf(job.GetInfer().GetInputs()) + uint64(len(job.GetHttp().GetBody()))
}

func bytesOf(parts []*inferencev1.Part) (n uint64) {
	for _, p := range parts {
		n += uint64(len(p.GetBlob().GetData()) + len(p.GetTensor().GetRaw()))
	}
	return n
}
