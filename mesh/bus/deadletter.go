package bus

import "github.com/stagemesh/stagemesh/mesh/envelope"

// DeadLetter returns the message that stores a letter about a delivery that the
// mesh gave up on; sent again it is told from a second letter by the delivery.
func (b *Bus) DeadLetter(d *envelope.DeadLetter, of Delivery) (Message, error) {
	data, err := b.encode(d)
	if err != nil {
		return Message{}, err
	}
	return Message{
		subject: b.Dead(d.Stage),
		stream:  b.DeadStream(),
		id:      of.key(),
		data:    data,
		missing: ErrNoDeadLetters,
	}, nil
}
