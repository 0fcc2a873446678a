package bus

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Subjects builds the names that one mesh uses on the broker. Mesh, stage and
// gateway names are DNS labels, and ids are UUIDs, so every name is a valid
// token and no two meshes collide.
type Subjects struct{ mesh pipeline.MeshName }

// SubjectsOf returns the names of one mesh.
func SubjectsOf(mesh pipeline.MeshName) Subjects { return Subjects{mesh: mesh} }

// Stage is where items of a class wait for a stage.
func (s Subjects) Stage(stage pipeline.StageName, d pipeline.Durability, c pipeline.Class) string {
	return string(s.mesh) + ".stage." + string(stage) + "." + string(d) + "." + string(c)
}

// Next is where the item goes that waits for its hop: the one place that
// chooses a destination.
func (s Subjects) Next(hop pipeline.Hop, d pipeline.Durability, c pipeline.Class) string {
	return s.Stage(hop.Stage, d, c)
}

// Stream is the name of the stream that holds a stage's items.
func (s Subjects) Stream(stage pipeline.StageName, d pipeline.Durability) string {
	return string(s.mesh) + "_" + string(stage) + "_" + string(d)
}

// Reply is where the answer to an execution goes.
func (s Subjects) Reply(gateway pipeline.GatewayID, execution pipeline.ExecutionID) string {
	return s.replies(gateway) + string(execution)
}

// Replies matches every answer for a gateway.
func (s Subjects) Replies(gateway pipeline.GatewayID) string { return s.replies(gateway) + "*" }

func (s Subjects) replies(gateway pipeline.GatewayID) string {
	return string(s.mesh) + ".reply." + string(gateway) + "."
}

// Execution returns the execution that a reply's subject names.
func (s Subjects) Execution(gateway pipeline.GatewayID, subject string) pipeline.ExecutionID {
	return pipeline.ExecutionID(strings.TrimPrefix(subject, s.replies(gateway)))
}

// Alive is where hosts of a stage answer that they are there.
func (s Subjects) Alive(stage pipeline.StageName) string {
	return string(s.mesh) + ".alive." + string(stage)
}

// Holding is where hosts of a stage answer that they may have items in hand.
func (s Subjects) Holding(stage pipeline.StageName) string {
	return string(s.mesh) + ".holding." + string(stage)
}

// Cancel is where executions are called off.
func (s Subjects) Cancel() string { return string(s.mesh) + ".cancel" }

// Result is where a request's terminal answer is stored.
func (s Subjects) Result(request pipeline.RequestID) string {
	return string(s.mesh) + ".result." + string(request)
}

// Results matches the stored answers of all requests.
func (s Subjects) Results() string { return s.Result("*") }

// ResultStream is the name of the stream that holds them.
func (s Subjects) ResultStream() string { return string(s.mesh) + "_results" }

// Claim is where it is on record which request has an idempotency key. A key is
// any text, so the subject has a hash of it.
func (s Subjects) Claim(tenant string, p pipeline.Name, key string) string {
	h := sha256.New()
	for _, text := range []string{tenant, string(p), key} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(text))))
		h.Write([]byte(text))
	}
	return s.claims() + hex.EncodeToString(h.Sum(nil))
}

// Claims matches the records of all keys.
func (s Subjects) Claims() string { return s.claims() + "*" }

func (s Subjects) claims() string { return string(s.mesh) + ".claim." }

// ClaimStream is the name of the stream that holds them.
func (s Subjects) ClaimStream() string { return string(s.mesh) + "_claims" }

// Start is where it is on record that runs of an execution's step have started.
func (s Subjects) Start(execution pipeline.ExecutionID, position int) string {
	return s.starts() + string(execution) + "." + strconv.Itoa(position)
}

// Starts matches the records of all executions.
func (s Subjects) Starts() string { return s.starts() + "*.*" }

func (s Subjects) starts() string { return string(s.mesh) + ".start." }

// StartStream is the name of the stream that holds them.
func (s Subjects) StartStream() string { return string(s.mesh) + "_starts" }

// Dead is where the letters about a stage's items go that the mesh gave up on.
func (s Subjects) Dead(stage pipeline.StageName) string {
	return string(s.mesh) + ".dead." + string(stage)
}

// DeadStream is the name of the stream that holds them.
func (s Subjects) DeadStream() string { return string(s.mesh) + "_dead" }
