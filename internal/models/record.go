package models

import (
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unique"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// MaxRecord is the longest record, in bytes.
const MaxRecord = 8 << 10

// The keys of the records.
const (
	folder     = "models"
	modelsIn   = "records"
	replicasIn = "replicas"
	aliasesIn  = "aliases"
	settingsIn = "settings" // set while the mesh runs
	seedsIn    = "seeds"    // settings of the mesh file
	depth      = 3
)

// maxReplicas bounds the replicas that a model asks for.
const maxReplicas = 1 << 16

var epochKey = discovery.KeyOf(folder, "epoch")

func modelKey(id model.ID) discovery.Key { return discovery.KeyOf(folder, modelsIn, string(id)) }

func replicasKey(id model.ID) discovery.Key { return discovery.KeyOf(folder, replicasIn, string(id)) }

func aliasKey(name model.ID) discovery.Key { return discovery.KeyOf(folder, aliasesIn, string(name)) }

func settingsKey(stage pipeline.StageName) discovery.Key {
	return discovery.KeyOf(folder, settingsIn, string(stage))
}

func seedKey(stage pipeline.StageName) discovery.Key {
	return discovery.KeyOf(folder, seedsIn, string(stage))
}

// Model is a registered model.
type Model struct {
	model.Model
	// RegisteredAt tells a registration from another one of the same ID.
	RegisteredAt time.Time
	// LastUse is what counts as its last use until it has been loaded.
	LastUse time.Time
	// AutoDelete is true if it is unregistered when no alias points at it any more.
	AutoDelete bool

	deleting bool
	revision discovery.Revision
}

// alias is an alias in the table.
type alias struct {
	*meshv1.Alias
	revision discovery.Revision
}

// GetActive may be called on nil.
func (a *alias) GetActive() *meshv1.AliasRoute {
	if a == nil {
		return nil
	}
	return a.Active
}

// models yields the models that an alias needs, each at least once.
func models(routes ...*meshv1.AliasRoute) iter.Seq[model.ID] {
	return func(yield func(model.ID) bool) {
		for _, route := range routes {
			for id := range maps.Keys(route.GetWeights()) {
				if !yield(model.ID(id)) {
					return
				}
			}
			for _, id := range []string{route.GetModel(), route.GetShadow().GetModel()} {
				if id != "" && !yield(model.ID(id)) {
					return
				}
			}
		}
	}
}

// unmarshal ignores fields that a newer process may have added.
func unmarshal(e discovery.Entry, into proto.Message) error {
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(e.Value, into); err != nil {
		return fmt.Errorf("record %s: %w", e.Key, err)
	}
	return nil
}

// intern returns a text that equal texts share.
func intern(s string) string { return unique.Make(s).Value() }

// FromProto returns the model of a message, or INVALID_REQUEST with the field; within is what
// precedes its name.
func FromProto(within string, in *meshv1.Model) (model.Model, error) {
	// The texts of a model are one object, which the garbage collector need not look into.
	options := string(model.NewOptions(in.GetOptions()))
	texts, id, source := in.GetId()+in.GetSource()+options, len(in.GetId()), len(in.GetSource())
	out := model.Model{
		ID: model.ID(texts[:id]), Stage: pipeline.StageName(intern(in.GetStage())), Type: intern(in.GetType()), Source: texts[id:][:source],
		Options: model.Options(texts[id+source:]), Size: SizeOf(in.GetSize()), MinReplicas: int(in.GetMinReplicas()),
	}
	if err := out.ID.Validate(); err != nil {
		return out, fault.InField(fault.InvalidRequest, within+"id", "%w", err)
	}
	if err := pipeline.ValidName("stage", string(out.Stage)); err != nil {
		return out, fault.InField(fault.InvalidRequest, within+"stage", "%w", err)
	}
	if err := model.ID(out.Type).Validate(); err != nil && out.Type != "" {
		return out, fault.InField(fault.InvalidRequest, within+"type", "%w", err)
	}
	if out.Size.Host < 0 || out.Size.Device < 0 {
		return out, fault.InField(fault.InvalidRequest, within+"size", "these are more bytes than a host can have")
	}
	if in.GetMinReplicas() > maxReplicas {
		return out, fault.InField(fault.InvalidRequest, within+"min_replicas", "%d, at most %d are possible", in.GetMinReplicas(), maxReplicas)
	}
	return out, nil
}

// SizeOf returns a size; one that is too large is negative.
func SizeOf(in *meshv1.ModelSize) model.Size {
	of := func(n uint64) int64 {
		if n > math.MaxInt64/2 {
			return -1
		}
		return int64(n)
	}
	return model.Size{Host: of(in.GetHost()), Device: of(in.GetDevice())}
}

// SizeToProto returns the message of a size; nil for none.
func SizeToProto(s model.Size) *meshv1.ModelSize {
	if s == (model.Size{}) {
		return nil
	}
	return &meshv1.ModelSize{Host: uint64(max(0, s.Host)), Device: uint64(max(0, s.Device))}
}

// ToProto returns the message of a model.
func ToProto(m model.Model) *meshv1.Model {
	return &meshv1.Model{
		Id: string(m.ID), Stage: string(m.Stage), Type: m.Type, Source: m.Source, Options: m.Options.Map(),
		Size: SizeToProto(m.Size), MinReplicas: uint32(min(max(0, m.MinReplicas), math.MaxInt32)),
	}
}

func decodeModel(e discovery.Entry) (*Model, error) {
	in := &meshv1.ModelRecord{}
	err := unmarshal(e, in)
	if err != nil {
		return nil, err
	}
	out := &Model{
		RegisteredAt: in.GetRegisteredAt().AsTime(), LastUse: in.GetLastUse().AsTime(),
		AutoDelete: in.GetAutoDelete(), deleting: in.GetDeleting(), revision: e.Revision,
	}
	if out.Model, err = FromProto("", in.GetModel()); err == nil && modelKey(out.ID) != e.Key {
		err = fmt.Errorf("it is of model %q", out.ID)
	}
	if err != nil {
		return nil, fmt.Errorf("record %s: %w", e.Key, err)
	}
	return out, nil
}

func (m *Model) toProto() *meshv1.ModelRecord {
	return &meshv1.ModelRecord{
		Model: ToProto(m.Model), RegisteredAt: timestamppb.New(m.RegisteredAt), LastUse: timestamppb.New(m.LastUse),
		AutoDelete: m.AutoDelete, Deleting: m.deleting,
	}
}

func decodeAlias(e discovery.Entry) (*alias, error) {
	out := &alias{Alias: &meshv1.Alias{}, revision: e.Revision}
	err := unmarshal(e, out.Alias)
	if name := model.ID(out.GetName()); err == nil && (name.Validate() != nil || aliasKey(name) != e.Key) {
		err = fmt.Errorf("record %s: it is of alias %q", e.Key, name)
	}
	return out, err
}

// content is what a table has.
type content struct {
	epoch    string
	models   *index[*Model]
	aliases  *index[*alias]
	replicas map[model.ID]*meshv1.ReplicasRecord
	settings map[discovery.Key]*meshv1.ModelSettings
	// pointing counts the routes that name a model.
	pointing map[model.ID]int
	// seen is the highest revision in the content so far, and writtenAt when records came.
	seen      discovery.Revision
	writtenAt time.Time
	log       *slog.Logger
}

func newContent(log *slog.Logger) *content {
	return &content{
		models: newIndex[*Model](), aliases: newIndex[*alias](),
		replicas: map[model.ID]*meshv1.ReplicasRecord{}, settings: map[discovery.Key]*meshv1.ModelSettings{}, pointing: map[model.ID]int{}, log: log,
	}
}

// apply takes a change. It logs unreadable records, which count as missing.
func (c *content) apply(change discovery.Change) {
	if len(change.Entries) > 0 {
		c.writtenAt = time.Now()
	}
	for _, e := range change.Entries {
		if err := c.put(e); err != nil {
			c.log.Warn("a record of the models is unreadable, and ignored", "error", err)
			c.remove(e.Key)
		}
		c.seen = max(c.seen, e.Revision)
	}
	for _, key := range change.Deleted {
		c.remove(key)
	}
}

// locate returns the kind of a record and what it is of.
func locate(key discovery.Key) (kind, of string) {
	segments, err := key.Segments()
	switch {
	case err == nil && key == epochKey:
		return "epoch", ""
	case err != nil || len(segments) != depth:
		return "", ""
	}
	return segments[1], segments[2]
}

func (c *content) put(e discovery.Entry) error {
	kind, of := locate(e.Key)
	id := model.ID(of)
	switch kind {
	case "epoch":
		c.epoch = discovery.EpochOf(e)
	case modelsIn:
		m, err := decodeModel(e)
		if err != nil {
			return err
		}
		c.models.put(m.ID, m)
	case replicasIn:
		r := &meshv1.ReplicasRecord{}
		if err := unmarshal(e, r); err != nil {
			return err
		}
		if m := c.models.get(id); m != nil {
			id = m.ID // the text is in memory once
		}
		c.replicas[id] = r
	case aliasesIn:
		a, err := decodeAlias(e)
		if err != nil {
			return err
		}
		c.unpoint(id)
		c.aliases.put(id, a)
		for id := range models(a.Active, a.Target) {
			c.pointing[id]++
		}
	case settingsIn, seedsIn:
		s := &meshv1.ModelSettings{}
		if err := unmarshal(e, s); err != nil {
			return err
		}
		c.settings[e.Key] = s
	}
	return nil
}

func (c *content) remove(key discovery.Key) {
	kind, of := locate(key)
	id := model.ID(of)
	switch kind {
	case "epoch":
		c.epoch = ""
	case modelsIn:
		c.models.remove(id)
	case replicasIn:
		delete(c.replicas, id)
	case aliasesIn:
		c.unpoint(id)
		c.aliases.remove(id)
	case settingsIn, seedsIn:
		delete(c.settings, key)
	}
}

// unpoint takes the alias of that name out of pointing.
func (c *content) unpoint(name model.ID) {
	a := c.aliases.get(name)
	if a == nil {
		return
	}
	for id := range models(a.Active, a.Target) {
		if c.pointing[id]--; c.pointing[id] <= 0 {
			delete(c.pointing, id)
		}
	}
}

// replicasOf returns the replicas of a model, none of an earlier registration's.
func (c *content) replicasOf(m *Model) *meshv1.ReplicasRecord {
	if r := c.replicas[m.ID]; isOf(r, m) {
		return r
	}
	return noReplicas(m)
}

// epochOf returns the epoch under a lock.
func (c *content) epochOf(mu *sync.RWMutex) string {
	mu.RLock()
	defer mu.RUnlock()
	return c.epoch
}

// has reports whether there is a record.
func (c *content) has(key discovery.Key) bool {
	kind, of := locate(key)
	id, ok := model.ID(of), false
	switch kind {
	case modelsIn:
		ok = c.models.get(id) != nil
	case replicasIn:
		_, ok = c.replicas[id]
	case aliasesIn:
		ok = c.aliases.get(id) != nil
	case settingsIn, seedsIn:
		_, ok = c.settings[key]
	}
	return ok
}

// records yields all records but the epoch, in no order, each with what encodes it.
func (c *content) records() iter.Seq2[discovery.Key, func() proto.Message] {
	return func(yield func(discovery.Key, func() proto.Message) bool) {
		for id, m := range c.models.all {
			if !yield(modelKey(id), func() proto.Message { return m.toProto() }) {
				return
			}
		}
		for id, r := range c.replicas {
			if !yield(replicasKey(id), func() proto.Message { return r }) {
				return
			}
		}
		for name, a := range c.aliases.all {
			if !yield(aliasKey(name), func() proto.Message { return a.Alias }) {
				return
			}
		}
		for key, s := range c.settings {
			if !yield(key, func() proto.Message { return s }) {
				return
			}
		}
	}
}

// index holds values by ID, and sorts their IDs when they are listed.
type index[V any] struct {
	all map[model.ID]V
	// order returns the IDs in order; it is nil until they are needed again.
	order atomic.Pointer[func() []model.ID]
}

func newIndex[V any]() *index[V] { return &index[V]{all: map[model.ID]V{}} }

func (x *index[V]) get(id model.ID) V { return x.all[id] }

func (x *index[V]) put(id model.ID, v V) {
	if _, ok := x.all[id]; !ok {
		x.order.Store(nil)
	}
	x.all[id] = v
}

func (x *index[V]) remove(id model.ID) {
	delete(x.all, id)
	x.order.Store(nil)
}

// page returns up to limit values after an ID that are to be listed, and the last ID if
// there are more. It sorts without the lock, so that requests do not wait for that.
func (x *index[V]) page(mu *sync.RWMutex, after model.ID, limit int, listed func(V) bool) (out []V, next model.ID) {
	mu.RLock()
	order := x.order.Load()
	if order == nil {
		ids := slices.AppendSeq(make([]model.ID, 0, len(x.all)), maps.Keys(x.all))
		sort := sync.OnceValue(func() []model.ID { slices.Sort(ids); return ids })
		order = &sort
		x.order.Store(order)
	}
	mu.RUnlock()
	ids := (*order)()
	at, found := slices.BinarySearch(ids, after)
	if found {
		at++
	}
	mu.RLock()
	defer mu.RUnlock()
	for _, id := range ids[at:] {
		v, ok := x.all[id]
		if !ok || !listed(v) {
			continue
		}
		if len(out) == limit {
			return out, next
		}
		out, next = append(out, v), id
	}
	return out, ""
}
