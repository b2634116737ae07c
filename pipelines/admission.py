"""Admission: what enters the engine, and when. One object for an engine, and everything asks it: rows, people, beams.

vLLM takes whatever it is given, preempts no one when its slots are full, and throws computed tokens away when its cache
is: so what would not fit waits here, in the order of `pipelines/waiting.py`. Nothing small slips past the head of a
lane, or something large would wait for ever.

Batch requests may fill a share of the places alone (`batch_share`): the rest stays free for online ones. Where they
give way (`gives_way`) as much stays free besides as people needed lately; and where a person finds no room still, batch
requests are set aside: they leave, and come in again before their equals. For one event loop; not for threads.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from pipelines.waiting import Ask, LaneQueue, Place
from schemas.failures import NotBegun
from schemas.requests import Lane

T = TypeVar("T")

# Output tokens expected of a request, before any has ended.
_FIRST_GUESS = 256
# What people needed at once is remembered for about so long, and so much more than they have now is kept free at most.
_REMEMBERED_S, _MOST_FREE = 30.0, 1 / 8
# How far the newest answer's length moves the estimate, and how far above it a request is expected to go.
_WEIGHT, _MARGIN = 0.05, 1.25


@dataclass(slots=True)
class _Usage:
    """Sequences, and tokens of the cache."""

    num_sequences: int = 0
    num_tokens: int = 0


class _Held:
    """What is in the engine: sequences, tokens that nobody shares, and blocks of prompts, each once however many hold
    it, for as long as one of them does."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: Counter[int] = Counter()
        self._num_own = 0
        self.num_sequences = 0

    def add(self, place: Place) -> None:
        self.num_sequences += place.num_sequences
        self._num_own += place.num_own_tokens
        self._blocks.update(place.held_keys)

    def remove(self, place: Place) -> None:
        self.num_sequences -= place.num_sequences
        self._num_own -= place.num_own_tokens
        _remove(self._blocks, place.held_keys)

    @property
    def num_tokens(self) -> int:
        return self._num_own + len(self._blocks) * self._block_size

    def num_new(self, place: Place) -> int:
        """Tokens by which it grows with a request."""
        return place.num_own_tokens + self._block_size * sum(key not in self._blocks for key in place.held_keys)

    def num_freed(self, place: Place) -> int:
        """Tokens by which it shrinks without one that is in it."""
        return place.num_own_tokens + self._block_size * sum(self._blocks[key] == 1 for key in place.held_keys)


class _Peak:
    """What people had at once lately."""

    def __init__(self, whole: _Usage, clock: Callable[[], float]) -> None:
        self._whole = whole
        self._clock = clock
        self._at = clock()
        self._sequences = self._tokens = 0.0

    def above(self, now: _Held) -> _Usage:
        """How much more it was than now."""
        at = self._clock()
        faded = 0.5 ** ((at - self._at) / _REMEMBERED_S)
        self._at = at
        self._sequences = max(now.num_sequences, self._sequences * faded)
        self._tokens = max(now.num_tokens, self._tokens * faded)
        return _Usage(
            int(min(self._sequences - now.num_sequences, self._whole.num_sequences * _MOST_FREE)),
            int(min(self._tokens - now.num_tokens, self._whole.num_tokens * _MOST_FREE)),
        )


class Admission:
    """Lets requests into an engine of `num_sequences` slots and `num_tokens` tokens of KV cache."""

    def __init__(
        self,
        num_sequences: int,
        num_tokens: int,
        block_size: int,
        batch_share: float = 1.0,
        gives_way: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`batch_share`: share of both that batch requests may fill, above 0 and up to 1. `gives_way`: whether they are
        set aside for people."""
        self._whole = _Usage(num_sequences, num_tokens)
        self._batch = _Usage(max(1, int(num_sequences * batch_share)), max(1, int(num_tokens * batch_share)))
        self._gives_way = gives_way
        self._peak = _Peak(self._whole, clock)
        self._block_size = block_size
        self._all = _Held(block_size)
        self._in_use: dict[Lane, _Held] = {"online": _Held(block_size), "batch": _Held(block_size)}
        self._queues: dict[Lane, LaneQueue] = {"online": LaneQueue(), "batch": LaneQueue()}
        self._batch_places: set[Place] = set()
        self._kinds: Counter[str] = Counter()
        self._expected = float(_FIRST_GUESS)
        self._is_closed = False
        # Batch requests that had to leave, by now.
        self.num_set_aside = 0

    @asynccontextmanager
    async def room(self, ask: Ask, can_leave: bool = False, again: Place | None = None) -> AsyncIterator[Place]:
        """Wait for room, and hold it for the block.

        `can_leave`: whether it can be set aside. `again`: the place from which the request was. Raises NotBegun once
        the admission is closed.
        """
        if self._is_closed:
            raise NotBegun
        queue = self._queues[ask.lane]
        cost = len(ask.prompt_token_ids) + ask.num_sequences * self._answer(ask)
        order = queue.order(ask, cost) if again is None else again.order
        place = Place(ask, order, self._observe, can_leave, self._keys(ask))
        queue.push(place)
        self._let_in()
        try:
            await place.granted
            yield place
        finally:
            granted = place.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._leave(place)
            else:
                # Before its turn: it holds nothing.
                granted.cancel()
            self._let_in()

    def close(self) -> None:
        """Let nothing in any more: NotBegun for what waits, and for what comes. Those inside finish."""
        self._is_closed = True
        for queue in self._queues.values():
            for place in queue.waiting():
                place.granted.set_exception(NotBegun())

    @property
    def num_waiting(self) -> int:
        return sum(1 for queue in self._queues.values() for _ in queue.waiting())

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self._all.num_sequences

    @property
    def num_batch(self) -> int:
        """Those of batch requests."""
        return self._in_use["batch"].num_sequences

    @property
    def batch_budget(self) -> int:
        """So many sequences of batch requests may be in the engine now."""
        return self._most_of_batch().num_sequences

    def _let_in(self) -> None:
        """Grant room while the head of a lane fits. While a person waits for it, nobody else comes in."""
        for lane in ("online", "batch"):
            queue = self._queues[lane]
            while (place := queue.head()) is not None and self._take(place):
                queue.grant(place)
            if lane == "online" and place is not None:
                self._make_room(place)
                return

    def _take(self, place: Place) -> bool:
        """Hold room for a request, if there is."""
        ask, mine = place.ask, self._in_use[place.ask.lane]
        most = self._batch if ask.lane == "batch" else self._whole
        place.num_sequences = min(ask.num_sequences, most.num_sequences)
        tail = len(ask.prompt_token_ids) % self._block_size
        place.num_own_tokens, place.held_keys = place.num_sequences * (tail + self._answer(ask)), place.block_keys
        if self._all.num_new(place) > most.num_tokens:
            # What is larger than all there is comes in when nothing else is: the engine itself says whether it can.
            place.num_own_tokens, place.held_keys = most.num_tokens, []
        free = self._most_of_batch() if ask.lane == "batch" else most
        # One is let in, whatever people have had.
        is_first = mine.num_sequences == 0
        fits = (
            (is_first or mine.num_sequences + place.num_sequences <= free.num_sequences)
            and (is_first or mine.num_tokens + mine.num_new(place) <= free.num_tokens)
            and self.num_running + place.num_sequences <= self._whole.num_sequences
            and self._all.num_tokens + self._all.num_new(place) <= self._whole.num_tokens
            and not (ask.kind is not None and any(kind != ask.kind for kind in self._kinds))
        )
        if not fits:
            return False
        mine.add(place)
        self._all.add(place)
        if ask.kind is not None:
            self._kinds[ask.kind] += 1
        if ask.lane == "batch":
            self._batch_places.add(place)
        return True

    def _most_of_batch(self) -> _Usage:
        """What batch requests may have now."""
        if not self._gives_way:
            return self._batch
        people = self._in_use["online"]
        kept = self._peak.above(people)
        return _Usage(
            min(self._batch.num_sequences, self._whole.num_sequences - people.num_sequences - kept.num_sequences),
            min(self._batch.num_tokens, self._whole.num_tokens - people.num_tokens - kept.num_tokens),
        )

    def _make_room(self, person: Place) -> None:
        """Set batch requests aside for somebody who waits: no more than it takes, and none where all don't do."""
        if not self._gives_way:
            return
        kind = person.ask.kind
        if kind is not None and any(other != kind for other in self._kinds):
            # Those of its own kind and of none may stay.
            for place in self._batch_places:
                if place.ask.kind not in (None, kind):
                    self._send_away(place)
        leaving = [place for place in self._batch_places if place.set_aside.is_set()]
        self._set_aside(
            person.num_sequences + self.num_running - self._whole.num_sequences - _sum_sequences(leaving),
            self._all.num_new(person) + self._all.num_tokens - self._whole.num_tokens - self._sum_freed(leaving),
        )

    def _set_aside(self, num_sequences: int, num_tokens: int) -> None:
        """Free so many slots and tokens, if batch requests hold them: the least urgent and youngest go, for they lose
        least."""
        if num_sequences <= 0 and num_tokens <= 0:
            return
        staying = [place for place in self._batch_places if place.can_leave and not place.set_aside.is_set()]
        if num_sequences > _sum_sequences(staying) or num_tokens > self._sum_freed(staying):
            return
        for place in sorted(staying, key=lambda place: place.order, reverse=True):
            if num_sequences <= 0 and num_tokens <= 0:
                return
            num_sequences, num_tokens = num_sequences - place.num_sequences, num_tokens - self._all.num_freed(place)
            self._send_away(place)

    def _send_away(self, place: Place) -> None:
        if place.can_leave and not place.set_aside.is_set():
            place.set_aside.set()
            self.num_set_aside += 1

    def _leave(self, place: Place) -> None:
        self._in_use[place.ask.lane].remove(place)
        self._all.remove(place)
        self._batch_places.discard(place)
        _remove(self._kinds, [place.ask.kind] if place.ask.kind is not None else [])

    def _sum_freed(self, places: Iterable[Place]) -> int:
        return sum(self._all.num_freed(place) for place in places)

    def _answer(self, ask: Ask) -> int:
        """Tokens that one answer is expected to have."""
        return min(ask.max_tokens, int(self._expected * _MARGIN) + 1)

    def _keys(self, ask: Ask) -> list[int]:
        """A key for each whole block of the prompt, that stands for all tokens up to its end."""
        size, keys, key = self._block_size, [], hash(ask.salt)
        for end in range(size, len(ask.prompt_token_ids) + 1, size):
            key = hash((key, *ask.prompt_token_ids[end - size : end]))
            keys.append(key)
        return keys

    def _observe(self, num_output_tokens: int) -> None:
        self._expected += _WEIGHT * (num_output_tokens - self._expected)


def _sum_sequences(places: Iterable[Place]) -> int:
    return sum(place.num_sequences for place in places)


def _remove(counter: "Counter[T]", keys: Iterable[T]) -> None:
    for key in keys:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
