package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/stagemesh/stagemesh/internal/figures"
)

// topModel is the live screen.
type topModel struct {
	topView
	// poll returns the next topAnswer.
	poll   tea.Cmd
	window figures.Window
	// shown are the figures on the screen; while it is paused they are older than the window.
	shown *figures.Mesh
}

type topAnswer struct {
	sample figures.Sample
	err    error
}

// Init implements tea.Model.
func (m *topModel) Init() tea.Cmd { return m.poll }

// View implements tea.Model.
func (m *topModel) View() tea.View {
	v := tea.NewView(strings.Join(m.lines(m.shown), "\n"))
	v.AltScreen = true
	return v
}

// take takes the next sample.
func (m *topModel) take(s figures.Sample) {
	m.window.Add(s)
	if !m.paused {
		m.shown = m.window.Figures()
	}
}

// Update implements tea.Model.
func (m *topModel) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		return m, m.press(msg.String())
	case topAnswer:
		m.problem = ""
		if msg.err != nil {
			m.problem = Describe(msg.err)
		} else {
			m.take(msg.sample)
		}
		return m, m.poll
	}
	return m, nil
}

func (m *topModel) press(key string) tea.Cmd {
	switch key {
	case "q", "ctrl+c":
		return tea.Quit
	case "p":
		m.paused = !m.paused
	case "s":
		m.sort = (m.sort + 1) % len(topHeads)
	case "S":
		m.sort = (m.sort + len(topHeads) - 1) % len(topHeads)
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "enter":
		m.move(0) // the stage under the cursor stays the one that is shown
		m.open, m.scrolled = len(m.shown.Stages) > 0, 0
	case "esc":
		m.open = false
	}
	return nil
}

// move selects another stage, or scrolls the hosts of one.
func (m *topModel) move(by int) {
	if m.open {
		m.scrolled = max(0, m.scrolled+by)
		return
	}
	if stages, at := m.stageOrder(m.shown); len(stages) > 0 {
		m.selected = stages[min(max(0, at+by), len(stages)-1)].Stage
	}
}

// topView is how figures are shown.
type topView struct {
	address string
	// width and height measure the terminal; 0 means plain text without a bound.
	width, height int
	// sort is the column to sort by, selected the name of a stage.
	sort     int
	selected string
	// open is true while the hosts of the selected stage are shown, scrolled by that many
	// lines.
	open     bool
	scrolled int
	paused   bool
	problem  string
}

// screenWidth is the width of a row, which is the least width of a terminal, and nameWidth the
// width of its first column.
const screenWidth, nameWidth = 80, 11

// topHeads are the columns of the stages.
var topHeads = [...]any{"STAGE", "ITEMS/S", "QUEUE", "HOSTS", "BUSY", "BATCH", "WAIT P50", "WAIT P99", "RUN P50", "RUN P99"}

// topRow returns a row with a first column of that width.
func topRow(name int, cells [len(topHeads)]any) string {
	return fmt.Sprintf("%-*.*s", name, name-1, cells[0]) + fmt.Sprintf("%8s%7s%6s%8s%6s%9s%9s%8s%8s", cells[1:]...)
}

func stageCells(s *figures.Stage) [len(topHeads)]any {
	return [...]any{
		s.Stage, s.ItemsPerSecond.Number(), fmt.Sprint(s.Queue), hostsText(s), share(s.BusySlots.Number(), fmt.Sprint(s.Slots)), s.MeanBatch.Number(),
		s.QueueWaitP50.Duration(), s.QueueWaitP99.Duration(), s.RunP50.Duration(), s.RunP99.Duration(),
	}
}

// hostsText is how many hosts a stage has and, after >, should have where that is another number.
func hostsText(s *figures.Stage) string {
	if s.Wanted == nil || s.Wanted.Hosts == uint32(s.Hosts) {
		return fmt.Sprint(s.Hosts)
	}
	return fmt.Sprintf("%d>%d", s.Hosts, s.Wanted.Hosts)
}

// wantedText says how many hosts a stage should have, and why; empty where nobody asks for that.
func wantedText(s *figures.Stage) string {
	if s.Wanted == nil {
		return ""
	}
	return fmt.Sprintf("%s wanted: %s", count(int(s.Wanted.Hosts), "host"), s.Wanted.Reason)
}

// stageValues are what a column is sorted by; nothing for the first.
func stageValues(s *figures.Stage) [len(topHeads)]figures.Figure {
	return [...]figures.Figure{
		0, s.ItemsPerSecond, figures.Figure(s.Queue), figures.Figure(s.Hosts), s.BusySlots, s.MeanBatch,
		s.QueueWaitP50, s.QueueWaitP99, s.RunP50, s.RunP99,
	}
}

// stageOrder returns the stages in their order, the highest figures first, and the index of the
// selected one.
func (v *topView) stageOrder(f *figures.Mesh) (stages []*figures.Stage, selected int) {
	stages = slices.Clone(f.Stages)
	slices.SortStableFunc(stages, func(a, b *figures.Stage) int { return cmp.Compare(stageValues(b)[v.sort], stageValues(a)[v.sort]) })
	at := slices.IndexFunc(stages, func(s *figures.Stage) bool { return s.Stage == v.selected })
	return stages, max(0, at)
}

// Styles of lines. Bubble Tea leaves out the colours, and only those, if NO_COLOR is set.
const (
	bold     = "\x1b[1m"
	red      = "\x1b[31m"
	reversed = "\x1b[7m"
	plain    = "\x1b[m"
)

// lines returns the screen.
func (v *topView) lines(f *figures.Mesh) []string {
	title := fmt.Sprintf("stagemesh top   %s   %s   %s   %s", f.Time.Format(time.TimeOnly), v.address, count(f.Gateways, "gateway"), count(f.Hosts, "host"))
	if v.paused {
		title += "   PAUSED"
	}
	out := []string{
		v.line(bold, title),
		v.line("", fmt.Sprintf("%s requests/s   P50 %s   P99 %s   %d in flight", f.RequestsPerSecond.Number(), f.P50.Duration(), f.P99.Duration(), f.InFlight)),
		v.line("", failuresOf(f)+mapsOf(f)),
		v.line(red, cmp.Or(v.problem, unhealthy(f))),
	}
	stages, selected := v.stageOrder(f)
	room, first := max(0, v.height-len(out)-2), 0
	var head, keys string
	var rows []string
	if v.open && len(stages) > 0 {
		head, rows = fmt.Sprintf(hostFormat, "HOSTS OF "+stages[selected].Stage, "STATE", "IN FLIGHT", "QUEUED", "BUSY", "UP"), v.hosts(f, stages[selected])
		v.scrolled = max(0, min(v.scrolled, len(rows)-room))
		first, keys = v.scrolled, "up, down scroll   esc stages   p pause   q quit"
	} else {
		head, rows = v.stages(stages, selected)
		first, keys = max(0, selected-room+1), "up, down select   enter hosts   s, S sort by "+topHeads[v.sort].(string)+"   p pause   q quit"
	}
	if len(rows) == 0 {
		rows = []string{"there is none"}
	}
	out = append(out, v.line(bold, head))
	if v.height == 0 {
		out = append(out, rows...)
		for _, s := range stages {
			if text := wantedText(s); text != "" {
				out = append(out, v.line("", "stage "+s.Stage+": "+text))
			}
		}
		return out
	}
	out = append(out, rows[first:min(first+room, len(rows))]...)
	for len(out) < v.height-1 {
		out = append(out, "")
	}
	return append(out, v.line(bold, keys))
}

// unhealthy returns what is wrong with the first stage that is unhealthy.
func unhealthy(f *figures.Mesh) string {
	for _, s := range f.Stages {
		if s.Unhealthy != "" {
			return "stage " + s.Stage + ": " + s.Unhealthy
		}
	}
	return ""
}

// stages returns the head and the rows of the stages. Plain text has all of their names.
func (v *topView) stages(all []*figures.Stage, selected int) (head string, rows []string) {
	name := nameWidth + max(0, v.width-screenWidth)
	for _, s := range all {
		if v.height == 0 {
			name = max(name, len(s.Stage)+1)
		}
	}
	for i, s := range all {
		style := ""
		switch {
		case i == selected:
			style = reversed
		case s.Unhealthy != "":
			style = red
		}
		rows = append(rows, v.line(style, topRow(name, stageCells(s))))
	}
	return topRow(name, topHeads), rows
}

// line returns a line of the screen in a style.
func (v *topView) line(style, text string) string {
	text = visible(text)
	if v.height == 0 {
		return strings.TrimRight(text, " ")
	}
	text = fmt.Sprintf("%.*s", v.width, text)
	if style == "" || text == "" {
		return text
	}
	return style + text + plain
}

// failuresOf returns the failures by reason, the most frequent first.
func failuresOf(f *figures.Mesh) string {
	if len(f.FailuresPerSecond) == 0 {
		return "no failures"
	}
	reasons := slices.SortedFunc(maps.Keys(f.FailuresPerSecond), func(a, b string) int {
		return cmp.Or(cmp.Compare(f.FailuresPerSecond[b], f.FailuresPerSecond[a]), cmp.Compare(a, b))
	})
	for i, reason := range reasons {
		reasons[i] = reason + " " + f.FailuresPerSecond[reason].Number()
	}
	return "failures/s: " + strings.Join(reasons, "   ")
}

// mapsOf returns how many items the maps have for a request.
func mapsOf(f *figures.Mesh) (out string) {
	for _, name := range slices.Sorted(maps.Keys(f.MapItems)) {
		out += "   " + name + " " + f.MapItems[name].Number()
	}
	if out != "" {
		out = "   items/request:" + out
	}
	return out
}

// hostFormat is 80 characters wide.
const hostFormat = "%-37.36s%-13s%10s%7s%7s%6s"

// hosts returns a row for each host of a stage, and below it its engine and one for each of its workers.
func (v *topView) hosts(f *figures.Mesh, s *figures.Stage) (rows []string) {
	if text := wantedText(s); text != "" {
		rows = append(rows, v.line("", text))
	}
	for _, h := range s.ByHost {
		state, up, workers := "-", "-", []string(nil)
		for _, known := range f.Records {
			r := known.GetRecord()
			if r.GetStage() != s.Stage || r.GetHost() != h.Host {
				continue
			}
			state, up = figures.HostState(known), age(f.Time.Sub(r.GetStartedAt().AsTime()))
			if r.GetEngine() != "" {
				workers = append(workers, v.line("", "  engine: "+r.GetEngine()))
			}
			for _, w := range r.GetWorkers() {
				text := fmt.Sprintf("  worker %d: %s, %s", w.GetIndex(), w.GetState(), count(int(w.GetIncarnation()), "start"))
				if w.GetCause() != "" {
					text += ", " + w.GetCause()
				}
				workers = append(workers, v.line("", text))
			}
		}
		row := fmt.Sprintf(hostFormat, h.Host, state, fmt.Sprint(h.InFlight), fmt.Sprint(h.Queued), share(h.BusySlots.Number(), fmt.Sprint(h.Slots)), up)
		rows = append(append(rows, v.line("", row)), workers...)
	}
	return rows
}
