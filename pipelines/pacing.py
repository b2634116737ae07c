"""Pacing: how much of each step of an engine batch requests may have, beside people who wait for their tokens.

A request that arrives in the middle of a step waits for the rest of it and then for a step of its own, and each further
token of a stream takes one step. So no step may take longer than half of the time within which a person is to have a
first token, nor, while somebody reads along, than that between two tokens. How long a step takes is foretold from what
is to be computed in it, learnt from the steps before; people's tokens are in it in any case, and batch requests fill up
what is left.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

# Steps that the foretelling is learnt from, and how often it is learnt anew.
_MANY_STEPS, _LEARN_EVERY = 256, 16
# How much is held of what the steps don't tell, against one of them.
_PRIOR = 0.3
# Tokens of a step before anything has been measured, and how far beyond the largest step so far one may go.
_FIRST_TOKENS, _GROWTH = 64, 2
# Of a target, what is aimed at: this at first and at least. What comes late tightens it at once, and what is in time
# loosens it, so slowly that the two are even where so many come in time.
_FIRST_AIM, _LEAST_AIM = 0.9, 0.5
_TIGHTER, _IN_TIME = 0.04, 0.995
# A prompt is computed in pieces of so many tokens at least, or nearly every step would have a few of one.
_PIECE = 16


@dataclass(frozen=True, slots=True)
class Targets:
    """What people are to have: seconds to a first token, from when the engine has the request, and between tokens."""

    first_token_s: float
    inter_token_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes: tokens of answers, and of prompts."""

    num_answer: int = 0
    num_prompt: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_answer + self.num_prompt


class StepTimes:
    """How long a step takes by its load, learnt from those that were measured: something for the step itself, for each
    token of an answer and for each of a prompt."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Load, float]] = deque(maxlen=_MANY_STEPS)
        self._num_since = 0
        self.step_s = self.answer_s = self.prompt_s = 0.0

    def learn(self, load: Load, seconds: float) -> None:
        self._seen.append((load, seconds))
        self._num_since += 1
        if self._num_since < min(_LEARN_EVERY, len(self._seen)):
            return
        self._num_since = 0
        loads = np.array([(1.0, load.num_answer, load.num_prompt) for load, _ in self._seen])
        measured = np.array([seconds for _, seconds in self._seen])
        # Of a long step and a short one the same share of error counts the same.
        equations, ones = loads / measured[:, None], np.ones(len(measured))
        # What the steps don't tell apart: then tokens of both kinds are held to cost the same, and the step nothing.
        tokens_per_s = loads[:, 1:].sum() / measured.sum()
        unless_known = [(0.0, _PRIOR * tokens_per_s, -_PRIOR * tokens_per_s), (_PRIOR / measured.mean(), 0.0, 0.0)]
        parts, _ = nnls(np.vstack((equations, unless_known)), np.append(ones, (0.0, 0.0)))
        self.step_s, self.answer_s, self.prompt_s = map(float, parts)

    @property
    def largest(self) -> int:
        """Most tokens of a step that was measured lately."""
        return max((load.num_tokens for load, _ in self._seen), default=0)

    def seconds(self, load: Load) -> float:
        return self.step_s + load.num_answer * self.answer_s + load.num_prompt * self.prompt_s


class _Aim:
    """The share of a target that is aimed at."""

    def __init__(self) -> None:
        self.share = _FIRST_AIM

    def see(self, is_late: bool) -> None:
        changed = 1 - _TIGHTER if is_late else 1 + _TIGHTER * (1 - _IN_TIME) / _IN_TIME
        self.share = min(1.0, max(_LEAST_AIM, self.share * changed))


class Pacer:
    """What batch requests may have of the next step."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._times = StepTimes()
        self._first, self._between = _Aim(), _Aim()

    def limit_s(self, has_people: bool) -> float:
        """The longest that the next step may take."""
        first = self._first.share * self._targets.first_token_s / 2
        return min(first, self._between.share * self._targets.inter_token_s) if has_people else first

    def room(self, people: Load, num_answers: int, has_people: bool) -> Load:
        """What there is for batch requests in a step that has that of people, `num_answers` of them waiting for their
        next tokens: those first, for what is done leaves. One of them always goes on, or a piece of one's prompt: they
        don't starve where people alone take too long."""
        times = self._times
        left = self.limit_s(has_people) - times.seconds(people)
        most = max(_FIRST_TOKENS, _GROWTH * times.largest) - people.num_tokens
        num_answer = min(num_answers, max(1, _fit(left, times.answer_s, most)))
        left -= num_answer * times.answer_s
        num_prompt = _fit(left, times.prompt_s, most - num_answer)
        if num_prompt < _PIECE:
            num_prompt = 0 if num_answer else _PIECE
        return Load(num_answer, num_prompt)

    def stepped(self, load: Load, of_batch: Load, has_people: bool, seconds: float) -> None:
        """A step with `load` in it, of which `of_batch` was for batch requests, took so long."""
        self._times.learn(load, seconds)
        # What is late without them is not theirs to mend.
        if has_people and of_batch.num_tokens > 1:
            self._between.see(seconds > self._targets.inter_token_s)

    def first_token(self, seconds: float) -> None:
        """A person who came into steps with batch requests had a first token after so long."""
        self._first.see(seconds > self._targets.first_token_s)


def _fit(seconds: float, each_s: float, most: int) -> int:
    if seconds <= 0 or most <= 0:
        return 0
    return most if each_s * most <= seconds else int(seconds / each_s)
