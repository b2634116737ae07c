"""A request and what becomes of it: the records that pass through the engine's seam."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from schemas.failures import Failure

Endpoint = Literal[
    "/v1/completions",
    "/v1/chat/completions",
    "/external/api/inference/openai/v1/chat/completions",
    "/external/api/inference",
    "/external/api/inference/streaming",
]
Lane = Literal["batch", "online"]


@dataclass(frozen=True, slots=True)
class RunShare:
    """The run that a request belongs to, for an engine that several share. `due`: when it must be done, by
    `time.time()`. `urgency`: by how much its requests are more urgent than they say, since it is late."""

    run: str
    due: float = math.inf
    urgency: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request. `body` is the original JSON text, so that nothing on the way can change it."""

    id: str
    endpoint: Endpoint
    body: str
    share: RunShare | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds that a request spent: waiting for a place, until its first token, in all. None: not known."""

    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a streamed answer. `data`: the JSON object of one server-sent event, as it goes out."""

    data: str


@dataclass(frozen=True, slots=True)
class Streamed:
    """The last event of a request whose answer was sent in chunks, and is whole. `usage`: as in an answer's body."""

    usage: dict[str, Any]
    timing: Timing


@dataclass(frozen=True, slots=True)
class Answered:
    """The last event of a request that was answered. `body` is the response, as the online door sends it.

    `original`: the engine's own answer, where `body` says it in the words of an API that leaves out what it cost.
    """

    body: dict[str, Any]
    timing: Timing
    original: dict[str, Any] | None = None

    @property
    def full(self) -> dict[str, Any]:
        return self.body if self.original is None else self.original

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.full.get("usage") or {}
        return usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that has no answer."""

    failure: Failure


Event = Chunk | Streamed | Answered | Failed


@dataclass(slots=True)
class Tally:
    """Rows and tokens of some part of a run; adds up."""

    num_answered: int = 0
    num_failed: int = 0
    # Of these, the ones that failed for no fault of their own, and may be tried again.
    num_faults: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Rows that were answered by an equal one's answer: of this run, or of an earlier one; and the tokens that nobody
    # computed.
    num_deduplicated: int = 0
    num_carried: int = 0
    deduplicated_tokens: int = 0
    deduplicated_prompt_tokens: int = 0
    # Prompt tokens that were found in the prefix cache.
    cached_tokens: int = 0
    # Of the work that the plan expected, what is done.
    work: float = 0.0
    # Rows that ended at the default of 16 tokens without having asked for a number of tokens.
    num_cut_by_default: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    # Fields of accepted rows of which no schema speaks, by name.
    unknown_fields: dict[str, int] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        """Answer tokens that an engine generated."""
        return self.completion_tokens - self.deduplicated_tokens

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed

    def add(self, other: "Tally") -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.reasons, other.reasons), (self.unknown_fields, other.unknown_fields)):
            for name, number in theirs.items():
                mine[name] = mine.get(name, 0) + number


_NUMBERS = [field.name for field in fields(Tally) if field.type in (int, float)]
