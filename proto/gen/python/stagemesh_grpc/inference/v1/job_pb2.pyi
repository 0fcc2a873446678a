import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from stagemesh_grpc.inference.v1 import inference_pb2 as _inference_pb2
from stagemesh_grpc.inference.v1 import payload_pb2 as _payload_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DELAYED: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_EXPIRED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DELAYED: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_EXPIRED: JobState
JOB_STATE_CANCELLED: JobState

class Job(_message.Message):
    __slots__ = ("id", "queue", "state", "priority", "accepted_at", "deadline", "attempts", "interruptions", "started_at", "request_id", "not_before", "ended_at", "cancel_requested", "reason", "message", "attributes", "pipeline", "usage")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTIONS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    id: str
    queue: str
    state: JobState
    priority: int
    accepted_at: _timestamp_pb2.Timestamp
    deadline: _timestamp_pb2.Timestamp
    attempts: int
    interruptions: int
    started_at: _timestamp_pb2.Timestamp
    request_id: str
    not_before: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    cancel_requested: bool
    reason: str
    message: str
    attributes: _containers.ScalarMap[str, str]
    pipeline: str
    usage: JobUsage
    def __init__(self, id: _Optional[str] = ..., queue: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., priority: _Optional[int] = ..., accepted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[int] = ..., interruptions: _Optional[int] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ..., not_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cancel_requested: bool = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., pipeline: _Optional[str] = ..., usage: _Optional[_Union[JobUsage, _Mapping]] = ...) -> None: ...

class JobUsage(_message.Message):
    __slots__ = ("attempts", "queued_seconds", "delayed_seconds", "running_seconds", "closed_seconds", "runner_seconds", "bytes_in", "bytes_out", "prompt_tokens", "completion_tokens", "cost", "currency", "joules")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DELAYED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNNER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    attempts: int
    queued_seconds: float
    delayed_seconds: float
    running_seconds: float
    closed_seconds: float
    runner_seconds: float
    bytes_in: int
    bytes_out: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    currency: str
    joules: float
    def __init__(self, attempts: _Optional[int] = ..., queued_seconds: _Optional[float] = ..., delayed_seconds: _Optional[float] = ..., running_seconds: _Optional[float] = ..., closed_seconds: _Optional[float] = ..., runner_seconds: _Optional[float] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cost: _Optional[float] = ..., currency: _Optional[str] = ..., joules: _Optional[float] = ...) -> None: ...

class HttpCall(_message.Message):
    __slots__ = ("path", "content_type", "body")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    path: str
    content_type: str
    body: bytes
    def __init__(self, path: _Optional[str] = ..., content_type: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class HttpAnswer(_message.Message):
    __slots__ = ("status", "content_type", "body")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    status: int
    content_type: str
    body: bytes
    def __init__(self, status: _Optional[int] = ..., content_type: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("queue", "infer", "http", "deadline", "ttl", "attributes", "idempotency_key", "priority", "webhook")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    INFER_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEBHOOK_FIELD_NUMBER: _ClassVar[int]
    queue: str
    infer: _inference_pb2.InferRequest
    http: HttpCall
    deadline: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    attributes: _containers.ScalarMap[str, str]
    idempotency_key: str
    priority: int
    webhook: str
    def __init__(self, queue: _Optional[str] = ..., infer: _Optional[_Union[_inference_pb2.InferRequest, _Mapping]] = ..., http: _Optional[_Union[HttpCall, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attributes: _Optional[_Mapping[str, str]] = ..., idempotency_key: _Optional[str] = ..., priority: _Optional[int] = ..., webhook: _Optional[str] = ...) -> None: ...

class SubmitJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class SubmitJobsRequest(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[SubmitJobRequest]
    def __init__(self, jobs: _Optional[_Iterable[_Union[SubmitJobRequest, _Mapping]]] = ...) -> None: ...

class SubmitJobsResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[SubmitJobAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[SubmitJobAnswer, _Mapping]]] = ...) -> None: ...

class SubmitJobAnswer(_message.Message):
    __slots__ = ("job", "failure")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    failure: SubmitJobFailure
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., failure: _Optional[_Union[SubmitJobFailure, _Mapping]] = ...) -> None: ...

class SubmitJobFailure(_message.Message):
    __slots__ = ("reason", "message", "retry_after")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_after: _duration_pb2.Duration
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("id", "wait")
    ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    id: str
    wait: _duration_pb2.Duration
    def __init__(self, id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job", "infer", "http")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INFER_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    job: Job
    infer: _inference_pb2.InferResponse
    http: HttpAnswer
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., infer: _Optional[_Union[_inference_pb2.InferResponse, _Mapping]] = ..., http: _Optional[_Union[HttpAnswer, _Mapping]] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("queue", "ended", "after", "limit", "wait")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    ended: bool
    after: int
    limit: int
    wait: _duration_pb2.Duration
    def __init__(self, queue: _Optional[str] = ..., ended: bool = ..., after: _Optional[int] = ..., limit: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next: int
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...

class ExplainJobRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ExplainJobResponse(_message.Message):
    __slots__ = ("job", "place")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    place: JobPlace
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., place: _Optional[_Union[JobPlace, _Mapping]] = ...) -> None: ...

class JobPlace(_message.Message):
    __slots__ = ("hold", "why", "since", "position", "is_estimate", "starts_at", "pool")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    hold: str
    why: str
    since: _timestamp_pb2.Timestamp
    position: int
    is_estimate: bool
    starts_at: _timestamp_pb2.Timestamp
    pool: str
    def __init__(self, hold: _Optional[str] = ..., why: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., position: _Optional[int] = ..., is_estimate: bool = ..., starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., pool: _Optional[str] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("id", "after")
    ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    id: str
    after: str
    def __init__(self, id: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("event_id", "state", "chunk", "restart", "gap")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    state: Job
    chunk: JobChunk
    restart: JobRestart
    gap: JobGap
    def __init__(self, event_id: _Optional[str] = ..., state: _Optional[_Union[Job, _Mapping]] = ..., chunk: _Optional[_Union[JobChunk, _Mapping]] = ..., restart: _Optional[_Union[JobRestart, _Mapping]] = ..., gap: _Optional[_Union[JobGap, _Mapping]] = ...) -> None: ...

class JobChunk(_message.Message):
    __slots__ = ("attempt", "seq", "request_id", "outputs")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    seq: int
    request_id: str
    outputs: _containers.RepeatedCompositeFieldContainer[_payload_pb2.Part]
    def __init__(self, attempt: _Optional[int] = ..., seq: _Optional[int] = ..., request_id: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[_payload_pb2.Part, _Mapping]]] = ...) -> None: ...

class JobRestart(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class JobGap(_message.Message):
    __slots__ = ("attempt", "first", "last")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    first: int
    last: int
    def __init__(self, attempt: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...
