package port

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const (
	requiredHeader = "mm-required"
	binarySuffix   = "-bin"

	// Bounds of a call for several models.
	maxModels    = 100
	modelsAtOnce = 4
)

// passOn passes a call on to the servers of the models that it names: by headers, or else within
// the message. The answers of several are concatenated in their order, which for protobuf is to
// merge them; the headers and trailers come from the first.
func (s PublicSettings) passOn(ctx context.Context, c *transport.Call, header transport.GRPCHeader, receive func() ([]byte, error)) ([]byte, error) {
	field, ok := s.Passthrough[c.Origin.Method]
	if !ok {
		return nil, transport.ErrNoMethod
	}
	targets, err := targetsOf(header)
	if err != nil {
		return nil, err
	}
	message, err := receive()
	if err != nil {
		return nil, err
	}
	if len(targets) == 0 && field != "" {
		path, _ := passthrough.ParsePath(field) // the settings are valid
		id, err := path.Get(message)
		if err != nil {
			return nil, fault.Newf(fault.InvalidRequest, "the message has no model in field %s: %w", field, err)
		}
		if targets, err = pipelinesOf(request.ModelPrefix, []string{id}); err != nil {
			return nil, err
		}
	}
	if len(targets) == 0 {
		return nil, fault.Newf(fault.InvalidRequest, "no model is named; give %s or %s", passthrough.ModelHeader, passthrough.AliasHeader)
	}
	timeout, err := transport.EarlierTimeout(ctx, 0)
	if err != nil {
		return nil, err
	}
	part := payload.OfBlob("request", "application/grpc+proto", message)
	part.Parameters = payload.Parameters{
		passthrough.Method: payload.String(c.Origin.Method), passthrough.IDPath: payload.String(field),
		passthrough.Headers: payload.String(passthrough.EncodeHeaders(header)),
	}
	r := request.Request{Inputs: []payload.Part{part}, Timeout: timeout, Trace: c.Trace, Origin: c.Origin, Passthrough: true}
	answers, err := s.askAll(ctx, r, targets, slices.Contains(header[requiredHeader], "all"))
	if err != nil {
		return nil, err
	}
	return answer(c, answers)
}

// askAll sends the request to all targets, and returns their answers in order. Models that are not
// known have none, unless all are required, or none is known.
func (s PublicSettings) askAll(ctx context.Context, r request.Request, targets []string, areRequired bool) ([]*request.Response, error) {
	answers, unknown := make([]*request.Response, len(targets)), make([]error, len(targets))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(modelsAtOnce)
	for i, target := range targets {
		group.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			own := r
			own.Pipeline = target
			var err error
			answers[i], err = s.Caller.Infer(ctx, &own)
			if err != nil && !areRequired && fault.From(err).Reason == fault.UnknownModel {
				unknown[i], err = err, nil
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	if answers = slices.DeleteFunc(answers, func(a *request.Response) bool { return a == nil }); len(answers) == 0 {
		return nil, unknown[0]
	}
	return answers, nil
}

// answer returns the message of an answer, and sets its headers.
func answer(c *transport.Call, answers []*request.Response) (out []byte, err error) {
	for i, a := range answers {
		if len(a.Outputs) != 1 || a.Outputs[0].Tensor != nil {
			return nil, fault.New(fault.NotSupported, "the stage of the model passes no calls on")
		}
		part := a.Outputs[0]
		out = append(out, part.Blob.Data...)
		if i > 0 {
			continue
		}
		c.SetHeader(transport.HeaderRequestID, a.RequestID)
		for parameter, set := range map[string]func(name, value string){passthrough.Headers: c.SetHeader, passthrough.Trailers: c.SetTrailer} {
			for name, values := range passthrough.DecodeHeaders(part.Parameters[parameter].String()) {
				for _, value := range values {
					set(name, value)
				}
			}
		}
	}
	return out, nil
}

// targetsOf returns the implicit pipelines of the models or aliases in the headers.
func targetsOf(header transport.GRPCHeader) ([]string, error) {
	models, aliases := slices.Concat(header[passthrough.ModelHeader], header[passthrough.ModelHeader+binarySuffix]), slices.Concat(header[passthrough.AliasHeader], header[passthrough.AliasHeader+binarySuffix])
	switch n := len(models) + len(aliases); {
	case len(models) > 0 && len(aliases) > 0:
		return nil, fault.Newf(fault.InvalidRequest, "give %s or %s, and not both", passthrough.ModelHeader, passthrough.AliasHeader)
	case n > maxModels:
		return nil, fault.Newf(fault.InvalidRequest, "%d models are named, at most %d are allowed", n, maxModels)
	case len(aliases) > 0:
		return pipelinesOf(request.AliasPrefix, aliases)
	}
	return pipelinesOf(request.ModelPrefix, models)
}

func pipelinesOf(prefix string, names []string) (out []string, err error) {
	for _, name := range names {
		if err := model.ID(name).Validate(); err != nil {
			return nil, fault.Newf(fault.InvalidRequest, "%w", err)
		}
		out = append(out, prefix+name)
	}
	return out, nil
}
