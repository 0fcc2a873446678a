package oip

import (
	"context"

	"connectrpc.com/connect"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	// onlyVersion is the version that every model has.
	onlyVersion = "1"
	serverName  = "stagemesh"
	platform    = "stagemesh_pipeline"
	// shown is how much of a name that a caller made up is repeated to it, in runes.
	shown = 80
)

// known returns nil where a model may be of that version.
func known(name, version string) error {
	if version == "" || version == onlyVersion {
		return nil
	}
	return fault.Newf(fault.NotFound, "model %.*q has no version %.*q; its only one is %s", shown, name, shown, version, onlyVersion)
}

func (s *service) serverMetadata(context.Context, procedure.Request[*oipv2.ServerMetadataRequest]) (*connect.Response[oipv2.ServerMetadataResponse], error) {
	return connect.NewResponse(&oipv2.ServerMetadataResponse{Name: serverName, Version: s.models.Version(), Extensions: extensions()}), nil
}

func (s *service) modelMetadata(_ context.Context, in procedure.Request[*oipv2.ModelMetadataRequest]) (*connect.Response[oipv2.ModelMetadataResponse], error) {
	if err := known(in.Message.GetName(), in.Message.GetVersion()); err != nil {
		return nil, err
	}
	model, err := s.models.Model(in.Message.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&oipv2.ModelMetadataResponse{
		Name: in.Message.GetName(), Versions: []string{onlyVersion}, Platform: platform,
		Inputs: described(model.Inputs), Outputs: described(model.Outputs),
	}), nil
}

type metadata = oipv2.ModelMetadataResponse_TensorMetadata

func described(parts []*stagev1.PartSpec) []*metadata {
	out := make([]*metadata, len(parts))
	for i, part := range parts {
		// A blob is one element of bytes.
		out[i] = &metadata{Name: part.GetName(), Datatype: string(tensor.Bytes), Shape: []int64{1}}
		if t := part.GetTensor(); t != nil {
			out[i].Datatype, out[i].Shape = t.GetDatatype(), t.GetShape()
		}
	}
	return out
}
