package envelope

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Cancel is the notice that nobody wants a request any more.
type Cancel struct {
	Mesh      pipeline.MeshName
	RequestID pipeline.RequestID
	// Deadline of the request: nothing of it is left after that.
	Deadline time.Time
}

// Encode returns the notice's bytes.
func (c *Cancel) Encode() ([]byte, error) {
	return proto.Marshal(&meshv1.Cancel{
		Mesh: string(c.Mesh), RequestId: string(c.RequestID), Deadline: timestamppb.New(c.Deadline),
	})
}

// DecodeCancel reads a notice from bytes that anybody may have sent.
func DecodeCancel(data []byte) (*Cancel, error) {
	var in meshv1.Cancel
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := checkID(in.GetRequestId()); err != nil {
		return nil, fmt.Errorf("%w: request id: %w", ErrMalformed, err)
	}
	if err := in.GetDeadline().CheckValid(); err != nil {
		return nil, fmt.Errorf("%w: deadline: %w", ErrMalformed, err)
	}
	return &Cancel{
		Mesh:      pipeline.MeshName(in.GetMesh()),
		RequestID: pipeline.RequestID(in.GetRequestId()),
		Deadline:  in.GetDeadline().AsTime(),
	}, nil
}
