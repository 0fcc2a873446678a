package bus

import (
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// replyBacklog bounds the replies that wait for the handler, in messages and
// bytes.
const (
	replyBacklog      = 1 << 16
	replyBacklogBytes = 512 << 20
)

// ServeReplies hands every reply for the gateway to handle, which says what
// became of it and must not block, until the returned function is called.
func (b *Bus) ServeReplies(gateway pipeline.GatewayID, handle func(pipeline.ExecutionID, []byte) meshv1.ReplyDisposition) (stop func() error, err error) {
	sub, err := b.nc.Subscribe(b.Replies(gateway), func(msg *nats.Msg) {
		disposition := handle(b.Execution(gateway, msg.Subject), msg.Data)
		if msg.Reply == "" {
			return
		}
		if err := b.nc.Publish(msg.Reply, acknowledgement(disposition)); err != nil {
			b.settings.Logger.Debug("reply not acknowledged", "error", err)
		}
	})
	if err != nil {
		return nil, sendError(err)
	}
	return b.known(sub, sub.SetPendingLimits(replyBacklog, replyBacklogBytes))
}

// flush makes sure that the broker knows of a subscription before anybody is
// told to use it. While the broker is away the subscription is made on
// reconnect.
func (b *Bus) flush() error {
	if !b.Connected() {
		return nil
	}
	return b.nc.FlushTimeout(apiTimeout)
}

func acknowledgement(d meshv1.ReplyDisposition) []byte {
	// A ReplyAck cannot fail to marshal: it is one enum.
	data, _ := proto.Marshal(&meshv1.ReplyAck{Disposition: d})
	return data
}
