package rest

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// requestOf returns the request that a path names, and whether it asks for its
// result.
func requestOf(path string) (id string, result, ok bool) {
	id, ok = strings.CutPrefix(path, Prefix+"requests/")
	id, result = strings.CutSuffix(id, "/result")
	return id, result, ok && id != "" && !strings.Contains(id, "/")
}

// result answers with what is stored of a request. What is there now says
// nothing of later, so nobody on the way may keep it.
func (h *handler) result(w http.ResponseWriter, r *http.Request, id string) {
	w.Header().Set("Cache-Control", "no-store")
	h.write(w, func() (*answer, error) {
		wait, err := waitOf(r.URL.RawQuery)
		if err != nil {
			return nil, err
		}
		response, err := h.caller.Result(r.Context(), id, wait)
		if err != nil {
			return nil, err
		}
		return wishOf(r.Header).answer(response)
	})
}

// waitOf reads the query of a result: how long to wait, and nothing else.
func waitOf(raw string) (time.Duration, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return 0, fault.Newf(fault.InvalidRequest, "the query cannot be read: %w", err)
	}
	for key := range values {
		if key != "wait" {
			return 0, invalid(key, errors.New("is no key; there is wait"))
		}
	}
	wait := values["wait"]
	switch {
	case len(wait) == 0:
		return 0, nil
	case len(wait) > 1:
		return 0, invalid("wait", fmt.Errorf("is there %d times", len(wait)))
	}
	d, err := duration(wait[0])
	if err != nil {
		return 0, invalid("wait", err)
	}
	return d, nil
}

// cancel calls a request off.
func (h *handler) cancel(w http.ResponseWriter, r *http.Request, id string) {
	if err := h.caller.Cancel(r.Context(), id); err != nil {
		transport.WriteFault(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
