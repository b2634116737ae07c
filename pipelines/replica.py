"""A replica: one engine, and the chunks that it works on, several at a time, each in a thread. Runs as a Ray actor.

When the engine dies, it is started again, and what was in it is sent again. What was in it at two deaths is tried
alone, with nothing else in the engine; what kills it then is given up, and costs nobody else.
"""

import copy
import heapq
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import pyarrow as pa

from pipelines.engine import Engine
from pipelines.meters import EngineMeters, RowMeters
from pipelines.outcomes import conclude, gather, kept, missing, place_of, tally_of
from pipelines.progress import NUM_NAMED, REPORT_S, ReplicaReport
from pipelines.traces import Traces
from schemas import tables
from schemas.failures import EngineUnusable, Failure, NotBegun, StorageFailed
from schemas.requests import Answered, Failed, Request, Tally

log = logging.getLogger("overnight.replica")

# A finished row is durable after at most this long.
STAGE_S = 5.0
# A chunk that waits for answers looks up so often.
WAIT_S = 1.0
# So often the engine may die without an answer in between; then it isn't a request that kills it.
MAX_DEATHS_IN_A_ROW = 5
# How the engine is, is shown so often.
_SHOW_S = 1.0
# Whoever gathers reports answers within that, or later.
_REPORT_LIMIT_S = 10.0
# What was in the engine when it died so often is tried alone.
_DEATHS_OF_A_SUSPECT = 2


class Stage(Protocol):
    """Where a replica puts finished rows: makes one part durable and returns its name."""

    def begin(self, chunk: int) -> tuple[int, list[str], pa.Table]:
        """A new attempt at a chunk: its number from 1, the parts of earlier ones, and the rows that they hold."""
        ...

    def put(self, chunk: int, attempt: int, sequence: int, rows: pa.Table) -> str: ...


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

    def begin(self, chunk: int, done: Tally, staging: "Staging | None" = None) -> None:
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

        orders = ray.get(scoreboard.report.remote(name, self.report()), timeout=_REPORT_LIMIT_S)
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


_SMALLEST = Request("check", "/v1/completions", '{"prompt": [0], "max_tokens": 1, "temperature": 0}')
_KILLER = Failure(
    500,
    "engine_died",
    "the engine's process died each of three times that it worked on this request, the last time on no other of its "
    "replica. Leave the row out, or report it with --verbose's log",
)


def take_all(queue: "SimpleQueue[Future[Any]]", timeout_s: float) -> list["Future[Any]"]:
    """All that is in a queue by now; waits for the first. Unlike `concurrent.futures.wait`, this costs the same however
    many others are still under way."""
    taken = []
    try:
        taken.append(queue.get(timeout=timeout_s))
        while True:
            taken.append(queue.get_nowait())
    except Empty:
        return taken


class Gate:
    """Who is in the engine: many together, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        # Those that want to be alone there, or are.
        self._num_alone = 0
        self._is_alone = False

    def enter(self) -> None:
        """Wait while somebody is alone there, or waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_alone)
            self._num_inside += 1

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be there alone for as long as the block lasts. Not for a thread that has entered."""
        with self._changed:
            self._num_alone += 1
            self._changed.wait_for(lambda: not self._num_inside and not self._is_alone)
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._num_alone -= 1
                self._is_alone = False
                self._changed.notify_all()


class Witness:
    """Tells whoever watches the cluster what becomes of a run's rows: metrics, spans, and the log; never a prompt."""

    def __init__(self, run_id: str, replica: str) -> None:
        self._about = {"run_id": run_id, "replica": replica}
        self._rows, self._engine, self._traces = RowMeters(), EngineMeters(), Traces()
        self._shown_at = 0.0

    def tell(self, outcomes: list[dict[str, Any]], event: Answered | Failed, sent_s: float, attempt: int) -> None:
        """One request's rows are done; `sent_s`: so long ago it was handed to the engine."""
        for row in outcomes:
            # Not the event's: an answer may have turned out to be one that no table can hold.
            why = row.get("reason")
            self._rows.rows.inc(1, {"outcome": why or "answered"})
            if why is not None:
                named = {"row": place_of(row), "row_id": row["id"], "reason": why, "attempt": attempt}
                log.info("row failed", extra={**self._about, **named})
        self._rows.total.observe(sent_s)
        usage = event.usage if isinstance(event, Answered) else {}
        self._rows.tokens.count(usage)
        first = outcomes[0]
        self._traces.record(
            first["endpoint"],
            event.timing if isinstance(event, Answered) else event.failure,
            time.time() - (event.timing.total_ms / 1000 if isinstance(event, Answered) else sent_s),
            usage,
            {
                "overnight.run_id": self._about["run_id"],
                "overnight.row": place_of(first),
                "overnight.row_id": first["id"],
                "overnight.attempt": attempt,
            },
        )

    def show(self, engine: Engine) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _SHOW_S:
            self._shown_at = now
            self._engine.show(engine.state)

    def warn(self, message: str, **named: Any) -> None:
        log.warning(message, extra={**self._about, **named})

    def close(self) -> None:
        self._traces.close()


class Replica:
    """See above. A callable class, as Ray Data takes it."""

    def __init__(
        self,
        start_engine: Callable[[], Engine],
        read_chunk: Callable[[dict[str, Any]], pa.Table],
        stage: Stage,
        scoreboard: Any,
        run_id: str,
        retries_errors: bool = False,
    ) -> None:
        import ray

        self._retries_errors = retries_errors
        self._name = (ray.get_runtime_context().get_actor_id() or "local")[:12]
        self._witness = Witness(run_id, self._name)
        self._read_chunk = read_chunk
        self._stage = stage
        self._open = OpenWork()
        self._gate = Gate()
        # How often the engine was started again, of these since the last answer, and the lock under which it is.
        self._num_restarts = self._num_deaths_in_a_row = 0
        self._restarting = threading.Lock()
        # An exception here would reach the driver as words in Ray's own; the first chunk raises it as what it is.
        self._start_error: EngineUnusable | None = None
        try:
            self._engine = start_engine()
        except EngineUnusable as error:
            self._start_error = error
            return
        except Exception as error:
            self._start_error = EngineUnusable(f"the engine didn't start: {' '.join(str(error).split())}")
            return
        with suppress(ray.exceptions.RayError):
            # Before any work: a run that is being drained begins nothing in a replica that comes up late.
            self._open.report_to(scoreboard, self._name)
        self._reporting = threading.Thread(
            target=self._open.keep_reporting, args=(scoreboard, self._name), name="report", daemon=True
        )
        self._reporting.start()

    def __call__(self, batch: pa.Table) -> Iterator[dict[str, Any]]:
        for chunk in batch.to_pylist():
            yield self._work(chunk)

    def _work(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._start_error is not None:
            raise self._start_error
        number = chunk["number"]
        attempt, parts, staged = self._stage.begin(number)
        staged = kept(staged, self._retries_errors)
        staging = Staging(self._stage, number, attempt, parts)
        self._open.begin(number, tally_of(staged), staging)
        started = time.time()
        asked = [] if self._open.draining.is_set() else gather(missing(self._read_chunk(chunk), staged))
        new = Tally()
        with staging:
            done: SimpleQueue[Future[Any]] = SimpleQueue()
            sent = dict(self._submit(rows, done) for rows in asked)
            suspects: list[Sent] = []
            while sent or suspects:
                if self._open.draining.is_set():
                    self._engine.drain()
                    suspects = []
                if not sent and suspects:
                    tried, sent[tried] = self._submit_alone(suspects.pop(), done)
                # Those first that are whole: what follows may end it all.
                taken = take_all(done, timeout_s=WAIT_S) if sent else []
                for future in sorted(taken, key=lambda future: future.exception() is not None):
                    made = sent.pop(future)
                    if self._is_left(future):
                        self._open.left(future)
                        continue
                    outcomes, again, tally = self._conclude(future, made, attempt)
                    staging.add(outcomes)
                    new.add(tally)
                    self._open.finished(number, future, tally)
                    if again is not None and again.num_deaths >= _DEATHS_OF_A_SUSPECT:
                        suspects.append(again)
                    elif again is not None:
                        renewed, sent[renewed] = self._submit(again.rows, done, again.num_deaths)
                staging.stage_what_is_due()
                self._witness.show(self._engine)
        return {
            "number": [number],
            "parts": [staging.parts],
            "tally": [json.dumps(asdict(self._open.end(number)))],
            "new": [json.dumps(asdict(new))],
            "started": [started],
            "ended": [time.time()],
        }

    def _is_left(self, future: "Future[Any]") -> bool:
        """Whether what a request asks for is left for another run."""
        error = future.exception()
        return isinstance(error, NotBegun) or (isinstance(error, EngineUnusable) and self._open.draining.is_set())

    def _submit(
        self, rows: list[dict[str, Any]], done: "SimpleQueue[Future[Any]]", num_deaths: int = 0
    ) -> tuple["Future[Any]", Sent]:
        """A request's future, which goes to `done` when it is, and what it is to answer."""
        self._gate.enter()
        future, sent = self._send(rows, done, num_deaths)
        # A future keeps what it calls, and mustn't keep the replica alive.
        leave = self._gate.leave
        future.add_done_callback(lambda _: leave())
        return future, sent

    def _submit_alone(self, suspect: Sent, done: "SimpleQueue[Future[Any]]") -> tuple["Future[Any]", Sent]:
        """The same for a request that gets the engine for itself, until it is done.

        Before it and after it the engine is one that answers: if it dies, it is with this request.
        """
        with self._gate.alone():
            self._see_engine_answer()
            future, sent = self._send(suspect.rows, done, suspect.num_deaths)
            wait([future])
            if isinstance(future.exception(), EngineUnusable):
                self._see_engine_answer()
        return future, sent

    def _send(
        self, rows: list[dict[str, Any]], done: "SimpleQueue[Future[Any]]", num_deaths: int
    ) -> tuple["Future[Any]", Sent]:
        sent = Sent(rows, self._num_restarts, time.monotonic(), num_deaths)
        row = rows[0]
        self._engine.press(self._open.urgency)
        future = self._engine.submit(Request(row["id"], row["endpoint"], row["request"]), lane="batch")
        self._open.submitted(future, sent)
        future.add_done_callback(done.put)
        return future, sent

    def _conclude(
        self, future: "Future[Any]", sent: Sent, attempt: int
    ) -> tuple[list[dict[str, Any]], Sent | None, Tally]:
        """Outcomes of a request's rows, what of it is to be sent again, and what is done by now."""
        event: Answered | Failed
        try:
            event = future.result()
            self._num_deaths_in_a_row = 0
        except EngineUnusable as error:
            # It was in the engine when that died.
            self._restart_engine(sent.num_restarts, error)
            if sent.num_deaths < _DEATHS_OF_A_SUSPECT:
                return [], replace(sent, num_deaths=sent.num_deaths + 1), Tally()
            place = place_of(sent.rows[0])
            self._witness.warn(f"{place} is given up: the engine died with it alone", row=place)
            event = Failed(_KILLER)
        # What failed for no fault of its own says nothing about the rows that ask for the same.
        is_shared = isinstance(event, Answered) or event.failure.status_code < 500 or event.failure is _KILLER
        answered, left = (sent.rows, []) if is_shared else (sent.rows[:1], sent.rows[1:])
        outcomes, total = [], Tally()
        for row in answered:
            outcome, tally = conclude(row, event, self._name, attempt)
            outcomes.append(outcome)
            total.add(tally)
        self._witness.tell(outcomes, event, time.monotonic() - sent.at, attempt)
        if not left:
            return outcomes, None, total
        # The next of them is the one that is asked now.
        return outcomes, replace(sent, rows=[{**left[0], "is_repeated": False}, *left[1:]]), total

    def _see_engine_answer(self) -> None:
        """Start the engine again where it is dead, until it answers. Raises EngineUnusable where it doesn't."""
        while True:
            num_restarts = self._num_restarts
            try:
                self._engine.submit(_SMALLEST, lane="batch").result()
            except NotBegun:
                return
            except EngineUnusable as error:
                self._restart_engine(num_restarts, error)
            else:
                self._num_deaths_in_a_row = 0
                return

    def _restart_engine(self, num_restarts: int, error: EngineUnusable) -> None:
        """Start the engine again, unless another chunk's thread has since `num_restarts`. Raises EngineUnusable where
        it dies time and again, or doesn't start."""
        with self._restarting:
            if self._num_restarts > num_restarts:
                return
            is_up = False
            while not is_up:
                self._num_deaths_in_a_row += 1
                if self._num_deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
                    raise error
                self._witness.warn(f"{error.reason}; starting it again")
                try:
                    self._engine.restart()
                    is_up = True
                except EngineUnusable as failed:
                    error = failed
            self._num_restarts += 1

    def __del__(self) -> None:
        # Ray drops the replica when its work is done; the engine's processes end here rather than as orphans.
        if hasattr(self, "_engine"):
            self._open.closed.set()
            # No call of it is under way when Ray ends this process.
            self._reporting.join(_REPORT_LIMIT_S)
            self._engine.close()
            self._witness.close()
