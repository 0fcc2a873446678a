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

func TestResultsRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawResult(t)
		data, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := envelope.DecodeResult(data)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v; want %+v", got, err, want)
		}
	})
}

func TestResultWithoutAReplyIsRejected(t *testing.T) {
	t.Parallel()
	output := &meshv1.Reply{RequestId: requestID, ExecutionId: executionID, Outcome: &meshv1.Reply_Output{Output: &meshv1.Output{}}}
	chunk := &meshv1.Reply{RequestId: requestID, ExecutionId: executionID, Outcome: &meshv1.Reply_Chunk{Chunk: &meshv1.Output{}}}
	at := &timestamppb.Timestamp{Seconds: 1}
	for name, result := range map[string]*meshv1.Result{
		"no reply":      {AdmittedAt: at, FinishedAt: at},
		"a chunk":       {Reply: chunk, AdmittedAt: at, FinishedAt: at},
		"no admission":  {Reply: output, FinishedAt: at},
		"no finish":     {Reply: output, AdmittedAt: at},
		"an empty one":  {},
		"an empty name": {Reply: &meshv1.Reply{}, AdmittedAt: at, FinishedAt: at},
	} {
		data, err := proto.Marshal(result)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := envelope.DecodeResult(data); got != nil || !errors.Is(err, envelope.ErrMalformed) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
}
