"""Pacing: how much of an engine's steps batch requests may have, beside people who wait for their tokens.

A request that arrives in the middle of a step waits for the rest of it and then for a step of its own, and each further
token of a stream takes one step: so steps are held to half of the time within which a person is to have a first token,
and to that between two tokens. A step computes a token of each sequence that is in it, and tokens of prompts; of these
batch requests have a budget, which follows what is measured.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

# Of the target, what is measured is to come to: who comes next has a prompt to be computed, too.
_HEADROOM = 0.8
# The budget follows what is measured this often, by the worst since, and changes by so much at most.
_LOOK_S, _GROWTH, _SHRINKING = 0.5, 2.0, 0.5
# Beside people, this is how it grows beyond what has been too much before: they come by chance, and a moment without a
# new one says little.
_CARE = 1.02
# Tokens, until something has been measured: a start that few machines are too slow for.
_FIRST_BUDGET = 64


@dataclass(frozen=True, slots=True)
class Targets:
    """What people are to have: seconds to a first token, from when the engine has the request, and between tokens."""

    first_token_s: float
    inter_token_s: float

    @property
    def step_s(self) -> float:
        return min(self.first_token_s / 2, self.inter_token_s)


class Pacer:
    """How many tokens of batch requests a step may compute now: from 1 to `most`."""

    def __init__(self, targets: Targets, most: int, clock: Callable[[], float] = monotonic) -> None:
        self._targets = targets
        self._most = most
        self._clock = clock
        self._looked = clock()
        # The worst that was measured since, as a share of its target, and tokens of batch requests in the steps then.
        self._worst, self._used = 0.0, 0
        self._was_short = False
        # Beyond this it was too much lately.
        self._ceiling = math.inf
        self._budget = float(min(most, _FIRST_BUDGET))

    @property
    def budget(self) -> int:
        return max(1, int(self._budget))

    def step(self, seconds: float, used: int, has_people: bool) -> bool:
        """A step took so long, with so many tokens of batch requests in it. True once after each time that the budget
        was looked at."""
        self._measure(seconds / self._targets.step_s, used)
        return self._follow(has_people)

    def first_token(self, seconds: float, used: int) -> None:
        """A person had a first token after so long."""
        self._measure(seconds / self._targets.first_token_s, used)

    def short(self) -> None:
        """A batch request waits for want of budget alone. One that isn't used up says nothing about a larger one."""
        self._was_short = True

    def _measure(self, share: float, used: int) -> None:
        if share > self._worst:
            self._worst, self._used = share, used

    def _follow(self, has_people: bool) -> bool:
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return False
        # What was used and not what might have been: those that are in stay in when the budget shrinks, and their steps
        # say what they said before.
        if self._worst > 0 and self._used > 0:
            wanted = self._used * max(_SHRINKING, min(_GROWTH, _HEADROOM / self._worst))
            if wanted < self._used:
                self._budget = self._ceiling = wanted
            elif self._was_short:
                careful = max(self._ceiling, self._budget) * _CARE if has_people else math.inf
                self._budget = min(wanted, careful)
                self._ceiling = max(self._ceiling, self._budget)
            self._budget = max(1.0, min(self._most, self._budget))
        self._looked, self._worst, self._used, self._was_short = now, 0.0, 0, False
        return True
