"""Changes: how a run's rows differ from those of an earlier run, as one more published table.

Rows of both runs belong together that have the same id of the caller's own; without one, those that ask for the same,
and what is then left at the same place. Needs the published tables of two runs; makes `tables.CHANGES`. Many row groups
are brought together by a sort of Ray Data; a few, here.
"""

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jiter
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.storage import Folder
from pipelines.write import Published, TableWriter
from schemas import tables
from schemas.fingerprint import fingerprint
from schemas.replies import choices_of

# Row groups that are compared without Ray Data.
_GROUPS_AT_ONCE = 8
_SAID = tables.CHANGES.names[1:8]
# What stage 1 knows of a change beside its columns: for the order, and for joining what stands at the same place.
_PLACED = [("has_own_id", pa.bool_()), ("file", pa.string()), ("line", pa.int64())]
_FOUND = pa.schema([*(field.with_nullable(True) for field in tables.CHANGES), *_PLACED])


def publish_changes(
    output: Folder, run_id: str, published: Published, old: Mapping[str, Any], identities: Mapping[str, str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write `changes/` of a run whose tables are written, against the published run of the manifest `old`: its counts,
    and its files. `identities`: what answers now (`pipelines/identity.py`).

    Counts: rows by kind, and `unchanged`; with `against`, the earlier run's id. Faults of whole files are no rows here.
    """
    before = old["model"]["identities"]
    # A fingerprint holds what answers: where that is another, requests are compared without it.
    read = SideReader(output, None if before == identities else (dict(before), dict(identities)))
    groups = [
        *_row_groups(output.join("runs", old["run_id"]), old["run_id"], old["files"], is_old=True),
        *_row_groups(output.join("runs", run_id), run_id, published.files, is_old=False),
    ]
    counts = Counter[str]()
    with TableWriter(output.join("runs", run_id), "changes", tables.CHANGES) as writer:
        for rows in _joined(_found(groups, read)):
            counts.update(rows["kind"].to_pylist())
            writer.write(rows)
    num_rows = sum(group["num_rows"] for group in groups if not group["is_old"])
    told = {kind: counts[kind] for kind in tables.CHANGE_KINDS}
    told["unchanged"] = num_rows - counts["new"] - counts["changed"] - counts["changed_answer"]
    return {"against": old["run_id"], **told}, writer.files


def _row_groups(run: Folder, run_id: str, files: list[dict[str, Any]], is_old: bool) -> list[dict[str, Any]]:
    groups = []
    for file in files:
        table = file["path"].partition("/")[0]
        if table not in ("responses", "errors") or not file["rows"]:
            continue
        with run.open(file["path"]) as stream:
            opened = pq.ParquetFile(stream)
            for number in range(opened.metadata.num_row_groups):
                num_rows = opened.metadata.row_group(number).num_rows
                if table == "errors":
                    lines = opened.read_row_group(number, columns=["source_line"])["source_line"]
                    num_rows -= lines.null_count
                group = {"run_id": run_id, "table": table, "path": file["path"], "row_group": number}
                groups.append({**group, "is_old": is_old, "num_rows": num_rows})
    return groups


def _found(groups: list[dict[str, Any]], read: Callable[[pa.Table], Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """The changes, ordered by file and line."""
    place = [name for name, _ in _PLACED[1:]]
    if len(groups) <= _GROUPS_AT_ONCE:
        sides = pa.concat_tables([tables.SIDES.empty_table(), *read(pa.Table.from_pylist(groups))])
        yield compare(sides).sort_by([(name, "ascending") for name in place])
        return
    import ray.data

    sides = ray.data.from_items(groups, override_num_blocks=len(groups)).map_batches(
        read, batch_format="pyarrow", batch_size=1
    )
    # Blocks that Ray cuts at a size would part equal keys, which the sort has brought into one.
    sides.context.target_max_block_size = None
    found = sides.sort("key").map_batches(compare, batch_format="pyarrow", batch_size=None).sort(place)
    yield from found.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=0)


# --- what is compared -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SideReader:
    """The rows of row groups of published tables, as `tables.SIDES`."""

    output: Folder
    # What answers, by the name of an adapter and "" for the model: in the earlier run and now, where that differs.
    identities: tuple[Mapping[str, str], Mapping[str, str]] | None

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for group in batch.to_pylist():
            with self.output.open("runs", group["run_id"], group["path"]) as stream:
                file = pq.ParquetFile(stream)
                read = self._errors(file, group) if group["table"] == "errors" else self._responses(file, group)
            yield self._sides(read, group["is_old"])

    def _responses(self, file: pq.ParquetFile, group: dict[str, Any]) -> pa.Table:
        columns = ["id", "source_file", "source_line", "fingerprint", "text", "finish_reason"]
        columns += ["request"] if self.identities is not None else []
        read = file.read_row_group(group["row_group"], columns=columns)
        if pc.list_flatten(read["text"]).null_count:
            bodies = file.read_row_group(group["row_group"], columns=["response"])["response"].to_pylist()
            texts = [
                [_calls(body, n) if text is None else text for n, text in enumerate(row)]
                for row, body in zip(read["text"].to_pylist(), bodies, strict=True)
            ]
            read = read.set_column(read.column_names.index("text"), "text", pa.array(texts, read["text"].type))
        return read.rename_columns({"request": "body"}) if self.identities is not None else read

    def _errors(self, file: pq.ParquetFile, group: dict[str, Any]) -> pa.Table:
        columns = ["id", "source_file", "source_line", "fingerprint", "reason", "raw"]
        read = file.read_row_group(group["row_group"], columns=columns)
        return read.filter(pc.is_valid(read["source_line"])).rename_columns({"raw": "body"})

    def _sides(self, read: pa.Table, is_old: bool) -> pa.Table:
        """`tables.SIDES` of the columns that a published table has of it, and `body`, where that is needed."""
        names = [field.name for field in tables.SIDES if field.name in read.column_names]
        told = {name: read[name] for name in names}
        places = pc.binary_join_element_wise(read["source_file"], read["source_line"].cast(pa.string()), ":")
        told["has_own_id"] = pc.not_equal(read["id"], places)
        bodies = read["body"].to_pylist() if "body" in read.column_names else [None] * read.num_rows
        marks = [
            self._mark(known, body, is_old) for known, body in zip(read["fingerprint"].to_pylist(), bodies, strict=True)
        ]
        own = zip(told["has_own_id"].to_pylist(), read["id"].to_pylist(), marks, strict=True)
        keys = [_digest("id", name) if has_own_id else mark for has_own_id, name, mark in own]
        outcomes = [told[name].to_pylist() for name in ("text", "finish_reason", "reason") if name in told]
        told |= {"key": pa.array(keys, pa.string()), "mark": pa.array(marks, pa.string())}
        told["sign"] = pa.array([_digest(*parts) for parts in zip(keys, marks, *outcomes, strict=True)], pa.string())
        told["is_old"] = pa.array([is_old] * read.num_rows, pa.bool_())
        missing = {field.name: pa.nulls(read.num_rows, field.type) for field in tables.SIDES if field.name not in told}
        return pa.table(told | missing).select(tables.SIDES.names).cast(tables.SIDES)

    def _mark(self, known: str | None, body: str | bytes | None, is_old: bool) -> str:
        """Equal for equal requests; of what is no request, for equal lines."""
        if known is not None and self.identities is None:
            return known
        raw = body.encode() if isinstance(body, str) else body or b""
        if known is not None and self.identities is not None:
            try:
                asked = jiter.from_json(raw)
            except ValueError:  # a line that `errors` holds the beginning of alone
                return _digest("raw", raw)
            name = asked.get("model") or ""
            # An adapter is part of what is asked; the model's own name may have changed with it.
            who = name if name in self.identities[0 if is_old else 1] else ""
            return fingerprint(asked, "/v1/completions", f"name {who}")
        return _digest("raw", raw)


def _calls(response: str, choice: int) -> str | None:
    """The tools that a choice without text calls, as JSON; null where it calls none."""
    message = choices_of(jiter.from_json(response.encode()))[choice].get("message") or {}
    calls = [call.get("function") for call in message.get("tool_calls") or []]
    return json.dumps(calls, ensure_ascii=False, sort_keys=True) if calls else None


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# --- the difference -------------------------------------------------------------------------------------------------


def compare(sides: pa.Table) -> pa.Table:
    """The changes among rows of `tables.SIDES`, of which those of a key are all there: columns of `tables.CHANGES`,
    and where each stands.

    Of several rows with the same key, equal ones belong together first, then those that ask for the same, then those
    that have the same id, in the order of their places.
    """
    by_sign = sides.group_by("sign").aggregate([("is_old", "sum"), ("is_old", "count")])
    is_same = pc.equal(pc.multiply(by_sign["is_old_sum"], 2), by_sign["is_old_count"])
    unchanged = by_sign.filter(is_same)["sign"]
    rows = sides.filter(pc.invert(pc.is_in(sides["sign"], value_set=unchanged.combine_chunks())))
    by_key = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows.to_pylist():
        by_key[row["key"]].append(row)
    found: list[dict[str, Any]] = []
    for members in by_key.values():
        found += _compare(members)
    return pa.Table.from_pylist(found, schema=_FOUND)


def _compare(members: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    members.sort(key=lambda row: (row["source_file"], row["source_line"]))
    olds = [row for row in members if row["is_old"]]
    news = [row for row in members if not row["is_old"]]
    for kind, name in (("", "sign"), ("changed_answer", "mark"), ("changed", "key")):
        waiting = defaultdict[str, deque[dict[str, Any]]](deque)
        for row in olds:
            waiting[row[name]].append(row)
        taken, left = set(), []
        for row in news:
            if not (partners := waiting[row[name]]):
                left.append(row)
                continue
            old = partners.popleft()
            taken.add(id(old))
            if kind:
                yield _change(kind, row, old)
        news, olds = left, [row for row in olds if id(row) not in taken]
    for row in news:
        yield _change("new", row, None)
    for row in olds:
        yield _change("gone", None, row)


def _change(kind: str, new: dict[str, Any] | None, old: dict[str, Any] | None) -> dict[str, Any]:
    row = new or old
    assert row is not None, "a change is of a row"
    told = {name: new[name] if new else None for name in _SAID} | {"kind": kind, "id": row["id"]}
    told |= {f"old_{name}": old[name] if old else None for name in _SAID if name != "id"}
    return told | {"has_own_id": row["has_own_id"], "file": row["source_file"], "line": row["source_line"]}


def _joined(found: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """`tables.CHANGES` of rows ordered by their places. Those without an id of their own that left one request and got
    another at the same place have changed."""
    held: list[dict[str, Any]] = []
    for table in found:
        if pc.all(table["has_own_id"]).as_py():
            yield _as_changes(_at_one_place(held))
            held = []
            yield table.select(tables.CHANGES.names).cast(tables.CHANGES)
            continue
        places = [
            list(rows) for _, rows in groupby(held + table.to_pylist(), key=lambda row: (row["file"], row["line"]))
        ]
        # The last place may go on in the next table.
        held = places.pop() if places else []
        yield _as_changes([row for standing in places for row in _at_one_place(standing)])
    yield _as_changes(_at_one_place(held))


def _as_changes(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=tables.CHANGES)


def _at_one_place(standing: list[dict[str, Any]]) -> list[dict[str, Any]]:
    loose = {row["kind"]: row for row in standing if not row["has_own_id"]}
    if "new" in loose and "gone" in loose:
        old = {name: value for name, value in loose["gone"].items() if name.startswith("old_")}
        joined = {**loose["new"], **old, "kind": "changed"}
        standing = [row for row in standing if row is not loose["new"] and row is not loose["gone"]] + [joined]
    return standing
