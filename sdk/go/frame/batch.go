package frame

import (
	"errors"
	"fmt"
)

// Predict is a batch.
type Predict struct {
	Batch uint64 `json:"batch"`
	Items []Item `json:"items"`
	Parts []Part `json:"parts"`
	Model *Model `json:"model,omitempty"`
	// Warmup says that nobody waits for the answer.
	Warmup bool `json:"warmup,omitempty"`
}

var predictKeys = keys{4, []string{"type", "batch", "items", "parts", "model", "warmup"}}

func (*Predict) kind() string { return "predict" }

func (m *Predict) read(s *scanner) {
	o := s.object(&predictKeys)
	for o.more() {
		switch o.key {
		case "batch":
			m.Batch = s.batch()
		case "items":
			m.Items = list(s, (*Item).read)
		case "parts":
			m.Parts = list(s, (*Part).read)
		case "model":
			m.Model = &Model{}
			m.Model.read(s)
		case "warmup":
			m.Warmup = s.bool()
		default:
			s.skip()
		}
	}
}

func (m *Predict) write(w *writer) {
	w.batch("batch", m.Batch)
	writeList(w, "items", m.Items, (*Item).write)
	writeList(w, "parts", m.Parts, (*Part).write)
	if m.Model != nil {
		m.Model.write(w)
	}
	w.boolOr("warmup", m.Warmup)
}

func (m *Predict) check(body int64) error {
	if len(m.Items) == 0 {
		return errors.New("items: there are none")
	}
	if len(m.Items) > MaxItems {
		return fmt.Errorf("items: %d, at most %d are taken", len(m.Items), MaxItems)
	}
	total := int64(0)
	for i := range m.Items {
		rows := m.Items[i].Rows
		if rows < 0 || rows > maxCount {
			return fmt.Errorf("items[%d]: %w", i, checkCount("rows", rows, 0, maxCount))
		}
		total += int64(max(1, rows))
	}
	if err := checkBatch(m.Parts, len(m.Items), body); err != nil {
		return err
	}
	for i := range m.Parts {
		if p := &m.Parts[i]; p.Item == nil && p.Shape[0] != total {
			return fmt.Errorf("parts[%d]: shape: %d rows of items that have %d", i, p.Shape[0], total)
		}
	}
	return nil
}

// Item is one request of a batch.
type Item struct {
	ID string `json:"id"`
	// Rows is the item's extent on axis 0; 0 means 1.
	Rows       int               `json:"rows,omitempty"`
	Parameters Parameters        `json:"parameters,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	// Timeout is how long somebody waits for it, in milliseconds; 0 is for ever, so
	// what is left of less than one has to be rounded up.
	Timeout int64 `json:"timeout,omitempty"`
}

var itemKeys = keys{1, []string{"id", "rows", "parameters", "metadata", "timeout"}}

func (i *Item) read(s *scanner) {
	o := s.object(&itemKeys)
	for o.more() {
		switch o.key {
		case "id":
			i.ID = s.string()
		case "rows":
			i.Rows = s.count(1)
		case "parameters":
			i.Parameters = readParameters(s)
		case "metadata":
			i.Metadata = table(s, (*scanner).string)
		case "timeout":
			i.Timeout = s.whole(1, maxNumber)
		}
	}
}

func (i *Item) write(w *writer) {
	w.open('{')
	w.text("id", i.ID)
	w.numberOr("rows", int64(i.Rows))
	i.Parameters.write(w)
	if len(i.Metadata) > 0 {
		writeTable(w, "metadata", i.Metadata, writeText)
	}
	w.numberOr("timeout", i.Timeout)
	w.close('}')
}

// Result ends a batch.
type Result struct {
	Batch uint64 `json:"batch"`
	Parts []Part `json:"parts,omitempty"`
	// Faults are of items that have no outputs.
	Faults   []Fault    `json:"faults,omitempty"`
	Metadata []Metadata `json:"metadata,omitempty"`
}

var resultKeys = keys{2, []string{"type", "batch", "parts", "faults", "metadata"}}

func (*Result) kind() string { return "result" }

func (m *Result) read(s *scanner) {
	o := s.object(&resultKeys)
	for o.more() {
		switch o.key {
		case "batch":
			m.Batch = s.batch()
		case "parts":
			m.Parts = list(s, (*Part).read)
		case "faults":
			m.Faults = list(s, (*Fault).read)
		case "metadata":
			m.Metadata = list(s, (*Metadata).read)
		default:
			s.skip()
		}
	}
}

func (m *Result) write(w *writer) {
	w.batch("batch", m.Batch)
	if len(m.Parts) > 0 {
		writeList(w, "parts", m.Parts, (*Part).write)
	}
	if len(m.Faults) > 0 {
		writeList(w, "faults", m.Faults, (*Fault).write)
	}
	if len(m.Metadata) > 0 {
		writeList(w, "metadata", m.Metadata, (*Metadata).write)
	}
}

func (m *Result) check(body int64) error {
	for i := range m.Faults {
		if err := m.Faults[i].check(); err != nil {
			return fmt.Errorf("faults[%d]: %w", i, err)
		}
	}
	for i := range m.Metadata {
		if err := checkCount("item", m.Metadata[i].Item, 0, MaxItems-1); err != nil {
			return fmt.Errorf("metadata[%d]: %w", i, err)
		}
	}
	return checkBatch(m.Parts, MaxItems, body)
}

// Fault is the outcome of one item.
type Fault struct {
	Item    int    `json:"item"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	// Field is the input that is to blame.
	Field string `json:"field,omitempty"`
}

var faultKeys = keys{3, []string{"item", "reason", "message", "field"}}

func (f *Fault) read(s *scanner) {
	o := s.object(&faultKeys)
	for o.more() {
		switch o.key {
		case "item":
			f.Item = s.index()
		case "reason":
			f.Reason = s.string()
		case "message":
			f.Message = s.string()
		case "field":
			f.Field = s.string()
		}
	}
}

func (f *Fault) write(w *writer) {
	w.open('{')
	w.number("item", int64(f.Item))
	w.text("reason", f.Reason)
	w.text("message", f.Message)
	w.textOr("field", f.Field)
	w.close('}')
}

func (f *Fault) check() error {
	if f.Reason == "" {
		return errors.New("reason: there is none")
	}
	return checkCount("item", f.Item, 0, MaxItems-1)
}

// Metadata is what the caller of one item gets beside its outputs.
type Metadata struct {
	Item   int               `json:"item"`
	Values map[string]string `json:"values"`
}

var metadataKeys = keys{2, []string{"item", "values"}}

func (m *Metadata) read(s *scanner) {
	o := s.object(&metadataKeys)
	for o.more() {
		switch o.key {
		case "item":
			m.Item = s.index()
		case "values":
			m.Values = table(s, (*scanner).string)
		}
	}
}

func (m *Metadata) write(w *writer) {
	w.open('{')
	w.number("item", int64(m.Item))
	writeTable(w, "values", m.Values, writeText)
	w.close('}')
}

// Chunk is a part of an item's answer, ahead of its outcome. Its parts are of
// that item, whether they say so or not.
type Chunk struct {
	Batch uint64 `json:"batch"`
	Item  int    `json:"item"`
	Parts []Part `json:"parts"`
}

var chunkKeys = keys{4, []string{"type", "batch", "item", "parts"}}

func (*Chunk) kind() string { return "chunk" }

func (m *Chunk) read(s *scanner) {
	o := s.object(&chunkKeys)
	for o.more() {
		switch o.key {
		case "batch":
			m.Batch = s.batch()
		case "item":
			m.Item = s.index()
		case "parts":
			m.Parts = list(s, (*Part).read)
		default:
			s.skip()
		}
	}
}

func (m *Chunk) write(w *writer) {
	w.batch("batch", m.Batch)
	w.number("item", int64(m.Item))
	writeList(w, "parts", m.Parts, (*Part).write)
}

func (m *Chunk) check(body int64) error {
	if err := checkCount("item", m.Item, 0, MaxItems-1); err != nil {
		return err
	}
	for i, p := range m.Parts {
		if p.Item != nil && *p.Item != m.Item {
			return fmt.Errorf("parts[%d]: item: %d in a chunk of item %d", i, *p.Item, m.Item)
		}
	}
	return checkParts(m.Parts, MaxItems, body)
}

// Cancel says that nobody waits for items any more: all where there are none.
type Cancel struct {
	Batch uint64 `json:"batch"`
	Items []int  `json:"items,omitempty"`
}

var cancelKeys = keys{2, []string{"type", "batch", "items"}}

func (*Cancel) kind() string { return "cancel" }

func (m *Cancel) read(s *scanner) {
	o := s.object(&cancelKeys)
	for o.more() {
		switch o.key {
		case "batch":
			m.Batch = s.batch()
		case "items":
			m.Items = list(s, func(to *int, s *scanner) { *to = s.index() })
			if m.Items == nil {
				s.fail("there are none")
			}
		default:
			s.skip()
		}
	}
}

func (m *Cancel) write(w *writer) {
	w.batch("batch", m.Batch)
	if len(m.Items) > 0 {
		writeList(w, "items", m.Items, writeInt)
	}
}

func (m *Cancel) check(int64) error {
	for i, item := range m.Items {
		if item < 0 || item >= MaxItems {
			return checkCount(fmt.Sprintf("items[%d]", i), item, 0, MaxItems-1)
		}
	}
	return nil
}
