"""Settings: frozen, with bounds, checked when made. The same names in flags, in the YAML file, in the environment."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.failures import UsageError


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Settings):
    """What may be said of an engine. None: the value that suits the machine (`pipelines/machine.py`)."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Number type of the weights; auto: the model's own, where the machine computes it fast."
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt and answer together, in tokens.")
    max_num_seqs: int | None = Field(None, ge=1, description="Most sequences that a step computes together.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Most tokens that a step computes.")
    max_logprobs: int = Field(20, ge=-1, description="Most log-probabilities that a request may ask for.")
    block_size: int | None = Field(None, ge=1, description="Tokens in a block of the KV cache.")
    kv_cache_gib: float | None = Field(None, gt=0, description="Memory for the KV cache on a CPU, in GiB.")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="Share of a GPU's memory to use.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs (or groups of cores) that share one engine.")
    cores: int | None = Field(None, ge=1, description="CPU cores of a replica; all that are there, by default.")
    enforce_eager: bool | None = Field(None, description="Run without compiling; the default on a CPU.")
    seed: int = Field(0, description="Seed of requests that have none.")


class RunSettings(Settings):
    """One run of the batch door."""

    inputs: Annotated[tuple[str, ...], Field(min_length=1)]
    output: str
    model: str | None = None
    served_names: tuple[str, ...] = ()
    replicas: Annotated[int, Field(ge=1)] | None = None
    engine: EngineSettings = EngineSettings()
    keep_work: bool = False
    verbose: bool = False


def parse_engine_settings(pairs: list[str]) -> EngineSettings:
    """Engine settings from `FIELD=VALUE` pairs, as `--engine` takes them.

    Raises UsageError that names the field, what was found, and what is allowed.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--engine {pair}: expected FIELD=VALUE, such as --engine max_num_seqs=64")
        values[name.strip()] = value.strip()
    try:
        return EngineSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = ", ".join(EngineSettings.model_fields)
            raise UsageError(f"--engine {name}: no such setting. There are: {known}") from None
        raise UsageError(f"--engine {name}={values[name]}: {first['msg'].lower()}") from None
