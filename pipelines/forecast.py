"""Forecast: what a run would do, without doing it: the plan's totals, what the plan saves, time and cost."""

from dataclasses import dataclass

from pipelines import batch, cluster, costs, write
from pipelines.costs import Estimate, Experience
from pipelines.prepare import prepare
from pipelines.progress import Show
from schemas.plans import Totals
from schemas.requests import Tally
from schemas.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would come to."""

    num_rows: int
    validated: Tally
    totals: Totals
    num_chunks: int
    num_replicas: int
    estimate: Estimate
    # What the estimate goes by.
    experience: Experience | None


def forecast(settings: RunSettings, show: Show) -> Forecast:
    """Check and plan as a run would; no engine is started, and nothing of it is left. Raises UsageError."""
    with batch.adopted(settings, cluster.connected) as given:
        prepared = prepare(given, show)
        show.phase("starting Ray")
        try:
            with cluster.connected(given.verbose):
                placement = batch.place_run(given, prepared)
                planned = batch.make_plan(given, prepared, placement, show, batch.earlier_run(given, prepared.output))
        finally:
            prepared.work.remove()
        if planned.chunks:
            placement = placement.for_chunks(planned.chunks)
        experience = costs.experience_of(write.read_manifest(prepared.output), prepared.identities)
        return Forecast(
            planned.num_rows,
            planned.settled,
            planned.totals,
            len(planned.chunks),
            placement.num_replicas if planned.chunks else 0,
            costs.estimate(planned.totals, placement.num_replicas, experience, given.prices),
            experience,
        )
