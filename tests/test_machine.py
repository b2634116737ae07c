"""The machine: replicas don't share cores, and each chosen setting says why."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipelines import machine
from schemas.failures import EngineUnusable
from schemas.limits import ModelLimits
from schemas.settings import EngineSettings

LIMITS = ModelLimits(("m",), 8192, 49152, 20, 128, 32)

pytestmark = pytest.mark.usefixtures("own_core_claims")


def test_two_replicas_never_hold_the_same_core():
    cores = sorted(os.sched_getaffinity(0))
    claim = machine.CoreClaim(1)
    code = "from pipelines.machine import CoreClaim; print(*CoreClaim(1).cores)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=len(cores) > 1)
    assert claim.cores == cores[:1]
    assert other.stdout.split() == [str(core) for core in cores[1:2]]


def test_a_claim_that_cannot_be_met_holds_nothing_and_says_what_to_do():
    cores = machine.count_cores()
    with pytest.raises(EngineUnusable, match=rf"was to have 4096 CPU cores, and may use {cores} "):
        machine.CoreClaim(4096)
    other = machine.CoreClaim(1)
    with pytest.raises(EngineUnusable, match=rf"needs {cores} CPU cores of its own .* fewer --replicas"):
        machine.CoreClaim(cores)
    other.release()
    assert len(machine.CoreClaim(cores).cores) == cores


def test_cores_are_free_again_after_their_process_has_ended():
    code = "import os; from pipelines.machine import *; claim = CoreClaim(count_cores()); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    machine.CoreClaim(machine.count_cores()).release()


def test_cores_come_from_one_numa_node_where_they_fit(tmp_path, monkeypatch):
    for node, cores in enumerate(("0-2,8", "3-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(machine, "_NUMA_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert machine.numa_nodes() == [{0, 1, 2, 8}, {3, 4, 5, 6, 7}, set()]
    first, second, third = (machine.CoreClaim(number) for number in (3, 4, 2))
    assert (first.cores, second.cores) == ([0, 1, 2], [3, 4, 5, 6])
    # No node has two left: of what is left, then.
    assert third.cores == [7, 8]
    for claim in (first, second, third):
        claim.release()
    assert machine.CoreClaim(5).cores == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(("num_replicas", "kv_gib"), [(1, 1.25), (2, 1.25), (4, 0.625)])
def test_a_cache_fits_the_node_that_has_the_least(tmp_path, monkeypatch, num_replicas, kv_gib):
    """A machine whose memory is mostly on a node that vLLM doesn't look at: it refuses to start with more."""
    nodes = {"node0": ("0-3", 3), "node1": ("4-7", 90), "node2": ("", 0)}
    for name, (cores, free_gib) in nodes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cores}\n")
        figures = {"MemTotal": 99, "MemFree": free_gib, "Inactive(anon)": 7, "Active(file)": 1, "Inactive(file)": 1}
        lines = (f"Node {name[-1]} {key}:{gib << 20:>16} kB\n" for key, gib in figures.items())
        (tmp_path / name / "meminfo").write_text("".join(lines))
    monkeypatch.setattr(machine, "_NUMA_NODES", tmp_path)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 30))
    chosen = {choice.name: choice.value for choice in machine.cpu_arguments(EngineSettings(), num_replicas, LIMITS)}
    assert chosen["kv_cache_memory_bytes"] == kv_gib * 2**30


def test_memory_stays_within_the_containers_limit(tmp_path, monkeypatch):
    for name, gib in (("_CGROUP_MEMORY", 8), ("_CGROUP_USAGE", 6)):
        (tmp_path / name).write_text(f"{gib << 30}\n")
        monkeypatch.setattr(machine, name, tmp_path / name)
    monkeypatch.setattr(machine, "_NUMA_NODES", tmp_path)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 30))
    assert machine.free_memory_bytes() == 2 << 30
    (tmp_path / "_CGROUP_MEMORY").write_text("max\n")
    assert machine.free_memory_bytes(4) == 25 << 30


def test_settings_that_were_given_win():
    given = EngineSettings(dtype="bfloat16", block_size=64, max_num_seqs=7, kv_cache_gib=0.5, enforce_eager=False)
    chosen = {choice.name: choice.value for choice in machine.cpu_arguments(given, 1, LIMITS)}
    assert chosen["dtype"] == "bfloat16" and chosen["block_size"] == 64 and chosen["max_num_seqs"] == 7
    assert chosen["kv_cache_memory_bytes"] == 1 << 29 and chosen["enforce_eager"] is False


@pytest.mark.parametrize(
    "choose",
    [
        lambda s: machine.cpu_arguments(s, 1, LIMITS),
        lambda s: machine.gpu_arguments(s, LIMITS),
        lambda _: machine.cpu_environment([0, 1], 1),
    ],
)
def test_every_choice_has_a_reason(choose):
    choices = choose(EngineSettings())
    assert all(choice.reason for choice in choices)
    assert len({choice.name for choice in choices}) == len(choices)


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu avx avx2\n", "float32"),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", "auto"),
        ("Features\t: fp asimd bf16\n", "auto"),
        ("", "float32"),
    ],
)
def test_bf16_is_left_to_cpus_that_compute_it(tmp_path, monkeypatch, cpuinfo, dtype):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(machine, "_CPU_INFO", path)
    assert machine.cpu_arguments(EngineSettings(), 1, LIMITS)[0].value == dtype


def test_replicas_share_the_memory_and_ranks_the_cores():
    one, two = (machine.cpu_arguments(EngineSettings(), replicas, LIMITS)[1].value for replicas in (1, 2))
    assert two <= one
    bind = machine.cpu_environment([0, 1, 2, 3], tensor_parallel_size=2)[0]
    assert (bind.name, bind.value) == ("VLLM_CPU_OMP_THREADS_BIND", "0,2|1,3")
    with pytest.raises(EngineUnusable, match="has 1 of the CPU cores, and needs one for each of 2 parts"):
        machine.CoreClaim(1, tensor_parallel_size=2)


def test_the_environment_is_as_before_after_the_block(monkeypatch):
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.delenv("GONE", raising=False)
    with pytest.raises(RuntimeError, match="x"), machine.environment({"KEPT": "new", "GONE": "new"}):
        assert os.environ["KEPT"] == os.environ["GONE"] == "new"
        raise RuntimeError("x")
    assert os.environ["KEPT"] == "old" and "GONE" not in os.environ


def test_a_prompts_log_probabilities_take_bounded_memory_whatever_the_vocabulary():
    for vocab_size in (1_000, 49_152, 256_000, 10**9):
        chosen = {
            choice.name: choice.value
            for choice in machine.gpu_arguments(EngineSettings(), replace(LIMITS, vocab_size=vocab_size))
        }
        chunk = chosen["long_prefill_token_threshold"]
        assert 32 <= chunk <= LIMITS.context_length and (chunk == 32 or chunk * vocab_size * 12 <= 1 << 30)
