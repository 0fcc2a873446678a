package pipeline

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const (
	// MaxDepth bounds how deep blocks nest.
	MaxDepth = 8
	// DefaultMaxItems bounds the items of a map that names no bound.
	DefaultMaxItems = 64
	// MaxItems bounds the items of a map, and the product of nested ones.
	MaxItems = 4096
	// MaxBranches bounds the branches or cases of a block.
	MaxBranches = 64
)

// Block is what a step is instead of a stage: exactly one field is set.
type Block struct {
	Parallel *Parallel `yaml:"parallel"`
	Map      *Map      `yaml:"map"`
	// Switch are the cases: the first that matches runs.
	Switch []Case `yaml:"switch"`
	Split  *Split `yaml:"split"`
	Try    *Try   `yaml:"try"`
}

// Parallel runs branches side by side and joins them. It gives what its branches give.
type Parallel struct {
	Branches map[string]Branch `yaml:"branches"`
	// Quorum is how many branches are waited for: the others are cancelled, and their parts are
	// absent or those that are set for it. 0 means all.
	Quorum int `yaml:"quorum"`
	// Within, from the block's start, is when branches are late; 0 means the request's deadline, before which
	// time for later steps may be reserved.
	Within time.Duration `yaml:"within"`
}

// Branch is a branch of a Parallel or a Split.
type Branch struct {
	Steps []Step `yaml:"steps"`
	// Give maps the parts that the branch gives to parts in it; empty means the outputs of its last
	// step.
	Give map[string]string `yaml:"give"`
	// Missing are its parts where it is late or fails. With Optional they are absent then.
	// Without both, its fault is the request's.
	Missing  map[string]Constant `yaml:"missing"`
	Optional bool                `yaml:"optional"`
	// Weight is the percentage of requests, in a Split.
	Weight int `yaml:"weight"`
}

// Map runs its steps for each element of axis 0 of a part, and stacks what they give.
type Map struct {
	// Over maps the parts of an item to those that are split; several have equal extents.
	Over map[string]string `yaml:"over"`
	// MaxItems bounds the items; 0 means DefaultMaxItems.
	MaxItems int    `yaml:"max_items"`
	Steps    []Step `yaml:"steps"`
	// Give maps the parts that the block gives to parts of an item; empty means the outputs of the
	// last step.
	Give map[string]string `yaml:"give"`
	// OnItemError says what becomes of a failed item; empty means FailItems.
	OnItemError ItemError `yaml:"on_item_error"`
	// Fill are the parts of a failed item, with FillItems.
	Fill map[string]Constant `yaml:"fill"`
	// Indices names a part with the indices of the items that are there, INT64[n]; empty for none.
	Indices string `yaml:"indices"`
}

// ItemError is what becomes of a failed item of a Map.
type ItemError string

// FailItems fails the request, OmitItems leaves the item out, FillItems puts constants in its place.
const (
	FailItems ItemError = "fail"
	OmitItems ItemError = "omit"
	FillItems ItemError = "fill"
)

// Case is a case of a switch.
type Case struct {
	// When is nil in the last case, which has Else.
	When  *Predicate        `yaml:"when"`
	Steps []Step            `yaml:"steps"`
	Give  map[string]string `yaml:"give"`
	// Fail fails the request.
	Fail *Failure `yaml:"fail"`
	// Else are the steps of the last case; not nil there, and empty to pass on.
	Else []Step `yaml:"else"`
}

// Failure is a fault that a pipeline gives by itself.
type Failure struct {
	Reason  fault.Reason `yaml:"reason"`
	Message string       `yaml:"message"`
}

// Predicate is a condition on one value of a request: a part, a parameter or a key of the metadata of
// the request, or its tenant. One of Equals to Exists is set; Above and Below may be together.
type Predicate struct {
	Part      string `yaml:"part"`
	Parameter string `yaml:"parameter"`
	Metadata  string `yaml:"metadata"`
	Tenant    bool   `yaml:"tenant"`

	Equals *payload.Value  `yaml:"equals"`
	In     []payload.Value `yaml:"in"`
	Above  *float64        `yaml:"above"`
	Below  *float64        `yaml:"below"`
	// Matches is a regular expression (RE2) that the whole text matches.
	Matches string `yaml:"matches"`
	Exists  *bool  `yaml:"exists"`

	// Any, All and Index say which elements of a tensor the condition is for; one with a single
	// element needs none.
	Any   bool   `yaml:"any"`
	All   bool   `yaml:"all"`
	Index *int64 `yaml:"index"`
}

// Split runs one of its branches, by their weights.
type Split struct {
	Branches map[string]Branch `yaml:"branches"`
	// ByMetadata is a key of the metadata; requests with equal values take the same branch. Empty,
	// or where the request has no such key, its ID decides.
	ByMetadata string `yaml:"by_metadata"`
}

// Try runs other steps where its own fail.
type Try struct {
	Steps []Step `yaml:"steps"`
	// Within, from the block's start, is when they have failed with DEADLINE_EXCEEDED; 0 means at the
	// request's deadline, before which time for other steps may be reserved.
	Within time.Duration `yaml:"within"`
	// On are the reasons; empty means DefaultTryReasons.
	On   []fault.Reason `yaml:"on"`
	Else []Step         `yaml:"else"`
}

// DefaultTryReasons returns the reasons for which a Try runs its Else.
func DefaultTryReasons() []fault.Reason {
	return []fault.Reason{fault.DeadlineExceeded, fault.NoCapacity, fault.QueueFull, fault.Overloaded, fault.RunnerCrashed}
}

// IsBlock reports whether the step is a block. Each request asks it of each step.
func (s *Step) IsBlock() bool {
	return s.Parallel != nil || s.Map != nil || s.Switch != nil || s.Split != nil || s.Try != nil
}

func (b *Block) count() (n int) {
	for _, isSet := range []bool{b.Parallel != nil, b.Map != nil, b.Switch != nil, b.Split != nil, b.Try != nil} {
		if isSet {
			n++
		}
	}
	return n
}

// HasBlocks reports whether a step of the pipeline is a block.
func (p *Pipeline) HasBlocks() bool {
	for i := range p.Steps { // by index: a copy of a step is large
		if p.Steps[i].IsBlock() {
			return true
		}
	}
	return false
}

// StageSteps returns the steps that are stages, those in blocks too, in the order of the file; the
// branches of a block by their names. Without blocks they are Steps itself.
func (p *Pipeline) StageSteps() []Step {
	if !p.HasBlocks() {
		return p.Steps
	}
	var out []Step
	_ = eachStage(p.Steps, func(step *Step) error {
		out = append(out, *step)
		return nil
	})
	return out
}

// eachStage visits the steps that StageSteps returns, without a copy of them, until an error.
func eachStage(steps []Step, visit func(*Step) error) error {
	for i := range steps {
		if !steps[i].IsBlock() {
			if err := visit(&steps[i]); err != nil {
				return err
			}
			continue
		}
		for _, inner := range steps[i].Lists() {
			if err := eachStage(inner.Steps, visit); err != nil {
				return err
			}
		}
	}
	return nil
}

// List is a list of steps in a block: a branch, a case, the steps of a map.
type List struct {
	// Name is its place under the block's path: of a branch its name.
	Name  string
	Steps []Step
	Give  map[string]string
	// block is the block's key in the file, index the place of a case in its switch.
	block string
	index int
}

// Field returns the key of the branch, case or block that has the list, below its step.
func (l List) Field() string {
	switch l.block {
	case "parallel", "split":
		return l.block + ".branches." + l.Name
	case "switch":
		return fmt.Sprintf("switch[%d]", l.index)
	}
	return l.block
}

// StepsField returns the key of the list itself, such as switch[1].else.
func (l List) StepsField() string {
	if l.Name == "else" && (l.block == "switch" || l.block == "try") {
		return l.Field() + ".else"
	}
	return l.Field() + ".steps"
}

// Lists returns the lists of a block's steps.
func (s *Step) Lists() (out []List) {
	branches := func(block string, all map[string]Branch) {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			out = append(out, List{name, all[name].Steps, all[name].Give, block, 0})
		}
	}
	switch {
	case s.Parallel != nil:
		branches("parallel", s.Parallel.Branches)
	case s.Map != nil:
		out = append(out, List{"", s.Map.Steps, s.Map.Give, "map", 0})
	case s.Switch != nil:
		out = make([]List, 0, len(s.Switch))
		for i, c := range s.Switch {
			if c.Else != nil {
				out = append(out, List{"else", c.Else, c.Give, "switch", i})
			} else {
				out = append(out, List{strconv.Itoa(i + 1), c.Steps, c.Give, "switch", i})
			}
		}
	case s.Split != nil:
		branches("split", s.Split.Branches)
	case s.Try != nil:
		out = append(out, List{"try", s.Try.Steps, nil, "try", 0}, List{"else", s.Try.Else, nil, "try", 0})
	}
	return out
}

// blocks checks the blocks of a pipeline.
type blocks struct {
	names  map[StepName]bool
	stages int
}

// keyError is an error that begins with a key.
type keyError struct{ error }

func (e keyError) Unwrap() error { return e.error }

// under puts a path before an error.
func under(path string, err error) error {
	if _, is := err.(keyError); is { //nolint:errorlint // whether this one begins with a key
		return keyError{fmt.Errorf("%s.%w", path, err)}
	}
	return keyError{fmt.Errorf("%s: %w", path, err)}
}

// checkSteps checks a list of steps at a depth; field is its key, items the product of the maps around it.
func (b *blocks) checkSteps(steps []Step, field string, depth, items int) error {
	for i := range steps {
		if err := b.checkStep(&steps[i], depth, items); err != nil {
			return under(fmt.Sprintf("%s[%d]", field, i), err)
		}
	}
	return nil
}

func (b *blocks) checkStep(s *Step, depth, items int) error {
	if !s.IsBlock() {
		if err := s.validateStage(); err != nil {
			return err
		}
		if b.stages++; b.stages > MaxSteps {
			return fmt.Errorf("more than %d stages in the pipeline", MaxSteps)
		}
	} else if err := ValidName("step", string(s.Name)); err != nil {
		return err
	}
	if b.names[s.Name] {
		return fmt.Errorf("a step named %s is there already", s.Name)
	}
	b.names[s.Name] = true
	switch {
	case !s.IsBlock():
		return nil
	case s.count() > 1:
		return errors.New("the step is several blocks; it can be one of parallel, map, switch, split and try")
	case s.Stage != "" || s.Model != (payload.ModelRef{}) || len(s.Parameters)+len(s.Inputs) > 0 || s.Locked:
		return errors.New("the step is a block, so stage, model, alias, version, parameters, inputs and locked are keys of the steps in it")
	case depth >= MaxDepth:
		return fmt.Errorf("blocks nest deeper than %d", MaxDepth)
	}
	if err := s.Block.validate(); err != nil {
		return keyError{err}
	}
	if s.Map != nil {
		items *= cmp.Or(s.Map.MaxItems, DefaultMaxItems)
		if s.Map.MaxItems < 0 || items > MaxItems {
			return keyError{fmt.Errorf("map.max_items: at most %d items are allowed, those of maps around it multiplied", MaxItems)}
		}
	}
	for _, list := range s.Lists() {
		if err := validateNames(list.Field()+".give", list.Give); err != nil {
			return keyError{err}
		}
		if err := b.checkSteps(list.Steps, list.StepsField(), depth+1, items); err != nil {
			return err
		}
	}
	return nil
}

func keyed(key string, err error) error { return fmt.Errorf("%s: %w", key, err) }

func validateNames(key string, names map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(names)) {
		for _, one := range []string{name, names[name]} {
			if err := payload.ValidName(one); err != nil {
				return fmt.Errorf("%s.%s: %w", key, name, err)
			}
		}
	}
	return nil
}

// validate checks a block but for the steps in it.
func (b *Block) validate() error {
	switch {
	case b.Parallel != nil:
		return b.Parallel.validate()
	case b.Map != nil:
		return b.Map.validate()
	case b.Switch != nil:
		return validateCases(b.Switch)
	case b.Split != nil:
		return b.Split.validate()
	}
	return b.Try.validate()
}

func checkBranches(block string, branches map[string]Branch) error {
	if n := len(branches); n == 0 || n > MaxBranches {
		return fmt.Errorf("%s.branches: %d, from 1 to %d are allowed", block, n, MaxBranches)
	}
	for _, name := range slices.Sorted(maps.Keys(branches)) {
		if err := ValidName("branch", name); err != nil {
			return fmt.Errorf("%s.branches.%s: %w", block, name, err)
		}
	}
	return nil
}

func (p *Parallel) validate() error {
	if err := checkBranches("parallel", p.Branches); err != nil {
		return err
	}
	switch {
	case p.Quorum < 0 || p.Quorum > len(p.Branches):
		return fmt.Errorf("parallel.quorum: %d of %d branches", p.Quorum, len(p.Branches))
	case p.Within < 0:
		return fmt.Errorf("parallel.within: %s is negative", p.Within)
	}
	given := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(p.Branches)) {
		at, branch := "parallel.branches."+name, p.Branches[name]
		switch {
		case len(branch.Steps) == 0:
			return fmt.Errorf("%s.steps: at least one is required", at)
		case branch.Weight != 0:
			return fmt.Errorf("%s.weight: only branches of a split have one", at)
		case branch.Missing != nil && len(branch.Missing) == 0:
			return fmt.Errorf("%s.missing: at least one part is required; use optional where parts are absent", at)
		case branch.Optional && branch.Missing != nil:
			return fmt.Errorf("%s.optional: the branch has missing, so its parts are never absent", at)
		}
		for _, part := range slices.Sorted(maps.Keys(branch.Give)) {
			if other, is := given[part]; is {
				return fmt.Errorf("%s.give.%s: the branch %s gives a part of that name too", at, part, other)
			}
			given[part] = name
		}
		if err := validateConstants(at+".missing", branch.Missing, branch.Give); err != nil {
			return err
		}
	}
	return nil
}

// validateConstants checks constants for parts that are given, all of them where those are known.
func validateConstants(field string, constants map[string]Constant, give map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(constants)) {
		if _, isGiven := give[name]; len(give) > 0 && !isGiven {
			return fmt.Errorf("%s.%s: no such part is given", field, name)
		}
		if _, err := constants[name].Part(name); err != nil {
			return fmt.Errorf("%s.%s.%w", field, name, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(give)) {
		if _, is := constants[name]; !is && constants != nil {
			return fmt.Errorf("%s: the part %s is required too", field, name)
		}
	}
	return nil
}

func (m *Map) validate() error {
	switch {
	case len(m.Over) == 0:
		return errors.New("map.over: at least one part is required")
	case len(m.Steps) == 0:
		return errors.New("map.steps: at least one is required")
	case !slices.Contains([]ItemError{"", FailItems, OmitItems, FillItems}, m.OnItemError):
		return fmt.Errorf("map.on_item_error: %q is not one of fail, omit and fill", m.OnItemError)
	case (m.OnItemError == FillItems) != (len(m.Fill) > 0):
		return errors.New("map.fill: is required with on_item_error: fill, and not allowed without")
	}
	if m.Indices != "" {
		if err := payload.ValidName(m.Indices); err != nil {
			return keyed("map.indices", err)
		}
	}
	if err := validateNames("map.over", m.Over); err != nil {
		return err
	}
	return validateConstants("map.fill", m.Fill, m.Give)
}

func validateCases(cases []Case) error {
	if n := len(cases); n < 2 || n > MaxBranches {
		return fmt.Errorf("switch: %d cases, from 2 to %d are allowed; the last one is `else`, and may be empty", n, MaxBranches)
	}
	for i, c := range cases {
		at, isLast := fmt.Sprintf("switch[%d]", i), i == len(cases)-1
		switch {
		case isLast && c.Else == nil:
			return fmt.Errorf("%s: the last case has to be `else`; `else: []` passes on", at)
		case isLast && (c.When != nil || c.Steps != nil || c.Fail != nil), !isLast && c.Else != nil:
			return fmt.Errorf("%s: only the last case has `else`, and nothing but that and give", at)
		case isLast:
			continue
		case c.When == nil:
			return fmt.Errorf("%s.when: is required", at)
		case (c.Fail == nil) == (len(c.Steps) == 0):
			return fmt.Errorf("%s: either steps or fail is required", at)
		}
		if err := c.When.validate(); err != nil {
			return fmt.Errorf("%s.when.%w", at, err)
		}
		if c.Fail != nil && !slices.Contains(fault.Reasons(), c.Fail.Reason) {
			return fmt.Errorf("%s.fail.reason: %q is not one of docs/faults.md, such as INVALID_INPUT", at, c.Fail.Reason)
		}
	}
	return nil
}

func (p *Predicate) validate() error {
	subjects, conditions, elements := 0, 0, 0
	count := func(n *int, all ...bool) {
		for _, isSet := range all {
			if isSet {
				*n++
			}
		}
	}
	count(&subjects, p.Part != "", p.Parameter != "", p.Metadata != "", p.Tenant)
	count(&conditions, p.Equals != nil, len(p.In) > 0, p.Above != nil || p.Below != nil, p.Matches != "", p.Exists != nil)
	count(&elements, p.Any, p.All, p.Index != nil)
	isText := p.Metadata != "" || p.Tenant
	isWrong := func(v payload.Value) bool {
		_, is := v.Any().(string)
		return isText && !is
	}
	switch {
	case subjects != 1:
		return errors.New("part: exactly one of part, parameter, metadata and tenant is required")
	case conditions != 1:
		return errors.New("equals: exactly one condition is required: equals, in, above or below, matches, exists")
	case elements > 1:
		return errors.New("any: one of any, all and index is enough")
	case elements > 0 && (p.Part == "" || p.Exists != nil):
		return errors.New("any: any, all and index are for elements of a part")
	case p.Index != nil && *p.Index < 0:
		return fmt.Errorf("index: %d is negative", *p.Index)
	case isText && (p.Above != nil || p.Below != nil):
		return errors.New("above: above and below compare numbers, and metadata and tenants are text")
	case p.Equals != nil && isWrong(*p.Equals):
		return fmt.Errorf("equals: metadata and tenants are text; write \"%v\" in quotes", p.Equals.Any())
	}
	if i := slices.IndexFunc(p.In, isWrong); i >= 0 {
		return fmt.Errorf("in[%d]: metadata and tenants are text; write \"%v\" in quotes", i, p.In[i].Any())
	}
	for key, limit := range map[string]*float64{"above": p.Above, "below": p.Below} {
		if limit != nil && (math.IsNaN(*limit) || math.IsInf(*limit, 0)) {
			return fmt.Errorf("%s: %v is not a finite number", key, *limit)
		}
	}
	_, err := regexp.Compile(p.Matches)
	if err == nil {
		_, err = p.Pattern() // \Q may lack its \E
	}
	if err != nil {
		return keyed("matches", err)
	}
	return nil
}

// Pattern returns Matches as an expression for a whole text, nil without one. The error says what is
// wrong with it; a valid predicate has none.
func (p *Predicate) Pattern() (*regexp.Regexp, error) {
	if p.Matches == "" {
		return nil, nil //nolint:nilnil // there is none
	}
	return regexp.Compile("^(?:" + p.Matches + ")$")
}

func (s *Split) validate() error {
	if err := checkBranches("split", s.Branches); err != nil {
		return err
	}
	sum := 0
	for _, name := range slices.Sorted(maps.Keys(s.Branches)) {
		branch := s.Branches[name]
		switch {
		case len(branch.Steps) == 0:
			return fmt.Errorf("split.branches.%s.steps: at least one is required", name)
		case branch.Optional || branch.Missing != nil:
			return fmt.Errorf("split.branches.%s: missing and optional are for branches of parallel; use try for a fallback", name)
		case branch.Weight < 0:
			return fmt.Errorf("split.branches.%s.weight: %d is negative", name, branch.Weight)
		}
		sum += branch.Weight
	}
	if sum != 100 {
		return fmt.Errorf("split.branches: the weights sum to %d; they are percentages, and must sum to 100", sum)
	}
	return nil
}

func (t *Try) validate() error {
	switch {
	case len(t.Steps) == 0:
		return errors.New("try.steps: at least one is required")
	case len(t.Else) == 0:
		return errors.New("try.else: at least one step is required")
	case t.Within < 0:
		return fmt.Errorf("try.within: %s is negative", t.Within)
	}
	for i, reason := range t.On {
		if !slices.Contains(fault.Reasons(), reason) {
			return fmt.Errorf("try.on[%d]: %q is not a reason of docs/faults.md, such as DEADLINE_EXCEEDED", i, reason)
		}
	}
	return nil
}
