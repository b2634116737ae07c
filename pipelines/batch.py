"""The batch door: a run from input files to published tables. `run` is the whole of it, top to bottom."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipelines import cluster, infer, plan, progress, runs, staged, write
from pipelines.carry import carry_over
from pipelines.changes import publish_changes
from pipelines.check import checked_lines
from pipelines.engine import Engine
from pipelines.lease import Lease
from pipelines.manifest import Summary, add, make_manifest, summarise, summary_of
from pipelines.placement import Placement, count, place, start_of, tell_what_is_taken
from pipelines.prepare import Prepared, prepare
from pipelines.progress import Show
from pipelines.storage import Folder
from pipelines.through import ThroughStart, adopt, place_through
from schemas import tables
from schemas.failures import Interrupted, TooManyErrors, UsageError
from schemas.plans import Carried, Plan
from schemas.requests import Tally
from schemas.settings import RunSettings

log = logging.getLogger("overnight.batch")

# A Ray cluster for as long as its block lasts; told whether Ray is to log.
Connect = Callable[[bool], AbstractContextManager[None]]


def make_plan(
    settings: RunSettings,
    prepared: Prepared,
    placement: Placement,
    show: Show,
    earlier: Mapping[str, Any] | None = None,
) -> Plan:
    """Check every line, carry over what the run of the manifest `earlier` has answered, and spool the rest."""
    show.phase(f"checking {count(len(prepared.files), 'file')}")
    return plan.make_plan(
        checked_lines(prepared.files, settings, prepared.model, prepared.limits, prepared.identities),
        prepared.work,
        num_replicas=placement.num_replicas,
        rows_in_flight=placement.rows_in_flight,
        with_dedup=settings.dedup,
        show_rows=show.checked,
        carry=_carry(earlier, prepared, show) if earlier is not None else None,
    )


@contextmanager
def adopted(settings: RunSettings, connect: Connect) -> Iterator[RunSettings]:
    """The settings as they are; of a run through an endpoint, on its cluster for the block, with what is the
    endpoint's to say. Raises UsageError."""
    if settings.through is None:
        yield settings
        return
    with connect(settings.verbose):
        yield adopt(settings)


def place_run(settings: RunSettings, prepared: Prepared) -> Placement:
    """Where a run's engines are: on the cluster, or an endpoint's. Raises UsageError."""
    if settings.through is not None:
        return place_through(settings)
    placement = place(settings, prepared.model)
    tell_what_is_taken(placement)
    return placement


def earlier_run(settings: RunSettings, output: Folder) -> dict[str, Any] | None:
    """The manifest of the published run whose answers are carried over, and which this one is compared with."""
    manifest = write.read_manifest(output) if settings.changed else None
    if manifest is not None and manifest["version"] != tables.VERSION:
        log.warning("another version made run %s: none of its answers are carried over", manifest["run_id"])
        return None
    return manifest


def _carry(earlier: Mapping[str, Any], prepared: Prepared, show: Show) -> Callable[[Any], Carried]:
    def carry(checked: Any) -> Carried:
        show.phase(f"carrying over answers of run {earlier['run_id']}")
        return carry_over(checked, prepared.output, earlier, prepared.work)

    return carry


def run(
    settings: RunSettings,
    show: Show,
    start_engine: Callable[[], Engine] | None = None,
    connect: Connect = cluster.connected,
) -> Summary:
    """Answer every line of the input, and publish the tables; or go on with a run that was broken off.

    `start_engine` replaces vLLM, for tests; `connect` lets several runs share one Ray. Raises UsageError before any
    engine starts for what the user must change, TooManyErrors where more rows fail than may, EngineUnusable when the
    engine doesn't start or dies time and again, Interrupted when whoever watches had it drain, and StorageFailed when
    what it writes to, or reads its own work from, fails; what was finished by then stays below `_work/`.
    """
    with adopted(settings, connect) as given:
        prepared = prepare(given, show)
        with Lease(prepared.output) as lease:
            made = runs.recipe(prepared.files, given, prepared.limits, prepared.identities)
            unfinished = None
            if not given.restart:
                standing = runs.find_unfinished(prepared.output)
                if (published_run := _finished(given, prepared.output, made, standing)) is not None:
                    return published_run
                unfinished = _unfinished(given, prepared.output, made, standing)
            if unfinished is not None:
                prepared = prepared.going_on_with(unfinished)
            work = prepared.work
            runs.remove_others(prepared.output, work)
            with progress.StatusFile(show, work, prepared.run_id) as told:
                return _carry_out(given, prepared, unfinished, made, lease, told, start_engine, connect)


def _carry_out(
    settings: RunSettings,
    prepared: Prepared,
    unfinished: runs.Unfinished | None,
    made: Mapping[str, Any],
    lease: Lease,
    show: Show,
    start_engine: Callable[[], Engine] | None,
    connect: Connect,
) -> Summary:
    """Plan a run, or take up its plan; answer what is left of it; publish."""
    began, work = time.time(), prepared.work
    earlier = earlier_run(settings, prepared.output)
    show.phase("starting Ray")
    with connect(settings.verbose):
        # What Ray leaves of a run that failed in this process may hold its replicas, and so their cores, until it is
        # collected; and nothing is while this one waits for them.
        gc.collect()
        placement = place_run(settings, prepared)
        if unfinished is None:
            runs.begin(work, made)
            planned = make_plan(settings, prepared, placement, show, earlier)
            runs.save_plan(work, planned)
        else:
            show.phase(f"going on with run {unfinished.run_id}")
            planned = runs.load_plan(work)
        _stop_at(settings.max_errors, planned.settled, planned.num_rows)
        chunks, replicas = _infer(settings, planned, placement, prepared, work, show, start_engine)
        show.phase("publishing")
        lease.check()
        parts = [*planned.settled_parts, *(part for chunk in chunks for part in chunk.parts)]
        published = write.publish_tables(
            prepared.output.join("runs", prepared.run_id), staged.sorted_outcomes(work, parts), planned.num_rows
        )
        counts, files = None, list[dict[str, Any]]()
        if earlier is not None:
            show.phase(f"comparing with run {earlier['run_id']}")
            counts, files = publish_changes(prepared.output, prepared.run_id, published, earlier, prepared.identities)
    summary = summarise(settings, prepared, planned, chunks, replicas, began)
    summary.changes = counts
    whole = replace(published, files=[*published.files, *files])
    manifest = make_manifest(settings, summary, prepared, whole, made, began)
    lease.check()
    write.publish_manifest(prepared.output, prepared.run_id, manifest)
    log.info("published", extra={"run_id": prepared.run_id, "rows": manifest["rows"], "usage": manifest["usage"]})
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
    if changed and settings.changed:
        return None
    if changed:
        raise UsageError(
            f"{output.typed}: the run there had other rows: {', '.join(changed)}. Give --changed for a new run beside "
            "it that takes over the answers to equal requests, --restart for one that computes all, or another --output"
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
    changed = runs.differences(standing.recipe, made)
    if changed and settings.changed:
        return None
    if changed:
        raise UsageError(
            f"{output.typed}: run {standing.run_id} there is unfinished and has other rows: {', '.join(changed)}. "
            "Give --restart to begin anew, without what it has done, --changed to take over the published run's "
            "answers to equal requests, or another --output"
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
    told = ("part", "row_group", "start", "num_rows", "work")
    items = [
        {"number": number, **{name: getattr(chunk, name) for name in told}}
        for number, chunk in enumerate(planned.chunks)
    ]
    stager = staged.Stager(work)
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
    own = start_of(settings, prepared.model, prepared.adapters, placement)
    start = start_engine or (own if settings.through is None else ThroughStart.of(settings, placement, prepared.run_id))
    scoreboard = progress.start_scoreboard()
    watch = progress.Watch(planned.totals, scoreboard, show.progress, settings.due)
    with watch, show.drains(watch.draining):
        total = add([planned.settled, *(chunk.tally for chunk in done)])
        for chunk in done:
            watch.finished(chunk.number, chunk.tally)
        for chunk in infer.run_chunks(
            left, placement, start, ChunkReader(work), stager, scoreboard, prepared.run_id, settings.retry_errors
        ):
            watch.finished(chunk.number, chunk.tally)
            done.append(chunk)
            total.add(chunk.tally)
            _stop_at(settings.max_errors, total, planned.num_rows)
    if watch.draining.is_set() and total.num_done < planned.num_rows:
        raise Interrupted(f"{planned.num_rows - total.num_done:,} of {planned.num_rows:,} rows are left")
    return done, max(placement.num_replicas, watch.num_replicas_up)


@dataclass(frozen=True, slots=True)
class StagedReader:
    """Reads what is staged of a chunk: parts and rows."""

    stager: staged.Stager

    def __call__(self, chunk: int) -> tuple[list[str], pa.Table]:
        return self.stager.begin(chunk)[1:]


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """Reads a chunk where it is worked on."""

    work: Folder

    def __call__(self, item: dict[str, Any]) -> pa.Table:
        return plan.read_chunk(self.work, item["part"], item["row_group"], item["start"], item["num_rows"])
