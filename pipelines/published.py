"""A published run as its readers find it: the manifest, and the tables that it names."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.storage import Folder, explain
from schemas import tables
from schemas.failures import UsageError

# Rows in memory at a time: an answer can have megabytes of log-probabilities.
BATCH_ROWS = 64
_ADVICE = "Restore the run's folder, or answer the requests again with `overnight score`"


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run's folder, its manifest, and the path in it and SHA-256 of each of its files, in their order."""

    id: str
    folder: Folder
    manifest: Mapping[str, Any]
    files: tuple[tuple[str, str], ...]

    def rows(self, table: str, columns: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of one table as they were published, a few at a time. Raises UsageError that names a file which is
        missing, can't be read, or isn't the one that the manifest means: Parquet's data has no checksum of its own."""
        for path, checksum in self._paths(table):
            place = self.folder.show(path)
            with reading(place, _ADVICE), self.folder.open(path) as stream:
                if hashlib.file_digest(cast("io.BufferedIOBase", stream), "sha256").hexdigest() != checksum:
                    raise UsageError(
                        f"{place}: isn't the file that the run published (its checksum differs). {_ADVICE}"
                    )
                stream.seek(0)
                # Buffering ahead would take the whole file into memory.
                parquet = pq.ParquetFile(stream, pre_buffer=False)
                for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
                    yield from batch.to_pylist()

    def row_groups(self, table: str) -> Iterator["RowGroup"]:
        """The row groups of one table, in their order, each for as long as the next isn't asked for; without a look at
        the files' checksums, which would read all of them. Raises UsageError as `rows` does."""
        for path, _ in self._paths(table):
            place = self.folder.show(path)
            with reading(place, _ADVICE), self.folder.open(path) as stream:
                parquet = pq.ParquetFile(stream, pre_buffer=False)
                for number in range(parquet.num_row_groups):
                    yield RowGroup(place, parquet, number)

    def columns(self, table: str, columns: list[str]) -> Iterator[pa.Table]:
        """Some columns of one table, a row group at a time."""
        return (group.read(columns) for group in self.row_groups(table))

    def answers(self, of_responses: list[str], of_usage: list[str]) -> Iterator[pa.Table]:
        """Columns of `responses` and of `usage`, side by side: both have the same rows in the same order, and cut them
        into row groups of their own. Raises UsageError where one has more rows than the other."""
        answers, usage = self.columns("responses", of_responses), self.columns("usage", of_usage)
        left = right = None
        while True:
            left = left if left is not None and left.num_rows else next(answers, None)
            right = right if right is not None and right.num_rows else next(usage, None)
            if left is None and right is None:
                return
            if left is None or right is None:
                raise UsageError(f"{self.folder.show()}: responses and usage don't have the same rows. {_ADVICE}")
            num_rows = min(left.num_rows, right.num_rows)
            pieces = left.slice(0, num_rows), right.slice(0, num_rows)
            yield pa.table({name: piece[name] for piece in pieces for name in piece.column_names})
            left, right = left.slice(num_rows), right.slice(num_rows)

    def _paths(self, table: str) -> list[tuple[str, str]]:
        return [(path, checksum) for path, checksum in self.files if path.startswith(f"{table}/")]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Some rows of a published table that lie together in its file."""

    place: str
    parquet: pq.ParquetFile
    number: int

    def read(self, columns: list[str] | None) -> pa.Table:
        with reading(self.place, _ADVICE):
            return self.parquet.read_row_group(self.number, columns=columns)


def find_run(output: Folder, run_id: str | None, flag: str) -> PublishedRun:
    """A published run of the folder that `score` wrote and `flag` named; without an id the current one. Raises
    UsageError."""
    path = ("manifest.json",) if run_id is None else ("runs", run_id, "manifest.json")
    place = output.show(*path)
    advice = (
        f"Give {flag} the folder or URI that `overnight score --output` wrote"
        if run_id is None
        else f"Give --run the name of a folder below {output.show('runs')}, or leave it out for the current run"
    )
    with reading(place, advice), output.open(*path) as stream:
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
            "Read them with the version of overnight that made them"
        )
    if run_id not in (None, found):
        raise UsageError(f"--run {run_id}: there is no such run. {advice}")
    if PurePosixPath(output.uri).parts[-2:] == ("runs", found):
        raise UsageError(
            f"{output.show()}: is the folder of one run. Give {flag} the folder above its `runs`, and --run {found}"
        )
    return PublishedRun(found, output.join("runs", found), manifest, files)


@contextmanager
def reading(place: str, advice: str) -> Iterator[None]:
    """Turns what a store, or Parquet, says about `place` into a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f"{place}: no such file. {advice}") from error
    except Exception as error:  # each store has exceptions of its own
        raise UsageError(f"{place}: can't be read ({explain(error)}). {advice}") from error
