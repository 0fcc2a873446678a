package openapi

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	_ "embed" // the files below
	"encoding/hex"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/transport"
)

const (
	// DocumentPath is the path of the document.
	DocumentPath = "/openapi.json"
	// PagePath is the path of the page; its files are below it.
	PagePath = "/docs"
)

// OpenPaths returns the paths that need no token. A path that ends in "/" is a prefix.
func OpenPaths() []string { return []string{PagePath, PagePath + "/"} }

// Source returns the current document. Its errors have a *fault.Fault in their chain.
type Source interface {
	Document(ctx context.Context) (*Document, error)
}

// Document is a document ready to be sent.
type Document struct{ file file }

// NewDocument returns a document with that JSON. The caller must not change the JSON.
func NewDocument(text []byte) *Document { return &Document{newFile("application/json", text)} }

// Mount serves the source's document and the page that shows it.
func Mount(mux *http.ServeMux, source Source) {
	mux.Handle(DocumentPath, readOnly(func(w http.ResponseWriter, r *http.Request) {
		document, err := source.Document(r.Context())
		if err != nil {
			transport.WriteFault(w, err)
			return
		}
		document.file.send(w, r)
	}))
	mux.Handle(PagePath+"/{$}", readOnly(http.RedirectHandler(PagePath, http.StatusPermanentRedirect).ServeHTTP))
	mux.Handle("/{$}", readOnly(http.RedirectHandler(PagePath, http.StatusFound).ServeHTTP))
	for path, f := range pageFiles() {
		mux.Handle(path, readOnly(func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("Content-Security-Policy", contentPolicy)
			h.Set("Referrer-Policy", "no-referrer")
			h.Set("Cross-Origin-Opener-Policy", "same-origin")
			h.Set("Cross-Origin-Resource-Policy", "same-origin")
			f.send(w, r)
		}))
	}
}

// contentPolicy allows the page nothing but this port. The viewer's pictures are in its style
// sheet, and those in a stage's response are blobs; its scripts set styles one by one, which
// is not an inline style.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// readOnly serves GET and HEAD, with a stall timeout.
func readOnly(serve http.HandlerFunc) http.Handler {
	return transport.WithStallTimeout(transport.ReadOnly(serve), transport.DefaultStallTimeout)
}

// The page's own files, and the viewer's as update.sh has packed them.
var (
	//go:embed page/docs.html
	pageHTML []byte
	//go:embed page/docs.css
	pageStyle []byte
	//go:embed page/docs.js
	pageScript []byte
	//go:embed page/predict.html
	predictHTML []byte
	//go:embed page/predict.css
	predictStyle []byte
	//go:embed page/predict.js
	predictScript []byte

	//go:embed viewer/swagger-ui.css.gz
	viewerStyle []byte
	//go:embed viewer/swagger-ui-bundle.js.gz
	viewerScript []byte
	//go:embed viewer/LICENSE
	viewerLicense []byte
	//go:embed viewer/NOTICE
	viewerNotice []byte
	//go:embed viewer/swagger-ui-bundle.js.LICENSE.txt
	viewerParts []byte
)

const (
	htmlType   = "text/html; charset=utf-8"
	styleType  = "text/css; charset=utf-8"
	scriptType = "text/javascript; charset=utf-8"
	plainType  = "text/plain; charset=utf-8"
)

// pageFiles returns the page and its files, with the viewer's licences, by path. It packs them
// once for all gateways of a process.
var pageFiles = sync.OnceValue(func() map[string]file {
	return map[string]file{
		PagePath:               newFile(htmlType, pageHTML),
		PagePath + "/docs.css": newFile(styleType, pageStyle),
		PagePath + "/docs.js":  newFile(scriptType, pageScript),

		PagePath + "/predict":     newFile(htmlType, predictHTML),
		PagePath + "/predict.css": newFile(styleType, predictStyle),
		PagePath + "/predict.js":  newFile(scriptType, predictScript),

		PagePath + "/LICENSE":                          newFile(plainType, viewerLicense),
		PagePath + "/NOTICE":                           newFile(plainType, viewerNotice),
		PagePath + "/swagger-ui-bundle.js.LICENSE.txt": newFile(plainType, viewerParts),

		PagePath + "/swagger-ui.css":       packedFile(styleType, viewerStyle),
		PagePath + "/swagger-ui-bundle.js": packedFile(scriptType, viewerScript),
	}
})

// file is a file to be sent, as it is and in gzip.
type file struct {
	contentType, tag string
	packed           []byte
	text             func() []byte
}

// packedFile returns a file whose text is unpacked for the first caller that does not accept
// gzip.
func packedFile(contentType string, packed []byte) file {
	return file{contentType: contentType, tag: tagOf(packed), packed: packed, text: sync.OnceValue(func() []byte {
		unpacked, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			return nil // the embedded files are valid gzip
		}
		text, _ := io.ReadAll(unpacked)
		return text
	})}
}

func newFile(contentType string, text []byte) file {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed) // a buffer accepts everything
	_, _ = w.Write(text)
	_ = w.Close()
	return file{contentType: contentType, tag: tagOf(text), text: func() []byte { return text }, packed: packed.Bytes()}
}

// tagOf returns the text of an entity tag.
func tagOf(text []byte) string {
	digest := sha256.Sum256(text)
	return hex.EncodeToString(digest[:16])
}

// send answers with the file, or 304 where the caller has it.
func (f file) send(w http.ResponseWriter, r *http.Request) {
	h, tag := w.Header(), f.tag
	var body []byte
	if acceptsGzip(r) {
		// Each encoding has a tag of its own.
		body, tag = f.packed, tag+"-gzip"
		h.Set("Content-Encoding", "gzip")
		h.Set("Content-Length", strconv.Itoa(len(body)))
	} else {
		body = f.text()
	}
	h.Set("Content-Type", f.contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("Vary", "Accept-Encoding")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("ETag", `"`+tag+`"`)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
}

// acceptsGzip reports whether the caller accepts gzip, by one of its names or else as any
// encoding.
func acceptsGzip(r *http.Request) bool {
	acceptsAny := false
	for name, q := range transport.AcceptedValues(r.Header.Values("Accept-Encoding")) {
		switch name {
		case "gzip", "x-gzip":
			return q > 0
		case "*":
			acceptsAny = q > 0
		}
	}
	return acceptsAny
}
