package envelope

import (
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// The fields of envelope.proto's Envelope.
const (
	meshTag           = 1<<3 | wire.Bytes
	tenantTag         = 2<<3 | wire.Bytes
	requestIDTag      = 3<<3 | wire.Bytes
	executionIDTag    = 4<<3 | wire.Bytes
	generationTag     = 5<<3 | wire.Varint
	attemptTag        = 6<<3 | wire.Varint
	gatewayTag        = 7<<3 | wire.Bytes
	pipelineTag       = 8<<3 | wire.Bytes
	routeTag          = 9<<3 | wire.Bytes
	positionTag       = 10<<3 | wire.Varint
	hopPathTag        = 11<<3 | wire.Bytes
	deadlineTag       = 12<<3 | wire.Bytes
	admittedAtTag     = 13<<3 | wire.Bytes
	durabilityTag     = 14<<3 | wire.Varint
	priorityTag       = 15<<3 | wire.Varint
	idempotencyKeyTag = 16<<3 | wire.Bytes
	traceTag          = 17<<3 | wire.Bytes
	metadataTag       = 18<<3 | wire.Bytes
	partsTag          = 19<<3 | wire.Bytes
	keptTag           = 20<<3 | wire.Bytes
	timingsTag        = 21<<3 | wire.Bytes
	claimsTag         = 22<<3 | wire.Bytes
	streamTag         = 23<<3 | wire.Bytes
	grpcTag           = 24<<3 | wire.Bytes
	takesChunksTag    = 25<<3 | wire.Varint
)

// The fields of envelope.proto's Step.
const (
	stepNameTag       = 1<<3 | wire.Bytes
	stepStageTag      = 2<<3 | wire.Bytes
	stepModelTag      = 3<<3 | wire.Bytes
	stepParametersTag = 4<<3 | wire.Bytes
	stepInputsTag     = 5<<3 | wire.Bytes
	stepKeepTag       = 6<<3 | wire.Bytes
	stepHostTag       = 7<<3 | wire.Bytes
)

// The fields of inference.proto's StepTiming.
const (
	timingStepTag      = 1<<3 | wire.Bytes
	timingStageTag     = 2<<3 | wire.Bytes
	timingHostTag      = 3<<3 | wire.Bytes
	timingAttemptTag   = 4<<3 | wire.Varint
	timingQueueWaitTag = 5<<3 | wire.Bytes
	timingBatchWaitTag = 6<<3 | wire.Bytes
	timingRunTag       = 7<<3 | wire.Bytes
	timingBatchSizeTag = 8<<3 | wire.Varint
	timingBatchRowsTag = 9<<3 | wire.Varint
	timingDispatchTag  = 10<<3 | wire.Bytes
)

// The fields of envelope.proto's Reply, and of the Output in it.
const (
	replyMeshTag        = 1<<3 | wire.Bytes
	replyRequestIDTag   = 2<<3 | wire.Bytes
	replyExecutionIDTag = 3<<3 | wire.Bytes
	replySeqTag         = 4<<3 | wire.Varint
	replyAttemptTag     = 5<<3 | wire.Varint
	replyOutputTag      = 6<<3 | wire.Bytes
	replyFaultTag       = 7<<3 | wire.Bytes
	replyChunkTag       = 8<<3 | wire.Bytes
	replyTimingsTag     = 9<<3 | wire.Bytes
	replyStoredTag      = 10<<3 | wire.Bytes
	replyNextWithinTag  = 11<<3 | wire.Bytes

	outputPartsTag    = 1<<3 | wire.Bytes
	outputMetadataTag = 2<<3 | wire.Bytes
)

// The fields of result.proto's Result.
const (
	resultReplyTag      = 1<<3 | wire.Bytes
	resultTenantTag     = 2<<3 | wire.Bytes
	resultPipelineTag   = 3<<3 | wire.Bytes
	resultAdmittedAtTag = 4<<3 | wire.Bytes
	resultFinishedAtTag = 5<<3 | wire.Bytes
)
