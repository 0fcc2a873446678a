package call

import "time"

// ClockSlack is how old a request must be for the loss of its queue to count.
const ClockSlack = clockSlack + 50*time.Millisecond

// DigestOf lets tests claim a key as a gateway would.
var DigestOf = digest

// Close rejects new requests, as the first step of Stop does.
func (s *Service) Close() { s.limiter.Close() }

// Grace is how long after its deadline a request keeps its key.
const Grace = grace
