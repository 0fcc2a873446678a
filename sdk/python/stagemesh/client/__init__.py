"""A client of a mesh: requests, streams and jobs over HTTP.

    from stagemesh.client import Mesh

    mesh = Mesh("http://127.0.0.1:8080")
    answer = mesh.infer("digits", image=open("7.png", "rb"))
    print(answer["labels"], answer.timeline)

It needs Python 3.9 and nothing else. Tensors are arrays of numpy where that is installed; it is not
imported before it is needed, and nothing of what serves workers is. docs/clients.md is the guide.

``mesh`` has the calls and ``aio`` their twins for asyncio; ``calls`` has what they send, ``transport``
sends it, ``values`` and ``packing`` turn values into bytes and back, ``faults`` has what is raised.
``typed`` is for the clients that ``stagemesh client python`` makes. A Mesh is safe for threads, an
AsyncMesh belongs to one event loop.
"""

from __future__ import annotations

from .aio import AsyncIteration, AsyncJobs, AsyncMesh, AsyncStream
from .calls import Job, JobEvent, Options
from .faults import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Disconnected,
    FailedPrecondition,
    Fault,
    Internal,
    InvalidAnswer,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from .mesh import Jobs, Mesh, Outcome, Pending, Stream, new_key
from .values import Answer, Blob, Chunk, Outputs, Step, Tensor, Timeline

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Answer",
    "AsyncIteration",
    "AsyncJobs",
    "AsyncMesh",
    "AsyncStream",
    "Blob",
    "Cancelled",
    "Chunk",
    "DeadlineExceeded",
    "Disconnected",
    "FailedPrecondition",
    "Fault",
    "Internal",
    "InvalidAnswer",
    "InvalidArgument",
    "Job",
    "JobEvent",
    "Jobs",
    "Mesh",
    "NotFound",
    "Options",
    "Outcome",
    "Outputs",
    "Pending",
    "PermissionDenied",
    "ResourceExhausted",
    "Step",
    "Stream",
    "Tensor",
    "Timeline",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "new_key",
]
