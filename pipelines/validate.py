"""Validate: lines to requests or rejections, before an engine is taken. Pure; turns LINES into CHECKED.

A row has a `request` or a `reason`, never both, and each line becomes one row.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from pipelines.checks import Checks
from pipelines.tokens import Prompt
from schemas import tables
from schemas.contract import known_fields, parse_strict
from schemas.dialects import to_engine
from schemas.failures import Failure
from schemas.fingerprint import fingerprint, is_deterministic
from schemas.requests import Endpoint
from schemas.rules import max_tokens_of, refuse
from schemas.shapes import Shaped, recognise, unknown_fields

# Tokens expected of a chat that may go on to the end of the context: hardly one does.
_UNBOUNDED_ANSWER = 256


@dataclass(frozen=True)
class Validator:
    """Judges blocks of lines. `fill`: fields for the bodies that don't have them, as `--set` gives them."""

    checks: Checks
    # What answers under a name (see `pipelines/identity.py`), "" standing for the model itself.
    identities: Mapping[str, str] = field(default_factory=dict)
    endpoint: Endpoint | None = None
    fill: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def __call__(self, lines: pa.Table) -> pa.Table:
        """`tables.CHECKED` of a block of `tables.LINES`, row for row."""
        return pa.Table.from_pylist([self.check(line) for line in lines.to_pylist()], schema=tables.CHECKED)

    def check(self, line: dict[str, Any]) -> dict[str, Any]:
        """One CHECKED row of one LINES row."""
        row = {key: line[key] for key in ("source_index", "source_file", "source_line", "source_offset")}
        number, raw = line["source_line"], line["line"]
        place = f"{line['source_file']}:{number}" if number else line["source_file"]
        if line["reason"] is not None:
            failure = Failure(413 if line["reason"] == "line_too_long" else 400, line["reason"], line["message"])
            return {**row, "id": place, **_fault("read", _at(place, failure) if number else failure, raw)}
        value = parse_strict(raw)
        if isinstance(value, Failure):
            return {**row, "id": place, **_fault("validate", _at(place, value), raw)}
        shaped = recognise(value, self.endpoint)
        if isinstance(shaped, Failure):
            return {**row, "id": _id_of_unknown(value) or place, **_fault("validate", _at(place, shaped), raw)}
        row["id"] = shaped.id or place
        body = self._filled(shaped)
        unknown = unknown_fields(shaped, value)
        found = self._refuse_unknown(unknown, shaped) or self.checks.check(body, shaped.endpoint)
        if isinstance(found, Failure):
            return {**row, **_fault("validate", _at(place, found), raw)}
        return {
            **row,
            "endpoint": shaped.endpoint,
            # The line's own text where the body is all of it, so that it travels as it was written.
            "request": raw.decode() if body is value else _to_json(body),
            "extra": _to_json(shaped.extra) if shaped.extra else None,
            **self._expected(body, shaped.endpoint, found),
            "unknown_fields": unknown,
        }

    def _expected(self, body: dict[str, Any], endpoint: Endpoint, prompt: Prompt) -> dict[str, Any]:
        """What the plan needs to know of a request: of what it means, in whichever words it says it."""
        asked = to_engine(body, endpoint, self.checks.limits)
        identity = self.identities.get(asked.get("model") or "") or self.identities.get("", "")
        longest = max_tokens_of(asked, endpoint)
        if longest is None:
            longest = _UNBOUNDED_ANSWER
        return {
            "fingerprint": fingerprint(asked, endpoint, identity),
            "is_deterministic": is_deterministic(asked),
            "priority": int(asked.get("priority") or 0),
            "path": prompt.path,
            "num_prompt_tokens": prompt.num_tokens,
            "num_output_tokens": longest * int(asked.get("n") or 1) * prompt.num_prompts,
            "longest_answer": longest,
        }

    def _filled(self, shaped: Shaped) -> dict[str, Any]:
        known = known_fields(shaped.endpoint)
        missing = {name: value for name, value in self.fill.items() if name in known and shaped.body.get(name) is None}
        return {**shaped.body, **missing} if missing else shaped.body

    def _refuse_unknown(self, unknown: list[str], shaped: Shaped) -> Failure | None:
        if not self.strict or not unknown:
            return None
        near = difflib.get_close_matches(unknown[0], known_fields(shaped.endpoint), n=1)
        advice = f"Is {near[0]} meant?" if near else "Leave it out"
        return refuse("unknown_field", unknown[0], f"the schema has no such field, and --strict allows none. {advice}")


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
