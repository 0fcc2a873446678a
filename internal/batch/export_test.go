package batch

// Len returns the number of items that wait, those included that Expire has not
// returned yet.
func (b *Batcher) Len() int { return len(b.entries) + len(b.expired) }
