package natskv

import (
	"errors"
	"testing"

	"github.com/stagemesh/stagemesh/discovery"
)

func TestACommitIsKnownByWhatIsThere(t *testing.T) {
	t.Parallel()
	const own = "own"
	entry := func(sequence uint64, m mark) record { return record{sequence: sequence, commit: m} }
	marker := func(sequence uint64, m mark) record {
		return record{sequence: sequence, commit: m, deleted: true}
	}
	for name, test := range map[string]struct {
		changes     []discovery.Operation
		lost, moved bool
		last        []record
		want        error
		revision    discovery.Revision
		expect      uint64
	}{
		"it was made": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7)}, lost: true,
			last: []record{entry(9, mark{own, 0, 7})}, revision: 9,
		},
		"it was made, and one of its keys has changed since": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7), discovery.Put("b", nil, 0)}, lost: true,
			last: []record{entry(9, mark{own, 1, 7}), entry(12, mark{"other", 0, 10})}, revision: 10,
		},
		"another was first": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7)},
			last:    []record{entry(9, mark{"other", 0, 7})}, want: discovery.ErrConflict,
		},
		"another was first, though an answer was lost": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7)}, lost: true,
			last: []record{entry(9, mark{"other", 0, 7})}, want: discovery.ErrConflict,
		},
		"others came after what may have been made": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7)}, lost: true,
			last: []record{entry(12, mark{"other", 0, 9})}, want: discovery.ErrUnknown,
		},
		"another program has written": {
			changes: []discovery.Operation{discovery.Put("a", nil, 0)}, lost: true,
			last: []record{entry(12, mark{})}, want: discovery.ErrUnknown,
		},
		"it was deleted, and that is forgotten": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7)}, lost: true,
			last: []record{{}}, want: discovery.ErrUnknown,
		},
		"nothing has happened": {
			changes: []discovery.Operation{discovery.Put("a", nil, 7)}, lost: true,
			last: []record{entry(7, mark{"other", 0, 1})}, expect: 7,
		},
		"there is none, but a marker": {
			changes: []discovery.Operation{discovery.Put("a", nil, 0)},
			last:    []record{marker(8, mark{"other", 0, 7})}, expect: 8,
		},
		"a marker is no entry to delete": {
			changes: []discovery.Operation{discovery.Delete("a", 8)},
			last:    []record{marker(8, mark{"other", 0, 7})}, want: discovery.ErrConflict,
		},
		"another has taken a place that it tried later": {
			changes: []discovery.Operation{discovery.Put("a", nil, 0)}, lost: true, moved: true,
			last: []record{entry(9, mark{"other", 0, 0})}, want: discovery.ErrUnknown,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCommit(own, test.changes)
			c.lost, c.moved = test.lost, test.moved
			revision, err := c.judge(test.last)
			if revision != test.revision || !errors.Is(err, test.want) {
				t.Fatalf("it is of revision %d, %v", revision, err)
			}
			if test.want == nil && test.revision == 0 && c.expect[0] != test.expect {
				t.Errorf("it expects sequence %d, want %d", c.expect[0], test.expect)
			}
		})
	}
}

func FuzzReadMark(f *testing.F) {
	f.Add("nonce 1 7")
	f.Add("nonce 256 7")
	f.Add(" 0 0")
	f.Fuzz(func(t *testing.T, text string) {
		m := readMark(text)
		if m != (mark{}) && readMark(m.String()) != m {
			t.Errorf("%q is %+v, which is written as %q", text, m, m)
		}
	})
}

func FuzzReadInstance(f *testing.F) {
	f.Add([]byte(`{"address":"127.0.0.1:1","meta":{"a":"b"},"serving":true}`))
	f.Add([]byte(`{"meta":{"A":"\n"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := readInstance("service", "id", data)
		if err == nil && m.instance.Validate() != nil {
			t.Errorf("%q is an instance that is none: %+v", data, m.instance)
		}
	})
}
