"""Progress: what the replicas report while chunks are under way, gathered in one small Ray actor."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.requests import Tally

REPORT_S = 1.0


@dataclass(slots=True)
class ReplicaReport:
    """One replica, now: the tallies of its open chunks by number, its requests in flight, the age of the oldest."""

    chunks: dict[int, Tally] = field(default_factory=dict)
    num_in_flight: int = 0
    oldest_s: float = 0.0


class Scoreboard:
    """The newest report of each replica. Runs as a Ray actor."""

    def __init__(self) -> None:
        self._reports: dict[str, ReplicaReport] = {}

    def report(self, replica: str, report: ReplicaReport) -> None:
        self._reports[replica] = report

    def read(self) -> dict[str, ReplicaReport]:
        return self._reports


def start_scoreboard() -> Any:
    import ray

    return ray.remote(num_cpus=0)(Scoreboard).remote()


@dataclass(slots=True)
class Progress:
    """How far a run is: true totals from the plan, what is done from finished chunks and open ones."""

    total_rows: int
    done: Tally = field(default_factory=Tally)
    num_in_flight: int = 0
    oldest_s: float = 0.0
    num_replicas_up: int = 0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.done.completion_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds to go, by the rows of the finished ones; None until there are enough of them to tell."""
        if self.done.num_done < max(10, self.total_rows // 50) or not self.elapsed_s:
            return None
        return self.elapsed_s / self.done.num_done * (self.total_rows - self.done.num_done)


class Show(Protocol):
    """What a run tells whoever watches it."""

    def phase(self, text: str) -> None:
        """The run goes on to something that takes a while."""
        ...

    def checked(self, num_rows: int) -> None:
        """So many lines are checked by now; told after each block of them."""
        ...

    def progress(self, now: Progress) -> None:
        """Once a second while requests are answered."""
        ...


class Watch:
    """Tells `show` how far a run is, once a second, from a thread of its own, for as long as the block lasts."""

    def __init__(self, total_rows: int, scoreboard: Any, show: Callable[[Progress], None]) -> None:
        self._total_rows = total_rows
        self._scoreboard = scoreboard
        self._show = show
        self._finished: dict[int, Tally] = {}
        # Counted from when the first replica is up: before that, nothing could be done.
        self._started: float | None = None
        self._num_replicas_up = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if kind is None:
            self._show(self._progress({}))

    def finished(self, chunk: int, tally: Tally) -> None:
        """A chunk's final tally; what a retry of it still reports is no longer counted."""
        self._finished[chunk] = tally

    def _run(self) -> None:
        import ray

        while not self._stop.wait(REPORT_S):
            try:
                reports = ray.get(self._scoreboard.read.remote(), timeout=5)
            except Exception:  # noqa: S112 - progress must never fail a run; the next second tells
                continue
            self._show(self._progress(reports))

    def _progress(self, reports: dict[str, ReplicaReport]) -> Progress:
        if reports and self._started is None:
            self._started = time.monotonic()
        chunks = dict(self._finished)
        for report in reports.values():
            for chunk, tally in report.chunks.items():
                chunks.setdefault(chunk, tally)
        self._num_replicas_up = len(reports) or self._num_replicas_up
        progress = Progress(self._total_rows, num_replicas_up=self._num_replicas_up)
        for tally in chunks.values():
            progress.done.add(tally)
        progress.num_in_flight = sum(report.num_in_flight for report in reports.values())
        progress.oldest_s = max((report.oldest_s for report in reports.values()), default=0.0)
        progress.elapsed_s = time.monotonic() - self._started if self._started else 0.0
        return progress
