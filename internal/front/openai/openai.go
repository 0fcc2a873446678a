// Package openai serves the OpenAI API to its unchanged clients. New serves files and batches:
//
//	POST   /v1/files                       a form with file, purpose=batch and expires_after
//	GET    /v1/files?purpose=&limit=&after=&order=
//	GET    /v1/files/{id}
//	GET    /v1/files/{id}/content
//	DELETE /v1/files/{id}
//	POST   /v1/batches                     input_file_id, endpoint, completion_window
//	GET    /v1/batches?limit=20&after=&order=
//	GET    /v1/batches/{id}
//	POST   /v1/batches/{id}/cancel
//
// NewCalls serves requests to the models of a Config, each of which is a pipeline; docs/openai.md is
// the manual of what stages get and give:
//
//	POST   /v1/chat/completions
//	POST   /v1/completions
//	POST   /v1/embeddings                  each text is a request of its own
//	GET    /v1/models
//	GET    /v1/models/{id}
//
// No member of a body is left out in silence: it is taken, becomes a parameter, or is refused by name.
//
// Errors are {"error": {"message", "type", "param", "code"}} with the reason of a fault in lower
// case as the code, and model_not_found for UNKNOWN_MODEL. An upload is stored as it arrives. The
// handlers are safe for concurrent use. Goroutines are started for streams and for lists of texts
// only, and end with their call.
package openai

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Paths of the API; all below them is the handler's too.
const (
	FilesPath   = "/v1/files"
	BatchesPath = "/v1/batches"
)

type handler struct {
	batches  *jobs.Service
	settings transport.Settings
}

// New returns the handler of FilesPath and BatchesPath.
func New(batches *jobs.Service, s transport.Settings) http.Handler {
	s = s.WithDefaults()
	h, mux := &handler{batches, s}, http.NewServeMux()
	for path, methods := range map[string]map[string]serveFunc{
		FilesPath:                    {http.MethodPost: h.createFile, http.MethodGet: listOf(batches.ListFiles, maxFileLimit, maxFileLimit)},
		FilesPath + "/{id}":          {http.MethodGet: byID(batches.GetFile), http.MethodDelete: h.deleteFile},
		FilesPath + "/{id}/content":  {http.MethodGet: h.getContent},
		BatchesPath:                  {http.MethodPost: h.createBatch, http.MethodGet: listOf(batches.ListBatches, defaultBatchPage, maxBatchPage)},
		BatchesPath + "/{id}":        {http.MethodGet: byID(batches.GetBatch)},
		BatchesPath + "/{id}/cancel": {http.MethodPost: byID(batches.CancelBatch)},
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if serve := methods[r.Method]; serve != nil {
				h.handle(serve)(w, r)
				return
			}
			writeError(w, transport.WrongMethod(w, r, slices.Collect(maps.Keys(methods))...), http.StatusMethodNotAllowed)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		WriteError(w, fault.Newf(fault.NotFound, "there is no %.*s %.*q", fault.MaxQuoted, r.Method, fault.MaxQuoted, r.URL.Path))
	})
	return transport.WithStallTimeout(mux, s.StallTimeout)
}

// serveFunc returns what is answered as JSON, nil if it has answered itself.
type serveFunc func(http.ResponseWriter, *http.Request) (any, error)

func (h *handler) handle(serve serveFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		var out any
		err := h.batches.CallBatches(r.Context(), func() (err error) {
			out, err = serve(w, r)
			return err
		})
		switch {
		case err != nil:
			WriteError(w, err)
		case out != nil:
			transport.WriteJSON(w, http.StatusOK, out)
		}
	}
}

// WriteError answers with the fault in err's chain.
func WriteError(w http.ResponseWriter, err error) {
	f := fault.From(err)
	writeError(w, f, f.HTTPStatus())
}

func writeError(w http.ResponseWriter, f *fault.Fault, status int) {
	transport.SetFaultHeaders(w.Header(), f)
	if id := f.Metadata[transport.RequestIDKey]; id != "" {
		w.Header().Set(headerRequestID, id)
	}
	transport.WriteJSON(w, status, errorBody(f, status))
}

// errorBody is the JSON of a failure.
func errorBody(f *fault.Fault, status int) map[string]any {
	kind, param, code := "invalid_request_error", any(nil), strings.ToLower(string(f.Reason))
	switch {
	case status == http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case status >= http.StatusInternalServerError:
		kind = "server_error"
	case f.Reason == fault.UnknownModel:
		code = "model_not_found"
	}
	if len(f.Violations) > 0 {
		param = f.Violations[0].Field
	}
	return map[string]any{"error": map[string]any{"message": f.Message, "type": kind, "param": param, "code": code}}
}

// Bounds of the fields of a form beside the file.
const (
	maxFields     = 16
	maxFieldBytes = 1 << 10
	maxFilename   = 256
	// uploadBytes is what an upload holds in memory before any of the file arrives.
	uploadBytes = 64 << 10
)

// createFile stores the file of a form. Fields may come before and after it.
func (h *handler) createFile(w http.ResponseWriter, r *http.Request) (any, error) {
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return nil, fault.New(fault.UnsupportedMedia, "a file is sent as multipart/form-data")
	}
	memory := budget.Of(r.Context(), 0)
	defer memory.Close()
	if err := memory.Reserve(uploadBytes); err != nil {
		return nil, err
	}
	form := &form{Form: transport.NewForm(transport.StallReader(w, r, h.settings), params["boundary"]), fields: map[string]string{}}
	part, err := form.next()
	if err != nil {
		return nil, err
	}
	if part == nil {
		return nil, fault.InField(fault.InvalidRequest, "file", "is missing")
	}
	return h.batches.CreateFile(r.Context(), uploadReader{transport.FormReader{Reader: part}, r}, func() (jobs.FileOptions, error) {
		if more, err := form.next(); err != nil || more != nil {
			return jobs.FileOptions{}, cmp.Or(err, error(fault.InField(fault.InvalidRequest, "file", "there are several")))
		}
		return form.options(part.FileName())
	})
}

// uploadReader is a file that is stored as it is read.
type uploadReader struct {
	transport.FormReader

	request *http.Request
}

// Read implements io.Reader.
func (r uploadReader) Read(buf []byte) (int, error) {
	n, err := r.FormReader.Read(buf)
	transport.ReleaseBody(r.request)
	return n, err
}

type form struct {
	*transport.Form

	fields map[string]string
}

// next reads fields until the next file, and returns its part; nil if there is none.
func (f *form) next() (*multipart.Part, error) {
	for {
		part, err := f.NextPart()
		switch {
		case errors.Is(err, io.EOF):
			return nil, nil
		case err != nil:
			return nil, err
		case part.FormName() == "file":
			return part, nil
		case len(f.fields) == maxFields:
			return nil, fault.Newf(fault.InvalidRequest, "the form has more than %d fields", maxFields)
		}
		value, err := transport.ReadBody(part, -1, maxFieldBytes)
		if err != nil {
			return nil, err
		}
		f.fields[part.FormName()] = string(value)
	}
}

func (f *form) options(filename string) (jobs.FileOptions, error) {
	out := jobs.FileOptions{Name: strings.ToValidUTF8(filename[:min(maxFilename, len(filename))], ""), Purpose: f.fields["purpose"]}
	anchor, seconds := f.fields["expires_after[anchor]"], f.fields["expires_after[seconds]"]
	if anchor == "" && seconds == "" {
		return out, nil
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return out, fault.InField(fault.InvalidRequest, "expires_after.seconds", "%.*q is not a whole number", fault.MaxQuoted, seconds)
	}
	out.ExpiresAfter = &jobs.ExpiresAfter{Anchor: anchor, Seconds: n}
	return out, nil
}

func byID[T any](do func(context.Context, string) (*T, error)) serveFunc {
	return func(_ http.ResponseWriter, r *http.Request) (any, error) { return do(r.Context(), r.PathValue("id")) }
}

func (h *handler) deleteFile(_ http.ResponseWriter, r *http.Request) (any, error) {
	id := r.PathValue("id")
	return map[string]any{"id": id, "object": "file", "deleted": true}, h.batches.DeleteFile(r.Context(), id)
}

// contentBuffer is how much of a file is written at a time.
const contentBuffer = 32 << 10

func (h *handler) getContent(w http.ResponseWriter, r *http.Request) (any, error) {
	file, content, err := h.batches.OpenFile(r.Context(), r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	from := bufio.NewReaderSize(content, contentBuffer)
	if _, err := from.Peek(1); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	header := w.Header()
	header.Set("Content-Type", "application/octet-stream")
	header.Set("Content-Length", strconv.FormatInt(file.Bytes, 10))
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	if transport.IsHead(r.Context()) {
		return nil, nil
	}
	_, _ = io.Copy(w, from) // the caller sees by the length that it is not all
	return nil, nil
}

// Bounds of a page.
const (
	defaultBatchPage = 20
	maxBatchPage     = 100
	maxFileLimit     = 10_000
)

func listOf[T any](list func(context.Context, jobs.ListOptions) (*jobs.Page[T], error), defaultLimit, maxLimit int) serveFunc {
	return func(_ http.ResponseWriter, r *http.Request) (any, error) {
		query := r.URL.Query()
		o := jobs.ListOptions{After: query.Get("after"), Purpose: query.Get("purpose"), Limit: defaultLimit}
		order := query.Get("order")
		if query.Has("order") && order != "asc" && order != "desc" {
			return nil, fault.InField(fault.InvalidRequest, "order", "%.*q; use asc or desc", fault.MaxQuoted, order)
		}
		o.Ascending = order == "asc"
		if text := query.Get("limit"); query.Has("limit") {
			var err error
			if o.Limit, err = strconv.Atoi(text); err != nil || o.Limit < 1 || o.Limit > maxLimit {
				return nil, fault.InField(fault.InvalidRequest, "limit", "%.*q, from 1 to %d are possible", fault.MaxQuoted, text, maxLimit)
			}
		}
		return list(r.Context(), o)
	}
}

// maxBatchBody bounds the request of a batch, in bytes.
const maxBatchBody = 64 << 10

func (h *handler) createBatch(w http.ResponseWriter, r *http.Request) (any, error) {
	if err := transport.CheckLength(r, maxBatchBody); err != nil {
		return nil, err
	}
	data, err := transport.ReadBody(transport.StallReader(w, r, h.settings), r.ContentLength, maxBatchBody)
	if err != nil {
		return nil, err
	}
	var in jobs.NewBatch
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "the body is not a batch in JSON: %.*s", fault.MaxQuoted, err)
	}
	return h.batches.CreateBatch(r.Context(), in)
}
