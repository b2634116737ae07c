"""Outcomes: what becomes of rows: an answer or a failure each, what they add up to, which of them are still to come.

Pure; turns rows of `tables.SPOOLED` and events of the engine's seam into rows of `tables.OUTCOMES`.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import jiter
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.order import PROMPT_COST
from schemas import tables
from schemas.failures import Failure
from schemas.requests import Answered, Failed, Tally

# From this status on it is a fault of ours and not of the request.
_FAULT = 500

# What `_tally_of_one` reads: a run that goes on tallies every chunk that is done, and most of a row isn't asked for.
_TALLIED = [
    "cached_tokens",
    "completion_tokens",
    "endpoint",
    "finish_reason",
    "is_carried",
    "is_deduplicated",
    "num_output_tokens",
    "num_prompt_tokens",
    "prompt_tokens",
    "reason",
    "request",
    "status_code",
]


def place_of(row: dict[str, Any]) -> str:
    return f"{row['source_file']}:{row['source_line']}"


def gather(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of `tables.SPOOLED`, those together that one answer is for: the first of each is the one that is asked."""
    asked: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["is_repeated"] and asked:
            asked[-1].append(row)
        else:
            asked.append([row])
    return asked


def missing(chunk: pa.Table, staged: pa.Table) -> list[dict[str, Any]]:
    """The rows of a chunk that aren't staged. One that repeated a staged row is asked by itself."""
    done = set(zip(staged["source_index"].to_pylist(), staged["source_line"].to_pylist(), strict=True))
    left, is_asked = [], False
    for row in chunk.to_pylist():
        is_asked = is_asked and row["is_repeated"]
        if (row["source_index"], row["source_line"]) not in done:
            left.append({**row, "is_repeated": is_asked})
            is_asked = True
    return left


def kept(staged: pa.Table, retries_errors: bool) -> pa.Table:
    """Of staged rows, those that aren't tried again: with `retries_errors`, what failed for no fault of its own is."""
    if not retries_errors:
        return staged
    return staged.filter(pc.less(pc.fill_null(staged["status_code"], 0), _FAULT))


def conclude(row: dict[str, Any], event: Answered | Failed, replica: str, attempt: int) -> tuple[dict[str, Any], Tally]:
    """A row of `tables.OUTCOMES` and what it adds to the totals, of a row of `tables.SPOOLED` and its last event.

    An answer that no table can hold (a NaN among its numbers, say) is a failure of this row alone.
    """
    outcome = None
    if isinstance(event, Answered):
        try:
            outcome = _answered(row, event, replica, attempt)
        except (ValueError, TypeError, KeyError) as error:
            message = f"the engine's answer can't be written down: {error}"
            event = Failed(Failure(500, "unusable_answer", message))
    if isinstance(event, Failed):
        failure = event.failure
        outcome = {
            **row,
            **asdict(failure),
            "message": f"{place_of(row)}: {failure.message}",
            "type": failure.type,
            "stage": "infer",
            "raw": row["request"].encode()[: tables.RAW_BYTES],
            "attempts": attempt,
            "is_deduplicated": row["is_repeated"],
            "is_carried": False,
        }
    assert outcome is not None, "an event is an answer or a failure"
    return outcome, _tally_of_one(outcome)


def _answered(row: dict[str, Any], event: Answered, replica: str, attempt: int) -> dict[str, Any]:
    full, usage = event.full, event.usage
    prompt = jiter.from_json(row["request"].encode()).get("prompt")
    return {
        **row,
        "model": full["model"],
        "prompt": prompt if isinstance(prompt, str) else None,
        "response": json.dumps(event.body, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        "text": [choice["text"] if "text" in choice else choice["message"]["content"] for choice in full["choices"]],
        "finish_reason": [choice["finish_reason"] for choice in full["choices"]],
        "created": datetime.fromtimestamp(full["created"], UTC),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "search_tokens": usage.get("search_tokens"),
        "queue_ms": event.timing.queue_ms,
        "first_token_ms": event.timing.first_token_ms,
        "total_ms": event.timing.total_ms,
        "replica": replica,
        "attempt": attempt,
        "is_deduplicated": row["is_repeated"],
        "is_carried": False,
    }


def tally_of(outcomes: pa.Table) -> Tally:
    """What rows of `tables.OUTCOMES` come to."""
    total = Tally()
    for row in outcomes.select(_TALLIED).to_pylist():
        total.add(_tally_of_one(row))
    return total


def _tally_of_one(row: dict[str, Any]) -> Tally:
    is_repeated, is_carried = bool(row["is_deduplicated"]), bool(row["is_carried"])
    is_free = is_repeated or is_carried
    # What the plan expected; nothing of a row that is answered by another's answer.
    work = 0.0 if is_free else row["num_output_tokens"] + PROMPT_COST * row["num_prompt_tokens"]
    if row.get("reason") is not None:
        num_faults = int(row["status_code"] >= _FAULT)
        return Tally(num_failed=1, num_faults=num_faults, reasons={row["reason"]: 1}, work=work)
    prompt_tokens, completion_tokens = row["prompt_tokens"], row["completion_tokens"]
    is_cut = row["endpoint"] == "/v1/completions" and "length" in row["finish_reason"]
    return Tally(
        num_answered=1,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        num_deduplicated=int(is_repeated),
        num_carried=int(is_carried),
        deduplicated_tokens=completion_tokens if is_free else 0,
        deduplicated_prompt_tokens=prompt_tokens if is_free else 0,
        cached_tokens=0 if is_free else row["cached_tokens"] or 0,
        work=work,
        # A chat that doesn't say goes on to the end of the context instead.
        num_cut_by_default=int(is_cut and jiter.from_json(row["request"].encode()).get("max_tokens") is None),
    )
