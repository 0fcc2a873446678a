package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func newDeadLetters() *cobra.Command {
	return group("dead-letters", "List, show, replay or delete dead letters",
		"List, show, replay or delete dead letters: the items that the mesh gave up on and keeps for an operator.\n"+
			"The commands ask the admin port of any gateway of the mesh.",
		newDeadLettersList(), newDeadLettersShow(), newDeadLettersReplay(), newDeadLettersDelete())
}

// deadLetterFilter selects dead letters.
type deadLetterFilter struct{ stage, queue string }

func (f *deadLetterFilter) add(cmd *cobra.Command, stage, queue string) {
	cmd.Flags().StringVar(&f.stage, "stage", "", stage)
	cmd.Flags().StringVar(&f.queue, "queue", "", queue)
}

func (f deadLetterFilter) check(cmd *cobra.Command) error {
	if f.stage != "" && f.queue != "" {
		return usageError(cmd, errors.New("give --stage or --queue, not both"))
	}
	return cmp.Or(validFilter(cmd, "stage", f.stage), validFilter(cmd, "queue", f.queue))
}

func validFilter(cmd *cobra.Command, kind, name string) error {
	if name == "" {
		return nil
	}
	if err := pipeline.ValidName(kind, name); err != nil {
		return usageError(cmd, fmt.Errorf("--%s: %w", kind, err))
	}
	return nil
}

func (f deadLetterFilter) isEmpty() bool { return f == deadLetterFilter{} }

// String is the place that the filter selects.
func (f deadLetterFilter) String() string {
	if f.queue != "" {
		return "queue " + f.queue
	}
	return "stage " + f.stage
}

type listCommand struct {
	deadLetterFilter

	admin port
	from  uint64
	limit int
	all   bool
	json  bool
}

func newDeadLettersList() *cobra.Command {
	var c listCommand
	list := &cobra.Command{
		Use:     "list",
		Short:   "List dead letters, oldest first",
		Example: "  stagemesh dead-letters list\n  stagemesh dead-letters list --stage classify --all --json\n  stagemesh dead-letters list --queue nightly",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.limit < 1 {
				return usageError(cmd, fmt.Errorf("--limit: %d is not at least 1", c.limit))
			}
			if err := c.check(cmd); err != nil {
				return err
			}
			return c.admin.reach(func(client clients) error {
				return c.run(cmd.Context(), client, cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	c.admin.addAdmin(list)
	c.add(list, "list only the dead letters of this stage", "list only the dead letters of this queue of jobs")
	list.Flags().Uint64Var(&c.from, "from", 0, "start at this number")
	list.Flags().IntVar(&c.limit, "limit", 50, "list at most this many")
	list.Flags().BoolVar(&c.all, "all", false, "list all dead letters, without a limit")
	addJSON(list, &c.json, "each dead letter")
	return list
}

func (c *listCommand) run(ctx context.Context, client clients, out, hints io.Writer) error {
	pages := pager{client: client, filter: c.deadLetterFilter, next: max(1, c.from)}
	listed := 0
	for pages.next != 0 && (c.all || listed < c.limit) {
		left := maxPage
		if !c.all {
			left = min(left, c.limit-listed)
		}
		page, err := pages.page(ctx, left)
		if err == nil && c.json {
			err = printJSON(out, page...)
		} else if err == nil {
			err = printLetters(out, page, listed == 0)
		}
		if err != nil {
			return err
		}
		listed += len(page)
	}
	if listed == 0 {
		fmt.Fprintln(hints, "there are no dead letters")
	}
	if len(pages.unreadable) > 0 {
		fmt.Fprintf(hints, "%s in the list cannot be read; stagemesh dead-letters delete %s removes them\n", count(len(pages.unreadable), "message"), numbers(pages.unreadable))
	}
	if pages.next != 0 {
		fmt.Fprintf(hints, "there are more: --from %d goes on, --all lists all\n", pages.next)
	}
	return nil
}

// printLetters prints dead letters as rows of a table.
func printLetters(out io.Writer, letters []*adminv1.DeadLetterSummary, withHeads bool) error {
	rows := make([][]string, len(letters))
	for i, l := range letters {
		rows[i] = []string{
			fmt.Sprint(l.GetSeq()), age(time.Since(l.GetDeadLetteredAt().AsTime())), visible(placeOf(l)),
			cmp.Or(visible(l.GetPipeline()), "-"), visible(l.GetReason()), fmt.Sprint(l.GetDeliveries()), cmp.Or(l.GetRequestId(), visible(l.GetJobId()), "-"),
		}
	}
	heads := ""
	if withHeads && len(rows) > 0 {
		heads = "NUMBER\tAGE\tSTAGE\tPIPELINE\tREASON\tDELIVERIES\tREQUEST"
	}
	return printTable(out, heads, rows)
}

// placeOf returns the stage, or the queue of jobs.
func placeOf(l *adminv1.DeadLetterSummary) string {
	if l.GetQueue() != "" {
		return "queue " + l.GetQueue()
	}
	return l.GetStage()
}

func numbers(seqs []uint64) string {
	const most = 80
	out := make([]string, min(len(seqs), most))
	for i := range out {
		out[i] = fmt.Sprint(seqs[i])
	}
	return strings.Join(out, " ")
}

// maxPage is the most dead letters of one request.
const maxPage = 1000

// pager lists dead letters page by page.
type pager struct {
	client clients
	filter deadLetterFilter
	// next is the number of the next page's first dead letter; 0 at the end.
	next uint64
	// unreadable are the first numbers of messages that are no dead letters.
	unreadable []uint64
}

func (p *pager) page(ctx context.Context, limit int) ([]*adminv1.DeadLetterSummary, error) {
	response, err := p.client.ListDeadLetters(ctx, connect.NewRequest(&adminv1.ListDeadLettersRequest{
		Stage: p.filter.stage, Queue: p.filter.queue, From: p.next, Limit: uint32(limit),
	}))
	if err != nil {
		return nil, err
	}
	p.next = response.Msg.GetNext()
	more := response.Msg.GetUnreadable()
	p.unreadable = append(p.unreadable, more[:min(len(more), maxPage-len(p.unreadable))]...)
	return response.Msg.GetDeadLetters(), nil
}

// maxRaw is the most bytes of a message that the admin port gives.
const maxRaw = 64 << 20

func newDeadLettersShow() *cobra.Command {
	var admin port
	var asJSON bool
	var raw string
	show := &cobra.Command{
		Use:     "show NUMBER",
		Short:   "Show everything recorded about a dead letter",
		Example: "  stagemesh dead-letters show 7\n  stagemesh dead-letters show 7 --raw item.bin   # write the original queue message to a file",
		Args:    between(1, 1, "give one NUMBER of a dead letter"),
		RunE: func(cmd *cobra.Command, args []string) error {
			seqs, err := deadLetterNumbers(cmd, args)
			if err != nil {
				return err
			}
			request := &adminv1.GetDeadLetterRequest{Seq: seqs[0]}
			if raw != "" {
				request.MessageBytes = maxRaw
			}
			return admin.reach(func(client clients) error {
				response, err := client.GetDeadLetter(cmd.Context(), connect.NewRequest(request))
				if err != nil {
					return err
				}
				letter := response.Msg.GetDeadLetter()
				if raw != "" {
					if err := os.WriteFile(raw, letter.GetRawMessage(), 0o600); err != nil {
						return fmt.Errorf("--raw: %w", err)
					}
					letter.RawMessage = nil
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), letter)
				}
				return printLetter(cmd.OutOrStdout(), letter)
			})
		},
	}
	admin.addAdmin(show)
	addJSON(show, &asJSON, "the dead letter")
	show.Flags().StringVar(&raw, "raw", "", "write the original queue message to this file")
	return show
}

// deadLetterNumbers parses the numbers of dead letters.
func deadLetterNumbers(cmd *cobra.Command, args []string) ([]uint64, error) {
	out := make([]uint64, len(args))
	for i, arg := range args {
		n, err := strconv.ParseUint(arg, 10, 64)
		if err != nil || n == 0 {
			return nil, usageError(cmd, fmt.Errorf("NUMBER: %q is not the number of a dead letter, such as 7", arg))
		}
		out[i] = n
	}
	return out, nil
}

// ErrDeadLetters is returned when a verb failed for some dead letters; each failure
// has been printed.
var ErrDeadLetters = errors.New("some dead letters are unchanged")

// outcome is the outcome of a verb for one dead letter.
type outcome struct {
	Seq               uint64 `json:"seq,string"`
	RequestID         string `json:"requestId,omitempty"`
	JobID             string `json:"jobId,omitempty"`
	Deadline          string `json:"deadline,omitempty"`
	DeadLetterRemains bool   `json:"deadLetterRemains,omitempty"`
	Error             string `json:"error,omitempty"`

	// text is the outcome in words.
	text string
}

// manyCommand is a verb that takes dead letters by number, or all of a stage or queue.
type manyCommand struct {
	deadLetterFilter

	verb string
	do   func(ctx context.Context, client clients, seq uint64) (outcome, error)
	// unreadable is true when the verb also takes messages that are no dead letters.
	// Other verbs take only those that can be replayed.
	unreadable bool

	admin port
	all   bool
	limit int
	json  bool
	// body is the file of replay --body.
	body string
}

// complete adds the flags, and what the command does.
func (c *manyCommand) complete(cmd *cobra.Command) *cobra.Command {
	cmd.RunE = c.run
	c.admin.addAdmin(cmd)
	cmd.Flags().BoolVar(&c.all, "all", false, c.verb+" all dead letters of the --stage or --queue, oldest first")
	c.add(cmd, "the stage, for --all", "the queue of jobs, for --all")
	cmd.Flags().IntVar(&c.limit, "limit", 100, c.verb+" at most this many, for --all")
	addJSON(cmd, &c.json, "the outcome for each dead letter")
	return cmd
}

func newDeadLettersReplay() *cobra.Command {
	c := &manyCommand{verb: "replay"}
	c.do = func(ctx context.Context, client clients, seq uint64) (outcome, error) {
		request := &adminv1.ReplayDeadLetterRequest{Seq: seq}
		if c.body != "" {
			var err error
			if request.Body, err = readInput(c.body, os.Stdin); err != nil {
				return outcome{}, fmt.Errorf("--body: %w", err)
			}
		}
		return replayLetter(ctx, client, request)
	}
	replay := c.complete(&cobra.Command{
		Use:   "replay NUMBER...",
		Short: "Run dead letters again",
		Long: "Run the items of dead letters again. Each goes back to the queue of the step that it failed at, as a new durable\n" +
			"request with as much time as the first one had, and its dead letter is deleted. The output says how to fetch the results.\n" +
			"A job is submitted again under a new ID.",
		Example: "  stagemesh dead-letters replay 7 9\n  stagemesh dead-letters replay --all --queue nightly --limit 10\n  stagemesh dead-letters replay 7 --body fixed.json",
	})
	replay.Flags().StringVar(&c.body, "body", "", "for one NUMBER: send this file instead of the payload, which has to be one blob")
	return replay
}

func newDeadLettersDelete() *cobra.Command {
	c := manyCommand{verb: "delete", do: deleteLetter, unreadable: true}
	return c.complete(&cobra.Command{
		Use:     "delete NUMBER...",
		Short:   "Delete dead letters",
		Long:    "Delete dead letters for good, without asking for confirmation.",
		Example: "  stagemesh dead-letters delete 7 9\n  stagemesh dead-letters delete --all --stage classify --limit 1000",
	})
}

// check rejects arguments that do not name dead letters.
func (c *manyCommand) check(cmd *cobra.Command, args []string) error {
	switch {
	case c.all && len(args) > 0:
		return usageError(cmd, errors.New("give NUMBERs or --all, not both"))
	case c.all && c.isEmpty():
		return usageError(cmd, errors.New("--all: needs a --stage or a --queue"))
	case !c.all && !c.isEmpty():
		return usageError(cmd, errors.New("--stage and --queue: go with --all"))
	case c.body != "" && len(args) != 1:
		return usageError(cmd, errors.New("--body: is for one NUMBER"))
	case !c.all && len(args) == 0:
		return usageError(cmd, errors.New("give the NUMBER of a dead letter or more, or --all with --stage or --queue"))
	case c.limit < 1:
		return usageError(cmd, fmt.Errorf("--limit: %d is not at least 1", c.limit))
	}
	return c.deadLetterFilter.check(cmd)
}

func (c *manyCommand) run(cmd *cobra.Command, args []string) error {
	if err := c.check(cmd, args); err != nil {
		return err
	}
	seqs, err := deadLetterNumbers(cmd, args)
	if err != nil {
		return err
	}
	return c.admin.reach(func(client clients) error {
		if c.all {
			if seqs, err = c.find(cmd.Context(), client, cmd.ErrOrStderr()); err != nil {
				return err
			}
		}
		return c.each(cmd.Context(), client, seqs, cmd.OutOrStdout())
	})
}

// find returns the numbers of the dead letters that the verb takes. It lists
// them first, because an item that fails again is a new dead letter.
func (c *manyCommand) find(ctx context.Context, client clients, hints io.Writer) ([]uint64, error) {
	pages := pager{client: client, filter: c.deadLetterFilter, next: 1}
	var seqs, others []uint64
	for pages.next != 0 && len(seqs) < c.limit {
		page, err := pages.page(ctx, min(maxPage, c.limit-len(seqs)))
		if err != nil {
			return nil, err
		}
		for _, letter := range page {
			if c.unreadable || letter.GetReplayable() {
				seqs = append(seqs, letter.GetSeq())
			} else {
				others = append(others, letter.GetSeq())
			}
		}
		if c.unreadable {
			left := c.limit - len(seqs)
			seqs = append(seqs, pages.unreadable[:min(left, len(pages.unreadable))]...)
			pages.unreadable = nil
		}
	}
	switch {
	case len(seqs) == 0:
		fmt.Fprintf(hints, "%s has no dead letters to %s\n", c.deadLetterFilter, c.verb)
	case pages.next != 0:
		fmt.Fprintf(hints, "%s has more than the %d of --limit\n", c.deadLetterFilter, c.limit)
	}
	if len(others) > 0 {
		fmt.Fprintf(hints, "%s of %s cannot be replayed; stagemesh dead-letters show says why: %s\n", count(len(others), "dead letter"), c.deadLetterFilter, numbers(others))
	}
	return seqs, nil
}

// each runs the verb for every dead letter and prints the outcomes. It continues after an
// error about one of them and stops at an error that would be the same for all.
func (c *manyCommand) each(ctx context.Context, client clients, seqs []uint64, out io.Writer) error {
	failed := 0
	for i, seq := range seqs {
		o, err := c.do(ctx, client, seq)
		switch {
		case err != nil && len(seqs) == 1:
			return err
		case err != nil && !isOfDeadLetter(err):
			return fmt.Errorf("dead letter %d: %w; stopped after %d of %d", seq, describeRPC(err), i, len(seqs))
		case err != nil:
			failed++
			text := Describe(err)
			o = outcome{Seq: seq, Error: text, text: fmt.Sprintf("dead letter %d: %s", seq, visible(text))}
		}
		if c.json {
			err = json.NewEncoder(out).Encode(o)
		} else {
			_, err = fmt.Fprintln(out, o.text)
		}
		if err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%w: %d of %d", ErrDeadLetters, failed, len(seqs))
	}
	return nil
}

// isOfDeadLetter reports whether an error is about one dead letter only.
func isOfDeadLetter(err error) bool {
	rpc, ok := errors.AsType[*connect.Error](err)
	return ok && slices.Contains([]fault.Reason{fault.NotFound, fault.NotReplayable, fault.PayloadTooLarge}, fault.Reason(infoOf(rpc).GetReason()))
}

func replayLetter(ctx context.Context, client clients, request *adminv1.ReplayDeadLetterRequest) (outcome, error) {
	response, err := client.ReplayDeadLetter(ctx, connect.NewRequest(request))
	if err != nil {
		return outcome{}, err
	}
	m, seq := response.Msg, request.GetSeq()
	deadline := m.GetDeadline().AsTime()
	out := outcome{
		Seq: seq, RequestID: m.GetRequestId(), Deadline: deadline.Format(time.RFC3339), DeadLetterRemains: m.GetDeadLetterRemains(),
		text: fmt.Sprintf("dead letter %d runs again as request %s: stagemesh get result %s --wait %s",
			seq, m.GetRequestId(), m.GetRequestId(), max(time.Second, time.Until(deadline).Round(time.Second))),
	}
	if m.GetJobId() != "" {
		out.JobID, out.text = m.GetJobId(), fmt.Sprintf("dead letter %d runs again as job %s", seq, m.GetJobId())
	}
	if m.GetDeadLetterRemains() {
		out.text += fmt.Sprintf("\ndead letter %d is still there; stagemesh dead-letters delete %d removes it", seq, seq)
	}
	return out, nil
}

func deleteLetter(ctx context.Context, client clients, seq uint64) (outcome, error) {
	_, err := client.DeleteDeadLetter(ctx, connect.NewRequest(&adminv1.DeleteDeadLetterRequest{Seq: seq}))
	return outcome{Seq: seq, text: fmt.Sprintf("dead letter %d is deleted", seq)}, err
}

// page prints one dead letter: words and values.
type page struct{ *tabwriter.Writer }

// line prints a value, if there is one.
func (p page) line(word, format string, args ...any) {
	if value := fmt.Sprintf(format, args...); value != "" {
		fmt.Fprintf(p, "  %s\t%s\n", word, visible(value))
	}
}

// lines prints values below each other, the first of them beside the word.
func (p page) lines(word string, values []string) {
	for _, value := range values {
		p.line(word, "%s", value)
		word = ""
	}
}

// printLetter prints everything about a dead letter.
func printLetter(out io.Writer, l *adminv1.DeadLetter) error {
	p := page{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	s := l.GetSummary()
	place, who := "stage "+s.GetStage(), "host "+l.GetHost()
	if s.GetQueue() != "" {
		place, who = placeOf(s), "dispatcher "+l.GetHost()
	}
	fmt.Fprintf(p, "dead letter %d\n", s.GetSeq())
	p.line("failed", "%s, %s ago, at %s; %s gave up", moment(s.GetDeadLetteredAt()), age(time.Since(s.GetDeadLetteredAt().AsTime())), place, who)
	p.line("job", "%s", s.GetJobId())
	p.line("reason", "%s: %s", l.GetFault().GetReason(), l.GetFault().GetMessage())
	for _, v := range l.GetFault().GetViolations() {
		p.line("", "%s: %s", v.GetField(), v.GetDescription())
	}
	durability := strings.ToLower(strings.TrimPrefix(l.GetDurability().String(), "DURABILITY_"))
	p.line("queued", "%s, %s, priority %d; delivered %s", moment(l.GetQueuedAt()), durability, l.GetPriority(), count(int(s.GetDeliveries()), "time"))
	p.lines("runs", texts(l.GetRuns(), func(run *adminv1.DeadLetterRun) string {
		end := "did not end"
		if run.GetDied() {
			end = "ended with its worker"
		}
		return fmt.Sprintf("began %s on host %s and %s", moment(run.GetStartedAt()), run.GetHost(), end)
	}))
	p.line("message", "%d bytes", s.GetSize())
	if l.GetItem() != nil {
		p.item(s, l.GetItem())
	}
	if job := l.GetJob(); job != nil {
		p.line("tenant", "%s", s.GetTenant())
		p.line("pipeline", "%s", job.GetJob().GetPipeline())
		p.line("path", "%s", job.GetPath())
		p.line("deadline", "%s", moment(job.GetJob().GetDeadline()))
		p.lines("attributes", pairs(job.GetJob().GetAttributes()))
		p.lines("inputs", texts(job.GetParts(), describePart))
	}
	if why := l.GetNotReplayable(); why != "" {
		p.line("replay", "not possible: %s", why)
	} else {
		p.line("replay", "stagemesh dead-letters replay %d", s.GetSeq())
	}
	return p.Flush()
}

func (p page) item(s *adminv1.DeadLetterSummary, i *adminv1.DeadLetterItem) {
	p.line("request", "%s, execution %s", s.GetRequestId(), s.GetExecutionId())
	p.line("tenant", "%s", i.GetTenant())
	p.line("pipeline", "%s: %s", s.GetPipeline(), route(i))
	p.line("deadline", "%s, %s after it was admitted by gateway %s", moment(i.GetDeadline()),
		i.GetDeadline().AsTime().Sub(i.GetAdmittedAt().AsTime()).Round(time.Millisecond), i.GetGateway())
	p.line("key", "%s", i.GetIdempotencyKey())
	p.lines("metadata", pairs(i.GetMetadata()))
	p.lines("trace", pairs(i.GetTraceContext()))
	p.lines("inputs", texts(i.GetParts(), describePart))
	p.lines("kept", texts(i.GetKept(), describePart))
	p.lines("before", texts(i.GetTimings(), func(t *inferencev1.StepTiming) string { return RenderStep(t) }))
}

func texts[T, R any](values []T, text func(T) R) []R {
	out := make([]R, len(values))
	for i, v := range values {
		out[i] = text(v)
	}
	return out
}

func pairs(values map[string]string) []string {
	return texts(slices.Sorted(maps.Keys(values)), func(key string) string { return key + "=" + values[key] })
}

// route returns the steps, the one that failed in brackets.
func route(i *adminv1.DeadLetterItem) string {
	out := make([]string, len(i.GetRoute()))
	for n, step := range i.GetRoute() {
		out[n] = step.GetName()
		if step.GetName() != step.GetStage() {
			out[n] += " (stage " + step.GetStage() + ")"
		}
		if n == int(i.GetPosition()) {
			out[n] = "[" + out[n] + "]"
		}
	}
	return strings.Join(out, " -> ")
}

func describePart(part *adminv1.DeadLetterPart) string {
	kind := cmp.Or(part.GetBlob().GetContentType(), "a blob")
	if t := part.GetTensor(); t != nil {
		kind = fmt.Sprintf("%s%v", t.GetDatatype(), t.GetShape())
	}
	return fmt.Sprintf("%s: %s, %d bytes", cmp.Or(part.GetName(), "(no name)"), kind, part.GetSize())
}

// moment returns a point in time, to the millisecond.
func moment(t interface{ AsTime() time.Time }) string {
	return t.AsTime().UTC().Format("2006-01-02 15:04:05.000 MST")
}
