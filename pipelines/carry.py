"""Carry: answers that an earlier run published, for equal requests of this one: nobody computes them again.

Equal is what has the same fingerprint: model, adapter and all that decides an answer are in it. Needs rows of
`tables.CHECKED` and the tables of a published run; makes staged parts of `tables.OUTCOMES`. Both sides are brought
together by a sort of Ray Data; the driver and each task hold fingerprints alone.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.outcomes import tally_of
from pipelines.storage import Folder
from schemas import tables
from schemas.plans import Carried
from schemas.requests import Tally

# What an answer brings to a row; the rest of an outcome is the row's own.
_ANSWER = [name for name in tables.OUTCOMES.names if name not in tables.REQUESTS.names]
_FROM_RESPONSES = [name for name in _ANSWER if name in tables.RESPONSES.names]
_FROM_USAGE = [name for name in _ANSWER if name in tables.USAGE.names and name not in tables.RESPONSES.names]
_NONE = pa.chunked_array([pa.array([], pa.string())])


def carry_over(checked: Any, output: Folder, manifest: Mapping[str, Any], work: Folder) -> Carried:
    """Stage the answers that the run of `manifest` has for the accepted rows of a dataset of `tables.CHECKED`."""
    import ray.data

    run = output.join("runs", manifest["run_id"])
    groups = _row_groups(run, manifest)
    known = _fingerprints(run, manifest)
    asked = checked.map_batches(Asked(known), batch_format="pyarrow", batch_size=None).materialize()
    blocks = asked.iter_batches(batch_format="pyarrow", batch_size=None)
    fingerprints = pc.unique(_joined([_NONE, *(block["fingerprint"] for block in blocks)]))
    if not len(fingerprints):
        return Carried()
    answers = ray.data.from_items(groups, override_num_blocks=len(groups)).map_batches(
        AnswerReader(run, fingerprints), batch_format="pyarrow", batch_size=1
    )
    both = asked.union(answers)
    # Blocks that Ray cuts at a size would part equal fingerprints, which the sort has brought into one.
    both.context.target_max_block_size = None
    parts, tally = [], Tally()
    writer = CarriedWriter(work)
    for row in both.sort("fingerprint").map_batches(writer, batch_format="pyarrow", batch_size=None).iter_rows():
        parts.append(row["part"])
        tally.add(Tally(**json.loads(row["tally"])))
    return Carried(tuple(sorted(parts)), tally, fingerprints)


def _files(manifest: Mapping[str, Any], table: str) -> list[dict[str, Any]]:
    return [file for file in manifest["files"] if file["path"].startswith(f"{table}/")]


def _fingerprints(run: Folder, manifest: Mapping[str, Any]) -> pa.Array:
    """Those of all answers of a published run."""
    columns = [_NONE]
    for file in _files(manifest, "responses"):
        with run.open(file["path"]) as stream:
            columns.append(pq.read_table(stream, columns=["fingerprint"])["fingerprint"])
    return pc.drop_null(_joined(columns))


def _joined(columns: list[pa.ChunkedArray]) -> pa.Array:
    return pa.concat_arrays([chunk for column in columns for chunk in column.chunks])


def _row_groups(run: Folder, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row groups of `responses`, each with the pieces of `usage` that hold the same rows: both tables have them in
    the same order, and cut them into files of their own."""
    ends = list(accumulate((file["rows"] for file in _files(manifest, "usage")), initial=0))
    usage = [(file["path"], *span) for file, span in zip(_files(manifest, "usage"), pairwise(ends), strict=True)]
    groups, first = [], 0
    for file in _files(manifest, "responses"):
        with run.open(file["path"]) as stream:
            metadata = pq.ParquetFile(stream).metadata
        for number in range(metadata.num_row_groups):
            end = first + metadata.row_group(number).num_rows
            pieces = [
                {"path": path, "start": max(first, start) - start, "end": min(end, stop) - start}
                for path, start, stop in usage
                if start < end and first < stop
            ]
            groups.append({"path": file["path"], "row_group": number, "usage": json.dumps(pieces)})
            first = end
    return groups


@dataclass(frozen=True)
class Asked:
    """Of a block of `tables.CHECKED`, the accepted rows that have one of some fingerprints, as outcomes to be."""

    known: pa.Array

    def __call__(self, block: pa.Table) -> pa.Table:
        accepted = block.filter(pc.is_null(block["reason"]))
        rows = accepted.filter(pc.is_in(accepted["fingerprint"], value_set=self.known))
        return tables.as_outcomes(rows.select(tables.REQUESTS.names))


@dataclass(frozen=True)
class AnswerReader:
    """The answers of a row group that have one of some fingerprints, as outcomes without a row of their own."""

    run: Folder
    wanted: pa.Array

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for group in batch.to_pylist():
            with self.run.open(group["path"]) as stream:
                columns = ["fingerprint", *_FROM_RESPONSES]
                answers = pq.ParquetFile(stream).read_row_group(group["row_group"], columns=columns)
            pieces = []
            for piece in json.loads(group["usage"]):
                with self.run.open(piece["path"]) as stream:
                    usage = pq.read_table(stream, columns=_FROM_USAGE)
                pieces.append(usage.slice(piece["start"], piece["end"] - piece["start"]))
            used = pa.concat_tables(pieces)
            assert used.num_rows == answers.num_rows, "usage and responses hold the same rows"
            given = {name: table[name] for table in (answers, used) for name in table.column_names}
            rows = tables.as_outcomes(pa.table(given))
            yield rows.filter(pc.is_in(rows["fingerprint"], value_set=self.wanted))


@dataclass(frozen=True)
class CarriedWriter:
    """Gives the rows of a block the answers that stand in it for their fingerprints, and stages them as one part."""

    work: Folder

    def __call__(self, block: pa.Table) -> Iterator[dict[str, Any]]:
        is_row = pc.is_valid(block["source_index"])
        rows, answers = block.filter(is_row), block.filter(pc.invert(is_row))
        if not rows.num_rows:
            return
        answered = answers.take(pc.index_in(rows["fingerprint"], value_set=answers["fingerprint"].combine_chunks()))
        own = {name: rows[name] for name in tables.REQUESTS.names}
        given = {name: answered[name] for name in _ANSWER}
        given |= {"is_carried": pa.array([True] * rows.num_rows), "is_deduplicated": pa.array([False] * rows.num_rows)}
        outcomes = tables.as_outcomes(pa.table(own | given))
        # Named after its first fingerprint, so that a repeated task writes the same file again.
        part = f"carried/{rows['fingerprint'][0].as_py()}.parquet"
        with self.work.create(part) as stream:
            pq.write_table(outcomes, stream, compression="zstd")
        yield {"part": [part], "tally": [json.dumps(asdict(tally_of(outcomes)))]}
