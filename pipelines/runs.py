"""Runs: what stands of a run in its output folder, and whether the same command goes on with it.

OUT/_work/<run id>/recipe.json    what decides the run's rows: inputs, model, settings
OUT/_work/<run id>/plan.parquet   its chunks in order
OUT/_work/<run id>/plan.json      its totals; written last, so that a plan without it isn't whole

A run whose plan is whole goes on from its spool: nothing re-reads the input. The published run's recipe stands in its
manifest.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs import InputFile
from pipelines.storage import Folder
from schemas import tables
from schemas.limits import ModelLimits
from schemas.plans import Chunk, Plan, Totals
from schemas.requests import Tally
from schemas.settings import InputSettings

# What decides which rows there are and how they are judged, and by which flag a person says it.
_SETTINGS = {
    "endpoint": "--endpoint",
    "fill": "--set",
    "strict": "--strict",
    "limit": "--limit",
    "sample": "--sample",
    "dedup": "--no-dedup",
}
_PLAN, _CHUNKS, _RECIPE = "plan.json", "plan.parquet", "recipe.json"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run whose rows are planned, and that wasn't published, or whose failed rows can be tried again."""

    run_id: str
    work: Folder
    recipe: Mapping[str, Any]


def recipe(
    files: list[InputFile], settings: InputSettings, limits: ModelLimits, identities: Mapping[str, str]
) -> dict[str, Any]:
    """All that decides a run's rows, as JSON holds it."""
    judged_by = asdict(limits)
    # The model's own, and part of its identity.
    judged_by.pop("chat_template")
    judged_by["allowed"] = sorted(limits.allowed)
    made = {
        "version": tables.VERSION,
        "inputs": {file.name: f"{file.size_bytes} {file.version}" for file in files},
        "model": dict(identities),
        "settings": {name: getattr(settings, name) for name in _SETTINGS},
        "limits": judged_by,
    }
    told: dict[str, Any] = json.loads(json.dumps(made))
    return told


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In words, how a new recipe differs from an old one; none where it doesn't."""
    words = ["another version made it"] if old.get("version") != new["version"] else []
    for name in sorted(old["inputs"].keys() | new["inputs"].keys()):
        if name not in new["inputs"]:
            words.append(f"{name} is gone")
        elif name not in old["inputs"]:
            words.append(f"{name} is new")
        elif old["inputs"][name] != new["inputs"][name]:
            words.append(f"{name} has changed")
    if not words and list(old["inputs"]) != list(new["inputs"]):
        words.append("the inputs are in another order")
    if old["model"].get("") != new["model"].get(""):
        words.append("the model, or an engine setting that reaches its answers, is another")
    elif old["model"] != new["model"]:
        words.append("the adapters are others")
    words += [
        f"{flag} is another" for name, flag in _SETTINGS.items() if old["settings"][name] != new["settings"][name]
    ]
    changed = [name for name in new["limits"] if old["limits"].get(name) != new["limits"][name]]
    if changed and not any("model" in word or "adapters" in word for word in words):
        words.append(f"{' and '.join(changed)} of requests {'is' if len(changed) == 1 else 'are'} judged otherwise")
    return words


def begin(work: Folder, made: Mapping[str, Any]) -> None:
    """Write down what a new run is of."""
    work.write(json.dumps(made, indent=2, ensure_ascii=False).encode(), _RECIPE)


def find_unfinished(output: Folder) -> Unfinished | None:
    """The newest run in a folder whose work stands there and whose plan is whole."""
    for run_id in reversed(output.join("_work").names()):
        work = output.join("_work", run_id)
        if {_PLAN, _CHUNKS, _RECIPE} <= set(work.names()):
            return Unfinished(run_id, work, json.loads(work.read(_RECIPE)))
    return None


def save_plan(work: Folder, plan: Plan) -> None:
    rows = [asdict(chunk) for chunk in plan.chunks]
    with work.create(_CHUNKS) as stream:
        pq.write_table(pa.Table.from_pylist(rows, schema=_CHUNK_SCHEMA), stream, compression="zstd")
    told = {"totals": asdict(plan.totals), "settled": asdict(plan.settled), "parts": plan.settled_parts}
    work.write(json.dumps(told, indent=2).encode(), _PLAN)


def load_plan(work: Folder) -> Plan:
    told = json.loads(work.read(_PLAN))
    with work.open(_CHUNKS) as stream:
        chunks = tuple(Chunk(**row) for row in pq.read_table(stream).to_pylist())
    return Plan(chunks, Totals(**told["totals"]), Tally(**told["settled"]), tuple(told["parts"]))


def remove_others(output: Folder, kept: Folder) -> None:
    """Remove the work of all runs but one, and what they had begun to publish."""
    for run_id in output.join("_work").names():
        folder = output.join("_work", run_id)
        if folder.uri != kept.uri and folder.is_folder():
            published = output.join("runs", run_id)
            if "_SUCCESS" not in published.names():
                published.remove()
            folder.remove()


_CHUNK_SCHEMA = pa.schema(
    [
        ("part", pa.string()),
        ("row_group", pa.int64()),
        ("start", pa.int64()),
        ("num_rows", pa.int64()),
        ("num_requests", pa.int64()),
        ("priority", pa.int64()),
        ("path", pa.binary()),
        ("work", pa.float64()),
        ("longest", pa.int64()),
    ]
)
