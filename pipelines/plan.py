"""Plan: one pass over the checked rows gives totals, order and chunks, and spools them into the run's folder.

From then on nothing re-reads the input. The rows are sorted by priority and then by their prompts' places in the tree
of all prompts, with their payloads, by Ray Data; each range that comes of it becomes one spool part, whose row groups
are the chunks. The driver orders the chunks, of which it holds descriptions alone (`pipelines/order.py`).

Equal requests that must have the same answer stand one behind the other in one chunk, and an engine sees the first
alone. Those of different priorities are not looked for: each band is answered when its turn comes.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.order import PROMPT_COST, ChunkSize, Leaf, cut, shares, walk
from pipelines.prefixes import first_levels, num_shared_tokens, shared_levels
from pipelines.storage import Folder
from schemas import tables
from schemas.plans import Carried, Chunk, Plan, Totals
from schemas.requests import Tally

# Work of a chunk for each of its rows, in tokens: longer requests are fewer to a chunk.
_WORK_A_ROW = 64
# A plan is cut into this many chunks for each replica, where the rows that a replica has in flight allow it.
_CHUNKS_EACH = 100
# Repeated rows that one answer is fanned out to; what goes beyond is answered once more.
MAX_REPEATED = 4096


def chunk_size(num_rows: int, num_replicas: int, rows_in_flight: int) -> ChunkSize:
    """Chunks that are small beside a replica's share of so many rows, and beside what it has in flight, or nothing
    would overlap; but no smaller than a chunk's own cost is worth."""
    most = max(rows_in_flight // 6, min(rows_in_flight, num_rows // (num_replicas * _CHUNKS_EACH)), 1)
    return ChunkSize(float(most * _WORK_A_ROW), max(1, most // 4), most)


def make_plan(
    checked: Any,
    work: Folder,
    *,
    num_replicas: int,
    rows_in_flight: int,
    with_dedup: bool,
    show_rows: Callable[[int], None],
    carry: Callable[[Any], Carried] | None = None,
) -> Plan:
    """Run a dataset of `tables.CHECKED`, spool its rows into `work`, and return what is to be done with them.

    `rows_in_flight`: those that a replica has at a time. `show_rows` is told how many rows are checked by now. `carry`
    stages answers for some of the rows; nobody need answer these.
    """
    import ray.data

    blocks, num_rows = [], 0
    for bundle in checked.iter_internal_ref_bundles():
        blocks += bundle.block_refs
        num_rows += bundle.num_rows() or 0
        show_rows(num_rows)
    if not num_rows:
        return Plan()
    kept = ray.data.from_arrow_refs(blocks)
    # Blocks that Ray cuts at a size would part equal requests, which the sort has brought into one.
    kept.context.target_max_block_size = None
    settled, parts = Tally(), []
    for row in kept.map_batches(RejectionWriter(work), batch_format="pyarrow", batch_size=None).iter_rows():
        settled.add(Tally(**json.loads(row["tally"])))
        parts += [row["rejections"]] if row["rejections"] else []
    carried = carry(kept) if carry is not None and num_rows > settled.num_failed else Carried()
    settled.add(carried.tally)
    parts += carried.parts
    num_left = num_rows - settled.num_done
    if not num_left:
        return Plan(settled=settled, settled_parts=tuple(sorted(parts)))
    keyed = kept.map_batches(WithKey(carried.fingerprints), batch_format="pyarrow", batch_size=None)
    if len(blocks) > 1:
        keyed = keyed.sort("key")
    writer = SpoolWriter(work, chunk_size(num_left, num_replicas, rows_in_flight), with_dedup)
    chunks, totals = [], Totals()
    for row in keyed.map_batches(writer, batch_format="pyarrow", batch_size=None).iter_rows():
        if told := row.pop("totals"):
            totals.add(json.loads(told))
        chunks.append(Chunk(**row))
    ordered = arrange(chunks, num_replicas * rows_in_flight)
    if num_replicas > 1:
        ordered = split(ordered, num_replicas)
    # What is known of each request was for cutting: of a plan, the driver holds the same however long its chunks are.
    cut_out = tuple(replace(chunk, rows_each=b"", work_each=b"") for chunk in ordered)
    return Plan(cut_out, totals, settled, tuple(sorted(parts)))


@dataclass(frozen=True)
class WithKey:
    """The rows of a block of `tables.CHECKED` that are to be answered, with what they are sorted by: priority, path,
    fingerprint."""

    # Of rows that are answered already.
    carried: pa.Array | None

    def __call__(self, block: pa.Table) -> pa.Table:
        is_left = pc.is_null(block["reason"])
        if self.carried is not None:
            is_left = pc.and_(is_left, pc.invert(pc.is_in(block["fingerprint"], value_set=self.carried)))
        left = block.filter(is_left).drop_columns(tables.FAULTS.names)
        columns = (left[name].to_pylist() for name in ("priority", "path", "fingerprint"))
        keys = [
            (priority + 2**63).to_bytes(8) + path + bytes.fromhex(mark)
            for priority, path, mark in zip(*columns, strict=True)
        ]
        return left.append_column("key", pa.array(keys, pa.binary()))


def arrange(chunks: list[Chunk], width: int) -> list[Chunk]:
    """Chunks in the order in which they are worked on. `width`: rows in flight on all replicas together."""
    ordered = []
    by_band = sorted(chunks, key=lambda chunk: (chunk.priority, chunk.part, chunk.row_group))
    for _, band in groupby(by_band, key=lambda chunk: chunk.priority):
        members = list(band)
        leaves = [Leaf(chunk.path, chunk.work, chunk.longest) for chunk in members]
        ordered += [members[place] for place in walk(leaves, width)]
    return ordered


def split(chunks: list[Chunk], num_replicas: int) -> list[Chunk]:
    """The same rows in the same order, in chunks that grow smaller towards the end: then all replicas end together."""
    most = shares([chunk.work for chunk in chunks], num_replicas)
    return [piece for chunk, work in zip(chunks, most, strict=True) for piece in _pieces(chunk, work)]


def _pieces(chunk: Chunk, most_work: float) -> Iterator[Chunk]:
    if chunk.work <= most_work or chunk.num_requests == 1:
        yield chunk
        return
    rows = np.frombuffer(chunk.rows_each, np.uint32).tolist()
    works = np.frombuffer(chunk.work_each, np.float32).tolist()
    first = begin = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or sum(works[first : place + 1]) > most_work:
            num_rows = sum(rows[first:place])
            yield replace(
                chunk,
                start=chunk.start + begin,
                num_rows=num_rows,
                num_requests=place - first,
                work=sum(works[first:place]),
                rows_each=np.array(rows[first:place], np.uint32).tobytes(),
                work_each=np.array(works[first:place], np.float32).tobytes(),
            )
            first, begin = place, begin + num_rows


def read_chunk(work: Folder, part: str, row_group: int, start: int, num_rows: int) -> pa.Table:
    """The rows of one chunk, as `tables.SPOOLED`."""
    with work.open("spool", f"{part}.parquet") as stream:
        group = pq.ParquetFile(stream).read_row_group(row_group)
    return group.slice(start, num_rows).cast(tables.SPOOLED)


def _part_name(block: pa.Table) -> str:
    """Named after a block's first row, so that a repeated task writes the same file again."""
    return "{:06d}-{:012d}".format(block["source_index"][0].as_py(), block["source_line"][0].as_py() or 10**12 - 1)


@dataclass(frozen=True)
class RejectionWriter:
    """Writes the rejected rows of each block as outcomes, and says what validation found in it."""

    work: Folder

    def __call__(self, block: pa.Table) -> Iterator[dict[str, Any]]:
        if not block.num_rows:
            return
        rejected = block.filter(pc.is_valid(block["reason"]))
        path = None
        if rejected.num_rows:
            path = f"rejections/{_part_name(block)}.parquet"
            with self.work.create(path) as stream:
                pq.write_table(tables.as_outcomes(rejected), stream, compression="zstd")
        unknown = block.filter(pc.is_null(block["reason"]))["unknown_fields"]
        tally = Tally(
            num_failed=rejected.num_rows,
            reasons=tables.count_values(rejected["reason"]),
            unknown_fields=tables.count_values(pc.list_flatten(unknown)),
        )
        yield {"tally": [json.dumps(asdict(tally))], "rejections": pa.array([path], pa.string())}


@dataclass(slots=True)
class _Asked:
    """A request that an engine answers: the rows that ask for it, as places in a block; what it comes to."""

    first: int
    end: int
    priority: int
    path: bytes
    num_prompt_tokens: int
    num_output_tokens: int
    longest: int
    num_shared_tokens: int = 0

    @property
    def work(self) -> float:
        return self.num_output_tokens + PROMPT_COST * (self.num_prompt_tokens - self.num_shared_tokens)

    @property
    def leaf(self) -> Leaf:
        return Leaf(self.path, self.work, self.longest)


@dataclass(frozen=True)
class SpoolWriter:
    """Writes a block of sorted rows as one spool part with a row group for each chunk, and says what it wrote."""

    work: Folder
    size: ChunkSize
    with_dedup: bool = True

    def __call__(self, block: pa.Table) -> Iterator[dict[str, Any]]:
        if not block.num_rows:
            return
        block = block.sort_by([(name, "ascending") for name in ("key", "source_index", "source_line")])
        chunks = []
        for _, band in groupby(self._requests(block), key=lambda asked: asked.priority):
            asked = _ordered(list(band))
            chunks += [asked[start:end] for start, end in cut([one.leaf for one in asked], self.size)]
        part = _part_name(block)
        with (
            self.work.create("spool", f"{part}.parquet") as stream,
            pq.ParquetWriter(stream, tables.SPOOLED, compression="zstd") as writer,
        ):
            for asked in chunks:
                rows = block.take([place for one in asked for place in range(one.first, one.end)])
                repeated = pa.array([place > one.first for one in asked for place in range(one.first, one.end)])
                spooled = rows.select(tables.REQUESTS.names).append_column("is_repeated", repeated)
                writer.write_table(spooled.cast(tables.SPOOLED), row_group_size=rows.num_rows)
        described = [asdict(_describe(part, number, asked)) for number, asked in enumerate(chunks)]
        totals = _totals([one for asked in chunks for one in asked])
        yield {name: [row[name] for row in described] for name in described[0]} | {
            "totals": pa.array([json.dumps(totals)] + [None] * (len(described) - 1), pa.string())
        }

    def _requests(self, block: pa.Table) -> list[_Asked]:
        """The requests of a sorted block; equal ones that must have the same answer are one."""
        known = ("priority", "path", "num_prompt_tokens", "num_output_tokens", "longest_answer")
        columns = (block[name].to_pylist() for name in ("key", "is_deterministic", *known))
        asked: list[_Asked] = []
        last_key = None
        for place, (key, is_deterministic, *values) in enumerate(zip(*columns, strict=True)):
            is_repeated = self.with_dedup and is_deterministic and key == last_key
            if is_repeated and place - asked[-1].first <= MAX_REPEATED:
                asked[-1].end = place + 1
            else:
                asked.append(_Asked(place, place + 1, *values))
            last_key = key
        return asked


def _ordered(asked: list[_Asked]) -> list[_Asked]:
    """Requests in the order of the plan; each knows what it shares with the one before."""
    ordered = [asked[place] for place in walk([one.leaf for one in asked])]
    for before, one in pairwise(ordered):
        one.num_shared_tokens = min(num_shared_tokens(shared_levels(before.path, one.path)), one.num_prompt_tokens)
    return ordered


def _describe(part: str, row_group: int, asked: list[_Asked]) -> Chunk:
    rows = [one.end - one.first for one in asked]
    works = [one.work for one in asked]
    path = asked[0].path
    for one in asked[1:]:
        path = first_levels(path, shared_levels(path, one.path))
    return Chunk(
        part=part,
        row_group=row_group,
        start=0,
        num_rows=sum(rows),
        num_requests=len(asked),
        priority=asked[0].priority,
        path=path,
        work=sum(works),
        longest=max(one.longest for one in asked),
        rows_each=np.array(rows, np.uint32).tobytes(),
        work_each=np.array(works, np.float32).tobytes(),
    )


def _totals(asked: list[_Asked]) -> dict[str, float]:
    """The fields of `Totals` for some requests."""
    repeated = [one.end - one.first - 1 for one in asked]
    outputs = [one.num_output_tokens for one in asked]
    repeated_tokens = sum(number * one.num_prompt_tokens for number, one in zip(repeated, asked, strict=True))
    return {
        "num_rows": sum(repeated) + len(asked),
        "num_repeated": sum(repeated),
        "prompt_tokens": sum(one.num_prompt_tokens for one in asked) + repeated_tokens,
        "repeated_tokens": repeated_tokens,
        "shared_tokens": sum(one.num_shared_tokens for one in asked),
        "output_tokens": sum(tokens * (number + 1) for tokens, number in zip(outputs, repeated, strict=True)),
        "computed_tokens": sum(outputs),
        "work": sum(one.num_output_tokens + PROMPT_COST * one.num_prompt_tokens for one in asked),
    }
