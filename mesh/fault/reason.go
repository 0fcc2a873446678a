package fault

import (
	"maps"
	"net/http"
	"slices"

	"google.golang.org/genproto/googleapis/rpc/code"
)

// Reason is the machine-readable name of a kind of failure. It is stable:
// clients may branch on it.
type Reason string

// The reasons, in the order of a request's life.
const (
	UnknownPipeline     Reason = "UNKNOWN_PIPELINE"
	UnknownQueue        Reason = "UNKNOWN_QUEUE"
	InvalidRequest      Reason = "INVALID_REQUEST"
	InvalidInput        Reason = "INVALID_INPUT"
	SchemaViolation     Reason = "SCHEMA_VIOLATION"
	UnsupportedMedia    Reason = "UNSUPPORTED_MEDIA_TYPE"
	PayloadTooLarge     Reason = "PAYLOAD_TOO_LARGE"
	NotSupported        Reason = "NOT_SUPPORTED"
	Unauthenticated     Reason = "UNAUTHENTICATED"
	PermissionDenied    Reason = "PERMISSION_DENIED"
	NotFound            Reason = "NOT_FOUND"
	Gone                Reason = "GONE"
	IdempotencyMismatch Reason = "IDEMPOTENCY_MISMATCH"
	NotReplayable       Reason = "NOT_REPLAYABLE"
	RevisionMismatch    Reason = "REVISION_MISMATCH"
	PipelineDoesNotFit  Reason = "PIPELINE_DOES_NOT_FIT"
	UnknownModel        Reason = "UNKNOWN_MODEL"
	ModelExists         Reason = "MODEL_EXISTS"
	ModelInUse          Reason = "MODEL_IN_USE"
	ModelTooLarge       Reason = "MODEL_TOO_LARGE"
	InvalidModel        Reason = "INVALID_MODEL"
	AliasConflict       Reason = "ALIAS_CONFLICT"

	NoCapacity          Reason = "NO_CAPACITY"
	ModelLoading        Reason = "MODEL_LOADING"
	ModelLoadFailed     Reason = "MODEL_LOAD_FAILED"
	CacheFull           Reason = "CACHE_FULL"
	BrokerUnavailable   Reason = "BROKER_UNAVAILABLE"
	RegistryUnavailable Reason = "REGISTRY_UNAVAILABLE"
	QueueLost           Reason = "QUEUE_LOST"
	QueueFull           Reason = "QUEUE_FULL"
	StoreFull           Reason = "STORE_FULL"
	Overloaded          Reason = "OVERLOADED"
	ShuttingDown        Reason = "SHUTTING_DOWN"

	DeadlineExceeded Reason = "DEADLINE_EXCEEDED"
	Cancelled        Reason = "CANCELLED"

	TargetFailed        Reason = "TARGET_FAILED"
	RunnerFailed        Reason = "RUNNER_FAILED"
	RunnerCrashed       Reason = "RUNNER_CRASHED"
	RunnerStalled       Reason = "RUNNER_STALLED"
	AttemptsExhausted   Reason = "ATTEMPTS_EXHAUSTED"
	RunnerOutOfMemory   Reason = "RUNNER_OUT_OF_MEMORY"
	RunnerOutputInvalid Reason = "RUNNER_OUTPUT_INVALID"
	OutputTooLarge      Reason = "OUTPUT_TOO_LARGE"
	StreamInterrupted   Reason = "STREAM_INTERRUPTED"
	SlowReader          Reason = "SLOW_READER"

	Internal Reason = "INTERNAL"
)

// Class is how a reason appears on the wire.
type Class struct {
	// Code is the gRPC code.
	Code code.Code
	// HTTP is the status on plain HTTP.
	HTTP int
	// Retryable is true where the same request may succeed later.
	Retryable bool
	run       run
	// AdminOnly is true where no request on the public port fails like this.
	AdminOnly bool
	// Meaning is the sentence in the documentation.
	Meaning string
}

// NotRun reports whether the mesh could not run the request, whatever its inputs and models.
func (c Class) NotRun() bool { return c.run != mayRun }

// Refused reports whether nothing ran for want of capacity, so other requests fail likewise.
func (c Class) Refused() bool { return c.run == refused }

// run is what a reason tells of the mesh: mayRun is that the request failed by itself, or may have run.
type run int

// The words of the table.
const (
	mayRun run = iota
	notRun
	refused

	final, retryable   = false, true
	anyPort, adminOnly = false, true
)

const statusClientClosedRequest = 499

// classes is never written after start-up.
var classes = map[Reason]Class{
	UnknownPipeline:     {code.Code_NOT_FOUND, http.StatusNotFound, final, notRun, anyPort, "no pipeline of that name is served"},
	UnknownQueue:        {code.Code_NOT_FOUND, http.StatusNotFound, final, mayRun, anyPort, "no queue of jobs of that name is there"},
	InvalidRequest:      {code.Code_INVALID_ARGUMENT, http.StatusBadRequest, final, mayRun, anyPort, "the request itself is malformed: bad JSON, an unknown step, a negative timeout"},
	InvalidInput:        {code.Code_INVALID_ARGUMENT, http.StatusBadRequest, final, mayRun, anyPort, "an input cannot be used: not an image, a tensor of the wrong type or shape"},
	SchemaViolation:     {code.Code_INVALID_ARGUMENT, http.StatusUnprocessableEntity, final, mayRun, anyPort, "an input breaks the stage's schema"},
	UnsupportedMedia:    {code.Code_INVALID_ARGUMENT, http.StatusUnsupportedMediaType, final, mayRun, anyPort, "no stage or front takes that content type"},
	PayloadTooLarge:     {code.Code_INVALID_ARGUMENT, http.StatusRequestEntityTooLarge, final, mayRun, anyPort, "the request is over a size limit; refused before it is queued"},
	NotSupported:        {code.Code_UNIMPLEMENTED, http.StatusNotImplemented, final, notRun, anyPort, "this version does not do that"},
	Unauthenticated:     {code.Code_UNAUTHENTICATED, http.StatusUnauthorized, final, mayRun, anyPort, "credentials are missing or wrong"},
	PermissionDenied:    {code.Code_PERMISSION_DENIED, http.StatusForbidden, final, mayRun, anyPort, "the caller may not do that"},
	NotFound:            {code.Code_NOT_FOUND, http.StatusNotFound, final, mayRun, anyPort, "the thing named does not exist"},
	Gone:                {code.Code_NOT_FOUND, http.StatusGone, final, mayRun, anyPort, "the job is past its retention"},
	IdempotencyMismatch: {code.Code_ALREADY_EXISTS, http.StatusConflict, final, mayRun, anyPort, "the idempotency key was used with another payload"},
	NotReplayable:       {code.Code_FAILED_PRECONDITION, http.StatusBadRequest, final, mayRun, adminOnly, "the dead letter holds no item that could be run again"},

	RevisionMismatch:   {code.Code_ABORTED, http.StatusConflict, final, mayRun, anyPort, "the pipeline was changed meanwhile, or others keep changing the record of a model"},
	PipelineDoesNotFit: {code.Code_FAILED_PRECONDITION, http.StatusBadRequest, final, mayRun, adminOnly, "a pipeline's stages are not known, or do not fit together"},

	UnknownModel:    {code.Code_NOT_FOUND, http.StatusNotFound, final, notRun, anyPort, "no model or alias of that name is registered, or another owner has the alias"},
	ModelExists:     {code.Code_ALREADY_EXISTS, http.StatusConflict, final, mayRun, adminOnly, "a model of that ID is registered with other attributes"},
	ModelInUse:      {code.Code_FAILED_PRECONDITION, http.StatusBadRequest, final, mayRun, adminOnly, "an alias points at the model"},
	ModelTooLarge:   {code.Code_FAILED_PRECONDITION, http.StatusBadRequest, final, mayRun, anyPort, "the model is larger than the memory for models of any host"},
	InvalidModel:    {code.Code_FAILED_PRECONDITION, http.StatusBadRequest, final, mayRun, anyPort, "the model cannot be loaded: its source is missing or broken"},
	ModelLoading:    {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, notRun, anyPort, "the model is being loaded, and the request's time does not suffice for that"},
	ModelLoadFailed: {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, mayRun, anyPort, "hosts have failed to load the model lately"},
	CacheFull:       {code.Code_RESOURCE_EXHAUSTED, http.StatusTooManyRequests, retryable, notRun, anyPort, "all memory for models has models in use, or too many loads wait"},
	AliasConflict:   {code.Code_ABORTED, http.StatusConflict, final, mayRun, adminOnly, "the alias has another owner, or another model than expected"},

	NoCapacity:          {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, refused, anyPort, "a stage on the route has no live host, or the gateway's clock is off"},
	BrokerUnavailable:   {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, refused, anyPort, "the broker cannot be reached; the request was not queued"},
	RegistryUnavailable: {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, refused, anyPort, "the mesh's registry cannot be reached; changes need it, and so does a gateway that has not read it yet"},
	QueueLost:           {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, notRun, anyPort, "the in-memory queue that held the request was lost with its broker"},
	QueueFull:           {code.Code_RESOURCE_EXHAUSTED, http.StatusTooManyRequests, retryable, refused, anyPort, "a stage's queue is full"},
	StoreFull:           {code.Code_RESOURCE_EXHAUSTED, http.StatusTooManyRequests, retryable, refused, anyPort, "the broker stores nothing more: its disk, a store's max_bytes or the account's limit is full; requests in memory go on"},
	Overloaded:          {code.Code_RESOURCE_EXHAUSTED, http.StatusTooManyRequests, retryable, refused, anyPort, "the gateway or host has as many requests in flight, or the mesh as many idempotency keys or stored results, as it may"},
	ShuttingDown:        {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, retryable, refused, anyPort, "the process asked is stopping"},

	DeadlineExceeded: {code.Code_DEADLINE_EXCEEDED, http.StatusGatewayTimeout, retryable, mayRun, anyPort, "the deadline passed before the answer"},
	Cancelled:        {code.Code_CANCELLED, statusClientClosedRequest, final, mayRun, anyPort, "the caller went away or cancelled"},

	TargetFailed:        {code.Code_UNAVAILABLE, http.StatusBadGateway, retryable, mayRun, anyPort, "the HTTP target of a job failed, or could not be reached"},
	RunnerFailed:        {code.Code_INTERNAL, http.StatusInternalServerError, final, mayRun, anyPort, "the stage's code failed on this item"},
	RunnerCrashed:       {code.Code_INTERNAL, http.StatusInternalServerError, final, mayRun, anyPort, "the item ends the process that runs it"},
	RunnerStalled:       {code.Code_DEADLINE_EXCEEDED, http.StatusGatewayTimeout, retryable, mayRun, anyPort, "the stage's code sent no part of a streamed answer in the time that the stage gives it"},
	AttemptsExhausted:   {code.Code_INTERNAL, http.StatusInternalServerError, final, mayRun, anyPort, "hosts got the item as often as may be, and none finished it"},
	RunnerOutOfMemory:   {code.Code_RESOURCE_EXHAUSTED, http.StatusTooManyRequests, retryable, mayRun, anyPort, "the item alone needs more memory than the runner has"},
	RunnerOutputInvalid: {code.Code_INTERNAL, http.StatusInternalServerError, final, mayRun, anyPort, "the stage's code answered with something that is not valid output"},
	OutputTooLarge:      {code.Code_INTERNAL, http.StatusInternalServerError, final, mayRun, anyPort, "a stage's output is over the broker's message limit"},
	StreamInterrupted:   {code.Code_UNAVAILABLE, http.StatusServiceUnavailable, final, mayRun, anyPort, "a streamed answer broke after its first chunk; it is never rerun by itself"},
	SlowReader:          {code.Code_RESOURCE_EXHAUSTED, http.StatusTooManyRequests, final, mayRun, anyPort, "the caller reads a streamed answer too slowly"},

	Internal: {code.Code_INTERNAL, http.StatusInternalServerError, final, mayRun, anyPort, "a defect of the mesh; see its logs by the request id"},
}

// Classify returns the class of a reason. A reason outside the vocabulary has the class of
// Internal.
func Classify(r Reason) Class {
	if c, ok := classes[r]; ok {
		return c
	}
	return classes[Internal]
}

// Label is the value of a metric's label for the reason: anybody on the bus can
// make up others.
func (r Reason) Label() string {
	if _, ok := classes[r]; ok {
		return string(r)
	}
	return "OTHER"
}

// Reasons returns the vocabulary, sorted.
func Reasons() []Reason { return slices.Sorted(maps.Keys(classes)) }

// httpStatuses are the statuses of gRPC codes that a runner chose itself, as google.rpc.Code
// documents them. Any other code is an internal error.
var httpStatuses = map[code.Code]int{
	code.Code_CANCELLED:           statusClientClosedRequest,
	code.Code_INVALID_ARGUMENT:    http.StatusBadRequest,
	code.Code_FAILED_PRECONDITION: http.StatusBadRequest,
	code.Code_OUT_OF_RANGE:        http.StatusBadRequest,
	code.Code_UNAUTHENTICATED:     http.StatusUnauthorized,
	code.Code_PERMISSION_DENIED:   http.StatusForbidden,
	code.Code_NOT_FOUND:           http.StatusNotFound,
	code.Code_ALREADY_EXISTS:      http.StatusConflict,
	code.Code_ABORTED:             http.StatusConflict,
	code.Code_RESOURCE_EXHAUSTED:  http.StatusTooManyRequests,
	code.Code_UNIMPLEMENTED:       http.StatusNotImplemented,
	code.Code_UNAVAILABLE:         http.StatusServiceUnavailable,
	code.Code_DEADLINE_EXCEEDED:   http.StatusGatewayTimeout,
}
