package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

// hostsKey is above the records of all hosts.
const hostsKey = Key("hosts")

// HostKey returns the key of a host's record.
func HostKey(stage, host string) Key { return hostsKey + "/" + KeyOf(stage, host) }

// hostService returns the service whose instances are the hosts of a stage. Two pairs
// of mesh and stage may have the same service: the instances' Meta tells them apart.
func hostService(mesh, stage string) string { return mesh + "-" + stage }

// Keys of the Meta of a host's instance.
const (
	metaMesh    = "mesh"
	metaStage   = "stage"
	metaVersion = "version"
	// metaOperations is the address of the operations port, which has the metrics.
	metaOperations = "operations"
)

// HostInstance returns the instance that a host announces.
func HostInstance(r *meshv1.HostRecord) Instance {
	return Instance{
		Service: hostService(r.GetMesh(), r.GetStage()), ID: r.GetHost(), Address: r.GetAddress(),
		Meta: map[string]string{metaMesh: r.GetMesh(), metaStage: r.GetStage(), metaVersion: r.GetVersion(), metaOperations: r.GetOperations()},
	}
}

// GatewayInstance returns the instance that a gateway announces. It has no stage, which tells
// it from the hosts of a stage named gateway.
func GatewayInstance(mesh, gateway, version, operations string) Instance {
	return Instance{
		Service: mesh + "-gateway", ID: gateway,
		Meta: map[string]string{metaMesh: mesh, metaVersion: version, metaOperations: operations},
	}
}

// decodeHost reads a record. It ignores fields that a newer host may have added.
func decodeHost(e Entry) (*meshv1.HostRecord, error) {
	r := &meshv1.HostRecord{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(e.Value, r); err != nil {
		return nil, fmt.Errorf("record %s: %w", e.Key, err)
	}
	if HostKey(r.GetStage(), r.GetHost()) != e.Key {
		return nil, fmt.Errorf("record %s is of host %s of stage %s", e.Key, r.GetHost(), r.GetStage())
	}
	if err := ValidateService(hostService(r.GetMesh(), r.GetStage())); err != nil {
		return nil, fmt.Errorf("record %s: %w", e.Key, err)
	}
	return r, nil
}

const (
	// A load is not published again when it changes by less than a quarter, or by no
	// more than these.
	minLoadChange = 4
	minWaitChange = 10 * time.Millisecond
	// minRateChange is in requests a minute; placement ignores less.
	minRateChange = 50
)

// differs reports whether a record has changed enough to be published again.
func differs(old, now *meshv1.HostRecord) bool {
	if loadDiffers(float64(old.GetInFlight()), float64(now.GetInFlight()), minLoadChange) || loadDiffers(float64(old.GetRunning()), float64(now.GetRunning()), minLoadChange) {
		return true
	}
	if loadDiffers(old.GetQueueWait().AsDuration().Seconds(), now.GetQueueWait().AsDuration().Seconds(), minWaitChange.Seconds()) {
		return true
	}
	now = proto.CloneOf(now)
	now.InFlight, now.Running, now.QueueWait = old.GetInFlight(), old.GetRunning(), old.GetQueueWait()
	if !cacheDiffers(old.GetCache(), now.GetCache()) {
		now.Cache = old.GetCache()
	}
	return !proto.Equal(old, now)
}

// cacheDiffers reports whether the memory for models has changed noticeably: a change of use by
// a 20th of the capacity, of the queue or the rate by a quarter, of the oldest use by a minute.
func cacheDiffers(old, now *meshv1.CacheRecord) bool {
	const share, oldest = 20, time.Minute
	moved := func(was, is, of uint64) bool { return max(was, is)-min(was, is) > of/share }
	return (old == nil) != (now == nil) || old.GetFull() != now.GetFull() || old.GetLoadSlots() != now.GetLoadSlots() ||
		!proto.Equal(old.GetCapacity(), now.GetCapacity()) ||
		moved(old.GetUsed().GetHost(), now.GetUsed().GetHost(), now.GetCapacity().GetHost()) ||
		moved(old.GetUsed().GetDevice(), now.GetUsed().GetDevice(), now.GetCapacity().GetDevice()) ||
		loadDiffers(float64(old.GetQueued()+old.GetLoading()), float64(now.GetQueued()+now.GetLoading()), 1) ||
		moves(float64(old.GetRate()), float64(now.GetRate()), minRateChange) ||
		now.GetOldestUse().AsTime().Sub(old.GetOldestUse().AsTime()).Abs() > oldest
}

func loadDiffers(old, now, least float64) bool {
	return (old == 0) != (now == 0) || moves(old, now, least)
}

// moves reports whether a figure changes by a quarter, and by more than least.
func moves(old, now, least float64) bool {
	change := max(old, now) - min(old, now)
	return change > least && change > max(old, now)/4
}

const (
	// publishInterval is the least time between two writes of a record, verifyInterval
	// how often its host checks that the registry still has it.
	publishInterval = time.Second
	verifyInterval  = 5 * time.Second
	// repeatInterval is how often the record of a host that is not ready is written again: readers
	// see that it lives although its health check fails. It is less than deadVisible.
	repeatInterval = 10 * time.Second

	// removeTimeout bounds the removal of a record, writeTimeout one write.
	removeTimeout = 2 * time.Second
	writeTimeout  = 5 * time.Second
)

// PublishHost keeps a host's record in the table until the context ends, and then
// removes it. current returns the record; its mesh, stage, host and start never change.
// PublishHost retries while the registry is unavailable or rejects the write, and logs
// that once. A nil logger discards.
func PublishHost(ctx context.Context, t Table, current func() *meshv1.HostRecord, log *slog.Logger) error {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	first := current()
	p := &publisher{table: t, current: current, log: log, key: HostKey(first.GetStage(), first.GetHost())}
	ticker := time.NewTicker(publishInterval)
	defer ticker.Stop()
	for {
		if err := p.publish(ctx, time.Now()); ctx.Err() == nil {
			p.logFailure(err)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return p.remove(ctx)
		}
	}
}

// publisher keeps one record up to date.
type publisher struct {
	table   Table
	current func() *meshv1.HostRecord
	log     *slog.Logger
	key     Key

	// written is what the table has, nil while that is unknown, and revision its
	// revision.
	written   *meshv1.HostRecord
	revision  Revision
	writtenAt time.Time
	verified  time.Time
	failing   bool
	// duplicateLogged is true once another process with the same host ID was logged.
	duplicateLogged bool
}

// publish writes the record if that is due.
func (p *publisher) publish(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if p.written == nil || now.Sub(p.verified) >= verifyInterval {
		if err := p.verify(ctx, now); err != nil {
			return err
		}
	}
	r := p.current()
	repeats := !r.GetReady() && now.Sub(p.writtenAt) >= repeatInterval
	if p.written != nil && !differs(p.written, r) && !repeats {
		return nil
	}
	value, err := protojson.Marshal(r)
	if err != nil {
		return err
	}
	revision, err := p.table.Put(ctx, p.key, value, p.revision)
	if err != nil {
		p.written = nil
		return err
	}
	p.written, p.revision, p.writtenAt = r, revision, now
	return nil
}

// verify reads what the table has. The record is written again if it is missing, or if
// another process has overwritten it.
func (p *publisher) verify(ctx context.Context, now time.Time) error {
	e, err := p.table.Get(ctx, p.key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	if e.Revision != p.revision || e.Revision == 0 {
		p.warnDuplicate(e)
		p.written = nil
	}
	p.revision, p.verified = e.Revision, now
	return nil
}

// warnDuplicate logs once that another process publishes the same host: the two
// overwrite each other from then on.
func (p *publisher) warnDuplicate(e Entry) {
	other, err := decodeHost(e)
	if p.duplicateLogged || p.written == nil || err != nil || proto.Equal(other.GetStartedAt(), p.written.GetStartedAt()) {
		return
	}
	p.duplicateLogged = true
	p.log.Warn("another process has the same host ID; give one of them another ID", "stage", other.GetStage(), "host", other.GetHost(),
		"its_address", other.GetAddress(), "its_start", other.GetStartedAt().AsTime())
}

// logFailure logs the first failure in a row, and its end.
func (p *publisher) logFailure(err error) {
	switch {
	case err != nil && !p.failing:
		p.log.Warn("the host's record is not published; retrying", "error", err)
	case err == nil && p.failing:
		p.log.Info("the host's record is published again")
	}
	p.failing = err != nil
}

// remove removes the record after the context has ended, unless it is of another process with the
// same host ID, such as a successor.
func (p *publisher) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	for {
		e, err := p.table.Get(ctx, p.key)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if stored, err := decodeHost(e); err == nil && !proto.Equal(stored.GetStartedAt(), p.current().GetStartedAt()) {
			return nil
		}
		if err == nil {
			err = p.table.Delete(ctx, p.key, e.Revision)
		}
		if !errors.Is(err, ErrConflict) {
			return err
		}
	}
}
