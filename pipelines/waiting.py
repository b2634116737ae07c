"""Who waits before an engine, and in which order.

Lower priorities go first; at one priority, runs that must be done earlier; those then take turns by tokens; and what is
equal goes by age. Every sixteenth place of a lane goes to whoever has waited longest there, so that nobody waits for
ever behind urgent ones.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from schemas.requests import Lane

# Of a lane's places, one in so many goes to the longest waiting.
OLDEST_EVERY = 16
# Runs whose turns are kept before those that wait for none are forgotten.
_MANY_RUNS = 64

# Priority, when its run must be done, its run's turn, and its age.
Order = tuple[int, float, float, int]


@dataclass(frozen=True, slots=True)
class Ask:
    """Room for one prompt's answers."""

    lane: Lane
    # Lower is earlier.
    priority: int
    # Sequences that are computed at once: choices, or beams.
    num_sequences: int
    prompt_token_ids: Sequence[int]
    # Most tokens of each answer.
    max_tokens: int
    # What can't be computed in one step with another kind; None goes with all.
    kind: str | None = None
    # Prompts that share no cache though they are equal differ in this.
    salt: str = ""
    # Of which run it is, and when that must be done, by `time.time()`.
    run: str = ""
    due: float = math.inf


@dataclass(slots=True, eq=False)
class Place:
    """One prompt's place in the engine, or before it."""

    ask: Ask
    # Who comes first: by priority, when its run must be done, its run's turn, and age. Kept by who is set aside.
    order: Order
    # To be told each answer's length, for the estimate.
    observe: Callable[[int], None]
    # Whether it can be set aside.
    can_leave: bool
    block_keys: list[int]
    granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # Set when a batch request is to leave, and to ask again.
    set_aside: asyncio.Event = field(default_factory=asyncio.Event)
    # Held while in the engine; tokens of its KV cache.
    num_sequences: int = 0
    num_own_tokens: int = 0
    held_keys: list[int] = field(default_factory=list)


class _Turns:
    """Turns of runs that share an engine: each has one as late as it has had much (start-time fair queueing)."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}

    def draw(self, run: str, cost: float) -> float:
        turn = max(self._now, self._next.get(run, 0.0))
        self._next[run] = turn + cost
        return turn

    def granted(self, turn: float) -> None:
        self._now = max(self._now, turn)
        if len(self._next) > _MANY_RUNS:
            self._next = {run: turn for run, turn in self._next.items() if turn > self._now}


@dataclass(slots=True)
class LaneQueue:
    """Who waits in one lane: in order, and by age alone."""

    in_order: list[tuple[Order, Place]] = field(default_factory=list)
    by_age: list[tuple[int, Place]] = field(default_factory=list)
    num_granted: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    turns: _Turns = field(default_factory=_Turns)

    def waiting(self) -> Iterator[Place]:
        return (place for _, place in self.in_order if not place.granted.done())

    def push(self, place: Place) -> None:
        heapq.heappush(self.in_order, (place.order, place))
        heapq.heappush(self.by_age, (place.order[-1], place))

    def order(self, ask: Ask, cost: float) -> Order:
        """The order of one that asks now for so many tokens."""
        return ask.priority, ask.due, self.turns.draw(ask.run, cost), next(self._numbers)

    def grant(self, place: Place) -> None:
        self.num_granted += 1
        self.turns.granted(place.order[2])
        place.granted.set_result(None)

    def head(self) -> Place | None:
        """Who is next; those that were let in, or left, by the other order are dropped on the way."""
        while self.in_order and self.in_order[0][-1].granted.done():
            heapq.heappop(self.in_order)
        while self.by_age and self.by_age[0][-1].granted.done():
            heapq.heappop(self.by_age)
        if not self.in_order:
            return None
        is_oldests_turn = self.num_granted % OLDEST_EVERY == OLDEST_EVERY - 1
        return self.by_age[0][-1] if is_oldests_turn else self.in_order[0][-1]
