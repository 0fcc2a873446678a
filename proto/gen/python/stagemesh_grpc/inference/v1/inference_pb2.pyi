import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from stagemesh_grpc.inference.v1 import payload_pb2 as _payload_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InferRequest(_message.Message):
    __slots__ = ("pipeline", "inputs", "parameters", "steps", "idempotency_key", "timeout", "durability", "priority", "metadata", "outputs", "wait_for_capacity", "complete")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _payload_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_payload_pb2.Value, _Mapping]] = ...) -> None: ...
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: StepOptions
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[StepOptions, _Mapping]] = ...) -> None: ...
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    inputs: _containers.RepeatedCompositeFieldContainer[_payload_pb2.Part]
    parameters: _containers.MessageMap[str, _payload_pb2.Value]
    steps: _containers.MessageMap[str, StepOptions]
    idempotency_key: str
    timeout: _duration_pb2.Duration
    durability: _payload_pb2.Durability
    priority: int
    metadata: _containers.ScalarMap[str, str]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    wait_for_capacity: bool
    complete: bool
    def __init__(self, pipeline: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[_payload_pb2.Part, _Mapping]]] = ..., parameters: _Optional[_Mapping[str, _payload_pb2.Value]] = ..., steps: _Optional[_Mapping[str, StepOptions]] = ..., idempotency_key: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., durability: _Optional[_Union[_payload_pb2.Durability, str]] = ..., priority: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., outputs: _Optional[_Iterable[str]] = ..., wait_for_capacity: bool = ..., complete: bool = ...) -> None: ...

class InferManyRequest(_message.Message):
    __slots__ = ("request", "id", "in_order")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    IN_ORDER_FIELD_NUMBER: _ClassVar[int]
    request: InferRequest
    id: str
    in_order: bool
    def __init__(self, request: _Optional[_Union[InferRequest, _Mapping]] = ..., id: _Optional[str] = ..., in_order: bool = ...) -> None: ...

class InferManyResponse(_message.Message):
    __slots__ = ("id", "index", "response", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: int
    response: InferResponse
    failure: InferFailure
    def __init__(self, id: _Optional[str] = ..., index: _Optional[int] = ..., response: _Optional[_Union[InferResponse, _Mapping]] = ..., failure: _Optional[_Union[InferFailure, _Mapping]] = ...) -> None: ...

class InferFailure(_message.Message):
    __slots__ = ("reason", "message", "request_id", "retryable", "retry_after", "step", "stage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    request_id: str
    retryable: bool
    retry_after: _duration_pb2.Duration
    step: str
    stage: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., request_id: _Optional[str] = ..., retryable: bool = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step: _Optional[str] = ..., stage: _Optional[str] = ...) -> None: ...

class GetResultRequest(_message.Message):
    __slots__ = ("request_id", "wait", "pipeline", "idempotency_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    wait: _duration_pb2.Duration
    pipeline: str
    idempotency_key: str
    def __init__(self, request_id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pipeline: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class GetResultResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: InferResponse
    def __init__(self, result: _Optional[_Union[InferResponse, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "pipeline", "idempotency_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pipeline: str
    idempotency_key: str
    def __init__(self, request_id: _Optional[str] = ..., pipeline: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepOptions(_message.Message):
    __slots__ = ("model", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _payload_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_payload_pb2.Value, _Mapping]] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    model: _payload_pb2.ModelRef
    parameters: _containers.MessageMap[str, _payload_pb2.Value]
    def __init__(self, model: _Optional[_Union[_payload_pb2.ModelRef, _Mapping]] = ..., parameters: _Optional[_Mapping[str, _payload_pb2.Value]] = ...) -> None: ...

class InferResponse(_message.Message):
    __slots__ = ("request_id", "outputs", "metadata", "timeline")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outputs: _containers.RepeatedCompositeFieldContainer[_payload_pb2.Part]
    metadata: _containers.ScalarMap[str, str]
    timeline: _payload_pb2.Timeline
    def __init__(self, request_id: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[_payload_pb2.Part, _Mapping]]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., timeline: _Optional[_Union[_payload_pb2.Timeline, _Mapping]] = ...) -> None: ...

class InferStreamResponse(_message.Message):
    __slots__ = ("request_id", "seq", "attempt", "chunk", "final", "activating")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    ACTIVATING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seq: int
    attempt: int
    chunk: Chunk
    final: InferResponse
    activating: Activating
    def __init__(self, request_id: _Optional[str] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., final: _Optional[_Union[InferResponse, _Mapping]] = ..., activating: _Optional[_Union[Activating, _Mapping]] = ...) -> None: ...

class Activating(_message.Message):
    __slots__ = ("stage", "waited")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    stage: str
    waited: _duration_pb2.Duration
    def __init__(self, stage: _Optional[str] = ..., waited: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_payload_pb2.Part]
    def __init__(self, outputs: _Optional[_Iterable[_Union[_payload_pb2.Part, _Mapping]]] = ...) -> None: ...
