package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// deadLetterClient is the client of the verbs of dead-letters.
type deadLetterClient = adminv1connect.DeadLetterServiceClient

func newDeadLetters() *cobra.Command {
	root := &cobra.Command{
		Use:   "dead-letters",
		Short: "List, show, replay or delete dead letters",
		Long: "List, show, replay or delete dead letters: the items that the mesh gave up on and keeps for an operator.\n" +
			"The commands ask the admin port of any gateway of the mesh.",
		// An unknown verb is an error, not a request for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(newDeadLettersList(), newDeadLettersShow(), newDeadLettersReplay(), newDeadLettersDelete())
	return root
}

type listFlags struct {
	admin adminFlags
	stage string
	from  uint64
	limit int
	all   bool
	json  bool
}

func newDeadLettersList() *cobra.Command {
	var flags listFlags
	list := &cobra.Command{
		Use:     "list",
		Short:   "List dead letters, oldest first",
		Example: "  stagemesh dead-letters list\n  stagemesh dead-letters list --stage classify --all --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flags.limit < 1 {
				return misused(cmd, fmt.Errorf("--limit: %d is not at least 1", flags.limit))
			}
			if err := validStage(cmd, flags.stage); err != nil {
				return err
			}
			return flags.admin.with(func(client deadLetterClient) error {
				return flags.run(cmd.Context(), client, newDeadLetterList(cmd.OutOrStdout(), flags.json), cmd.ErrOrStderr())
			})
		},
	}
	flags.admin.add(list)
	list.Flags().StringVar(&flags.stage, "stage", "", "list only the dead letters of this stage")
	list.Flags().Uint64Var(&flags.from, "from", 0, "start at this number")
	list.Flags().IntVar(&flags.limit, "limit", 50, "list at most this many")
	list.Flags().BoolVar(&flags.all, "all", false, "list all dead letters, without a limit")
	list.Flags().BoolVar(&flags.json, "json", false, "print each dead letter as a line of JSON")
	return list
}

func validStage(cmd *cobra.Command, stage string) error {
	if stage == "" {
		return nil
	}
	if err := pipeline.ValidName("stage", stage); err != nil {
		return misused(cmd, fmt.Errorf("--stage: %w", err))
	}
	return nil
}

func (f listFlags) run(ctx context.Context, client deadLetterClient, out *deadLetterList, hints io.Writer) error {
	pages := pager{client: client, stage: f.stage, next: max(1, f.from)}
	for pages.next != 0 && (f.all || out.rows < f.limit) {
		left := maxPage
		if !f.all {
			left = min(left, f.limit-out.rows)
		}
		page, err := pages.page(ctx, left)
		if err != nil {
			return errors.Join(out.flush(), err)
		}
		for _, letter := range page {
			if err := out.add(letter); err != nil {
				return err
			}
		}
		if err := out.flush(); err != nil {
			return err
		}
	}
	if out.rows == 0 {
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

// maxPage is the most dead letters of one request.
const maxPage = 1000

// pager lists the dead letters of a stage, or of all stages, page by page.
type pager struct {
	client deadLetterClient
	stage  string
	// next is the number of the next page's first dead letter; 0 at the end.
	next uint64
	// unreadable are the first numbers of messages that are no dead letters.
	unreadable []uint64
}

func (p *pager) page(ctx context.Context, limit int) ([]*adminv1.DeadLetterSummary, error) {
	response, err := p.client.ListDeadLetters(ctx, connect.NewRequest(&adminv1.ListDeadLettersRequest{
		Stage: p.stage, From: p.next, Limit: uint32(limit),
	}))
	if err != nil {
		return nil, rpcError{err}
	}
	p.next = response.Msg.GetNext()
	more := response.Msg.GetUnreadable()
	p.unreadable = append(p.unreadable, more[:min(len(more), maxPage-len(p.unreadable))]...)
	return response.Msg.GetDeadLetters(), nil
}

func newDeadLettersShow() *cobra.Command {
	var admin adminFlags
	var asJSON bool
	var raw string
	show := &cobra.Command{
		Use:     "show NUMBER",
		Short:   "Show everything recorded about a dead letter",
		Example: "  stagemesh dead-letters show 7\n  stagemesh dead-letters show 7 --raw item.bin   # write the original queue message to a file",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return misused(cmd, errors.New("give one NUMBER of a dead letter"))
			}
			_, err := deadLetterNumbers(cmd, args)
			return err
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			seqs, err := deadLetterNumbers(cmd, args)
			if err != nil {
				return err
			}
			request := &adminv1.GetDeadLetterRequest{Seq: seqs[0]}
			if raw != "" {
				request.MessageBytes = maxRaw
			}
			return admin.with(func(client deadLetterClient) error {
				response, err := client.GetDeadLetter(cmd.Context(), connect.NewRequest(request))
				if err != nil {
					return rpcError{err}
				}
				letter := response.Msg.GetDeadLetter()
				if err := save(raw, letter); err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), letter)
				}
				return printLetter(cmd.OutOrStdout(), letter)
			})
		},
	}
	admin.add(show)
	show.Flags().BoolVar(&asJSON, "json", false, "print the dead letter as a line of JSON")
	show.Flags().StringVar(&raw, "raw", "", "write the original queue message to this file")
	return show
}

// deadLetterNumbers parses the numbers of dead letters.
func deadLetterNumbers(cmd *cobra.Command, args []string) ([]uint64, error) {
	out := make([]uint64, len(args))
	for i, arg := range args {
		n, err := strconv.ParseUint(arg, 10, 64)
		if err != nil || n == 0 {
			return nil, misused(cmd, fmt.Errorf("NUMBER: %q is not the number of a dead letter, such as 7", arg))
		}
		out[i] = n
	}
	return out, nil
}

// ErrDeadLetters is returned when a verb failed for some dead letters; each failure
// has been printed.
var ErrDeadLetters = errors.New("some dead letters are unchanged")

// done is the outcome of a verb for one dead letter.
type done struct {
	Seq               uint64 `json:"seq,string"`
	RequestID         string `json:"requestId,omitempty"`
	Deadline          string `json:"deadline,omitempty"`
	DeadLetterRemains bool   `json:"deadLetterRemains,omitempty"`
	Error             string `json:"error,omitempty"`

	// text is the outcome in words.
	text string
}

// action is what a verb does with a dead letter.
type action struct {
	verb string
	do   func(ctx context.Context, client deadLetterClient, seq uint64) (done, error)
	// unreadable is true when the verb also takes messages that are no dead letters.
	// Other verbs take only those that can be replayed.
	unreadable bool
}

// manyFlags are the flags of a verb that takes dead letters by number, or all of a
// stage.
type manyFlags struct {
	admin adminFlags
	stage string
	all   bool
	limit int
	json  bool
}

func (f *manyFlags) add(cmd *cobra.Command, verb string) {
	f.admin.add(cmd)
	cmd.Flags().BoolVar(&f.all, "all", false, verb+" all dead letters of the --stage, oldest first")
	cmd.Flags().StringVar(&f.stage, "stage", "", "the stage, for --all")
	cmd.Flags().IntVar(&f.limit, "limit", 100, verb+" at most this many, for --all")
	cmd.Flags().BoolVar(&f.json, "json", false, "print the outcome for each dead letter as a line of JSON")
}

func newDeadLettersReplay() *cobra.Command {
	var flags manyFlags
	replay := &cobra.Command{
		Use:   "replay NUMBER...",
		Short: "Run dead letters again",
		Long: "Run the items of dead letters again. Each goes back to the queue of the step that it failed at, as a new durable\n" +
			"request with as much time as the first one had, and its dead letter is deleted. The output says how to fetch the results.",
		Example: "  stagemesh dead-letters replay 7 9\n  stagemesh dead-letters replay --all --stage classify --limit 10",
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.run(cmd, args, action{verb: "replay", do: replayLetter})
		},
	}
	flags.add(replay, "replay")
	return replay
}

func newDeadLettersDelete() *cobra.Command {
	var flags manyFlags
	remove := &cobra.Command{
		Use:     "delete NUMBER...",
		Short:   "Delete dead letters",
		Long:    "Delete dead letters for good, without asking for confirmation.",
		Example: "  stagemesh dead-letters delete 7 9\n  stagemesh dead-letters delete --all --stage classify --limit 1000",
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.run(cmd, args, action{verb: "delete", do: deleteLetter, unreadable: true})
		},
	}
	flags.add(remove, "delete")
	return remove
}

// check rejects arguments that do not name dead letters.
func (f manyFlags) check(cmd *cobra.Command, args []string) error {
	switch {
	case f.all && len(args) > 0:
		return misused(cmd, errors.New("give NUMBERs or --all, not both"))
	case f.all && f.stage == "":
		return misused(cmd, errors.New("--all: needs a --stage"))
	case !f.all && f.stage != "":
		return misused(cmd, errors.New("--stage: goes with --all"))
	case !f.all && len(args) == 0:
		return misused(cmd, errors.New("give the NUMBER of a dead letter or more, or --all --stage STAGE"))
	case f.limit < 1:
		return misused(cmd, fmt.Errorf("--limit: %d is not at least 1", f.limit))
	}
	return validStage(cmd, f.stage)
}

func (f manyFlags) run(cmd *cobra.Command, args []string, a action) error {
	if err := f.check(cmd, args); err != nil {
		return err
	}
	seqs, err := deadLetterNumbers(cmd, args)
	if err != nil {
		return err
	}
	return f.admin.with(func(client deadLetterClient) error {
		if f.all {
			if seqs, err = f.find(cmd.Context(), client, a, cmd.ErrOrStderr()); err != nil {
				return err
			}
		}
		return a.each(cmd.Context(), client, seqs, f.printer(cmd.OutOrStdout()))
	})
}

// find returns the numbers of the stage's dead letters that the action takes. It lists
// them first, because an item that fails again is a new dead letter.
func (f manyFlags) find(ctx context.Context, client deadLetterClient, a action, hints io.Writer) ([]uint64, error) {
	pages := pager{client: client, stage: f.stage, next: 1}
	var seqs, others []uint64
	for pages.next != 0 && len(seqs) < f.limit {
		page, err := pages.page(ctx, min(maxPage, f.limit-len(seqs)))
		if err != nil {
			return nil, err
		}
		for _, letter := range page {
			if a.unreadable || letter.GetReplayable() {
				seqs = append(seqs, letter.GetSeq())
			} else {
				others = append(others, letter.GetSeq())
			}
		}
		if a.unreadable {
			left := f.limit - len(seqs)
			seqs = append(seqs, pages.unreadable[:min(left, len(pages.unreadable))]...)
			pages.unreadable = nil
		}
	}
	switch {
	case len(seqs) == 0:
		fmt.Fprintf(hints, "stage %s has no dead letters to %s\n", f.stage, a.verb)
	case pages.next != 0:
		fmt.Fprintf(hints, "stage %s has more than the %d of --limit\n", f.stage, f.limit)
	}
	if len(others) > 0 {
		fmt.Fprintf(hints, "%s of stage %s cannot be replayed; stagemesh dead-letters show says why: %s\n", count(len(others), "dead letter"), f.stage, numbers(others))
	}
	return seqs, nil
}

func (f manyFlags) printer(out io.Writer) func(done) error {
	if f.json {
		encoder := json.NewEncoder(out)
		return func(d done) error { return encoder.Encode(d) }
	}
	return func(d done) error {
		text := d.text
		if d.Error != "" {
			text = fmt.Sprintf("dead letter %d: %s", d.Seq, visible(d.Error))
		}
		_, err := fmt.Fprintln(out, text)
		return err
	}
}

// each applies the action to every dead letter. It continues after an error about one
// of them and stops at an error that would be the same for all.
func (a action) each(ctx context.Context, client deadLetterClient, seqs []uint64, print func(done) error) error {
	failed := 0
	for i, seq := range seqs {
		d, err := a.do(ctx, client, seq)
		switch {
		case err != nil && len(seqs) == 1:
			return rpcError{err}
		case err != nil && !ofDeadLetter(err):
			return fmt.Errorf("dead letter %d: %w; stopped after %d of %d", seq, rpcError{err}, i, len(seqs))
		case err != nil:
			failed++
			d = done{Seq: seq, Error: Describe(err)}
		}
		if err := print(d); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%w: %d of %d", ErrDeadLetters, failed, len(seqs))
	}
	return nil
}

// ofDeadLetter reports whether an error is about one dead letter only.
func ofDeadLetter(err error) bool {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return false
	}
	switch fault.Reason(infoOf(rpc).GetReason()) {
	case fault.NotFound, fault.NotReplayable, fault.PayloadTooLarge:
		return true
	}
	return false
}

func replayLetter(ctx context.Context, client deadLetterClient, seq uint64) (done, error) {
	response, err := client.ReplayDeadLetter(ctx, connect.NewRequest(&adminv1.ReplayDeadLetterRequest{Seq: seq}))
	if err != nil {
		return done{}, err
	}
	m := response.Msg
	deadline := m.GetDeadline().AsTime()
	out := done{
		Seq: seq, RequestID: m.GetRequestId(), Deadline: deadline.Format(time.RFC3339), DeadLetterRemains: m.GetDeadLetterRemains(),
		text: fmt.Sprintf("dead letter %d runs again as request %s: stagemesh get result %s --wait %s",
			seq, m.GetRequestId(), m.GetRequestId(), max(time.Second, time.Until(deadline).Round(time.Second))),
	}
	if m.GetDeadLetterRemains() {
		out.text += fmt.Sprintf("\ndead letter %d is still there; stagemesh dead-letters delete %d removes it", seq, seq)
	}
	return out, nil
}

func deleteLetter(ctx context.Context, client deadLetterClient, seq uint64) (done, error) {
	_, err := client.DeleteDeadLetter(ctx, connect.NewRequest(&adminv1.DeleteDeadLetterRequest{Seq: seq}))
	return done{Seq: seq, text: fmt.Sprintf("dead letter %d is deleted", seq)}, err
}
