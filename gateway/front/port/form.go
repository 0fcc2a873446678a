package port

import (
	"net/http"
	"strings"

	"github.com/stagemesh/stagemesh/gateway/front/failure"
)

// Forms write refusals, each those to a path and to all below it. Other paths have
// failure.Write.
type Forms map[string]func(w http.ResponseWriter, err error)

func (f Forms) write(w http.ResponseWriter, r *http.Request, err error) {
	for root, write := range f {
		if r.URL.Path == root || strings.HasPrefix(r.URL.Path, root+"/") {
			write(w, err)
			return
		}
	}
	failure.Write(w, err)
}
