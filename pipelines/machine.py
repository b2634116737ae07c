"""The machine that a replica runs on, and the engine settings that keep it busy.

vLLM's defaults are made for a GPU server that somebody waits for; on a small CPU machine they leave half of the speed
behind. Each setting chosen here is told with its reason and yields to one that was given.
"""

import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from schemas.failures import EngineUnusable
from schemas.limits import ModelLimits
from schemas.settings import EngineSettings

_GIB = 1 << 30
# Logits, log-probabilities and a copy, in float32.
_PROMPT_LOGITS_BYTES, _BYTES_PER_LOGIT = _GIB, 12
# Where people wait for their tokens, one prompt has one in so many of a step's at most.
_LONG_PROMPT = 8
_CPU_INFO = Path("/proc/cpuinfo")
_NUMA_NODES = Path("/sys/devices/system/node")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")
_TCMALLOC_FOLDERS = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)


def has_fast_bf16() -> bool:
    """Whether this CPU has matrix kernels for bf16: oneDNN has none below AVX-512, and what stands in is many times
    slower than float32."""
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", _CPU_INFO.read_text(), re.MULTILINE)).split())
    return bool(flags & {"avx512f", "amx_bf16", "bf16"})


def has_gpu_engine() -> bool:
    """Whether the vLLM that is installed is the build for GPUs, which doesn't start without one."""
    try:
        return not importlib.metadata.version("vllm").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def count_cores() -> int:
    """The cores that this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def numa_nodes() -> list[set[int]]:
    """The cores of each NUMA node; empty where the system doesn't say."""
    nodes = []
    for path in sorted(_NUMA_NODES.glob("node[0-9]*/cpulist")):
        ranges = [part.partition("-") for part in path.read_text().split(",") if part.strip()]
        nodes.append({core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)})
    return nodes


def free_memory_bytes(num_replicas: int = 1) -> int:
    """Memory that each of so many replicas can still have: its share of the machine's, within the container's limit,
    and of a NUMA node's, since vLLM doesn't start where the node of its cores has too little for the cache."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit, usage = (int(path.read_text()) for path in (_CGROUP_MEMORY, _CGROUP_USAGE))
        free = min(free, max(0, limit - usage))
    nodes = [path.parent for path in _NUMA_NODES.glob("node[0-9]*/cpulist") if path.read_text().strip()]
    replicas_a_node = -(-num_replicas // max(1, len(nodes)))
    return min([int(free) // num_replicas, *(_free_on_node(node) // replicas_a_node for node in nodes)])


def _free_on_node(folder: Path) -> int:
    """In bytes, as vLLM counts it: what nothing uses, and what holds files that can be read again."""
    found = re.findall(
        r"(?:MemFree|Active\(file\)|Inactive\(file\)|SReclaimable): +(\d+) kB", (folder / "meminfo").read_text()
    )
    return sum(int(kib) * 1024 for kib in found)


class CoreClaim:
    """Cores that this replica alone binds its threads to, of those of the machine; a lock file each.

    The kernel lets go of the locks when the process ends, however it ends.
    """

    def __init__(self, num_cores: int, tensor_parallel_size: int = 1) -> None:
        """Claim `num_cores` free cores, for so many parts of a model. Raises EngineUnusable where so many are not free,
        or too few for the parts."""
        folder = Path(tempfile.gettempdir()) / f"overnight-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self.cores: list[int] = []
        self._locks: list[FileLock] = []
        if num_cores > count_cores():
            raise EngineUnusable(
                f"this replica was to have {num_cores} CPU cores, and may use {count_cores()} of this machine's. "
                "Give fewer with --engine cores=N"
            )
        if num_cores < tensor_parallel_size:
            raise EngineUnusable(
                f"this replica has {num_cores} of the CPU cores, and needs one for each of {tensor_parallel_size} "
                "parts of the model. Give a smaller --engine tensor_parallel_size"
            )
        available = sorted(os.sched_getaffinity(0))
        # Of one NUMA node where that has enough: another one's memory is slow to reach.
        nodes = [[core for core in available if core in node] for node in numa_nodes()]
        for cores in (*(node for node in nodes if num_cores <= len(node) < len(available)), available):
            self._claim(cores, num_cores, folder)
            if len(self.cores) == num_cores:
                return
            self.release()
        raise EngineUnusable(
            f"this replica needs {num_cores} CPU cores of its own and other replicas on this machine hold them. "
            "Wait for the other run, or give fewer --replicas or --engine cores=N"
        )

    def _claim(self, cores: list[int], num_cores: int, folder: Path) -> None:
        """Hold up to `num_cores` of `cores`, those that nobody else holds."""
        for core in cores:
            if len(self.cores) == num_cores:
                return
            lock = FileLock(folder / f"{core}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            self.cores.append(core)
            self._locks.append(lock)

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        self.cores.clear()


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting of an engine, an argument or an environment variable, and why it has its value."""

    name: str
    value: Any
    reason: str


def cpu_arguments(settings: EngineSettings, num_replicas: int, limits: ModelLimits) -> list[Choice]:
    """Engine arguments for a replica on CPU cores. `num_replicas`: those that share the machine's memory."""
    # A quarter of what is free leaves room for weights, activations, logits and Ray's object store.
    kv_gib = settings.kv_cache_gib or max(0.25, min(16.0, free_memory_bytes(num_replicas) / _GIB / 4))
    dtype = Choice("dtype", settings.dtype, "as given, or the model's own")
    if settings.dtype == "auto" and not has_fast_bf16():
        dtype = Choice("dtype", "float32", "this CPU has no fast kernels for bf16")
    step_tokens = _choose(settings, "max_num_batched_tokens", 4096, "prompts are computed many at a time")
    return [
        dtype,
        Choice(
            "kv_cache_memory_bytes",
            int(kv_gib * _GIB),
            "a share of the free memory; also spares the warm-up run",
        ),
        _choose(settings, "block_size", 32, "the smallest on CPU; attention there is fastest with it"),
        _choose(settings, "max_num_seqs", 256, "wide steps use the cores best"),
        step_tokens,
        _choose_prompt_chunk(settings, limits, step_tokens.value),
        _choose(settings, "enforce_eager", True, "compiling takes a minute and gains little on a CPU"),
    ]


def gpu_arguments(settings: EngineSettings, limits: ModelLimits) -> list[Choice]:
    """Engine arguments for a replica on GPUs: vLLM's own choices for throughput."""
    step_tokens = _choose(settings, "max_num_batched_tokens", 16384, "prompts are computed many at a time")
    return [
        Choice("dtype", settings.dtype, "as given, or the model's own"),
        _choose(settings, "gpu_memory_utilization", 0.92, "vLLM's default; a replica has its GPUs for itself"),
        _choose(settings, "max_num_seqs", 1024, "nobody waits for a single row"),
        step_tokens,
        _choose_prompt_chunk(settings, limits, step_tokens.value),
        _choose(settings, "enforce_eager", False, "compiled graphs pay on a GPU"),
    ]


def _choose(settings: EngineSettings, name: str, value: Any, reason: str) -> Choice:
    given = getattr(settings, name)
    return Choice(name, value, reason) if given is None else Choice(name, given, "as given")


def _choose_prompt_chunk(settings: EngineSettings, limits: ModelLimits, num_step_tokens: int) -> Choice:
    """Most tokens of one prompt in a step. A request for its log-probabilities holds logits of each, sorted and not."""
    most = min(limits.context_length, max(32, _PROMPT_LOGITS_BYTES // (_BYTES_PER_LOGIT * limits.vocab_size)))
    reason = (
        f"a prompt's log-probabilities over {limits.vocab_size:,} tokens then take {_PROMPT_LOGITS_BYTES / _GIB:g} GiB"
    )
    if (settings.first_token_ms or settings.inter_token_ms) and (shared := num_step_tokens // _LONG_PROMPT) < most:
        most, reason = shared, "a long prompt leaves room in a step for people's tokens"
    return _choose(settings, "long_prefill_token_threshold", most, reason)


def cpu_environment(cores: list[int], tensor_parallel_size: int) -> list[Choice]:
    """Environment of the engine's processes: threads bound to `cores`, and fast libraries loaded before all others."""
    ranks = [cores[rank::tensor_parallel_size] for rank in range(tensor_parallel_size)]
    bound = "|".join(",".join(map(str, rank)) for rank in ranks)
    variables = [Choice("VLLM_CPU_OMP_THREADS_BIND", bound, "its threads stay on the cores that the replica holds")]
    preloaded = [*os.environ.get("LD_PRELOAD", "").split(":"), *find_libraries()]
    if wanted := ":".join(dict.fromkeys(path for path in preloaded if path)):
        variables.append(Choice("LD_PRELOAD", wanted, "a faster allocator and OpenMP than the system's"))
    return variables


def find_libraries() -> list[str]:
    """tcmalloc, from the system or from vLLM, and Intel's OpenMP, from this environment: those that are there."""
    vllm = importlib.util.find_spec("vllm")
    tcmalloc = [
        *(Path(place) / "libs" for place in (vllm and vllm.submodule_search_locations) or ()),
        *map(Path, _TCMALLOC_FOLDERS),
    ]
    found = [
        next((path for folder in tcmalloc for path in sorted(folder.glob("libtcmalloc_minimal*.so.*"))), None),
        next(iter(Path(sys.prefix, "lib").glob("libiomp5.so")), None),
    ]
    return [str(path) for path in found if path]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started inside the block; afterwards all is as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
