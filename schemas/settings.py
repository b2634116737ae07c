"""Settings: frozen, with bounds, checked when made. The same names in flags, in the YAML file, in the environment."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.failures import UsageError
from schemas.limits import Feature
from schemas.requests import Endpoint


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_S = TypeVar("_S", bound=Settings)


class EngineSettings(Settings):
    """What may be said of an engine. None: the value that suits the machine (`pipelines/machine.py`)."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Number type of the weights; auto: the model's own, where the machine computes it fast."
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt and answer together, in tokens.")
    max_num_seqs: int | None = Field(None, ge=1, description="Most sequences that a step computes together.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Most tokens that a step computes.")
    long_prefill_token_threshold: int | None = Field(None, ge=1, description="Most tokens of one prompt in a step.")
    max_logprobs: int = Field(20, ge=-1, description="Most log-probabilities that a request may ask for.")
    max_choices: int = Field(128, ge=1, description="Most choices (n) for a prompt.")
    max_beams: int = Field(32, ge=1, le=256, description="Widest beam search (n).")
    batch_share: float = Field(1.0, gt=0, le=1, description="Share of the engine that batch requests may fill.")
    tool_parser: str | None = Field(None, description="vLLM's parser of the model's tool calls, such as hermes.")
    allow: tuple[Feature, ...] = Field((), description="What a request may bring: chat_template, prompt_embeds.")
    block_size: int | None = Field(None, ge=1, description="Tokens in a block of the KV cache.")
    kv_cache_gib: float | None = Field(None, gt=0, description="Memory for the KV cache on a CPU, in GiB.")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="Share of a GPU's memory to use.")
    tensor_parallel_size: int | None = Field(None, ge=1, description="GPUs (or groups of cores) that share one engine.")
    cores: int | None = Field(None, ge=1, description="CPU cores of a replica; all that are there, by default.")
    enforce_eager: bool | None = Field(None, description="Run without compiling; the default on a CPU.")
    seed: int = Field(0, description="Seed of requests that have none.")


class InputSettings(Settings):
    """The lines of a run, and by what they are judged."""

    inputs: Annotated[tuple[str, ...], Field(min_length=1)]
    model: str | None = None
    served_names: tuple[str, ...] = ()
    # Folders of adapters, by the name under which requests ask for them.
    adapters: dict[str, str] = {}
    engine: EngineSettings = EngineSettings()
    # What bare bodies are; None: each as it looks.
    endpoint: Endpoint | None = None
    # Fields for the requests that don't have them.
    fill: dict[str, Any] = {}
    # Whether fields that the schema doesn't know are refused.
    strict: bool = False
    # The first lines alone, or so many by chance.
    limit: Annotated[int, Field(ge=1)] | None = None
    sample: Annotated[int, Field(ge=1)] | None = None
    verbose: bool = False


class Prices(Settings):
    """What a run costs. Tokens: by the million; all in one currency, whichever it is."""

    prompt: float = Field(0.0, ge=0, description="A million prompt tokens.")
    completion: float = Field(0.0, ge=0, description="A million answer tokens.")
    cached: float | None = Field(None, ge=0, description="A million prompt tokens found in the cache; as prompt.")
    replica_hour: float = Field(0.0, ge=0, description="An hour of one replica.")


class RunSettings(InputSettings):
    """One run of the batch door."""

    output: str
    replicas: Annotated[int, Field(ge=1)] | None = None
    keep_work: bool = False
    # Whether equal requests that must have the same answer are answered once.
    dedup: bool = True
    # More rows that fail end the run: a number of them, or a share of all. None: however many.
    max_errors: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] | None = None
    # Whether what stands in the output folder is left as it is, and the run begins anew.
    restart: bool = False
    # Whether rows that failed in an engine are tried again.
    retry_errors: bool = False
    # None: nobody asks what it costs.
    prices: Prices | None = None


def parse_engine_settings(pairs: list[str]) -> EngineSettings:
    """Engine settings from `FIELD=VALUE` pairs, as `--engine` takes them.

    Raises UsageError that names the field, what was found, and what is allowed.
    """
    values: dict[str, Any] = dict(_parse_pairs(pairs, "--engine", "max_num_seqs=64"))
    if "allow" in values:
        values["allow"] = tuple(name.strip() for name in values["allow"].split(",") if name.strip())
    return _make(EngineSettings, values, "--engine", "setting")


def parse_max_errors(text: str | None) -> int | float | None:
    """The most rows that may fail, of `--max-errors`: a number, or a share as `5%`. Raises UsageError."""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    is_share = text.strip().endswith("%")
    try:
        if not is_share and number.isdecimal():
            return int(number)
        if is_share and 0 <= float(number) < 100:
            return float(number) / 100
    except ValueError:
        pass
    raise UsageError(f"--max-errors {text}: expected a number of rows, such as 100, or a share below 100%, such as 5%")


def parse_prices(pairs: list[str]) -> Prices | None:
    """Prices from `FIELD=VALUE` pairs, as `--price` takes them; None without any. Raises UsageError."""
    values = _parse_pairs(pairs, "--price", "completion=0.60")
    return _make(Prices, values, "--price", "price") if values else None


def _parse_pairs(pairs: list[str], flag: str, example: str) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{flag} {pair}: expected FIELD=VALUE, such as {flag} {example}")
        values[name.strip()] = value.strip()
    return values


def _make(kind: type[_S], values: Mapping[str, Any], flag: str, noun: str) -> _S:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields)
            raise UsageError(f"{flag} {name}: no such {noun}. There are: {known}") from None
        raise UsageError(f"{flag} {name}={values[name]}: {first['msg'].lower()}") from None
