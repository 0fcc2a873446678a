package docs

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
)

// DocumentPath is where the document is.
const DocumentPath = "/openapi.json"

// Document is one that can be sent.
type Document struct {
	text, packed []byte
	tag          string
}

// NewDocument returns a document that is sent as the JSON, which is not to be changed.
func NewDocument(text []byte) *Document {
	return &Document{text: text, packed: pack(text), tag: tagOf(text)}
}

// pack returns the text packed. A buffer refuses nothing.
func pack(text []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(text)
	_ = w.Close()
	return out.Bytes()
}

// tagOf is what an entity tag is made of.
func tagOf(text []byte) string {
	digest := sha256.Sum256(text)
	return hex.EncodeToString(digest[:16])
}

// Source has the document.
type Source interface {
	// Document returns the document as of now, for as long as the caller is there. Its
	// errors have a *fault.Fault in their chain.
	Document(ctx context.Context) (*Document, error)
}

// file is something to be sent, as it is and packed.
type file struct {
	contentType, tag string
	packed           []byte
	// text is nil where it is unpacked for those who ask.
	text []byte
}

func (d *Document) file() file {
	return file{contentType: "application/json", tag: d.tag, packed: d.packed, text: d.text}
}

// send answers with the file, or that the caller has it.
func (f file) send(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("Vary", "Accept-Encoding")
	h.Set("X-Content-Type-Options", "nosniff")
	packed := takesGzip(r)
	// Each form has a tag of its own.
	tag := `"` + f.tag + `"`
	if packed {
		tag = `"` + f.tag + `-gzip"`
	}
	h.Set("ETag", tag)
	if has(r.Header.Values("If-None-Match"), tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	f.write(w, r, packed)
}
