package fault_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestEveryReasonIsClassified(t *testing.T) {
	t.Parallel()
	for _, r := range fault.Reasons() {
		class := fault.Classify(r)
		if _, known := code.Code_name[int32(class.Code)]; !known || class.Code == code.Code_OK {
			t.Errorf("%s: code %v", r, class.Code)
		}
		if class.HTTP < 400 || class.HTTP > 599 || class.Meaning == "" {
			t.Errorf("%s: %+v", r, class)
		}
		f := fault.New(r, "m")
		if f.GRPCCode() != class.Code || f.HTTPStatus() != class.HTTP || f.Retryable() != class.Retryable {
			t.Errorf("%s: a fault says %v %d %v", r, f.GRPCCode(), f.HTTPStatus(), f.Retryable())
		}
		if class.Refused() && (!class.NotRun() || !class.Retryable) || class.AdminOnly && class.Retryable {
			t.Errorf("%s: %+v", r, class)
		}
	}
	if got, want := fault.Classify("NO_SUCH_REASON"), fault.Classify(fault.Internal); got != want {
		t.Errorf("an unknown reason is %+v", got)
	}
}

// Shadow requests count as dropped where the mesh could not run them, jobs wait where it refused them.
func TestReasonsOfRequestsThatDidNotRun(t *testing.T) {
	t.Parallel()
	var notRun, refused []fault.Reason
	for _, r := range fault.Reasons() {
		switch class := fault.Classify(r); {
		case class.Refused():
			refused = append(refused, r)
		case class.NotRun():
			notRun = append(notRun, r)
		}
	}
	if got, want := fmt.Sprint(refused), "[BROKER_UNAVAILABLE NO_CAPACITY OVERLOADED QUEUE_FULL REGISTRY_UNAVAILABLE SHUTTING_DOWN STORE_FULL]"; got != want {
		t.Errorf("%s are refused, want %s", got, want)
	}
	if got, want := fmt.Sprint(notRun), "[CACHE_FULL MODEL_LOADING NOT_SUPPORTED QUEUE_LOST UNKNOWN_MODEL UNKNOWN_PIPELINE]"; got != want {
		t.Errorf("%s did not run, want %s", got, want)
	}
}

func TestFromFindsTheFault(t *testing.T) {
	t.Parallel()
	known := fault.New(fault.QueueFull, "full")
	for name, row := range map[string]struct {
		err  error
		want fault.Reason
	}{
		"a fault":          {known, fault.QueueFull},
		"a wrapped fault":  {fmt.Errorf("publish: %w", known), fault.QueueFull},
		"a joined fault":   {errors.Join(errors.New("x"), known), fault.QueueFull},
		"a deadline":       {fmt.Errorf("wait: %w", context.DeadlineExceeded), fault.DeadlineExceeded},
		"a cancellation":   {fmt.Errorf("wait: %w", context.Canceled), fault.Cancelled},
		"a fault of a end": {fault.Newf(fault.NoCapacity, "wait: %w", context.Canceled), fault.NoCapacity},
		"anything else":    {errors.New("password is 1234"), fault.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := fault.From(row.err)
			if got.Reason != row.want {
				t.Errorf("got %v", got)
			}
			if !errors.Is(got, row.err) && !errors.Is(row.err, got) {
				t.Errorf("the chain from %v is lost", row.err)
			}
		})
	}
	if got := fault.From(errors.New("password is 1234")).Message; got != fault.From(errors.New("other")).Message {
		t.Errorf("an internal error says %q", got)
	}
}

func TestNewfKeepsTheCause(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	f := fault.Newf(fault.InvalidInput, "inputs.x: %w", cause)
	if !errors.Is(f, cause) || f.Message != "inputs.x: cause" || f.Error() != "INVALID_INPUT: inputs.x: cause" {
		t.Errorf("got %v", f)
	}
	if got := f.At("resnet", "", "").Error(); got != "INVALID_INPUT at stage resnet: inputs.x: cause" {
		t.Errorf("got %s", got)
	}
}

func TestWithReturnsCopies(t *testing.T) {
	t.Parallel()
	base := fault.New(fault.Overloaded, "m").WithViolation("a", "1").WithMetadata("k", "1")
	want := *base
	_ = base.WithViolation("b", "%d", 2)
	_ = base.WithMetadata("k", "2")
	_ = base.WithRetryAfter(time.Second)
	_ = base.At("s", "t", "h")
	if len(base.Violations) != 1 || base.Metadata["k"] != "1" || base.RetryAfter != want.RetryAfter || base.Stage != "" {
		t.Errorf("the original became %+v", base)
	}
	first := base.At("s", "t", "h")
	if again := first.At("x", "y", "z"); again.Stage != "s" || again.Step != "t" || again.Host != "h" {
		t.Errorf("where it happened first is lost: %+v", again)
	}
}

func TestRunnerCodeReplacesReasonCode(t *testing.T) {
	t.Parallel()
	for chosen, want := range map[code.Code]int{
		code.Code_INVALID_ARGUMENT: 400, code.Code_FAILED_PRECONDITION: 400, code.Code_OUT_OF_RANGE: 400,
		code.Code_UNAUTHENTICATED: 401, code.Code_PERMISSION_DENIED: 403, code.Code_NOT_FOUND: 404,
		code.Code_ALREADY_EXISTS: 409, code.Code_ABORTED: 409, code.Code_RESOURCE_EXHAUSTED: 429,
		code.Code_CANCELLED: 499, code.Code_UNIMPLEMENTED: 501, code.Code_UNAVAILABLE: 503,
		code.Code_DEADLINE_EXCEEDED: 504, code.Code_UNKNOWN: 500, code.Code_DATA_LOSS: 500,
		code.Code_INTERNAL: http.StatusInternalServerError,
	} {
		f := fault.New(fault.RunnerFailed, "m")
		f.Code = chosen
		if f.GRPCCode() != chosen || f.HTTPStatus() != want {
			t.Errorf("%v: got %v %d, want %d", chosen, f.GRPCCode(), f.HTTPStatus(), want)
		}
	}
	kept := fault.New(fault.SchemaViolation, "m")
	kept.Code = code.Code_INVALID_ARGUMENT
	if kept.HTTPStatus() != http.StatusUnprocessableEntity {
		t.Errorf("the reason's own code must leave it its status, got %d", kept.HTTPStatus())
	}
}

func TestFaultRoundTrips(t *testing.T) {
	t.Parallel()
	sent := fault.New(fault.RunnerFailed, "m").At("s", "t", "h").WithRetryAfter(time.Second).
		WithViolation("inputs.x", "bad").WithMetadata("k", "v")
	sent.Code = code.Code_NOT_FOUND
	if got := fault.FromProto(sent.ToProto()); !reflect.DeepEqual(got, sent) {
		t.Errorf("got %+v, want %+v", got, sent)
	}
}

func TestInvalidFieldsOfHostFaultsAreCorrected(t *testing.T) {
	t.Parallel()
	got := fault.FromProto(&meshv1.Fault{Code: 77, RetryAfter: durationpb.New(-time.Second)})
	if got.Reason != fault.Internal || got.GRPCCode() != code.Code_INTERNAL || got.RetryAfter != 0 {
		t.Errorf("got %+v", got)
	}
	if got := fault.FromProto(nil); got.Reason != fault.Internal {
		t.Errorf("of nothing: %+v", got)
	}
}

func TestDetailsHaveAllKnownFacts(t *testing.T) {
	t.Parallel()
	if got := details(t, fault.New(fault.Internal, "m")); len(got) != 1 {
		t.Errorf("a bare fault has %v", got)
	}
	got := details(t, fault.New(fault.InvalidInput, "m").At("s", "t", "h").WithRetryAfter(time.Second).
		WithViolation("inputs.x", "bad").WithMetadata("k", "v"))
	if len(got) != 3 {
		t.Fatalf("got %v", got)
	}
	info, _ := got[0].(*errdetails.ErrorInfo)
	want := map[string]string{"k": "v", "stage": "s", "step": "t", "host": "h"}
	if info.GetReason() != "INVALID_INPUT" || info.GetDomain() != fault.Domain || !reflect.DeepEqual(info.GetMetadata(), want) {
		t.Errorf("ErrorInfo %v", info)
	}
	if retry, _ := got[1].(*errdetails.RetryInfo); retry.GetRetryDelay().AsDuration() != time.Second {
		t.Errorf("RetryInfo %v", got[1])
	}
	if bad, _ := got[2].(*errdetails.BadRequest); bad.GetFieldViolations()[0].GetField() != "inputs.x" {
		t.Errorf("BadRequest %v", got[2])
	}
}

// details returns the messages that go with the fault's status.
func details(t *testing.T, f *fault.Fault) []proto.Message {
	t.Helper()
	var out []proto.Message
	for _, detail := range f.Status().GetDetails() {
		message, err := detail.UnmarshalNew()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, message)
	}
	return out
}

func TestLabelsAreBounded(t *testing.T) {
	t.Parallel()
	for _, r := range fault.Reasons() {
		if r.Label() != string(r) {
			t.Errorf("%s is labelled %s", r, r.Label())
		}
	}
	if got := fault.Reason("made up").Label(); got != "OTHER" {
		t.Errorf("one that is made up is labelled %s", got)
	}
}
