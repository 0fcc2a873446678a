// Package openai serves files and batches in the form of the OpenAI API, to its unchanged clients:
//
//	POST   /v1/files                       a form with file, purpose=batch and expires_after
//	GET    /v1/files?purpose=&limit=&after=&order=
//	GET    /v1/files/{id}
//	GET    /v1/files/{id}/content
//	DELETE /v1/files/{id}
//	POST   /v1/batches                     input_file_id, endpoint, completion_window
//	GET    /v1/batches?limit=20&after=
//	GET    /v1/batches/{id}
//	POST   /v1/batches/{id}/cancel
//
// Errors are {"error": {"message", "type", "param", "code"}} with the code of a fault in lower
// case. An upload is stored as it arrives. The handler is safe for concurrent use.
package openai

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Batches keeps files and batches: gateway/call's service.
type Batches interface {
	// AdmitBatchCall admits a call of one of the others. The caller calls release after it.
	AdmitBatchCall(ctx context.Context) (release func(), err error)
	CreateFile(ctx context.Context, from io.Reader, describe func() (call.FileOptions, error)) (*call.File, error)
	GetFile(ctx context.Context, id string) (*call.File, error)
	OpenFile(ctx context.Context, id string) (*call.File, io.Reader, error)
	DeleteFile(ctx context.Context, id string) error
	ListFiles(ctx context.Context, o call.ListOptions) ([]call.File, bool, error)
	CreateBatch(ctx context.Context, in call.NewBatch) (*call.Batch, error)
	GetBatch(ctx context.Context, id string) (*call.Batch, error)
	CancelBatch(ctx context.Context, id string) (*call.Batch, error)
	ListBatches(ctx context.Context, o call.ListOptions) ([]call.Batch, bool, error)
}

// Paths of the API; all below them is the handler's too.
const (
	FilesPath   = "/v1/files"
	BatchesPath = "/v1/batches"
)

type handler struct {
	batches  Batches
	settings transport.Settings
}

// New returns the handler of FilesPath and BatchesPath.
func New(batches Batches, s transport.Settings) http.Handler {
	s = s.WithDefaults()
	h, mux := &handler{batches, s}, http.NewServeMux()
	for pattern, serve := range map[string]func(http.ResponseWriter, *http.Request) (any, error){
		"POST " + FilesPath:                    h.createFile,
		"GET " + FilesPath:                     h.listFiles,
		"GET " + FilesPath + "/{id}":           h.getFile,
		"DELETE " + FilesPath + "/{id}":        h.deleteFile,
		"POST " + BatchesPath:                  h.createBatch,
		"GET " + BatchesPath:                   h.listBatches,
		"GET " + BatchesPath + "/{id}":         h.getBatch,
		"POST " + BatchesPath + "/{id}/cancel": h.cancelBatch,
		"GET " + FilesPath + "/{id}/content":   h.getContent,
	} {
		mux.HandleFunc(pattern, h.handle(serve))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		WriteError(w, fault.Newf(fault.NotFound, "there is no %.*s %.*q", maxQuoted, r.Method, maxQuoted, r.URL.Path))
	})
	return transport.WithStallTimeout(mux, s.StallTimeout)
}

// maxQuoted bounds how much of a caller's own text messages repeat, in runes.
const maxQuoted = 80

// handle answers with what serve returns as JSON, nil if it has answered itself.
func (h *handler) handle(serve func(http.ResponseWriter, *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		release, err := h.batches.AdmitBatchCall(r.Context())
		if err != nil {
			WriteError(w, err)
			return
		}
		defer release()
		switch out, err := serve(w, r); {
		case err != nil:
			WriteError(w, err)
		case out != nil:
			writeJSON(w, http.StatusOK, out)
		}
	}
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // a failed write is no error: the caller has disconnected
}

// apiError is the error of an answer.
type apiError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code"`
}

// WriteError answers with the fault in err's chain.
func WriteError(w http.ResponseWriter, err error) {
	f := fault.From(err)
	status := f.HTTPStatus()
	out := apiError{Message: f.Message, Type: "invalid_request_error", Code: strings.ToLower(string(f.Reason))}
	switch {
	case status == http.StatusTooManyRequests:
		out.Type = "rate_limit_error"
	case status >= http.StatusInternalServerError:
		out.Type = "server_error"
	}
	if len(f.Violations) > 0 {
		out.Param = &f.Violations[0].Field
	}
	transport.SetFaultHeaders(w.Header(), f)
	writeJSON(w, status, map[string]apiError{"error": out})
}

// Bounds of the fields of a form beside the file.
const (
	maxFields     = 16
	maxFieldBytes = 1 << 10
	maxFilename   = 256
	// uploadBytes is what an upload holds in memory.
	uploadBytes = 2 << 20
)

// createFile stores the file of a form. Fields may come before and after it.
func (h *handler) createFile(w http.ResponseWriter, r *http.Request) (any, error) {
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return nil, fault.New(fault.UnsupportedMedia, "a file is sent as multipart/form-data")
	}
	memory := transport.NewReservation(r.Context(), 0)
	defer memory.Release()
	if err := memory.ReserveTemporary(uploadBytes); err != nil {
		return nil, err
	}
	form := &form{Reader: multipart.NewReader(&releasingReader{transport.StallReader(w, r, h.settings), r}, params["boundary"]), fields: map[string]string{}}
	part, err := form.next()
	if err != nil {
		return nil, err
	}
	if part == nil {
		return nil, fault.InField(fault.InvalidRequest, "file", "is missing")
	}
	file, err := h.batches.CreateFile(r.Context(), bodyReader{part}, func() (call.FileOptions, error) {
		if more, err := form.next(); err != nil || more != nil {
			return call.FileOptions{}, cmp.Or(err, error(fault.InField(fault.InvalidRequest, "file", "there are several")))
		}
		return form.options(part.FileName())
	})
	if err != nil {
		return nil, err
	}
	return file.Public(), nil
}

// releasingReader is a body that is stored as it is read.
type releasingReader struct {
	io.Reader

	request *http.Request
}

// Read implements io.Reader.
func (r *releasingReader) Read(buf []byte) (int, error) {
	n, err := r.Reader.Read(buf)
	transport.ReleaseBody(r.request)
	return n, err
}

// bodyReader makes errors of the form, or of its body, faults.
type bodyReader struct{ io.Reader }

// Read implements io.Reader.
func (r bodyReader) Read(buf []byte) (int, error) {
	n, err := r.Reader.Read(buf)
	if err != nil && !errors.Is(err, io.EOF) {
		err = transport.ReadFault(err)
	}
	return n, err
}

// form is a form with one file.
type form struct {
	*multipart.Reader

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
			return nil, formFault(err)
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

// formFault returns the fault of a form that cannot be read: the body's own, or else its syntax.
func formFault(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	return fault.Newf(fault.InvalidRequest, "the form cannot be read: %.*s", maxQuoted, err)
}

func (f *form) options(filename string) (call.FileOptions, error) {
	out := call.FileOptions{Name: strings.ToValidUTF8(filename[:min(maxFilename, len(filename))], ""), Purpose: f.fields["purpose"]}
	anchor, seconds := f.fields["expires_after[anchor]"], f.fields["expires_after[seconds]"]
	if anchor == "" && seconds == "" {
		return out, nil
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return out, fault.InField(fault.InvalidRequest, "expires_after.seconds", "%.*q is no whole number", maxQuoted, seconds)
	}
	out.ExpiresAfter = &call.ExpiresAfter{Anchor: anchor, Seconds: n}
	return out, nil
}

func (h *handler) getFile(_ http.ResponseWriter, r *http.Request) (any, error) {
	file, err := h.batches.GetFile(r.Context(), r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	return file.Public(), nil
}

func (h *handler) getContent(w http.ResponseWriter, r *http.Request) (any, error) {
	file, content, err := h.batches.OpenFile(r.Context(), r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	header := w.Header()
	header.Set("Content-Type", "application/octet-stream")
	header.Set("Content-Length", strconv.FormatInt(file.Bytes, 10))
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	_, _ = io.Copy(w, content) // the caller sees by the length that it is not all
	return nil, nil
}

func (h *handler) deleteFile(_ http.ResponseWriter, r *http.Request) (any, error) {
	id := r.PathValue("id")
	return map[string]any{"id": id, "object": "file", "deleted": true}, h.batches.DeleteFile(r.Context(), id)
}

// Bounds of a page.
const (
	defaultBatchPage = 20
	maxBatchPage     = 100
	maxFileLimit     = 10_000
	// maxFilePage is how many files a page has, whatever its limit.
	maxFilePage = 1000
)

func (h *handler) listFiles(_ http.ResponseWriter, r *http.Request) (any, error) {
	o, err := listOptions(r, maxFileLimit, maxFileLimit)
	if err != nil {
		return nil, err
	}
	o.Limit = min(o.Limit, maxFilePage)
	files, hasMore, err := h.batches.ListFiles(r.Context(), o)
	return pageOf(files, hasMore, func(f *call.File) (call.File, string) { return f.Public(), f.ID }), err
}

func (h *handler) listBatches(_ http.ResponseWriter, r *http.Request) (any, error) {
	o, err := listOptions(r, defaultBatchPage, maxBatchPage)
	if err != nil {
		return nil, err
	}
	batches, hasMore, err := h.batches.ListBatches(r.Context(), o)
	return pageOf(batches, hasMore, func(b *call.Batch) (call.Batch, string) { return b.Public(), b.ID }), err
}

func listOptions(r *http.Request, defaultLimit, maxLimit int) (call.ListOptions, error) {
	query := r.URL.Query()
	out := call.ListOptions{After: query.Get("after"), Purpose: query.Get("purpose"), Limit: defaultLimit, Ascending: query.Get("order") == "asc"}
	if order := query.Get("order"); order != "" && order != "asc" && order != "desc" {
		return out, fault.InField(fault.InvalidRequest, "order", "%.*q; use asc or desc", maxQuoted, order)
	}
	if text := query.Get("limit"); text != "" {
		var err error
		if out.Limit, err = strconv.Atoi(text); err != nil || out.Limit < 1 || out.Limit > maxLimit {
			return out, fault.InField(fault.InvalidRequest, "limit", "%.*q, from 1 to %d are possible", maxQuoted, text, maxLimit)
		}
	}
	return out, nil
}

// page is an answer to a list.
type page[T any] struct {
	Object  string `json:"object"`
	Data    []T    `json:"data"`
	FirstID string `json:"first_id,omitempty"`
	LastID  string `json:"last_id,omitempty"`
	HasMore bool   `json:"has_more"`
}

func pageOf[T any](all []T, hasMore bool, public func(*T) (T, string)) page[T] {
	out := page[T]{Object: "list", Data: []T{}, HasMore: hasMore}
	for i := range all {
		one, id := public(&all[i])
		out.Data, out.LastID, out.FirstID = append(out.Data, one), id, cmp.Or(out.FirstID, id)
	}
	return out
}

// maxBatchBody bounds the request of a batch, in bytes.
const maxBatchBody = 64 << 10

func (h *handler) createBatch(w http.ResponseWriter, r *http.Request) (any, error) {
	data, err := transport.ReadBody(transport.StallReader(w, r, h.settings), r.ContentLength, maxBatchBody)
	if err != nil {
		return nil, err
	}
	var in call.NewBatch
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "the body is no batch in JSON: %.*s", maxQuoted, err)
	}
	return publicBatch(h.batches.CreateBatch(r.Context(), in))
}

func (h *handler) getBatch(_ http.ResponseWriter, r *http.Request) (any, error) {
	return publicBatch(h.batches.GetBatch(r.Context(), r.PathValue("id")))
}

func (h *handler) cancelBatch(_ http.ResponseWriter, r *http.Request) (any, error) {
	return publicBatch(h.batches.CancelBatch(r.Context(), r.PathValue("id")))
}

func publicBatch(b *call.Batch, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return b.Public(), nil
}
