"""What a run is going to do: made by plan, carried out by infer, published by write."""

from dataclasses import dataclass, field

from schemas.requests import Tally


@dataclass(frozen=True, slots=True)
class Chunk:
    """The requests of one row group of a spool part."""

    number: int
    part: str
    row_group: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Part:
    """One block of the input: its chunks of requests, and the file of its rejections where it has any."""

    name: str
    chunks: tuple[Chunk, ...]
    num_rejections: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is going to do, in input order."""

    parts: tuple[Part, ...]
    # What validation found: rows that failed, by reason, and fields that no schema knows, by name.
    validated: Tally = field(default_factory=Tally)

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for part in self.parts for chunk in part.chunks]

    @property
    def num_requests(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        return self.num_requests + self.validated.num_failed
