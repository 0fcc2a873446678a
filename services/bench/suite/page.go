package suite

import (
	"bytes"
	_ "embed" // the page's text
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
)

//go:embed performance.md.tmpl
var pageText string

// Page returns the page that tells the results, in Markdown.
func Page(r Results) ([]byte, error) {
	text, err := template.New("performance.md").Option("missingkey=error").Parse(pageText)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := text.Execute(&out, view{r}); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Names of what Render writes, in the folder of the documentation.
const (
	pageFile       = "performance.md"
	picturesFolder = "performance"
)

// Render writes the page and its pictures into a folder, and removes those that there is
// nothing for any more.
func Render(r Results, docs string) error {
	page, err := Page(r)
	if err != nil {
		return err
	}
	drawn, err := Pictures(r)
	if err != nil {
		return err
	}
	folder := filepath.Join(docs, picturesFolder)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for _, p := range pictures() {
		path := filepath.Join(folder, p.name)
		if svg, ok := drawn[p.name]; ok {
			err = os.WriteFile(path, svg, 0o644)
		} else if err = os.Remove(path); os.IsNotExist(err) {
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(docs, pageFile), page, 0o644)
}

// view is what the template sees.
type view struct{ Results }

// Quick says that something of it was only tried out.
func (v view) Quick() bool {
	return slices.ContainsFunc(v.Items, func(m Measured) bool { return m.Quick })
}

// Days are the first and the last that something was measured on.
func (v view) Days() string {
	var all []string
	for _, m := range v.Items {
		all = append(all, m.Began.UTC().Format("2006-01-02"))
	}
	if len(all) == 0 {
		return "never"
	}
	slices.Sort(all)
	if first, last := all[0], all[len(all)-1]; first != last {
		return first + " to " + last
	}
	return all[0]
}

// CPU is the processor in words.
func (v view) CPU() string {
	out := fmt.Sprintf("%d cores", v.Machine.Cores)
	if v.Machine.CPU != "" {
		out += " of " + v.Machine.CPU
	}
	return out
}

// Goals is their table.
func (v view) Goals() string {
	t := table{head: []string{"item", "what", "goal", "measured", ""}}
	for _, g := range Goals(v.Results) {
		t.add(fmt.Sprint(g.Number), g.What, g.Want, g.Measured, g.Verdict())
	}
	return t.String()
}

// Throughput says in words what the mesh keeps of the baseline with 64 in flight.
func (v view) Throughput() string {
	for _, of := range []struct {
		Number
		place string
	}{{Processes, "in processes"}, {InProcess, "in one process"}} {
		item, _ := v.Item(of.Number)
		if s, ok := item.answer(only).at(64); ok && s.Comparison != nil {
			return fmt.Sprintf("With 64 requests in flight a mesh of three stages %s answers %s as many a second as the baseline",
				of.place, times(s.Comparison.Throughput.Median))
		}
	}
	return ""
}

// Hop says in words what a stage costs.
func (v view) Hop() string {
	ours, bare, known := v.hops()
	if !known {
		return ""
	}
	return fmt.Sprintf("With one request in flight P50 grows by %s for each stage, and the baseline's by %s. "+
		"With 64 in flight each stage costs the machine %s a request, and %s in the baseline.",
		milliseconds(ours.Latency), milliseconds(bare.Latency), milliseconds(ours.Work), milliseconds(bare.Work))
}

// Section is what there is of an item: tables, pictures and commands, in this order.
func (v view) Section(n int) string {
	item, ok := v.Item(Number(n))
	if !ok {
		return "It was not measured."
	}
	parts := append(v.tables(item), item.failed(), item.commands())
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "\n\n")
}

func (v view) tables(item Measured) []string {
	switch item.Number {
	case Processes:
		return []string{item.compared("")}
	case InProcess:
		return []string{item.compared(""), image(throughputPicture, "Answers a second over the baseline's, by requests in flight")}
	case Stages:
		return []string{item.compared("stages"), image(stagesPicture, "P50 by the number of stages, of mesh and baseline")}
	case Hosts:
		return []string{item.compared("hosts")}
	case Batching:
		return []string{item.batching(), image(batchingPicture, "Share of what the worker can do, by requests in flight")}
	case Noop:
		return []string{item.noop()}
	case Overload:
		return []string{item.overload(), image(overloadPicture, "Goodput under overload, over the peak's")}
	case Payloads:
		return []string{item.compared("payload")}
	case Durability:
		return []string{item.compared("queues")}
	case Soak:
		return v.soaking()
	case Tracing:
		return []string{item.tracing()}
	}
	return nil
}

func (v view) soaking() []string {
	kept := v.soak()
	if kept == "" {
		return []string{"The report has no samples of the process."}
	}
	return []string{kept, image(memoryPicture, "Memory during a long load"), image(goroutinesPicture, "Goroutines during a long load")}
}

func image(name, text string) string {
	return fmt.Sprintf("![%s](%s/%s)", text, picturesFolder, name)
}

// commands is a block of the command lines.
func (m Measured) commands() string {
	lines := make([]string, len(m.Commands))
	for i, a := range m.Commands {
		lines[i] = a.Line
	}
	return "```sh\n" + strings.Join(lines, "\n") + "\n```"
}
