"""Export: a run's published tables as the output and error files of OpenAI's Batch API, for its readers.

A line of either file is the `BatchRequestOutput` of OpenAI's OpenAPI description:
`{"id", "custom_id", "response": {"status_code", "request_id", "body"} or null, "error": {"code", "message"} or null}`.
There `error` is for requests that failed with a *non-HTTP* error alone; whatever HTTP answers stands in `response`, and
OpenAI's error files bear that out (openai/openai-openapi issue 302: status 400 and the error body in `response`,
`error` null; the Batch guide's expired requests: `response` null, `error` with code and message). Hence:

- a response: status 200 and the body as it is stored, `error` null;
- a row of `errors` that has a line: `response` with the status and body that the online API gives for the fault,
  `error` null, in the error file;
- one without a line, the fault of a whole file, was never a request that HTTP could answer: `response` null, and
  `error` with the fault's `reason` and message.

`custom_id` is the table's `id`. `id` and `request_id` are made of the row's place in the input, so the same run gives
the same bytes each time.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

from pipelines.published import find_run
from pipelines.storage import Folder, explain
from schemas.failures import Failure, StorageFailed, UsageError

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: the lines of each file, by the path or URI that a person can type."""

    run_id: str
    num_lines: dict[str, int]


def export(source: str, run_id: str | None, target: str) -> Exported:
    """Write the run `run_id` of the folder `source` (None: its current one) into the folder `target`.

    The files replace earlier ones of their names, and appear when both are whole. Raises UsageError for what the user
    must change: a folder without a run, a table that is missing or isn't what was published, a place that can't be
    written to.
    """
    output, folder = Folder.at(source), Folder.at(target)
    run = find_run(output, run_id, "--from")
    _check_apart(folder, output)
    folder.check_writable()
    try:
        with folder.create(OUTPUT) as answers, folder.create(ERRORS) as faults:
            num_lines = {
                folder.show(OUTPUT): _write(answers, map(response_line, run.rows("responses", _RESPONSE_COLUMNS))),
                folder.show(ERRORS): _write(faults, map(error_line, run.rows("errors", _ERROR_COLUMNS))),
            }
    except StorageFailed as error:
        # Of the target alone: what reading raises is a UsageError already.
        raise UsageError(
            f"{folder.show()}: can't be written to ({explain(error)}). Give an --output folder that can"
        ) from error
    return Exported(run.id, num_lines)


# --- lines ----------------------------------------------------------------------------------------------------------

_RESPONSE_COLUMNS = ["id", "source_file", "source_line", "response"]
_ERROR_COLUMNS = ["id", "source_file", "source_line", "status_code", "reason", "param", "message"]


def response_line(row: dict[str, Any]) -> bytes:
    """The line of a row of `responses`. Its body is spliced in unread, so that no number changes on the way."""
    return _line(row, (200, row["response"]))


def error_line(row: dict[str, Any]) -> bytes:
    """The line of a row of `errors`."""
    if row["source_line"] is None:
        return _line(row, error={"code": row["reason"], "message": row["message"]})
    failure = Failure(row["status_code"], row["reason"], row["message"], row["param"])
    return _line(row, (failure.status_code, _to_json(failure.body())))


def _line(row: dict[str, Any], answer: tuple[int, str] | None = None, error: dict[str, str] | None = None) -> bytes:
    # A file can have several faults without a line: their messages tell them apart.
    place = f"{row['source_file']}:{row['source_line'] or row['message']}"
    key = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
    response = "null"
    if answer is not None:
        status, body = answer
        response = f'{{"status_code": {status}, "request_id": "req_{key}", "body": {body}}}'
    custom_id = _to_json(row["id"])
    line = (
        f'{{"id": "batch_req_{key}", "custom_id": {custom_id}, "response": {response}, "error": {_to_json(error)}}}\n'
    )
    return line.encode()


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write(stream: IO[bytes], lines: Iterable[bytes]) -> int:
    """How many lines were written."""
    number = 0
    for number, line in enumerate(lines, start=1):  # noqa: B007 - the last one's number is what is asked for
        stream.write(line)
    return number


def _check_apart(folder: Folder, output: Folder) -> None:
    """A published run never changes, and `score` refuses a folder that holds anything but runs."""
    if f"{folder.uri.rstrip('/')}/".startswith(f"{output.uri.rstrip('/')}/"):
        raise UsageError(
            f"--output {folder.show()}: lies within {output.show()}, which is for runs alone. "
            "Give a folder outside of it"
        )
