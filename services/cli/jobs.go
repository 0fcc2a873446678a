package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
)

func newJobs() *cobra.Command {
	return group("jobs", "Submit, get, wait for, watch, cancel, list or explain jobs",
		"Submit, get, wait for, watch, cancel, list or explain jobs: requests that wait in a queue on disk until there is room for them.",
		newJobsSubmit(), newJobsGet(), newJobsWait(), newJobsWatch(), newJobsCancel(), newJobsList(), newJobsExplain(), newJobsWebhookSecret())
}

func newJobsWebhookSecret() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "webhook-secret TENANT",
		Short: "Print the secret that verifies the webhooks of a tenant without secrets of its own",
		Long: "Print the secret that is derived for a tenant from each of jobs.webhooks.secret_files, which this reads.\n" +
			"Receivers that verify with it accept no webhook of other tenants. Give the files themselves to nobody.",
		Example: "  stagemesh jobs webhook-secret billing --config mesh.yaml",
		Args:    between(1, 1, "give one TENANT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := pipeline.ValidName("tenant", args[0]); err != nil {
				return err
			}
			file, err := meshfile.Read(path, runners.All()...)
			if err != nil {
				return err
			}
			if file.Jobs.Webhooks == nil {
				return fmt.Errorf("%s: there is no section jobs.webhooks", path)
			}
			secrets, err := file.Jobs.Webhooks.DerivedSecrets(args[0])
			if err != nil {
				return fmt.Errorf("%s: jobs.webhooks: %w", path, err)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), strings.Join(secrets, "\n"))
			return err
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "mesh.yaml", "the mesh file")
	return cmd
}

// jobsTable prints jobs: a table, or JSON lines.
type jobsTable struct {
	json bool
	// files is true if there is a column for the files of jobs.
	files bool
	out   io.Writer
	// rows are those that have not been printed; begun is true once some have been.
	rows  [][]string
	begun bool
}

func (t *jobsTable) add(file string, r *inferencev1.GetJobResponse) error {
	job := r.GetJob()
	switch {
	case t.json && r.GetResult() == nil:
		return printJSON(t.out, job)
	case t.json:
		return printJSON(t.out, r)
	}
	t.rows = append(t.rows, []string{
		file, job.GetId(), cmp.Or(job.GetPipeline(), "-"), pipeline.JobStateName(job.GetState()), age(time.Since(job.GetAcceptedAt().AsTime())), fmt.Sprint(job.GetAttempts()), detailsOf(r),
	})
	return nil
}

// fail adds what failed: of a job, or with an empty ID of a file of which there is none.
func (t *jobsTable) fail(file, id string, err error) error {
	if t.json {
		return printFailure(t.out, Describe(err), "", id)
	}
	t.rows = append(t.rows, []string{file, cmp.Or(id, "-"), "-", "-", "-", "-", visible(Describe(err))})
	return nil
}

// each prints what get returns of each job, and returns how many have not succeeded, and the first error of get.
// The IDs are printed also if all calls fail: the jobs run on.
func (t *jobsTable) each(ids, files []string, get func(id string) (*inferencev1.GetJobResponse, error)) (failed int, err error) {
	for i, id := range ids {
		r, problem := get(id)
		switch {
		case problem == nil:
			if problem = t.add(files[i], r); r.GetJob().GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
				failed++
			}
		case len(ids) == 1 && !t.files: // the error says all
			return 1, problem
		default:
			failed, err = failed+1, cmp.Or(err, problem)
			problem = t.fail(files[i], id, problem)
		}
		if problem != nil {
			return failed, problem
		}
	}
	return failed, err
}

// flush prints the rows.
func (t *jobsTable) flush() error {
	rows, heads := t.rows, "FILE\tJOB\tPIPELINE\tSTATE\tAGE\tATTEMPTS\tDETAILS"
	if !t.files {
		heads = strings.TrimPrefix(heads, "FILE\t")
		for i, row := range rows {
			rows[i] = row[1:]
		}
	}
	if len(rows) == 0 {
		return nil
	}
	if t.begun {
		heads = ""
	}
	t.rows, t.begun = nil, true
	return printTable(t.out, heads, rows)
}

// finish prints the rows, and returns the error of the command.
func (t *jobsTable) finish(failed, all int, err error) error {
	err = cmp.Or(err, t.flush())
	if err == nil && failed > 0 {
		err = fmt.Errorf("%w: %d of %d", ErrFailed, failed, all)
	}
	return err
}

// detailsOf returns what else to know of a job, on one line: its answer, or why it waits.
func detailsOf(r *inferencev1.GetJobResponse) string {
	job := r.GetJob()
	var out []string
	switch {
	case job.GetCancelRequested():
		out = append(out, "asked to stop")
	case job.GetState() == inferencev1.JobState_JOB_STATE_DELAYED:
		out = append(out, "next attempt in "+age(time.Until(job.GetNotBefore().AsTime())))
	case job.GetState() == inferencev1.JobState_JOB_STATE_QUEUED:
		out = append(out, "expires in "+age(time.Until(job.GetDeadline().AsTime())))
	}
	if job.GetReason() != "" {
		out = append(out, visible(job.GetReason()+": "+job.GetMessage()))
	}
	for _, part := range r.GetInfer().GetOutputs() {
		out = append(out, Render(part))
	}
	if answer := r.GetHttp(); answer != nil {
		blob := &inferencev1.Blob{ContentType: answer.GetContentType(), Data: answer.GetBody()}
		out = append(out, fmt.Sprintf("HTTP %d", answer.GetStatus()), Render(&inferencev1.Part{Body: &inferencev1.Part_Blob{Blob: blob}}))
	}
	return cmp.Or(strings.Join(out, "  "), "-")
}

type jobsSubmit struct {
	clients

	request  *inferencev1.SubmitJobRequest
	pipeline string
	content  content
	path     string
	lines    bool
	waits    bool
	stdin    io.Reader
	table    jobsTable

	// next are the next jobs to submit, names are of what, and bytes is the size of their payloads.
	next  []*inferencev1.SubmitJobRequest
	names []string
	bytes int
	// ids and files belong to accepted jobs that are not printed yet.
	ids, files  []string
	failed, all int
}

func newJobsSubmit() *cobra.Command {
	c := &jobsSubmit{request: new(inferencev1.SubmitJobRequest), table: jobsTable{files: true}}
	var ttl time.Duration
	var deadline string
	submit := &cobra.Command{
		Use:   "submit QUEUE FILE...",
		Short: "Submit files as jobs to a queue",
		Long: "Submit each file as a job to a queue of a running mesh, and print the jobs. A job that is printed is on disk. The content\n" +
			"type follows from the file's name, or else from its first bytes. - is standard input.",
		Example: "  stagemesh jobs submit nightly examples/digits/images/*.png --ttl 6h\n  stagemesh jobs submit nightly requests.ndjson --ndjson\n  stagemesh jobs submit nightly image.png --idempotency-key order-4711 --wait",
		Args:    between(2, unlimited, "give a QUEUE and at least one FILE"),
	}
	flags := submit.Flags()
	flags.StringVar(&c.pipeline, "pipeline", "", "the pipeline to run; the queue's first one if empty")
	flags.StringVar(&c.path, "path", "", "for a queue with an HTTP target: the path to send the file to")
	flags.DurationVar(&ttl, "ttl", 0, "when the job expires, from now; the queue's ttl if 0")
	flags.StringVar(&deadline, "deadline", "", "when the job expires, such as 2006-01-02T15:04:05Z")
	flags.StringVar(&c.request.IdempotencyKey, "idempotency-key", "", "submit the job with this key once; submitting it again returns the first job. For one FILE")
	flags.Int32Var(&c.request.Priority, "priority", 0, "above 0 the job goes first in its queue, below 0 last")
	flags.Var(namedTexts{&c.request.Attributes}, "attribute", "free text with the job, as name=value; may be repeated")
	flags.StringVar(&c.request.Webhook, "webhook", "", "URL that gets each job once it has ended")
	flags.BoolVar(&c.lines, "ndjson", false, "submit a job for each line of a FILE, which is JSON; its --idempotency-key is that of the FILE and the line's number")
	flags.BoolVar(&c.waits, "wait", false, "wait until the jobs have ended, and print their answers")
	c.content.add(submit)
	addJSON(submit, &c.table.json, "each job")
	return askPublic(submit, func(cmd *cobra.Command, client clients, args []string) error {
		if c.request.GetIdempotencyKey() != "" && len(args) > 2 {
			return fmt.Errorf("--idempotency-key: needs exactly one FILE, not %d", len(args)-1)
		}
		if c.path != "" && (c.pipeline != "" || len(c.content.parameters) > 0) {
			return usageError(cmd, errors.New("--pipeline and --parameter are for pipelines, and --path for a queue with an HTTP target"))
		}
		if deadline != "" {
			at, err := time.Parse(time.RFC3339, deadline)
			if err != nil {
				return usageError(cmd, fmt.Errorf("--deadline: %q is not a time such as 2006-01-02T15:04:05Z", deadline))
			}
			c.request.Deadline = timestamppb.New(at)
		}
		if ttl != 0 {
			c.request.Ttl = durationpb.New(ttl)
		}
		c.clients, c.request.Queue, c.stdin, c.table.out = client, args[0], cmd.InOrStdin(), cmd.OutOrStdout()
		ctx, stop := process.SignalContext(cmd.Context())
		defer stop()
		defer context.AfterFunc(ctx, stop)() // a second signal ends what waits for input
		err := c.run(ctx, args[1:])
		failed, failure := c.table.each(c.ids, c.files, client.awaitJob(ctx))
		return c.table.finish(c.failed+failed, c.all, cmp.Or(err, failure))
	})
}

func (c *jobsSubmit) run(ctx context.Context, files []string) error {
	for _, file := range files {
		name, err := filepath.Base(file), error(nil)
		if c.lines {
			err = c.addLines(ctx, name, file)
		} else if data, problem := readInput(file, c.stdin); problem == nil {
			err = c.add(ctx, name, contentType(file, data), data, "")
		} else {
			err = c.fail(name, problem)
		}
		if err == nil {
			err = c.send(ctx) // jobs of one call are accepted in any order, files in theirs
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *jobsSubmit) addLines(ctx context.Context, name, file string) error {
	from, err := openInput(file, c.stdin)
	if err != nil {
		return err
	}
	defer from.Close() //nolint:errcheck // it was only read
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, maxFile)
	for number := 1; lines.Scan(); number++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		if err := c.add(ctx, fmt.Sprintf("%s:%d", name, number), "application/json", bytes.Clone(lines.Bytes()), fmt.Sprintf("/%d", number)); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// Bounds of the jobs that one call submits.
const (
	maxSubmits     = 1000
	maxSubmitBytes = 4 << 20
)

// add submits a job together with others. The suffix ends its idempotency key.
func (c *jobsSubmit) add(ctx context.Context, name, contentType string, data []byte, suffix string) error {
	if len(c.next) == maxSubmits || c.bytes+len(data) > maxSubmitBytes {
		if err := c.send(ctx); err != nil {
			return err
		}
	}
	contentType = cmp.Or(c.content.mediaType, contentType)
	job := proto.CloneOf(c.request)
	if job.GetIdempotencyKey() != "" {
		job.IdempotencyKey += suffix
	}
	if c.path != "" {
		job.Payload = &inferencev1.SubmitJobRequest_Http{Http: &inferencev1.HttpCall{Path: c.path, ContentType: contentType, Body: data}}
	} else {
		blob := &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: contentType, Data: data}}
		job.Payload = &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{Pipeline: c.pipeline, Inputs: []*inferencev1.Part{{Body: blob}}, Parameters: c.content.values()}}
	}
	c.next, c.names, c.bytes = append(c.next, job), append(c.names, name), c.bytes+len(data)
	return nil
}

// send submits the next jobs, and prints them unless they are waited for.
func (c *jobsSubmit) send(ctx context.Context) error {
	if len(c.next) == 0 {
		return nil
	}
	out, err := c.SubmitJobs(ctx, connect.NewRequest(&inferencev1.SubmitJobsRequest{Jobs: c.next}))
	if err != nil {
		return err
	}
	names := c.names
	c.next, c.names, c.bytes = nil, nil, 0
	for i, answer := range out.Msg.GetAnswers() {
		switch f, job := answer.GetFailure(), answer.GetJob(); {
		case f != nil:
			err = c.fail(names[i], fault.New(fault.Reason(f.GetReason()), f.GetMessage()))
		case c.waits:
			c.all, c.ids, c.files = c.all+1, append(c.ids, job.GetId()), append(c.files, names[i])
		default:
			c.all++
			err = c.table.add(names[i], &inferencev1.GetJobResponse{Job: job})
		}
		if err != nil {
			return err
		}
	}
	if len(c.table.rows) < maxSubmits {
		return nil
	}
	return c.table.flush()
}

func (c *jobsSubmit) fail(name string, err error) error {
	c.all, c.failed = c.all+1, c.failed+1
	return c.table.fail(name, "", err)
}

// jobWait is how long one call waits for the end of a job.
const jobWait = 30 * time.Second

// awaitJob returns a function that returns a job once it has ended.
func (c clients) awaitJob(ctx context.Context) func(id string) (*inferencev1.GetJobResponse, error) {
	return func(id string) (*inferencev1.GetJobResponse, error) {
		for {
			out, err := c.GetJob(ctx, connect.NewRequest(&inferencev1.GetJobRequest{Id: id, Wait: durationpb.New(jobWait)}))
			if err != nil {
				return nil, err
			}
			if store.IsEnd(out.Msg.GetJob().GetState()) {
				return out.Msg, nil
			}
		}
	}
}

func newJobsGet() *cobra.Command {
	var table jobsTable
	get := &cobra.Command{
		Use: "get JOB_ID", Short: "Print a job, and its answer if it has one",
		Args: between(1, 1, "give one JOB_ID"),
	}
	addJSON(get, &table.json, "the job")
	return askPublic(get, func(cmd *cobra.Command, client clients, args []string) error {
		table.out = cmd.OutOrStdout()
		out, err := client.GetJob(cmd.Context(), connect.NewRequest(&inferencev1.GetJobRequest{Id: args[0]}))
		if err == nil {
			err = table.add("", out.Msg)
		}
		if err := table.finish(0, 1, err); err != nil || table.json {
			return err
		}
		if u := out.Msg.GetJob().GetUsage(); u != nil {
			fmt.Fprintln(table.out, "usage: "+usageText(u))
		}
		return nil
	})
}

func usageText(u *inferencev1.JobUsage) string {
	out := fmt.Sprintf("%d attempts; queued %.3g s, delayed %.3g s, running %.3g s, gate closed %.3g s; runners %.3g s; %d bytes in, %d out",
		u.GetAttempts(), u.GetQueuedSeconds(), u.GetDelayedSeconds(), u.GetRunningSeconds(), u.GetClosedSeconds(), u.GetRunnerSeconds(), u.GetBytesIn(), u.GetBytesOut())
	if n := u.GetPromptTokens() + u.GetCompletionTokens(); n > 0 {
		out += fmt.Sprintf("; %d + %d tokens", u.GetPromptTokens(), u.GetCompletionTokens())
	}
	if u.GetCost() > 0 || u.GetJoules() > 0 {
		out += fmt.Sprintf("; cost %.6g %s, %.3g J", u.GetCost(), visible(u.GetCurrency()), u.GetJoules())
	}
	return out
}

func newJobsWait() *cobra.Command {
	var table jobsTable
	var timeout time.Duration
	wait := &cobra.Command{
		Use: "wait JOB_ID...", Short: "Wait until jobs have ended, and print their answers",
		Long: "Wait until jobs have ended, and print their answers. It fails unless all of them have succeeded.",
		Args: between(1, unlimited, "give at least one JOB_ID"),
	}
	wait.Flags().DurationVar(&timeout, "timeout", 0, "how long to wait at most; 0 means until the end")
	addJSON(wait, &table.json, "each job")
	return askPublic(wait, func(cmd *cobra.Command, client clients, args []string) error {
		if timeout < 0 {
			return usageError(cmd, fmt.Errorf("--timeout: %s is negative", timeout))
		}
		ctx, stop := process.SignalContext(cmd.Context())
		defer stop()
		if timeout > 0 {
			within, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			ctx = within
		}
		table.out = cmd.OutOrStdout()
		failed, err := table.each(args, args, client.awaitJob(ctx))
		if timeout > 0 && connect.CodeOf(err) == connect.CodeDeadlineExceeded {
			err = fmt.Errorf("--timeout: not all jobs have ended within %s", timeout)
		}
		return table.finish(failed, len(args), err)
	})
}

func newJobsWatch() *cobra.Command {
	var to streamPrinter
	request := new(inferencev1.WatchJobRequest)
	watch := &cobra.Command{
		Use: "watch JOB_ID", Short: "Print the states of a job, and the chunks of its answer, until it ends",
		Long: "Print the states of a job, and the chunks of its answer, until it ends. It fails unless the job has succeeded.",
		Args: between(1, 1, "give one JOB_ID"),
	}
	watch.Flags().StringVar(&request.After, "after", "", "the ID of an event, as --json prints it: start after that")
	addJSON(watch, &to.style.json, "each event")
	return askPublic(watch, func(cmd *cobra.Command, client clients, args []string) error {
		to.out, request.Id = cmd.OutOrStdout(), args[0]
		events, err := client.WatchJob(cmd.Context(), connect.NewRequest(request))
		if err != nil {
			return err
		}
		defer events.Close() //nolint:errcheck // the events have ended
		var job *inferencev1.Job
		for events.Receive() {
			job = cmp.Or(events.Msg().GetState(), job)
			if err := to.jobEvent(events.Msg()); err != nil {
				return err
			}
		}
		if err := events.Err(); err != nil {
			return err
		}
		if job == nil { // --after names the last event
			last, err := client.GetJob(cmd.Context(), connect.NewRequest(&inferencev1.GetJobRequest{Id: request.GetId()}))
			if err != nil {
				return err
			}
			job = last.Msg.GetJob()
		}
		if store.IsEnd(job.GetState()) && job.GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
			return fmt.Errorf("%w: the job %s", ErrFailed, pipeline.JobStateName(job.GetState()))
		}
		return nil
	})
}

// jobEvent prints an event of a job: chunks as in a stream, all else on a line of its own.
func (t *streamPrinter) jobEvent(m *inferencev1.WatchJobResponse) error {
	if t.style.json {
		return printJSON(t.out, m)
	}
	switch event := m.GetEvent().(type) {
	case *inferencev1.WatchJobResponse_State:
		return t.line(strings.TrimSuffix(pipeline.JobStateName(event.State.GetState())+"  "+detailsOf(&inferencev1.GetJobResponse{Job: event.State}), "  -"))
	case *inferencev1.WatchJobResponse_Chunk:
		return t.parts(event.Chunk.GetOutputs())
	case *inferencev1.WatchJobResponse_Restart:
		return t.line("the answer begins again")
	case *inferencev1.WatchJobResponse_Gap:
		return t.line(count(int(event.Gap.GetLast()-event.Gap.GetFirst()+1), "chunk") + " of the answer not kept")
	}
	return nil
}

func newJobsCancel() *cobra.Command {
	var table jobsTable
	cancel := &cobra.Command{
		Use: "cancel JOB_ID...", Short: "Cancel jobs",
		Long: "Cancel jobs, and print them as they are then. A job that waits never runs, one that runs is asked to stop, and one that has\nended stays as it is.",
		Args: between(1, unlimited, "give at least one JOB_ID"),
	}
	addJSON(cancel, &table.json, "each job")
	return askPublic(cancel, func(cmd *cobra.Command, client clients, args []string) error {
		table.out = cmd.OutOrStdout()
		_, err := table.each(args, args, func(id string) (*inferencev1.GetJobResponse, error) {
			out, err := client.CancelJob(cmd.Context(), connect.NewRequest(&inferencev1.CancelJobRequest{Id: id}))
			if err != nil {
				return nil, err
			}
			return &inferencev1.GetJobResponse{Job: out.Msg.GetJob()}, nil
		})
		return table.finish(0, len(args), err)
	})
}

func newJobsList() *cobra.Command {
	var table jobsTable
	request := new(inferencev1.ListJobsRequest)
	list := &cobra.Command{
		Use: "list QUEUE", Short: "List the jobs of a queue that have not ended, oldest first",
		Example: "  stagemesh jobs list nightly\n  stagemesh jobs list nightly --ended --limit 1000 --json",
		Args:    between(1, 1, "give one QUEUE"),
	}
	list.Flags().BoolVar(&request.Ended, "ended", false, "list the jobs that have ended instead, in the order of their ends")
	list.Flags().Uint64Var(&request.After, "after", 0, "start after this number, which the last page has printed")
	list.Flags().Uint32Var(&request.Limit, "limit", 50, "list at most this many, of 1000")
	addJSON(list, &table.json, "each job")
	return askPublic(list, func(cmd *cobra.Command, client clients, args []string) error {
		request.Queue, table.out = args[0], cmd.OutOrStdout()
		page, err := client.ListJobs(cmd.Context(), connect.NewRequest(request))
		if err != nil {
			return err
		}
		for _, job := range page.Msg.GetJobs() {
			if err := table.add("", &inferencev1.GetJobResponse{Job: job}); err != nil {
				return err
			}
		}
		if len(page.Msg.GetJobs()) == 0 && page.Msg.GetNext() == 0 {
			fmt.Fprintln(cmd.ErrOrStderr(), "there are no such jobs in queue "+visible(args[0]))
		}
		if next := page.Msg.GetNext(); next != 0 {
			fmt.Fprintf(cmd.ErrOrStderr(), "there are more: --after %d goes on\n", next)
		}
		return table.finish(0, 0, nil)
	})
}
