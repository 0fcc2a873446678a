package stagemesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// deadClient is what the verbs of dead ask.
type deadClient = adminv1connect.DeadLetterServiceClient

func newDead() *cobra.Command {
	dead := &cobra.Command{
		Use:   "dead",
		Short: "Look at what the mesh gave up on, run it again, or throw it away",
		Long: "Dead is about dead letters: what the mesh gave up on and keeps for an operator. It asks the admin port of a\n" +
			"gateway, any of the mesh.",
		// A verb that there is not is an error, not a call for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	dead.AddCommand(newDeadList(), newDeadShow(), newDeadReplay(), newDeadDiscard())
	return dead
}

type listFlags struct {
	admin adminFlags
	stage string
	from  uint64
	limit int
	all   bool
	json  bool
}

func newDeadList() *cobra.Command {
	var flags listFlags
	list := &cobra.Command{
		Use:     "list",
		Short:   "List dead letters, the oldest first",
		Example: "  stagemesh dead list\n  stagemesh dead list --stage classify --all --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flags.limit < 1 {
				return misused(cmd, fmt.Errorf("--limit: %d is not at least 1", flags.limit))
			}
			if err := validStage(cmd, flags.stage); err != nil {
				return err
			}
			return flags.admin.with(func(client deadClient) error {
				return flags.run(cmd.Context(), client, newLetters(cmd.OutOrStdout(), flags.json), cmd.ErrOrStderr())
			})
		},
	}
	flags.admin.add(list)
	list.Flags().StringVar(&flags.stage, "stage", "", "only letters of this stage")
	list.Flags().Uint64Var(&flags.from, "from", 0, "only letters from this number on")
	list.Flags().IntVar(&flags.limit, "limit", 50, "the most letters to list")
	list.Flags().BoolVar(&flags.all, "all", false, "list all letters, however many there are")
	list.Flags().BoolVar(&flags.json, "json", false, "print each letter as a line of JSON")
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

func (f listFlags) run(ctx context.Context, client deadClient, out *letters, hints io.Writer) error {
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
		fmt.Fprintf(hints, "%s on the way cannot be read; stagemesh dead discard %s removes them\n", count(len(pages.unreadable), "message"), numbers(pages.unreadable))
	}
	if pages.next != 0 {
		fmt.Fprintf(hints, "there are more: --from %d goes on, --all lists all\n", pages.next)
	}
	return nil
}

// maxPage is the most letters to ask for at a time.
const maxPage = 1000

// pager walks through the letters of a stage, or of all.
type pager struct {
	client deadClient
	stage  string
	// next is the number to go on from; 0 at the end.
	next uint64
	// unreadable are the first numbers that are no letters.
	unreadable []uint64
}

func (p *pager) page(ctx context.Context, limit int) ([]*adminv1.DeadLetterSummary, error) {
	response, err := p.client.ListDeadLetters(ctx, connect.NewRequest(&adminv1.ListDeadLettersRequest{
		Stage: p.stage, From: p.next, Limit: uint32(limit),
	}))
	if err != nil {
		return nil, told{err}
	}
	p.next = response.Msg.GetNext()
	more := response.Msg.GetUnreadable()
	p.unreadable = append(p.unreadable, more[:min(len(more), maxPage-len(p.unreadable))]...)
	return response.Msg.GetDeadLetters(), nil
}

func newDeadShow() *cobra.Command {
	var admin adminFlags
	var asJSON bool
	var raw string
	show := &cobra.Command{
		Use:     "show NUMBER",
		Short:   "Show all that is known of a dead letter",
		Example: "  stagemesh dead show 7\n  stagemesh dead show 7 --raw item.bin   # the message as it was in the queue",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return misused(cmd, errors.New("give one NUMBER of a dead letter"))
			}
			_, err := letterNumbers(cmd, args)
			return err
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			seqs, err := letterNumbers(cmd, args)
			if err != nil {
				return err
			}
			request := &adminv1.GetDeadLetterRequest{Seq: seqs[0]}
			if raw != "" {
				request.MessageBytes = maxRaw
			}
			return admin.with(func(client deadClient) error {
				response, err := client.GetDeadLetter(cmd.Context(), connect.NewRequest(request))
				if err != nil {
					return told{err}
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
	show.Flags().BoolVar(&asJSON, "json", false, "print the letter as a line of JSON")
	show.Flags().StringVar(&raw, "raw", "", "a file to write the message to, as it was in the queue")
	return show
}

// letterNumbers reads the numbers of letters.
func letterNumbers(cmd *cobra.Command, args []string) ([]uint64, error) {
	out := make([]uint64, len(args))
	for i, arg := range args {
		n, err := strconv.ParseUint(arg, 10, 64)
		if err != nil || n == 0 {
			return nil, misused(cmd, fmt.Errorf("NUMBER: %q is no number of a dead letter, such as 7", arg))
		}
		out[i] = n
	}
	return out, nil
}
