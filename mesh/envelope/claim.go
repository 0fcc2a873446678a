package envelope

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Claim says which request has an idempotency key, or had it.
type Claim struct {
	Mesh pipeline.MeshName
	// Tenant and Pipeline are whose key it is.
	Tenant   string
	Pipeline pipeline.Name
	// RequestID is the request that has the key, or had it last.
	RequestID pipeline.RequestID
	// Digest is of what decides the request's answer.
	Digest Digest
	// AdmittedAt and Deadline of the request are on its gateway's clock. A claim
	// that is released has none: so its record is smaller than it was, and finds
	// room where that was.
	AdmittedAt, Deadline time.Time
	// Durability says where the request waits between stages.
	Durability pipeline.Durability
	// Released says that the key is free again.
	Released bool
}

// Digest tells the payloads of requests from each other.
type Digest [sha256.Size]byte

// Encode returns the claim's bytes.
func (c *Claim) Encode() ([]byte, error) {
	out := &meshv1.IdempotencyRecord{
		Mesh:       string(c.Mesh),
		Tenant:     c.Tenant,
		Pipeline:   string(c.Pipeline),
		RequestId:  string(c.RequestID),
		Digest:     c.Digest[:],
		Durability: c.Durability.ToProto(),
		State:      meshv1.IdempotencyState_IDEMPOTENCY_STATE_RELEASED,
	}
	if !c.Released {
		out.State = meshv1.IdempotencyState_IDEMPOTENCY_STATE_HELD
		out.AdmittedAt, out.Deadline = timestamppb.New(c.AdmittedAt), timestamppb.New(c.Deadline)
	}
	return proto.Marshal(out)
}

// DecodeClaim reads a claim from bytes that anybody may have stored.
func DecodeClaim(data []byte) (*Claim, error) {
	var in meshv1.IdempotencyRecord
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	out, err := claimFromProto(&in)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return out, nil
}

func claimFromProto(in *meshv1.IdempotencyRecord) (*Claim, error) {
	durability, err := pipeline.DurabilityFromProto(in.GetDurability())
	if err != nil {
		return nil, err
	}
	if err := checkID(in.GetRequestId()); err != nil {
		return nil, fmt.Errorf("request id: %w", err)
	}
	if len(in.GetDigest()) != len(Digest{}) {
		return nil, fmt.Errorf("a digest of %d bytes", len(in.GetDigest()))
	}
	out := &Claim{
		Mesh:       pipeline.MeshName(in.GetMesh()),
		Tenant:     in.GetTenant(),
		Pipeline:   pipeline.Name(in.GetPipeline()),
		RequestID:  pipeline.RequestID(in.GetRequestId()),
		Digest:     Digest(in.GetDigest()),
		Durability: durability,
	}
	if err := out.stateFromProto(in); err != nil {
		return nil, err
	}
	return out, nil
}

func (c *Claim) stateFromProto(in *meshv1.IdempotencyRecord) error {
	switch in.GetState() {
	case meshv1.IdempotencyState_IDEMPOTENCY_STATE_RELEASED:
		c.Released = true
		return nil
	case meshv1.IdempotencyState_IDEMPOTENCY_STATE_HELD:
		return c.timesFromProto(in)
	}
	return errors.New("neither held nor released")
}

func (c *Claim) timesFromProto(in *meshv1.IdempotencyRecord) error {
	if err := in.GetAdmittedAt().CheckValid(); err != nil {
		return fmt.Errorf("admission: %w", err)
	}
	if err := in.GetDeadline().CheckValid(); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	c.AdmittedAt, c.Deadline = in.GetAdmittedAt().AsTime(), in.GetDeadline().AsTime()
	return nil
}
