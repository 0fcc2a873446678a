package pipelines

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// folder is above all records. No pipeline can have the name in epochKey.
const folder = "pipelines"

var epochKey = discovery.KeyOf(folder, "_epoch")

func keyOf(name pipeline.Name) discovery.Key { return discovery.KeyOf(folder, string(name)) }

func encode(m proto.Message) ([]byte, error) { return protojson.Marshal(m) }

// decode reads a message that a gateway has written. It ignores fields that a newer
// gateway may have added.
func decode(data []byte, into proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, into)
}

// Validate checks that the record of a pipeline fits into the registry.
func Validate(p pipeline.Pipeline) error {
	in := p.ToProto()
	value, err := encode(&meshv1.PipelineRecord{Pipeline: in, Seed: in, AppliedAt: timestamppb.Now()})
	if err == nil && len(value) > discovery.MaxValue {
		err = fmt.Errorf("takes %d bytes in the registry, at most %d are possible; give it fewer or shorter parameters", len(value), discovery.MaxValue)
	}
	return err
}

// entry is a record with its revision.
type entry struct {
	*meshv1.PipelineRecord
	revision discovery.Revision
	pipeline pipeline.Pipeline
}

// decodeEntry reads a record. With an error it returns the readable part.
func decodeEntry(e discovery.Entry) (*entry, error) {
	out := &entry{PipelineRecord: &meshv1.PipelineRecord{}, revision: e.Revision}
	if err := decode(e.Value, out.PipelineRecord); err != nil {
		return out, fmt.Errorf("record %s: %w", e.Key, err)
	}
	if out.deleted() {
		return out, nil
	}
	var err error
	if out.pipeline, err = pipeline.FromProto(out.GetPipeline()); err != nil {
		return out, fmt.Errorf("record %s: %w", e.Key, err)
	}
	if keyOf(out.pipeline.Name) != e.Key {
		return out, fmt.Errorf("record %s is of pipeline %s", e.Key, out.pipeline.Name)
	}
	return out, nil
}

// unreadable returns a record without a pipeline, which may be replaced. It keeps the
// seed.
func unreadable(e *entry) *entry {
	return &entry{PipelineRecord: &meshv1.PipelineRecord{Seed: e.GetSeed()}, revision: e.revision}
}

// deleted reports whether there is no pipeline, which is also true of nil.
func (e *entry) deleted() bool { return e == nil || e.GetPipeline() == nil }

// isOutdated reports whether a seed has to replace the entry, which may be nil: its file
// has changed.
func (e *entry) isOutdated(seed *meshv1.Pipeline) bool {
	return e == nil || !proto.Equal(e.GetSeed(), seed)
}

// exported returns the entry for callers of the package.
func (e *entry) exported() Entry {
	return Entry{
		Pipeline: e.pipeline, Revision: uint64(e.revision), AppliedAt: e.GetAppliedAt().AsTime(),
		InFile: e.GetSeed() != nil, FromFile: e.GetSeed() != nil && proto.Equal(e.GetSeed(), e.GetPipeline()),
	}
}
