package envelope_test

import (
	"errors"
	"reflect"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
)

func TestDeadLettersRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawDeadLetter(t)
		data, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := envelope.DecodeDeadLetter(data)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v; want %+v", got, err, want)
		}
	})
}

func TestMeaninglessDeadLetterIsRejected(t *testing.T) {
	t.Parallel()
	at, f := &timestamppb.Timestamp{Seconds: 1}, &meshv1.Fault{Reason: "RUNNER_CRASHED"}
	for name, letter := range map[string]*meshv1.DeadLetter{
		"no fault":                {QueuedAt: at, DeadLetteredAt: at},
		"no death":                {Fault: f, QueuedAt: at},
		"no place in the queue":   {Fault: f, DeadLetteredAt: at},
		"a start at no time":      {Fault: f, QueuedAt: at, DeadLetteredAt: at, Runs: []*meshv1.RunRecord{{Host: "h"}}},
		"more starts than can be": {Fault: f, QueuedAt: at, DeadLetteredAt: at, Runs: make([]*meshv1.RunRecord, 1001)},
		"an unknown durability":   {Fault: f, QueuedAt: at, DeadLetteredAt: at, Durability: 99},
	} {
		for i := range letter.Runs {
			if letter.Runs[i] == nil {
				letter.Runs[i] = &meshv1.RunRecord{StartedAt: at}
			}
		}
		data, err := proto.Marshal(letter)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := envelope.DecodeDeadLetter(data); got != nil || !errors.Is(err, envelope.ErrMalformed) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
}
