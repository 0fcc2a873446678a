package oip

import (
	"context"
	"encoding/json"
	"net/http"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const (
	// entryBytes is the memory of an entry of the index, as a message and encoded, besides its
	// texts.
	entryBytes = 256
	// indexChunk is how much of the index in JSON is in memory.
	indexChunk = 64 << 10
	// maxRepositoryBody bounds a body, whose members take many times its bytes when decoded.
	maxRepositoryBody = 64 << 10
)

// repositoryIndex lists the models in one message, which counts against the budget of the
// request until it is written.
func (s *service) repositoryIndex(ctx context.Context, _ *transport.Call, in *oipv2.RepositoryIndexRequest) (*oipv2.RepositoryIndexResponse, error) {
	index, err := s.models.Index(in.GetReady())
	if err != nil {
		return nil, err
	}
	memory, out := budget.FromContext(ctx), &oipv2.RepositoryIndexResponse{}
	for one := range index {
		if err := memory.ReserveOutput(int64(entryBytes + len(one.Name) + len(one.Reason))); err != nil {
			return nil, err
		}
		out.Models = append(out.Models, &oipv2.RepositoryIndexResponse_ModelIndex{Name: one.Name, Version: onlyVersion, State: one.State, Reason: one.Reason})
	}
	return out, nil
}

func (s *service) repositoryModelLoad(ctx context.Context, _ *transport.Call, in *oipv2.RepositoryModelLoadRequest) (*oipv2.RepositoryModelLoadResponse, error) {
	err := checkLoad(len(in.GetParameters()))
	if err == nil {
		err = s.models.Load(ctx, in.GetModelName())
	}
	return &oipv2.RepositoryModelLoadResponse{}, err
}

// checkLoad rejects the parameters of a load, which replace a model's configuration or files.
func checkLoad(parameters int) error {
	if parameters > 0 {
		return fault.InField(fault.NotSupported, parametersKey, "a registered model never changes; register another one")
	}
	return nil
}

// repositoryModelUnload ignores parameters: no model has dependents.
func (s *service) repositoryModelUnload(ctx context.Context, _ *transport.Call, in *oipv2.RepositoryModelUnloadRequest) (*oipv2.RepositoryModelUnloadResponse, error) {
	return &oipv2.RepositoryModelUnloadResponse{}, s.models.Unload(ctx, in.GetModelName())
}

// findRepository returns the endpoint of a model in the repository.
func (h *rest) findRepository(name, verb string) (endpoint, bool) {
	change := map[string]func(context.Context, string) error{"load": h.models.Load, "unload": h.models.Unload}[verb]
	return endpoint{http.MethodPost, func(w http.ResponseWriter, r *http.Request) error {
		var in struct{ Parameters map[string]json.RawMessage }
		err := h.readOptional(w, r, &in)
		if err == nil && verb == "load" {
			err = checkLoad(len(in.Parameters))
		}
		if err == nil {
			err = change(r.Context(), name)
		}
		return err
	}}, change != nil
}

// repositoryIndex is the service's index, written as it is read.
func (h *rest) repositoryIndex(w http.ResponseWriter, r *http.Request) error {
	var in struct{ Ready bool }
	if err := h.readOptional(w, r, &in); err != nil {
		return err
	}
	index, err := h.models.Index(in.Ready)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", payload.JSONType)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	text, separator := []byte{'['}, ""
	for one := range index {
		text = append(text, separator...)
		separator = ","
		text = oipjson.AppendString(append(text, `{"name":`...), one.Name)
		text = oipjson.AppendString(append(text, `,"version":`...), onlyVersion)
		text = oipjson.AppendString(append(text, `,"state":`...), one.State)
		text = append(oipjson.AppendString(append(text, `,"reason":`...), one.Reason), '}')
		if len(text) >= indexChunk {
			if _, err := w.Write(text); err != nil {
				return nil // the caller has disconnected
			}
			text = text[:0]
		}
	}
	_, _ = w.Write(append(text, "]\n"...))
	return nil
}

// readOptional reads a body in JSON, if there is one.
func (h *rest) readOptional(w http.ResponseWriter, r *http.Request, into any) error {
	small := *h
	small.settings.MaxMessageBytes = min(maxRepositoryBody, h.settings.MaxMessageBytes)
	data, err := small.readBody(w, r)
	if err != nil || len(data) == 0 {
		return err
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(data, &members); err == nil && members == nil {
		return invalid("body", "is null; send an object, or no body")
	}
	for name, value := range members {
		if string(value) == "null" {
			return invalid("body", "%.*q is null; leave it out", fault.MaxQuoted, name)
		}
	}
	if err := json.Unmarshal(data, into); err != nil {
		return invalid("body", "%s", err)
	}
	return nil
}
