package bus

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Subjects builds the names that one mesh uses on the broker. Mesh, stage and
// gateway names are DNS labels, and ids are UUIDs, so every name is a valid
// token and no two meshes collide.
type Subjects struct{ mesh pipeline.MeshName }

// SubjectsOf returns the names of one mesh.
func SubjectsOf(mesh pipeline.MeshName) Subjects { return Subjects{mesh: mesh} }

// Stage is the subject of a stage's items of a class.
func (s Subjects) Stage(stage pipeline.StageName, d pipeline.Durability, c pipeline.Class) string {
	return string(s.mesh) + ".stage." + string(stage) + "." + string(d) + "." + string(c)
}

// Stream is the name of the stream that holds a stage's items.
func (s Subjects) Stream(stage pipeline.StageName, d pipeline.Durability) string {
	return string(s.mesh) + "_" + string(stage) + "_" + string(d)
}

// Reply is the subject of the replies to an execution.
func (s Subjects) Reply(gateway pipeline.GatewayID, execution pipeline.ExecutionID) string {
	return string(s.mesh) + ".reply." + string(gateway) + "." + string(execution)
}

// Replies matches every reply for a gateway.
func (s Subjects) Replies(gateway pipeline.GatewayID) string { return s.Reply(gateway, "*") }

// Execution returns the execution of a reply's subject.
func (s Subjects) Execution(gateway pipeline.GatewayID, subject string) pipeline.ExecutionID {
	return pipeline.ExecutionID(strings.TrimPrefix(subject, s.Reply(gateway, "")))
}

// Alive is the subject on which hosts of a stage answer that they serve it.
func (s Subjects) Alive(stage pipeline.StageName) string {
	return string(s.mesh) + ".alive." + string(stage)
}

// Failing is the subject on which hosts of a stage whose runner cannot run answer why.
func (s Subjects) Failing(stage pipeline.StageName) string {
	return string(s.mesh) + ".failing." + string(stage)
}

// InFlightSubject is the subject on which hosts of a stage answer that they may
// have items in flight.
func (s Subjects) InFlightSubject(stage pipeline.StageName) string {
	return string(s.mesh) + ".holding." + string(stage)
}

// Announced is the subject on which hosts of a stage announce themselves to each other.
func (s Subjects) Announced(stage pipeline.StageName) string {
	return string(s.mesh) + ".present." + string(stage)
}

// Cancel is the subject of cancel messages.
func (s Subjects) Cancel() string { return string(s.mesh) + ".cancel" }

// Metrics is the subject on which processes answer with their metrics.
func (s Subjects) Metrics() string { return string(s.mesh) + ".metrics" }

// ExplainSubject is the subject on which gateways and hosts answer what they know of a
// request.
func (s Subjects) ExplainSubject() string { return string(s.mesh) + ".explain" }

// RequestsSubject is the subject on which gateways and hosts answer which requests they have.
func (s Subjects) RequestsSubject() string { return string(s.mesh) + ".requests" }

// DemandSubject is the subject on which hosts and gateways answer what load stages have.
func (s Subjects) DemandSubject() string { return string(s.mesh) + ".demand" }

// ActivatingSubject is the subject on which gateways say that requests wait for the first host of a
// stage.
func (s Subjects) ActivatingSubject() string { return string(s.mesh) + ".activating" }

// Scale is the subject of how many hosts a stage should have for a target.
func (s Subjects) Scale(stage pipeline.StageName, target string) string {
	return string(s.mesh) + ".scale." + string(stage) + "." + strings.ReplaceAll(target, ".", "_")
}

// ScaleStream is the name of the stream that holds them.
func (s Subjects) ScaleStream() string { return string(s.mesh) + "_scale" }

// Result is the subject of a request's stored result.
func (s Subjects) Result(request pipeline.RequestID) string {
	return string(s.mesh) + ".result." + string(request)
}

// Results matches the results of all requests.
func (s Subjects) Results() string { return s.Result("*") }

// Graph is the subject of the record of a durable request with blocks, in the stream of results.
func (s Subjects) Graph(request pipeline.RequestID) string {
	return s.Result("graph." + request)
}

// Graphs matches the records of all such requests.
func (s Subjects) Graphs() string { return s.Graph("*") }

// ResultStream is the name of the stream that holds them.
func (s Subjects) ResultStream() string { return string(s.mesh) + "_results" }

// StoreProbeStream is the name of the stream that shows whether the broker stores files.
func (s Subjects) StoreProbeStream() string { return string(s.mesh) + "_store_probe" }

func (s Subjects) storeProbe() string { return string(s.mesh) + ".storeprobe" }

// Claim is the subject of an idempotency key's record. A key is any text, so the
// subject has a hash of it.
func (s Subjects) Claim(tenant string, p pipeline.Name, key string) string {
	h := sha256.New()
	for _, text := range []string{tenant, string(p), key} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(text))))
		h.Write([]byte(text))
	}
	return s.claim(hex.EncodeToString(h.Sum(nil)))
}

// Claims matches the records of all keys.
func (s Subjects) Claims() string { return s.claim("*") }

func (s Subjects) claim(key string) string { return string(s.mesh) + ".claim." + key }

// ClaimStream is the name of the stream that holds them.
func (s Subjects) ClaimStream() string { return string(s.mesh) + "_claims" }

// RunRecordSubject is the subject of the run records of an execution's step.
func (s Subjects) RunRecordSubject(execution pipeline.ExecutionID, position int) string {
	return s.runRecord(string(execution), strconv.Itoa(position))
}

// RunRecordSubjects matches the run records of all executions.
func (s Subjects) RunRecordSubjects() string { return s.runRecord("*", "*") }

func (s Subjects) runRecord(execution, position string) string {
	return string(s.mesh) + ".start." + execution + "." + position
}

// RunRecordStream is the name of the stream that holds them.
func (s Subjects) RunRecordStream() string { return string(s.mesh) + "_starts" }

// Job is the subject of a job in its queue.
func (s Subjects) Job(id pipeline.JobID, tenant string) string {
	return s.jobSubject("job", string(id.Queue), tenantToken(tenant), id.UUID.String())
}

// Jobs matches all jobs of a queue, of one tenant or, for "*", of all.
func (s Subjects) Jobs(queue pipeline.QueueName, tenant string) string {
	return s.jobSubject("job", string(queue), tenantToken(tenant), "*")
}

// JobStream is the name of the stream that is a queue of jobs.
func (s Subjects) JobStream(queue pipeline.QueueName) string {
	return string(s.mesh) + "_jobs_" + string(queue)
}

// JobRecord is the subject of what became of a job.
func (s Subjects) JobRecord(id pipeline.JobID, tenant string) string {
	return s.jobSubject("jobrecord", string(id.Queue), tenantToken(tenant), id.UUID.String())
}

// JobRecords matches the records of a queue's jobs, of one tenant or all; "*" is any queue.
func (s Subjects) JobRecords(queue pipeline.QueueName, tenant string) string {
	return s.jobSubject("jobrecord", string(queue), tenantToken(tenant), "*")
}

// JobRecordStream is the name of the stream that holds them.
func (s Subjects) JobRecordStream() string { return string(s.mesh) + "_job_records" }

// JobChunks is the subject of the chunks of a job's answer.
func (s Subjects) JobChunks(id pipeline.JobID, tenant string) string {
	return s.jobSubject("jobevent", string(id.Queue), tenantToken(tenant), id.UUID.String())
}

// AllJobChunks matches the chunks of all jobs.
func (s Subjects) AllJobChunks() string { return s.jobSubject("jobevent", "*", "*", "*") }

// JobChunkStream is the name of the stream that holds them.
func (s Subjects) JobChunkStream() string { return string(s.mesh) + "_job_events" }

// JobChanges matches all that is published about a job.
func (s Subjects) JobChanges(id pipeline.JobID, tenant string) string {
	return s.jobSubject("*", string(id.Queue), tenantToken(tenant), id.UUID.String())
}

// JobOf returns the job and the tenant of a subject of Job or JobRecord.
func (s Subjects) JobOf(subject string) (id pipeline.JobID, tenant string, ok bool) {
	queue, tenant, text := s.BatchRecordOf(subject)
	id, err := pipeline.ParseJobID(queue + "." + text)
	return id, tenant, err == nil
}

// JobCancel is the subject on which gateways say that a job was cancelled.
func (s Subjects) JobCancel() string { return string(s.mesh) + ".jobcancel" }

// JobRequests matches the requests of tenants about their jobs, "<method>" or "<method>.<queue>"
// after the tenant.
func (s Subjects) JobRequests() string { return string(s.mesh) + ".jobs.*.>" }

// JobRequestOf returns the tenant and the method of a request's subject.
func (s Subjects) JobRequestOf(subject string) (tenant, method string) {
	tenant, method, _ = strings.Cut(strings.TrimPrefix(subject, string(s.mesh)+".jobs."), ".")
	return tenant, method
}

// JobEnd is the subject on which the ends of a tenant's jobs in a queue are published.
func (s Subjects) JobEnd(queue pipeline.QueueName, tenant string) string {
	return string(s.mesh) + ".jobends." + tenantToken(tenant) + "." + string(queue)
}

// keyValueStream and keyValueEntry are the stream of a bucket, and the subject of a key in it.
func keyValueStream(bucket string) string     { return "KV_" + bucket }
func keyValueEntry(bucket, key string) string { return "$KV." + bucket + "." + key }

// JobPool is the subject on which the owner of a pool of jobs answers how it stands.
func (s Subjects) JobPool(pool string) string { return string(s.mesh) + ".jobpool." + pool }

// JobControl is the subject of a value that dispatchers share, such as the lease of a pool;
// "*" matches any.
func (s Subjects) JobControl(kind, name string) string {
	return string(s.mesh) + ".jobcontrol." + kind + "." + name
}

// JobControlStream is the name of the stream that holds them.
func (s Subjects) JobControlStream() string { return string(s.mesh) + "_job_control" }

// BatchRecord is the subject of the record of a batch or a file; "*" matches any.
func (s Subjects) BatchRecord(kind, tenant, id string) string {
	return s.jobSubject("batch", kind, tenantToken(tenant), id)
}

// BatchRecordOf returns what a subject of BatchRecord was made of.
func (s Subjects) BatchRecordOf(subject string) (kind, tenant, id string) {
	tokens := strings.Split(subject, ".")
	const first, of, last, count = 2, 3, 4, 5
	if len(tokens) != count {
		return "", "", ""
	}
	return tokens[first], strings.TrimPrefix(tokens[of], noTenant), tokens[last]
}

// tenantHeader names the tenant of a message whose subject does not.
const tenantHeader = "Tenant"

// TenantHeader returns the header that names a tenant; nil for none.
func TenantHeader(tenant string) nats.Header {
	if tenant == "" {
		return nil
	}
	return nats.Header{tenantHeader: {tenant}}
}

// TenantOf returns the tenant of a stored message, by its subject or its header.
func (s Subjects) TenantOf(subject string, h nats.Header) string {
	if _, tenant, _ := s.BatchRecordOf(subject); tenant != "" {
		return tenant
	}
	return h.Get(tenantHeader)
}

// BatchRecordStream is the name of the stream that holds them.
func (s Subjects) BatchRecordStream() string { return string(s.mesh) + "_batches" }

// FileData is the subject of the bytes of a file; "*" matches any.
func (s Subjects) FileData(id string) string { return string(s.mesh) + ".filedata." + id }

// FileDataStream is the name of the stream that holds them.
func (s Subjects) FileDataStream() string { return string(s.mesh) + "_file_data" }

func (s Subjects) jobSubject(kind, queue, tenant, id string) string {
	return string(s.mesh) + "." + kind + "." + queue + "." + tenant + "." + id
}

// noTenant is the token of callers without a tenant, which no tenant's name is.
const noTenant = "_"

func tenantToken(tenant string) string {
	if tenant == "" {
		return noTenant
	}
	return tenant
}

// DeadLetterSubject is the subject of a stage's dead letters.
func (s Subjects) DeadLetterSubject(stage pipeline.StageName) string {
	return string(s.mesh) + ".dead." + string(stage)
}

// DeadJobSubject is the subject of a queue's dead jobs. No stage has such a name.
func (s Subjects) DeadJobSubject(queue pipeline.QueueName) string {
	return s.DeadLetterSubject("queue:" + pipeline.StageName(queue))
}

// DeadLetterStream is the name of the stream that holds them.
func (s Subjects) DeadLetterStream() string { return string(s.mesh) + "_dead" }
