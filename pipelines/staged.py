"""Staged: finished rows made durable, part by part, and read again in the order of the input.

OUT/_work/<run id>/staged/<chunk>/<attempt>-<number>.parquet
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.storage import Folder
from schemas import tables

# Rows that are sorted together, in bytes of memory.
SORTED_BYTES = 32 << 20
# Staged parts that are read together.
_PARTS_AT_ONCE = 64
_MOST_ROWS = 1 << 16
# What staged rows are sorted by: place in the input, and attempt.
_ORDER = [("place", "ascending"), ("try", "ascending")]
# Lines that a file may have, as far as a row's place in the order of the input is concerned.
_MOST_LINES = 1 << 40
_PLACED_BY = ["source_index", "source_line"]


@dataclass(frozen=True)
class Stager:
    """Keeps finished rows as small parts, named after chunk and attempt, until the run is published."""

    work: Folder

    def chunks(self) -> set[int]:
        """Those that have staged rows."""
        return {int(name) for name in self.work.join("staged").names()}

    def begin(self, chunk: int) -> tuple[int, list[str], pa.Table]:
        """A new attempt at a chunk: its number, the parts that earlier ones left, and the rows in these, each once.

        The number is one more than the newest that left a part.
        """
        names = [name for name in self._folder(chunk).names() if name[0].isdigit()]
        parts = [f"staged/{chunk:08d}/{name}" for name in names]
        rows = read_parts(self.work, parts)
        return 1 + max((int(name.partition("-")[0]) for name in names), default=0), parts, rows

    def put(self, chunk: int, attempt: int, sequence: int, rows: pa.Table) -> str:
        """Make rows (`tables.OUTCOMES`) durable; returns the part's path below the work folder."""
        name = f"{attempt:03d}-{sequence:05d}.parquet"
        with self._folder(chunk).create(name) as stream:
            pq.write_table(rows, stream, compression="zstd")
        return f"staged/{chunk:08d}/{name}"

    def _folder(self, chunk: int) -> Folder:
        return self.work.join("staged", f"{chunk:08d}")


def sorted_outcomes(work: Folder, parts: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of staged parts (paths below `work`) in input order, each once, in tables with the columns of
    `tables.OUTCOMES` and of about SORTED_BYTES.

    What is more than one of them is sorted by Ray Data.
    """
    num_bytes, places = _survey(work, parts)
    if not len(places) or (len(parts) <= _PARTS_AT_ONCE and num_bytes <= SORTED_BYTES):
        yield read_parts(work, parts)
        return
    import ray.data

    items = [{"parts": parts[start : start + _PARTS_AT_ONCE]} for start in range(0, len(parts), _PARTS_AT_ONCE)]
    staged = ray.data.from_items(items, override_num_blocks=len(items))
    staged.context.target_max_block_size = SORTED_BYTES
    placed = staged.map_batches(PartReader(work, SORTED_BYTES), batch_format="pyarrow", batch_size=1)
    # Ray would look at all rows before it sorts the first, and cut them into as many ranges as there are items.
    shares = np.linspace(0, 1, max(2, -(-num_bytes // SORTED_BYTES)) + 1)[1:-1]
    ordered = placed.sort("place", boundaries=np.unique(np.quantile(places, shares, method="nearest")).tolist())
    yield from _newest(ordered.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=0))


def _survey(work: Folder, parts: Sequence[str]) -> tuple[int, np.ndarray]:
    """How many bytes parts hold in memory, about, and the places of some of their rows; by some that are spread over
    all."""
    num_bytes, places = 0, [np.empty(0, np.int64)]
    some = parts[:: max(1, len(parts) // _PARTS_AT_ONCE)]
    for part in some:
        with work.open(part) as stream:
            file = pq.ParquetFile(stream)
            num_bytes += _num_bytes(file)
            places.append(_places(file.read(_PLACED_BY)).to_numpy())
    return num_bytes * len(parts) // max(1, len(some)), np.concatenate(places)


@dataclass(frozen=True)
class PartReader:
    """The rows of staged parts, with the place of each in the order of the input and the number of its attempt; in
    tables of about `num_bytes`."""

    work: Folder
    num_bytes: int

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        yield from self.read(chain.from_iterable(batch["parts"].to_pylist()))

    def read(self, parts: Iterable[str]) -> Iterator[pa.Table]:
        read, num_bytes = [tables.OUTCOMES.empty_table()], 0
        for part in parts:
            with self.work.open(part) as stream:
                for batch in _batches(pq.ParquetFile(stream), self.num_bytes):
                    read.append(pa.Table.from_batches([batch]).cast(tables.OUTCOMES))
                    num_bytes += batch.nbytes
                    if num_bytes >= self.num_bytes:
                        yield _placed(read)
                        read, num_bytes = read[:1], 0
        yield _placed(read)


def _batches(file: pq.ParquetFile, num_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of a file, so many at a time that they have about `num_bytes`."""
    rows_each = num_bytes * file.metadata.num_rows // max(1, _num_bytes(file))
    yield from file.iter_batches(min(max(1, rows_each), _MOST_ROWS), use_threads=False)


def _num_bytes(file: pq.ParquetFile) -> int:
    """What a file's rows have in memory, about."""
    return sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))


def read_parts(work: Folder, parts: Sequence[str]) -> pa.Table:
    """The rows of staged parts in input order, as `tables.OUTCOMES`; of one with several outcomes, the newest."""
    rows = pa.concat_tables(PartReader(work, SORTED_BYTES).read(parts)).sort_by(_ORDER)
    return pa.concat_tables([tables.OUTCOMES.empty_table(), *_newest([rows])])


def _placed(read: list[pa.Table]) -> pa.Table:
    # In one piece each: what is in hundreds of them is slow to sort, and to hand to another process.
    rows = pa.concat_tables(read).combine_chunks()
    tries = pc.fill_null(pc.coalesce(rows["attempt"], rows["attempts"]), 0)
    return rows.append_column("place", _places(rows)).append_column("try", tries)


def _places(rows: pa.Table) -> pa.ChunkedArray:
    """Of each row, its place in the order of the input."""
    # A fault of a whole file stands behind its lines.
    lines = pc.fill_null(rows["source_line"], _MOST_LINES - 1)
    return pc.add(pc.multiply(rows["source_index"].cast(pa.int64()), _MOST_LINES), lines)


def _newest(outcomes: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Of a row with several outcomes, the newest: that of an attempt which superseded another. Asserts the order."""
    held: pa.Table | None = None
    for table in outcomes:
        if not table.num_rows:
            continue
        # The last row waits for the next table: the same place may go on there.
        rows = table if held is None else pa.concat_tables([held, table])
        steps = np.diff(rows["place"].to_numpy())
        assert (steps >= 0).all(), "the outcomes are not in input order"
        if not steps.all():
            rows = rows.sort_by(_ORDER)
        held = rows.slice(rows.num_rows - 1)
        rows = rows.slice(0, rows.num_rows - 1)
        if not steps.all():
            # A file may have several faults that are of no line.
            rows = rows.filter(pa.array((steps > 0) | ~rows["source_line"].is_valid().to_numpy()))
        yield rows.select(tables.OUTCOMES.names)
    if held is not None:
        yield held.select(tables.OUTCOMES.names)
