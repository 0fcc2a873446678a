package fault

import (
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

// ToProto returns the fault as it travels inside the mesh.
func (f *Fault) ToProto() *meshv1.Fault {
	out := &meshv1.Fault{
		Code:     int32(f.GRPCCode()),
		Reason:   string(f.Reason),
		Message:  f.Message,
		Stage:    f.Stage,
		Step:     f.Step,
		Host:     f.Host,
		Metadata: f.Metadata,
	}
	for _, v := range f.Violations {
		out.Violations = append(out.Violations, &meshv1.FieldViolation{Field: v.Field, Description: v.Description})
	}
	if f.RetryAfter > 0 {
		out.RetryAfter = durationpb.New(f.RetryAfter)
	}
	return out
}

// FromProto returns the fault that a host sent. A message without a reason is
// Internal.
func FromProto(p *meshv1.Fault) *Fault {
	out := &Fault{
		Reason:   Reason(p.GetReason()),
		Message:  p.GetMessage(),
		Code:     code.Code(p.GetCode()),
		Stage:    p.GetStage(),
		Step:     p.GetStep(),
		Host:     p.GetHost(),
		Metadata: p.GetMetadata(),
	}
	if out.Reason == "" {
		out.Reason = Internal
	}
	if _, known := code.Code_name[p.GetCode()]; !known {
		out.Code = code.Code_OK
	}
	for _, v := range p.GetViolations() {
		out.Violations = append(out.Violations, Violation{Field: v.GetField(), Description: v.GetDescription()})
	}
	if p.GetRetryAfter().IsValid() {
		out.RetryAfter = max(0, p.GetRetryAfter().AsDuration())
	}
	return out
}

// Status returns the fault as the status of an RPC, with the google.rpc messages that are known:
// ErrorInfo always, RetryInfo where a pause is known, BadRequest where an input is at fault.
// Text that is not UTF-8 is replaced.
func (f *Fault) Status() *status.Status {
	out := &status.Status{Code: int32(f.GRPCCode()), Message: strings.ToValidUTF8(f.Message, "\uFFFD")}
	add := func(message proto.Message) {
		if detail, err := anypb.New(message); err == nil {
			out.Details = append(out.Details, detail)
		}
	}
	info := &errdetails.ErrorInfo{Reason: string(f.Reason), Domain: Domain, Metadata: map[string]string{}}
	for key, value := range f.Metadata {
		info.Metadata[key] = value
	}
	for key, value := range map[string]string{"stage": f.Stage, "step": f.Step, "host": f.Host} {
		if value != "" {
			info.Metadata[key] = value
		}
	}
	add(info)
	if f.RetryAfter > 0 {
		add(&errdetails.RetryInfo{RetryDelay: durationpb.New(f.RetryAfter)})
	}
	if len(f.Violations) > 0 {
		bad := &errdetails.BadRequest{}
		for _, v := range f.Violations {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: v.Field, Description: v.Description})
		}
		add(bad)
	}
	return out
}
