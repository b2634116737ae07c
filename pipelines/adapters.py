"""LoRA adapters: what `--adapter NAME=FOLDER` names, checked against its model before an engine is taken."""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.model import Kind, Model, bring, read_json
from schemas.failures import UsageError

# The ranks that vLLM has room for; an adapter takes the next larger one.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# What an adapter's configuration may ask for and vLLM can't do.
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
_FOLDER = Kind(
    "an adapter",
    {
        "adapter_config.json": ("adapter_config.json",),
        "weights (adapter_model.safetensors or .bin)": ("adapter_model.safetensors", "adapter_model.bin"),
    },
)
_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Larger than any header; a file whose first bytes say more is no safetensors file.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that can be loaded: where it is, its largest rank, and what another machine resolves to the same."""

    path: str
    rank: int
    spec: str


def resolve_adapters(specs: Mapping[str, str], model: Model) -> dict[str, Adapter]:
    """Adapters of a model by name, of their folders (as `--model` takes them) by name; brought to this machine.

    Raises UsageError where one is no LoRA that vLLM can load, or another model's, as far as the folders tell.
    """
    return {name: _resolve(name, spec, model) for name, spec in specs.items()}


def lora_arguments(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Engine arguments for adapters, all of which have a place in a step at once, and one to spare."""
    if not adapters:
        return {}
    largest = max(adapter.rank for adapter in adapters.values())
    return {
        "enable_lora": True,
        # On CPUs, rows without an adapter are computed with the last place's beside rows with one: it stays empty.
        "max_loras": len(adapters) + 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= largest),
    }


def _resolve(name: str, spec: str, model: Model) -> Adapter:
    said = f"--adapter {name}={spec}"
    found = bring(_FOLDER, said, spec)
    folder = Path(found.path)
    rank = _rank(said, read_json(folder / "adapter_config.json"))
    if (weights := folder / "adapter_model.safetensors").is_file():
        _check_shapes(said, _shapes(weights), rank, Path(model.path))
    return Adapter(found.path, rank, found.spec)


def _rank(said: str, config: dict[str, Any]) -> int:
    """The largest rank of a configuration as PEFT writes it. Raises UsageError."""
    if config.get("peft_type", "LORA") != "LORA":
        raise UsageError(f"{said}: its peft_type is {config['peft_type']}, expected LORA")
    unsupported = [field for field in _UNSUPPORTED if config.get(field)]
    if config.get("bias", "none") != "none":
        unsupported.append("bias")
    if unsupported:
        raise UsageError(f"{said}: vLLM has no {' and no '.join(unsupported)} of adapters. Train it without")
    pattern = config.get("rank_pattern") or {}
    ranks: list[Any] = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    for rank in ranks:
        if type(rank) is not int or not 1 <= rank <= RANKS[-1]:
            raise UsageError(f"{said}: found rank {rank!r} in adapter_config.json, expected 1 to {RANKS[-1]}")
    largest: int = max(ranks)
    return largest


def _check_shapes(said: str, shapes: Mapping[str, list[int]], rank: int, folder: Path) -> None:
    """Raises UsageError where a matrix is wider than the rank, or not for the model in `folder`.

    A weight of the model that has another name or is quantised isn't judged: the engine does that.
    """
    config = read_json(folder / "config.json")
    num_layers = (config.get("text_config") or config).get("num_hidden_layers")
    weights: dict[str, list[int]] = {}
    if "quantization_config" not in config:
        weights = {name: shape for file in folder.glob("*.safetensors") for name, shape in _shapes(file).items()}
    for name, shape in shapes.items():
        module, _, matrix = name.removeprefix(_PREFIX).partition(".lora_")
        layer = _LAYER.search(module)
        if layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            raise UsageError(f"{said}: another model's adapter: it has {module}, the model {num_layers} layers")
        # A matrix A is (rank, inputs), B is (outputs, rank), their weight (outputs, inputs).
        if matrix not in ("A.weight", "B.weight") or len(shape) != 2:
            continue
        outer, inner = (1, 0) if matrix == "A.weight" else (0, 1)
        if shape[inner] > rank:
            raise UsageError(f"{said}: adapter_config.json says rank {rank}, the weights of {module} have {shape}")
        weight = weights.get(f"{module}.weight", [])
        if len(weight) == 2 and shape[outer] != weight[outer]:
            raise UsageError(
                f"{said}: another model's adapter: matrix {matrix[0]} of {module} is {shape[0]} x {shape[1]}, "
                f"the model's weight there {weight[0]} x {weight[1]}"
            )


def _shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of a safetensors file's tensors, by name. Raises UsageError where it isn't one."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: can't be read as safetensors ({type(error).__name__}). Is it whole?") from error
