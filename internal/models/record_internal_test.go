package models

import (
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/model"
)

// All models have been loaded once, and there is room for one in twenty.
func TestModelTakesAtMostOneKiB(t *testing.T) {
	const count, loads = 20_000, 20
	heap := func() uint64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before := heap()
	c := newContent(slog.New(slog.DiscardHandler))
	c.apply(discovery.Change{Reset: true})
	put := func(key discovery.Key, value []byte, err error, i int) {
		if err != nil {
			t.Fatal(err)
		}
		c.apply(discovery.Change{Entries: []discovery.Entry{{Key: key, Value: value, Revision: discovery.Revision(i + 1)}}})
	}
	now := time.Now()
	for i := range count {
		id := model.ID(fmt.Sprintf("digit-reader-%05d", (i*7919)%count))
		m := &Model{Model: model.Model{
			ID: id, Stage: "score", Type: "linear", Source: "models/" + string(id) + ".json", Options: model.NewOptions(map[string]string{"threads": "1"}), Size: model.Size{Host: 12 << 10},
		}, RegisteredAt: now, LastUse: now}
		value, err := encode(m.toProto())
		put(modelKey(id), value, err, i)
		replicas := noReplicas(m)
		if i%loads == 0 {
			setReplica(replicas, &meshv1.Replica{Host: "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000", State: loaded, Size: SizeToProto(m.Size)}, now)
		}
		value, err = encode(replicas)
		put(replicasKey(id), value, err, i)
	}
	each := (heap() - before) / count
	t.Logf("a model takes %d bytes", each)
	if each > 1<<10 {
		t.Errorf("a model takes %d bytes", each)
	}
	r := &Registry{served: c}
	r.mu.RLock() // a list does not wait for requests that read, nor they for its sort
	defer r.mu.RUnlock()
	if page, _, next := r.List("score", "digit-reader-00009", 2); len(page) != 2 || page[0].ID != "digit-reader-00010" || next != "digit-reader-00011" {
		t.Errorf("the page is %v, %s", page, next)
	}
	runtime.KeepAlive(c)
}

// Anybody on the broker can write a record.
func FuzzRecords(f *testing.F) {
	now := timestamppb.New(time.Unix(1, 0))
	for _, seed := range []struct {
		key    discovery.Key
		record proto.Message
	}{
		{modelKey("a"), &meshv1.ModelRecord{Model: &meshv1.Model{Id: "a", Stage: "s", Size: &meshv1.ModelSize{Host: 1 << 63}}, RegisteredAt: now}},
		{modelKey("a"), &meshv1.ModelRecord{Model: &meshv1.Model{Id: "a", Stage: "s", MinReplicas: 1 << 31}, RegisteredAt: now}},
		{replicasKey("a"), &meshv1.ReplicasRecord{RegisteredAt: now, Replicas: []*meshv1.Replica{{Host: "h", State: failed}}}},
		{aliasKey("a"), &meshv1.Alias{Name: "a", Active: &meshv1.AliasRoute{Model: "a", Weights: map[string]uint32{"a": 5}}, Target: &meshv1.AliasRoute{Shadow: &meshv1.AliasShadow{Model: "a"}}}},
		{settingsKey("s"), &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{"": {Required: []string{""}}}}},
		{epochKey, &meshv1.PipelineEpoch{Id: "e"}},
	} {
		value, err := protojson.Marshal(seed.record)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(seed.key), value)
	}
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		c := newContent(slog.New(slog.DiscardHandler))
		e := discovery.Entry{Key: discovery.Key(key), Value: value, Revision: 1}
		c.apply(discovery.Change{Reset: true, Entries: []discovery.Entry{e}})
		for _, m := range c.models.all {
			c.replicasOf(m)
			LiveReplicas(c.replicasOf(m), time.Now())
		}
		again := newContent(slog.New(slog.DiscardHandler))
		for key, record := range c.records() {
			value, err := protojson.Marshal(record())
			if err != nil {
				t.Fatal(err)
			}
			again.apply(discovery.Change{Entries: []discovery.Entry{{Key: key, Value: value}}})
			if !again.has(key) {
				t.Errorf("record %s is lost when it is written again: %s", key, value)
			}
		}
		c.apply(discovery.Change{Deleted: []discovery.Key{e.Key}})
		if len(c.models.all)+len(c.aliases.all)+len(c.pointing)+len(c.replicas)+len(c.settings) > 0 {
			t.Errorf("a deleted record has left %+v", c)
		}
	})
}
