"""Settings: frozen, with bounds, checked when made. The same names in flags, in the YAML file, in the environment."""

import re
from collections.abc import Mapping
from datetime import datetime, time, timedelta
from ipaddress import ip_address
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

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
    first_token_ms: int | None = Field(
        None, ge=1, description="Batch requests give way so that people have a first token within so many ms."
    )
    inter_token_ms: int | None = Field(None, ge=1, description="The same of the time between two tokens.")
    tool_parser: str | None = Field(None, description="vLLM's parser of the model's tool calls, such as hermes.")
    reasoning_parser: str | None = Field(None, description="vLLM's parser of the model's thoughts, such as qwen3.")
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
    # The endpoint whose engines answer, as serve:APP; None: engines of the run's own.
    through: Annotated[str, Field(pattern=r"^serve:.+$")] | None = None
    keep_work: bool = False
    # Whether equal requests that must have the same answer are answered once.
    dedup: bool = True
    # More rows that fail end the run: a number of them, or a share of all. None: however many.
    max_errors: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] | None = None
    # Whether what stands in the output folder is left as it is, and the run begins anew.
    restart: bool = False
    # Answers to equal requests are taken over from the published run.
    changed: bool = False
    # Whether rows that failed in an engine are tried again.
    retry_errors: bool = False
    # When it must be done, in seconds since the epoch; it goes on past it. None: whenever it is.
    due: float | None = None
    # None: nobody asks what it costs.
    prices: Prices | None = None
    # What the manifest is to say of the run beside: whose it is, say.
    labels: dict[str, str] = {}


class Autoscaling(Settings):
    """How many replicas, by what there is to do."""

    min_replicas: int = Field(1, ge=1, description="Fewest replicas.")
    max_replicas: int = Field(1, ge=1, description="Most replicas.")
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="Requests that a replica is to have at a time; by default a third of what it takes."
    )

    @model_validator(mode="after")
    def _in_order(self) -> "Autoscaling":
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, fewer than min_replicas, {self.min_replicas}")
        return self


class Bounds(Settings):
    """What a client may ask of the endpoint."""

    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest body of a request.")
    body_timeout_s: float = Field(30.0, gt=0, description="Longest time that a body may take to arrive.")
    max_output_tokens: int = Field(
        65_536, ge=1, description="Most tokens of all answers of one request: prompts times n times max_tokens."
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Longest time of a request; its header may say less.")
    timeout_header: str = Field(
        "X-Request-Timeout", pattern=r"^[A-Za-z][A-Za-z0-9-]{0,63}$", description="Header of a request's own, in s."
    )
    max_ongoing_requests: int | None = Field(
        None, ge=1, description="Requests that an engine takes at a time, half of them runs'; by default three a place."
    )
    max_queued_requests: int = Field(
        256, ge=1, description="Requests that may wait for an engine to take them; the next one is told to come back."
    )
    retry_after_s: int = Field(2, ge=1, description="When one that found the queue full is to come back.")
    most_urgency: int = Field(
        10, ge=0, description="By how much a run that would be late may raise its priority over other runs'."
    )
    most_urgent_priority: int = Field(0, description="Most urgent priority of clients without a key; lower is earlier.")
    token_lifetime_s: int = Field(3600, ge=1, description="How long a bearer token of a user is good.")
    logins_per_minute: int = Field(
        10, ge=1, description="Attempts to log in that a user name has in a minute; an address has three times as many."
    )
    user_cache_s: float = Field(
        5.0,
        ge=0,
        description="How long what was read of a user or key is believed: so long one that was disabled goes on.",
    )


class Key(Settings):
    """An API key, without itself: whose it is, a keyed digest of it, and how urgent its requests may be."""

    role: str = Field(pattern=r"^[\w.@-]{1,64}$")
    digest: str = Field(pattern=r"^[0-9a-f]{32}:[0-9a-f]{64}$")
    most_urgent_priority: int = 0
    requests_per_minute: int = Field(0, ge=0)


RoleName = Literal["online", "batch", "operator"]


class Role(Settings):
    """What users of one kind may."""

    most_urgent_priority: int = Field(description="Most urgent priority of their requests; lower is earlier.")
    requests_per_minute: int = Field(
        ge=0, description="Requests of one user in a minute; 0: as many as there is room for."
    )


# Batch users never go before online ones; operators may go before all.
ROLES: Mapping[RoleName, Role] = MappingProxyType(
    {
        "online": Role(most_urgent_priority=0, requests_per_minute=600),
        "batch": Role(most_urgent_priority=10, requests_per_minute=6_000),
        "operator": Role(most_urgent_priority=-100, requests_per_minute=0),
    }
)


# How an engine that answers online differs: batch requests give way to those that somebody waits for.
ONLINE: Mapping[str, Any] = MappingProxyType({"first_token_ms": 1000, "inter_token_ms": 200})


class ServeSettings(Settings):
    """The endpoint."""

    model: str | None = None
    served_names: tuple[str, ...] = ()
    # Folders of adapters, by the name under which requests ask for them.
    adapters: dict[str, str] = {}
    engine: EngineSettings = EngineSettings(**ONLINE)
    # None: as many as the cluster has room for.
    replicas: Annotated[int, Field(ge=1)] | Autoscaling | None = None
    # Processes that take requests in, check them and pass answers on.
    ingress_replicas: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65_535)
    # Where the routes begin, for an endpoint that shares its host.
    root: str = Field("/", pattern=r"^/$|^(/[\w.~-]+)+$")
    bounds: Bounds = Bounds()
    keys: tuple[Key, ...] = ()
    # Database of users and their keys: a file, or a URL of SQLAlchemy's, which may hold a password.
    users: SecretStr | None = None
    roles: dict[RoleName, Role] = dict(ROLES)
    # Whether clients from elsewhere are answered without a key.
    allow_unauthenticated: bool = False
    # What searches the web for legacy chats, as MODULE:FUNCTION.
    web_search: str | None = None
    # Requests that are under way get so long to end when the endpoint does.
    drain_s: float = Field(60.0, ge=0)
    verbose: bool = False

    @field_validator("engine", mode="before")
    @classmethod
    def _over_defaults(cls, value: Any) -> Any:
        return {**ONLINE, **value} if isinstance(value, Mapping) else value

    @field_validator("roles", mode="before")
    @classmethod
    def _over_default_roles(cls, value: Any) -> Any:
        given = value if isinstance(value, Mapping) else {}
        if value is not given or not all(isinstance(role, Mapping | Role) for role in given.values()):
            return value
        named = {name: role if isinstance(role, Mapping) else role.model_dump() for name, role in given.items()}
        return {**ROLES, **{name: _over_role(name, role) for name, role in named.items()}}

    @property
    def is_guarded(self) -> bool:
        """Whether callers have to say who they are."""
        return bool(self.keys) or self.users is not None

    @model_validator(mode="after")
    def _is_safe(self) -> "ServeSettings":
        if not (is_loopback(self.host) or self.is_guarded or self.allow_unauthenticated):
            raise ValueError(
                f"--host {self.host}: without keys everybody who reaches this address could use the endpoint. "
                "Give users (--users), keys (--keys FILE, or OVERNIGHT_API_KEY), or say --allow-unauthenticated"
            )
        if len({key.role for key in self.keys}) < len(self.keys):
            raise ValueError("--keys: a role is there twice. Give each key a role of its own")
        return self


def _over_role(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    default = next((role.model_dump() for known, role in ROLES.items() if known == name), {})
    return {**default, **given}


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_serve_settings(values: Mapping[str, Any]) -> ServeSettings:
    """Settings of the endpoint. Raises UsageError that names the field, what was found and what is allowed."""
    try:
        return ServeSettings(**values)
    except ValidationError as error:
        # Of alternatives, the one whose own rule speaks is the one that was meant.
        first = next((one for one in error.errors() if one["type"] == "value_error"), error.errors()[0])
        words = first["msg"].removeprefix("Value error, ")
        # A rule of the whole names the flags itself.
        path = ".".join(str(step) for step in first["loc"])
        raise UsageError(
            f"{path}: found {first['input']!r}, {words[0].lower()}{words[1:]}" if path else words
        ) from None


def parse_bounds(pairs: list[str]) -> Bounds:
    """Bounds from `FIELD=VALUE` pairs, as `--bound` takes them. Raises UsageError."""
    return _make(Bounds, _parse_pairs(pairs, "--bound", "max_output_tokens=4096"), "--bound", "bound")


def parse_roles(pairs: list[str]) -> dict[str, Mapping[str, Any]]:
    """What `ROLE.FIELD=VALUE` pairs change of roles, as `--role` takes them. Raises UsageError."""
    example = "online.requests_per_minute=60"
    given: dict[str, dict[str, str]] = {}
    for name, value in _parse_pairs(pairs, "--role", example).items():
        role, dot, field = name.partition(".")
        if not dot:
            raise UsageError(f"--role {name}={value}: expected ROLE.FIELD=VALUE, such as --role {example}")
        if role not in ROLES:
            raise UsageError(f"--role {role}: no such role. There are: {', '.join(ROLES)}")
        given.setdefault(role, {})[field] = value
    return {
        role: _make(Role, _over_role(role, fields), "--role", "field").model_dump() for role, fields in given.items()
    }


def parse_engine_settings(pairs: list[str], defaults: Mapping[str, Any] = MappingProxyType({})) -> EngineSettings:
    """Engine settings from `FIELD=VALUE` pairs, as `--engine` takes them, over some defaults.

    Raises UsageError that names the field, what was found, and what is allowed.
    """
    values: dict[str, Any] = {**defaults, **_parse_pairs(pairs, "--engine", "max_num_seqs=64")}
    if "allow" in values:
        values["allow"] = tuple(name.strip() for name in values["allow"].split(",") if name.strip())
    return _make(EngineSettings, values, "--engine", "setting")


def parse_deadline(text: str | None, now: float) -> float | None:
    """`06:00`, which is the next one by the machine's clock, or a date with a time, in seconds since the epoch. Raises
    UsageError."""
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d\d:\d\d", text):
            today, at = datetime.fromtimestamp(now), time.fromisoformat(text)
            moments = (datetime.combine(today + timedelta(days=days), at).timestamp() for days in (0, 1, 2))
            return next(moment for moment in moments if moment > now)
        moment = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--deadline {text}: expected a time, such as 06:00, or a date with one, such as 2026-01-31T06:00"
        ) from None
    if len(text) <= len("2026-01-31") or moment <= now:
        found = "has no time of day" if len(text) <= len("2026-01-31") else "is past"
        raise UsageError(f"--deadline {text}: it {found}. Give a time that is to come, such as 06:00")
    return moment


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
