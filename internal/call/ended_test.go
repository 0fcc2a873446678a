package call_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestEndedKeepsNoMoreThanItsLimit(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	const gateways, each, limit = 8, 20, 5
	begin := time.Now()
	sub, err := b.nc.Subscribe(b.host.RequestsSubject(), func(msg *nats.Msg) {
		for gateway := range gateways {
			answer := &meshv1.InFlightAnswer{Gateway: fmt.Sprint("other-", gateway)}
			for n := range each {
				answer.Reports = append(answer.Reports, &meshv1.RequestReport{
					RequestId: fmt.Sprintf("%d/%d", gateway, n), Source: meshv1.RequestSource_REQUEST_SOURCE_GATEWAY,
					AdmittedAt: timestamppb.New(begin.Add(time.Duration(gateway-n*gateways) * time.Second)),
				})
			}
			data, _ := proto.Marshal(answer)
			_ = msg.Respond(data)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "all gateways answer in time", func() bool {
		got := b.service.Ended(t.Context(), false, "", limit)
		for i, r := range got {
			if want := fmt.Sprintf("%d/0", gateways-1-i); r.GetRequestId() != want {
				return false
			}
		}
		for _, r := range got[len(got):cap(got)] {
			if r != nil {
				t.Fatalf("keeps the report of %s, which it does not return", r.GetRequestId())
			}
		}
		return len(got) == limit
	})
}
