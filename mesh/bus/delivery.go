package bus

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Delivery is one item in hand. Its holder settles it exactly once, by Ack, Nak
// or Term, or drops it when its Epoch is not the queue's any more.
type Delivery struct {
	// Data is the item: an encoded envelope, or anything that was published to
	// the queue.
	Data []byte
	// Durability and Class say where it waited, Epoch when that was made.
	Durability pipeline.Durability
	Class      pipeline.Class
	Epoch      Epoch
	// Seq is the item's place in its queue.
	Seq uint64
	// Deliveries counts this and earlier deliveries to any host; above 1 the
	// item is suspect.
	Deliveries int
	// Pending items wait behind this one in its class.
	Pending uint64
	// Stored is when the broker received the item, on the broker's clock.
	Stored time.Time
	// Arrived is when this process got it.
	Arrived time.Time

	stream string
	reply  string
	nc     *nats.Conn
}

// Same reports whether both are deliveries of one item.
func (d Delivery) Same(other Delivery) bool {
	return d.Seq == other.Seq && d.Durability == other.Durability && d.Epoch == other.Epoch
}

// key is one for all deliveries of the item, and for no other item.
func (d Delivery) key() string {
	return d.stream + "/" + string(d.Epoch) + "/" + strconv.FormatUint(d.Seq, 10)
}

func newDelivery(nc *nats.Conn, msg *nats.Msg) (Delivery, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return Delivery{}, fmt.Errorf("delivery without metadata: %w", err)
	}
	_, epoch, _ := strings.Cut(meta.Consumer, "-")
	return Delivery{
		Data:       msg.Data,
		Epoch:      Epoch(epoch),
		Seq:        meta.Sequence.Stream,
		Deliveries: int(meta.NumDelivered),
		Pending:    meta.NumPending,
		Stored:     meta.Timestamp,
		Arrived:    time.Now(),
		stream:     meta.Stream,
		reply:      msg.Reply,
		nc:         nc,
	}, nil
}

// Ack says that the item is done; the queue forgets it. An error says that the
// word was not sent, so the item will come again.
func (d Delivery) Ack() error { return d.say("+ACK") }

// Nak gives the item back, to be delivered again after the delay.
func (d Delivery) Nak(delay time.Duration) error {
	return d.say(fmt.Sprintf(`-NAK {"delay": %d}`, delay.Nanoseconds()))
}

// Term says that the item must not be delivered again, and why.
func (d Delivery) Term(reason string) error { return d.say("+TERM " + reason) }

// InProgress says that the item is still in hand, which restarts its ack wait.
func (d Delivery) InProgress() error { return d.say("+WPI") }

func (d Delivery) say(word string) error {
	if err := d.nc.Publish(d.reply, []byte(word)); err != nil {
		return sendError(err)
	}
	return nil
}
