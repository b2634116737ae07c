"""What a run is going to do: made by plan, carried out by infer, published by write."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from schemas.requests import Tally


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a row group of a spool part, that one replica takes together."""

    part: str
    row_group: int
    # The first of its rows in the row group, and how many they are; of these, the ones that an engine answers.
    start: int
    num_rows: int
    num_requests: int
    # Lower is earlier.
    priority: int
    # The beginning that all its prompts share (`pipelines/prefixes.py`).
    path: bytes
    # In tokens of answers (`pipelines/order.py`); the most tokens of one answer.
    work: float
    longest: int
    # Rows and work of each request in it, as arrays of 32 bits, until it is cut no further.
    rows_each: bytes = b""
    work_each: bytes = b""


@dataclass(slots=True)
class Totals:
    """What the accepted rows come to."""

    num_rows: int = 0
    # Answered by an equal one's answer.
    num_repeated: int = 0
    prompt_tokens: int = 0
    # Of the prompts' tokens: those of repeated rows, and those that the one before in the plan has as well.
    repeated_tokens: int = 0
    shared_tokens: int = 0
    # Most tokens that the answers may have: of all rows, and of those that an engine answers.
    output_tokens: int = 0
    computed_tokens: int = 0
    # In tokens of answers, a prompt's counting for less; nothing of it found in a cache.
    work: float = 0.0

    def add(self, other: Mapping[str, float]) -> None:
        for name, number in other.items():
            setattr(self, name, getattr(self, name) + number)


@dataclass(frozen=True, slots=True)
class Carried:
    """Answers of an earlier run: staged parts (paths below the work folder), what they come to, and for which rows:
    those that have one of these fingerprints (None: none)."""

    parts: tuple[str, ...] = ()
    tally: Tally = field(default_factory=Tally)
    fingerprints: pa.Array | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is going to do, in the order in which it does it."""

    chunks: tuple[Chunk, ...] = ()
    totals: Totals = field(default_factory=Totals)
    # What needs no engine: rows that validation rejects, by reason, with the fields that no schema knows, by name; and
    # answers that are carried over.
    settled: Tally = field(default_factory=Tally)
    # Staged parts that hold these rows.
    settled_parts: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.totals.num_rows + self.settled.num_done
