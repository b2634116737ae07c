"""Figures of a published run, from its tables: course, times, tokens, what was saved, slowest rows, first errors.

Streams row groups and some columns of them; memory doesn't grow with the rows. A row's `created` is the second in
which its engine took it on; its other times count from there. Rows that another's answer answered (`is_deduplicated`,
`is_carried`) took no time here, and failed rows have none in the tables: neither is part of course and times.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.published import PublishedRun
from schemas import tables
from schemas.failures import UsageError

NUM_SLOWEST = 10
# Lines that are shown of each reason, and reasons.
NUM_LINES, NUM_REASONS = 3, 20
# Replicas that are told apart: one that dies and is started again has a new name.
MAX_REPLICAS = 256
OTHERS = "others"
_MAX_CELLS = 4_096
# The shortest time that a row's answer is spread over, in seconds.
_LEAST_S = 1e-3
_TIMES = ["queue_ms", "first_token_ms", "total_ms"]
_COUNTS = ["prompt_tokens", "completion_tokens"]
_USAGE = [*_COUNTS, *_TIMES, "cached_tokens", "search_tokens", "replica", "attempt", "is_deduplicated", "is_carried"]
_PLACE = ["id", "source_file", "source_line"]


class Course:
    """Adds up what goes on at a constant rate from one time to another, by the cells of a time line; exactly, wherever
    in a cell it begins and ends. Times are seconds since the line's begin."""

    def __init__(self, num_cells: int, cell_s: float) -> None:
        self.num_cells, self.cell_s = num_cells, cell_s
        # Of what begins (and, negative, ends) in each cell: its rates, and its rates times when.
        self._rates = np.zeros(num_cells + 1)
        self._moments = np.zeros(num_cells + 1)

    def add(self, starts: Any, ends: Any, amounts: Any) -> None:
        """Arrays of as many entries each; an end lies behind its start."""
        rates = amounts / (ends - starts)
        for at, signed in ((starts, rates), (ends, -rates)):
            cells = np.clip((at // self.cell_s).astype(np.int64), 0, self.num_cells)
            self._rates += np.bincount(cells, weights=signed, minlength=self.num_cells + 1)
            self._moments += np.bincount(cells, weights=signed * at, minlength=self.num_cells + 1)

    def amounts(self) -> Any:
        """What each cell has of the amounts that were added."""
        edges = np.arange(self.num_cells + 1) * self.cell_s
        rates = np.concatenate(([0.0], np.cumsum(self._rates[:-1])))
        moments = np.concatenate(([0.0], np.cumsum(self._moments[:-1])))
        return np.maximum(0.0, np.diff(edges * rates - moments))


@dataclass(slots=True)
class Distribution:
    """How often values occur: each whole number by itself, or, with a `growth`, each range of a share of its values
    (1.02: of 2 %), so that quantiles are right to within half of it."""

    growth: float | None = None
    number: int = 0
    least: float = math.inf
    most: float = 0.0
    total: float = 0.0
    _counts: Any = field(default_factory=lambda: np.zeros(0, np.int64))

    # Values of a growth are told apart from here on.
    FLOOR = 0.01

    def add(self, values: Any) -> None:
        if not len(values):
            return
        self.number += len(values)
        self.total += float(values.sum())
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        counts = np.bincount(self._places(values), minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def _places(self, values: Any) -> Any:
        if self.growth is None:
            return values.astype(np.int64)
        logs = np.log(np.maximum(values, self.FLOOR) / self.FLOOR) / math.log(self.growth)
        return np.floor(logs).astype(np.int64)

    def _values(self) -> Any:
        """What stands for the values of each place."""
        places = np.arange(len(self._counts))
        return places if self.growth is None else self.FLOOR * self.growth ** (places + 0.5)

    def quantile(self, share: float) -> float:
        """The least value that so many of all don't exceed."""
        place = int(np.searchsorted(np.cumsum(self._counts), max(1, math.ceil(share * self.number))))
        return float(min(self.most, max(self.least, self._values()[place])))

    def binned(self, edges: list[float]) -> list[int]:
        """How many values lie from each edge to the next."""
        # What stands for the outermost values may lie beyond them.
        values = np.clip(self._values(), self.least, self.most)
        return [int(number) for number in np.histogram(values, edges, weights=self._counts)[0]]


@dataclass(frozen=True, slots=True)
class Replica:
    """What one engine did. Seconds are those with a row in it."""

    name: str
    num_rows: int
    num_tokens: int
    busy_s: float
    # Rows in it, on average, by cells of the time line.
    in_flight: Any


@dataclass(slots=True)
class Figures:
    """What the tables of a run tell. Time lines are arrays by cells of `cell_s` seconds since `began`."""

    # Seconds since 1970; None where no engine answered anything.
    began: float | None = None
    cell_s: float = 1.0
    tokens_per_s: Any = None
    waiting: Any = None
    running: Any = None
    replicas: list[Replica] = field(default_factory=list)
    times: dict[str, Distribution] = field(default_factory=dict)
    tokens: dict[str, Distribution] = field(default_factory=dict)
    # Of `prompt` and `completion` tokens: those of rows that were carried over or deduplicated, those found in the
    # cache, and those that engines computed.
    savings: dict[str, dict[str, int]] = field(default_factory=dict)
    search_tokens: int = 0
    num_rows: int = 0
    num_timed: int = 0
    num_tried_again: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    slowest: list[dict[str, Any]] = field(default_factory=list)


def figures_of(run: PublishedRun) -> Figures:
    """Read a run's `usage`, and what belongs to it of `responses`. Raises UsageError where they aren't what the
    manifest says."""
    began, ended, names = _span(run)
    num_s = max(1.0, ended - began)
    cell_s = max(1.0, num_s / _MAX_CELLS)
    num_cells = math.ceil(num_s / cell_s)
    told = Figures(began=began if names else None, cell_s=cell_s)
    told.times = {name: Distribution(1.02) for name in _TIMES}
    told.tokens = {name: Distribution() for name in _COUNTS}
    told.savings = {
        "prompt": dict.fromkeys(("computed", "cached", "deduplicated", "carried"), 0),
        "completion": dict.fromkeys(("computed", "deduplicated", "carried"), 0),
    }
    tokens, waiting, running = (Course(num_cells, cell_s) for _ in range(3))
    courses = {name: Course(num_cells, cell_s) for name in names}
    rows_of, tokens_of = Counter[str](), Counter[str]()
    for rows in run.answers(["created", "finish_reason", "model"], [*_USAGE, *_PLACE]):
        _count(told, rows)
        timed = _timed(rows)
        if not timed.num_rows:
            continue
        starts, leaves, firsts, ends = _moments(timed, began)
        amounts = timed["completion_tokens"].to_numpy()
        told.num_timed += timed.num_rows
        tokens.add(firsts, ends, amounts)
        waiting.add(starts, np.maximum(leaves, starts + 1e-9), leaves - starts)
        running.add(leaves, ends, ends - leaves)
        _measure(told, timed)
        replicas = np.array([name if name in courses else OTHERS for name in timed["replica"].to_pylist()])
        for name in np.unique(replicas):
            is_its = replicas == name
            courses[str(name)].add(starts[is_its], ends[is_its], (ends - starts)[is_its])
            rows_of[str(name)] += int(is_its.sum())
            tokens_of[str(name)] += int(amounts[is_its].sum())
    _check(run, told)
    told.tokens_per_s = tokens.amounts() / cell_s
    told.waiting, told.running = waiting.amounts() / cell_s, running.amounts() / cell_s
    for name, course in courses.items():
        in_flight = course.amounts() / cell_s
        busy_s = float(np.minimum(1.0, in_flight).sum() * cell_s)
        told.replicas.append(Replica(name, rows_of[name], tokens_of[name], busy_s, in_flight))
    return told


def _span(run: PublishedRun) -> tuple[float, float, list[str]]:
    """When the first row of a run entered an engine and the last one left one, in seconds since 1970; and the engines,
    in the order in which they took their first row."""
    began, ended = math.inf, -math.inf
    firsts: dict[str, float] = {}
    for rows in run.answers(["created"], [*_TIMES, "replica", "is_deduplicated", "is_carried"]):
        timed = _timed(rows)
        if not timed.num_rows:
            continue
        starts, _, _, ends = _moments(timed, 0.0)
        began, ended = min(began, float(starts.min())), max(ended, float(ends.max()))
        by_name = pa.table({"name": timed["replica"], "start": starts}).group_by("name").aggregate([("start", "min")])
        for row in by_name.to_pylist():
            firsts[row["name"]] = min(row["start_min"], firsts.get(row["name"], math.inf))
    if not firsts:
        return 0.0, 0.0, []
    names = sorted(firsts, key=lambda name: (firsts[name], name))
    return began, ended, names if len(names) <= MAX_REPLICAS else [*names[: MAX_REPLICAS - 1], OTHERS]


def _timed(rows: pa.Table) -> pa.Table:
    """The rows that an engine answered in this run."""
    return rows.filter(pc.invert(pc.or_(rows["is_deduplicated"], rows["is_carried"])))


def _moments(timed: pa.Table, began: float) -> tuple[Any, Any, Any, Any]:
    """When rows entered the engine, left its queue, had their first token and their last, in seconds since `began`. A
    time that isn't known is that of the one before."""
    starts = timed["created"].cast(pa.int64()).to_numpy() / 1000 - began
    total_s = np.maximum(timed["total_ms"].to_numpy() / 1000, _LEAST_S)
    ends = starts + total_s
    queue_s = np.nan_to_num(timed["queue_ms"].to_numpy()) / 1000
    first_s = np.nan_to_num(timed["first_token_ms"].to_numpy()) / 1000
    leaves = starts + np.clip(queue_s, 0.0, total_s - _LEAST_S / 2)
    firsts = starts + np.clip(np.maximum(queue_s, first_s), 0.0, total_s - _LEAST_S / 2)
    return starts, leaves, firsts, ends


def _count(told: Figures, rows: pa.Table) -> None:
    told.num_rows += rows.num_rows
    told.finish_reasons.update(tables.count_values(pc.list_flatten(rows["finish_reason"])))
    told.models.update(tables.count_values(rows["model"]))
    told.num_tried_again += pc.sum(pc.greater(rows["attempt"], 1)).as_py() or 0
    carried = rows["is_carried"]
    repeated = pc.and_not(rows["is_deduplicated"], carried)
    computed = pc.invert(pc.or_(rows["is_deduplicated"], carried))
    for kind, saved in told.savings.items():
        for name, chosen in (("carried", carried), ("deduplicated", repeated), ("computed", computed)):
            saved[name] += pc.sum(rows[f"{kind}_tokens"].filter(chosen)).as_py() or 0
    cached = pc.sum(rows["cached_tokens"].filter(computed)).as_py() or 0
    told.savings["prompt"]["cached"] += cached
    told.savings["prompt"]["computed"] -= cached
    told.search_tokens += pc.sum(rows["search_tokens"].filter(computed)).as_py() or 0


def _measure(told: Figures, timed: pa.Table) -> None:
    for name, distribution in (*told.times.items(), *told.tokens.items()):
        distribution.add(pc.drop_null(timed[name]).to_numpy())
    longest = pc.select_k_unstable(timed, min(NUM_SLOWEST, timed.num_rows), [("total_ms", "descending")])
    rows = timed.select([*_PLACE, *_TIMES, *_COUNTS, "replica"]).take(longest).to_pylist()
    told.slowest = sorted([*told.slowest, *rows], key=lambda row: -row["total_ms"])[:NUM_SLOWEST]


def _check(run: PublishedRun, told: Figures) -> None:
    """A report whose figures aren't those of the manifest would mislead."""
    found = {
        "rows": told.num_rows,
        **{f"{kind} tokens": sum(saved.values()) for kind, saved in told.savings.items()},
    }
    said = {
        "rows": run.manifest["rows"]["usage"],
        "prompt tokens": run.manifest["usage"]["prompt_tokens"],
        "completion tokens": run.manifest["usage"]["completion_tokens"],
    }
    for name, number in found.items():
        if number != said[name]:
            raise UsageError(
                f"{run.folder.show('usage')}: holds {number:,} {name}, and the manifest says {said[name]:,}. Restore "
                "the run's folder, or answer the requests again with `overnight score`"
            )


def first_errors(run: PublishedRun) -> dict[str, list[dict[str, Any]]]:
    """The first rows of `errors` by reason: NUM_LINES of each of the NUM_REASONS most frequent ones."""
    counts: dict[str, int] = run.manifest["errors_by_reason"]
    reasons = sorted(counts, key=lambda reason: (-counts[reason], reason))[:NUM_REASONS]
    wanted = {reason: min(NUM_LINES, counts[reason]) for reason in reasons}
    found: dict[str, list[dict[str, Any]]] = {reason: [] for reason in reasons}
    for group in run.row_groups("errors"):
        if not any(wanted.values()):
            break
        places = []
        for place, reason in enumerate(group.read(["reason"])["reason"].to_pylist()):
            if wanted.get(reason):
                wanted[reason] -= 1
                places.append(place)
        if places:
            columns = [*_PLACE, "stage", "status_code", "reason", "param", "message", "raw"]
            for row in group.read(columns).take(places).to_pylist():
                found[row["reason"]].append(row)
    return found
