"""Validate: lines to requests or rejections, before an engine is taken. Pure; turns LINES into CHECKED.

A row has a `request` or a `reason`, never both, and each line becomes one row.
"""

import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from schemas import tables
from schemas.contract import check_body, parse_strict
from schemas.failures import Failure
from schemas.shapes import recognise, unknown_fields


def check_lines(lines: pa.Table) -> pa.Table:
    """`tables.CHECKED` of a block of `tables.LINES`, row for row."""
    return pa.Table.from_pylist([check_line(line) for line in lines.to_pylist()], schema=tables.CHECKED)


def check_line(line: dict[str, Any]) -> dict[str, Any]:
    """One CHECKED row of one LINES row."""
    row = {key: line[key] for key in ("source_index", "source_file", "source_line", "source_offset")}
    place = f"{line['source_file']}:{line['source_line']}" if line["source_line"] else line["source_file"]
    if line["line"] is None:
        return {**row, "id": place, **_fault("read", Failure(400, "unreadable_file", line["message"]), None)}
    raw: bytes = line["line"]
    value = parse_strict(raw)
    if isinstance(value, Failure):
        return {**row, "id": place, **_fault("validate", _at(place, value), raw)}
    shaped = recognise(value)
    if isinstance(shaped, Failure):
        return {**row, "id": _id_of_unknown(value) or place, **_fault("validate", _at(place, shaped), raw)}
    row["id"] = shaped.id or place
    failure = check_body(shaped.body, shaped.endpoint)
    if failure is not None:
        return {**row, **_fault("validate", _at(place, failure), raw)}
    return {
        **row,
        "endpoint": shaped.endpoint,
        # The line's own text where the body is all of it, so that it travels as it was written.
        "request": raw.decode() if shaped.body is value else _to_json(shaped.body),
        "extra": _to_json(shaped.extra) if shaped.extra else None,
        "unknown_fields": unknown_fields(shaped, value),
    }


def _id_of_unknown(value: Any) -> str | None:
    """The caller's id in a line whose shape isn't known, so that he finds it again."""
    if not isinstance(value, dict):
        return None
    return next((v for name in ("custom_id", "recordId", "request_id") if isinstance(v := value.get(name), str)), None)


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _at(place: str, failure: Failure) -> Failure:
    return Failure(failure.status_code, failure.reason, f"{place}: {failure.message}", failure.param)


def _fault(stage: str, failure: Failure, raw: bytes | None) -> dict[str, Any]:
    return {
        **asdict(failure),
        "type": failure.type,
        "stage": stage,
        "raw": raw[: tables.RAW_BYTES] if raw is not None else None,
        "attempts": 0,
    }
