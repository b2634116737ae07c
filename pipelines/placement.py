"""Placement: how many replicas a cluster has room for, and what each takes of it."""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipelines import cluster, logs, machine, traces
from pipelines.adapters import Adapter
from pipelines.model import Model
from pipelines.order import PARTS_OF_A_SHARE
from pipelines.vllm_engine import EngineStart
from schemas.failures import UsageError
from schemas.plans import Chunk
from schemas.settings import Autoscaling, RunSettings, ServeSettings

log = logging.getLogger("overnight.placement")

# More rows than the engine computes at a time stand ready in it, so that no step runs with empty places.
_ROWS_AHEAD = 1.5
# Memory of a GPU in GiB, by Ray's name of its kind; of a kind that comes in several sizes, the smallest.
_GPU_GIB: Mapping[str, int] = {
    **{
        "P4": 8,
        "K80": 12,
        "P100": 12,
        "T4": 16,
        "V100": 16,
        "A10G": 24,
        "L4": 24,
        "A100": 40,
        "A100-40G": 40,
        "L40S": 48,
    },
    **{"A100-80G": 80, "H100": 80, "H20": 96, "H200": 141, "B200": 180, "B300": 270, "RTX-PRO-6000": 96},
}
_KIND = "accelerator_type:"
# Of a GPU's memory, what weights may take: the rest is for the cache, which is what a batch lives of.
_WEIGHTS_SHARE = 0.6
# Each one is a thread of the replica.
_MOST_CHUNKS_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicas on a cluster: how many, and what each one takes of it."""

    num_replicas: int
    # Whether the number was given, rather than chosen.
    is_fixed: bool
    replicas_per_node: int
    num_cpus: int
    num_gpus: int
    # Parts of the model, each on a GPU or a group of cores.
    num_parts: int
    # Rows that one replica has at a time: what its engine computes together, and some to spare.
    rows_in_flight: int
    environment: dict[str, str]
    chunks_in_flight: int = 1
    # CPU cores that a replica computes on, of those that it takes; None where it computes on all of them.
    cores_used: int | None = None
    # As many as there may be when nodes join later; None where there are no more than at first.
    max_replicas: int | None = None

    @property
    def cores(self) -> int | None:
        """CPU cores that a replica computes on; None where it has GPUs."""
        return None if self.num_gpus else self.cores_used or self.num_cpus

    def for_chunks(self, chunks: Sequence[Chunk]) -> "Placement":
        """The same for these chunks in their order: no replica without a chunk, and none that takes more than an even
        share at first, since another that comes up later can't have what it has taken."""
        num_chunks = len(chunks)
        requests_each, works = [chunk.num_requests for chunk in chunks], [chunk.work for chunk in chunks]
        num_replicas = self.num_replicas if self.is_fixed else min(self.num_replicas, num_chunks)
        share = bisect_right(list(accumulate(works)), sum(works) / num_replicas)
        # One request may be more than that by itself; others go on beside it.
        share = min(max(share, PARTS_OF_A_SHARE), -(-num_chunks // num_replicas))
        # So many that the engine is full although one of them comes to its end; the first chunks tell, for later ones
        # are smaller.
        first = requests_each[: max(1, num_replicas * self.rows_in_flight // max(requests_each))]
        needed = -(-self.rows_in_flight * len(first) // sum(first)) + 1
        return replace(
            self,
            num_replicas=num_replicas,
            chunks_in_flight=min(share, needed, _MOST_CHUNKS_IN_FLIGHT),
            max_replicas=None if self.is_fixed else num_chunks,
        )


def place(settings: RunSettings | ServeSettings, model: Model) -> Placement:
    """Replicas for this cluster: as many GPUs each as the model needs, else the CPU cores of a node in equal shares.

    Where the engine that is installed needs GPUs and none is there, replicas wait for the cluster to grow. Raises
    UsageError when the cluster hasn't what was asked for, and can't get it.
    """
    import ray

    # One that scales by itself begins with the fewest, and waits for room for more.
    wanted = settings.replicas.min_replicas if isinstance(settings.replicas, Autoscaling) else settings.replicas
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus_each = settings.engine.tensor_parallel_size or _choose_parts(nodes, model)
    num_gpus = int(sum(node.get("GPU", 0) for node in nodes))
    num_cpus = [int(node.get("CPU", 0)) for node in nodes]
    # A cluster that grows from nothing: Ray doesn't tell what its autoscaler could bring.
    has_gpus = num_gpus > 0 or machine.has_gpu_engine()
    cores_used = None
    if has_gpus and not num_gpus and cluster.is_own():
        raise UsageError(
            "the vLLM that is installed is the build for GPUs, and Ray finds no GPU on this machine. Install the build "
            "for CPUs, or name a cluster that has GPUs, or can get some, in RAY_ADDRESS"
        )
    if has_gpus and not num_gpus:
        cpus, unit = 1, count(gpus_each, "GPU")
        num_replicas = fitting = wanted or 1
        log.warning("no GPU is there yet: the cluster is asked for %s; `ray status` tells what becomes of it", unit)
    elif has_gpus:
        cpus, unit = 1, count(gpus_each, "GPU")
        fitting = sum(min(int(node.get("GPU", 0)) // gpus_each, int(node.get("CPU", 0)) // cpus) for node in nodes)
        num_replicas = wanted or max(1, fitting)
    else:
        num_replicas = wanted or max(1, len([cpus for cpus in num_cpus if cpus]))
        per_node = -(-num_replicas // max(1, len(nodes)))
        whole_share = max(1, min(filter(None, num_cpus), default=1) // per_node)
        cpus = settings.engine.cores or whole_share
        if not wanted and cpus < whole_share:
            # One a machine, also when there is room for more: nodes that join later are what the number grows by.
            cores_used, cpus = cpus, whole_share
        if (cores := cores_used or cpus) < gpus_each:
            raise UsageError(
                f"--engine tensor_parallel_size={gpus_each}: a replica has {count(cores, 'CPU core')} here, and needs "
                "one for each part of the model. Give a smaller number, or more with --engine cores=N"
            )
        unit = count(cpus, "CPU core")
        fitting = sum(node_cpus // cpus for node_cpus in num_cpus)
    if fitting < num_replicas:
        raise UsageError(
            f"{count(num_replicas, 'replica')} with {unit} each don't fit: the cluster has {sum(num_cpus)} CPU cores "
            f"and {num_gpus} GPUs, room for {fitting}. Give fewer --replicas or --engine cores=N"
        )
    return Placement(
        num_replicas=num_replicas,
        is_fixed=settings.replicas is not None,
        replicas_per_node=-(-num_replicas // max(1, len(nodes))),
        num_cpus=cpus,
        num_gpus=gpus_each if has_gpus else 0,
        num_parts=gpus_each,
        rows_in_flight=int((settings.engine.max_num_seqs or (1024 if has_gpus else 256)) * _ROWS_AHEAD),
        environment={
            "VLLM_LOGGING_LEVEL": "INFO" if settings.verbose else "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **traces.environment(),
            **logs.environment(settings.verbose),
        },
        cores_used=cores_used,
    )


def tell_what_is_taken(placement: Placement) -> None:
    """Warn where the cluster has room for these replicas that others have now: Ray waits, and says nothing."""
    import ray

    free, whole = ray.available_resources(), ray.cluster_resources()
    for name, noun, each in (("CPU", "CPU core", placement.num_cpus), ("GPU", "GPU", placement.num_gpus)):
        needed = each * placement.num_replicas
        # What the cluster doesn't have yet it may grow by.
        if free.get(name, 0) < needed <= whole.get(name, 0):
            log.warning(
                "%d of the cluster's %s are free, and %s with %s each wait for others to end; `ray status` tells what "
                "is taken. A run can also go through an endpoint that holds them: --through serve:APP",
                free.get(name, 0),
                count(int(whole[name]), noun),
                count(placement.num_replicas, "replica"),
                count(each, noun),
            )


def start_of(
    settings: RunSettings | ServeSettings, model: Model, adapters: Mapping[str, Adapter], placed: Placement
) -> EngineStart:
    """How a replica's engine starts, wherever it lands: paths are those that another machine resolves, too."""
    return EngineStart(
        model.spec,
        settings.served_names,
        settings.engine.model_copy(update={"tensor_parallel_size": placed.num_parts}),
        placed.replicas_per_node,
        placed.cores,
        {name: adapter.spec for name, adapter in adapters.items()},
    )


def _choose_parts(nodes: Sequence[Mapping[str, float]], model: Model) -> int:
    """Into how many parts a model is cut, a GPU each: the fewest that leave room for its cache, by the smallest GPU of
    the cluster; 1 without GPUs, and on GPUs of a kind that isn't known."""
    kinds = {name.removeprefix(_KIND) for node in nodes for name in node if name.startswith(_KIND) and node.get("GPU")}
    if not kinds or not kinds <= _GPU_GIB.keys():
        return 1
    room = min(_GPU_GIB[kind] for kind in kinds) * 2**30 * _WEIGHTS_SHARE
    weights, num_heads = model.weights_bytes, model.num_heads
    most = max(int(node.get("GPU", 0)) for node in nodes)
    parts = 1
    while weights > parts * room and parts * 2 <= most and num_heads % (parts * 2) == 0:
        parts *= 2
    if parts > 1:
        log.info(
            "tensor_parallel_size=%d: the weights take %.0f GiB, and leave room for a cache", parts, weights / 2**30
        )
    return parts


def count(number: int, noun: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
