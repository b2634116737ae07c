"""Check: every line of the input judged without an engine: read and validate, the way that a run begins, too."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines import cluster, read, validate
from pipelines.adapters import resolve_adapters
from pipelines.checks import Checks
from pipelines.inputs import InputFile, find_inputs
from pipelines.limits import read_limits
from pipelines.model import Model, resolve
from pipelines.progress import Show
from schemas import tables
from schemas.limits import ModelLimits
from schemas.settings import InputSettings

# What a report holds of the lines that were refused; all are counted.
MAX_LISTED = 100_000


@dataclass(slots=True)
class Report:
    """What a check found."""

    num_accepted: int = 0
    num_rejected: int = 0
    # Accepted rows by endpoint; rejected ones by reason; fields that no schema knows, with their rows.
    endpoints: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    unknown_fields: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    longest_prompt: int = 0
    # Rows of `tables.REJECTIONS`, in input order; the first MAX_LISTED.
    rejections: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.num_accepted + self.num_rejected

    def add(self, block: dict[str, Any]) -> None:
        for name in ("num_accepted", "num_rejected", "prompt_tokens"):
            setattr(self, name, getattr(self, name) + block[name])
        self.longest_prompt = max(self.longest_prompt, block["longest_prompt"])
        for name in ("endpoints", "reasons", "unknown_fields"):
            counts = getattr(self, name)
            for key, number in block[name].items():
                counts[key] = counts.get(key, 0) + number
        self.rejections += block["rejections"][: max(0, MAX_LISTED - len(self.rejections))]


def checked_lines(
    files: list[InputFile],
    settings: InputSettings,
    model: Model,
    limits: ModelLimits,
    identities: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A Ray dataset of `tables.CHECKED` over the lines that the settings take of the files.

    `identities`: what answers, for the fingerprints (`pipelines/identity.py`).
    """
    validator = validate.Validator(
        Checks("batch", model.spec, limits),
        dict(identities),
        settings.endpoint,
        dict(settings.fill),
        settings.strict,
    )
    selection = read.Selection(settings.limit, settings.sample)
    return read.lines(files, selection).map_batches(validator, batch_format="pyarrow", batch_size=None)


def check(settings: InputSettings, show: Show) -> Report:
    """Judge every line of the input as a run would. Raises UsageError for what the user must change."""
    files = find_inputs(settings.inputs)
    show.phase("finding the model" if settings.model else "finding the model (the embedded one is unpacked once)")
    model = resolve(settings.model)
    adapters = resolve_adapters(settings.adapters, model)
    limits = read_limits(model, settings.served_names, settings.engine, adapters)
    show.phase("starting Ray")
    report = Report()
    with cluster.connected(settings.verbose):
        show.phase(f"checking {len(files):,} {'file' if len(files) == 1 else 'files'}")
        checked = checked_lines(files, settings, model, limits)
        for row in checked.map_batches(count, batch_format="pyarrow", batch_size=None).iter_rows():
            report.add(json.loads(row["block"]))
            show.checked(report.num_rows)
    report.rejections.sort(key=lambda row: (row["source_index"], row["source_line"] or 0))
    return report


def count(block: pa.Table) -> Iterator[dict[str, Any]]:
    """One row for a block of `tables.CHECKED`: its part of a report, as JSON."""
    accepted = block.filter(pc.is_null(block["reason"]))
    rejected = block.filter(pc.is_valid(block["reason"]))
    names = [name for name in tables.REJECTIONS.names if name != "raw"]
    part = {
        "num_accepted": accepted.num_rows,
        "num_rejected": rejected.num_rows,
        "endpoints": tables.count_values(accepted["endpoint"]),
        "reasons": tables.count_values(rejected["reason"]),
        "unknown_fields": tables.count_values(pc.list_flatten(accepted["unknown_fields"])),
        "prompt_tokens": pc.sum(accepted["num_prompt_tokens"]).as_py() or 0,
        "longest_prompt": pc.max(accepted["num_prompt_tokens"]).as_py() or 0,
        "rejections": rejected.select(names).slice(0, MAX_LISTED).to_pylist(),
    }
    yield {"block": [json.dumps(part)]}
