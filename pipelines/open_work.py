"""What a replica has under way: its chunks, what of them is finished and not yet durable, and its reports of both."""

import copy
import heapq
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from pipelines.outcomes import place_of
from pipelines.progress import NUM_NAMED, REPORT_S, ReplicaReport
from schemas import tables
from schemas.failures import StorageFailed
from schemas.requests import Tally

log = logging.getLogger("overnight.replica")

# A finished row is durable after at most this long.
STAGE_S = 5.0
# Whoever gathers reports answers within that, or later.
REPORT_LIMIT_S = 10.0


class Stage(Protocol):
    """Where a replica puts finished rows: makes one part durable and returns its name."""

    def begin(self, chunk: int) -> tuple[int, list[str], pa.Table]:
        """A new attempt at a chunk: its number from 1, the parts of earlier ones, and the rows that they hold."""
        ...

    def put(self, chunk: int, attempt: int, sequence: int, rows: pa.Table) -> str: ...


class Staging:
    """Makes a chunk's outcomes durable: after STAGE_S at most, and when the block ends, however it does."""

    def __init__(self, stage: Stage, chunk: int, attempt: int, parts: list[str]) -> None:
        self._stage = stage
        self._chunk = chunk
        self._attempt = attempt
        self._sequence = 0
        self._outcomes: list[dict[str, Any]] = []
        self._staged_at = time.monotonic()
        # The chunk's thread adds and stages; that of the reports stages, too, when the run is stopped.
        self._lock = threading.Lock()
        # Those of earlier attempts, and then its own.
        self.parts = list(parts)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: object) -> None:
        self.stage_now()

    def add(self, outcomes: list[dict[str, Any]]) -> None:
        with self._lock:
            self._outcomes += outcomes

    def stage_what_is_due(self) -> None:
        if time.monotonic() - self._staged_at >= STAGE_S:
            self.stage_now()

    def stage_now(self) -> None:
        with self._lock:
            if self._outcomes:
                table = pa.Table.from_pylist(self._outcomes, schema=tables.OUTCOMES)
                self.parts.append(self._stage.put(self._chunk, self._attempt, self._sequence, table))
                self._sequence += 1
            self._outcomes, self._staged_at = [], time.monotonic()


@dataclass(frozen=True, slots=True)
class Sent:
    """A request in the engine: the rows that it answers, how often the engine had been started again before, since
    when it is there, and how often the engine has died with it."""

    rows: list[dict[str, Any]]
    num_restarts: int
    at: float
    num_deaths: int = 0


class OpenWork:
    """What a replica has under way, for its reports; apart from it, so that reporting doesn't keep it alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[int, Tally] = {}
        self._work_before = 0.0
        self._in_flight: dict[Future[Any], Sent] = {}
        self._finished_at = time.monotonic()
        self._stagings: dict[int, Staging] = {}
        self.closed = threading.Event()
        # Set when nothing more is to be begun.
        self.draining = threading.Event()
        # By how much the run's requests are more urgent than they say.
        self.urgency = 0
        self._has_flushed = False

    def begin(self, chunk: int, done: Tally, staging: Staging | None = None) -> None:
        """`done`: what is staged of it by now."""
        with self._lock:
            self._work_before += done.work
            self._chunks[chunk] = done
            if staging is not None:
                self._stagings[chunk] = staging

    def submitted(self, future: "Future[Any]", sent: Sent) -> None:
        with self._lock:
            self._in_flight[future] = sent

    def left(self, future: "Future[Any]") -> None:
        with self._lock:
            del self._in_flight[future]

    def finished(self, chunk: int, future: "Future[Any]", tally: Tally) -> None:
        with self._lock:
            del self._in_flight[future]
            self._chunks[chunk].add(tally)
            self._finished_at = time.monotonic()

    def end(self, chunk: int) -> Tally:
        with self._lock:
            self._stagings.pop(chunk, None)
            return self._chunks.pop(chunk)

    def report(self) -> ReplicaReport:
        """Rows are named by file and line."""
        now = time.monotonic()
        with self._lock:
            oldest = heapq.nsmallest(NUM_NAMED, self._in_flight.values(), key=lambda sent: sent.at)
            return ReplicaReport(
                copy.deepcopy(self._chunks),
                num_in_flight=len(self._in_flight),
                idle_s=now - max(self._finished_at, *(sent.at for sent in oldest[:1]), 0.0) if oldest else 0.0,
                oldest=[(place_of(sent.rows[0]), now - sent.at) for sent in oldest],
                work_before=self._work_before,
            )

    def report_to(self, scoreboard: Any, name: str) -> None:
        """Report once, and hear what is to be done. Raises RayError where nobody answers."""
        import ray

        orders = ray.get(scoreboard.report.remote(name, self.report()), timeout=REPORT_LIMIT_S)
        if orders.is_draining:
            self.draining.set()
        self.urgency = orders.urgency
        if orders.is_flushing and not self._has_flushed:
            self._has_flushed = True
            self._flush()
            scoreboard.flushed.remote(name)

    def keep_reporting(self, scoreboard: Any, name: str) -> None:
        import ray

        while not self.closed.wait(REPORT_S):
            try:
                self.report_to(scoreboard, name)
            except ray.exceptions.GetTimeoutError:  # a busy cluster; what is to be done is heard later
                continue
            except ray.exceptions.RayError:  # the run goes on without being seen
                log.warning("nobody takes this replica's reports", exc_info=True)
                return

    def _flush(self) -> None:
        with self._lock:
            stagings = list(self._stagings.values())
        for staging in stagings:
            try:
                staging.stage_now()
            except StorageFailed:  # the chunk's own thread meets it, too, and says so
                log.warning("what is finished can't be staged now", exc_info=True)
