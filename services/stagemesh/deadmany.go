package stagemesh

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ErrLetters says that something could not be done with some letters; each has
// been printed.
var ErrLetters = errors.New("some dead letters stay as they are")

// done is what became of a letter.
type done struct {
	Seq               uint64 `json:"seq,string"`
	RequestID         string `json:"requestId,omitempty"`
	Deadline          string `json:"deadline,omitempty"`
	DeadLetterRemains bool   `json:"deadLetterRemains,omitempty"`
	Error             string `json:"error,omitempty"`

	// text is the same for a person.
	text string
}

// act is what is done with one letter, and with which letters.
type act struct {
	verb string
	do   func(ctx context.Context, client deadClient, seq uint64) (done, error)
	// unreadable says that it can be done with what is no letter, too, and else
	// with what can be replayed only.
	unreadable bool
}

// manyFlags are those of a verb that takes letters by their numbers, or all of a
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
	cmd.Flags().BoolVar(&f.all, "all", false, verb+" all letters of the --stage, the oldest first")
	cmd.Flags().StringVar(&f.stage, "stage", "", "the stage, with --all")
	cmd.Flags().IntVar(&f.limit, "limit", 100, "the most letters, with --all")
	cmd.Flags().BoolVar(&f.json, "json", false, "print what becomes of each letter as a line of JSON")
}

func newDeadReplay() *cobra.Command {
	var flags manyFlags
	replay := &cobra.Command{
		Use:   "replay NUMBER...",
		Short: "Run the items of dead letters again",
		Long: "Replay puts the items of dead letters into their queues again, each at the step that it died at, as a new durable\n" +
			"request with as much time as the first one had, and discards the letters. It prints how to fetch the answers.",
		Example: "  stagemesh dead replay 7 9\n  stagemesh dead replay --all --stage classify --limit 10",
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.run(cmd, args, act{verb: "replay", do: replayLetter})
		},
	}
	flags.add(replay, "replay")
	return replay
}

func newDeadDiscard() *cobra.Command {
	var flags manyFlags
	discard := &cobra.Command{
		Use:     "discard NUMBER...",
		Short:   "Throw dead letters away",
		Long:    "Discard throws dead letters away, for good and without asking.",
		Example: "  stagemesh dead discard 7 9\n  stagemesh dead discard --all --stage classify --limit 1000",
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.run(cmd, args, act{verb: "discard", do: discardLetter, unreadable: true})
		},
	}
	flags.add(discard, "discard")
	return discard
}

// check refuses what does not say which letters are meant.
func (f manyFlags) check(cmd *cobra.Command, args []string) error {
	switch {
	case f.all && len(args) > 0:
		return misused(cmd, errors.New("give NUMBERs or --all, not both"))
	case f.all && f.stage == "":
		return misused(cmd, errors.New("--all: say of which --stage"))
	case !f.all && f.stage != "":
		return misused(cmd, errors.New("--stage: goes with --all"))
	case !f.all && len(args) == 0:
		return misused(cmd, errors.New("give the NUMBER of a dead letter or more, or --all --stage STAGE"))
	case f.limit < 1:
		return misused(cmd, fmt.Errorf("--limit: %d is not at least 1", f.limit))
	}
	return validStage(cmd, f.stage)
}

func (f manyFlags) run(cmd *cobra.Command, args []string, a act) error {
	if err := f.check(cmd, args); err != nil {
		return err
	}
	seqs, err := letterNumbers(cmd, args)
	if err != nil {
		return err
	}
	return f.admin.with(func(client deadClient) error {
		if f.all {
			if seqs, err = f.find(cmd.Context(), client, a, cmd.ErrOrStderr()); err != nil {
				return err
			}
		}
		return a.each(cmd.Context(), client, seqs, f.printer(cmd.OutOrStdout()))
	})
}

// find returns the letters of the stage that it can be done with. They are found
// before anything is done, for what dies again is a new letter.
func (f manyFlags) find(ctx context.Context, client deadClient, a act, hints io.Writer) ([]uint64, error) {
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
			room := f.limit - len(seqs)
			seqs = append(seqs, pages.unreadable[:min(room, len(pages.unreadable))]...)
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
		fmt.Fprintf(hints, "%s of stage %s cannot be replayed; stagemesh dead show says why: %s\n", count(len(others), "letter"), f.stage, numbers(others))
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
			text = fmt.Sprintf("letter %d: %s", d.Seq, visible(d.Error))
		}
		_, err := fmt.Fprintln(out, text)
		return err
	}
}

// each does it with each letter. It goes on after what is wrong with a letter, and
// stops at what would be wrong with all.
func (a act) each(ctx context.Context, client deadClient, seqs []uint64, print func(done) error) error {
	failed := 0
	for i, seq := range seqs {
		d, err := a.do(ctx, client, seq)
		switch {
		case err != nil && len(seqs) == 1:
			return told{err}
		case err != nil && !ofLetter(err):
			return fmt.Errorf("letter %d: %w; stopped after %d of %d", seq, told{err}, i, len(seqs))
		case err != nil:
			failed++
			d = done{Seq: seq, Error: Describe(err)}
		}
		if err := print(d); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%w: %d of %d", ErrLetters, failed, len(seqs))
	}
	return nil
}

// ofLetter reports whether an error is about one letter and no other.
func ofLetter(err error) bool {
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

func replayLetter(ctx context.Context, client deadClient, seq uint64) (done, error) {
	response, err := client.ReplayDeadLetter(ctx, connect.NewRequest(&adminv1.ReplayDeadLetterRequest{Seq: seq}))
	if err != nil {
		return done{}, err
	}
	m := response.Msg
	deadline := m.GetDeadline().AsTime()
	out := done{
		Seq: seq, RequestID: m.GetRequestId(), Deadline: deadline.Format(time.RFC3339), DeadLetterRemains: m.GetDeadLetterRemains(),
		text: fmt.Sprintf("letter %d runs again as request %s: stagemesh result %s --wait %s",
			seq, m.GetRequestId(), m.GetRequestId(), max(time.Second, time.Until(deadline).Round(time.Second))),
	}
	if m.GetDeadLetterRemains() {
		out.text += fmt.Sprintf("\nletter %d is still there; stagemesh dead discard %d removes it", seq, seq)
	}
	return out, nil
}

func discardLetter(ctx context.Context, client deadClient, seq uint64) (done, error) {
	_, err := client.DeleteDeadLetter(ctx, connect.NewRequest(&adminv1.DeleteDeadLetterRequest{Seq: seq}))
	return done{Seq: seq, text: fmt.Sprintf("letter %d is discarded", seq)}, err
}
