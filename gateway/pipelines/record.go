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

// folder is what the records are below, and epochKey where the epoch is: no pipeline
// has such a name.
const folder = "pipelines"

var epochKey = discovery.KeyOf(folder, "_epoch")

func keyOf(name pipeline.Name) discovery.Key { return discovery.KeyOf(folder, string(name)) }

func encode(m proto.Message) ([]byte, error) { return protojson.Marshal(m) }

// decode reads what a gateway has written. What a newer one says and this does not
// know it leaves out.
func decode(data []byte, into proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, into)
}

// Validate checks that a pipeline fits into the registry, also as one of a file.
func Validate(p pipeline.Pipeline) error {
	in := p.ToProto()
	value, err := encode(&meshv1.PipelineRecord{Pipeline: in, Seed: in, AppliedAt: timestamppb.Now()})
	if err == nil && len(value) > discovery.MaxValue {
		err = fmt.Errorf("takes %d bytes in the registry, at most %d are possible; give it fewer or shorter parameters", len(value), discovery.MaxValue)
	}
	return err
}

// entry is a record as the registry has it.
type entry struct {
	*meshv1.PipelineRecord
	revision discovery.Revision
	pipeline pipeline.Pipeline
}

// decodeEntry reads a record. With an error it returns what could be read.
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

// unreadable is a record that is there to be replaced: of what it says only the seed
// counts.
func unreadable(e *entry) *entry {
	return &entry{PipelineRecord: &meshv1.PipelineRecord{Seed: e.GetSeed()}, revision: e.revision}
}

// deleted reports whether there is no pipeline; nil is none either.
func (e *entry) deleted() bool { return e == nil || e.GetPipeline() == nil }

// due reports whether a seed has to be written over the entry, which may be nil: no
// file has said that yet.
func (e *entry) due(seed *meshv1.Pipeline) bool {
	return e == nil || !proto.Equal(e.GetSeed(), seed)
}

// exported is the entry for those who ask.
func (e *entry) exported() Entry {
	return Entry{
		Pipeline: e.pipeline, Revision: uint64(e.revision), AppliedAt: e.GetAppliedAt().AsTime(),
		InFile: e.GetSeed() != nil, FromFile: e.GetSeed() != nil && proto.Equal(e.GetSeed(), e.GetPipeline()),
	}
}
