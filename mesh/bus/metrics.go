package bus

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

// serveMetrics answers with the metrics of this process.
func (b *Bus) serveMetrics() (stop func() error, err error) {
	return b.serveQuestions(b.Metrics(), func(_ []byte, reply func(proto.Message)) {
		metrics, err := b.settings.Metrics()
		if err != nil {
			b.settings.Logger.Debug("metrics not sent", "error", err)
			return
		}
		reply(metrics)
	})
}

// ListMetrics asks all processes of the mesh for their metrics, and returns the answers that
// come in time, sorted by process. Any client may have sent them; malformed ones are left out.
func (b *Bus) ListMetrics(ctx context.Context) ([]*meshv1.ProcessMetrics, error) {
	var out []*meshv1.ProcessMetrics
	err := b.askAll(ctx, b.Metrics(), nil, func(data []byte) bool {
		var metrics meshv1.ProcessMetrics
		if proto.Unmarshal(data, &metrics) == nil && metrics.GetProcess() != "" {
			out = append(out, &metrics)
		}
		return len(out) == maxAnswers
	})
	slices.SortFunc(out, func(x, y *meshv1.ProcessMetrics) int { return cmp.Compare(x.GetProcess(), y.GetProcess()) })
	return out, err
}
