package frame

// keys are the known ones of an object: first those that are required.
type keys struct {
	required int
	names    []string
}

// index returns the place of a key, or -1. It looks at guess first: keys mostly
// come in order.
func (k *keys) index(name string, guess int) int {
	if guess < len(k.names) && k.names[guess] == name {
		return guess
	}
	for i, known := range k.names {
		if known == name {
			return i
		}
	}
	return -1
}

// object reads one, key by key:
//
//	o := s.object(&itemKeys)
//	for o.more() {
//		switch o.key { ... }
//	}
//
// It skips what is not known, and refuses a known key that is there twice, and an
// object that lacks one that is required.
type object struct {
	s    *scanner
	keys *keys
	// key is the one whose value comes.
	key   string
	guess int
	seen  uint32
	begun bool
}

func (s *scanner) object(k *keys) object {
	s.open('{', "an object")
	return object{s: s, keys: k}
}

func (o *object) more() bool {
	for {
		if o.s.err != nil && o.key != "" {
			o.s.within(o.key)
		}
		if !o.s.another('}', !o.begun) {
			o.complete()
			return false
		}
		o.begun = true
		i := o.keys.index(o.s.name(), o.guess)
		if i < 0 {
			o.key = ""
			o.s.skip()
			continue
		}
		o.key, o.guess = o.keys.names[i], i+1
		if o.seen&(1<<i) != 0 {
			o.s.fail("it is there twice")
			continue
		}
		o.seen |= 1 << i
		return o.s.err == nil
	}
}

// complete refuses an object that lacks a key.
func (o *object) complete() {
	if o.s.err != nil {
		return
	}
	for i, name := range o.keys.names[:o.keys.required] {
		if o.seen&(1<<i) == 0 {
			o.s.fail("it is missing")
			o.s.within(name)
			return
		}
	}
}

// has reports whether a key was there.
func (o *object) has(name string) bool {
	i := o.keys.index(name, 0)
	return i >= 0 && o.seen&(1<<i) != 0
}
