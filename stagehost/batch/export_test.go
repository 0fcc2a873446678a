package batch

import "time"

// Len returns the number of items that wait, those included that Expire has not
// returned yet.
func (b *Batcher) Len() int { return len(b.entries) + len(b.expired) }

// Estimate returns how long a batch of that key and size is likely to run. It
// is false where no batch of the key ran lately.
func (b *Batcher) Estimate(key Key, rows int) (time.Duration, bool) {
	for _, known := range []map[Key]*group{b.young, b.old} {
		if g, ok := known[key]; ok && g.estimate.known() {
			return g.estimate.of(rows), true
		}
	}
	return 0, false
}
