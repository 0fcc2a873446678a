package frame

// Model names one of a stage's models.
type Model struct {
	ID      string `json:"id,omitempty"`
	Alias   string `json:"alias,omitempty"`
	Version string `json:"version,omitempty"`
}

var modelKeys = keys{0, []string{"id", "alias", "version"}}

func (m *Model) read(s *scanner) {
	o := s.object(&modelKeys)
	for o.more() {
		switch o.key {
		case "id":
			m.ID = s.string()
		case "alias":
			m.Alias = s.string()
		case "version":
			m.Version = s.string()
		}
	}
}

func (m *Model) write(w *writer) {
	w.key("model")
	w.open('{')
	w.textOr("id", m.ID)
	w.textOr("alias", m.Alias)
	w.textOr("version", m.Version)
	w.close('}')
}

// Load is reserved, for stages that serve several models.
type Load struct {
	Model Model `json:"model"`
}

// Unload is reserved, for stages that serve several models.
type Unload struct {
	Model Model `json:"model"`
}

var loadKeys = keys{2, []string{"type", "model"}}

func (*Load) kind() string      { return "load" }
func (m *Load) read(s *scanner) { readLoad(&m.Model, s) }
func (m *Load) write(w *writer) { m.Model.write(w) }

func (*Load) check(int64) error { return nil }

func (*Unload) kind() string      { return "unload" }
func (m *Unload) read(s *scanner) { readLoad(&m.Model, s) }
func (m *Unload) write(w *writer) { m.Model.write(w) }

func (*Unload) check(int64) error { return nil }

func readLoad(m *Model, s *scanner) {
	o := s.object(&loadKeys)
	for o.more() {
		if o.key == "model" {
			m.read(s)
		} else {
			s.skip()
		}
	}
}
