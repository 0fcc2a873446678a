package envelope

import (
	"strings"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// Bounds on a fault in a reply. Its texts may be a runner's, of any length and
// bytes, and a fault that cannot be sent would leave its caller waiting.
const (
	maxMessage = 4 << 10 // bytes of the message
	maxText    = 512     // bytes of any other text
	maxFacts   = 32      // violations, and entries of metadata
)

// writeFault leaves the fault to the generated message: it is no hot path.
func writeFault(w *wire.Writer, f *fault.Fault) {
	data, err := proto.Marshal(faultToProto(f))
	w.Fail(replyFaultTag, err)
	start := w.Begin(replyFaultTag, len(data))
	w.Raw(data)
	w.End(start)
}

func faultToProto(f *fault.Fault) *meshv1.Fault {
	out := f.ToProto()
	out.Reason, out.Message = text(out.Reason, maxText), text(out.Message, maxMessage)
	out.Stage, out.Step, out.Host = text(out.Stage, maxText), text(out.Step, maxText), text(out.Host, maxText)
	out.Violations = out.Violations[:min(len(out.Violations), maxFacts)]
	for _, v := range out.Violations {
		v.Field, v.Description = text(v.Field, maxText), text(v.Description, maxText)
	}
	out.Metadata = facts(out.Metadata)
	return out
}

// text returns s in UTF-8, and its start only where it is long.
func text(s string, most int) string {
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func facts(in map[string]string) map[string]string {
	if len(in) == 0 {
		return nil
	}
	out := make(map[string]string, min(len(in), maxFacts))
	for key, value := range in {
		if len(out) == maxFacts {
			break
		}
		out[text(key, maxText)] = text(value, maxText)
	}
	return out
}
