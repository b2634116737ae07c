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
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, cast

import pyarrow.parquet as pq

from pipelines.storage import Folder, explain
from schemas import tables
from schemas.failures import Failure, UsageError

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
# Rows in memory at a time: an answer can have megabytes of log-probabilities.
BATCH_ROWS = 64


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
    run = find_run(output, run_id)
    _check_apart(folder, output)
    folder.check_writable()
    try:
        with folder.create(OUTPUT) as answers, folder.create(ERRORS) as faults:
            num_lines = {
                folder.show(OUTPUT): _write(answers, map(response_line, run.rows("responses", _RESPONSE_COLUMNS))),
                folder.show(ERRORS): _write(faults, map(error_line, run.rows("errors", _ERROR_COLUMNS))),
            }
    except OSError as error:
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


# --- a published run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run's folder, and the path in it and SHA-256 of each of its files, in their order."""

    id: str
    folder: Folder
    files: tuple[tuple[str, str], ...]

    def rows(self, table: str, columns: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of one table as they were published, a few at a time. Raises UsageError that names a file which is
        missing, can't be read, or isn't the one that the manifest means: Parquet's data has no checksum of its own."""
        for path, checksum in self.files:
            if not path.startswith(f"{table}/"):
                continue
            place = self.folder.show(path)
            advice = "Restore the run's folder, or answer the requests again with `overnight score`"
            with _reading(place, advice), self.folder.open(path) as stream:
                if hashlib.file_digest(cast("io.BufferedIOBase", stream), "sha256").hexdigest() != checksum:
                    raise UsageError(f"{place}: isn't the file that the run published (its checksum differs). {advice}")
                stream.seek(0)
                # Buffering ahead would take the whole file into memory.
                parquet = pq.ParquetFile(stream, pre_buffer=False)
                for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
                    yield from batch.to_pylist()


def find_run(output: Folder, run_id: str | None) -> PublishedRun:
    """A published run of the folder that `score` wrote; without an id the current one. Raises UsageError."""
    path = ("manifest.json",) if run_id is None else ("runs", run_id, "manifest.json")
    place = output.show(*path)
    advice = (
        "Give --from the folder or URI that `overnight score --output` wrote"
        if run_id is None
        else f"Give --run the name of a folder below {output.show('runs')}, or leave it out for the current run"
    )
    with _reading(place, advice), output.open(*path) as stream:
        data = stream.read()
    try:
        manifest = json.loads(data)
        found, version = manifest["run_id"], manifest["version"]
        files = tuple((file["path"], file["sha256"]) for file in manifest["files"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{place}: isn't the manifest of a run. {advice}") from error
    if version != tables.VERSION:
        raise UsageError(
            f"{place}: found tables of version {version}, expected {tables.VERSION}. "
            "Export with the version of overnight that made them"
        )
    if run_id not in (None, found):
        raise UsageError(f"--run {run_id}: there is no such run. {advice}")
    if PurePosixPath(output.uri).parts[-2:] == ("runs", found):
        raise UsageError(
            f"{output.show()}: is the folder of one run. Give --from the folder above its `runs`, and --run {found}"
        )
    return PublishedRun(found, output.join("runs", found), files)


@contextmanager
def _reading(place: str, advice: str) -> Iterator[None]:
    """Turns what a store, or Parquet, says about `place` into a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f"{place}: no such file. {advice}") from error
    except Exception as error:  # each store has exceptions of its own
        raise UsageError(f"{place}: can't be read ({explain(error)}). {advice}") from error


def _check_apart(folder: Folder, output: Folder) -> None:
    """A published run never changes, and `score` refuses a folder that holds anything but runs."""
    if f"{folder.uri.rstrip('/')}/".startswith(f"{output.uri.rstrip('/')}/"):
        raise UsageError(
            f"--output {folder.show()}: lies within {output.show()}, which is for runs alone. "
            "Give a folder outside of it"
        )
