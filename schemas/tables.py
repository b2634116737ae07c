"""The Arrow schemas of what is published, and of what passes between stages.

Published tables have the same columns whatever the rows hold: nested API objects are JSON strings.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

VERSION = "3"
# What `errors` keeps of a line.
RAW_BYTES = 64 << 10
# Rows pass between stages in blocks of about this size.
BLOCK_BYTES = 4 << 20

# Parquet names the items of a list so: what is read is then what was written.
_TEXTS = pa.list_(pa.field("element", pa.string()))


def _schema(name: str, *fields: tuple[str, pa.DataType, str]) -> pa.Schema:
    """A table's schema; a column that ends in `?` may be null. The third word of a field says what it holds."""
    return pa.schema(
        [
            pa.field(column.rstrip("?"), kind, nullable=column.endswith("?"), metadata={"description": text})
            for column, kind, text in fields
        ],
        metadata={"overnight.table": name, "overnight.version": VERSION},
    )


_ID = ("id", pa.string(), "the caller's custom_id or request_id, else file:line")
_FILE = ("source_file", pa.string(), "the input file, as it was named or found")
_LINE = ("source_line", pa.int64(), "physical line number in the (decompressed) file, from 1")
_LINE_OR_NONE = ("source_line?", pa.int64(), "physical line number, from 1; null for a fault of a whole file")
_OFFSET = ("source_offset", pa.int64(), "byte offset of the line in the (decompressed) file")
_OFFSET_OR_NONE = ("source_offset?", pa.int64(), "byte offset of the line; null for a fault of a whole file")

RESPONSES = _schema(
    "responses",
    _ID,
    _FILE,
    _LINE,
    _OFFSET,
    ("endpoint", pa.string(), "the API path that answered, such as /v1/completions"),
    ("model", pa.string(), "the served model's name"),
    ("prompt?", pa.string(), "the prompt, where it is one text"),
    ("request", pa.large_string(), "the original request body, JSON"),
    ("response", pa.large_string(), "the response body, JSON, as the online API sends it"),
    ("text", _TEXTS, "the generated texts, by choice"),
    ("finish_reason", _TEXTS, "why each choice ended"),
    ("created", pa.timestamp("ms", tz="UTC"), "when the engine took the row on, to the second"),
    ("extra?", pa.string(), "the caller's own columns, JSON"),
    ("fingerprint?", pa.string(), "hash of all that decides the answer; equal where requests ask for the same"),
)

USAGE = _schema(
    "usage",
    _ID,
    _FILE,
    _LINE,
    ("model", pa.string(), "the served model's name"),
    ("prompt_tokens", pa.int64(), "tokens of the prompt"),
    ("completion_tokens", pa.int64(), "tokens of the returned choices"),
    ("total_tokens", pa.int64(), "both together"),
    ("cached_tokens?", pa.int64(), "prompt tokens found in the prefix cache"),
    ("search_tokens?", pa.int64(), "tokens that a beam search computed; null without one"),
    ("queue_ms?", pa.float64(), "milliseconds in the engine's queue"),
    ("first_token_ms?", pa.float64(), "milliseconds to the first token, the wait for a place included"),
    ("total_ms", pa.float64(), "milliseconds from entering the engine to the last token"),
    ("replica", pa.string(), "the engine that answered"),
    ("attempt", pa.int32(), "1, or more where the row was tried again"),
    ("is_deduplicated", pa.bool_(), "answered by an equal request's answer"),
    (
        "is_carried",
        pa.bool_(),
        "answered by an equal request's answer in an earlier run, which the other columns tell of",
    ),
)

ERRORS = _schema(
    "errors",
    _ID,
    _FILE,
    _LINE_OR_NONE,
    _OFFSET_OR_NONE,
    ("stage", pa.string(), "where it failed: read, validate or infer"),
    ("status_code", pa.int32(), "the HTTP status that the online API gives for this fault"),
    ("type", pa.string(), "the API's error type"),
    ("reason", pa.string(), "stable name of the fault"),
    ("param?", pa.string(), "path of the field at fault"),
    ("message", pa.string(), "what was found, what was expected, what to do"),
    ("raw?", pa.binary(), "the line as it was read, cut to 64 KiB"),
    ("attempts", pa.int32(), "how many times it was tried; 0 before the engine"),
    ("fingerprint?", pa.string(), "as in responses; null for what is no request"),
)

# Of a run with --changed, beside an earlier one: rows that are in one of them alone, or that aren't the same in both.
CHANGES = _schema(
    "changes",
    ("kind", pa.string(), "new, gone, changed (another request), changed_answer (the same request, another outcome)"),
    _ID,
    ("source_file?", pa.string(), "the input file; null for what is gone"),
    ("source_line?", pa.int64(), "physical line number, from 1; null for what is gone"),
    ("fingerprint?", pa.string(), "as in responses; null for what is gone, or was no request"),
    ("text?", _TEXTS, "the texts by choice, of one that calls tools its calls as JSON; null without an answer"),
    ("finish_reason?", _TEXTS, "why each choice ended; null without an answer"),
    ("reason?", pa.string(), "the reason in errors, where it failed"),
    ("old_source_file?", pa.string(), "in the earlier run: the input file; null for what is new"),
    ("old_source_line?", pa.int64(), "in the earlier run: physical line number"),
    ("old_fingerprint?", pa.string(), "in the earlier run: fingerprint"),
    ("old_text?", _TEXTS, "in the earlier run: the texts by choice"),
    ("old_finish_reason?", _TEXTS, "in the earlier run: why each choice ended"),
    ("old_reason?", pa.string(), "in the earlier run: the reason in errors"),
)
CHANGE_KINDS = ("new", "changed", "gone", "changed_answer")

PUBLISHED = {"responses": RESPONSES, "usage": USAGE, "errors": ERRORS}

# --- between stages -------------------------------------------------------------------------------------------------

_INDEX = pa.field("source_index", pa.int32(), nullable=False)

# read makes these; one with a `reason` is a fault, of the line or, where that is null, of its whole file.
LINES = pa.schema(
    [
        _INDEX,
        RESPONSES.field("source_file"),
        pa.field("source_line", pa.int64()),
        pa.field("source_offset", pa.int64()),
        pa.field("line", pa.large_binary()),
        pa.field("reason", pa.string()),
        pa.field("message", pa.string()),
    ]
)

# validate turns lines into these two, side by side in one table: a row has a request or a reason.
REQUESTS = pa.schema(
    [
        _INDEX,
        pa.field("id", pa.string()),
        RESPONSES.field("source_file"),
        pa.field("source_line", pa.int64()),
        pa.field("source_offset", pa.int64()),
        pa.field("endpoint", pa.string()),
        pa.field("request", pa.large_string()),
        pa.field("extra", pa.string()),
        RESPONSES.field("fingerprint"),
        # What is expected of it, for the plan: tokens of its prompts, and most tokens of its answers.
        pa.field("num_prompt_tokens", pa.int64()),
        pa.field("num_output_tokens", pa.int64()),
    ]
)
_FAULT_COLUMNS = ["stage", "status_code", "type", "reason", "param", "message", "raw", "attempts"]
FAULTS = pa.schema([ERRORS.field(column).with_nullable(True) for column in _FAULT_COLUMNS])
CHECKED = pa.schema(
    [
        *REQUESTS,
        # Lower is earlier.
        pa.field("priority", pa.int64()),
        # Where its prompt stands among all prompts (`pipelines/prefixes.py`).
        pa.field("path", pa.binary()),
        # Tokens of its longest answer, when it is as long as it may be.
        pa.field("longest_answer", pa.int64()),
        # Whether an equal request must have the same answer.
        pa.field("is_deterministic", pa.bool_()),
        pa.field("unknown_fields", pa.list_(pa.string())),
        *FAULTS,
    ]
)
REJECTIONS = pa.schema([_INDEX, *(field for field in ERRORS if field.name != "fingerprint")])

# One row of a run for its difference with another: what it is known by there, what was asked, what came of it.
SIDES = pa.schema(
    [
        pa.field("is_old", pa.bool_()),
        pa.field("has_own_id", pa.bool_()),
        # What brings rows of both runs together: the caller's id, else the request itself.
        pa.field("key", pa.string()),
        # Equal where the request is; and where key, request and outcome are.
        pa.field("mark", pa.string()),
        pa.field("sign", pa.string()),
        *(CHANGES.field(name).with_nullable(True) for name in CHANGES.names[1:8]),
    ]
)

# plan spools these, in the order in which they are to be answered.
SPOOLED = pa.schema(
    [
        *REQUESTS,
        # Whether the row before it in the chunk asks for the same, and its answer is this one's.
        pa.field("is_repeated", pa.bool_(), nullable=False),
    ]
)

# infer stages these: an answer or a fault.
_ANSWER_COLUMNS = [name for name in RESPONSES.names if name not in REQUESTS.names]
_USAGE_COLUMNS = [name for name in USAGE.names if name not in RESPONSES.names]
OUTCOMES = pa.schema(
    [
        *REQUESTS,
        *(RESPONSES.field(column).with_nullable(True) for column in _ANSWER_COLUMNS),
        *(USAGE.field(column).with_nullable(True) for column in _USAGE_COLUMNS),
        *FAULTS,
    ]
)


def as_outcomes(rows: pa.Table) -> pa.Table:
    """A table's columns of OUTCOMES, in their order; those that it lacks are null, whatever OUTCOMES says."""
    arrays = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in OUTCOMES
    ]
    return pa.table(arrays, schema=pa.schema([field.with_nullable(True) for field in OUTCOMES]))


def count_values(column: Any) -> dict[str, int]:
    """How often each value of a column is there."""
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}
