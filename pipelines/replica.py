"""A replica: one engine, and the chunks that it works on, several at a time, each in a thread. Runs as a Ray actor.

When the engine dies, it is started again, and what was in it is sent again. What was in it at two deaths is tried
alone, with nothing else in the engine; what kills it then is given up, and costs nobody else.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa

from pipelines.engine import Engine
from pipelines.gate import Gate
from pipelines.open_work import REPORT_LIMIT_S, OpenWork, Sent, Stage, Staging
from pipelines.outcomes import conclude, gather, kept, missing, place_of, tally_of
from pipelines.witness import Witness
from schemas.failures import EngineUnusable, Failure, NotBegun
from schemas.requests import Answered, Failed, Request, Tally

log = logging.getLogger("overnight.replica")

# A chunk that waits for answers looks up so often.
WAIT_S = 1.0
# So often the engine may die without an answer in between; then it isn't a request that kills it.
MAX_DEATHS_IN_A_ROW = 5
# What was in the engine when it died so often is tried alone.
_DEATHS_OF_A_SUSPECT = 2

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
            self._reporting.join(REPORT_LIMIT_S)
            self._engine.close()
            self._witness.close()
