package adminapi

import (
	"context"
	"math"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/figures"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// figuresAge is how old the figures may be that a watch gets from another one: less than the
	// interval of its polls.
	figuresAge = 900 * time.Millisecond
	// figuresGap is the time without a reading after which rates begin anew.
	figuresGap = 5 * time.Second
	// figuresTimeout bounds a reading of the mesh, for which all watches wait.
	figuresTimeout = 3 * time.Second
	// maxEnded is how many requests that ended are among the figures.
	maxEnded = 40
)

// sharedFigures are the figures of the mesh for all who watch them. A watch that finds them old
// reads the mesh for all, so without watches nobody does.
type sharedFigures struct {
	// turn holds a value while a watch uses the fields below.
	turn   chan struct{}
	window figures.Window
	// readAt is when the last reading began, which may have failed, and endedAt when it ended.
	readAt, endedAt time.Time
	// last is not changed any more.
	last *adminv1.WatchFiguresResponse
}

// currentFigures returns figures that are not old, or the last ones as stale.
func (h *handler) currentFigures(ctx context.Context, _ *adminv1.WatchFiguresRequest) (*adminv1.WatchFiguresResponse, error) {
	s, asked := &h.figures, time.Now()
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	now := time.Now()
	gap := now.Sub(s.readAt)
	if s.last != nil && (gap < figuresAge || asked.Before(s.endedAt)) { // those who waited share a slow reading
		return s.last, nil
	}
	if gap > figuresGap {
		s.window = nil
	}
	reading, err := h.readMesh(ctx, now)
	switch {
	case err == nil:
		s.window.Add(reading.Sample)
		s.last = h.figuresOf(s.window.Figures(), reading)
	case ctx.Err() != nil || s.last == nil:
		return nil, err
	default:
		stale := proto.CloneOf(s.last)
		if stale.GetStaleSince() == nil {
			stale.StaleSince = stale.GetAnsweredAt()
		}
		stale.AnsweredAt, stale.StaleCause = timestamppb.New(now), fault.From(err).Message
		s.last = stale
	}
	s.readAt, s.endedAt = now, time.Now()
	return s.last, nil
}

// reading is what the gateway reads of the mesh at a time.
type reading struct {
	figures.Sample

	stages *adminv1.ListStagesResponse
	ended  []*meshv1.RequestReport
}

func (h *handler) readMesh(ctx context.Context, now time.Time) (out reading, err error) {
	ctx, cancel := context.WithTimeout(ctx, figuresTimeout)
	defer cancel()
	out.At = now
	var work errgroup.Group
	work.Go(func() error {
		all, err := h.listMetrics(ctx, nil)
		out.Processes = figures.ReadProcesses(all.GetProcesses())
		return err
	})
	work.Go(func() (err error) {
		out.stages, err = h.listStages(ctx, nil)
		out.Stages = out.stages.GetStages()
		return err
	})
	work.Go(func() error {
		// Without a registry, or before it is read, hosts have no state.
		if all, err := h.listHosts(ctx, nil); err == nil {
			out.Hosts = all.GetHosts()
		}
		return nil
	})
	work.Go(func() error {
		out.ended = h.Traffic.Ended(ctx, false, "", maxEnded)
		return nil
	})
	return out, work.Wait()
}

func (h *handler) figuresOf(f *figures.Mesh, r reading) *adminv1.WatchFiguresResponse {
	out := &adminv1.WatchFiguresResponse{
		AnsweredAt: timestamppb.New(r.At), StaleSince: r.stages.GetStaleSince(), StaleCause: r.stages.GetStaleCause(), StoreCause: r.stages.GetStoreCause(),
		Mesh: string(h.Mesh), Gateways: max(1, uint32(f.Gateways)), RequestsInFlight: uint32(f.InFlight), Requests: requestFigures(&f.Requests), Ended: r.ended,
	}
	for _, e := range h.Pipelines.List() {
		p := &adminv1.PipelineFigures{Pipeline: e.Pipeline.ToProto()}
		if requests := f.Pipelines[string(e.Pipeline.Name)]; requests != nil {
			p.Requests = requestFigures(requests)
		} else if len(h.figures.window) > 1 {
			p.Requests = &adminv1.RequestFigures{PerSecond: proto.Float64(0)}
		}
		for name, items := range f.MapItems {
			if path, ok := strings.CutPrefix(name, string(e.Pipeline.Name)+"/"); ok {
				p.Maps = append(p.Maps, &adminv1.MapStatus{Path: path, Items: float64(items)})
			}
		}
		slices.SortFunc(p.GetMaps(), func(a, b *adminv1.MapStatus) int { return strings.Compare(a.GetPath(), b.GetPath()) })
		out.Pipelines = append(out.Pipelines, p)
	}
	statuses, records := map[string]*adminv1.StageStatus{}, map[string][]*adminv1.HostStatus{}
	for _, s := range r.Stages {
		statuses[s.GetStage()] = s
	}
	for _, host := range f.Records {
		records[host.GetRecord().GetStage()] = append(records[host.GetRecord().GetStage()], host)
	}
	for _, s := range f.Stages {
		stage := stageFigures(s, statuses[s.Stage], records[s.Stage])
		for _, host := range stage.GetHosts() {
			if host.GetState() != figures.Disconnected {
				out.Hosts++
			}
		}
		out.Stages = append(out.Stages, stage)
	}
	return out
}

// known returns a figure, nil where it is not known.
func known(f figures.Figure) *float64 {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return nil
	}
	return proto.Float64(float64(f))
}

func requestFigures(r *figures.Requests) *adminv1.RequestFigures {
	out := &adminv1.RequestFigures{PerSecond: known(r.RequestsPerSecond), P50Seconds: known(r.P50), P99Seconds: known(r.P99), FailuresPerSecond: map[string]float64{}}
	for reason, n := range r.FailuresPerSecond {
		out.FailuresPerSecond[reason] = float64(n)
	}
	return out
}

// stageFigures returns the figures of a stage, whose status may be nil, and of its hosts. Processes
// without an operations port send no metrics: of their hosts only the records are known.
func stageFigures(s *figures.Stage, status *adminv1.StageStatus, records []*adminv1.HostStatus) *adminv1.StageFigures {
	out := &adminv1.StageFigures{
		Stage: s.Stage, Served: status.GetServed() || s.Hosts > 0, UnhealthyCause: status.GetUnhealthyCause(), QueuesCause: status.GetQueuesCause(), HostsWanted: status.GetHostsWanted(),
		Queued: uint32(s.Queue), Slots: max(uint32(s.Slots), status.GetSlots()), BusySlots: known(s.BusySlots),
		ItemsPerSecond: known(s.ItemsPerSecond), FaultsPerSecond: known(s.FaultsPerSecond), MeanBatch: known(s.MeanBatch),
		QueueWaitP50Seconds: known(s.QueueWaitP50), QueueWaitP99Seconds: known(s.QueueWaitP99), RunP50Seconds: known(s.RunP50), RunP99Seconds: known(s.RunP99),
	}
	for _, h := range s.ByHost {
		out.Hosts = append(out.Hosts, &adminv1.HostFigures{Host: h.Host, InFlight: uint32(h.InFlight), Queued: uint32(h.Queued), Slots: uint32(h.Slots), BusySlots: known(h.BusySlots)})
	}
	for _, status := range records {
		record := status.GetRecord()
		at := slices.IndexFunc(out.GetHosts(), func(h *adminv1.HostFigures) bool { return h.GetHost() == record.GetHost() })
		if at < 0 {
			at = len(out.GetHosts())
			out.Hosts = append(out.Hosts, &adminv1.HostFigures{Host: record.GetHost(), InFlight: record.GetInFlight(), Slots: record.GetSlots()})
		}
		host := out.GetHosts()[at]
		host.State, host.Cause, host.Engine, host.StartedAt, host.Workers = figures.HostState(status), record.GetCause(), record.GetEngine(), record.GetStartedAt(), record.GetWorkers()
	}
	slices.SortFunc(out.GetHosts(), func(a, b *adminv1.HostFigures) int { return strings.Compare(a.GetHost(), b.GetHost()) })
	return out
}
