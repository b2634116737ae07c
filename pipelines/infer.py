"""Infer: chunks of requests to outcomes, on replicas: Ray actors with one engine each.

Needs the columns of `tables.SPOOLED`, makes those of `tables.OUTCOMES`. A row that repeats the one before it gets that
one's answer. Finished rows are staged by the replica itself, since Ray hands a task's output on only when the task
ends; what comes back through Ray is one small row a chunk.
"""

import copy
import heapq
import json
import logging
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import jiter
import pyarrow as pa

from pipelines.engine import Engine
from pipelines.order import PARTS_OF_A_SHARE, PROMPT_COST, deal
from pipelines.progress import NUM_NAMED, REPORT_S, ReplicaReport
from schemas import tables
from schemas.failures import EngineUnusable, Failure
from schemas.plans import Chunk
from schemas.requests import Answered, Failed, Request, Tally

log = logging.getLogger("overnight.infer")

# A finished row is durable after at most this long.
STAGE_S = 5.0
# Each one is a thread of the replica.
_MOST_CHUNKS_IN_FLIGHT = 64
# A replica's process, and the engine in it, are started again so often.
MAX_RESTARTS = 3


class Stage(Protocol):
    """Where a replica puts finished rows: makes one part durable and returns its name."""

    def begin(self, chunk: int) -> int:
        """The number of this attempt at a chunk, from 1."""
        ...

    def put(self, chunk: int, attempt: int, sequence: int, rows: pa.Table) -> str: ...


@dataclass(frozen=True, slots=True)
class FinishedChunk:
    """One chunk, all of whose rows are staged in `parts`. `spans`: from the first submitted to the last staged row."""

    number: int
    parts: tuple[str, ...]
    tally: Tally
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicas on a cluster: how many, and what each one takes of it."""

    num_replicas: int
    # Whether the number was given, rather than chosen.
    is_fixed: bool
    replicas_per_node: int
    num_cpus: int
    num_gpus: int
    # Rows that one replica has at a time: what its engine computes together, and some to spare.
    rows_in_flight: int
    environment: dict[str, str]
    chunks_in_flight: int = 1

    @property
    def cores(self) -> int | None:
        """CPU cores that a replica computes on; None where it has GPUs."""
        return None if self.num_gpus else self.num_cpus

    def for_chunks(self, chunks: Sequence[Chunk]) -> "Placement":
        """The same for these chunks in their order: no replica without a chunk, and none that takes more than an even
        share at first, since another that comes up later can't have what it has taken."""
        num_chunks = len(chunks)
        requests_each, works = [chunk.num_requests for chunk in chunks], [chunk.work for chunk in chunks]
        num_replicas = self.num_replicas if self.is_fixed else min(self.num_replicas, num_chunks)
        share = bisect_right(list(accumulate(works)), sum(works) / num_replicas)
        # One request may be more than that by itself; others go on beside it.
        share = min(max(share, PARTS_OF_A_SHARE), -(-num_chunks // num_replicas))
        # So many that the engine is full although one of them comes to its end; the first chunks tell, for later ones
        # are smaller.
        first = requests_each[: max(1, num_replicas * self.rows_in_flight // max(requests_each))]
        needed = -(-self.rows_in_flight * len(first) // sum(first)) + 1
        return replace(self, num_replicas=num_replicas, chunks_in_flight=min(share, needed, _MOST_CHUNKS_IN_FLIGHT))


def run_chunks(
    chunks: list[dict[str, Any]],
    placement: Placement,
    start_engine: Callable[[], Engine],
    read_chunk: Callable[[dict[str, Any]], pa.Table],
    stage: Stage,
    scoreboard: Any,
) -> Iterator[FinishedChunk]:
    """Send chunks over replicas with Ray Data, and yield each when it is done.

    All replicas are started at once, and work as they come up. Raises EngineUnusable when an engine doesn't start or
    dies, or a replica's process dies time and again.
    """
    import ray.data
    import ray.exceptions
    from ray.data import ActorPoolStrategy
    from ray.util.annotations import RayDeprecationWarning

    dealt = deal(chunks, placement.num_replicas, placement.chunks_in_flight)
    items = ray.data.from_items(dealt, override_num_blocks=len(dealt))
    with warnings.catch_warnings():
        # Ray means to take max_restarts under its own name, which this release doesn't yet.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        finished = items.map_batches(
            Replica,
            fn_constructor_args=(start_engine, read_chunk, stage, scoreboard),
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                size=placement.num_replicas,
                max_tasks_in_flight_per_actor=placement.chunks_in_flight,
                max_concurrent_calls_per_actor=placement.chunks_in_flight,
                enable_true_multi_threading=True,
            ),
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus or None,
            runtime_env={"env_vars": placement.environment},
            # A replica whose process dies comes back, but not for ever: something in its work may be what kills it.
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
    try:
        # Nothing ahead: Ray would hold a finished chunk back until the next one is there.
        for block in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for row in block.to_pylist():
                tally = Tally(**json.loads(row["tally"]))
                yield FinishedChunk(row["number"], tuple(row["parts"]), tally, row["started"], row["ended"])
    except Exception as error:
        for cause in _chain(error):
            # Ray also raises a class of its own that derives from ours; that one's text is a traceback.
            if type(cause) is EngineUnusable:
                raise EngineUnusable(cause.reason) from error
            if isinstance(cause, ray.exceptions.RayActorError):
                raise EngineUnusable(f"a replica's process died, and {MAX_RESTARTS} new ones in its place") from error
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes, Ray's kind of them first."""
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__


@dataclass(frozen=True, slots=True)
class Sent:
    """A request in the engine: the rows that it answers, and how often the engine had been started again before."""

    rows: list[dict[str, Any]]
    num_restarts: int
    at: float


class OpenWork:
    """What a replica has under way, for its reports; apart from it, so that reporting doesn't keep it alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[int, Tally] = {}
        self._in_flight: dict[Future[Any], Sent] = {}
        self._finished_at = time.monotonic()
        self.closed = threading.Event()

    def begin(self, chunk: int) -> None:
        with self._lock:
            self._chunks[chunk] = Tally()

    def submitted(self, future: "Future[Any]", sent: Sent) -> None:
        with self._lock:
            self._in_flight[future] = sent

    def finished(self, chunk: int, future: "Future[Any]", tally: Tally) -> None:
        with self._lock:
            del self._in_flight[future]
            self._chunks[chunk].add(tally)
            self._finished_at = time.monotonic()

    def end(self, chunk: int) -> Tally:
        with self._lock:
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
            )

    def keep_reporting(self, name: str, scoreboard: Any) -> None:
        while not self.closed.wait(REPORT_S):
            scoreboard.report.remote(name, self.report())


def place_of(row: dict[str, Any]) -> str:
    return f"{row['source_file']}:{row['source_line']}"


class Replica:
    """One engine and the chunks that it works on, several at a time, each in a thread."""

    def __init__(
        self,
        start_engine: Callable[[], Engine],
        read_chunk: Callable[[dict[str, Any]], pa.Table],
        stage: Stage,
        scoreboard: Any,
    ) -> None:
        import ray

        self._name = (ray.get_runtime_context().get_actor_id() or "local")[:12]
        self._read_chunk = read_chunk
        self._stage = stage
        self._open = OpenWork()
        # How often the engine was started again, and the lock under which it is.
        self._num_restarts = 0
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
        scoreboard.report.remote(self._name, self._open.report())
        threading.Thread(
            target=self._open.keep_reporting, args=(self._name, scoreboard), name="report", daemon=True
        ).start()

    def __call__(self, batch: pa.Table) -> Iterator[dict[str, Any]]:
        for chunk in batch.to_pylist():
            yield self._work(chunk)

    def _work(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._start_error is not None:
            raise self._start_error
        number = chunk["number"]
        attempt = self._stage.begin(number)
        self._open.begin(number)
        started = time.time()
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        sent = dict(self._submit(rows, done) for rows in gather(self._read_chunk(chunk).to_pylist()))
        parts: list[str] = []
        outcomes: list[dict[str, Any]] = []
        staged_at = time.monotonic()
        while sent:
            for future in take_all(done, timeout_s=STAGE_S):
                concluded, left, tally = self._conclude(future, sent.pop(future), attempt)
                outcomes += concluded
                self._open.finished(number, future, tally)
                if left:
                    again, sent[again] = self._submit(left, done)
            if outcomes and (not sent or time.monotonic() - staged_at >= STAGE_S):
                table = pa.Table.from_pylist(outcomes, schema=tables.OUTCOMES)
                parts.append(self._stage.put(number, attempt, len(parts), table))
                outcomes, staged_at = [], time.monotonic()
        return {
            "number": [number],
            "parts": [parts],
            "tally": [json.dumps(asdict(self._open.end(number)))],
            "started": [started],
            "ended": [time.time()],
        }

    def _submit(self, rows: list[dict[str, Any]], done: "SimpleQueue[Future[Any]]") -> tuple["Future[Any]", Sent]:
        """A request's future, which goes to `done` when it is, and what it is to answer."""
        sent = Sent(rows, self._num_restarts, time.monotonic())
        row = rows[0]
        future = self._engine.submit(Request(row["id"], row["endpoint"], row["request"]), lane="batch")
        self._open.submitted(future, sent)
        future.add_done_callback(done.put)
        return future, sent

    def _conclude(
        self, future: "Future[Any]", sent: Sent, attempt: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Tally]:
        """Outcomes of a request's rows, those of its rows that are to be sent again, and what is done by now."""
        try:
            event = future.result()
        except EngineUnusable as error:
            # It was in the engine when that died.
            self._restart_engine(sent.num_restarts, error)
            return [], sent.rows, Tally()
        # What failed for no fault of its own says nothing about the rows that ask for the same.
        is_shared = isinstance(event, Answered) or event.failure.status_code < 500
        answered, left = (sent.rows, []) if is_shared else (sent.rows[:1], sent.rows[1:])
        outcomes, total = [], Tally()
        for row in answered:
            outcome, tally = conclude(row, event, self._name, attempt)
            outcomes.append(outcome)
            total.add(tally)
        return outcomes, left, total

    def _restart_engine(self, num_restarts: int, error: EngineUnusable) -> None:
        """Start the engine again, unless another chunk's thread has since `num_restarts`. Raises EngineUnusable where
        it doesn't start, and `error` where it has died too often."""
        with self._restarting:
            if self._num_restarts > num_restarts:
                return
            if self._num_restarts == MAX_RESTARTS:
                raise error
            log.warning("%s; starting it again", error.reason)
            self._engine.restart()
            self._num_restarts += 1

    def __del__(self) -> None:
        # Ray drops the replica when its work is done; the engine's processes end here rather than as orphans.
        if hasattr(self, "_engine"):
            self._open.closed.set()
            self._engine.close()


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


def gather(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of `tables.SPOOLED`, those together that one answer is for: the first of each is the one that is asked."""
    asked: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["is_repeated"] and asked:
            asked[-1].append(row)
        else:
            asked.append([row])
    return asked


def conclude(row: dict[str, Any], event: Answered | Failed, replica: str, attempt: int) -> tuple[dict[str, Any], Tally]:
    """A row of `tables.OUTCOMES` and what it adds to the totals, of a row of `tables.SPOOLED` and its last event.

    An answer that no table can hold (a NaN among its numbers, say) is a failure of this row alone.
    """
    if isinstance(event, Answered):
        try:
            return _answered(row, event, replica, attempt)
        except (ValueError, TypeError, KeyError) as error:
            message = f"the engine's answer can't be written down: {error}"
            event = Failed(Failure(500, "unusable_answer", message))
    failure = event.failure
    outcome = {
        **row,
        **asdict(failure),
        "message": f"{place_of(row)}: {failure.message}",
        "type": failure.type,
        "stage": "infer",
        "raw": row["request"].encode()[: tables.RAW_BYTES],
        "attempts": attempt,
    }
    return outcome, Tally(num_failed=1, reasons={failure.reason: 1}, work=_work_of(row))


def _work_of(row: dict[str, Any]) -> float:
    """What the plan expected of a row; nothing of one that is answered by another's answer."""
    return 0.0 if row["is_repeated"] else row["num_output_tokens"] + PROMPT_COST * row["num_prompt_tokens"]


def _answered(row: dict[str, Any], event: Answered, replica: str, attempt: int) -> tuple[dict[str, Any], Tally]:
    body, usage = event.body, event.usage
    request = jiter.from_json(row["request"].encode())
    prompt = request.get("prompt")
    finish_reasons = [choice["finish_reason"] for choice in body["choices"]]
    outcome = {
        **row,
        "model": body["model"],
        "prompt": prompt if isinstance(prompt, str) else None,
        "response": json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        "text": [choice["text"] if "text" in choice else choice["message"]["content"] for choice in body["choices"]],
        "finish_reason": finish_reasons,
        "created": datetime.fromtimestamp(body["created"], UTC),
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
    }
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    tally = Tally(
        num_answered=1,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        num_deduplicated=int(row["is_repeated"]),
        deduplicated_tokens=usage["completion_tokens"] if row["is_repeated"] else 0,
        deduplicated_prompt_tokens=usage["prompt_tokens"] if row["is_repeated"] else 0,
        cached_tokens=0 if row["is_repeated"] else cached,
        work=_work_of(row),
        num_cut_by_default=int(
            # A chat that doesn't say goes on to the end of the context instead.
            "length" in finish_reasons and row["endpoint"] == "/v1/completions" and request.get("max_tokens") is None
        ),
    )
    return outcome, tally
