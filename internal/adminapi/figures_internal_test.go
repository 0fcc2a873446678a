package adminapi

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// noPipelines has none; what is not of a list panics.
type noPipelines struct{ Pipelines }

func (noPipelines) Ready() error              { return nil }
func (noPipelines) List() []pipelines.Entry   { return nil }
func (noPipelines) Stale() (time.Time, error) { return time.Time{}, nil }

// endedTraffic has a request that ended.
type endedTraffic struct{ Traffic }

func (endedTraffic) Ended(context.Context, bool, pipeline.StageName, int) []*meshv1.RequestReport {
	return []*meshv1.RequestReport{{RequestId: "1"}}
}

// watched is a handler whose readings of the mesh are counted, and fail with err.
type watched struct {
	*handler

	readings int
	err      error
}

func newWatched() *watched {
	w := &watched{}
	w.handler = newHandler(Settings{Mesh: "m", Pipelines: noPipelines{}, Traffic: endedTraffic{}, Metrics: func(ctx context.Context) ([]*meshv1.ProcessMetrics, error) {
		w.readings++
		select {
		case <-time.After(250 * time.Millisecond):
		case <-ctx.Done():
		}
		return nil, errors.Join(w.err, ctx.Err())
	}})
	return w
}

// watch watches until the context ends, and returns what it got.
func (w *watched) watch(ctx context.Context) *[]*adminv1.WatchFiguresResponse {
	var got []*adminv1.WatchFiguresResponse
	s := w.newService(adminv1.File_stagemesh_admin_v1_mesh_proto, "the mesh", maxMessageBytes, maxCalls)
	go func() {
		_ = s.poll(ctx, func() <-chan struct{} { return nil }, func(ctx context.Context) error {
			f, err := w.currentFigures(ctx, nil)
			if err == nil {
				got = append(got, f)
			}
			return err
		})
	}()
	return &got
}

func TestWatchesShareOneReading(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched()
		ctx, end := context.WithCancel(t.Context())
		var all []*[]*adminv1.WatchFiguresResponse
		for range 20 {
			all = append(all, w.watch(ctx))
			<-time.After(37 * time.Millisecond)
		}
		first, leave := context.WithCancel(t.Context())
		gone := w.watch(first)
		<-time.After(3 * time.Second)
		leave()
		<-time.After(7 * time.Second)
		synctest.Wait()
		if w.readings < 9 || w.readings > 13 {
			t.Errorf("the mesh is read %d times in 11 s", w.readings)
		}
		for _, got := range append(all, gone) {
			last := (*got)[len(*got)-1]
			if n := len(*got); n < 3 || last.GetMesh() != "m" || last.GetStaleSince() != nil || len(last.GetEnded()) != 1 {
				t.Errorf("a watch gets %d answers, at last %v", n, last)
			}
			for i, f := range (*got)[1:] {
				if proto.Equal(f, (*got)[i]) {
					t.Errorf("a watch gets answer %d twice", i)
				}
			}
		}
		end()
		synctest.Wait()
		before := w.readings
		<-time.After(time.Hour)
		synctest.Wait()
		if w.readings != before {
			t.Errorf("without a watch the mesh is read %d times", w.readings-before)
		}
	})
}

func TestReadingThatFailsLeavesStaleFigures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched()
		w.err = errors.New("it is disconnected")
		if _, err := w.currentFigures(t.Context(), nil); fault.From(err).Reason != fault.BrokerUnavailable {
			t.Errorf("without any figures: %v", err)
		}
		next := func() *adminv1.WatchFiguresResponse {
			<-time.After(time.Second)
			out, err := w.currentFigures(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		w.err = nil
		good := next()
		w.err = errors.New("it is disconnected")
		for range 20 {
			begin := time.Now()
			stale := next()
			if !stale.GetStaleSince().AsTime().Equal(good.GetAnsweredAt().AsTime()) || stale.GetAnsweredAt().AsTime().Before(begin) || stale.GetStaleCause() == "" || len(stale.GetEnded()) != 1 {
				t.Errorf("got %v", stale)
			}
		}
		if good.GetStaleSince() != nil {
			t.Error("figures that were sent change")
		}
		w.err = nil
		if again := next(); again.GetStaleSince() != nil || again.GetStaleCause() != "" {
			t.Errorf("got %v", again)
		}
		if again := next(); again.GetRequests().PerSecond == nil {
			t.Errorf("after a gap there are no rates: %v", again)
		}
	})
}
