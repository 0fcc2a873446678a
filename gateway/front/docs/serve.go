package docs

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Settings are what Mount takes beside its Source.
type Settings struct {
	// Patience is how long a caller may take nothing of an answer; 0 is body.Patience.
	Patience time.Duration
}

// PagePath is where the page is; its files are below.
const PagePath = "/docs"

// Open are the paths that a guard lets everybody read, and what paths begin with that
// it does.
func Open() []string { return []string{PagePath, PagePath + "/"} }

// Mount serves the document of the source, and the page that shows it.
func Mount(mux *http.ServeMux, source Source, s Settings) {
	if s.Patience <= 0 {
		s.Patience = body.Patience
	}
	mux.Handle(DocumentPath, s.reading(func(w http.ResponseWriter, r *http.Request) {
		document, err := source.Document(r.Context())
		if err != nil {
			failure.Write(w, err)
			return
		}
		document.file().send(w, r)
	}))
	mux.Handle(PagePath+"/{$}", s.reading(http.RedirectHandler(PagePath, http.StatusPermanentRedirect).ServeHTTP))
	for path, f := range pageFiles() {
		mux.Handle(path, s.reading(func(w http.ResponseWriter, r *http.Request) {
			secure(w.Header())
			f.send(w, r)
		}))
	}
}

// reading has GET and HEAD alone served, with patience.
func (s Settings) reading(serve http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		patient := body.PatientWriter(w, s.Patience)
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			serve(patient, r)
		} else {
			const allowed = http.MethodGet + ", " + http.MethodHead
			w.Header().Set("Allow", allowed)
			failure.WriteStatus(patient, fault.Newf(fault.InvalidRequest, "reading is %s, not %.80s", allowed, r.Method), http.StatusMethodNotAllowed)
		}
		body.Finish(w, s.Patience)
	})
}

// policy keeps the page to itself. The viewer's pictures are in its style sheet, and
// those that a stage answers are blobs; its scripts set styles one by one, which is
// no inline style.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func secure(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// write sends the body. A caller that no longer listens is not told.
func (f file) write(w http.ResponseWriter, r *http.Request, packed bool) {
	switch {
	case packed:
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Length", strconv.Itoa(len(f.packed)))
	case f.text != nil:
		w.Header().Set("Content-Length", strconv.Itoa(len(f.text)))
	}
	if r.Method == http.MethodHead {
		return
	}
	switch {
	case packed:
		_, _ = w.Write(f.packed)
	case f.text != nil:
		_, _ = w.Write(f.text)
	default:
		// What is packed here is ours, so nothing is wrong with it.
		if unpacked, err := gzip.NewReader(bytes.NewReader(f.packed)); err == nil {
			_, _ = io.Copy(w, unpacked)
		}
	}
}

// takesGzip reports whether the caller takes gzip, by one of its names or else as any
// encoding.
func takesGzip(r *http.Request) bool {
	takesAny := false
	for name, q := range header.Accepted(r.Header.Values("Accept-Encoding")) {
		switch name {
		case "gzip", "x-gzip":
			return q > 0
		case "*":
			takesAny = q > 0
		}
	}
	return takesAny
}

// has reports whether the tag is one of those that a caller has. A proxy may have
// made it a weak one.
func has(values []string, tag string) bool {
	for entry := range strings.SplitSeq(strings.Join(values, ","), ",") {
		if entry = strings.TrimSpace(entry); entry == "*" || strings.TrimPrefix(entry, "W/") == tag {
			return true
		}
	}
	return false
}
