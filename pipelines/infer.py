"""Infer: chunks of requests to outcomes, on replicas: Ray actors with one engine each.

Needs the columns of `tables.REQUESTS`, adds those of `tables.OUTCOMES`. Finished rows are staged by the replica itself,
since Ray hands a task's output on only when the task ends; what comes back through Ray is one small row a chunk.
"""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import jiter
import pyarrow as pa

from pipelines.engine import Engine
from pipelines.progress import REPORT_S, ReplicaReport
from schemas import tables
from schemas.failures import EngineUnusable
from schemas.requests import Answered, Event, Failed, Request, Tally

# A finished row is durable after at most this long.
STAGE_S = 5.0


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
    num_cpus: float
    num_gpus: int
    # Chunks that one replica works on at a time; their rows together fill the engine, with some to spare.
    chunks_in_flight: int
    environment: dict[str, str]


def run_chunks(
    chunks: list[dict[str, Any]],
    placement: Placement,
    start_engine: Callable[[], Engine],
    read_chunk: Callable[[dict[str, Any]], pa.Table],
    stage: Stage,
    scoreboard: Any,
) -> Iterator[FinishedChunk]:
    """Send chunks over replicas with Ray Data, and yield each when it is done.

    All replicas are started at once, and work as they come up. Raises what a replica raised: EngineUnusable (as the
    cause of Ray's own exception) when an engine doesn't start or dies.
    """
    import ray.data
    from ray.data import ActorPoolStrategy

    finished = ray.data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
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
    )
    for row in finished.iter_rows():
        yield FinishedChunk(
            row["number"],
            tuple(row["parts"]),
            Tally(**json.loads(row["tally"])),
            row["started"],
            row["ended"],
        )


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

        self._name = ray.get_runtime_context().get_actor_id()[:12]
        self._read_chunk = read_chunk
        self._stage = stage
        self._scoreboard = scoreboard
        self._lock = threading.Lock()
        self._open: dict[int, Tally] = {}
        self._in_flight: dict[Future[Any], float] = {}
        self._closed = threading.Event()
        # An exception here would reach the driver as words in Ray's own; the first chunk raises it as what it is.
        self._start_error: EngineUnusable | None = None
        try:
            self._engine = start_engine()
        except EngineUnusable as error:
            self._start_error = error
            return
        threading.Thread(target=self._report, name="report", daemon=True).start()

    def __call__(self, batch: pa.Table) -> Iterator[dict[str, Any]]:
        for chunk in batch.to_pylist():
            yield self._work(chunk)

    def _work(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._start_error is not None:
            raise self._start_error
        number = chunk["number"]
        attempt = self._stage.begin(number)
        tally = Tally()
        with self._lock:
            self._open[number] = tally
        started = time.time()
        rows = {self._submit(row): row for row in self._read_chunk(chunk).to_pylist()}
        pending: set[Future[Any]] = set(rows)
        parts: list[str] = []
        outcomes: list[dict[str, Any]] = []
        staged_at = time.monotonic()
        while pending:
            done, pending = wait(pending, timeout=STAGE_S, return_when=FIRST_COMPLETED)
            for future in done:
                self._in_flight.pop(future, None)
                row = rows.pop(future)
                event = future.result()
                outcomes.append(make_outcome(row, event, self._name, attempt))
                with self._lock:
                    tally.add(make_tally(row, event))
            if outcomes and (not pending or time.monotonic() - staged_at >= STAGE_S):
                table = pa.Table.from_pylist(outcomes, schema=tables.OUTCOMES)
                parts.append(self._stage.put(number, attempt, len(parts), table))
                outcomes, staged_at = [], time.monotonic()
        with self._lock:
            del self._open[number]
        return {
            "number": [number],
            "parts": [parts],
            "tally": [json.dumps(asdict(tally))],
            "started": [started],
            "ended": [time.time()],
        }

    def _submit(self, row: dict[str, Any]) -> "Future[Any]":
        future = self._engine.submit(Request(row["id"], row["endpoint"], row["request"]), lane="batch")
        self._in_flight[future] = time.monotonic()
        return future

    def _report(self) -> None:
        while not self._closed.is_set():
            ages = list(self._in_flight.values())
            oldest = time.monotonic() - min(ages) if ages else 0.0
            with self._lock:
                chunks = copy.deepcopy(self._open)
            self._scoreboard.report.remote(self._name, ReplicaReport(chunks, len(ages), oldest))
            self._closed.wait(REPORT_S)

    def __del__(self) -> None:
        # Ray drops the replica when its work is done; the engine's processes end here rather than as orphans.
        if hasattr(self, "_closed"):
            self._closed.set()
        if hasattr(self, "_engine"):
            self._engine.close()


def make_outcome(row: dict[str, Any], event: Event, replica: str, attempt: int) -> dict[str, Any]:
    """One row of `tables.OUTCOMES`: a row of `tables.REQUESTS` and the last event of its request."""
    if isinstance(event, Failed):
        failure = event.failure
        place = f"{row['source_file']}:{row['source_line']}"
        return {
            **row,
            **asdict(failure),
            "message": f"{place}: {failure.message}",
            "type": failure.type,
            "stage": "infer",
            "raw": row["request"].encode()[: 64 << 10],
            "attempts": attempt,
        }
    body, usage = event.body, event.usage
    prompt = jiter.from_json(row["request"].encode()).get("prompt")
    return {
        **row,
        "model": body["model"],
        "prompt": prompt if isinstance(prompt, str) else None,
        "response": json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        "text": [choice["text"] for choice in body["choices"]],
        "finish_reason": [choice["finish_reason"] for choice in body["choices"]],
        "created": datetime.fromtimestamp(body["created"], UTC),
        "fingerprint": None,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "search_tokens": None,
        "queue_ms": event.timing.queue_ms,
        "first_token_ms": event.timing.first_token_ms,
        "total_ms": event.timing.total_ms,
        "replica": replica,
        "attempt": attempt,
        "is_deduplicated": False,
    }


def make_tally(row: dict[str, Any], event: Answered | Failed) -> Tally:
    """What one finished row adds to the run's totals."""
    if isinstance(event, Failed):
        return Tally(num_failed=1, reasons={event.failure.reason: 1})
    request = jiter.from_json(row["request"].encode())
    is_cut = any(choice["finish_reason"] == "length" for choice in event.body["choices"])
    return Tally(
        num_answered=1,
        prompt_tokens=event.usage["prompt_tokens"],
        completion_tokens=event.usage["completion_tokens"],
        num_cut_by_default=int(is_cut and request.get("max_tokens") is None),
    )
