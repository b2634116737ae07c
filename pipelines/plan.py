"""Plan: one pass over the checked rows that spools them into the run's folder; from then on nothing re-reads the input.

A spool part holds the accepted rows of one block as row groups; a row group is a chunk, the unit of dispatch, and is
addressed by its number. The order is that of the input.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.storage import Folder
from schemas import tables
from schemas.plans import Chunk, Part, Plan
from schemas.requests import Tally

# Small enough that the last chunks end together, large enough that a chunk's own cost is lost in its work.
CHUNK_ROWS = 32


def spool(checked: Any, work: Folder, show_rows: Callable[[int], None]) -> Plan:
    """Run a dataset of `tables.CHECKED` into `work` as spool parts, and return the plan of what they hold.

    `show_rows` is told how many rows are written by now.
    """
    written = checked.map_batches(SpoolWriter(work), batch_format="pyarrow", batch_size=None, zero_copy_batch=True)
    described, num_rows = [], 0
    for row in written.iter_rows():
        described.append(row)
        num_rows += sum(row["chunk_rows"]) + row["num_rejections"]
        show_rows(num_rows)
    parts, validated, number = [], Tally(), 0
    for row in sorted(described, key=lambda row: row["part"]):
        chunks = []
        for row_group, num_rows in enumerate(row["chunk_rows"]):
            chunks.append(Chunk(number, row["part"], row_group, num_rows))
            number += 1
        tally = Tally(**json.loads(row["tally"]))
        validated.add(tally)
        parts.append(Part(row["part"], tuple(chunks), tally.num_failed))
    return Plan(tuple(parts), validated)


def read_chunk(work: Folder, chunk: Chunk) -> pa.Table:
    """The requests of one chunk, as `tables.REQUESTS`."""
    with work.open("spool", f"{chunk.part}.parquet") as stream:
        return pq.ParquetFile(stream).read_row_group(chunk.row_group).cast(tables.REQUESTS)


def read_rejections(work: Folder, part: Part) -> pa.Table:
    """The rejections of one block, as `tables.REJECTIONS`."""
    if not part.num_rejections:
        return tables.REJECTIONS.empty_table()
    with work.open("rejections", f"{part.name}.parquet") as stream:
        return pq.read_table(stream).cast(tables.REJECTIONS)


def to_items(chunks: list[Chunk]) -> list[dict[str, Any]]:
    """Chunks as rows of a dataset."""
    return [asdict(chunk) for chunk in chunks]


@dataclass(frozen=True)
class SpoolWriter:
    """Writes each block of checked rows as one spool part, and says what it wrote."""

    work: Folder
    chunk_rows: int = CHUNK_ROWS

    def __call__(self, block: pa.Table) -> Iterator[dict[str, Any]]:
        if not block.num_rows:
            return
        # Named after the first row, so that a repeated task writes the same file again.
        name = "{:06d}-{:012d}".format(block["source_index"][0].as_py(), block["source_line"][0].as_py() or 10**12 - 1)
        accepted = block.filter(pc.is_null(block["reason"])).select(tables.REQUESTS.names)
        rejected = block.filter(pc.is_valid(block["reason"])).select(tables.REJECTIONS.names)
        chunk_rows = []
        if accepted.num_rows:
            with (
                self.work.create("spool", f"{name}.parquet") as stream,
                pq.ParquetWriter(stream, tables.REQUESTS, compression="zstd") as writer,
            ):
                for start in range(0, accepted.num_rows, self.chunk_rows):
                    chunk = accepted.slice(start, self.chunk_rows)
                    writer.write_table(chunk.cast(tables.REQUESTS), row_group_size=self.chunk_rows)
                    chunk_rows.append(chunk.num_rows)
        if rejected.num_rows:
            with self.work.create("rejections", f"{name}.parquet") as stream:
                pq.write_table(rejected.cast(tables.REJECTIONS), stream, compression="zstd")
        unknown = block.filter(pc.is_null(block["reason"]))["unknown_fields"]
        tally = Tally(
            num_failed=rejected.num_rows,
            reasons=tables.count_values(rejected["reason"]),
            unknown_fields=tables.count_values(pc.list_flatten(unknown)),
        )
        yield {
            "part": [name],
            "chunk_rows": [chunk_rows],
            "num_rejections": [rejected.num_rows],
            "tally": [json.dumps(asdict(tally))],
        }
