package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func newDeadLetters() *cobra.Command {
	return group("dead-letters", "List, show, replay or delete dead letters",
		"List, show, replay or delete dead letters: the items that the mesh gave up on and keeps for an operator.\n"+
			"The commands ask the admin port of any gateway of the mesh.",
		newDeadLettersList(), newDeadLettersShow(), newDeadLettersReplay(), newDeadLettersDelete())
}

// deadLetterFilter selects the dead letters of a stage or of a queue of jobs; the zero one all.
type deadLetterFilter struct{ stage, queue string }

func (f *deadLetterFilter) add(cmd *cobra.Command, stage, queue string) {
	cmd.Flags().StringVar(&f.stage, "stage", "", stage)
	cmd.Flags().StringVar(&f.queue, "queue", "", queue)
}

func (f deadLetterFilter) check(cmd *cobra.Command, limit int) error {
	switch {
	case limit < 1:
		return usageError(cmd, fmt.Errorf("--limit: %d is not at least 1", limit))
	case f.stage != "" && f.queue != "":
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

// String is the place that the filter selects.
func (f deadLetterFilter) String() string {
	if f.queue != "" {
		return "queue " + f.queue
	}
	return "stage " + f.stage
}

// maxPage is the most dead letters of one request.
const maxPage = 1000

// pages passes dead letters to each, page by page, until each has returned that there were enough.
// It returns the number of the next one, 0 at the end, and the first numbers of messages that are
// no dead letters.
func (f deadLetterFilter) pages(ctx context.Context, client clients, from uint64, limit int, each func([]*adminv1.DeadLetterSummary) (left int, err error)) (next uint64, unreadable []uint64, err error) {
	for next = from; next != 0 && limit > 0; {
		response, err := client.ListDeadLetters(ctx, connect.NewRequest(&adminv1.ListDeadLettersRequest{
			Stage: f.stage, Queue: f.queue, From: next, Limit: uint32(min(limit, maxPage)),
		}))
		if err != nil {
			return next, nil, err
		}
		next = response.Msg.GetNext()
		more := response.Msg.GetUnreadable()
		unreadable = append(unreadable, more[:min(len(more), maxPage-len(unreadable))]...)
		if limit, err = each(response.Msg.GetDeadLetters()); err != nil {
			return next, nil, err
		}
	}
	return next, unreadable, nil
}

func newDeadLettersList() *cobra.Command {
	var filter deadLetterFilter
	var from uint64
	var limit int
	var all, asJSON bool
	list := &cobra.Command{
		Use:     "list",
		Short:   "List dead letters, oldest first",
		Example: "  stagemesh dead-letters list\n  stagemesh dead-letters list --stage classify --all --json\n  stagemesh dead-letters list --queue nightly",
		Args:    cobra.NoArgs,
	}
	filter.add(list, "list only the dead letters of this stage", "list only the dead letters of this queue of jobs")
	list.Flags().Uint64Var(&from, "from", 0, "start at this number")
	list.Flags().IntVar(&limit, "limit", 50, "list at most this many")
	list.Flags().BoolVar(&all, "all", false, "list all dead letters, without a limit")
	addJSON(list, &asJSON, "each dead letter")
	return askAdmin(list, func(cmd *cobra.Command, client clients, _ []string) error {
		if err := filter.check(cmd, limit); err != nil {
			return err
		}
		if all {
			limit = math.MaxInt
		}
		listed, hints := 0, cmd.ErrOrStderr()
		next, unreadable, err := filter.pages(cmd.Context(), client, max(1, from), limit, func(page []*adminv1.DeadLetterSummary) (left int, err error) {
			listed += len(page)
			if asJSON {
				return limit - listed, printJSON(cmd.OutOrStdout(), page...)
			}
			return limit - listed, printLetters(cmd.OutOrStdout(), page, listed == len(page))
		})
		if err != nil {
			return err
		}
		if listed == 0 {
			fmt.Fprintln(hints, "there are no dead letters")
		}
		if len(unreadable) > 0 {
			fmt.Fprintf(hints, "%s in the list cannot be read; stagemesh dead-letters delete %s removes them\n", count(len(unreadable), "message"), numbers(unreadable))
		}
		if next != 0 {
			fmt.Fprintf(hints, "there are more: --from %d goes on, --all lists all\n", next)
		}
		return nil
	})
}

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

// maxRaw is the most bytes of a message that the admin port gives.
const maxRaw = 64 << 20

func newDeadLettersShow() *cobra.Command {
	var asJSON bool
	var raw, body string
	show := &cobra.Command{
		Use:     "show NUMBER",
		Short:   "Show everything recorded about a dead letter",
		Example: "  stagemesh dead-letters show 7\n  stagemesh dead-letters show 7 --body item.json   # write the payload to a file, to edit and replay",
		Args:    between(1, 1, "give one NUMBER of a dead letter"),
	}
	addJSON(show, &asJSON, "the dead letter")
	show.Flags().StringVar(&raw, "raw", "", "write the original queue message to this file")
	show.Flags().StringVar(&body, "body", "", "write the payload, which must be one blob, to this file; edit it and use replay --body")
	return askAdmin(show, func(cmd *cobra.Command, client clients, args []string) error {
		seqs, err := deadLetterNumbers(cmd, args)
		if err != nil {
			return err
		}
		request := &adminv1.GetDeadLetterRequest{Seq: seqs[0]}
		if raw != "" {
			request.MessageBytes = maxRaw
		}
		if body != "" {
			request.BodyBytes = maxRaw
		}
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
		if body != "" {
			if letter.Body == nil {
				return errors.New("--body: the payload is not a single blob; run show without --body to see its parts")
			}
			if err := os.WriteFile(body, letter.GetBody(), 0o600); err != nil {
				return fmt.Errorf("--body: %w", err)
			}
			letter.Body = nil
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), letter)
		}
		return printLetter(cmd.OutOrStdout(), letter)
	})
}

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

	all   bool
	limit int
	json  bool
	// body is the file of replay --body.
	body string
}

func (c *manyCommand) complete(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().BoolVar(&c.all, "all", false, c.verb+" all dead letters of the --stage or --queue, oldest first")
	c.add(cmd, "the stage, for --all", "the queue of jobs, for --all")
	cmd.Flags().IntVar(&c.limit, "limit", 100, c.verb+" at most this many, for --all")
	addJSON(cmd, &c.json, "the outcome for each dead letter")
	return askAdmin(cmd, c.run)
}

func newDeadLettersReplay() *cobra.Command {
	replay := &cobra.Command{
		Use:   "replay NUMBER...",
		Short: "Run dead letters again",
		Long: "Run the items of dead letters again. Each goes back to the queue of the step that it failed at, as a new durable\n" +
			"request with as much time as the first one had, and its dead letter is deleted. The output says how to fetch the results.\n" +
			"A job is submitted again under a new ID.",
		Example: "  stagemesh dead-letters replay 7 9\n  stagemesh dead-letters replay --all --queue nightly --limit 10\n  stagemesh dead-letters replay 7 --body fixed.json",
	}
	c := &manyCommand{verb: "replay"}
	c.do = func(ctx context.Context, client clients, seq uint64) (outcome, error) {
		request := &adminv1.ReplayDeadLetterRequest{Seq: seq}
		if c.body != "" {
			var err error
			if request.Body, err = readInput(c.body, replay.InOrStdin()); err != nil {
				return outcome{}, fmt.Errorf("--body: %w", err)
			}
		}
		return replayLetter(ctx, client, request)
	}
	replay.Flags().StringVar(&c.body, "body", "", "for one NUMBER: send this file instead of the payload, which has to be one blob")
	return c.complete(replay)
}

func newDeadLettersDelete() *cobra.Command {
	c := &manyCommand{verb: "delete", unreadable: true, do: func(ctx context.Context, client clients, seq uint64) (outcome, error) {
		_, err := client.DeleteDeadLetter(ctx, connect.NewRequest(&adminv1.DeleteDeadLetterRequest{Seq: seq}))
		return outcome{Seq: seq, text: fmt.Sprintf("dead letter %d is deleted", seq)}, err
	}}
	return c.complete(&cobra.Command{
		Use:     "delete NUMBER...",
		Short:   "Delete dead letters",
		Long:    "Delete dead letters for good, without asking for confirmation.",
		Example: "  stagemesh dead-letters delete 7 9\n  stagemesh dead-letters delete --all --stage classify --limit 1000",
	})
}

func (c *manyCommand) check(cmd *cobra.Command, args []string) error {
	isFiltered := c.deadLetterFilter != deadLetterFilter{}
	switch {
	case c.all && len(args) > 0:
		return usageError(cmd, errors.New("give NUMBERs or --all, not both"))
	case c.all && !isFiltered:
		return usageError(cmd, errors.New("--all: needs a --stage or a --queue"))
	case !c.all && isFiltered:
		return usageError(cmd, errors.New("--stage and --queue: go with --all"))
	case c.body != "" && len(args) != 1:
		return usageError(cmd, errors.New("--body: is for one NUMBER"))
	case !c.all && len(args) == 0:
		return usageError(cmd, errors.New("give the NUMBER of a dead letter or more, or --all with --stage or --queue"))
	}
	return c.deadLetterFilter.check(cmd, c.limit)
}

func (c *manyCommand) run(cmd *cobra.Command, client clients, args []string) error {
	err := c.check(cmd, args)
	var seqs []uint64
	switch {
	case err == nil && c.all:
		seqs, err = c.find(cmd.Context(), client, cmd.ErrOrStderr())
	case err == nil:
		seqs, err = deadLetterNumbers(cmd, args)
	}
	if err != nil {
		return err
	}
	return c.each(cmd.Context(), client, seqs, cmd.OutOrStdout())
}

// find returns the numbers of the dead letters that the verb takes. It lists
// them first, because an item that fails again is a new dead letter.
func (c *manyCommand) find(ctx context.Context, client clients, hints io.Writer) ([]uint64, error) {
	var seqs, others []uint64
	next, unreadable, err := c.pages(ctx, client, 1, c.limit, func(page []*adminv1.DeadLetterSummary) (left int, err error) {
		for _, letter := range page {
			if c.unreadable || letter.GetReplayable() {
				seqs = append(seqs, letter.GetSeq())
			} else {
				others = append(others, letter.GetSeq())
			}
		}
		return c.limit - len(seqs), nil
	})
	if err != nil {
		return nil, err
	}
	if c.unreadable {
		seqs = append(seqs, unreadable[:min(c.limit-len(seqs), len(unreadable))]...)
	}
	switch {
	case len(seqs) == 0:
		fmt.Fprintf(hints, "%s has no dead letters to %s\n", c.deadLetterFilter, c.verb)
	case next != 0:
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
