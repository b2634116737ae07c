"""Validate: lines to requests or rejections, before an engine is taken. Pure; turns LINES into CHECKED.

A row has a `request` or a `reason`, never both, and each line becomes one row.
"""

from dataclasses import asdict
from typing import Any

import pyarrow as pa

from schemas import tables
from schemas.contract import check_body, parse_strict
from schemas.failures import Failure
from schemas.requests import Endpoint

ENDPOINT: Endpoint = "/v1/completions"


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
    body = parse_strict(raw)
    if isinstance(body, Failure):
        return {**row, "id": place, **_fault("validate", _at(place, body), raw)}
    failure = check_body(body, ENDPOINT)
    row["id"] = _caller_id(body) or place
    if failure is not None:
        return {**row, **_fault("validate", _at(place, failure), raw)}
    return {**row, "endpoint": ENDPOINT, "request": raw.decode()}


def _caller_id(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    return next((value for name in ("custom_id", "request_id") if isinstance(value := body.get(name), str)), None)


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
