package envelope_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
)

func TestCancelRoundTrips(t *testing.T) {
	t.Parallel()
	want := envelope.Cancel{Mesh: "test", Tenant: "tenant", RequestID: "0190a000-0000-7000-8000-000000000001", Deadline: time.Unix(1000, 500).UTC()}
	data, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := envelope.DecodeCancel(data)
	if err != nil || *got != want {
		t.Errorf("got %+v and %v, want %+v", got, err, want)
	}
}

func TestMeaninglessCancelIsRejected(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]envelope.Cancel{
		"no request":               {Deadline: time.Unix(1000, 0)},
		"an id that is not a UUID": {RequestID: "x", Deadline: time.Unix(1000, 0)},
		"a tenant of no name":      {Tenant: "Tenant", RequestID: "0190a000-0000-7000-8000-000000000001", Deadline: time.Unix(1000, 0)},
		"a deadline that is none":  {RequestID: "0190a000-0000-7000-8000-000000000001", Deadline: time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		data, err := c.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := envelope.DecodeCancel(data); !errors.Is(err, envelope.ErrMalformed) {
			t.Errorf("%s: %v, want %v", name, err, envelope.ErrMalformed)
		}
	}
	if _, err := envelope.DecodeCancel([]byte("\xff\xff")); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("garbage: %v, want %v", err, envelope.ErrMalformed)
	}
}
