"""Runs that are published without an engine: rows as the test says, through the tables' and the manifest's own code."""

import heapq
import json
import random
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa

from pipelines import outcomes, write
from pipelines.costs import cost_of
from pipelines.inputs import InputFile
from pipelines.manifest import Summary, make_manifest
from pipelines.storage import Folder
from schemas import tables
from schemas.plans import Totals
from schemas.settings import Prices, RunSettings

BEGAN = datetime(2026, 3, 1, 1, 0, tzinfo=UTC).timestamp()
FILE = "data/tickets.jsonl"
# What a row may hold that must not come alive on a page.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u202edrowssap\u202c \x00 $x^2$ {{ 7*7 }}"


def answered(line, began=BEGAN, *, request=None, choices=None, **values):
    """A row of `tables.OUTCOMES` that an engine answered, `began` seconds after 1970."""
    request = {"prompt": f"Ticket {line}", "max_tokens": 60, **(request or {})}
    choices = choices or [{"index": 0, "text": f" answer {line}", "finish_reason": "stop"}]
    texts = [one["text"] if "text" in one else one["message"]["content"] for one in choices]
    row = {
        "source_index": 0,
        "id": f"ticket-{line}",
        "source_file": FILE,
        "source_line": line,
        "source_offset": line * 100,
        "endpoint": "/v1/completions",
        "request": json.dumps(request),
        "num_prompt_tokens": 10,
        "num_output_tokens": 60,
        "model": "small",
        "prompt": request["prompt"] if isinstance(request["prompt"], str) else None,
        "response": json.dumps({"model": "small", "choices": choices}),
        "text": texts,
        "finish_reason": [one["finish_reason"] for one in choices],
        "created": datetime.fromtimestamp(int(began), UTC),
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "cached_tokens": 0,
        "queue_ms": 100.0,
        "first_token_ms": 200.0,
        "total_ms": 1_000.0,
        "replica": "a" * 12,
        "attempt": 1,
        "is_deduplicated": False,
        "is_carried": False,
    }
    row |= values
    return row | {"total_tokens": row["prompt_tokens"] + row["completion_tokens"]}


def failed(line, reason="schema", **values):
    """A row of `tables.OUTCOMES` that failed before the engine."""
    message = f"{FILE}:{line}: max_tokens: found -1, expected a number from 1"
    row = {"source_index": 0, "id": f"{FILE}:{line}", "source_file": FILE, "source_line": line, "source_offset": 0}
    row |= {"stage": "validate", "status_code": 422, "type": "BadRequestError", "reason": reason, "message": message}
    row |= {"raw": b'{"prompt": "x", "max_tokens": -1}', "attempts": 0, "is_deduplicated": False, "is_carried": False}
    return {**row, "endpoint": "/v1/completions", "num_prompt_tokens": 1, "num_output_tokens": 1, **values}


def publish(output, run_id, rows, *, prices=None, began=BEGAN, took_s=10.0, **changes):
    """A published run of such rows, which come in the order of their lines; its manifest. `changes`: its entries."""
    prices = None if prices is None else Prices(**prices)
    settings = RunSettings(inputs=(FILE,), output=str(output), prices=prices)
    table = pa.Table.from_pylist(rows, schema=tables.as_outcomes(pa.table({})).schema if not rows else _SCHEMA)
    folder = Folder.at(str(output))
    published = write.publish_tables(folder.join("runs", run_id), [table], table.num_rows)
    tally = outcomes.tally_of(table)
    replicas = len(set(table["replica"].drop_null().to_pylist())) if rows else 0
    summary = Summary(run_id, str(output), {}, tally, tally, len(rows), num_replicas=replicas, infer_s=took_s)
    summary.total_s = took_s * 1.25
    summary.expected = Totals(shared_tokens=tally.cached_tokens * 2)
    if prices is not None:
        summary.cost = cost_of(tally, prices, replicas * took_s / 3600)
    prepared = SimpleNamespace(
        files=[InputFile(0, FILE, FILE, 123_456, "1")],
        limits=SimpleNamespace(served_names=["small"]),
        identities={"": "0" * 32},
    )
    manifest = make_manifest(settings, summary, prepared, published, {}, began)
    manifest |= {"ended": datetime.fromtimestamp(began + summary.total_s, UTC).isoformat(timespec="seconds"), **changes}
    write.publish_manifest(folder, run_id, manifest)
    return manifest


_SCHEMA = pa.schema([field.with_nullable(True) for field in tables.OUTCOMES])


def night(number, *, replicas=3, places=48, seed=0, began=BEGAN):
    """Rows as a night's run has them: each replica takes so many at a time, the rest waits before it."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    free = {f"{chance.getrandbits(48):012x}": [0.4 * one + 0.01 * n for n in range(places)] for one in range(replicas)}
    rows = []
    for line in range(1, number + 1):
        if chance.random() < 0.02:
            rows.append(failed(line, chance.choice(["schema", "schema", "prompt_too_long", "invalid_json"])))
            continue
        if chance.random() < 0.06:
            same = {"is_deduplicated": True} if chance.random() < 0.5 else {"is_carried": True}
            rows.append(answered(line, began, **same))
            continue
        replica = min(free, key=lambda name: free[name][0])
        tokens = min(256, int(chance.lognormvariate(3.6, 0.8)) + 1)
        prompt = int(chance.lognormvariate(5, 0.7))
        start = heapq.heappop(free[replica])
        asked = max(0.0, start - chance.random() * 2)
        first = start + 0.03 + prompt / 4_000
        end = first + tokens * chance.uniform(0.025, 0.04)
        heapq.heappush(free[replica], end)
        times = {"queue_ms": start - asked, "first_token_ms": first - asked, "total_ms": end - asked}
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "cached_tokens": prompt // 3}
        reason = "length" if tokens == 256 else "stop"
        choices = [{"index": 0, "text": "word " * tokens, "finish_reason": reason}]
        took = {name: 1000 * value for name, value in times.items()}
        rows.append(answered(line, began + asked, choices=choices, replica=replica, **counts, **took))
    return rows
