package store

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// KeptChunks are chunks of a job's answer that were kept together.
type KeptChunks struct {
	// Seq is their number; 0 where there are none.
	Seq    uint64
	Chunks []*inferencev1.JobChunk
}

// PutChunks keeps chunks of a job's answer, as long as ends and while there is space. After an
// error they may be kept.
func (s *Jobs) PutChunks(ctx context.Context, id pipeline.JobID, tenant string, chunks ...*inferencev1.JobChunk) error {
	m, err := s.bus.JobChunks(id, tenant, &meshv1.JobChunks{Chunks: chunks})
	if err == nil {
		_, err = s.bus.PublishAndWait(ctx, m)
	}
	if errors.Is(err, bus.ErrTooLarge) && len(chunks) > 1 {
		half := len(chunks) / 2
		return errors.Join(s.PutChunks(ctx, id, tenant, chunks[:half]...), s.PutChunks(ctx, id, tenant, chunks[half:]...))
	}
	return s.wrap(err)
}

// NextChunks returns the first chunks of a job from a number on.
func (s *Jobs) NextChunks(ctx context.Context, id pipeline.JobID, tenant string, from uint64) (KeptChunks, error) {
	return s.keptChunks(s.bus.Next(ctx, s.bus.JobChunkStream(), s.bus.Subjects.JobChunks(id, tenant), from))
}

// LastChunks returns the last chunks of a job.
func (s *Jobs) LastChunks(ctx context.Context, id pipeline.JobID, tenant string) (KeptChunks, error) {
	return s.keptChunks(s.bus.Last(ctx, s.bus.JobChunkStream(), s.bus.Subjects.JobChunks(id, tenant)))
}

func (s *Jobs) keptChunks(msg *bus.StoredMessage, err error) (KeptChunks, error) {
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return KeptChunks{}, nil
	case err != nil:
		return KeptChunks{}, s.wrap(err)
	}
	out := new(meshv1.JobChunks)
	if proto.Unmarshal(msg.Data, out) != nil {
		out.Chunks = nil // bytes of another program
	}
	return KeptChunks{Seq: msg.Seq, Chunks: out.GetChunks()}, nil
}

// AwaitChange returns once holds does, which it calls after each change of a job and after new
// chunks, or the context's error.
func (s *Jobs) AwaitChange(ctx context.Context, id pipeline.JobID, tenant string, holds func() bool) error {
	return s.wait(ctx, s.bus.JobChanges(id, tenant), minResultPause, maxResultPause, holds)
}
