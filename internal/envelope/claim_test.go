package envelope_test

import (
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestClaimsRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawClaim(t)
		data, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := envelope.DecodeClaim(data)
		if err != nil || *got != *want {
			t.Fatalf("got %+v, %v; want %+v", got, err, want)
		}
	})
}

func TestReleasedClaimIsSmaller(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		claim := drawClaim(t)
		claim.Released, claim.AdmittedAt, claim.Deadline = false, drawTime(t, "admitted"), drawTime(t, "deadline")
		held, err := claim.Encode()
		if err != nil {
			t.Fatal(err)
		}
		claim.Released = true
		released, err := claim.Encode()
		if err != nil || len(released) >= len(held) {
			t.Fatalf("%d bytes, %v; it was %d", len(released), err, len(held))
		}
	})
}

func TestMeaninglessClaimIsRejected(t *testing.T) {
	t.Parallel()
	at := &timestamppb.Timestamp{Seconds: 1}
	whole := func() *meshv1.IdempotencyRecord {
		return &meshv1.IdempotencyRecord{
			RequestId: requestID, Digest: make([]byte, len(envelope.Digest{})), AdmittedAt: at, Deadline: at,
			Durability: inferencev1.Durability_DURABILITY_FILE, State: meshv1.IdempotencyState_IDEMPOTENCY_STATE_HELD,
		}
	}
	for name, edit := range map[string]func(*meshv1.IdempotencyRecord){
		"no request":       func(c *meshv1.IdempotencyRecord) { c.RequestId = "" },
		"no UUID":          func(c *meshv1.IdempotencyRecord) { c.RequestId = "x" },
		"no admission":     func(c *meshv1.IdempotencyRecord) { c.AdmittedAt = nil },
		"no deadline":      func(c *meshv1.IdempotencyRecord) { c.Deadline = nil },
		"a short digest":   func(c *meshv1.IdempotencyRecord) { c.Digest = []byte("x") },
		"no state":         func(c *meshv1.IdempotencyRecord) { c.State = 0 },
		"an unknown state": func(c *meshv1.IdempotencyRecord) { c.State = 99 },
		"unknown durable":  func(c *meshv1.IdempotencyRecord) { c.Durability = 99 },
		"nothing at all":   func(c *meshv1.IdempotencyRecord) { proto.Reset(c) },
		"a time out of all": func(c *meshv1.IdempotencyRecord) {
			c.Deadline = timestamppb.New(time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC))
		},
	} {
		claim := whole()
		edit(claim)
		data, err := proto.Marshal(claim)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := envelope.DecodeClaim(data); got != nil || !errors.Is(err, envelope.ErrMalformed) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	if got, err := envelope.DecodeClaim([]byte("\xff\xff")); got != nil || !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("garbage: got %v, %v", got, err)
	}
}

func TestDurableAndIdempotentResultsAndThoseOfJobsAreStored(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		durability pipeline.Durability
		key        string
		isOfJob    bool
		want       bool
	}{
		{pipeline.Memory, "", false, false},
		{pipeline.Memory, "key", false, true},
		{pipeline.Memory, "", true, true},
		{pipeline.File, "", false, true},
		{pipeline.File, "key", false, true},
	} {
		e := envelope.Envelope{Durability: test.durability, IdempotencyKey: test.key, StoreResult: test.isOfJob}
		if got := e.StoresResult(); got != test.want {
			t.Errorf("%s, %q, %t: %t", test.durability, test.key, test.isOfJob, got)
		}
	}
}
