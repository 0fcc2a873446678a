package cli

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

func newJobs() *cobra.Command {
	return group("jobs", "Submit, get, wait for, watch, cancel, list or explain jobs",
		"Submit, get, wait for, watch, cancel, list or explain jobs: requests that wait in a queue on disk until there is room for them.",
		newJobsSubmit(), newJobsGet(), newJobsWait(), newJobsWatch(), newJobsCancel(), newJobsList(), newJobsExplain())
}

// askPublic completes a command: it gets the flags of the public port, and calls the function
// with clients of that.
func askPublic(cmd *cobra.Command, run func(cmd *cobra.Command, client clients, args []string) error) *cobra.Command {
	var gateway port
	gateway.addPublic(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return gateway.reach(func(client clients) error { return run(cmd, client, args) })
	}
	return cmd
}

// jobsTable prints jobs: a table, or JSON lines.
type jobsTable struct {
	json bool
	// first is the title of a column before the others, if any.
	first string
	out   io.Writer
	rows  [][]string
}

// add prints a job of a file, and its answer if it has one.
func (t *jobsTable) add(file string, r *inferencev1.GetJobResponse) error {
	if t.json && r.GetResult() == nil {
		return printJSON(t.out, r.GetJob())
	}
	if t.json {
		return printJSON(t.out, r)
	}
	job := r.GetJob()
	t.row(file, job.GetId(), cmp.Or(job.GetPipeline(), "-"), pipeline.JobStateName(job.GetState()), age(time.Since(job.GetAcceptedAt().AsTime())), fmt.Sprint(job.GetAttempts()), detailsOf(r))
	return nil
}

// fail prints why there is no job of a file.
func (t *jobsTable) fail(file string, err error) error {
	if t.json {
		return printFailure(t.out, Describe(err), "")
	}
	t.row(file, "-", "-", "-", "-", "-", Describe(err))
	return nil
}

func (t *jobsTable) row(file string, columns ...string) {
	if t.first != "" {
		columns = append([]string{file}, columns...)
	}
	t.rows = append(t.rows, columns)
}

func (t *jobsTable) flush() error {
	heads := "JOB\tPIPELINE\tSTATE\tAGE\tATTEMPTS\tDETAILS"
	if t.first != "" {
		heads = t.first + "\t" + heads
	}
	if len(t.rows) == 0 {
		return nil
	}
	return printTable(t.out, heads, t.rows)
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

// jobsSubmit is one call of stagemesh jobs submit.
type jobsSubmit struct {
	clients

	request  *inferencev1.SubmitJobRequest
	pipeline string
	path     string
	ttl      time.Duration
	deadline string
	lines    bool
	waits    bool
	stdin    io.Reader
	table    jobsTable
}

func newJobsSubmit() *cobra.Command {
	c := &jobsSubmit{request: new(inferencev1.SubmitJobRequest), table: jobsTable{first: "FILE"}}
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
	flags.DurationVar(&c.ttl, "ttl", 0, "when the job expires, from now; the queue's ttl if 0")
	flags.StringVar(&c.deadline, "deadline", "", "when the job expires, such as 2006-01-02T15:04:05Z")
	flags.StringVar(&c.request.IdempotencyKey, "idempotency-key", "", "submit the job with this key once; submitting it again returns the first job. For one FILE")
	flags.Int32Var(&c.request.Priority, "priority", 0, "above 0 the job goes first in its queue, below 0 last")
	flags.StringToStringVar(&c.request.Attributes, "attribute", nil, "free text with the job, as name=value; may be repeated")
	flags.StringVar(&c.request.Webhook, "webhook", "", "URL that gets each job once it has ended")
	flags.BoolVar(&c.lines, "ndjson", false, "submit a job for each line of a FILE, which is JSON; its --idempotency-key is that of the FILE and the line's number")
	flags.BoolVar(&c.waits, "wait", false, "wait until the jobs have ended, and print their answers")
	addJSON(submit, &c.table.json, "each job")
	return askPublic(submit, func(cmd *cobra.Command, client clients, args []string) error {
		if c.request.GetIdempotencyKey() != "" && len(args) > 2 {
			return fmt.Errorf("--idempotency-key: needs exactly one FILE, not %d", len(args)-1)
		}
		if c.deadline != "" {
			at, err := time.Parse(time.RFC3339, c.deadline)
			if err != nil {
				return usageError(cmd, fmt.Errorf("--deadline: %q is no time such as 2006-01-02T15:04:05Z", c.deadline))
			}
			c.request.Deadline = timestamppb.New(at)
		}
		if c.ttl != 0 {
			c.request.Ttl = durationpb.New(c.ttl)
		}
		c.clients, c.request.Queue, c.stdin, c.table.out = client, args[0], cmd.InOrStdin(), cmd.OutOrStdout()
		failed, all, err := c.run(cmd.Context(), args[1:])
		if err := cmp.Or(err, c.table.flush()); err != nil {
			return err
		}
		if failed > 0 {
			return fmt.Errorf("%w: %d of %d", ErrFailed, failed, all)
		}
		return nil
	})
}

// run submits the files, and then waits for the jobs if it has to. It returns how many jobs
// failed, of how many.
func (c *jobsSubmit) run(ctx context.Context, files []string) (failed, all int, err error) {
	names, jobs := []string(nil), []*inferencev1.Job(nil)
	add := func(name string, job *inferencev1.Job, err error) error {
		all++
		switch {
		case isHopeless(err):
			return err
		case err != nil:
			failed++
			return c.table.fail(name, err)
		case c.waits:
			names, jobs = append(names, name), append(jobs, job)
			return nil
		}
		return c.table.add(name, &inferencev1.GetJobResponse{Job: job})
	}
	for _, file := range files {
		if c.lines {
			err = c.submitLines(ctx, file, add)
		} else {
			job, problem := c.submit(ctx, file)
			err = add(filepath.Base(file), job, problem)
		}
		if err != nil {
			return failed, all, err
		}
	}
	for i, job := range jobs {
		r, err := c.await(ctx, job.GetId())
		if err == nil {
			err = c.table.add(names[i], r)
		}
		if err != nil {
			return failed, all, err
		}
		if r.GetJob().GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
			failed++
		}
	}
	return failed, all, nil
}

// Bounds of the lines that one call submits.
const (
	maxLines     = 1000
	maxLineBytes = 4 << 20
)

// submitLines submits a job for each line of a file.
func (c *jobsSubmit) submitLines(ctx context.Context, file string, add func(name string, job *inferencev1.Job, err error) error) error {
	from := c.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // it was only read
		from = f
	}
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, maxFile)
	var numbers []int
	var bytes int
	request := new(inferencev1.SubmitJobsRequest)
	send := func() error {
		if len(numbers) == 0 {
			return nil
		}
		out, err := c.SubmitJobs(ctx, connect.NewRequest(request))
		if err != nil {
			return err
		}
		for i, answer := range out.Msg.GetAnswers() {
			if f := answer.GetFailure(); f != nil {
				err = fault.New(fault.Reason(f.GetReason()), f.GetMessage())
			}
			if err := add(fmt.Sprintf("%s:%d", filepath.Base(file), numbers[i]), answer.GetJob(), err); err != nil {
				return err
			}
			err = nil
		}
		numbers, bytes, request.Jobs = nil, 0, nil
		return nil
	}
	for number := 1; lines.Scan(); number++ {
		line := lines.Bytes()
		if len(line) == 0 {
			continue
		}
		if len(numbers) == maxLines || bytes+len(line) > maxLineBytes {
			if err := send(); err != nil {
				return err
			}
		}
		job := proto.CloneOf(c.request)
		c.setPayload(job, "application/json", slices.Clone(line))
		if job.GetIdempotencyKey() != "" {
			job.IdempotencyKey = fmt.Sprintf("%s/%d", job.GetIdempotencyKey(), number)
		}
		numbers, bytes, request.Jobs = append(numbers, number), bytes+len(line), append(request.Jobs, job)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return send()
}

// setPayload gives a job its input.
func (c *jobsSubmit) setPayload(job *inferencev1.SubmitJobRequest, contentType string, data []byte) {
	if c.path != "" {
		job.Payload = &inferencev1.SubmitJobRequest_Http{Http: &inferencev1.HttpCall{Path: c.path, ContentType: contentType, Body: data}}
		return
	}
	blob := &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: contentType, Data: data}}
	job.Payload = &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{Pipeline: c.pipeline, Inputs: []*inferencev1.Part{{Body: blob}}}}
}

func (c *jobsSubmit) submit(ctx context.Context, file string) (*inferencev1.Job, error) {
	data, err := readInput(file, c.stdin)
	if err != nil {
		return nil, err
	}
	c.setPayload(c.request, contentType(file, data), data)
	out, err := c.SubmitJob(ctx, connect.NewRequest(c.request))
	if err != nil {
		return nil, err
	}
	return out.Msg.GetJob(), nil
}

// jobWait is how long one call waits for the end of a job.
const jobWait = 30 * time.Second

// await returns a job once it has ended.
func (c clients) await(ctx context.Context, id string) (*inferencev1.GetJobResponse, error) {
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
		if err := cmp.Or(err, table.flush()); err != nil || table.json {
			return err
		}
		if u := out.Msg.GetJob().GetUsage(); u != nil {
			fmt.Fprintln(table.out, "usage: "+usageText(u))
		}
		return nil
	})
}

// usageText returns what a job took, on one line.
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
		ctx := cmd.Context()
		if timeout > 0 {
			within, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			ctx = within
		}
		table.out = cmd.OutOrStdout()
		failed, problem := 0, error(nil)
		for _, id := range args {
			out, err := client.await(ctx, id)
			if err == nil {
				err = table.add("", out)
			} else if timeout > 0 && connect.CodeOf(err) == connect.CodeDeadlineExceeded {
				err = fmt.Errorf("--timeout: not all jobs have ended within %s", timeout)
			}
			if problem = err; err != nil {
				break
			}
			if out.GetJob().GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
				failed++
			}
		}
		if err := cmp.Or(problem, table.flush()); err != nil {
			return err
		}
		if failed > 0 {
			return fmt.Errorf("%w: %d of %d", ErrFailed, failed, len(args))
		}
		return nil
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
		if store.IsEnd(job.GetState()) && job.GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
			return fmt.Errorf("%w: the job %s", ErrFailed, pipeline.JobStateName(job.GetState()))
		}
		return nil
	})
}

// jobEvent prints an event of a job: chunks as those of a stream, all else on a line of its own.
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
		for _, id := range args {
			out, err := client.CancelJob(cmd.Context(), connect.NewRequest(&inferencev1.CancelJobRequest{Id: id}))
			if err == nil {
				err = table.add("", &inferencev1.GetJobResponse{Job: out.Msg.GetJob()})
			}
			if err != nil {
				return cmp.Or(err, table.flush())
			}
		}
		return table.flush()
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
		if len(page.Msg.GetJobs()) == 0 {
			fmt.Fprintln(cmd.ErrOrStderr(), "there are no such jobs in queue "+visible(args[0]))
		}
		if next := page.Msg.GetNext(); next != 0 {
			fmt.Fprintf(cmd.ErrOrStderr(), "there are more: --after %d goes on\n", next)
		}
		return table.flush()
	})
}
