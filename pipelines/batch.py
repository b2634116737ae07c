"""The batch door: a run from input files to published tables. `run` is the whole of it, top to bottom."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines import cluster, infer, plan, progress, runs, write
from pipelines.check import checked_lines
from pipelines.engine import Engine, EngineStart
from pipelines.lease import Lease
from pipelines.manifest import Summary, add, make_manifest, summarise, summary_of
from pipelines.placement import Placement, count, place
from pipelines.prepare import Prepared, prepare
from pipelines.progress import Show
from pipelines.storage import Folder
from schemas.failures import TooManyErrors, UsageError
from schemas.plans import Plan
from schemas.requests import Tally
from schemas.settings import RunSettings


def make_plan(settings: RunSettings, prepared: Prepared, placement: Placement, show: Show) -> Plan:
    """Check every line, and spool what is to be answered."""
    show.phase(f"checking {count(len(prepared.files), 'file')}")
    return plan.make_plan(
        checked_lines(prepared.files, settings, prepared.model, prepared.limits, prepared.identities),
        prepared.work,
        num_replicas=placement.num_replicas,
        rows_in_flight=placement.rows_in_flight,
        with_dedup=settings.dedup,
        show_rows=show.checked,
    )


def run(settings: RunSettings, show: Show, start_engine: Callable[[], Engine] | None = None) -> Summary:
    """Answer every line of the input, and publish the tables; or go on with a run that was broken off.

    `start_engine` replaces vLLM, for tests. Raises UsageError before any engine starts for what the user must change,
    TooManyErrors where more rows fail than may, and EngineUnusable when the engine doesn't start or dies time and
    again; what was finished by then stays below `_work/`.
    """
    began = time.time()
    prepared = prepare(settings, show)
    with Lease(prepared.output) as lease:
        made = runs.recipe(prepared.files, settings, prepared.limits, prepared.identities)
        unfinished = None
        if not settings.restart:
            standing = runs.find_unfinished(prepared.output)
            if (published_run := _finished(settings, prepared.output, made, standing)) is not None:
                return published_run
            unfinished = _unfinished(settings, prepared.output, made, standing)
        if unfinished is not None:
            prepared = prepared.going_on_with(unfinished)
        work = prepared.work
        runs.remove_others(prepared.output, work)
        show = progress.StatusFile(show, work, prepared.run_id)
        show.phase("starting Ray")
        with cluster.connected(settings.verbose):
            placement = place(settings, prepared.model)
            if unfinished is None:
                runs.begin(work, made)
                planned = make_plan(settings, prepared, placement, show)
                runs.save_plan(work, planned)
            else:
                show.phase(f"going on with run {unfinished.run_id}")
                planned = runs.load_plan(work)
            _stop_at(settings.max_errors, planned.validated, planned.num_rows)
            chunks, replicas = _infer(settings, planned, placement, prepared, work, show, start_engine)
            show.phase("publishing")
            lease.check()
            parts = [*planned.rejections, *(part for chunk in chunks for part in chunk.parts)]
            published = write.publish_tables(
                prepared.output.join("runs", prepared.run_id), write.sorted_outcomes(work, parts), planned.num_rows
            )
        summary = summarise(settings, prepared, planned, chunks, replicas, began)
        manifest = make_manifest(settings, summary, prepared, published, made, began)
        lease.check()
        write.publish_manifest(prepared.output, prepared.run_id, manifest)
        # Rows that failed for no fault of their own can be tried again from there.
        if not settings.keep_work and not summary.totals.num_faults:
            work.remove()
    return summary


def _stop_at(most: float | None, tally: Tally, num_rows: int) -> None:
    """Raises TooManyErrors where more rows failed than may: a number of them, or a share of all below 1."""
    if most is None or tally.num_failed <= (most * num_rows if isinstance(most, float) else most):
        return
    reasons = sorted(tally.reasons.items(), key=lambda item: -item[1])
    told = ", ".join(f"{number:,} {reason}" for reason, number in reasons[:3])
    allowed = f"{most:.4g} of all" if isinstance(most, float) else f"{most:,}"
    raise TooManyErrors(
        f"{tally.num_failed:,} of {num_rows:,} rows have failed ({told}), and --max-errors allows {allowed}. Run "
        "again with more to go on"
    )


def _finished(
    settings: RunSettings, output: Folder, made: Mapping[str, Any], standing: runs.Unfinished | None
) -> Summary | None:
    """The published run of the very same rows, where nothing is left to do for it. Raises UsageError for other rows."""
    manifest = write.read_manifest(output)
    if manifest is None or (standing is not None and standing.run_id > manifest["run_id"]):
        return None
    # A manifest of an older version says nothing of what it was made of.
    begun = manifest.get("recipe")
    changed = ["an older version made it"] if begun is None else runs.differences(begun, made)
    if changed:
        raise UsageError(
            f"{output.typed}: the run there had other rows: {', '.join(changed)}. Give --restart for a new run beside "
            "it, or another --output"
        )
    if settings.retry_errors and manifest["rows_to_retry"]:
        return None
    return summary_of(manifest, output)


def _unfinished(
    settings: RunSettings, output: Folder, made: Mapping[str, Any], standing: runs.Unfinished | None
) -> runs.Unfinished | None:
    """The run that was broken off, where this one is of the very same rows. Raises UsageError where it isn't."""
    if standing is None:
        if settings.retry_errors and write.read_manifest(output) is not None:
            raise UsageError(
                f"{output.typed}: the rows that failed can't be tried again, since their work folder is gone. Give "
                "--restart for a new run"
            )
        return None
    if changed := runs.differences(standing.recipe, made):
        raise UsageError(
            f"{output.typed}: run {standing.run_id} there is unfinished and has other rows: {', '.join(changed)}. "
            "Give --restart to begin anew, without what it has done, or another --output"
        )
    return standing


def _infer(
    settings: RunSettings,
    planned: Plan,
    placement: Placement,
    prepared: Prepared,
    work: Folder,
    show: Show,
    start_engine: Callable[[], Engine] | None,
) -> tuple[list[infer.FinishedChunk], int]:
    """The chunks of a plan, answered: those that were before, and those that are now; on how many replicas."""
    items = [
        {"number": number, **{name: getattr(chunk, name) for name in ("part", "row_group", "start", "num_rows")}}
        for number, chunk in enumerate(planned.chunks)
    ]
    stager = write.Stager(work)
    begun = stager.chunks()
    done = infer.look_at_staged(
        [item for item in items if item["number"] in begun], StagedReader(stager), settings.retry_errors
    )
    are_done = {chunk.number for chunk in done}
    left = [item for item in items if item["number"] not in are_done]
    if not left:
        return done, 0
    placement = placement.for_chunks([planned.chunks[item["number"]] for item in left])
    show.phase(f"starting {count(placement.num_replicas, 'engine')}")
    start = start_engine or EngineStart(
        prepared.model.spec,
        settings.served_names,
        settings.engine.model_copy(update={"tensor_parallel_size": placement.num_parts}),
        placement.replicas_per_node,
        placement.cores,
        {name: adapter.spec for name, adapter in prepared.adapters.items()},
    )
    scoreboard = progress.start_scoreboard()
    with progress.Watch(planned.totals, scoreboard, show.progress) as watch:
        failed = add([planned.validated, *(chunk.tally for chunk in done)])
        for chunk in done:
            watch.finished(chunk.number, chunk.tally)
        for chunk in infer.run_chunks(
            left, placement, start, ChunkReader(work), stager, scoreboard, settings.retry_errors
        ):
            watch.finished(chunk.number, chunk.tally)
            done.append(chunk)
            failed.add(chunk.tally)
            _stop_at(settings.max_errors, failed, planned.num_rows)
    return done, placement.num_replicas


@dataclass(frozen=True, slots=True)
class StagedReader:
    """Reads what is staged of a chunk: parts and rows."""

    stager: write.Stager

    def __call__(self, chunk: int) -> tuple[list[str], pa.Table]:
        return self.stager.begin(chunk)[1:]


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """Reads a chunk where it is worked on."""

    work: Folder

    def __call__(self, item: dict[str, Any]) -> pa.Table:
        return plan.read_chunk(self.work, item["part"], item["row_group"], item["start"], item["num_rows"])
