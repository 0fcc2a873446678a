import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_FILE: _ClassVar[Durability]
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_FILE: Durability

class Part(_message.Message):
    __slots__ = ("name", "blob", "tensor", "ref", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    blob: Blob
    tensor: Tensor
    ref: Ref
    parameters: _containers.MessageMap[str, Value]
    def __init__(self, name: _Optional[str] = ..., blob: _Optional[_Union[Blob, _Mapping]] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., ref: _Optional[_Union[Ref, _Mapping]] = ..., parameters: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("content_type", "data")
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    content_type: str
    data: bytes
    def __init__(self, content_type: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("datatype", "shape", "raw")
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    datatype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    raw: bytes
    def __init__(self, datatype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., raw: _Optional[bytes] = ...) -> None: ...

class Ref(_message.Message):
    __slots__ = ("claim", "size", "sha256")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    claim: str
    size: int
    sha256: bytes
    def __init__(self, claim: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("bool_value", "int64_value", "double_value", "string_value", "uint64_value")
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    UINT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    bool_value: bool
    int64_value: int
    double_value: float
    string_value: str
    uint64_value: int
    def __init__(self, bool_value: bool = ..., int64_value: _Optional[int] = ..., double_value: _Optional[float] = ..., string_value: _Optional[str] = ..., uint64_value: _Optional[int] = ...) -> None: ...

class ModelRef(_message.Message):
    __slots__ = ("model", "alias", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    alias: str
    version: str
    def __init__(self, model: _Optional[str] = ..., alias: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("total", "steps", "branches")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    total: _duration_pb2.Duration
    steps: _containers.RepeatedCompositeFieldContainer[StepTiming]
    branches: _containers.RepeatedCompositeFieldContainer[BranchTiming]
    def __init__(self, total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepTiming, _Mapping]]] = ..., branches: _Optional[_Iterable[_Union[BranchTiming, _Mapping]]] = ...) -> None: ...

class BranchTiming(_message.Message):
    __slots__ = ("path", "block", "status", "why", "began", "took", "count", "items", "failed", "item_p50", "item_max")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    TOOK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ITEM_P50_FIELD_NUMBER: _ClassVar[int]
    ITEM_MAX_FIELD_NUMBER: _ClassVar[int]
    path: str
    block: str
    status: str
    why: str
    began: _duration_pb2.Duration
    took: _duration_pb2.Duration
    count: int
    items: int
    failed: int
    item_p50: _duration_pb2.Duration
    item_max: _duration_pb2.Duration
    def __init__(self, path: _Optional[str] = ..., block: _Optional[str] = ..., status: _Optional[str] = ..., why: _Optional[str] = ..., began: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., took: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., count: _Optional[int] = ..., items: _Optional[int] = ..., failed: _Optional[int] = ..., item_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., item_max: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("step", "stage", "host", "attempt", "queue_wait", "batch_wait", "run", "batch_size", "batch_rows", "dispatch_reason", "local", "arrival", "model_wait", "rows", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    BATCH_WAIT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_WAIT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: str
    stage: str
    host: str
    attempt: int
    queue_wait: _duration_pb2.Duration
    batch_wait: _duration_pb2.Duration
    run: _duration_pb2.Duration
    batch_size: int
    batch_rows: int
    dispatch_reason: str
    local: bool
    arrival: _duration_pb2.Duration
    model_wait: _duration_pb2.Duration
    rows: int
    path: str
    def __init__(self, step: _Optional[str] = ..., stage: _Optional[str] = ..., host: _Optional[str] = ..., attempt: _Optional[int] = ..., queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., batch_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., run: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., batch_size: _Optional[int] = ..., batch_rows: _Optional[int] = ..., dispatch_reason: _Optional[str] = ..., local: bool = ..., arrival: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., model_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rows: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...
