package rest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Paths of jobs; a path below one of them is of NewJobs.
const (
	QueuesPrefix = Prefix + "queues/"
	JobsPrefix   = Prefix + "jobs/"
)

// jobsHandler serves jobs on plain HTTP:
//
//	POST   /v1/queues/{queue}/jobs?pipeline=NAME&ttl=6h          one job, or one for each line
//	GET    /v1/queues/{queue}/jobs?after=N&limit=50
//	GET    /v1/queues/{queue}/results?after=N&limit=50&wait=30s
//	GET    /v1/jobs/{id}
//	GET    /v1/jobs/{id}/result?wait=30s
//	GET    /v1/jobs/{id}/explain
//	GET    /v1/jobs/{id}/events
//	DELETE /v1/jobs/{id}
//
// A body is read as for inference; for a queue with an HTTP target it is passed on as it is,
// to the path of ?path=. A result that is not there yet is 202 with the job.
type jobsHandler struct {
	handler
}

// NewJobs returns the handler of what is below QueuesPrefix and JobsPrefix.
func NewJobs(jobs *jobs.Service, s transport.Settings) http.Handler {
	s = s.WithDefaults()
	return transport.WithStallTimeout(&jobsHandler{handler{jobs: jobs, settings: s}}, s.StallTimeout)
}

// ServeHTTP implements http.Handler.
func (h *jobsHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store") // a job changes
	start := time.Now()
	serve, methods := h.route(r)
	err := error(nil)
	switch {
	case len(methods) == 0:
		err = fault.Newf(fault.NotFound, "there is nothing at %.*q; jobs are submitted by POST %s<queue>/jobs, and read at %s<id>", fault.MaxQuoted, r.URL.Path, QueuesPrefix, JobsPrefix)
	case serve == nil:
		transport.WriteFaultStatus(w, transport.WrongMethod(w, r, methods...), http.StatusMethodNotAllowed)
		return
	default:
		err = serve(w, r)
	}
	if err != nil {
		h.fail(w, err, start)
	}
}

// route returns the handler of a request, and the methods of its path: none if there is no such
// path.
func (h *jobsHandler) route(r *http.Request) (serve func(http.ResponseWriter, *http.Request) error, methods []string) {
	type methodMap = map[string]func(http.ResponseWriter, *http.Request) error
	kind, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, Prefix), "/")
	name, verb, _ := strings.Cut(rest, "/")
	if name == "" {
		return nil, nil
	}
	r.SetPathValue("name", name)
	of := map[string]methodMap{
		"queues/jobs":    {http.MethodPost: h.submit, http.MethodGet: h.list},
		"queues/results": {http.MethodGet: h.list},
		"jobs/":          {http.MethodGet: h.get, http.MethodDelete: h.cancelJob},
		"jobs/result":    {http.MethodGet: h.jobResult},
		"jobs/explain":   {http.MethodGet: h.explain},
		"jobs/events":    {http.MethodGet: h.jobEvents},
	}[kind+"/"+verb]
	return of[r.Method], slices.Collect(maps.Keys(of))
}

func (h *jobsHandler) submit(w http.ResponseWriter, r *http.Request) error {
	in := &inferencev1.SubmitJobRequest{Queue: r.PathValue("name")}
	rest, err := takeJobQuery(in, r.URL.RawQuery)
	if err != nil {
		return err
	}
	r.URL.RawQuery = rest
	if kind, _ := contentType(r.Header.Get("Content-Type")); kind.media == linesType {
		return h.submitLines(w, r, in, kind)
	}
	memory := budget.Of(r.Context(), h.settings.MaxPayload)
	defer memory.Close()
	contentType := r.Header.Get("Content-Type")
	if in.GetHttp().GetPath() != "" {
		r.Header.Set("Content-Type", "application/octet-stream") // the target gets the body unchanged, so it is read as one blob
	}
	request, _, err := h.readRequest(w, r, in.GetInfer().GetPipeline(), QueuesPrefix+"{queue}/jobs", memory)
	if err != nil {
		return err
	}
	if err := setRequest(in, request, contentType); err != nil {
		return err
	}
	out, err := h.jobs.SubmitJob(r.Context(), in)
	if err != nil {
		return err
	}
	job := out.GetJob()
	w.Header().Set("Location", JobsPrefix+job.GetId())
	transport.WriteJSON(w, http.StatusAccepted, pipeline.JobDocumentOf(job))
	return nil
}

// setRequest sets the job's request. A body that is passed on keeps its content type.
func setRequest(in *inferencev1.SubmitJobRequest, request *request.Request, contentType string) error {
	in.IdempotencyKey, in.Priority = request.IdempotencyKey, request.Priority
	request.IdempotencyKey, request.Priority = "", 0
	if in.GetHttp().GetPath() == "" {
		in.Payload = &inferencev1.SubmitJobRequest_Infer{Infer: request.ToProto()}
		return nil
	}
	if len(request.Parameters)+len(request.Steps)+len(request.Outputs) > 0 || request.Timeout != 0 || request.Durability != "" || request.WaitForCapacity != nil {
		return fault.New(fault.InvalidRequest, "a call of an HTTP target has no inference options: leave out parameters, steps, outputs, timeout, durability and waiting for capacity")
	}
	in.GetHttp().Body, in.GetHttp().ContentType = request.Inputs[0].Blob.Data, contentType
	return nil
}

// takeJobQuery takes what is the job's from a query, and returns the rest.
func takeJobQuery(in *inferencev1.SubmitJobRequest, raw string) (rest string, err error) {
	others := url.Values{}
	err = eachQuery(raw, func(key, value string) error {
		attribute, isAttribute := strings.CutPrefix(key, "attributes.")
		switch {
		case key == "pipeline" && in.GetPayload() != nil:
			return errors.New("is for queues of pipelines, and path for queues with an HTTP target; leave one out")
		case key == "pipeline":
			in.Payload = &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{Pipeline: value}}
		case key == "path":
			in.Payload = &inferencev1.SubmitJobRequest_Http{Http: &inferencev1.HttpCall{Path: value}}
		case key == "ttl":
			ttl, err := duration(value)
			in.Ttl = durationpb.New(ttl)
			return err
		case key == "deadline":
			at, err := time.Parse(time.RFC3339, value)
			in.Deadline = timestamppb.New(at)
			if err != nil {
				return fmt.Errorf("%.*q is not a time such as 2006-01-02T15:04:05Z", fault.MaxQuoted, value)
			}
		case key == "webhook":
			in.Webhook = value
		case isAttribute:
			if in.Attributes == nil {
				in.Attributes = map[string]string{}
			}
			in.Attributes[attribute] = value
		case key == "outputs" || strings.HasPrefix(key, "parameters.") || strings.HasPrefix(key, "steps."):
			others.Set(key, value)
		default:
			return errors.New("unknown key; expected pipeline, path, ttl, deadline, webhook, attributes.<name>, parameters.<name>, steps.<step>.<name> and outputs")
		}
		return nil
	})
	return others.Encode(), err
}

func (h *jobsHandler) list(w http.ResponseWriter, r *http.Request) error {
	in := &inferencev1.ListJobsRequest{Queue: r.PathValue("name"), Ended: strings.HasSuffix(r.URL.Path, "/results")}
	if err := eachQuery(r.URL.RawQuery, func(key, value string) (err error) {
		switch key {
		case "after":
			if in.After, err = strconv.ParseUint(value, 10, 64); err != nil {
				err = errors.New("must be a whole number, such as next of the page before")
			}
		case "limit":
			var limit uint64
			if limit, err = strconv.ParseUint(value, 10, 32); err != nil {
				err = errors.New("must be a whole number")
			}
			in.Limit = uint32(limit)
		case "wait":
			var wait time.Duration
			wait, err = duration(value)
			in.Wait = durationpb.New(wait)
		default:
			err = errors.New("unknown key; expected after, limit and wait")
		}
		return err
	}); err != nil {
		return err
	}
	page, err := h.jobs.ListJobs(r.Context(), in)
	out := struct {
		Jobs []pipeline.JobDocument `json:"jobs"`
		Next uint64                 `json:"next,omitempty"`
	}{make([]pipeline.JobDocument, len(page.GetJobs())), page.GetNext()}
	for i, job := range page.GetJobs() {
		out.Jobs[i] = pipeline.JobDocumentOf(job)
	}
	return answerJSON(w, out, err)
}

func (h *jobsHandler) get(w http.ResponseWriter, r *http.Request) error {
	out, err := h.jobs.GetJob(r.Context(), &inferencev1.GetJobRequest{Id: r.PathValue("name")})
	return answerJSON(w, pipeline.JobDocumentOf(out.GetJob()), err)
}

func (h *jobsHandler) cancelJob(w http.ResponseWriter, r *http.Request) error {
	out, err := h.jobs.CancelJob(r.Context(), &inferencev1.CancelJobRequest{Id: r.PathValue("name")})
	return answerJSON(w, pipeline.JobDocumentOf(out.GetJob()), err)
}

func (h *jobsHandler) explain(w http.ResponseWriter, r *http.Request) error {
	out, err := h.jobs.ExplainJob(r.Context(), &inferencev1.ExplainJobRequest{Id: r.PathValue("name")})
	return answerJSON(w, pipeline.JobPlaceDocumentOf(out), err)
}

func answerJSON(w http.ResponseWriter, value any, err error) error {
	if err == nil {
		transport.WriteJSON(w, http.StatusOK, value)
	}
	return err
}

// jobResult answers as inference would have, or with the job while it has not ended.
func (h *jobsHandler) jobResult(w http.ResponseWriter, r *http.Request) error {
	wait, err := waitOf(r.URL.RawQuery)
	if err != nil {
		return err
	}
	out, err := h.jobs.GetJob(r.Context(), &inferencev1.GetJobRequest{Id: r.PathValue("name"), Wait: durationpb.New(wait)})
	if err != nil {
		return err
	}
	return writeResult(w, out, formatOf(r.Header))
}

// writeResult answers with the result of a job, or with the job while it has not ended.
func writeResult(w http.ResponseWriter, out *inferencev1.GetJobResponse, f format) error {
	job := out.GetJob()
	w.Header().Set(headerJobState, pipeline.JobStateName(job.GetState()))
	switch {
	case job.GetEndedAt() == nil:
		transport.WriteJSON(w, http.StatusAccepted, pipeline.JobDocumentOf(job))
	case out.GetHttp() != nil:
		answer := &response{contentType: out.GetHttp().GetContentType(), body: out.GetHttp().GetBody(), blob: true}
		answer.writeStatus(w, int(out.GetHttp().GetStatus()))
	case out.GetInfer() != nil:
		result, err := request.ResponseFromProto(job.GetPipeline(), out.GetInfer())
		if err != nil {
			return err
		}
		encoded, err := f.encode(result)
		if err != nil {
			return err
		}
		encoded.write(w)
	default:
		return fault.New(fault.Reason(job.GetReason()), job.GetMessage())
	}
	return nil
}

// jobEvents answers with the events of a job until its end. There are none after the last one:
// 204, so that readers do not ask again.
func (h *jobsHandler) jobEvents(w http.ResponseWriter, r *http.Request) error {
	if transport.IsHead(r.Context()) {
		_, err := h.jobs.GetJob(r.Context(), &inferencev1.GetJobRequest{Id: r.PathValue("name")})
		if err == nil {
			w.Header().Set("Content-Type", transport.EventStreamType)
		}
		return err
	}
	out, after := transport.NewEventStream(w, h.settings.PingInterval), strings.TrimSpace(r.Header.Get(lastEventID))
	err := out.Run(r.Context(), func(ctx context.Context) error {
		return h.jobs.WatchJob(ctx, r.PathValue("name"), after, func(e *inferencev1.WatchJobResponse) error {
			event, err := jobEvent(e)
			switch {
			case err != nil:
				return err
			case event.Name == "":
				return out.Ping()
			}
			return out.Send(event)
		})
	})
	switch {
	case !out.Begun() && err == nil:
		w.WriteHeader(http.StatusNoContent)
	case !out.Begun():
		return err
	case err != nil:
		_ = out.Send(transport.Event{Name: "error", Data: transport.FaultJSON(err)}) // a failed send is not an error: the caller has disconnected
	}
	return nil
}

func jobEvent(e *inferencev1.WatchJobResponse) (transport.Event, error) {
	out := transport.Event{ID: e.GetEventId()}
	switch event := e.GetEvent().(type) {
	case *inferencev1.WatchJobResponse_State:
		out.Name, out.Data = "state", appendValue(nil, pipeline.JobDocumentOf(event.State))
	case *inferencev1.WatchJobResponse_Chunk:
		outputs, err := payload.FromProto("outputs", event.Chunk.GetOutputs())
		if err != nil {
			return out, err
		}
		out.Name = "chunk"
		out.Data, err = chunkDocument(request.Chunk{RequestID: event.Chunk.GetRequestId(), Seq: event.Chunk.GetSeq(), Outputs: outputs})
		return out, err
	case *inferencev1.WatchJobResponse_Restart:
		out.Name, out.Data = "restart", fmt.Appendf(nil, `{"attempt":%d}`, event.Restart.GetAttempt())
	case *inferencev1.WatchJobResponse_Gap:
		out.Name, out.Data = "gap", fmt.Appendf(nil, `{"attempt":%d,"first":%d,"last":%d}`, event.Gap.GetAttempt(), event.Gap.GetFirst(), event.Gap.GetLast())
	}
	return out, nil
}

// inferAsync runs a request as a job, and waits for its end.
func (h *handler) inferAsync(w http.ResponseWriter, r *http.Request, name string, wait time.Duration) error {
	memory := budget.Of(r.Context(), h.settings.MaxPayload)
	defer memory.Close()
	request, f, err := h.readRequest(w, r, name, PipelinesPrefix+"{pipeline}:infer", memory)
	if err != nil {
		return err
	}
	request.WaitForCapacity = nil // a job waits in its queue
	in := &inferencev1.SubmitJobRequest{Queue: string(h.jobs.QueueOf(r.Context(), name))}
	if err := setRequest(in, request, ""); err != nil {
		return err
	}
	submitted, err := h.jobs.SubmitJob(r.Context(), in)
	if err != nil {
		return err
	}
	job := submitted.GetJob()
	out, applied := &inferencev1.GetJobResponse{Job: job}, "respond-async"
	if wait > 0 {
		applied += fmt.Sprintf(", wait=%d", wait/time.Second)
		if ended, err := h.jobs.GetJob(r.Context(), &inferencev1.GetJobRequest{Id: job.GetId(), Wait: durationpb.New(wait)}); err == nil {
			out = ended
		} // else the job is there all the same
	}
	w.Header().Set("Preference-Applied", applied)
	w.Header().Set("Location", JobsPrefix+job.GetId())
	return writeResult(w, out, f)
}

// maxPreferredWait is far above what GetJob waits, in seconds.
const maxPreferredWait = 1 << 20

// asyncPreference reports whether a request prefers to be answered later, by RFC 7240, and how
// long it waits before. What cannot be read is as if it were not there.
func asyncPreference(h http.Header) (wait time.Duration, async bool) {
	hasWait := false
	for preference := range strings.SplitSeq(strings.Join(h.Values("Prefer"), ","), ",") {
		preference, _, _ = strings.Cut(preference, ";")
		name, value, _ := strings.Cut(preference, "=")
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "respond-async":
			async = true
		case "wait":
			seconds, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 32)
			if err == nil && !hasWait {
				wait = time.Duration(min(seconds, maxPreferredWait)) * time.Second
			}
			hasWait = true
		}
	}
	return wait, async
}

const headerJobState = "Stagemesh-Job-State"
