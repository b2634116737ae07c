"""Write: publish a run in input order as an immutable folder of Parquet files.

OUT/runs/<run id>/{responses,usage,errors}/part-*.parquet  manifest.json  _SUCCESS
OUT/manifest.json        the newest run's manifest, swapped last: readers start here
OUT/_work/<run id>/      spool, rejections and staged parts; removed after publishing unless kept
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.storage import Folder
from schemas import tables
from schemas.failures import StorageFailed, UsageError

PART_BYTES = 256 << 20
ROW_GROUP_BYTES = 32 << 20
_OWN_NAMES = {"runs", "_work", "manifest.json", "summary.json"}


def check_output(output: Folder) -> None:
    """Raises UsageError where the folder can't be written to, or holds what isn't ours."""
    output.check_writable()
    if foreign := foreign_names(output):
        raise UsageError(
            f"{output.show()}: holds {foreign[0]}, which isn't of a run. Give an --output folder that is new, "
            "empty, or of earlier runs"
        )


def foreign_names(output: Folder) -> list[str]:
    """What a folder holds that isn't of a run."""
    return sorted({name for name in output.names() if not name.startswith(".")} - _OWN_NAMES)


@dataclass(frozen=True, slots=True)
class Published:
    """What a run's folder holds: rows by table, and the files with their rows and checksums."""

    num_rows: dict[str, int]
    files: list[dict[str, Any]]


def publish_tables(run: Folder, outcomes: Iterable[pa.Table], num_rows: int) -> Published:
    """Write the three tables of a run.

    `outcomes`: all of them in input order, each once, as `staged.sorted_outcomes` gives them. Memory holds one of its
    tables and a row group of each of ours at a time. Asserts that they are `num_rows` rows.
    """
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(TableWriter(run, name, schema)) for name, schema in tables.PUBLISHED.items()
        }
        for rows in _in_slices(outcomes):
            answered = rows.filter(pc.is_null(rows["reason"]))
            writers["responses"].write(answered)
            writers["usage"].write(answered)
            writers["errors"].write(rows.filter(pc.is_valid(rows["reason"])))
        written = {name: writer.num_rows for name, writer in writers.items()}
        assert written["responses"] + written["errors"] == num_rows, (written, num_rows)
    return Published(written, [file for writer in writers.values() for file in writer.files])


def _in_slices(outcomes: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of about BLOCK_BYTES, so that what is copied of them is small."""
    for rows in outcomes:
        if not rows.num_rows:
            continue
        num_slices = -(-rows.nbytes // tables.BLOCK_BYTES)
        rows_each = -(-rows.num_rows // num_slices)
        for start in range(0, rows.num_rows, rows_each):
            yield rows.slice(start, rows_each)


def publish_manifest(output: Folder, run_id: str, manifest: dict[str, Any]) -> None:
    """Declare a run done, and make it the current one: the last write of a run."""
    data = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
    run = output.join("runs", run_id)
    run.write(data, "manifest.json")
    run.write(b"", "_SUCCESS")
    output.write(data, "manifest.json")


def read_manifest(output: Folder) -> dict[str, Any] | None:
    """The newest published run's manifest; None where there is none."""
    if "manifest.json" not in output.names():
        return None
    manifest: dict[str, Any] = json.loads(output.read("manifest.json"))
    return manifest


@dataclass
class TableWriter:
    """One published table: right-sized parts in the order of what is written, at least one even without rows."""

    run: Folder
    name: str
    schema: pa.Schema
    num_rows: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    _pending: list[pa.Table] = field(default_factory=list)
    _pending_bytes: int = 0
    _open: "_PartWriter | None" = None

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._finish_part()
        elif self._open is not None:
            self._open.abandon()

    def write(self, rows: pa.Table) -> None:
        rows = rows.select(self.schema.names).cast(self.schema)
        if not rows.num_rows:
            return
        self.num_rows += rows.num_rows
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending and self.files:
            return
        if self._open is None:
            self._open = _PartWriter(self.run, self.name, f"part-{len(self.files):05d}.parquet", self.schema)
        if self._pending:
            self._open.write(pa.concat_tables(self._pending))
            self._pending, self._pending_bytes = [], 0
        if self._open.size_bytes >= PART_BYTES:
            self._finish_part()

    def _finish_part(self) -> None:
        if self._open is not None:
            self.files.append(self._open.finish())
            self._open = None


class _PartWriter:
    """One Parquet file on its way; knows its size and checksum when it is finished."""

    def __init__(self, run: Folder, table: str, name: str, schema: pa.Schema) -> None:
        self._run = run
        self._path = f"{table}/{name}"
        self._num_rows = 0
        self._stack = ExitStack()
        self._sink = _Hashing(self._stack.enter_context(run.create(table, name)))
        self._writer = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), schema, compression="zstd")

    @property
    def size_bytes(self) -> int:
        return self._sink.size_bytes

    def write(self, rows: pa.Table) -> None:
        with self._run.telling("written", self._path):
            self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self._num_rows += rows.num_rows

    def finish(self) -> dict[str, Any]:
        with self._run.telling("written", self._path):
            self._writer.close()
            self._stack.close()
        return {
            "path": self._path,
            "rows": self._num_rows,
            "bytes": self._sink.size_bytes,
            "sha256": self._sink.sha256.hexdigest(),
        }

    def abandon(self) -> None:
        # It may be the store that fails.
        with contextlib.suppress(StorageFailed), self._run.telling("written", self._path):
            self._writer.close()
        error = RuntimeError("abandoned")
        self._stack.__exit__(RuntimeError, error, None)


class _Hashing:
    """A writable stream that counts and hashes what passes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size_bytes += len(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def tell(self) -> int:
        return self.size_bytes

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
