"""Prepares a mesh's OpenAPI document for schemathesis and knows its false failures: SCHEMATHESIS_HOOKS."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.core.failures import Failure

# NDJSON bodies are generated as text: a malformed line is a valid request and gets its own error.
schemathesis.serializer.alias("application/x-ndjson", "text/plain")

# Schemathesis does not escape the names of a form's fields: a backslash at the end escapes the quote.
FIELD_NAMES = {"pattern": r"^[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\\]$"}


def prepare_body(content: dict[str, Any]) -> None:
    """Removes MessagePack, which schemathesis has not, and any type, of which it sends text as forms and YAML."""
    content.pop("application/msgpack", None)
    if "*/*" in content:
        content["application/octet-stream"] = content.pop("*/*")
    if form := content.get("multipart/form-data"):
        form["schema"]["propertyNames"] = FIELD_NAMES
        for part in form.get("encoding", {}).values():
            part["contentType"] = part["contentType"].replace(", application/msgpack", "")


@schemathesis.hook
def before_load_schema(_: schemathesis.HookContext, document: dict[str, Any]) -> None:
    """Changes what schemathesis takes otherwise than the document means it."""
    for path in document["paths"].values():
        for operation in path.values():
            prepare_body(operation.get("requestBody", {}).get("content", {}))
            # Schemathesis takes the schema of a stream as that of each event.
            if stream := operation["responses"].get("200", {}).get("content", {}).get("text/event-stream"):
                stream["schema"] = stream["schema"].get("contentSchema", {"items": {}})["items"]
    # Validators read the whole query as this parameter, so that the document cannot have its names.
    more = document["components"]["parameters"]["More"]["schema"]
    more["propertyNames"] = {"pattern": r"^parameters\.[^.]"}
    more["additionalProperties"] = {"type": ["string", "number", "boolean"]}


# Failures that are none: why, the code of the failure, where, and what it or the answer says.
EXPECTED = {
    "a path of any pipeline does not say what this one takes": (
        "ST202",
        "{(model|pipeline|queue)}",
        "INVALID_INPUT|SCHEMA_VIOLATION|UNSUPPORTED_MEDIA_TYPE|the jobs of queue|jobs.webhooks|not valid JSON of an",
    ),
    "a stage without a spec may have any output": ("ST202", "", "the pipeline has no output"),
    "a tensor has as many elements as its shape": ("ST202", "", r"has (\d+|fewer|more) |data is flat|use a number"),
    "integers are digits alone, not 2.0": ("ST202", "", "has an axis of|use whole numbers|into Go int64"),
    "a file expires within jobs.batches.retention": (
        "ST202",
        "/v1/(files|batches)",
        "from 3600 to|is not a whole number",
    ),
    "an output is named once": ("ST202", "", "is named twice"),
    "fields of a form are short": ("ST202", "/v1/files", "limit of 1024 bytes"),
    "characters have several bytes": ("ST202", "", "at most 256 bytes"),
    "a job is for a pipeline, or for a path of an HTTP target": ("ST202", "/v1/queues", "leave one out"),
    "a deadline lies ahead": ("ST202", "/v1/queues", " has passed"),
    "a form has a field for each element of a list": ("ST202", "form-data", "the body is empty|two inputs are named"),
    "fields of a form are text": ("ST201", "form-data", "in body.*violates `type`"),
    "FIELD_NAMES are for schemathesis": ("ST201", "form-data", "propertyNames"),
    "a name with a comma is two names": ("ST201", r"'outputs': .*,", "`outputs` in query - violates `pattern`"),
    "an empty header is none": ("ST201", r"'Stagemesh-[A-Za-z-]+': '\s*'", "in header"),
    "0 and 1 are booleans too": ("ST201", "", "was boolean, became number"),
    "requests have headers of all names": ("ST201", "", "in header - object with unexpected properties"),
    "a body of empty lines is empty": ("ST202", "application/x-ndjson", "the body is empty"),
    "each line of a body has its answer": ("ST201", "application/x-ndjson", r'^.*in body.*"line":1'),
    "a short timeout may pass": ("ST101", "Stagemesh-Timeout", "DEADLINE_EXCEEDED"),
    "chunks are not stored for an idempotency key": ("ST101", "Idempotency-Key", "STREAM_INTERRUPTED"),
    "Go's server limits headers": ("ST103|ST201", "", "431 Request Header Fields Too Large"),
}


@schemathesis.hook
def filter_failure(
    _: schemathesis.HookContext, failure: Failure, case: schemathesis.Case, response: schemathesis.Response
) -> bool:
    """Drops the expected failures."""
    where = f"{case.operation.path} {case.media_type} {dict(case.headers)} {dict(case.query)}"
    said = failure.message + response.text
    return not any(
        re.fullmatch(code, failure.code) and re.search(at, where) and re.search(text, said, re.DOTALL)
        for code, at, text in EXPECTED.values()
    )
