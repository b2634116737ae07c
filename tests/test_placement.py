"""Where replicas land on a cluster with GPUs. Ray is only told of these: it hands out numbers, which is what counts."""

import importlib.metadata
import json
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from pipelines import batch, machine, placement
from pipelines.adapters import Adapter
from pipelines.model import Model
from schemas.failures import UsageError
from schemas.plans import Chunk
from schemas.settings import EngineSettings, RunSettings, ServeSettings
from tests.conftest import Silence, write_lines
from tests.deterministic import DeterministicEngine, Starts

NUM_GPUS = 4
NUM_ROWS = 32
# By name: what a run is told, and how many engines are to start for it.
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "one GPU each": ({}, 4),
    "two GPUs each": ({"engine": EngineSettings(tensor_parallel_size=2)}, 2),
    "three replicas": ({"replicas": 3}, 3),
}


@dataclass(frozen=True)
class TellingStarts(Starts):
    """Leaves the GPUs that its process sees in the file of its name where engines meet."""

    def __call__(self) -> DeterministicEngine:
        engine = super().__call__()
        assert self.meeting is not None
        (Path(self.meeting[0]) / str(os.getpid())).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        return engine


def run_all(folder: Path) -> None:
    """Every one of RUNS, on a Ray of this process's own."""
    ray.init(address="local", num_cpus=NUM_GPUS, num_gpus=NUM_GPUS, include_dashboard=False, log_to_driver=False)
    # Some chunks for each engine: none is started without work.
    path = write_lines(folder / "a.jsonl", *({"prompt": f"row {n}"} for n in range(2 * NUM_GPUS * NUM_ROWS)))
    for name, (settings, num_engines) in RUNS.items():
        meeting, output = folder / name / "meeting", folder / name / "out"
        meeting.mkdir(parents=True)
        made = RunSettings(inputs=(str(path),), output=str(output), served_names=("test",), **settings)
        batch.run(made, Silence(), TellingStarts(meeting=(str(meeting), num_engines)))


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[list[str]]]:
    """By run: the GPUs that each of its engines saw."""
    folder = tmp_path_factory.mktemp("placement")
    process = multiprocessing.get_context("spawn").Process(target=run_all, args=(folder,))
    process.start()
    process.join(timeout=300)
    is_stuck = process.is_alive()
    process.terminate()
    process.join()
    assert not is_stuck, "a run waits for replicas that don't come"
    assert process.exitcode == 0
    for name in RUNS:
        manifest = json.loads((folder / name / "out" / "manifest.json").read_text())
        assert manifest["rows"]["responses"] == 2 * NUM_GPUS * NUM_ROWS
    return {name: [file.read_text().split(",") for file in (folder / name / "meeting").iterdir()] for name in RUNS}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_each_replica_sees_gpus_of_its_own(devices, name):
    settings, num_engines = RUNS[name]
    each = settings.get("engine", EngineSettings()).tensor_parallel_size or 1
    assert [len(seen) for seen in devices[name]] == [each] * num_engines
    seen = [device for some in devices[name] for device in some]
    assert len(set(seen)) == len(seen) and set(seen) <= {"0", "1", "2", "3"}


@dataclass(frozen=True)
class Weights:
    """A model of so many GiB."""

    gib: float = 0
    num_heads: int = 32

    @property
    def weights_bytes(self):
        return int(self.gib * 2**30)


def place(monkeypatch, *nodes, replicas=None, kind=None, model=None, **engine):
    """The placement on nodes of so many cores and GPUs of a kind."""
    alive = [{"Alive": True, "Resources": {"CPU": float(cpus), "GPU": float(gpus)}} for cpus, gpus in nodes]
    for node in alive if kind else ():
        node["Resources"][f"accelerator_type:{kind}"] = 1.0
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    settings = RunSettings(inputs=("a",), output="b", replicas=replicas, engine=EngineSettings(**engine))
    return placement.place(settings, model or Weights())


@pytest.mark.parametrize(
    ("nodes", "kind", "model", "given", "num_replicas", "each"),
    [
        ([(8, 8)], "H100", Weights(16), {}, 8, 1),
        ([(8, 8)], "H100", Weights(140), {}, 2, 4),
        ([(8, 4), (8, 8)], "A100", Weights(140), {}, 1, 8),
        ([(8, 8)], "L4", Weights(16), {}, 4, 2),
        # Heads that can't be shared out, GPUs that aren't there, a kind that isn't known.
        ([(8, 8)], "L4", Weights(16, num_heads=9), {}, 8, 1),
        ([(8, 2)], "L4", Weights(140), {}, 1, 2),
        ([(8, 8)], "X9000", Weights(140), {}, 8, 1),
        ([(8, 8)], None, Weights(140), {}, 8, 1),
        ([(8, 0)], None, Weights(140), {}, 1, 0),
        ([(8, 8)], "H100", Weights(140), {"tensor_parallel_size": 2}, 4, 2),
    ],
)
def test_a_model_is_cut_into_as_few_parts_as_leave_room_for_its_cache(
    monkeypatch, nodes, kind, model, given, num_replicas, each
):
    placed = place(monkeypatch, *nodes, kind=kind, model=model, **given)
    assert (placed.num_replicas, placed.num_gpus, placed.num_parts) == (num_replicas, each, max(1, each))


def test_an_engine_starts_with_as_many_parts_and_paths_that_another_machine_knows(monkeypatch):
    placed = place(monkeypatch, (8, 8), kind="H100", model=Weights(140))
    model = Model("/cache/mirror-1", "large", "s3://models/large")
    adapters = {"formal": Adapter("/cache/mirror-2", 8, "s3://adapters/formal")}
    for settings in (RunSettings(inputs=("a",), output="b"), ServeSettings()):
        start = placement.start_of(settings, model, adapters, placed)
        assert start.settings.tensor_parallel_size == placed.num_parts == 4
        assert (start.model, start.adapters) == (model.spec, {"formal": "s3://adapters/formal"})


@pytest.mark.parametrize(
    ("nodes", "engine", "num_replicas", "num_gpus", "cores"),
    [
        ([(8, 4)], {}, 4, 1, None),
        ([(8, 4), (8, 2)], {"tensor_parallel_size": 2}, 3, 2, None),
        ([(8, 3), (8, 3)], {"tensor_parallel_size": 2}, 2, 2, None),
        ([(3, 4)], {}, 3, 1, None),
        ([(8, 0), (2, 1)], {}, 1, 1, None),
        ([(8, 0)], {}, 1, 0, 8),
        ([(8, 0), (4, 0)], {"tensor_parallel_size": 2}, 2, 0, 4),
    ],
)
def test_replicas_are_as_many_as_fit(monkeypatch, nodes, engine, num_replicas, num_gpus, cores):
    placement = place(monkeypatch, *nodes, **engine)
    assert (placement.num_replicas, placement.num_gpus, placement.cores) == (num_replicas, num_gpus, cores)


@pytest.mark.parametrize(
    ("nodes", "given", "words"),
    [
        ([(8, 4)], {"tensor_parallel_size": 8}, "1 replica with 8 GPUs each don't fit: .* room for 0"),
        ([(8, 4)], {"replicas": 5}, "5 replicas with 1 GPU each don't fit: .* room for 4"),
        ([(3, 4)], {"replicas": 4}, "4 replicas with 1 GPU each don't fit: .* 3 CPU cores and 4 GPUs, room for 3"),
        ([(8, 0)], {"tensor_parallel_size": 16}, "tensor_parallel_size=16: a replica has 8 CPU cores here"),
        ([(8, 0)], {"tensor_parallel_size": 2, "cores": 1}, "tensor_parallel_size=2: a replica has 1 CPU core here"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, nodes, given, words):
    with pytest.raises(UsageError, match=words):
        place(monkeypatch, *nodes, **given)


def test_one_replica_a_machine_also_where_it_computes_on_a_few_of_the_cores(monkeypatch):
    placed = place(monkeypatch, (8, 0), cores=2)
    assert (placed.num_replicas, placed.num_cpus, placed.cores) == (1, 8, 2)
    placed = place(monkeypatch, (8, 0), cores=2, replicas=3)
    assert (placed.num_replicas, placed.num_cpus, placed.cores) == (3, 2, 2)


@pytest.mark.parametrize(
    ("replicas", "parts", "num_replicas", "each"), [(None, None, 1, 1), (3, None, 3, 1), (None, 4, 1, 4)]
)
def test_an_engine_that_needs_gpus_waits_for_a_cluster_that_has_none_yet(
    monkeypatch, replicas, parts, num_replicas, each
):
    monkeypatch.setattr(machine, "has_gpu_engine", lambda: True)
    placed = place(monkeypatch, (4, 0), replicas=replicas, tensor_parallel_size=parts)
    assert (placed.num_replicas, placed.num_gpus, placed.num_cpus, placed.cores) == (num_replicas, each, 1, None)


@pytest.mark.parametrize(("version", "is_for_gpus"), [("0.32.0", True), ("0.32.0+cpu", False), (None, False)])
def test_what_is_installed_tells_whether_an_engine_needs_gpus(monkeypatch, version, is_for_gpus):
    def found(name):
        if name == "vllm" and version:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert machine.has_gpu_engine() == is_for_gpus


def test_there_may_be_as_many_replicas_as_chunks_unless_their_number_was_given(monkeypatch):
    chunks = [Chunk("part", 0, 0, 10, 10, 0, b"", 10.0, 1)] * 5
    assert place(monkeypatch, (8, 2)).for_chunks(chunks).max_replicas == 5
    assert place(monkeypatch, (8, 2), replicas=2).for_chunks(chunks).max_replicas is None


@pytest.mark.parametrize(
    ("free", "told"),
    [
        ({"CPU": 8.0, "GPU": 2.0}, []),
        (
            {"CPU": 8.0, "GPU": 1.0},
            ["1 of the cluster's 2 GPUs are free, and 2 replicas with 1 GPU each wait for others to end"],
        ),
        (
            {"GPU": 2.0},
            ["0 of the cluster's 8 CPU cores are free, and 2 replicas with 1 CPU core each wait for others to end"],
        ),
    ],
)
def test_what_others_have_now_is_told(monkeypatch, free, told):
    said: list[str] = []
    placed = place(monkeypatch, (8, 2))
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setattr(placement.log, "warning", lambda text, *values: said.append((text % values).partition(";")[0]))
    placement.tell_what_is_taken(placed)
    assert said == told
