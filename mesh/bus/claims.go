package bus

import "github.com/stagemesh/stagemesh/mesh/envelope"

// Claim returns the message that makes the claim the record of its key, while
// the record is the one at place after; 0 means that there is none.
func (b *Bus) Claim(key string, c *envelope.Claim, after uint64) (Message, error) {
	data, err := b.encode(c)
	if err != nil {
		return Message{}, err
	}
	return Message{
		subject: b.Subjects.Claim(c.Tenant, c.Pipeline, key),
		stream:  b.ClaimStream(),
		placed:  true,
		after:   after,
		data:    data,
		missing: ErrNoClaims,
	}, nil
}
