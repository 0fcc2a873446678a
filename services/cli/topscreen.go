package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
)

// topModel is the live screen.
type topModel struct {
	topView
	// poll returns the next topAnswer.
	poll   tea.Cmd
	window topWindow
	// shown are the figures on the screen; while it is paused they are older than the window.
	shown *topFigures
}

type topAnswer struct {
	sample topSample
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
func (m *topModel) take(s topSample) {
	m.window.add(s, time.Now())
	if !m.paused {
		m.shown = m.window.figures()
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
		m.sort = (m.sort + 1) % len(topColumns)
	case "S":
		m.sort = (m.sort + len(topColumns) - 1) % len(topColumns)
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "enter":
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
	// width and height are those of the terminal; 0 means plain text without a bound.
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

// topColumn is a column of the stages, right-aligned but the first.
type topColumn struct {
	title string
	width int
	text  func(*stageFigures) string
	value func(*stageFigures) figure
}

// screenWidth is that of the columns, which is the least width of a terminal.
const screenWidth = 80

var topColumns = []topColumn{
	{"STAGE", 11, func(s *stageFigures) string { return s.Stage }, nil},
	topNumber("ITEMS/S", 8, func(s *stageFigures) figure { return s.ItemsPerSecond }),
	{"QUEUE", 7, func(s *stageFigures) string { return fmt.Sprint(s.Queue) }, func(s *stageFigures) figure { return figure(s.Queue) }},
	{"HOSTS", 6, func(s *stageFigures) string { return fmt.Sprint(s.Hosts) }, func(s *stageFigures) figure { return figure(s.Hosts) }},
	{"BUSY", 8, func(s *stageFigures) string { return share(s.BusySlots.number(), fmt.Sprint(s.Slots)) }, func(s *stageFigures) figure { return s.BusySlots }},
	topNumber("BATCH", 6, func(s *stageFigures) figure { return s.MeanBatch }),
	topDuration("WAIT P50", 9, func(s *stageFigures) figure { return s.QueueWaitP50 }),
	topDuration("WAIT P99", 9, func(s *stageFigures) figure { return s.QueueWaitP99 }),
	topDuration("RUN P50", 8, func(s *stageFigures) figure { return s.RunP50 }),
	topDuration("RUN P99", 8, func(s *stageFigures) figure { return s.RunP99 }),
}

func topNumber(title string, width int, value func(*stageFigures) figure) topColumn {
	return topColumn{title, width, func(s *stageFigures) string { return value(s).number() }, value}
}

func topDuration(title string, width int, value func(*stageFigures) figure) topColumn {
	return topColumn{title, width, func(s *stageFigures) string { return value(s).duration() }, value}
}

// stageOrder returns the stages in their order, the highest figures first, and the index of the
// selected one.
func (v *topView) stageOrder(f *topFigures) (stages []*stageFigures, selected int) {
	stages = slices.Clone(f.Stages)
	if value := topColumns[v.sort].value; value != nil {
		slices.SortStableFunc(stages, func(a, b *stageFigures) int { return cmp.Compare(value(b), value(a)) })
	}
	at := slices.IndexFunc(stages, func(s *stageFigures) bool { return s.Stage == v.selected })
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
func (v *topView) lines(f *topFigures) []string {
	title := fmt.Sprintf("stagemesh top   %s   %s   %s   %s", f.Time.Format(time.TimeOnly), v.address, count(f.Gateways, "gateway"), count(f.Hosts, "host"))
	if v.paused {
		title += "   PAUSED"
	}
	out := []string{
		v.line(bold, title),
		v.line("", fmt.Sprintf("%s requests/s   P50 %s   P99 %s   %d in flight", f.RequestsPerSecond.number(), f.P50.duration(), f.P99.duration(), f.InFlight)),
		v.line("", failuresOf(f)),
		v.line(red, v.problem),
	}
	stages, selected := v.stageOrder(f)
	if len(stages) == 0 {
		return append(out, v.line("", "there is no stage"))
	}
	room := max(0, v.height-len(out)-2)
	if v.open {
		table := v.hosts(f, stages[selected])
		if len(table) == 0 {
			table = []string{"there is no host"}
		}
		v.scrolled = max(0, min(v.scrolled, len(table)-room))
		out = append(out, v.line(bold, fmt.Sprintf(hostFormat, "HOSTS OF "+stages[selected].Stage, "STATE", "IN FLIGHT", "QUEUED", "BUSY", "UP")))
		return v.fill(append(out, part(table, v.scrolled, room)...), "up, down scroll   esc stages   p pause   q quit")
	}
	name := topColumns[0].width + max(0, v.width-screenWidth)
	table := make([]string, len(stages))
	for i, s := range stages {
		if v.height == 0 {
			name = max(name, len(s.Stage)+1)
		}
		style := ""
		if i == selected {
			style = reversed
		}
		table[i] = v.line(style, topRow(name, func(c topColumn) string { return c.text(s) }))
	}
	out = append(out, v.line(bold, topRow(name, func(c topColumn) string { return c.title })))
	if v.height == 0 {
		return append(out, table...)
	}
	return v.fill(append(out, part(table, selected-room+1, room)...), "up, down select   enter hosts   s, S sort by "+topColumns[v.sort].title+"   p pause   q quit")
}

// part returns some of the rows from the first one on.
func part(rows []string, first, n int) []string {
	first = min(max(0, first), len(rows))
	return rows[first:min(first+n, len(rows))]
}

// fill adds the line of the keys at the bottom.
func (v *topView) fill(lines []string, keys string) []string {
	for len(lines) < v.height-1 {
		lines = append(lines, "")
	}
	return append(lines, v.line(bold, keys))
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

// topRow returns a row with a first column of that width.
func topRow(name int, cell func(topColumn) string) string {
	row := fmt.Sprintf("%-*.*s", name, name-1, cell(topColumns[0]))
	for _, c := range topColumns[1:] {
		row += fmt.Sprintf("%*s", c.width, cell(c))
	}
	return row
}

// failuresOf returns the failures by reason, the most frequent first.
func failuresOf(f *topFigures) string {
	if len(f.FailuresPerSecond) == 0 {
		return "no failures"
	}
	reasons := slices.SortedFunc(maps.Keys(f.FailuresPerSecond), func(a, b string) int {
		return cmp.Or(cmp.Compare(f.FailuresPerSecond[b], f.FailuresPerSecond[a]), cmp.Compare(a, b))
	})
	for i, reason := range reasons {
		reasons[i] = reason + " " + f.FailuresPerSecond[reason].number()
	}
	return "failures/s: " + strings.Join(reasons, "   ")
}

// hostFormat is 80 characters wide.
const hostFormat = "%-37.36s%-13s%10s%7s%7s%6s"

// hosts returns a row for each host of a stage, and below it one for each of its workers.
func (v *topView) hosts(f *topFigures, s *stageFigures) (rows []string) {
	for _, h := range s.hosts {
		state, up, workers := "-", "-", []string(nil)
		for _, known := range f.records {
			r := known.GetRecord()
			if r.GetStage() != s.Stage || r.GetHost() != h.host {
				continue
			}
			state, up = stateOf(known), age(f.Time.Sub(r.GetStartedAt().AsTime()))
			for _, w := range r.GetWorkers() {
				text := fmt.Sprintf("  worker %d: %s, %s", w.GetIndex(), w.GetState(), count(int(w.GetIncarnation()), "start"))
				if w.GetCause() != "" {
					text += ", " + w.GetCause()
				}
				workers = append(workers, v.line("", text))
			}
		}
		row := fmt.Sprintf(hostFormat, h.host, state, fmt.Sprint(h.inFlight), fmt.Sprint(h.queued), share(h.busySlots.number(), fmt.Sprint(h.slots)), up)
		rows = append(append(rows, v.line("", row)), workers...)
	}
	return rows
}
