package bus

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

const (
	// metricsWait is how long the processes of the mesh may take to answer.
	metricsWait = 250 * time.Millisecond
	// maxProcesses and maxMetricsBytes bound the answers.
	maxProcesses    = 4096
	maxMetricsBytes = 64 << 20
)

// serveMetrics answers with the metrics of this process.
func (b *Bus) serveMetrics() (stop func() error, err error) {
	return b.subscribe(b.Metrics(), "", -1, func(msg *nats.Msg) {
		metrics, err := b.settings.Metrics()
		if err == nil {
			var data []byte
			if data, err = proto.Marshal(metrics); err == nil {
				err = b.nc.Publish(msg.Reply, data)
			}
		}
		if err != nil {
			b.settings.Logger.Debug("metrics not sent", "error", err)
		}
	})
}

// ListMetrics asks all processes of the mesh for their metrics, and returns the answers that
// come in time, sorted by process. Any client may have sent them; malformed ones are left out.
func (b *Bus) ListMetrics(ctx context.Context) ([]*meshv1.ProcessMetrics, error) {
	if !b.Connected() {
		return nil, b.disconnectedError()
	}
	inbox := b.nc.NewInbox()
	sub, err := b.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, sendError(err)
	}
	defer sub.Unsubscribe() //nolint:errcheck // it fails when the connection is closed
	if err := sub.SetPendingLimits(maxProcesses, maxMetricsBytes); err != nil {
		return nil, sendError(err)
	}
	if err := b.nc.PublishRequest(b.Metrics(), inbox, nil); err != nil {
		return nil, sendError(err)
	}
	waiting, cancel := context.WithTimeout(ctx, metricsWait)
	defer cancel()
	var out []*meshv1.ProcessMetrics
	for len(out) < maxProcesses {
		msg, err := sub.NextMsgWithContext(waiting)
		if err != nil {
			// Nobody answers any more, or nobody at all.
			break
		}
		var metrics meshv1.ProcessMetrics
		if proto.Unmarshal(msg.Data, &metrics) == nil && metrics.GetProcess() != "" {
			out = append(out, &metrics)
		}
	}
	slices.SortFunc(out, func(x, y *meshv1.ProcessMetrics) int { return cmp.Compare(x.GetProcess(), y.GetProcess()) })
	return out, ctx.Err()
}
