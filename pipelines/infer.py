"""Infer: chunks of requests to outcomes, on replicas: Ray actors with one engine each (`pipelines/replica.py`).

Needs the columns of `tables.SPOOLED`, makes those of `tables.OUTCOMES`. Finished rows are staged by the replica itself,
since Ray hands a task's output on only when the task ends; what comes back through Ray is one small row a chunk.
"""

import gc
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from pipelines.engine import Engine
from pipelines.open_work import Stage
from pipelines.order import deal
from pipelines.outcomes import kept, tally_of
from pipelines.placement import Placement
from pipelines.ray_errors import as_ours
from pipelines.replica import Replica
from schemas.requests import Tally

log = logging.getLogger("overnight.infer")

# A replica's process is started again so often.
MAX_RESTARTS = 3
# Tasks that look at what is staged.
_MOST_LOOKS = 64


@dataclass(frozen=True, slots=True)
class FinishedChunk:
    """One chunk, all of whose rows are staged in `parts`. `spans`: from the first submitted to the last staged row."""

    number: int
    parts: tuple[str, ...]
    tally: Tally
    # Of the tally, what was done now.
    new: Tally = field(default_factory=Tally)
    started: float = 0.0
    ended: float = 0.0


def run_chunks(
    chunks: list[dict[str, Any]],
    placement: Placement,
    start_engine: Callable[[], Engine],
    read_chunk: Callable[[dict[str, Any]], pa.Table],
    stage: Stage,
    scoreboard: Any,
    run_id: str,
    retries_errors: bool = False,
) -> Iterator[FinishedChunk]:
    """Send chunks over replicas with Ray Data, and yield each when it is done.

    Rows that are staged already aren't sent again; with `retries_errors` those that failed in an engine are.

    All replicas are started at once, and work as they come up; where their number isn't fixed, there are more when the
    cluster has room for more. Raises EngineUnusable when an engine doesn't start or
    dies, or a replica's process dies time and again.
    """
    import ray.data
    from ray.data import ActorPoolStrategy
    from ray.util.annotations import RayDeprecationWarning

    order = deal([chunk["work"] for chunk in chunks], placement.num_replicas, placement.chunks_in_flight)
    items = ray.data.from_items([chunks[place] for place in order], override_num_blocks=len(order))
    with warnings.catch_warnings():
        # Ray means to take max_restarts under its own name, which this release doesn't yet.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        finished = items.map_batches(
            Replica,
            fn_constructor_args=(start_engine, read_chunk, stage, scoreboard, run_id, retries_errors),
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=placement.num_replicas,
                initial_size=placement.num_replicas,
                max_size=placement.max_replicas or placement.num_replicas,
                max_tasks_in_flight_per_actor=placement.chunks_in_flight,
                max_concurrent_calls_per_actor=placement.chunks_in_flight,
                enable_true_multi_threading=True,
            ),
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus or None,
            runtime_env={"env_vars": placement.environment},
            # A replica whose process dies comes back, but not for ever: something in its work may be what kills it.
            max_restarts=MAX_RESTARTS,
            # Tasks are bound by that alone: they may fail many times while a node that died isn't yet known to be dead.
            max_task_retries=-1,
        )
    try:
        with as_ours(actor_died=f"a replica's process died, and {MAX_RESTARTS} new ones in its place"):
            # Nothing ahead: Ray would hold a finished chunk back until the next one is there.
            for block in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for row in block.to_pylist():
                    tally, new = (Tally(**json.loads(row[name])) for name in ("tally", "new"))
                    yield FinishedChunk(row["number"], tuple(row["parts"]), tally, new, row["started"], row["ended"])
    finally:
        # The replicas, and what they hold, end with these.
        del finished, items
        gc.collect()


def look_at_staged(
    chunks: list[dict[str, Any]], read_staged: Callable[[int], tuple[list[str], pa.Table]], retries_errors: bool
) -> list[FinishedChunk]:
    """Of chunks that have staged rows, those that have all of them: nothing is left to do there."""
    import ray.data

    if not chunks:
        return []
    items = ray.data.from_items(chunks, override_num_blocks=min(len(chunks), _MOST_LOOKS))
    look = StagedReader(read_staged, retries_errors)
    looked = items.map_batches(look, batch_size=16, batch_format="pyarrow").iter_rows()
    return [FinishedChunk(row["number"], tuple(row["parts"]), Tally(**json.loads(row["tally"]))) for row in looked]


@dataclass(frozen=True)
class StagedReader:
    """Describes those of a batch of chunks all of whose rows are staged."""

    read_staged: Callable[[int], tuple[list[str], pa.Table]]
    retries_errors: bool

    def __call__(self, batch: pa.Table) -> Iterator[dict[str, Any]]:
        for chunk in batch.to_pylist():
            parts, staged = self.read_staged(chunk["number"])
            staged = kept(staged, self.retries_errors)
            if staged.num_rows == chunk["num_rows"]:
                tally = json.dumps(asdict(tally_of(staged)))
                yield {"number": [chunk["number"]], "parts": [parts], "tally": [tally]}
