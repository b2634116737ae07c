"""Admission: what enters the engine, and when. One object for an engine, and everything asks it: rows, people, beams.

vLLM takes whatever it is given, preempts no one when its slots are full, and throws computed tokens away when its cache
is: so what would not fit waits here, in the order of `pipelines/waiting.py`. Nothing small slips past the head of a
lane, or something large would wait for ever.

Batch requests may fill a share of the places alone (`batch_share`): the rest stays free for online ones. With a pacer
they have a budget of each step besides, which follows the steps as they are measured; and where a person finds no room,
batch requests are set aside: they leave, and come in again before their equals. For one event loop; not for threads.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from pipelines.pacing import Pacer
from pipelines.waiting import Ask, LaneQueue, Place
from schemas.failures import NotBegun
from schemas.requests import Lane

T = TypeVar("T")

# Output tokens expected of a request, before any has ended.
_FIRST_GUESS = 256
# Prompts of batch requests have this share of a step's budget at least.
_PROMPT_SHARE = 0.25
# Where more batch sequences than so many times the budget are in the engine beside people, this share of the excess is
# set aside with each look: the rest has time to finish.
_EXCESS, _EXCESS_SHARE = 1.25, 0.125
# How far the newest answer's length moves the estimate, and how far above it a request is expected to go.
_WEIGHT, _MARGIN = 0.05, 1.25


@dataclass(slots=True)
class _Usage:
    """What is in the engine of one lane."""

    num_sequences: int = 0
    num_tokens: int = 0


class Admission:
    """Lets requests into an engine of `num_sequences` slots and `num_tokens` tokens of KV cache."""

    def __init__(
        self,
        num_sequences: int,
        num_tokens: int,
        block_size: int,
        batch_share: float = 1.0,
        pacer: Pacer | None = None,
        prompt_step_tokens: int = 0,
    ) -> None:
        """`batch_share`: share of both that batch requests may fill, above 0 and up to 1. `prompt_step_tokens`: most
        tokens of one prompt that a step computes."""
        self._whole = _Usage(num_sequences, num_tokens)
        self._batch = _Usage(max(1, int(num_sequences * batch_share)), max(1, int(num_tokens * batch_share)))
        self._pacer = pacer
        self._prompt_step_tokens = prompt_step_tokens
        self._block_size = block_size
        self._in_use: dict[Lane, _Usage] = {"online": _Usage(), "batch": _Usage()}
        self._queues: dict[Lane, LaneQueue] = {"online": LaneQueue(), "batch": LaneQueue()}
        # Those of batch requests, and of them those whose prompts the engine computes.
        self._batch_places: set[Place] = set()
        self._beginning: set[Place] = set()
        self._blocks: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._expected = float(_FIRST_GUESS)
        self._is_closed = False
        # Batch requests that had to leave, by now.
        self.num_set_aside = 0

    @asynccontextmanager
    async def room(
        self, ask: Ask, has_begun: Callable[[], bool] | None = None, again: Place | None = None
    ) -> AsyncIterator[Place]:
        """Wait for room, and hold it for the block.

        `has_begun`: whether the request's prompt is computed, for one that can leave again. `again`: the place from
        which the request was set aside. Raises NotBegun once the admission is closed.
        """
        if self._is_closed:
            raise NotBegun
        queue = self._queues[ask.lane]
        cost = len(ask.prompt_token_ids) + ask.num_sequences * self._answer(ask)
        order = queue.order(ask, cost) if again is None else again.order
        place = Place(ask, order, self._observe, has_begun, self._keys(ask))
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

    def stepped(self, seconds: float | None) -> None:
        """The engine has made a step, which took so long; None: it had been idle before."""
        if self._pacer is None:
            return
        used = self._num_in_steps
        # Their holders know by now.
        self._beginning = {place for place in self._beginning if place.has_begun is not None and not place.has_begun()}
        has_people = self._in_use["online"].num_sequences > 0
        if seconds is not None and self._pacer.step(seconds, used, has_people) and has_people:
            excess = self._in_use["batch"].num_sequences - self._pacer.budget * _EXCESS
            self._set_aside(math.ceil(max(0.0, excess) * _EXCESS_SHARE), 0)
        self._let_in()

    def began(self, place: Place, seconds: float) -> None:
        """A request had its first token so long after it had asked. A prompt that takes several steps says little about
        what else is in them."""
        is_short = len(place.ask.prompt_token_ids) <= self._prompt_step_tokens
        if self._pacer is not None and place.ask.lane == "online" and is_short:
            self._pacer.first_token(seconds, self._num_in_steps)

    @property
    def num_waiting(self) -> int:
        return sum(1 for queue in self._queues.values() for _ in queue.waiting())

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return sum(usage.num_sequences for usage in self._in_use.values())

    @property
    def num_batch(self) -> int:
        """Those of batch requests."""
        return self._in_use["batch"].num_sequences

    @property
    def batch_budget(self) -> int:
        """So many sequences of batch requests may be in the engine now, or tokens of them in a step."""
        return self._batch.num_sequences if self._pacer is None else self._pacer.budget

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
        num_prompt, num_tokens = self._num_tokens(place)
        place.num_prompt_tokens = min(num_prompt, self._prompt_step_tokens)
        # What is larger than all there is comes in when nothing else is: the engine itself says whether it can.
        place.num_tokens = min(num_tokens, most.num_tokens)
        fits = (
            mine.num_sequences + place.num_sequences <= most.num_sequences
            and mine.num_tokens + place.num_tokens <= most.num_tokens
            and self.num_running + place.num_sequences <= self._whole.num_sequences
            and self._num_held + place.num_tokens <= self._whole.num_tokens
            and not (ask.kind is not None and any(kind != ask.kind for kind in self._kinds))
        )
        if not fits or (ask.lane == "batch" and not self._may_begin(place)):
            return False
        mine.num_sequences += place.num_sequences
        mine.num_tokens += place.num_tokens
        self._blocks.update(place.block_keys)
        if ask.kind is not None:
            self._kinds[ask.kind] += 1
        if ask.lane == "batch":
            self._batch_places.add(place)
            if place.has_begun is not None:
                self._beginning.add(place)
        return True

    def _may_begin(self, place: Place) -> bool:
        """Whether the budget has room for the sequences of a batch request, and for its prompt beside others that are
        computed: one is always let in, and prompts have a share whatever is computed beside them."""
        if self._pacer is None:
            return True
        budget, num_sequences = self._pacer.budget, self._in_use["batch"].num_sequences
        num_prompt = sum(other.num_prompt_tokens for other in self._beginning) + place.num_prompt_tokens
        may = num_sequences == 0 or num_sequences + place.num_sequences <= budget
        may = may and (not self._beginning or num_prompt <= max(budget - num_sequences, budget * _PROMPT_SHARE))
        if not may:
            self._pacer.short()
        return may

    @property
    def _num_in_steps(self) -> int:
        """Tokens of batch requests that a step computes."""
        beginning = sum(place.num_prompt_tokens - place.num_sequences for place in self._beginning)
        return self._in_use["batch"].num_sequences + beginning

    def _make_room(self, person: Place) -> None:
        """Set batch requests aside for somebody who waits: no more than it takes, and none where all don't do."""
        if self._pacer is None:
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
            person.num_tokens + self._num_held - self._whole.num_tokens - _sum_tokens(leaving),
        )

    def _set_aside(self, num_sequences: int, num_tokens: int) -> None:
        """Free so many slots and tokens, if batch requests hold them: the least urgent and youngest go, for they lose
        least."""
        if num_sequences <= 0 and num_tokens <= 0:
            return
        staying = [place for place in self._batch_places if place.has_begun and not place.set_aside.is_set()]
        if num_sequences > _sum_sequences(staying) or num_tokens > _sum_tokens(staying):
            return
        for place in sorted(staying, key=lambda place: place.order, reverse=True):
            if num_sequences <= 0 and num_tokens <= 0:
                return
            num_sequences, num_tokens = num_sequences - place.num_sequences, num_tokens - place.num_tokens
            self._send_away(place)

    def _send_away(self, place: Place) -> None:
        if place.has_begun is not None and not place.set_aside.is_set():
            place.set_aside.set()
            self.num_set_aside += 1

    def _leave(self, place: Place) -> None:
        mine = self._in_use[place.ask.lane]
        mine.num_sequences -= place.num_sequences
        mine.num_tokens -= place.num_tokens
        self._batch_places.discard(place)
        self._beginning.discard(place)
        _remove(self._blocks, place.block_keys)
        _remove(self._kinds, [place.ask.kind] if place.ask.kind is not None else [])

    @property
    def _num_held(self) -> int:
        return sum(usage.num_tokens for usage in self._in_use.values())

    def _num_tokens(self, place: Place) -> tuple[int, int]:
        """Tokens of a prompt, and KV tokens that its request is expected to need, beside those that others in the
        engine hold already."""
        ask = place.ask
        num_new = sum(key not in self._blocks for key in place.block_keys) * self._block_size
        tail = len(ask.prompt_token_ids) % self._block_size
        return num_new + tail, num_new + place.num_sequences * (tail + self._answer(ask))

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


def _sum_tokens(places: Iterable[Place]) -> int:
    return sum(place.num_tokens for place in places)


def _remove(counter: "Counter[T]", keys: Iterable[T]) -> None:
    for key in keys:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
