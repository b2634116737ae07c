"""Progress: what the replicas report while chunks are under way, gathered in one small Ray actor; and the status file.

The status file, `_work/<run id>/status.json`, lets another process see what a run does; it is written every few seconds
and says when, so that a run that has gone away is told from one that works.
"""

import collections
import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from pipelines.storage import Folder
from schemas.failures import Interrupted, StorageFailed
from schemas.plans import Totals
from schemas.requests import Tally

log = logging.getLogger("overnight.progress")

REPORT_S = 1.0
# The status file is written so often.
STATUS_S = 5.0
# A replica that finishes nothing for so long stalls; of the rows that wait there, so many are named.
STALL_S = 60.0
# One that has reported nothing for so long is gone.
GONE_S = 60.0
NUM_NAMED = 3
# Who stops a job gives it three seconds; a replica hears within one of them.
FLUSH_S = 2.2
# Sent by a watch to the thread that it watches for, and to nobody else.
_GIVE_UP = signal.SIGUSR2
_FLUSH_LOOK_S = 0.1
# A run's urgency follows its pace this often, and is to leave such a share of the time that it takes to spare.
PRESS_S = 10.0
_SPARE = 0.1
# Tokens per second are those of the last minute.
_RATE_S = 60.0


@dataclass(slots=True)
class ReplicaReport:
    """One replica, now: the tallies of its open chunks by number, and its requests in flight."""

    chunks: dict[int, Tally] = field(default_factory=dict)
    num_in_flight: int = 0
    # Seconds since it finished a row, while rows wait in it.
    idle_s: float = 0.0
    # The rows that it has longest, by file and line, with their age in seconds; NUM_NAMED of them.
    oldest: list[tuple[str, float]] = field(default_factory=list)
    # Of all the work in chunks that it has begun, what was done before, by a run that was broken off.
    work_before: float = 0.0

    def older_by(self, seconds: float) -> "ReplicaReport":
        if not self.oldest:
            return self
        return replace(self, idle_s=self.idle_s + seconds, oldest=[(row, age + seconds) for row, age in self.oldest])


@dataclass(frozen=True, slots=True)
class Orders:
    """What a replica is told when it reports: to begin nothing more; to make durable at once what is finished."""

    is_draining: bool = False
    is_flushing: bool = False
    # By how much the run's requests are more urgent than they say.
    urgency: int = 0


class Scoreboard:
    """The newest report of each replica, and what all of them are told. Runs as a Ray actor."""

    def __init__(self) -> None:
        # With when it came.
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._orders = Orders()
        self._flushed: set[str] = set()

    def report(self, replica: str, report: ReplicaReport) -> Orders:
        """Take a replica's report; what it is to do."""
        self._reports[replica] = (time.monotonic(), report)
        return self._orders

    def drain(self) -> None:
        """Tell the replicas, at their next report, to begin nothing more."""
        self._orders = replace(self._orders, is_draining=True)

    def press(self, urgency: int) -> None:
        """Tell the replicas, at their next report, how urgent the run is."""
        self._orders = replace(self._orders, urgency=urgency)

    def flush(self) -> bool:
        """Tell the replicas, at their next report, to make durable what they have finished; whether all have."""
        self._orders = replace(self._orders, is_flushing=True)
        # One that died reports no more, and has nothing to flush.
        now = time.monotonic()
        alive = {replica for replica, (came, _) in self._reports.items() if now - came < 3 * REPORT_S}
        return alive <= self._flushed

    def flushed(self, replica: str) -> None:
        """What a replica had finished when it was told to flush is durable."""
        self._flushed.add(replica)

    def read(self) -> dict[str, ReplicaReport]:
        """Each as it would be by now, had nothing happened since: one that hangs or has died reports no more."""
        now = time.monotonic()
        return {replica: report.older_by(now - came) for replica, (came, report) in self._reports.items()}

    def is_deserted(self) -> bool:
        """Whether no replica reports, or no more."""
        now = time.monotonic()
        return all(now - came >= GONE_S for came, _ in self._reports.values())


def start_scoreboard() -> Any:
    """On the node of the driver, with which it lives and dies, whatever becomes of others."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Scoreboard).remote()


@dataclass(slots=True)
class Progress:
    """How far a run is: true totals from the plan, what is done from finished chunks and open ones."""

    totals: Totals
    done: Tally = field(default_factory=Tally)
    num_in_flight: int = 0
    # The rows that were longest in flight, by file and line, with their age in seconds.
    oldest: list[tuple[str, float]] = field(default_factory=list)
    # Rows that wait in a replica which finishes nothing any more.
    stalled: list[tuple[str, float]] = field(default_factory=list)
    num_replicas_up: int = 0
    elapsed_s: float = 0.0
    # Of the work that is done, what was before `elapsed_s` began: by a run that was broken off.
    work_before: float = 0.0
    # Answer tokens of the last minute's finished rows.
    tokens_per_s: float = 0.0
    # When the run must be done, by `time.time()`.
    due: float | None = None

    @property
    def total_rows(self) -> int:
        return self.totals.num_rows

    @property
    def remaining_s(self) -> float | None:
        """Seconds to go, by the tokens that the plan expects of what is left, and how long those of what is done took;
        None until enough is done to tell."""
        work_now = self.done.work - self.work_before
        if self.done.num_done < max(10, self.total_rows // 50) or work_now <= 0 or not self.elapsed_s:
            return None
        return self.elapsed_s / work_now * max(0.0, self.totals.work - self.done.work)

    @property
    def late_s(self) -> float | None:
        """Seconds by which the run will be late, at this pace; below zero: those that it has to spare. None where it
        isn't due, or that can't be told yet."""
        if self.due is None or (remaining_s := self.remaining_s) is None:
            return None
        return time.time() + remaining_s - self.due


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

    def drains(self, draining: threading.Event) -> AbstractContextManager[None]:
        """Requests are answered for as long as the block lasts. Whoever watches may set `draining`: what is in the
        engines is then finished, and nothing more begun."""
        ...


class Watch:
    """Tells `show` how far a run is, once a second, from a thread of its own, for as long as the block lasts.

    A SIGTERM in the block, for which somebody has a handler, has replicas make durable what they have finished first.
    Where no replica is up when the run is to drain, or no more, nobody would hear it: the block is left with
    Interrupted.
    """

    def __init__(
        self, totals: Totals, scoreboard: Any, show: Callable[[Progress], None], due: float | None = None
    ) -> None:
        """`due`: when the run must be done, by `time.time()`; its urgency rises while it would be late."""
        self._due = due
        self._urgency, self._pressed = 0, 0.0
        self._totals = totals
        self._scoreboard = scoreboard
        self._show = show
        self._lock = threading.Lock()
        # What finished chunks came to, and which they are: what a retry of one still reports is no longer counted.
        self._finished = Tally()
        self._numbers: set[int] = set()
        # Counted from when the first replica is up: before that, nothing could be done.
        self._started: float | None = None
        self._work_before = 0.0
        # That have been, by now.
        self.num_replicas_up = 0
        # When, and how many tokens were computed by then.
        self._past: collections.deque[tuple[float, int]] = collections.deque()
        self._stop = threading.Event()
        # Set when the replicas are to finish what they have begun, and no more.
        self.draining = threading.Event()
        self._flushing, self._flushed = threading.Event(), threading.Event()
        self._woken = threading.Event()
        # By signal: the handler that was there before.
        self._before: dict[signal.Signals, Any] = {}
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self._before[_GIVE_UP] = signal.signal(_GIVE_UP, self._give_up)
            handler = signal.getsignal(signal.SIGTERM)
            if callable(handler):
                self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._woken.set()
        self._thread.join(timeout=10)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            self._show(self.look({}))

    def _terminate(self, *arguments: Any) -> None:
        # Asked from the watch's own thread: this one may be in the middle of anything of Ray's.
        self._flushing.set()
        self._woken.set()
        self._flushed.wait(FLUSH_S)
        self._before[signal.SIGTERM](*arguments)

    def _give_up(self, *_: Any) -> None:
        if not self._stop.is_set():
            raise Interrupted("it was to end while no engine was up; the plan and what is finished are kept")

    def finished(self, chunk: int, tally: Tally) -> None:
        """A chunk's final tally."""
        with self._lock:
            self._finished.add(tally)
            self._numbers.add(chunk)

    def _run(self) -> None:
        import ray

        while not self._stop.is_set():
            self._woken.wait(_FLUSH_LOOK_S if self._flushing.is_set() else REPORT_S)
            self._woken.clear()
            if self._stop.is_set():
                return
            try:
                if self._flushing.is_set():
                    if ray.get(self._scoreboard.flush.remote(), timeout=FLUSH_S):
                        self._flushed.set()
                    continue
                reports = ray.get(self._scoreboard.read.remote(), timeout=5)
                if self.draining.is_set():
                    self._scoreboard.drain.remote()
                    if _GIVE_UP in self._before and ray.get(self._scoreboard.is_deserted.remote(), timeout=5):
                        # What waits for the cluster doesn't look at anything else.
                        signal.pthread_kill(threading.main_thread().ident or 0, _GIVE_UP)
                now = self.look(reports)
                self._press(now)
                self._show(now)
            except Exception:  # progress must never fail a run; the next second tells
                log.debug("no progress to tell", exc_info=True)

    def _press(self, now: Progress) -> None:
        """Raise the run's urgency bit by bit while it would be late, and lower it while it has time to spare."""
        late_s, remaining_s = now.late_s, now.remaining_s
        if late_s is None or remaining_s is None or time.monotonic() - self._pressed < PRESS_S:
            return
        spare = _SPARE * remaining_s
        urgency = self._urgency + (late_s > -spare) - (late_s < -3 * spare)
        self._pressed = time.monotonic()
        if urgency >= 0 and urgency != self._urgency:
            self._urgency = urgency
            self._scoreboard.press.remote(urgency)

    def look(self, reports: dict[str, ReplicaReport]) -> Progress:
        """How far the run is, by what its replicas report now."""
        now = time.monotonic()
        if reports and self._started is None:
            self._started, self._work_before = now, self._finished.work
        self.num_replicas_up = len(reports) or self.num_replicas_up
        work_before = self._work_before + sum(report.work_before for report in reports.values())
        progress = Progress(self._totals, num_replicas_up=self.num_replicas_up, work_before=work_before, due=self._due)
        open_chunks: dict[int, Tally] = {}
        for report in reports.values():
            for chunk, tally in report.chunks.items():
                # Of a chunk that a replica died with, another one goes on from what is staged.
                if chunk not in open_chunks or tally.num_done > open_chunks[chunk].num_done:
                    open_chunks[chunk] = tally
        with self._lock:
            progress.done.add(self._finished)
            for chunk, tally in open_chunks.items():
                if chunk not in self._numbers:
                    progress.done.add(tally)
        # A report may be older than the end of a chunk.
        num_left = self._totals.num_rows - progress.done.num_done
        progress.num_in_flight = min(num_left, sum(report.num_in_flight for report in reports.values()))
        progress.oldest = _longest([one for report in reports.values() for one in report.oldest])
        progress.stalled = _longest(
            [one for report in reports.values() if report.idle_s >= STALL_S for one in report.oldest]
        )
        progress.elapsed_s = now - self._started if self._started else 0.0
        self._past.append((now, progress.done.computed_tokens))
        while len(self._past) > 1 and now - self._past[1][0] >= _RATE_S:
            self._past.popleft()
        then, tokens = self._past[0]
        if now > then:
            progress.tokens_per_s = (progress.done.computed_tokens - tokens) / (now - then)
        return progress


def _longest(rows: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(rows, key=lambda row: -row[1])[:NUM_NAMED]


class StatusFile:
    """A Show that also writes what it is told into a run's work folder, for `overnight status`."""

    def __init__(self, show: Show, work: Folder, run_id: str) -> None:
        self._show = show
        self._work = work
        self._run_id = run_id
        self._phase = ""
        self._last: dict[str, Any] = {}
        self._began = time.time()
        self._written = 0.0

    def __enter__(self) -> "StatusFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Say how the run ended, where it isn't published; of one that is, its manifest tells."""
        if kind is None:
            with contextlib.suppress(StorageFailed):
                self._work.remove_file("status.json")
        else:
            words = " ".join(str(error).split()) or kind.__name__
            self._write({**self._last, "ended": time.time(), "error": words})

    def phase(self, text: str) -> None:
        self._show.phase(text)
        self._phase, self._last = text, {}
        self._write({})

    def checked(self, num_rows: int) -> None:
        self._show.checked(num_rows)
        if time.monotonic() - self._written >= STATUS_S:
            self._write({"lines_checked": num_rows})

    def progress(self, now: Progress) -> None:
        self._show.progress(now)
        if now.num_replicas_up and time.monotonic() - self._written >= STATUS_S:
            self._phase = "answering"
            self._write(describe(now))

    def drains(self, draining: threading.Event) -> AbstractContextManager[None]:
        return self._show.drains(draining)

    def _write(self, more: dict[str, Any]) -> None:
        self._written, self._last = time.monotonic(), more
        said = {"run_id": self._run_id, "phase": self._phase, "began": self._began, "written": time.time(), **more}
        log.info("%s", self._phase, extra=said)
        try:
            self._work.write((json.dumps(said, indent=2, ensure_ascii=False) + "\n").encode(), "status.json")
        except Exception:  # a store that doesn't answer now costs this line alone
            log.debug("the status file wasn't written", exc_info=True)


def read_status(output: Folder) -> dict[str, Any] | None:
    """What the newest run into a folder says of itself; None where none is under way there."""
    for run_id in reversed(output.join("_work").names()):
        work = output.join("_work", run_id)
        if "status.json" in work.names():
            said: dict[str, Any] = json.loads(work.read("status.json"))
            return said
    return None


def describe(now: Progress) -> dict[str, Any]:
    """Progress as the status file holds it; times in seconds."""
    return {
        "rows": {
            "total": now.total_rows,
            "answered": now.done.num_answered,
            "failed": now.done.num_failed,
            "in_flight": now.num_in_flight,
            "deduplicated": now.done.num_deduplicated,
        },
        "tokens": {"prompt": now.done.prompt_tokens, "completion": now.done.completion_tokens},
        "errors_by_reason": now.done.reasons,
        "expected": asdict(now.totals),
        "tokens_per_s": round(now.tokens_per_s, 1),
        "elapsed_s": round(now.elapsed_s, 1),
        "remaining_s": None if now.remaining_s is None else round(now.remaining_s, 1),
        "due": now.due,
        "late_s": None if now.late_s is None else round(now.late_s, 1),
        "replicas": now.num_replicas_up,
        "oldest_in_flight": [{"row": row, "age_s": round(age, 1)} for row, age in now.oldest],
        "stalled": [{"row": row, "age_s": round(age, 1)} for row, age in now.stalled],
    }
