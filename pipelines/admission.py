"""Admission: what enters the engine, and when. One object for an engine, and everything asks it: rows, people, beams.

vLLM takes whatever it is given, preempts no one when its slots are full, and throws computed tokens away when its cache
is: so what would not fit waits here, in order. Lower priorities go first, equal ones by age. Nothing small slips past
the head of a lane, or something large would wait for ever; and every sixteenth place of a lane goes to whoever has
waited longest there, whatever its priority, so that nobody waits for ever behind urgent ones.

Batch requests may fill a share of the places alone (`batch_share`): the rest stays free for online ones, and steps stay
short for them. Lives on one event loop; not for threads.
"""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from schemas.failures import NotBegun
from schemas.requests import Lane

T = TypeVar("T")

# Of a lane's places, one in so many goes to the longest waiting.
OLDEST_EVERY = 16
# Output tokens expected of a request, before any has ended.
_FIRST_GUESS = 256
# How far the newest answer's length moves the estimate, and how far above it a request is expected to go.
_WEIGHT, _MARGIN = 0.05, 1.25


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


@dataclass(slots=True)
class _Usage:
    """What is in the engine of one lane."""

    num_sequences: int = 0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    ask: Ask
    number: int
    block_keys: list[int]
    granted: "asyncio.Future[None]"
    # Held while in the engine: KV tokens.
    num_tokens: int = 0


@dataclass(slots=True)
class _LaneQueue:
    """Who waits in one lane: by priority and age, and by age alone."""

    by_priority: list[tuple[int, int, _Waiting]] = field(default_factory=list)
    by_age: list[tuple[int, _Waiting]] = field(default_factory=list)
    num_granted: int = 0

    def push(self, waiting: _Waiting) -> None:
        heapq.heappush(self.by_priority, (waiting.ask.priority, waiting.number, waiting))
        heapq.heappush(self.by_age, (waiting.number, waiting))

    def head(self) -> _Waiting | None:
        """Who is next; those that were let in, or left, by the other order are dropped on the way."""
        while self.by_priority and self.by_priority[0][-1].granted.done():
            heapq.heappop(self.by_priority)
        while self.by_age and self.by_age[0][-1].granted.done():
            heapq.heappop(self.by_age)
        if not self.by_priority:
            return None
        is_oldests_turn = self.num_granted % OLDEST_EVERY == OLDEST_EVERY - 1
        return self.by_age[0][-1] if is_oldests_turn else self.by_priority[0][-1]


class Admission:
    """Lets requests into an engine of `num_sequences` slots and `num_tokens` tokens of KV cache."""

    def __init__(self, num_sequences: int, num_tokens: int, block_size: int, batch_share: float = 1.0) -> None:
        """`batch_share`: share of both that batch requests may fill, above 0 and up to 1."""
        self._whole = _Usage(num_sequences, num_tokens)
        self._batch = _Usage(max(1, int(num_sequences * batch_share)), max(1, int(num_tokens * batch_share)))
        self._block_size = block_size
        self._in_use: dict[Lane, _Usage] = {"online": _Usage(), "batch": _Usage()}
        self._queues: dict[Lane, _LaneQueue] = {"online": _LaneQueue(), "batch": _LaneQueue()}
        self._blocks: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._expected = float(_FIRST_GUESS)
        self._is_closed = False

    @asynccontextmanager
    async def room(self, ask: Ask) -> AsyncIterator[Callable[[int], None]]:
        """Wait for room, hold it for the block. Call what it gives with each answer's length, for the estimate.

        Raises NotBegun once the admission is closed.
        """
        if self._is_closed:
            raise NotBegun
        keys = self._keys(ask)
        waiting = _Waiting(ask, next(self._numbers), keys, asyncio.get_running_loop().create_future())
        self._queues[ask.lane].push(waiting)
        self._let_in()
        try:
            await waiting.granted
            yield self._observe
        finally:
            granted = waiting.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._leave(waiting)
            else:
                # Before its turn: it holds nothing.
                granted.cancel()
            self._let_in()

    def close(self) -> None:
        """Let nothing in any more: NotBegun for what waits, and for what comes. Those inside finish."""
        self._is_closed = True
        for queue in self._queues.values():
            for _, _, waiting in queue.by_priority:
                if not waiting.granted.done():
                    waiting.granted.set_exception(NotBegun())

    @property
    def num_waiting(self) -> int:
        return sum(not waiting.granted.done() for queue in self._queues.values() for _, _, waiting in queue.by_priority)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return sum(usage.num_sequences for usage in self._in_use.values())

    def _let_in(self) -> None:
        """Grant room while the head of a lane fits; people first."""
        for lane in ("online", "batch"):
            queue = self._queues[lane]
            while (waiting := queue.head()) is not None and self._take(waiting):
                queue.num_granted += 1
                waiting.granted.set_result(None)

    def _take(self, waiting: _Waiting) -> bool:
        """Hold room for a request, if there is."""
        ask, mine = waiting.ask, self._in_use[waiting.ask.lane]
        if ask.kind is not None and any(self._kinds[kind] for kind in self._kinds if kind != ask.kind):
            return False
        most = self._batch if ask.lane == "batch" else self._whole
        num_sequences = self._num_sequences(ask)
        # What is larger than all there is comes in when nothing else is: the engine itself says whether it can.
        num_tokens = min(self._num_tokens(waiting), most.num_tokens)
        num_running = self.num_running
        num_held = sum(usage.num_tokens for usage in self._in_use.values())
        fits = (
            mine.num_sequences + num_sequences <= most.num_sequences
            and mine.num_tokens + num_tokens <= most.num_tokens
            and num_running + num_sequences <= self._whole.num_sequences
            and num_held + num_tokens <= self._whole.num_tokens
        )
        if not fits:
            return False
        waiting.num_tokens = num_tokens
        mine.num_sequences += num_sequences
        mine.num_tokens += num_tokens
        self._blocks.update(waiting.block_keys)
        if ask.kind is not None:
            self._kinds[ask.kind] += 1
        return True

    def _leave(self, waiting: _Waiting) -> None:
        ask, mine = waiting.ask, self._in_use[waiting.ask.lane]
        mine.num_sequences -= self._num_sequences(ask)
        mine.num_tokens -= waiting.num_tokens
        _remove(self._blocks, waiting.block_keys)
        _remove(self._kinds, [ask.kind] if ask.kind is not None else [])

    def _num_sequences(self, ask: Ask) -> int:
        most = self._batch if ask.lane == "batch" else self._whole
        return min(ask.num_sequences, most.num_sequences)

    def _num_tokens(self, waiting: _Waiting) -> int:
        """KV tokens that a request is expected to need, beside those that others in the engine hold already."""
        ask = waiting.ask
        num_new = sum(key not in self._blocks for key in waiting.block_keys)
        tail = len(ask.prompt_token_ids) % self._block_size
        answer = min(ask.max_tokens, int(self._expected * _MARGIN) + 1)
        return num_new * self._block_size + self._num_sequences(ask) * (tail + answer)

    def _keys(self, ask: Ask) -> list[int]:
        """A key for each whole block of the prompt, that stands for all tokens up to its end."""
        size, keys, key = self._block_size, [], hash(ask.salt)
        for end in range(size, len(ask.prompt_token_ids) + 1, size):
            key = hash((key, *ask.prompt_token_ids[end - size : end]))
            keys.append(key)
        return keys

    def _observe(self, num_output_tokens: int) -> None:
        self._expected += _WEIGHT * (num_output_tokens - self._expected)


def _remove(counter: "Counter[T]", keys: Iterable[T]) -> None:
    for key in keys:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
