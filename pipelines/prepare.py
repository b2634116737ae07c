"""Prepare: everything that a run needs before Ray starts: what it reads, what answers, where it writes."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pipelines import write
from pipelines.adapters import Adapter, resolve_adapters
from pipelines.identity import identities
from pipelines.inputs import InputFile, find_inputs
from pipelines.limits import read_limits
from pipelines.model import Model, resolve
from pipelines.progress import Show
from pipelines.runs import Unfinished
from pipelines.storage import Folder
from schemas.limits import ModelLimits
from schemas.settings import RunSettings


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

    def going_on_with(self, unfinished: Unfinished) -> "Prepared":
        """The same in another run's work folder; under its name, unless a run of this name is published."""
        published = write.read_manifest(self.output)
        is_published = published is not None and published["run_id"] >= unfinished.run_id
        return replace(self, work=unfinished.work, run_id=self.run_id if is_published else unfinished.run_id)


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
