package batch

// historyKeys bounds the keys whose history is kept: at most twice as many.
const historyKeys = 256

// history is what the batches of a key have taught.
type history struct {
	estimate estimate
	gather   gather
}

// histories keeps the histories of the keys used lately, in two generations:
// when the younger is full the older is dropped.
type histories struct {
	young, old map[Key]*history
}

// of returns the key's history, a new one where there is none.
func (h *histories) of(key Key) *history {
	if known, ok := h.young[key]; ok {
		return known
	}
	known, ok := h.old[key]
	if !ok {
		// Stragglers count as returning until they are seen not to.
		known = &history{gather: gather{returning: 1}}
	}
	h.keep(key, known)
	return known
}

// peek returns the key's history without making or refreshing one.
func (h *histories) peek(key Key) (*history, bool) {
	if known, ok := h.young[key]; ok {
		return known, true
	}
	known, ok := h.old[key]
	return known, ok
}

func (h *histories) keep(key Key, known *history) {
	if len(h.young) >= historyKeys {
		h.old, h.young = h.young, nil
	}
	if h.young == nil {
		h.young = make(map[Key]*history)
	}
	h.young[key] = known
}
